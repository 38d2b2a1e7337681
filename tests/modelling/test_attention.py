"""Attention over packed sequences: the operator that compiled layers and GPUs use equals plain attention."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType

import pytest
import torch
from torch import Tensor

from asyncrl.modelling.cudnn_attention import Problem, find_kernel
from asyncrl.modelling.packed_attention import attend
from asyncrl.modelling.packed_layout import PackedLayout

# Of each sequence, the tokens that are queries and those that are keys.
Sides = list[tuple[int, int]]


def alone(*lengths: int) -> Sides:
    return [(length, length) for length in lengths]


def plain(given: list[Tensor], sides: Sides, window: int | None, softcap: float | None = None) -> Tensor:
    """Attention in float64 with a mask for each sequence, of query, key, value and perhaps sinks."""
    queries, keys = zip(*sides, strict=True)
    splits = zip(given[:3], (queries, keys, keys), strict=True)
    parts = []
    for q, k, v in zip(*(each.double().split(lengths) for each, lengths in splits), strict=True):
        at = torch.arange(len(k), device=q.device)
        distance = at[len(k) - len(q) :, None] - at
        seen = (distance >= 0) & (distance < (window or len(k)))
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * 0.3
        scores = scores if softcap is None else softcap * (scores / softcap).tanh()
        scores = scores.masked_fill(~seen, -torch.inf)
        columns = [each.double()[:, None, None].expand(-1, len(q), 1) for each in given[3:]]
        shares = torch.cat([scores, *columns], -1).softmax(-1)[..., : len(k)]
        parts.append(torch.einsum("hqk,khd->qhd", shares, v))
    return torch.cat(parts)


def errors(
    sides: Sides,
    padding: int,
    window: int | None,
    dtype: torch.dtype,
    device: str,
    softcap: float | None = None,
    with_sinks: bool = False,
) -> list[float]:
    """The relative errors of the output and the gradients. The padding must get 0."""
    queries, keys = zip(*sides, strict=True)
    layout = PackedLayout.of(queries, keys).to(torch.device(device))
    generator, width = torch.Generator().manual_seed(0), 16 if device == "cpu" else 128
    ends = [sum(queries), sum(keys), sum(keys)]
    shapes = [(end + padding, heads, width) for end, heads in zip(ends, (4, 2, 2), strict=True)]
    given = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]
    sinks = torch.randn(4, generator=generator).to(device, dtype).requires_grad_() if with_sinks else None
    where = layout.bounds, layout.ends, layout.paths
    output, _ = attend(given[0], given[1], given[2], *where, 0.3, window, softcap, sinks)
    weights = torch.randn(output.shape, generator=generator).to(output)
    if sinks is not None:
        given, ends = [*given, sinks], [*ends, 4]
    ours = [output, *torch.autograd.grad((output * weights).sum(), given)]
    ends = [ends[0], *ends]
    assert not any(each[end:].any() for each, end in zip(ours, ends, strict=True))
    expected = plain([each[:end] for each, end in zip(given, ends[1:], strict=True)], sides, window, softcap)
    theirs = [expected, *torch.autograd.grad((expected * weights[: ends[0]]).sum(), given)]
    return [
        float(((a[:end] - b[:end]).norm() / b.norm()).detach()) for a, b, end in zip(ours, theirs, ends, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 7, 600])
def test_the_operator_is_plain_attention_of_each_sequence(window: int | None) -> None:
    # Of several blocks of queries, which begin and end anywhere.
    sides = [*alone(5, 1), (200, 800), (750, 800), *alone(40), (3, 9)]
    for softcap, with_sinks in ((None, False), (2.0, False), (None, True), (2.0, True)):
        assert max(errors(sides, 9, window, torch.float32, "cpu", softcap, with_sinks)) < 1e-5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="these kernels need a GPU")
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize(
    "sides",
    [
        alone(5, 1300, 1301, 40, 7),
        alone(2048, 2048, 2048),
        alone(1500),
        [*alone(900), (30, 400), (3, 5), (200, 3000)],
        [*alone(1024, 1024, 3, 5000), (1025, 1300), (1024, 1024), (4200, 5000)],
    ],
)
def test_the_kernels_for_gpus_are_plain_attention_to_half_precision(sides: Sides, window: int | None) -> None:
    for padding in (0, 77, 900):
        assert max(errors(sides, padding, window, torch.bfloat16, "cuda")) < 0.01
    for softcap, with_sinks in ((2.0, False), (None, True)):
        assert max(errors(sides, 77, window, torch.bfloat16, "cuda", softcap, with_sinks)) < 0.015


def test_keys_on_paths_are_those_rows_of_the_keys_and_gather_their_gradients() -> None:
    paths = torch.tensor([0, 1, 2, 0, 1, 3, 4, 0, 5])
    layout = PackedLayout.of([3, 2, 1], [3, 4, 2], paths)
    given = [torch.randn(7, 2, 8, dtype=torch.float64).requires_grad_() for _ in range(3)]
    ours, _ = attend(given[0], given[1], given[2], layout.bounds, layout.ends, paths, None, None)
    rows = given[1][paths], given[2][paths]
    without = PackedLayout.of([3, 2, 1], [3, 4, 2]).paths
    theirs, _ = attend(given[0], rows[0], rows[1], layout.bounds, layout.ends, without, None, None)
    torch.testing.assert_close(ours, theirs)
    weights = torch.randn_like(ours)
    for left, right in zip(
        torch.autograd.grad((ours * weights).sum(), given),
        torch.autograd.grad((theirs * weights).sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(left, right)


def test_a_cudnn_package_of_another_version_gives_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", ModuleType("cudnn"))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    sizes = {"sequences": 1, "queries": 8, "keys": 8, "tokens": 8, "heads": 1, "kv_heads": 1, "width": 8}
    problem = Problem(device=0, dtype=torch.bfloat16, scaling=1.0, window=None, **sizes)
    assert find_kernel(problem, backward=False) is None
