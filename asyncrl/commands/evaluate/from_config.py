"""Makes the configuration of an evaluation from that of a run, or from a model and KEY=VALUE words, and plays it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from asyncrl.commands.evaluate.progress import EvaluationProgress
from asyncrl.config import locations
from asyncrl.config.changes import KEYS
from asyncrl.config.compose import read
from asyncrl.config.files import GROUPS
from asyncrl.config.quoting import quoted
from asyncrl.config.schema import DataConfig, DemonstrationConfig, NetworkConfig, SftConfig, TrainConfig, WeightsConfig
from asyncrl.config.schema.cluster import ROLES
from asyncrl.config.secrets import masked_value, shown_value
from asyncrl.data.from_config import run_tasks
from asyncrl.errors import ConfigError, StoppedError
from asyncrl.launch.addresses import RunAddresses
from asyncrl.launch.claim import claim
from asyncrl.launch.local import role_commands
from asyncrl.launch.placement.placement import place, settle
from asyncrl.launch.preflight.tasks.prompts import prepare_data
from asyncrl.launch.preflight.tasks.same_tasks import check_same_tasks
from asyncrl.launch.processes import ROLE_ENVIRONMENT, role_command, this_host
from asyncrl.launch.role_process import RoleCommand
from asyncrl.launch.supervisor import Supervisor
from asyncrl.runs.from_config import read_config
from asyncrl.runs.run import Run

log = logging.getLogger("asyncrl.commands.evaluate")

EVALUATOR = "evaluator"
MEASURED = ("model.", "data.", "actor.", "scoring.", "learner.eval_attempts")
"""The keys that affect the result of an evaluation."""
ANY_PORT = {"network.replay_port": 0, "network.weights_port": 0}
SET_HERE = {
    "model.path": "the first argument names it",
    "data.train": "--data names the tasks",
    "data.eval": "--data names the tasks",
    "data.limit": "data.eval_limit is the maximum number of tasks",
    "learner.eval_attempts": "--n sets it",
}
TWINS = {"data.train": "data.eval", "data.limit": "data.eval_limit"}
"""The keys that an evaluation sets to the value of another key, which the user sets."""
OPTIONS = {"data.eval": "--data", "learner.eval_attempts": "--n", "model.path": "MODEL"}
"""The words of the command line that set a key."""
ADAPTERS = "adapters cannot be evaluated alone: merge them into a model first (asyncrl merge), and name its folder"


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """The arguments of a command line.

    - `run`: the run's folder; None if `model` is evaluated;
    - `data`: the sources of the tasks, a single one for a model;
    - `words`: KEY=VALUE words.
    """

    run: Path | None
    model: str
    data: Sequence[str]
    attempts: int
    words: Sequence[str]
    config_dir: Path | None = None

    def read(self) -> TrainConfig:
        """The configuration from the run or the words, before `without_training` changes it. Raises ConfigError: the
        words or the run cannot be used."""
        keys = [word.lstrip("+").partition("=")[0] for word in self.words]
        wrong = [f"{key}: {SET_HERE[key]}" for key in keys if key in SET_HERE]
        wrong += [f"{key}: {ADAPTERS}" for key in keys if f"{key}.".startswith("model.lora.")]
        if wrong:
            raise ConfigError("\n".join(wrong))
        if self.run is None:
            named = {"model.path": self.model, "data.train": self.data[0], "data.eval": self.data[0], **ANY_PORT}
            return read([*(f"{key}={quoted(value)}" for key, value in named.items()), *self.words], self.config_dir)
        if "experiment" in keys:
            raise ConfigError(f"experiment: {self.run} gives the configuration; set single keys, or choose groups")
        # If a word such as scoring=NAME chooses a file of a group, the file replaces the run's values of that section.
        config = read_config(self.run)
        # All roles of the evaluation are on this machine. They get ports of their own, because the run may still use
        # its ports.
        cluster = replace(
            config.cluster, launcher="local", hosts=[], pools={}, roles={}, actors=None, scorers=None, colocated=False
        )
        network = NetworkConfig(replay_port=0, weights_port=0, max_message_mb=config.network.max_message_mb)
        observe = replace(config.observe, sinks=["console"], upload=[])
        # The run's limit is for its own held-out tasks. For other tasks, a word may set a limit.
        limit = config.data.eval_limit if list(self.data) == config.data.eval else None
        data = replace(config.data, eval=list(self.data), eval_limit=limit)
        sections = asdict(replace(config, cluster=cluster, network=network, observe=observe, data=data))
        values = {name: value for name, value in sections.items() if name not in GROUPS or name not in keys}
        with TemporaryDirectory() as folder:
            path = Path(folder) / "run.yaml"
            path.write_text(yaml.safe_dump(values, sort_keys=False))
            return read([f"experiment={quoted(path)}", *self.words])


def without_training(config: TrainConfig, request: EvaluationRequest, folder: Path) -> TrainConfig:
    """The configuration for the evaluation in `folder`: the same episodes on the requested tasks, without training."""
    return replace(
        config,
        run=replace(config.run, name=folder.name, dir=str(folder.parent)),
        data=DataConfig(
            train=list(request.data),
            eval=list(request.data),
            limit=config.data.eval_limit,
            eval_limit=config.data.eval_limit,
            columns=config.data.columns,
            system_prompt=config.data.system_prompt,
            keep_in_memory=config.data.keep_in_memory,
            dataset=config.data.dataset,
            dataset_params=config.data.dataset_params,
            max_prompt_length=config.data.max_prompt_length,
            filter_overlong=config.data.filter_overlong,
            truncation=config.data.truncation,
        ),
        weights=replace(
            config.weights, dir=None, to_engines=_to_engines(config.weights.to_engines, config.engine.kind)
        ),
        replay=replace(config.replay, retention="all", source=None, shards=1, shard=0),
        learner=replace(config.learner, steps=0, epochs=None, eval_attempts=request.attempts),
        algorithm=replace(config.algorithm, sft=SftConfig(), demonstration=DemonstrationConfig()),
    )


def require_same(now: Mapping[str, Any], folder: Path) -> None:
    """Raises ConfigError: the evaluation in `folder` began with other values of the MEASURED keys. The message names
    them as the user sets them."""
    run = Run(folder)
    if not run.config_file.exists():
        return
    before = run.real_values()
    measured = [key for key in KEYS if key.startswith(MEASURED)]
    changed = [key for key in measured if masked_value(key, before[key]) != masked_value(key, now[key])]
    if named := [key for key in changed if TWINS.get(key) not in changed]:
        lines = (
            f"{OPTIONS.get(key, key)}={shown_value(key, now[key])}: it was {shown_value(key, before[key])}"
            for key in named
        )
        raise ConfigError(
            "\n".join((f"{folder} holds another evaluation: set these back, or choose another run.name", *lines))
        )


def play(config: TrainConfig, folder: Path, stop: threading.Event) -> None:
    """Start the roles, with the evaluator instead of a learner, and wait until the evaluator ends.

    Raises StoppedError: `stop` was set. Raises RunFailedError: a role failed too often.
    """
    RunAddresses.of(config).choose_ports()
    placement = place(config, [this_host(config.cluster)], [role for role in ROLES if role != "learner"])
    settle(config.cluster, config.learner, placement)
    prepare_data(config, stop)
    check_same_tasks(run_tasks(config), folder)
    resumed = claim(config, folder)
    locations.run_identity(config.run, make=True)
    log.info("%s %s; logs are in %s", "resuming" if resumed else "starting", folder, folder / "logs")
    path = folder / locations.CONFIG_FILE
    evaluator = RoleCommand(EVALUATOR, role_command("commands.evaluate.evaluator", path), ROLE_ENVIRONMENT)
    roles, cluster = role_commands(placement, path), config.cluster
    supervisor = Supervisor(
        [*roles, evaluator],
        folder,
        cluster.max_restarts,
        EVALUATOR,
        cluster.restart_pause_s,
        hang_s=cluster.hang_timeout_s,
    )
    with closing(EvaluationProgress(folder)) as progress:
        done = supervisor.run(stop.is_set, progress.update)
    if not done:
        raise StoppedError("stopped; run the same command, with the same --step, to resume")


def _to_engines(route: str, engine_kind: str) -> str:
    """The value of `weights.to_engines` for a publisher without a GPU. `route` is the run's own value."""
    if route == "disk":
        return "disk"
    return "zmq" if engine_kind == "embedded" else WeightsConfig().to_engines
