"""The errors in the logs of roles reach the person who runs them."""

from __future__ import annotations

import errno
import threading
from datetime import datetime
from pathlib import Path

import pytest

from asyncrl.machine.files import when_there_is_room
from asyncrl.network.throttle import LEFT_OUT
from asyncrl.runs.role_errors import MOST_KINDS, RECENT_S, RoleErrors, RoomWait

WHEN = "2026-11-28 20:57:58,928"
AT = datetime(2026, 11, 28, 20, 57, 58).timestamp()
FULL = "the disk is full: the checkpoint of step 10 waits for room ([Errno 28] No space left on device)"


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs"


def write(log: Path, text: str) -> None:
    with log.open("a") as file:
        file.write(f"{text}\n")


def test_an_error_is_found_once_with_its_count_whatever_its_numbers_are(logs: Path) -> None:
    errors = RoleErrors(logs.parent)
    assert errors.read() == []
    write(logs / "learner.log", f"{WHEN} INFO asyncrl.learner: step 3: ERROR rate=0\nERROR without a time")
    write(logs / "learner.log", f"{WHEN} ERROR asyncrl.machine.files: {FULL}")
    assert [str(error) for error in errors.read()] == [f"learner: {FULL}"]
    write(logs / "learner.log", f"{WHEN} ERROR asyncrl.machine.files: {FULL.replace('10', '20')}")
    write(logs / "actor-0.log", f"{WHEN} ERROR asyncrl.weights.receiver: no new weights\nTraceback of it")
    assert [str(error) for error in errors.read()] == ["actor-0: no new weights"]
    assert errors.read() == []
    assert [str(error) for error in errors.all] == [
        f"learner: {FULL.replace('10', '20')} (2 times)",
        "actor-0: no new weights",
    ]


def test_errors_that_a_role_counted_instead_of_logging_them_are_of_the_same_kind(logs: Path) -> None:
    for more in ("", LEFT_OUT.format(9), LEFT_OUT.format(1)):
        write(logs / "replay.log", f"{WHEN} ERROR asyncrl.replay.server: nothing can be stored{more}: why")
    (error,) = RoleErrors(logs.parent).read()
    assert str(error) == "replay: nothing can be stored: why (13 times)"


def test_errors_of_an_earlier_start_are_not_those_of_this_one(logs: Path) -> None:
    write(logs / "learner.log", f"{WHEN} ERROR asyncrl.machine.files: {FULL}")
    errors = RoleErrors(logs.parent, from_now=True)
    assert errors.read() == []
    write(logs / "learner.log", f"{WHEN} ERROR asyncrl.machine.files: {FULL}")
    assert [error.count for error in errors.read()] == [1]


def test_the_newest_errors_are_those_of_the_last_minutes_of_this_start(logs: Path) -> None:
    write(logs / "actor-0.log", f"{WHEN} ERROR asyncrl.actor: no weights")
    errors = RoleErrors(logs.parent)
    (error,) = errors.read()
    assert error.at == AT
    assert error.aged(AT + 240) == "actor-0: no weights, 4 min ago"
    assert error.aged(AT - 3) == "actor-0: no weights, 0 s ago", "the clock of its host is ahead"
    assert errors.newest(0.0, AT + RECENT_S) == [error]
    assert errors.newest(0.0, AT + RECENT_S + 1) == errors.newest(AT + 1, AT + 1) == []


@pytest.mark.parametrize("end", ["is written: there is room again", "is complete, 0.1 s after its copy was begun"])
def test_a_role_waits_for_room_until_its_log_says_that_the_file_is_written(logs: Path, end: str) -> None:
    log, errors = logs / "learner.log", RoleErrors(logs.parent)
    write(log, f"{WHEN} ERROR asyncrl.machine.files: {FULL}")
    write(log, f"{WHEN} WARNING asyncrl.observe.sinks: 3 rows were not written")
    (error,) = errors.read()
    assert errors.waits_since(0.0) == [RoomWait("learner", "the checkpoint of step 10", AT)]
    assert errors.newest(0.0, AT + 9 * RECENT_S) == [error]
    assert errors.waits_since(AT + 1) == []
    write(log, f"{WHEN} WARNING asyncrl.machine.files: the checkpoint of step 10 {end}")
    errors.read()
    assert errors.waits_since(0.0) == errors.newest(0.0, AT + 9 * RECENT_S) == []


def test_a_wait_for_room_is_logged_in_the_words_that_views_look_for(
    logs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tries = iter([OSError(errno.ENOSPC, "full"), None])

    def write_once() -> None:
        if (error := next(tries)) is not None:
            raise error

    when_there_is_room(write_once, threading.Event(), "runs/x/checkpoints/step-000006", retry_s=0.0)
    errors, lines = RoleErrors(logs.parent), []
    for each in caplog.records:
        write(logs / "learner.log", f"{WHEN} {each.levelname} {each.name}: {each.getMessage()}")
        errors.read()
        lines.append([wait.what for wait in errors.waits_since(0.0)])
    assert lines == [["runs/x/checkpoints/step-000006"], []]


def test_a_line_that_is_still_being_written_counts_when_it_is_whole(logs: Path) -> None:
    errors = RoleErrors(logs.parent)
    with (logs / "learner.log").open("w") as file:
        file.write(f"{WHEN} ERROR asyncrl.machine.files: the disk")
        file.flush()
        assert errors.read() == []
        file.write(" is full\n")
    assert [error.text for error in errors.read()] == ["the disk is full"]


def test_a_log_of_many_different_errors_takes_a_bounded_amount_of_memory(logs: Path) -> None:
    words = ("".join(chr(97 + int(digit)) for digit in str(number)) for number in range(3 * MOST_KINDS))
    write(logs / "actor-0.log", "\n".join(f"{WHEN} ERROR asyncrl.actor: {word}" for word in words))
    write(logs / "learner.log", f"{WHEN} ERROR asyncrl.machine.files: {FULL}")
    found = RoleErrors(logs.parent).read()
    assert [error.role for error in found] == ["actor-0"] * MOST_KINDS + ["learner"]


def test_a_log_that_cannot_be_read_is_left_out(logs: Path) -> None:
    errors = RoleErrors(logs.parent, from_now=True)
    (logs / "actor-0.log").symlink_to(logs / "nowhere")
    write(logs / "learner.log", f"{WHEN} ERROR asyncrl.machine.files: {FULL}")
    assert [error.role for error in errors.read()] == ["learner"]
