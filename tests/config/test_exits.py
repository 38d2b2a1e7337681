"""A command that fails ends with its status and a message, never with a traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest

from asyncrl.config.exits import EXIT_FAILURE, EXIT_STOPPED, EXIT_USAGE, failures_end_the_command, usage_or_failure
from asyncrl.errors import ConfigError, DataError, RefusedError


def ending(error: BaseException, capsys: pytest.CaptureFixture[str], **options: object) -> tuple[object, str]:
    """The status and the text on stderr of a command "asyncrl look" that raises `error`."""
    with pytest.raises(SystemExit) as ended, failures_end_the_command(**{"name": "asyncrl look", **options}):  # type: ignore[arg-type]
        raise error
    return ended.value.code, capsys.readouterr().err


def test_a_failure_is_told_in_lines_that_begin_with_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    lines = "asyncrl look: one\nasyncrl look: two\n"
    assert ending(RefusedError("one\ntwo"), capsys) == (EXIT_FAILURE, lines)
    assert ending(OSError("one\ntwo"), capsys, status=EXIT_USAGE) == (EXIT_USAGE, lines)


def test_a_failure_without_a_text_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert ending(RefusedError(), capsys) == (EXIT_FAILURE, "asyncrl look: RefusedError()\n")


def test_ctrl_c_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert ending(KeyboardInterrupt(), capsys) == (EXIT_STOPPED, "")


def test_a_refused_configuration_or_file_is_a_wrong_usage() -> None:
    statuses = [usage_or_failure(error) for error in (ConfigError(), DataError(), RefusedError(), OSError())]
    assert statuses == [EXIT_USAGE, EXIT_USAGE, EXIT_FAILURE, EXIT_FAILURE]


def test_an_error_that_nobody_expects_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), failures_end_the_command():
        raise KeyError("a bug")
    assert ending(KeyError("known"), capsys, also=(KeyError,)) == (EXIT_FAILURE, "asyncrl look: 'known'\n")


def test_a_command_that_succeeds_goes_on() -> None:
    with failures_end_the_command():
        done = True
    assert done


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


def test_the_end_of_a_command_collects_nothing_that_the_system_frees_anyway() -> None:
    def ended(how: str) -> tuple[int, str]:
        done = subprocess.run([sys.executable, "-c", COLLECTED, how], capture_output=True, text=True)
        return done.returncode, done.stderr

    assert ended("quickly") == (7, "")
    assert ended("usual") == (7, "collected")
