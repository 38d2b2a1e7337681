from __future__ import annotations

import errno
import json
import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from asyncrl.errors import RefusedError, StoreError
from asyncrl.msgpack_values import pack
from asyncrl.observe.kept.episode import KeptEpisode, KeptStep
from asyncrl.observe.kept.format import FOLDER
from asyncrl.observe.kept.index import IndexLine
from asyncrl.observe.kept.writing import KeptWriter, remove_kept
from asyncrl.runs.kept import KeptEpisodes
from asyncrl.wire import labels_message, task_body, trajectory_message
from tests.observe.kept.examples import example_step, write_examples

ROOM = 1 << 30


def contents(episode: KeptEpisode) -> tuple[object, ...]:
    """All of an episode, comparable."""
    task = None if episode.task is None else pack(task_body(episode.task), "task")
    arrays = (episode.advantages, episode.importance_weights, episode.proximal_logprobs)
    messages = (trajectory_message(episode.trajectory), labels_message(episode.labels))
    frames = [(dict(each.content), {name: array.tolist() for name, array in each.arrays.items()}) for each in messages]
    return episode.row, task, frames, [each.tolist() for each in arrays]


def files(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / FOLDER).iterdir())


def test_what_is_kept_is_read_back_with_every_bit(tmp_path: Path) -> None:
    written = write_examples(tmp_path)
    kept = KeptEpisodes(tmp_path)
    everything = [each for step in written for each in step.episodes]
    assert list(kept.rows()) == [each.row for each in everything]
    for each in everything:
        found = kept.read(each.row.step, each.row.id)
        assert contents(found)[0] == contents(each)[0]
        assert str(contents(found)) == str(contents(each))
        assert found.advantages.tobytes() == each.advantages.tobytes()


def test_the_rows_say_what_a_table_filters_by(tmp_path: Path) -> None:
    write_examples(tmp_path, steps=3)
    rows = {(row.step, row.group_id, row.member): row for row in KeptEpisodes(tmp_path).rows()}
    row = rows[2, "t000000006", 1]
    assert (row.id, row.task_id, row.source) == ("t000000006.1.0", "examples/train/6", "examples")
    assert (row.reward, row.outcome, row.turns, row.branches) == (1.0, 1.0, 3, 2)
    assert (row.tools, row.tool_calls, row.finish, row.lag, row.version) == (("calculator",), 1, "completed", 1, 2)
    assert 0 < row.sampled < row.tokens
    assert row.flags == ("best",)
    assert rows[2, "t000000006", 2].flags == ("grammar",)
    assert rows[2, "t000000008", 3].flags == ("random", "truncated")


def test_a_group_is_read_whole_with_its_members_side_by_side(tmp_path: Path) -> None:
    write_examples(tmp_path)
    group = KeptEpisodes(tmp_path).group(1, "t000000003")
    assert [each.row.member for each in group] == [0, 1, 2, 3]
    assert {each.task.id for each in group if each.task} == {"examples/train/3"}


def test_what_is_not_kept_is_refused_with_the_options_that_say_how_much_is(tmp_path: Path) -> None:
    kept = KeptEpisodes(tmp_path)
    assert kept.rows() == ()
    with pytest.raises(RefusedError, match=r"observe\.keep_episodes"):
        kept.read(0, "t000000000.0.0")
    write_examples(tmp_path)
    with pytest.raises(RefusedError, match="t000000009 of step 1"):
        kept.group(1, "t000000009")
    assert kept.find("t000000009.2.0") == kept.read(3, "t000000009.2.0").row
    assert kept.find("nobody") is None


def test_a_reader_sees_what_comes_while_it_watches_and_reads_nothing_twice(tmp_path: Path) -> None:
    kept, writer = KeptEpisodes(tmp_path), KeptWriter(tmp_path, ROOM)
    writer.add(example_step(0))
    before = kept.rows()
    assert kept.rows() is before
    writer.add(example_step(1))
    after = kept.rows()
    assert len(after) == 2 * len(before)
    assert after[0] is before[0]


