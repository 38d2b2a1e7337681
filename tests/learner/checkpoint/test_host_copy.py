from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from asyncrl.learner.checkpoint.checkpoint import Checkpoints
from asyncrl.learner.checkpoint.progress import Progress
from asyncrl.learner.checkpoint.state import HostCopy
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.machine.host_memory import pages, pinned
from tests.helpers import until
from tests.learner.support import make_models, move

pytestmark = pytest.mark.slow

on_a_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="only copies of a GPU's memory begin before they end"
)

BUSY_CYCLES = 1 << 29
"""A quarter of a second of a GPU."""


@on_a_gpu
def test_a_checkpoint_has_what_kernels_wrote_that_were_only_launched(model: Path, ranks: Ranks, tmp_path: Path):
    models, checkpoints = make_models(model, ranks), Checkpoints(tmp_path, 1, ranks)
    checkpoints.prepare(models)
    torch.cuda.synchronize()
    with torch.no_grad():
        torch.cuda._sleep(BUSY_CYCLES)
        for parameter in models["policy"].module.parameters():
            parameter.fill_(0.25)
    checkpoints.prepare(models)
    checkpoints.save_prepared(Progress(step=1))
    checkpoints.wait()
    fresh = make_models(model, ranks)
    assert checkpoints.restore(fresh) == Progress(step=1)
    assert all(bool((each == 0.25).all()) for each in fresh["policy"].module.parameters())


@on_a_gpu
def test_memory_that_the_driver_refuses_to_pin_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch):
    own = torch.arange(1 << 20, device="cuda")
    first = pinned(own)
    assert first.is_pinned()
    monkeypatch.setattr("asyncrl.machine.host_memory.pages", lambda tensor: first)
    again = pinned(own)  # The driver pins no memory twice.
    again.copy_(own)
    assert torch.equal(again, own.cpu())
    assert bool((own + 1 == torch.arange(1, (1 << 20) + 1, device="cuda")).all())
    assert not pages(own).is_pinned()


def test_memory_for_moments_that_appear_late_is_allocated_before_the_checkpoint(
    model: Path, ranks: Ranks, tmp_path: Path
):
    models, checkpoints = make_models(model, ranks), Checkpoints(tmp_path, 1, ranks)
    copy = checkpoints._copy

    def is_reserved() -> bool:
        checkpoints.prepare(models)
        return copy._buffers.keys() == copy._parts.keys()

    until(is_reserved)
    count = len(copy._parts)
    move(models)
    until(is_reserved)
    assert len(copy._buffers) > count


def test_no_driver_is_said_to_refuse_memory_for_what_is_in_host_memory_already(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    copy = HostCopy(torch.device("cuda"))
    copy._parts = {"policy/moments/exp_avg/weight": torch.ones(4)}
    copy._reserve()
    assert caplog.messages == []
