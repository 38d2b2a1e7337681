"""A second run with the same name resumes, or says why not."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import ClassVar, cast

import pytest

from asyncrl.config.changes import values_of
from asyncrl.config.compose import read
from asyncrl.config.locations import SOLVED_FILE, SUMMARY_FILE
from asyncrl.config.schema import ClusterConfig, LearnerConfig, ModelConfig, NetworkConfig, RunConfig, TrainConfig
from asyncrl.data.from_config import run_tasks
from asyncrl.errors import ConfigError, StoppedError
from asyncrl.launch import addresses, local
from asyncrl.launch import stop as stop_command
from asyncrl.launch.addresses import RunAddresses
from asyncrl.launch.claim import check_resume, claim, is_finished, is_past_its_steps, make_room
from asyncrl.launch.local import role_commands, train
from asyncrl.launch.placement.placement import place
from asyncrl.launch.placement.pools import Host
from asyncrl.launch.preflight.tasks.same_tasks import check_same_tasks
from asyncrl.launch.run_folder import has_store
from asyncrl.launch.start_warnings import StartWarnings
from asyncrl.launch.supervisor import Supervisor
from asyncrl.machine.ports import free_ports
from asyncrl.replay.store.store import Store
from asyncrl.runs.finding import require_run
from asyncrl.runs.run import Run
from asyncrl.runs.summary import summarise
from asyncrl.types import BatchPlan
from tests.helpers import GENEROUS_S


def make_config() -> TrainConfig:
    config = TrainConfig(model=ModelConfig(path="m"))
    config.data.train = ["t.parquet"]
    return config


@pytest.mark.slow
def test_the_same_configuration_resumes_and_resumable_options_may_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = make_config()
    assert not claim(config, tmp_path)
    config.learner.steps = 105
    config.learner.lr = 0.5
    config.scoring.rules = {"math": "mine.rule"}
    config.cluster.actors = 7
    assert claim(config, tmp_path)
    assert "learner.lr=0.5 from now on; it was 1e-06" in caplog.messages


def test_another_configuration_is_refused_naming_what_differs(tmp_path: Path) -> None:
    config = make_config()
    claim(config, tmp_path)
    config.actor.temperature = 0.5
    config.learner.group_size = 4
    with pytest.raises(ConfigError) as refused:
        claim(config, tmp_path)
    for part in ("temperature=0.5: it was 1.0; stored log-probs", "learner.group_size=4: it was 8", "another run.name"):
        assert part in str(refused.value)


def test_open_ports_are_chosen() -> None:
    config = make_config()
    config.network.replay_port = config.network.weights_port = 0
    RunAddresses.of(config).choose_ports()
    assert 0 not in (config.network.replay_port, config.network.weights_port)


def ports_of(config: TrainConfig) -> tuple[int, int]:
    return config.network.replay_port, config.network.weights_port


def test_default_ports_that_another_program_or_run_has_are_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    # Runs of other tests may have the real default ports.
    base = free_ports(2)
    usual = NetworkConfig(replay_port=base, weights_port=base + 1)
    monkeypatch.setattr(addresses, "NetworkConfig", lambda: usual)

    def configured(first: int, second: int) -> TrainConfig:
        config = make_config()
        config.network.replay_port, config.network.weights_port = first, second
        return config

    opened, first, second = configured(0, 0), configured(base, base + 1), configured(base, base + 1)
    chosen = configured(base, base + 2)
    with ExitStack() as claims:
        for each in (opened, first, second, chosen):
            claims.enter_context(RunAddresses.of(each).usual_ports())
        assert ports_of(opened) == (0, 0), "they were open"
        assert ports_of(first) == (base, base + 1)
        assert ports_of(second) == (0, 0), "the first run has claimed them, and listens only later"
        assert ports_of(chosen) == (base, base + 2), "the user has chosen them"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", base + 1))
        later = configured(base, base + 1)
        with RunAddresses.of(later).usual_ports():
            assert ports_of(later) == (0, 0)
    again = configured(base, base + 1)
    with RunAddresses.of(again).usual_ports():
        assert ports_of(again) == (base, base + 1), "every claim has ended"


def test_every_role_has_its_own_name_and_the_ranks_of_a_learner_are_one_role(tmp_path: Path) -> None:
    config = TrainConfig(cluster=ClusterConfig(actors=2, scorers=2, learner_ranks=2))
    commands = role_commands(place(config, [Host(0, 2)]), tmp_path)
    assert [each.name for each in commands] == ["replay", "scoring-0", "scoring-1", "actor-0", "actor-1", "learner"]
    config.replay.shards = 2
    commands = role_commands(place(config, [Host(0, 2)]), tmp_path)
    assert [each.name for each in commands][:3] == ["replay-0", "replay-1", "scoring-0"]


@pytest.mark.slow
def test_every_role_reads_the_configuration_in_the_folder_of_the_run_from_any_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "it's mine"
    folder.mkdir()
    config, tasks = make_config(), tmp_path / "tasks.parquet"
    tasks.touch()
    config.data.train = [str(tasks)]
    claim(config, folder)
    monkeypatch.chdir(folder)
    commands = role_commands(place(config, [Host(0, 2)]), Path("config.yaml"))
    monkeypatch.chdir(tmp_path)
    assert {tuple(each.command[3:]) for each in commands} == {tuple(commands[0].command[3:])}
    assert read(commands[0].command[3:]) == config


def resume(config: TrainConfig, run_dir: Path) -> None:
    check_resume(values_of(config), run_dir, lambda: None)


def claim_with_room(config: TrainConfig, run_dir: Path) -> bool:
    make_room(values_of(config), run_dir, partial(check_same_tasks, run_tasks(config), run_dir))
    return claim(config, run_dir)


def test_a_run_begins_anew_with_another_configuration_until_a_step_is_planned(tmp_path: Path) -> None:
    run_dir, elsewhere = tmp_path / "run", tmp_path / "fast_disk"
    config, store = make_config(), run_dir / "replay"
    config.data.train = [str(tmp_path / "t.parquet")]
    (tmp_path / "t.parquet").touch()
    elsewhere.mkdir()
    run_dir.mkdir()
    claim(config, run_dir)
    store.symlink_to(elsewhere)
    for number, size in enumerate((4, 3), 1):
        with closing(Store(store, 1 << 20, durable=False)):
            pass
        config.learner.group_size = size
        resume(config, run_dir)
        assert not claim_with_room(config, run_dir)
        assert not store.exists()
        aside = run_dir / f"earlier-{number}"
        assert {path.name for path in aside.iterdir()} == {"replay", "config.yaml"}
        assert (aside / "replay" / "data.mdb").exists()
        store.mkdir()
    with closing(Store(store, 1 << 20, durable=False)) as opened, opened.transaction() as tx:
        tx.put("plans", 0, BatchPlan(0, 0, ["a"], ["g"], [1], [1], [1.0]))
    config.learner.group_size = 2
    for claims in (resume, claim_with_room):
        with pytest.raises(ConfigError, match=r"other values of these keys(.|\n)*learner\.group_size=2: it was 3"):
            claims(config, run_dir)


def test_a_run_begins_anew_if_only_the_code_of_its_model_is_among_its_checkpoints(tmp_path: Path) -> None:
    config = make_config()
    config.data.train = [str(tmp_path / "t.parquet")]
    (tmp_path / "t.parquet").touch()
    (tmp_path / "checkpoints" / "code").mkdir(parents=True)
    (tmp_path / "checkpoints" / "ratings.json").touch()
    claim(config, tmp_path)
    assert not has_store(tmp_path)
    config.model.path = "another"
    resume(config, tmp_path)
    assert not claim_with_room(config, tmp_path)
    assert {path.name for path in (tmp_path / "earlier-1").iterdir()} == {"checkpoints", "config.yaml"}
    assert not (tmp_path / "checkpoints").exists()
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    assert has_store(tmp_path)
    config.model.path = "a third one"
    with pytest.raises(ConfigError, match="other values of these keys"):
        resume(config, tmp_path)


def test_fewer_steps_than_the_run_has_done_leave_nothing_to_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mark_steps(tmp_path, 14)
    for steps, past in ((5, True), (14, False), (30, False)):
        assert is_past_its_steps(steps, tmp_path) is past
    (message,) = caplog.messages
    assert "has done 14 steps, so learner.steps=5" in message
    assert "set learner.steps to more than 14" in message


@pytest.mark.parametrize("during_checks", [True, False])
def test_a_stop_before_the_roles_are_started_starts_none_and_leaves_nothing(
    during_checks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, stop = make_config(), threading.Event()
    config.run, config.cluster.gpus = RunConfig("run", str(tmp_path)), 0
    if during_checks:
        stop.set()  # Or they would find that there is no such model.
    else:
        monkeypatch.setattr(local, "preflight", lambda *_, **__: stop.set())
    monkeypatch.setattr(local, "check_paths", lambda *_: None)
    assert not train(config, stop)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_checks_of_a_run_that_starts_are_stopped_by_its_folder_and_it_is_said_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, run_dir = make_config(), tmp_path / "run"
    config.run, config.cluster.gpus = RunConfig("run", str(tmp_path)), 0
    command, signalled = threading.Thread(target=stop_command.main, args=[[str(run_dir)]]), threading.Event()

    def checks(*_: object, stop: threading.Event, read: object) -> None:
        with pytest.raises(ConfigError, match=r"is starting and has no config\.yaml yet"):
            require_run(str(run_dir))
        command.start()
        assert stop.wait(GENEROUS_S)
        raise StoppedError("stopped between two checks")

    monkeypatch.setattr(local, "preflight", checks)
    monkeypatch.setattr(local, "check_paths", lambda *_: None)
    assert not train(config, signalled)
    assert not signalled.is_set(), "a job of Slurm ends its chain for a request, and not for a signal"
    command.join(GENEROUS_S)
    assert not run_dir.exists()
    assert capsys.readouterr().out == f"{run_dir} has ended before it started anything\n"


def test_the_warnings_of_a_start_are_in_the_runs_summary_and_those_of_its_roles_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run_dir = make_config(), tmp_path / "run"
    config.run = RunConfig("run", str(tmp_path))
    log, warnings = logging.getLogger("asyncrl.some.room"), ["the rate is large", "token=abc is strange"]

    def checks(*_: object, **__: object) -> None:
        for text in warnings:
            log.warning("%s", text)
        log.info("no warning")
        logging.getLogger("asyncrl.launch.survivors").warning("a process still runs")
        logging.getLogger("another.library").warning("not asyncrl's")

    def supervise(*_: object) -> bool:
        log.warning("a role has failed")
        return True

    monkeypatch.setattr(local, "preflight", checks)
    monkeypatch.setattr(local, "count_steps", lambda *_: None)
    monkeypatch.setattr(local, "read_files", lambda *_: {})
    monkeypatch.setattr(local, "check_paths", checks)
    monkeypatch.setattr(local, "_placed", lambda config, *_: place(config, [Host(0, 2)]))
    monkeypatch.setattr(local, "_supervise", supervise)
    monkeypatch.setattr(local, "Supervisor", lambda *_, **__: None)

    def shown() -> list[str]:
        assert train(config, threading.Event())
        return [each for each in summarise(Run(run_dir), 8, "done", "", "").warnings if each.startswith("at the start")]

    assert shown() == ["at the start: the rate is large", "at the start: token=(hidden) is strange"]
    warnings.clear()
    assert shown() == [], "the next start has none"
    assert not [each for each in logging.getLogger("asyncrl").handlers if isinstance(each, StartWarnings)]


def mark_steps(folder: Path, steps: int) -> None:
    """Make a checkpoint that is complete and covers so many steps."""
    mark = folder / "checkpoints" / f"step-{steps:06d}" / "complete"
    mark.parent.mkdir(parents=True)
    mark.touch()


def finished(folder: Path, config: TrainConfig, steps: int) -> Path:
    """The folder of a run that has ended after so many steps."""
    claim(config, folder)
    mark_steps(folder, steps)
    (folder / SUMMARY_FILE).write_text('{"result": "done"}')
    (folder / "model").mkdir()
    return folder


class Solves:
    """A supervisor whose learner ends because the policy solves the tasks, or as usual if `reason` is empty."""

    restarts: ClassVar[Mapping[str, int]] = {}

    def __init__(self, run_dir: Path, reason: str) -> None:
        self._file, self._reason = run_dir / SOLVED_FILE, reason

    def run(self, stopped: object, progress: object) -> bool:
        if self._reason:
            self._file.write_text(self._reason)
        return True


@pytest.mark.parametrize(("reason", "result"), [("the policy solves these tasks", "solved"), ("", "done")])
def test_a_run_whose_policy_solves_the_tasks_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], reason: str, result: str
) -> None:
    supervisor = cast("Supervisor", Solves(tmp_path, reason))
    learner = LearnerConfig(steps=8, export=False)
    assert local._supervise(supervisor, tmp_path, learner, 1, lambda: None, threading.Event(), lambda: "resume it")
    assert f"result             {result} after 0 of 8 steps" in capsys.readouterr().err
    assert Run(tmp_path).end() == result


def test_a_finished_run_says_so_before_anything_is_checked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = make_config()
    config.run.dir, config.run.name, config.learner.steps = str(tmp_path), "run", 8
    finished(tmp_path / "run", config, 8)
    with caplog.at_level("INFO"):
        assert train(config, threading.Event())
    assert f"{tmp_path / 'run'} is done: it has trained all of its 8 steps" in caplog.text
    assert "checking data" not in caplog.text


@pytest.mark.parametrize("wanted", [7, 9])
def test_a_run_with_other_steps_is_not_finished(wanted: int, tmp_path: Path) -> None:
    config = make_config()
    config.learner.steps = 8
    folder = finished(tmp_path / "run", config, 8)
    assert is_finished(config.learner, values_of(config), folder)
    config.learner.steps = wanted
    assert not is_finished(config.learner, values_of(config), folder)


def test_a_longer_run_that_is_killed_has_no_result_of_its_earlier_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for check in ("check_paths", "preflight", "check_weights", "count_steps", "prepare_data", "check_same_tasks"):
        monkeypatch.setattr(local, check, lambda *_, **__: None)
    monkeypatch.setattr(local, "read_files", lambda *_: {})
    started = list[Path]()

    def killed(_: object, run_dir: Path, *__: object) -> bool:
        started.append(run_dir)
        return False

    monkeypatch.setattr(local, "_supervise", killed)
    config = make_config()
    config.run, config.cluster.gpus, config.learner.steps = RunConfig("run", str(tmp_path)), 0, 8
    folder = finished(tmp_path / "run", config, 8)
    config.learner.steps = 7
    assert train(config, threading.Event())
    assert (started, Run(folder).end()) == ([], "done"), "with too few steps, nothing starts"
    config.learner.steps = 12
    assert not train(config, threading.Event())
    mark_steps(folder, 12)
    assert (started, Run(folder).end()) == ([folder], "")
    assert not is_finished(config.learner, values_of(config), folder), "the model is that of 8 steps"


def test_a_finished_run_without_its_model_writes_it_again(tmp_path: Path) -> None:
    config = make_config()
    config.learner.steps = 8
    folder = finished(tmp_path / "run", config, 8)
    (folder / "model").rmdir()
    assert not is_finished(config.learner, values_of(config), folder)


def test_a_finished_run_of_another_configuration_is_refused(tmp_path: Path) -> None:
    config = make_config()
    config.learner.steps = 8
    folder = finished(tmp_path / "run", config, 8)
    config.actor.temperature = 0.5
    with pytest.raises(ConfigError, match="holds a run"):
        is_finished(config.learner, values_of(config), folder)