def test_a_step_that_is_trained_again_replaces_what_was_kept_of_it(tmp_path: Path) -> None:
    write_examples(tmp_path)
    kept = KeptEpisodes(tmp_path)
    assert len(kept.rows()) == 48
    remove_kept(tmp_path, lambda step: step >= 2)
    assert {row.step for row in kept.rows()} == {0, 1}
    writer = KeptWriter(tmp_path, ROOM)
    writer.add(example_step(2, members=2))
    writer.add(example_step(2, members=3))
    rows = [row for row in kept.rows() if row.step == 2]
    assert len(rows) == len({row.id for row in rows}) == 9
    assert files(tmp_path) == ["index.jsonl", *(f"step-00000000{step}.kept" for step in range(3))]


def test_a_kill_in_the_middle_of_a_write_leaves_nothing_broken(tmp_path: Path) -> None:
    write_examples(tmp_path, steps=2)
    folder = tmp_path / FOLDER
    index = folder / "index.jsonl"
    whole = index.read_bytes()
    # Killed while it wrote a file, before it wrote the line of one, and while it wrote a line.
    (folder / ".step-000000002.kept.partial").write_bytes(b"half")
    (folder / "step-000000003.kept").write_bytes((folder / "step-000000001.kept").read_bytes())
    index.write_bytes(whole + b'{"step":3,"bytes":77,"ro')
    (folder / "notes.txt").write_text("of somebody else")
    kept = KeptEpisodes(tmp_path)
    assert {row.step for row in kept.rows()} == {0, 1}
    KeptWriter(tmp_path, ROOM).add(example_step(2))
    assert {row.step for row in kept.rows()} == {0, 1, 2}
    assert files(tmp_path) == ["index.jsonl", "notes.txt", *(f"step-00000000{step}.kept" for step in range(3))]
    assert [json.loads(line) for line in index.read_text().splitlines()][-1]["step"] == 2


@pytest.mark.slow
def test_a_full_folder_gives_up_steps_such_that_the_whole_run_stays_visible(tmp_path: Path) -> None:
    content = example_step(0, members=1, groups=1)
    writer = KeptWriter(tmp_path, ROOM)
    writer.add(content)
    bound = 42 * writer.bytes
    writer = KeptWriter(tmp_path, bound)
    for step in range(1, 400):
        writer.add(example_step(step, members=1, groups=1))
        assert writer.bytes <= bound
    steps = [row.step for row in KeptEpisodes(tmp_path).rows()]
    assert writer.thinned == 400 - len(steps)
    assert steps[0] == 0
    assert steps[-8:] == list(range(392, 400)), "the newest are whole"
    gaps = np.diff(steps)
    assert gaps.max() <= 2 * 400 / 25, "no part of the run is empty"
    assert len(steps) > 30
    assert len(files(tmp_path)) == len(steps) + 1


@pytest.mark.slow
def test_the_index_of_a_long_run_does_not_grow_with_the_steps_that_were_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.observe.kept.writing.DEAD_SHARE", 0)
    writer = KeptWriter(tmp_path, 60_000)
    kept = KeptEpisodes(tmp_path)
    for step in range(100):
        writer.add(example_step(step, members=1, groups=1))
        assert kept.rows()[-1].step == step
    index = tmp_path / FOLDER / "index.jsonl"
    lines = index.read_text().splitlines()
    assert len(lines) < 3 * len(kept.rows()) + 2
    assert writer.thinned > 50


def test_a_step_that_is_too_large_for_the_bound_is_refused_and_the_others_stay(tmp_path: Path) -> None:
    writer = KeptWriter(tmp_path, 40_000)
    writer.add(example_step(0, members=1))
    with pytest.raises(StoreError, match=r"too many for observe\.keep_episodes_mb"):
        writer.add(example_step(1, members=8))
    assert {row.step for row in KeptEpisodes(tmp_path).rows()} == {0}


def test_a_full_disk_leaves_what_is_there_and_nothing_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = KeptWriter(tmp_path, ROOM)
    writer.add(example_step(0))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patched:
        patched.setattr(KeptWriter, "_append", full)
        with pytest.raises(OSError, match="no space"):
            writer.add(example_step(1))
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="no space"):
            writer.add(example_step(2))
    assert files(tmp_path) == ["index.jsonl", "step-000000000.kept"]
    writer.add(example_step(3))
    assert {row.step for row in KeptEpisodes(tmp_path).rows()} == {0, 3}


