"""`asyncrl scale`: its wish comes to the supervisor, and the supervisor's answer comes back."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError, UnavailableError
from asyncrl.launch.scaling import Scaler, ask, main, parse_counts
from tests.helpers import until


def ask_and_update(folder: Path, scaler: Scaler) -> list[BaseException]:
    """What `ask` raises while a supervisor polls."""
    raised: list[BaseException] = []

    def wish() -> None:
        try:
            ask(folder, {"actors": 8}, timeout_s=60)
        except (ConfigError, UnavailableError) as error:
            raised.append(error)

    thread = threading.Thread(target=wish)
    thread.start()
    until(lambda: scaler.update() or not thread.is_alive())
    return raised


def test_a_wish_is_done_once_and_answered(tmp_path: Path) -> None:
    done: list[Mapping[str, int]] = []
    assert ask_and_update(tmp_path, Scaler(tmp_path, done.append)) == []
    assert done == [{"actors": 8}]


def test_a_refusal_comes_back_with_its_reason(tmp_path: Path) -> None:
    def refuse(counts: Mapping[str, int]) -> None:
        raise ConfigError("there is no room")

    [error] = ask_and_update(tmp_path, Scaler(tmp_path, refuse))
    assert isinstance(error, ConfigError)
    assert str(error) == "there is no room"


def test_without_a_supervisor_the_command_says_so_and_leaves_no_wish_behind(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="does the run go on"):
        ask(tmp_path, {"actors": 8}, timeout_s=0)
    Scaler(tmp_path, lambda counts: pytest.fail("an old wish")).update()


def test_two_commands_at_once_are_both_answered(tmp_path: Path) -> None:
    done: list[int] = []
    scaler = Scaler(tmp_path, lambda counts: done.append(counts["actors"]))
    with ThreadPoolExecutor() as threads:
        asking = [threads.submit(ask, tmp_path, {"actors": count}, 60) for count in (2, 3)]
        until(lambda: sum(each.running() for each in asking) == 2)
        until(lambda: scaler.update() or all(each.done() for each in asking))
    assert [each.exception() for each in asking] == [None, None]
    assert sorted(done) == [2, 3]


def test_an_answer_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    done: list[Mapping[str, int]] = []
    scaler = Scaler(tmp_path, done.append)
    (tmp_path / "scale.json").write_text(json.dumps({"id": "1", "counts": {"actors": 8}}))
    (tmp_path / "scale-answer.json").mkdir()
    scaler.update()
    assert done == [{"actors": 8}]


def test_a_run_that_nobody_runs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").touch()
    monkeypatch.setattr("sys.argv", ["asyncrl scale", str(tmp_path), "actors=2", "--wait=600"])
    with pytest.raises(SystemExit):
        main()
    assert f"no `asyncrl train` runs {tmp_path}" in capsys.readouterr().err


def test_words_that_are_no_counts_are_refused_together() -> None:
    assert parse_counts(["actors=8", "scorers=2"]) == {"actors": 8, "scorers": 2}
    with pytest.raises(ConfigError) as raised:
        parse_counts(["actors=0", "learners=2", "scorers"])
    assert len(str(raised.value).splitlines()) == 3
