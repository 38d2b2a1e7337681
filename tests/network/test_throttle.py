"""Lines about strangers come at a bounded rate, and none is forgotten."""

from __future__ import annotations

import logging

import pytest

from asyncrl.errors import EngineError, ToolError
from asyncrl.network.throttle import MAX_DISTINCT, MAX_REASON, ErrorLogger, Throttled


def test_the_first_are_said_at_once_and_the_others_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    warnings = Throttled(logging.getLogger("t"), "refused", burst=3, every_s=5.0, clock=lambda: now[0])
    for index in range(1000):
        warnings.say(f"reason {index}")
    assert [record.getMessage() for record in caplog.records] == [f"refused: reason {index}" for index in range(3)]
    now[0] = 5.0
    warnings.say("x" * 10_000)
    warnings.say("unsaid")
    assert caplog.records[-1].getMessage() == f"refused (and 997 times more since the last line): {'x' * MAX_REASON}"
    assert len(caplog.records) == 4


def test_a_stranger_cannot_write_lines_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    Throttled(logging.getLogger("t"), "refused").say("x\n2026-01-01 ERROR the store is lost\x1b[2J")
    assert caplog.records[-1].getMessage() == "refused: x\\n2026-01-01 ERROR the store is lost\\x1b[2J"


def raised(what: str, cause: Exception | None = None) -> Exception:
    try:
        raise ToolError(what) from cause
    except ToolError as error:
        return error


def missing(key: str) -> Exception:
    try:
        raise KeyError(key)
    except KeyError as error:
        return error


def test_an_error_has_one_traceback_and_then_counts_at_growing_intervals(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    errors = ErrorLogger(logging.getLogger("t"), clock=lambda: now[0])
    for second in range(100):
        now[0] = float(second)
        for number in range(10):
            errors.exception(f"t{second}.{number} failed", raised("broken", missing("city")))
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "t0.0 failed",
        "t10.0 failed (this error came 100 times since its last line)",
        "t30.0 failed (this error came 200 times since its last line)",
        "t70.0 failed (this error came 400 times since its last line)",
    ]
    assert caplog.text.count("Traceback") == 2
    assert "KeyError: 'city'" in caplog.text


def test_errors_are_told_apart_by_their_first_cause_and_there_are_not_many_kinds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    errors = ErrorLogger(logging.getLogger("t"), clock=lambda: 0.0)
    for error in (raised("one", missing("a")), raised("two", missing("b")), raised("three"), EngineError("away")):
        errors.exception(f"failed: {error}", error)
    assert [record.getMessage() for record in caplog.records] == ["failed: one", "failed: three", "failed: away"]
    assert [bool(record.exc_info) for record in caplog.records] == [True, False, False]
    for number in range(2 * MAX_DISTINCT):
        errors.exception("another", type(f"Error{number}", (Exception,), {})())
    assert len(caplog.records) == MAX_DISTINCT + 1
