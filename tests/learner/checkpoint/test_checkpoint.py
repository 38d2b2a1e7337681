from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from asyncrl.errors import CheckpointError
from asyncrl.learner.checkpoint.checkpoint import Checkpoints
from asyncrl.learner.checkpoint.files import COMPLETE, PROGRESS, CheckpointFiles
from asyncrl.learner.checkpoint.progress import Progress
from asyncrl.learner.checkpoint.state import Models
from asyncrl.learner.ranks.ranks import Ranks
from tests.helpers import until
from tests.learner.support import flip_a_bit, largest_file, make_models, move, save_whole, write_model

pytestmark = pytest.mark.slow


def tensors(models: Models) -> list[torch.Tensor]:
    policy = models["policy"]
    moments = [each["exp_avg"] for each in policy.moments().values()]
    return [each.full_tensor().clone() for each in (*policy.module.parameters(), *moments)]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_what_was_saved_comes_back_bit_for_bit(model: Path, ranks: Ranks, tmp_path: Path):
    models = make_models(model, ranks)
    move(models)
    progress = Progress(step=2, trajectories=16, tokens=300, updates_empty=1, evaluations={2: 1})
    save_whole(Checkpoints(tmp_path, 2, ranks), progress, models)
    saved = tensors(models)
    fresh = make_models(model, ranks)
    assert Checkpoints(tmp_path / "none", 2, ranks).restore(fresh) is None
    assert not fresh["policy"].moments()
    assert Checkpoints(tmp_path, 2, ranks).restore(fresh) == progress
    assert same(tensors(fresh), saved)
    move(fresh)
    move(models)
    assert same(tensors(fresh), tensors(models))


def test_a_step_after_the_copy_changes_nothing_that_is_written(model: Path, ranks: Ranks, tmp_path: Path):
    models, checkpoints = make_models(model, ranks), Checkpoints(tmp_path, 2, ranks)
    for step in (1, 2):
        move(models)
        saved = tensors(models)
        checkpoints.save(Progress(step=step), models)
        move(models)
        checkpoints.wait()
        assert (checkpoints.completed(), checkpoints.completed()) == (step, 0)
        fresh = make_models(model, ranks)
        assert checkpoints.restore(fresh) == Progress(step=step)
        assert same(tensors(fresh), saved)


def test_a_checkpoint_that_cannot_be_written_fails_where_it_is_waited_for_and_the_one_before_it_stays(
    model: Path, ranks: Ranks, tmp_path: Path
):
    models, checkpoints = make_models(model, ranks), Checkpoints(tmp_path, 2, ranks)
    save_whole(checkpoints, Progress(step=1), models)
    (tmp_path / "step-000002").write_text("a file where the folder should be")
    checkpoints.save(Progress(step=2), models)
    with pytest.raises(NotADirectoryError):
        checkpoints.wait()
    assert not list(tmp_path.glob(".tmp-*"))
    assert Checkpoints(tmp_path, 2, ranks).restore(models) == Progress(step=1)


