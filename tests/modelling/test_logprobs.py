from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.modelling.logprobs import collision_probabilities, token_logprobs

TOKENS, WIDTH, VOCABULARY, TEMPERATURE = 19, 5, 11, 0.7


def made(dtype: torch.dtype, bias: bool = True) -> tuple[Tensor, torch.nn.Linear, Tensor]:
    torch.manual_seed(0)
    head = torch.nn.Linear(WIDTH, VOCABULARY, dtype=dtype, bias=bias)
    return torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True), head, torch.arange(TOKENS) % VOCABULARY


def plain(hidden: Tensor, head: torch.nn.Linear, targets: Tensor) -> tuple[Tensor, Tensor]:
    rows = (head(hidden) / TEMPERATURE).log_softmax(-1)
    return rows.gather(1, targets[:, None])[:, 0], -(rows.exp() * rows).sum(-1)


@pytest.mark.parametrize(
    ("chunk_logits", "compiled"),
    [
        *((limit, False) for limit in (1, 7 * VOCABULARY, None)),
        pytest.param(7 * VOCABULARY, True, marks=pytest.mark.heavy),
        *(pytest.param(limit, True, marks=pytest.mark.long) for limit in (1, None)),
    ],
)
def test_chunks_give_the_log_probs_entropies_and_gradients_of_all_logits_at_once(
    chunk_logits: int | None, compiled: bool
):
    hidden, head, targets = made(torch.float32)

    def gradients(logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, ...]:
        loss = (logprobs * torch.arange(TOKENS) + 0.3 * entropy).sum()
        return torch.autograd.grad(loss, (hidden, *head.parameters()))

    expected = plain(hidden, head, targets)
    got = token_logprobs(hidden, targets, head, TEMPERATURE, True, compiled, chunk_logits)
    assert got[1] is not None
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients(*got), gradients(*expected), atol=1e-5, rtol=1e-5)
    alone, nothing = token_logprobs(hidden, targets, head, TEMPERATURE, False, compiled, chunk_logits)
    assert nothing is None
    torch.testing.assert_close(
        torch.autograd.grad(alone.sum(), hidden), torch.autograd.grad(plain(hidden, head, targets)[0].sum(), hidden)
    )


@pytest.mark.parametrize("cap", [None, 0.5])
@pytest.mark.parametrize("chunk_logits", [1, 7 * VOCABULARY, None])
def test_measured_entropies_change_no_bit_of_the_log_probs_and_their_gradients(
    chunk_logits: int | None, cap: float | None
):
    hidden, head, targets = made(torch.float32)
    measured = torch.tensor([0, 1, 6, 7, 18])

    def computed(with_entropy: bool, sample: Tensor | None) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        logprobs, entropies = token_logprobs(
            hidden, targets, head, TEMPERATURE, with_entropy, False, chunk_logits, cap, sample
        )
        loss = (logprobs * torch.arange(TOKENS)).sum()
        return logprobs.detach(), entropies, torch.autograd.grad(loss, (hidden, *head.parameters()))

    (alone, nothing, plain_gradients), (ours, sampled, gradients) = computed(False, None), computed(False, measured)
    _, full, _ = computed(True, None)
    assert nothing is None
    assert sampled is not None
    assert full is not None
    assert not sampled.requires_grad
    assert torch.equal(ours, alone)
    assert all(map(torch.equal, gradients, plain_gradients))
    torch.testing.assert_close(sampled[measured], full[measured].detach())
    assert sampled.count_nonzero() == len(measured)


@pytest.mark.parametrize("cap", [None, 0.5])
def test_the_probability_that_two_draws_are_the_same_is_summed_in_chunks(cap: float | None):
    hidden, head, _ = made(torch.float64)
    logits = head(hidden).tolist()
    expected = []
    for row in logits:
        weights = [math.exp((z if cap is None else cap * math.tanh(z / cap)) / TEMPERATURE) for z in row]
        expected.append(sum(weight**2 for weight in weights) / sum(weights) ** 2)
    found = collision_probabilities(hidden, head, TEMPERATURE, 4 * VOCABULARY, cap)
    assert found.tolist() == pytest.approx(expected)
    assert not found.requires_grad


@pytest.mark.slow
@pytest.mark.parametrize(("bias", "cap"), [(False, None), (True, None), (True, 0.5)])
def test_its_gradients_are_those_of_finite_differences(bias: bool, cap: float | None):
    hidden, head, targets = made(torch.float64, bias)

    def function(states: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return tuple(token_logprobs(states, targets, head, TEMPERATURE, True, chunk_logits=4 * VOCABULARY, cap=cap))

    assert torch.autograd.gradcheck(function, (hidden, *head.parameters()))


def test_the_gradient_of_a_half_precision_head_is_summed_in_float32():
    torch.manual_seed(0)
    head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.bfloat16)
    hidden, targets = torch.ones(4096, WIDTH, dtype=torch.bfloat16), torch.zeros(4096, dtype=torch.int64)
    token_logprobs(hidden, targets, head, 1.0, False, chunk_logits=8 * VOCABULARY)[0].sum().backward()
    exact = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
    exact.load_state_dict(head.state_dict())
    plain_sum = torch.log_softmax(exact(hidden.float()), -1)[:, 0].sum()
    (expected,) = torch.autograd.grad(plain_sum, exact.weight)
    # Summed in bfloat16, 512 chunks of the same size would stick at a fraction of it.
    torch.testing.assert_close(head.weight.grad.float(), expected, rtol=2e-2, atol=1.0)


def test_compiled_functions_get_tensors_of_one_device_only(monkeypatch: pytest.MonkeyPatch):
    """Tensors without data stand for those of a GPU. A kernel of a GPU cannot read a tensor of the host."""
    seen: list[Any] = []

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any) -> Any:
            seen.extend(given)
            return function(*given)

        return called

    monkeypatch.setattr("asyncrl.modelling.logprobs._compiled", recorded)
    with torch.device("meta"):
        hidden = torch.zeros(5, 4, requires_grad=True)
        head, targets = torch.nn.Linear(4, 7), torch.zeros(5, dtype=torch.int64)
    logprobs, _ = token_logprobs(hidden, targets, head, 0.8, with_entropy=True, compiled=True, chunk_logits=14)
    logprobs.sum().backward()
    assert {each.device.type for each in seen if isinstance(each, Tensor)} == {"meta"}
