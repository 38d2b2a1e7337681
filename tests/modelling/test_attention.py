"""Attention over packed sequences."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from asyncrl.modelling.attention import padded_attention


@pytest.mark.parametrize("width", [40, 48])
def test_padding_a_sequence_for_a_faster_kernel_changes_neither_attention_nor_gradients(width: int) -> None:
    torch.manual_seed(0)
    shapes = [(4, 40, 16), (2, 40, 16), (2, 40, 16)]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    plain = [each.detach()[None].clone().requires_grad_() for each in inputs]
    expected = F.scaled_dot_product_attention(*plain, is_causal=True, scale=0.3, enable_gqa=True)[0].transpose(0, 1)
    output = padded_attention(inputs[0], inputs[1], inputs[2], width, 0.3)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)
    weights = torch.randn_like(output)
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    for ours, theirs in zip(inputs, plain, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad[0], atol=1e-5, rtol=0)
