"""`asyncrl sft`: fine-tuning on demonstrations alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.commands.sft import __main__ as command
from asyncrl.commands.sft.__main__ import run
from asyncrl.commands.sft.from_config import fine_tune, run_rank
from asyncrl.config.locations import CONFIG_FILE, FINE_TUNING_FILE, SUMMARY_FILE, run_dir
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import AsyncrlError, ConfigError, StoppedError
from asyncrl.launch.claim import claim
from asyncrl.launch.resume import words_of
from asyncrl.learner.checkpoint.checkpoint import Checkpoints
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.machine.activity import Activity
from asyncrl.runs.finding import run_with_store
from asyncrl.runs.report.reported import read_run
from asyncrl.runs.run import Run
from tests.helpers import FakeMetrics, until
from tests.learner.support import (
    assert_weights_close,
    assert_weights_equal,
    make_config,
    random_demonstrations,
    write_demonstrations,
    write_model,
)
from tests.one_rank import one_rank

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with one_rank() as ranks:
        yield ranks


def prepared(model: Path, folder: Path, **learner: Any) -> TrainConfig:
    """A run with 10 demonstrations and 5 held-out ones, of which a step trains 4."""
    values = {"batch_size": 4, "group_size": 1, "steps": 6, "eval_every": 2, "micro_tokens": 48, **learner}
    config = make_config(model, folder, **values)
    config.data.train, config.data.eval = [str(folder / "train.parquet")], [str(folder / "held.parquet")]
    write_demonstrations(config, config.data.train, 10)
    write_demonstrations(config, config.data.eval, 5, seed=1)
    return config


class Trained:
    """A fine-tuning, which is stopped once it has logged the step `stop_after`."""

    def __init__(self, config: TrainConfig, ranks: Ranks, stop_after: int | None = None) -> None:
        stop = threading.Event()

        class Stopping(FakeMetrics):
            def log(self, step: int, values: Mapping[str, Any]) -> None:
                super().log(step, values)
                if step == stop_after:
                    stop.set()

        self.metrics, self.evaluations = Stopping(), FakeMetrics()
        self.folder = Path(config.run.dir) / config.run.name
        try:
            fine_tune(config, ranks, self.metrics, self.evaluations, stop)
        except StoppedError:
            assert stop_after is not None

    @property
    def weights(self) -> dict[str, Tensor]:
        return load_file(self.folder / "model" / "model.safetensors")


def test_steps_go_through_all_demonstrations_and_the_loss_falls(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    trained = Trained(prepared(model, tmp_path, lr=1e-2, keep_best=1), ranks)
    losses = trained.metrics.of("loss")
    assert list(losses) == list(range(6))
    assert losses == pytest.approx(trained.metrics.of("sft/loss"), rel=1e-5)
    assert trained.metrics.of("sft/epoch") == pytest.approx({0: 0.4, 1: 0.8, 2: 1, 3: 1.4, 4: 1.8, 5: 2})
    tokens = trained.metrics.of("sft/tokens")
    assert sum(tokens[step] for step in range(3)) == sum(tokens[step] for step in range(3, 6))
    assert sum(tokens[step] for step in range(3)) == random_demonstrations(10).mask.sum()
    assert losses[5] < losses[0] - 0.5
    held_out = trained.evaluations.of("eval/loss")
    assert list(held_out) == [0, 2, 4, 6], "at both ends, and every second step"
    assert trained.evaluations.of("eval/tokens")[0] == random_demonstrations(5, seed=1).mask.sum()
    ratings = json.loads((trained.folder / "checkpoints" / "ratings.json").read_text())
    assert ratings == {str(step): -loss for step, loss in held_out.items()}


@pytest.mark.parametrize(("updates", "kept"), [(1, 4), (2, 4)])
def test_a_stopped_fine_tuning_that_resumes_ends_with_the_same_bits(
    updates: int, kept: int, model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    def config(name: str) -> TrainConfig:
        return prepared(model, tmp_path / name, minibatches=updates, checkpoint_every=3)

    whole = Trained(config("whole"), ranks)
    stopped = Trained(made := config("stopped"), ranks, stop_after=3)
    assert list(stopped.metrics.of("loss")) == [0, 1, 2, 3]
    newest = Checkpoints(stopped.folder / "checkpoints", 2, ranks).complete()[-1]
    assert newest.name == f"step-{kept:06d}", "a stop keeps the steps that are done"
    resumed = Trained(made, ranks)
    assert list(resumed.metrics.of("loss")) == [4, 5]
    assert_weights_equal(resumed.weights, whole.weights)
    assert resumed.evaluations.of("eval/loss")[6] == whole.evaluations.of("eval/loss")[6]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"learner.nodes": 2}, "fine-tuning runs on one host"),
        ({"data.dataset": "my.Set"}, "name files of demonstrations in data.train"),
        ({"algorithm.sft.path": ["x"]}, "leave it out, and name files of demonstrations"),
        ({"data.train": ["none.parquet"]}, r"data\.train=none\.parquet: there is no such file"),
    ],
)
def test_missing_files_and_what_only_a_training_can_do_are_refused(
    change: dict[str, Any], why: str, model: Path, tmp_path: Path
) -> None:
    config = make_config(model, tmp_path)
    for key, value in change.items():
        *sections, name = key.split(".")
        section: Any = config
        for each in sections:
            section = getattr(section, each)
        setattr(section, name, value)
    with pytest.raises(AsyncrlError, match=why):
        run(config)


def test_a_fine_tuning_that_may_not_resume_renders_nothing(model: Path, tmp_path: Path) -> None:
    config = make_config(model, tmp_path)
    config.data.train = ["before.parquet"]
    claim(config, tmp_path / config.run.name)
    config.run.dir, config.data.train = str(tmp_path), [str(tmp_path / "now.jsonl")]
    (tmp_path / "now.jsonl").write_text('{"prompt": "a", "response": "b"}')
    with pytest.raises(ConfigError, match=r"holds a run(.|\n)*data\.train="):
        run(config)
    assert not (tmp_path / config.run.name / "demonstrations").exists()


def test_a_longer_fine_tuning_that_is_killed_has_no_result_of_its_earlier_end(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(model, tmp_path, steps=12)
    config.data.train, config.data.eval = [str(tmp_path / "train.jsonl")], None
    write_conversations(tmp_path / "train.jsonl", 3)
    folder, started = run_dir(config.run), list[Path]()
    folder.mkdir(parents=True)
    claim(config, folder)
    (folder / SUMMARY_FILE).write_text('{"result": "done"}')
    monkeypatch.setattr(command, "_supervise", lambda run_dir, *_: started.append(run_dir))
    run(config)
    assert (started, Run(folder).end()) == ([folder], "")


def test_a_fine_tuning_needs_no_held_out_demonstrations(tmp_path: Path) -> None:
    config = make_config(tmp_path / "no-model", tmp_path)
    write_conversations(tmp_path / "train.jsonl", 3)
    config.data.train, config.data.eval = [str(tmp_path / "train.jsonl")], None
    with pytest.raises(ConfigError, match="no-model"):  # The columns are checked before the model.
        run(config)


@pytest.mark.parametrize("look", [run_with_store, read_run, words_of])
def test_commands_about_episodes_say_what_to_do_with_a_fine_tuning(look: Callable[[str], Any], tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text("{}")
    (tmp_path / FINE_TUNING_FILE).touch()
    with pytest.raises(
        ConfigError, match=f"is a run of `asyncrl sft`.* `asyncrl sft experiment={tmp_path}/config.yaml`"
    ):
        look(str(tmp_path))


@pytest.mark.parametrize("key", ["replicas", "context_ranks", "expert_ranks"])
def test_ranks_are_grouped_as_in_training(key: str, model: Path, tmp_path: Path) -> None:
    config = make_config(model, tmp_path, **{key: 2})
    with pytest.raises(ConfigError, match=rf"learner\.{key}=2.*1 ranks .* are not a multiple of 2"):
        run_rank(config, threading.Event(), Activity())


def write_conversations(path: Path, count: int) -> None:
    turns = ({"prompt": f"{number}+{number}", "response": str(2 * number)} for number in range(count))
    path.write_text("\n".join(map(json.dumps, turns)))


class Command:
    """`asyncrl sft` in a process of its own, in the folder `cwd`."""

    def __init__(self, cwd: Path, *words: str) -> None:
        self._folder = cwd / "runs" / "sft"
        defaults = ("data.train=train.jsonl", "data.eval=held.jsonl", "learner.lr=1e-3", "learner.checkpoint_every=5")
        command = [sys.executable, "-m", "asyncrl", "sft", *defaults, *words]
        root = Path(__file__).parents[3]
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, cwd=cwd, env=environment, stderr=subprocess.PIPE, text=True)

    def ended(self) -> tuple[int, str]:
        output = self.process.communicate()[1]
        return self.process.returncode, output

    def when_at(self, step: int, number: signal.Signals) -> tuple[int, str]:
        """Send a signal once so many steps are done; the status of the end."""
        until(lambda: self.process.poll() is not None or self.steps() > step)
        self.process.send_signal(number)
        return self.ended()

    def steps(self) -> int:
        path = self._folder / "metrics" / "learner.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=-1)


@pytest.mark.long
def test_a_killed_and_an_interrupted_command_go_on_and_end_with_the_same_bits(model: Path, tmp_path: Path) -> None:
    folders = tmp_path / "whole", tmp_path / "killed"
    for folder in folders:
        folder.mkdir()
        write_conversations(folder / "train.jsonl", 100)
        write_conversations(folder / "held.jsonl", 5)
    words = (f"model.path={model}", "learner.epochs=12", "learner.batch_size=4", "actor.tools=[]")
    status, output = Command(folders[0], *words).ended()
    assert status == 0, output
    assert Command(folders[1], *words).when_at(40, signal.SIGKILL)[0] == -signal.SIGKILL
    status, output = Command(folders[1], *words).when_at(90, signal.SIGINT)
    assert status == 130, output
    assert "resuming" in output
    assert "Traceback" not in output
    status, output = Command(folders[1], *words).ended()
    assert status == 0, output
    whole, killed = (load_file(folder / "runs" / "sft" / "model" / "model.safetensors") for folder in folders)
    assert_weights_equal(killed, whole)
    rows = [
        [json.loads(line) for line in (folder / "runs/sft/metrics/learner.jsonl").read_text().splitlines()]
        for folder in folders
    ]
    assert [each["step"] for each in rows[1]] == list(range(300))
    assert [each["sft/loss"] for each in rows[1]] == [each["sft/loss"] for each in rows[0]]


@pytest.mark.long
def test_the_command_fine_tunes_on_two_ranks_as_on_one(model: Path, tmp_path: Path) -> None:
    found = []
    for count in (1, 2):
        folder = tmp_path / str(count)
        folder.mkdir()
        write_conversations(folder / "train.jsonl", 9)
        write_conversations(folder / "held.jsonl", 3)
        words = (f"model.path={model}", "learner.batch_size=4", "actor.tools=[]", f"cluster.learner_ranks={count}")
        status, output = Command(folder, *words).ended()
        assert status == 0, output
        found.append(load_file(folder / "runs" / "sft" / "model" / "model.safetensors"))
    assert_weights_close(*found, atol=1e-5)