def test_an_old_checkpoint_whose_removal_is_interrupted_is_none_any_more_and_is_removed_later(
    model: Path, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    remove = shutil.rmtree

    def refuse(folder: Path, ignore_errors: bool = False) -> None:
        if folder.name.endswith("step-000001"):
            largest_file(folder).unlink()
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        remove(folder, ignore_errors)

    models, checkpoints = make_models(model, ranks), Checkpoints(tmp_path, 1, ranks)
    save_whole(checkpoints, Progress(step=1), models)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", refuse)
        checkpoints.save(Progress(step=2), models)
        checkpoints.wait()
    assert checkpoints.completed() == 2
    assert f"{tmp_path / 'step-000001'} could not be removed, and still takes space" in caplog.text
    assert [folder.name for folder in checkpoints.complete()] == ["step-000002"]
    assert len(list(tmp_path.iterdir())) == 2
    checkpoints.clean()
    assert [folder.name for folder in tmp_path.iterdir()] == ["step-000002"]


def test_a_checkpoint_appears_once_every_rank_has_written_its_part(tmp_path: Path):
    files, device, never = CheckpointFiles(tmp_path / "step-000001"), torch.device("cpu"), threading.Event()
    part = {"policy/weights/w": torch.ones(3)}
    with ThreadPoolExecutor(1) as thread:
        for other_fails in (False, True):
            files.begin()
            first = thread.submit(files.write, part, "{}", Ranks(0, 2, device), never)
            until(lambda: len(list(files.partial.glob("checksums-*"))) == 1)
            assert not first.done()
            if other_fails:
                (files.partial / "rank-00001.safetensors").mkdir()
                with pytest.raises(OSError, match="directory"):
                    files.write(part, "{}", Ranks(1, 2, device), never)
            else:
                files.write(part, "{}", Ranks(1, 2, device), never)
            assert first.result() is not other_fails
            assert not files.partial.exists()
    assert (files.final / COMPLETE).exists()


def test_a_rank_needs_the_folder_no_more_once_its_checksums_are_there(tmp_path: Path):
    files, device, never = CheckpointFiles(tmp_path / "step-000001"), torch.device("cpu"), threading.Event()

    def rename_at_once() -> None:
        while not (files.partial / "checksums-00001.json").exists():
            pass
        files.partial.rename(files.final)

    with ThreadPoolExecutor(1) as thread:
        for _ in range(20):
            files.begin()
            renamed = thread.submit(rename_at_once)
            assert not files.write({"policy/weights/w": torch.ones(3)}, "{}", Ranks(1, 2, device), never)
            renamed.result()
            shutil.rmtree(files.final)


def test_a_part_that_is_removed_while_checksums_are_written_is_not_waited_for(tmp_path: Path):
    files, two = CheckpointFiles(tmp_path / "step-000001"), Ranks(0, 2, torch.device("cpu"))
    files.begin()
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(files.write, {"policy/weights/w": torch.ones(3)}, "{}", two, threading.Event())
        until(lambda: len(list(files.partial.glob("checksums-*"))) == 1)
        for name in ("rank-00000.safetensors", "progress.json"):
            (files.partial / name).unlink()
        assert first.result() is False


@pytest.mark.heavy
def test_a_process_that_is_killed_while_it_saves_loses_no_checkpoint_that_it_reported(tmp_path: Path):
    command = [sys.executable, "-m", "tests.learner.killed_while_saving", str(tmp_path)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[3])


def test_a_half_written_checkpoint_does_not_exist(model: Path, ranks: Ranks, tmp_path: Path):
    models = make_models(model, ranks)
    checkpoints = Checkpoints(tmp_path, 2, ranks)
    save_whole(checkpoints, Progress(step=2), models)
    for killed_before_its_end in (".tmp-step-000004", "step-000006"):
        shutil.copytree(tmp_path / "step-000002", tmp_path / killed_before_its_end)
        (tmp_path / killed_before_its_end / COMPLETE).unlink()
    assert checkpoints.restore(models) == Progress(step=2)
    save_whole(checkpoints, Progress(step=4), models)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-000002", "step-000004"]


def test_only_the_newest_are_kept_and_folders_of_other_names_are_left_alone(model: Path, ranks: Ranks, tmp_path: Path):
    """The oldest checkpoint that stays says what the replay may forget. The first weights count as one."""
    models, checkpoints, covered = make_models(model, ranks), Checkpoints(tmp_path, 2, ranks), []
    strange = tmp_path / "step-zzz"
    strange.mkdir()
    (strange / COMPLETE).touch()
    for step in (999_999, 1_000_000, 1_000_001):
        save_whole(checkpoints, Progress(step=step), models)
        covered.append(checkpoints.covered())
    assert covered == [0, 999_999, 1_000_000]
    assert [each.name for each in checkpoints.complete()] == ["step-1000000", "step-1000001"]
    assert len(list(tmp_path.iterdir())) == 3
    assert strange.exists()
    assert checkpoints.restore(models) == Progress(step=1_000_001)


def test_the_best_evaluations_stay_beside_the_newest_and_are_not_resumed_from(
    model: Path, ranks: Ranks, tmp_path: Path
):
    models, checkpoints = make_models(model, ranks), Checkpoints(tmp_path, 1, ranks, keep_best=1)
    for step, value in ((1, 0.5), (2, 0.7), (3, float("nan")), (4, 0.7), (5, 0.6)):
        save_whole(checkpoints, Progress(step=step, evaluations={step - 1: 0}), models)
        checkpoints.rate(step, value)
    assert [each.name for each in checkpoints.complete()] == ["step-000004", "step-000005"]
    assert [each.name for each in checkpoints.best()] == ["step-000004", "step-000005"]
    assert checkpoints.covered() == 5
    flip_a_bit(tmp_path / "step-000005")
    with pytest.raises(CheckpointError, match="are damaged"):
        checkpoints.restore(models)


@pytest.mark.parametrize("content", ["{", "[1]", '{"a": 1}', '{"1": null}'])
def test_ratings_that_cannot_be_read_are_named_with_what_to_do(content: str, ranks: Ranks, tmp_path: Path):
    (tmp_path / "ratings.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"ratings\.json cannot be read.*remove it"):
        Checkpoints(tmp_path, 1, ranks, keep_best=1).best()


def test_a_checkpoint_of_another_model_is_refused(model: Path, ranks: Ranks, tmp_path: Path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2, ranks)
    save_whole(checkpoints, Progress(step=1), make_models(model, ranks))
    other = make_models(write_model(tmp_path / "other", layers=1), ranks)
    with pytest.raises(CheckpointError, match=r"another model.*run\.name"):
        checkpoints.restore(other)


@pytest.mark.parametrize("mark", ["", "3"])
def test_a_checkpoint_of_an_earlier_format_is_refused_with_what_to_do_and_stays(
    mark: str, model: Path, ranks: Ranks, tmp_path: Path
):
    models, checkpoints = make_models(model, ranks), Checkpoints(tmp_path, 2, ranks)
    save_whole(checkpoints, Progress(step=2), models)
    (tmp_path / "step-000002" / COMPLETE).write_text(mark)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="earlier version of asyncrl"):
            checkpoints.restore(models)


def truncate(folder: Path) -> None:
    with largest_file(folder).open("r+b") as file:
        file.truncate(100)


def fail_to_read(file: Path) -> None:
    """Make every read of the file fail, as on a broken disk."""
    file.unlink()
    file.mkdir()


def checksums(folder: Path) -> Path:
    return next(folder.glob("checksums-*"))


DAMAGE = {
    "a flipped bit": flip_a_bit,
    "a truncated file": truncate,
    "a missing file": lambda folder: largest_file(folder).unlink(),
    "a mark that is no format": lambda folder: (folder / COMPLETE).write_bytes(b"\xff\0"),
    "progress that is no JSON": lambda folder: (folder / PROGRESS).write_text("{"),
    "checksums that are no JSON": lambda folder: checksums(folder).write_text("{"),
    "checksums of another form": lambda folder: checksums(folder).write_text("[1]"),
    "missing checksums": lambda folder: checksums(folder).unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_resumed_from(
    model: Path, ranks: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
):
    models = make_models(model, ranks)
    checkpoints = Checkpoints(tmp_path, 2, ranks)
    save_whole(checkpoints, Progress(step=2), models)
    saved = tensors(models)
    move(models)
    save_whole(checkpoints, Progress(step=4), models)
    DAMAGE[damage](tmp_path / "step-000004")
    fresh = make_models(model, ranks)
    assert checkpoints.restore(fresh) == Progress(step=2)
    assert same(tensors(fresh), saved)
    assert "step-000004 is not used: " in caplog.text
    assert [each.name for each in checkpoints.complete()] == ["step-000002"]
    save_whole(checkpoints, Progress(step=4), models)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-000002", "step-000004"]


def test_a_checkpoint_that_cannot_be_read_keeps_its_mark_for_a_start_that_can_read_it(
    model: Path, ranks: Ranks, tmp_path: Path
):
    models = make_models(model, ranks)
    checkpoints = Checkpoints(tmp_path, 2, ranks)
    for step in (2, 4):
        save_whole(checkpoints, Progress(step=step), models)
    folders = [tmp_path / "step-000002", tmp_path / "step-000004"]
    kept = [checksums(folder).read_bytes() for folder in folders]
    fail_to_read(checksums(folders[1]))
    assert checkpoints.restore(make_models(model, ranks)) == Progress(step=2)
    assert checkpoints.complete() == folders[:1]
    fail_to_read(checksums(folders[0]))
    with pytest.raises(CheckpointError, match=r"step-000002, step-000004 in .* cannot be read: mend the disk"):
        checkpoints.restore(make_models(model, ranks))
    for folder, content in zip(folders, kept, strict=True):
        checksums(folder).rmdir()
        (folder / "checksums-00000.json").write_bytes(content)
    checkpoints = Checkpoints(tmp_path, 2, ranks)
    assert checkpoints.restore(make_models(model, ranks)) == Progress(step=4)


def test_a_checkpoint_that_cannot_be_read_takes_the_place_of_no_other(model: Path, ranks: Ranks, tmp_path: Path):
    models = make_models(model, ranks)
    checkpoints = Checkpoints(tmp_path, 2, ranks)
    for step in (2, 5):
        save_whole(checkpoints, Progress(step=step), models)
    fail_to_read(checksums(tmp_path / "step-000005"))
    assert checkpoints.restore(models) == Progress(step=2)
    save_whole(checkpoints, Progress(step=4), models)
    assert [each.name for each in checkpoints.complete()] == ["step-000002", "step-000004"]
    assert not (tmp_path / "step-000005").exists(), "a newer checkpoint of this run has taken its place"


def test_if_every_checkpoint_is_damaged_the_run_does_not_start_again_by_itself(
    model: Path, ranks: Ranks, tmp_path: Path
):
    models = make_models(model, ranks)
    checkpoints = Checkpoints(tmp_path, 2, ranks)
    for step in (2, 4):
        save_whole(checkpoints, Progress(step=step), models)
        flip_a_bit(tmp_path / f"step-{step:06d}")
    for _ in range(2):
        with pytest.raises(
            CheckpointError, match=r"the newest checkpoints in .* are damaged: restore one of them from a copy"
        ):
            checkpoints.restore(models)
