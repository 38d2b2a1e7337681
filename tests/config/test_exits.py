"""A command that fails ends with its status and a message, never with a traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest

from asyncrl.config.exits import EXIT_FAILURE, EXIT_HOPELESS, EXIT_STOPPED, EXIT_USAGE, exit_status
from asyncrl.errors import ConfigError, DataError, RefusedError, RunOverError, StoppedError, TooManyFailuresError


def ending(error: BaseException, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The status and the text on stderr of a command "asyncrl look" that raises `error`."""

    def run() -> None:
        raise error

    return exit_status(run, "asyncrl look"), capsys.readouterr().err


def test_a_failure_is_told_in_lines_that_begin_with_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    lines = "asyncrl look: one\nasyncrl look: two\n"
    assert ending(RefusedError("one\ntwo"), capsys) == (EXIT_FAILURE, lines)
    assert ending(OSError("one\ntwo"), capsys) == (EXIT_FAILURE, lines)


def test_a_failure_without_a_text_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert ending(RefusedError(), capsys) == (EXIT_FAILURE, "asyncrl look: RefusedError()\n")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StoppedError("a signal came")])
def test_ctrl_c_says_nothing(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    assert ending(error, capsys) == (EXIT_STOPPED, "")


def test_a_refused_configuration_or_file_is_a_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert [ending(error, capsys)[0] for error in (ConfigError(), DataError())] == [EXIT_USAGE, EXIT_USAGE]


def test_too_many_failures_and_a_run_that_is_over_have_their_own_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert ending(TooManyFailuresError("9"), capsys) == (EXIT_HOPELESS, "asyncrl look: 9\n")
    assert ending(RunOverError("done"), capsys)[0] == 0


def test_an_unexpected_error_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError):
        ending(KeyError("a bug"), capsys)


def test_a_command_says_its_status_and_none_is_success() -> None:
    assert [exit_status(lambda: 7, "asyncrl look"), exit_status(lambda: None, "asyncrl look")] == [7, 0]


COLLECTED = """
import sys
from asyncrl.config.exits import end_quickly

class Told:
    def __del__(self):
        sys.stderr.write("collected")

told = Told()
told.itself = told
if sys.argv[1] == "quickly":
    end_quickly()
sys.exit(7)
"""


@pytest.mark.slow
def test_the_end_of_a_command_collects_nothing_that_the_system_frees_anyway() -> None:
    def ended(how: str) -> tuple[int, str]:
        done = subprocess.run([sys.executable, "-c", COLLECTED, how], capture_output=True, text=True)
        return done.returncode, done.stderr

    assert ended("quickly") == (7, "")
    assert ended("usual") == (7, "collected")


READ_BY_HEAD = """
import sys
from asyncrl.config.exits import exit_status

def run():
    for number in range(100_000):
        print(number)

sys.exit(exit_status(run, "asyncrl look"))
"""


def test_a_reader_that_has_enough_ends_a_command_without_a_message() -> None:
    command = [sys.executable, "-c", READ_BY_HEAD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "0\n"
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == ("", 0)


def test_a_connection_that_breaks_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert ending(BrokenPipeError("the replay is lost"), capsys) == (EXIT_FAILURE, "asyncrl look: the replay is lost\n")
