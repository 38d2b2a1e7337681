"""No secret of a configuration leaves the process, but in files that only their owner may read."""

from __future__ import annotations

import json
import logging
import stat
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any, get_args, get_origin

import psutil
import pytest

from asyncrl.commands.evaluate.from_config import require_same
from asyncrl.config.changes import STEP_SECTIONS, values_of, with_values
from asyncrl.config.keys import OPTIONS
from asyncrl.config.load import log_to_stderr, role_main
from asyncrl.config.locations import CONFIG_FILE
from asyncrl.config.option import Option
from asyncrl.config.quoting import quoted
from asyncrl.config.schema import TrainConfig
from asyncrl.config.schema.scoring import ScoringConfig
from asyncrl.config.schema.tools import SandboxConfig
from asyncrl.dashboard.overview import overview
from asyncrl.launch.claim import claim
from asyncrl.launch.plan import run_or_plan
from asyncrl.launch.slurm import chain
from asyncrl.observe.from_config import source_of
from asyncrl.observe.sinks.opening import open_metrics
from asyncrl.replay.stored import StoredRun
from asyncrl.runs.card import write_card
from asyncrl.runs.from_config import read_config
from asyncrl.runs.inspect.parquet import export_run
from asyncrl.runs.inspect.table import change_table
from asyncrl.runs.report.compare import as_plain, comparison_page
from asyncrl.runs.report.comparison import compare
from asyncrl.runs.report.page import write_report
from asyncrl.runs.report.reported import read_run
from asyncrl.runs.run import Run
from asyncrl.runs.table import RunTable
from asyncrl.scoring.verifier import Verifier
from tests.helpers import until
from tests.runs.inspect.support import make_run, printed, run_episodes
from tests.runs.support import write_run

PLANT = "s3cr3t"
"""The beginning of each planted secret."""
KEPT = ("run.name", "run.dir", "model.path", "data.train")


class Plants:
    """A secret of its own in each place of a configuration that may have one."""

    def __init__(self) -> None:
        self._numbers = count()

    def value(self) -> str:
        return f"{PLANT}-{next(self._numbers):04}"

    def address(self) -> str:
        return f"https://user:{self.value()}@127.0.0.1:1/path?api_key={self.value()}"

    def planted(self, option: Option) -> Any:
        """A value of the option's type that has secrets; None: it can have none."""
        kind, inner = get_origin(option.type), get_args(option.type)[-1:]
        if option.choices or option.secret == "none":
            return None
        if option.holds_anything:
            one = {"headers": {"X-Any": self.value()}, "env": {"PLAIN": self.value()}, "api_key": self.value()}
            whole = {"some": {**one, "url": self.address(), "args": ["--hf-token", self.value()]}, **one}
            return [whole] if kind is list else whole
        if option.secret == "all":
            return {"PLAIN": self.value(), "OTHER": self.value()} if kind is dict else self.value()
        if kind is list and inner == (str,):
            return ["--api-key", self.value(), self.address(), f"A_TOKEN={self.value()}"]
        if kind is dict and inner == (str,):
            return {"some": self.address()}
        return self.address() if option.type is str else None

    def config(self, values: dict[str, Any]) -> TrainConfig:
        """A configuration with secrets wherever they may be, and these `values`."""
        own = {key: option for key, option in OPTIONS.items() if not key.startswith((*STEP_SECTIONS, *KEPT))}
        planted = {key: value for key, option in own.items() if (value := self.planted(option)) is not None}
        return with_values(TrainConfig(), {**planted, **values})


@pytest.fixture
def plants() -> Plants:
    return Plants()


