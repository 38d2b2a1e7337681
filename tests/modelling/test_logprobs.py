from __future__ import annotations

import pytest
import torch

from asyncrl.modelling.logprobs import token_logprobs


@pytest.mark.parametrize("chunk_logits", [1, 7 * 11, 1 << 26])
def test_chunks_give_the_log_probs_entropies_and_gradients_of_all_logits_at_once(chunk_logits: int):
    torch.manual_seed(0)
    hidden, head = torch.randn(19, 5, dtype=torch.float64), torch.nn.Linear(5, 11, dtype=torch.float64)
    targets = torch.randint(0, 11, (19,))

    def gradients(logprobs: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad((logprobs * torch.arange(19) + entropy).sum(), (hidden, *head.parameters()))

    hidden.requires_grad_()
    rows = (head(hidden).float() / 0.7).log_softmax(-1)
    expected = rows.gather(1, targets[:, None])[:, 0], -(rows.exp() * rows).sum(-1)
    got = token_logprobs(hidden, targets, head, 11, 0.7, with_entropy=True, chunk_logits=chunk_logits)
    assert got[1] is not None
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(gradients(*got), gradients(*expected), rtol=1e-4, atol=1e-5)
