"""`asyncrl scale`: its wish comes to the supervisor, and the supervisor's answer comes back."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from asyncrl.config import locations
from asyncrl.config.schema import EngineConfig, ModelConfig, TrainConfig
from asyncrl.errors import ConfigError, UnavailableError
from asyncrl.launch import local
from asyncrl.launch.ownership import NotRunningError
from asyncrl.launch.placement.placement import Placement
from asyncrl.launch.placement.pools import Host
from asyncrl.launch.scaling import Scaler, ask, main, parse_counts
from tests.helpers import GENEROUS_S, until


def ask_and_update(folder: Path, scaler: Scaler) -> list[BaseException]:
    """Return the errors that `ask` raises while a supervisor polls."""
    raised: list[BaseException] = []

    def wish() -> None:
        try:
            ask(folder, {"actors": 8}, timeout_s=GENEROUS_S)
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
    with pytest.raises(UnavailableError, match="check that the run works"):
        ask(tmp_path, {"actors": 8}, timeout_s=0)
    Scaler(tmp_path, lambda counts: pytest.fail("an old wish")).update()


@pytest.mark.slow
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


def test_a_run_that_nobody_runs_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").touch()
    with pytest.raises(NotRunningError, match=f"no `asyncrl train` runs {tmp_path}"):
        main([str(tmp_path), "actors=2", "--wait=600"])


def test_words_that_are_no_counts_are_refused_together() -> None:
    assert parse_counts(["actors=8", "scorers=2"]) == {"actors": 8, "scorers": 2}
    with pytest.raises(ConfigError) as raised:
        parse_counts(["actors=0", "learners=2", "scorers"])
    assert len(str(raised.value).splitlines()) == 3


def test_a_count_that_is_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="actors=8: actors is given twice"):
        parse_counts(["actors=2", "actors=8"])


def test_a_wish_that_cannot_be_read_does_not_end_the_run(tmp_path: Path) -> None:
    scaler = Scaler(tmp_path, lambda counts: pytest.fail("nothing was wished"))
    (tmp_path / "scale.json").mkdir()
    scaler.update()


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"{}", b'{"id": "a", "counts": 3}', b"\xff"])
def test_a_file_that_is_no_wish_is_removed_and_does_not_end_the_run(tmp_path: Path, text: bytes) -> None:
    scaler = Scaler(tmp_path, lambda counts: pytest.fail("nothing was wished"))
    (tmp_path / "scale.json").write_bytes(text)
    scaler.update()
    assert not (tmp_path / "scale.json").exists()


def test_a_wish_for_other_keys_or_numbers_that_cannot_be_is_refused(tmp_path: Path) -> None:
    scaler = Scaler(tmp_path, lambda counts: pytest.fail("this cannot be"))
    for counts in ({"launcher": 3}, {"actors": 0}, {"actors": 10**9}):
        (tmp_path / "scale.json").write_text(json.dumps({"id": "a", "counts": counts}))
        scaler.update()
        assert "write actors=N or scorers=N" in json.loads((tmp_path / "scale-answer.json").read_text())["refused"]


def test_a_count_that_is_refused_for_the_disk_leaves_the_launcher_with_the_roles_that_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Recorder:
        def set_placement(self, placement: Placement) -> None:
            self.names = [role.name for role in placement.roles]

    def full(config: TrainConfig) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(locations, "record_config", full)
    config, launcher = TrainConfig(model=ModelConfig(path="m"), engine=EngineConfig("embedded")), Recorder()
    config.cluster.actors, config.cluster.scorers, config.cluster.learner_ranks = 2, 1, 1
    with pytest.raises(ConfigError, match="No space left"):
        local._scale(config, [Host(0, 8)], cast(Any, launcher), cast(Any, None), {"actors": 1})
    assert "actor-1" in launcher.names
    assert config.cluster.actors == 2
