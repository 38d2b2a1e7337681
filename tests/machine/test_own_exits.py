"""A call of `os._exit` is reported before the process ends."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

from asyncrl.machine.own_exits import reported_exits


class EndedError(Exception):
    """Takes the place of the end of the process. Its argument is the status."""


@pytest.fixture(autouse=True)
def _ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(status: int) -> NoReturn:
        raise EndedError(status)

    monkeypatch.setattr(os, "_exit", leave)


def test_an_end_is_reported_with_its_status_and_only_within_the_block() -> None:
    seen: list[int] = []

    def report(status: int) -> int:
        seen.append(status)
        return 1

    with pytest.raises(EndedError, match="1"), reported_exits(report):
        os._exit(3)
    with pytest.raises(EndedError, match="3"):
        os._exit(3)
    assert seen == [3]


def test_a_process_that_was_forked_meanwhile_ends_with_its_own_status(monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.getpid()
    with reported_exits(lambda status: 1):
        monkeypatch.setattr(os, "getpid", lambda: own + 1)
        with pytest.raises(EndedError, match="3"):
            os._exit(3)