def test_a_full_index_leaves_no_line_of_a_step_whose_file_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, append = KeptWriter(tmp_path, ROOM), KeptWriter._append
    writer.add(example_step(0))

    def full(self: KeptWriter, line: IndexLine) -> None:
        if line.rows:
            raise OSError(errno.ENOSPC, "no space")
        append(self, line)

    with monkeypatch.context() as patched:
        patched.setattr(KeptWriter, "_append", full)
        with pytest.raises(OSError, match="no space"):
            writer.add(example_step(0, members=2))
    assert files(tmp_path) == ["index.jsonl"]
    assert KeptEpisodes(tmp_path).rows() == ()


@pytest.mark.parametrize("damage", [b"", b"\x00" * 300, b'{"step": "one"}\n', b'\xff{"step"\n'])
def test_a_damaged_index_is_refused_by_readers_and_made_anew_by_the_next_writer(tmp_path: Path, damage: bytes) -> None:
    write_examples(tmp_path, steps=3)
    index = tmp_path / FOLDER / "index.jsonl"
    lines = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(b"".join([*lines[:2], damage + b"\n", *lines[2:]]) if damage else b"no index\n")
    with pytest.raises(StoreError, match="damaged"):
        KeptEpisodes(tmp_path).rows()
    KeptWriter(tmp_path, ROOM)
    assert {row.step for row in KeptEpisodes(tmp_path).rows()} == {0, 1, 2}


@pytest.mark.parametrize("where", [0, 3, 40, 400, 4000, -1])
def test_a_damaged_file_is_refused_with_its_name_or_reads_as_plain_data(tmp_path: Path, where: int) -> None:
    write_examples(tmp_path, steps=1)
    path = tmp_path / FOLDER / "step-000000000.kept"
    content = bytearray(path.read_bytes())
    content[where] ^= 0xFF
    kept = KeptEpisodes(tmp_path)
    for damaged in (bytes(content), bytes(content[: len(content) // 2]), b""):
        path.write_bytes(damaged)
        if damaged == content:
            # The damage may be in a number, which nothing tells from another.
            with suppress(StoreError):
                kept.step(0)
        else:
            with pytest.raises(StoreError, match=path.name):
                kept.step(0)


@pytest.mark.slow
def test_the_bound_holds_for_files_and_index_together(tmp_path: Path) -> None:
    writer = KeptWriter(tmp_path, bound := 200_000)
    for step in range(300):
        writer.add(example_step(step, members=2, groups=1))
        assert sum(file.stat().st_size for file in (tmp_path / FOLDER).iterdir()) <= bound


def test_rewards_that_are_not_finite_leave_the_index(tmp_path: Path) -> None:
    kept = example_step(0, groups=1)
    rewards = [math.nan, math.inf, -math.inf, 0.5]
    odd = [
        replace(each, row=structs.replace(each.row, reward=reward, task_id="\ud800:null"))
        for each, reward in zip(kept.episodes, rewards, strict=True)
    ]
    KeptWriter(tmp_path, 1 << 30).add(KeptStep(0, odd))
    found = [row.reward for row in KeptEpisodes(tmp_path).rows()]
    assert math.isnan(found[0])
    assert found[1:] == rewards[1:]


def test_a_lost_index_is_made_anew_and_costs_no_episode(tmp_path: Path) -> None:
    write_examples(tmp_path, steps=3)
    (tmp_path / FOLDER / "index.jsonl").unlink()
    KeptWriter(tmp_path, 1 << 30)
    assert {row.step for row in KeptEpisodes(tmp_path).rows()} == {0, 1, 2}


@pytest.mark.parametrize("index", [None, b"", b"garbage\n"])
def test_steps_that_are_trained_again_go_whatever_became_of_the_index(tmp_path: Path, index: bytes | None) -> None:
    write_examples(tmp_path, steps=4)
    path = tmp_path / FOLDER / "index.jsonl"
    if index is None:
        path.unlink()
    else:
        path.write_bytes(index)
    remove_kept(tmp_path, lambda step: step >= 2)
    KeptWriter(tmp_path, 1 << 30)
    assert {row.step for row in KeptEpisodes(tmp_path).rows()} == {0, 1}