def readable_by_others(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            yield path


def assert_nothing_shows(folder: Path, *texts: str) -> None:
    for text in texts:
        assert PLANT not in text
    for path in readable_by_others(folder):
        assert PLANT.encode() not in path.read_bytes(), path


@pytest.mark.slow
def test_what_a_run_writes_prints_and_exports_has_no_secret(
    tmp_path: Path, plants: Plants, capfd: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", [0.1, 0.5])
    (run / CONFIG_FILE).unlink()
    fixed = {"run.name": "run", "run.dir": str(tmp_path), "model.path": "owner/base", "data.train": ["tasks.parquet"]}
    config, changed = plants.config(fixed), plants.config(fixed)
    for each in (config, changed):
        each.observe.sinks = ["console"]
    loggers = logging.getLogger().handlers[:], logging.getLogger().level
    try:
        log_to_stderr()
        claim(config, run)
        # What stays for the whole run has no other value but its secrets.
        assert claim(changed, run)
        require_same(values_of(changed), run)
        logging.getLogger("asyncrl.test").error("%s failed with %s", plants.address(), {"api_key": plants.value()})
        open_metrics(source_of(config, "actor-0"), config.observe).close()
    finally:
        logging.getLogger().handlers[:], level = loggers
        logging.getLogger().setLevel(level)
    assert stat.S_IMODE((run / CONFIG_FILE).stat().st_mode) == 0o600
    assert read_config(run) == changed, "a run resumes with the real values"

    core = make_run(run)
    core.configure(values_of(config))
    run_episodes(core, 8)
    core.planned(0)
    core.configure(values_of(changed))
    assert core.configure(values_of(replace(changed, actor=replace(changed.actor, concurrency=7))))
    core.store.close()
    with closing(StoredRun(run / "replay")) as stored:
        found = stored.changes()
        export_run(stored, tmp_path / "exported")
    (run / "model").mkdir()
    assert write_card(Run(run), run / "model")
    write_report(str(run))
    compared = compare([read_run(str(run)), read_run(str(write_run(tmp_path / "other", [0.5, 0.9])))])
    told = comparison_page(compared) + json.dumps(as_plain(compared))
    told += json.dumps(overview(Run(run))) + json.dumps([asdict(each) for each in found]) + printed(change_table(found))
    lines, _ = RunTable({name: Run(tmp_path / name) for name in (run.name, "other")}).look(1e9)
    told += json.dumps([asdict(line) for line in lines.values()])
    assert lines[run.name].differs
    output = capfd.readouterr()
    assert "actor.session_key=(hidden) from now on; it was (hidden)" in output.err
    assert_nothing_shows(tmp_path, told, output.out, output.err)


@pytest.mark.parametrize("option", ["--cfg", "--plan"])
def test_the_configuration_and_the_plan_of_a_command_have_no_secret(
    option: str, tmp_path: Path, plants: Plants, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tasks.parquet"
    file.touch()
    words = ["model.path=m", f"data.train={file}", "cluster.gpus=0", "cluster.cpus=8"]
    variables = f"{{MODE: {plants.value()}}}"
    words += [f"actor.session_key={plants.value() * 2}", f"actor.search.url={quoted(plants.address())}"]
    words += [f"engine.server.environment={variables}", f"cluster.ray.runtime_env={{env_vars: {variables}}}"]
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    if option == "--cfg":
        role_main(lambda _: None, ["--cfg", "job", *words])
    else:
        run_or_plan(lambda _: None, [option, *words])
    output = capfd.readouterr()
    assert "session_key: (hidden)" in output.out or "replay" in output.out
    assert_nothing_shows(tmp_path, output.out, output.err)


def test_the_commands_that_submit_a_chain_of_jobs_are_printed_without_secrets(
    plants: Plants, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"actor.agent_environment={{A: {plants.value()}}}", f"actor.session_key={plants.value()}", "run.name=x"]
    chain.submit(["script.sh", "2", "--time=1:00:00", *words], show_only=True)
    printed_lines = capsys.readouterr().out
    assert "run.name=x" in printed_lines
    assert PLANT not in printed_lines


@pytest.mark.slow
def test_no_command_line_of_a_process_that_judges_has_a_secret(plants: Plants) -> None:
    sandbox = SandboxConfig(arguments=["--env", f"PLAIN={plants.value()}"])
    lines: set[str] = set()

    def judges() -> bool:
        for each in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # It has ended meanwhile.
                lines.add(" ".join(each.cmdline()))
        return any("asyncrl.scoring.verifier" in line for line in lines)

    with closing(Verifier(ScoringConfig(), None, sandbox)):
        until(judges)
    assert PLANT not in " ".join(lines)
