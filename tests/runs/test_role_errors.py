"""The errors in the logs of roles reach the person who runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.runs.role_errors import MOST_KINDS, RoleErrors

WHEN = "2026-11-28 20:57:58,928"
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


def test_errors_of_an_earlier_start_are_not_those_of_this_one(logs: Path) -> None:
    write(logs / "learner.log", f"{WHEN} ERROR asyncrl.machine.files: {FULL}")
    errors = RoleErrors(logs.parent, from_now=True)
    assert errors.read() == []
    write(logs / "learner.log", f"{WHEN} ERROR asyncrl.machine.files: {FULL}")
    assert [error.count for error in errors.read()] == [1]


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
