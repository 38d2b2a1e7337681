from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from asyncrl.config.schema import LearnerConfig, ModelConfig
from asyncrl.errors import CheckpointError
from asyncrl.learner.checkpoint import PROGRESS, Checkpoints, Progress
from asyncrl.learner.optimised import Optimised
from asyncrl.learner.policy import load_policy
from asyncrl.learner.ranks import Ranks
from asyncrl.learner.state import Parts
from tests.learner.support import write_model


def make_parts(model: Path, ranks: Ranks) -> Parts:
    policy = load_policy(ModelConfig(str(model)), 1.0, ranks, 64)
    return {"policy": Optimised(policy, 0.1, LearnerConfig())}


def move(parts: Parts) -> None:
    """One optimiser step with gradients of ones."""
    for parameter in parts["policy"].module.parameters():
        parameter.grad = torch.ones_like(parameter)
    parts["policy"].update(0)


def tensors(parts: Parts) -> list[torch.Tensor]:
    part = parts["policy"]
    moments = [each["exp_avg"] for each in part.optimizer.state.values()]
    return [each.full_tensor().clone() for each in (*part.module.parameters(), *moments)]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_what_was_saved_comes_back_bit_for_bit(model: Path, ranks: Ranks, tmp_path: Path):
    parts = make_parts(model, ranks)
    move(parts)
    progress = Progress(step=2, trajectories=16, tokens=300, updates_empty=1, evaluations={2: 1})
    Checkpoints(tmp_path, 2, ranks).save(progress, parts)
    saved = tensors(parts)
    fresh = make_parts(model, ranks)
    assert Checkpoints(tmp_path, 2, ranks).restore(fresh) == progress
    assert same(tensors(fresh), saved)
    move(fresh)
    move(parts)
    assert same(tensors(fresh), tensors(parts))


def test_without_a_checkpoint_nothing_is_touched(model: Path, ranks: Ranks, tmp_path: Path):
    parts = make_parts(model, ranks)
    assert Checkpoints(tmp_path / "none", 2, ranks).restore(parts) is None
    assert not parts["policy"].optimizer.state


def test_a_half_written_checkpoint_does_not_exist(
    model: Path, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    parts = make_parts(model, ranks)
    checkpoints = Checkpoints(tmp_path, 2, ranks)
    move(parts)
    checkpoints.save(Progress(step=2), parts)
    saved = tensors(parts)

    def killed(*_: object) -> Path:
        raise KeyboardInterrupt

    move(parts)
    with monkeypatch.context() as patched:
        patched.setattr("asyncrl.learner.checkpoint.write_state", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(Progress(step=4), parts)
    unmarked = tmp_path / "step-000006"
    unmarked.mkdir()
    (unmarked / PROGRESS).write_text("{}")
    fresh = make_parts(model, ranks)
    assert checkpoints.restore(fresh) == Progress(step=2)
    assert same(tensors(fresh), saved)
    checkpoints.save(Progress(step=4), parts)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-000002", "step-000004"]


def test_only_the_newest_are_kept(model: Path, ranks: Ranks, tmp_path: Path):
    parts = make_parts(model, ranks)
    checkpoints = Checkpoints(tmp_path, 2, ranks)
    for step in (1, 2, 3):
        checkpoints.save(Progress(step=step), parts)
    assert [each.name for each in checkpoints.complete()] == ["step-000002", "step-000003"]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_checkpoint_of_another_model_is_refused(model: Path, ranks: Ranks, tmp_path: Path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2, ranks)
    checkpoints.save(Progress(step=1), make_parts(model, ranks))
    other = make_parts(write_model(tmp_path / "other", layers=1), ranks)
    with pytest.raises(CheckpointError, match=r"another model.*run\.name"):
        checkpoints.restore(other)


def largest_file(folder: Path) -> Path:
    return max(folder.iterdir(), key=lambda file: file.stat().st_size)


def flip_a_bit(folder: Path) -> None:
    file = largest_file(folder)
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)


def truncate(folder: Path) -> None:
    with largest_file(folder).open("r+b") as file:
        file.truncate(100)


def fail_to_read(file: Path) -> None:
    """Have reads fail as on a broken disk, for whoever reads."""
    file.unlink()
    file.mkdir()


DAMAGE = {
    "a flipped bit": flip_a_bit,
    "a truncated file": truncate,
    "a file that is gone": lambda folder: largest_file(folder).unlink(),
    "progress that is no JSON": lambda folder: (folder / PROGRESS).write_text("{"),
    "a seal that the disk does not give back": lambda folder: fail_to_read(next(folder.glob("seal-*"))),
    "a seal that is no JSON": lambda folder: next(folder.glob("seal-*")).write_text("{"),
    "a seal that is no seal": lambda folder: next(folder.glob("seal-*")).write_text("[1]"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_resumed_from(
    model: Path, ranks: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
):
    parts = make_parts(model, ranks)
    checkpoints = Checkpoints(tmp_path, 2, ranks)
    checkpoints.save(Progress(step=2), parts)
    saved = tensors(parts)
    move(parts)
    checkpoints.save(Progress(step=4), parts)
    DAMAGE[damage](tmp_path / "step-000004")
    fresh = make_parts(model, ranks)
    assert checkpoints.restore(fresh) == Progress(step=2)
    assert same(tensors(fresh), saved)
    assert "step-000004 is damaged: " in caplog.text
    assert [each.name for each in checkpoints.complete()] == ["step-000002"]
    checkpoints.save(Progress(step=4), parts)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-000002", "step-000004"]


def test_where_every_checkpoint_is_damaged_nothing_begins_anew_by_itself(model: Path, ranks: Ranks, tmp_path: Path):
    parts = make_parts(model, ranks)
    checkpoints = Checkpoints(tmp_path, 2, ranks)
    for step in (2, 4):
        checkpoints.save(Progress(step=step), parts)
        flip_a_bit(tmp_path / f"step-{step:06d}")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged: restore one from a copy"):
            checkpoints.restore(parts)


def test_the_oldest_checkpoint_that_is_kept_says_what_may_be_forgotten(model: Path, ranks: Ranks, tmp_path: Path):
    """Until enough are there, a run can also be resumed from its first weights."""
    parts = make_parts(model, ranks)
    checkpoints = Checkpoints(tmp_path, 2, ranks)
    covered = []
    for step in (3, 6, 9):
        checkpoints.save(Progress(step=step), parts)
        covered.append(checkpoints.covered())
    assert covered == [0, 3, 6]


def test_a_checkpoint_of_an_earlier_format_is_refused_with_what_to_do(model: Path, ranks: Ranks, tmp_path: Path):
    parts = make_parts(model, ranks)
    checkpoints = Checkpoints(tmp_path, 2, ranks)
    checkpoints.save(Progress(step=2), parts)
    [folder] = checkpoints.complete()
    for file in folder.glob("seal-*"):
        file.unlink()
    values = json.loads((folder / PROGRESS).read_text())
    del values["ranks"]
    (folder / PROGRESS).write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="earlier version of asyncrl"):
        checkpoints.restore(parts)
