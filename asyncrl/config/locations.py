"""The paths of a run's files, the addresses of its servers, and its identity, from the configuration."""

from __future__ import annotations

import uuid
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import yaml

from asyncrl.config.schema import NetworkConfig, RunConfig, TrainConfig
from asyncrl.config.secrets import has_secrets
from asyncrl.errors import ConfigError
from asyncrl.machine.files import write_whole
from asyncrl.types import RunIdentity

CONFIG_FILE = "config.yaml"
"""The file in a run's folder that holds its configuration."""
IDENTITY_FILE = "identity"
"""The file in a run's folder that holds its id."""
PROCESSES_FILE = "processes.json"
"""The file in a run's folder in which the supervisor records where each role runs."""
SUMMARY_FILE = "summary.json"
"""The file in a run's folder with its results, for programs to read."""
START_WARNINGS_FILE = "start_warnings.json"
"""The file in a run's folder with the warnings that its newest start has logged."""
SOLVED_FILE = "solved"
"""The file in a run's folder that a learner writes if it ends because the policy solves the tasks."""
FINE_TUNING_FILE = "fine_tuning"
"""The file that marks the folder of a run of `asyncrl sft`, which has no replay, no episodes and no rewards."""
CHECKPOINTS = "checkpoints"
"""The subfolder of a run for its checkpoints."""
CARD_FILES = ("README.md", "curves.png")
"""The model card of an exported model, and the card's picture. An export does not overwrite them."""
AGENTS_FOLDER = "agents"
"""The subfolder of a run for its remote agents. Actors write there the addresses and keys that agents need to request
episodes.
"""
ALIVE_FOLDER = "alive"
"""The subfolder of a run for the heartbeats of its roles."""


def refuse_fine_tuning(run: Path) -> None:
    """Raises ConfigError: the folder is a run of `asyncrl sft`. Commands that need episodes or rewards call this."""
    if (run / FINE_TUNING_FILE).exists():
        raise ConfigError(
            f"{run} is a run of `asyncrl sft`, which has no episodes and no rewards. `asyncrl dashboard {run}` shows "
            f"its figures, `asyncrl sft experiment={run / CONFIG_FILE}` goes on with it, and `asyncrl train "
            f"model.path={run / 'model'} run.name=NAME` trains the result further"
        )


def run_dir(config: RunConfig) -> Path:
    """The folder of the run: its store, checkpoints, logs and metrics."""
    return Path(config.dir) / config.name


def agents_folder(config: RunConfig) -> Path:
    """The folder of the run for its remote agents (`AGENTS_FOLDER`)."""
    return run_dir(config) / AGENTS_FOLDER


def gpu_locks(config: RunConfig) -> Path:
    """The folder of the locks on GPUs that learner and servers share (cluster.colocated)."""
    return run_dir(config) / "gpus"


def steps_in_newest_checkpoint(run_dir: Path) -> int:
    """The number of learner steps before the newest complete checkpoint of a run; 0 if the run has no checkpoint."""
    marks = (run_dir / CHECKPOINTS).glob("step-*/complete")
    steps = (mark.parent.name.removeprefix("step-") for mark in marks)
    return max((int(each) for each in steps if each.isdecimal()), default=0)


def record_config(config: TrainConfig, folder: Path | None = None) -> None:
    """Write the configuration for roles and commands to read. It goes into `folder`, by default the run's folder. Each
    further host of the learner has its own configuration and its own `folder`. If it has secrets, only the owner can
    read the file."""
    path, values = (folder or run_dir(config.run)) / CONFIG_FILE, asdict(config)
    write_whole(path, yaml.safe_dump(values, sort_keys=False), private=has_secrets(values))


def replay_endpoints(config: NetworkConfig, shards: int) -> list[str]:
    """The address of every shard of the replay."""
    return [f"tcp://{config.replay_address}:{config.replay_port + shard}" for shard in range(shards)]


def weights_endpoint(config: NetworkConfig) -> str:
    """The address at which the learner publishes weights."""
    return f"tcp://{config.learner_address}:{config.weights_port}"


def run_identity(config: RunConfig, make: bool = False) -> RunIdentity:
    """The name and the id of the run to which this process belongs.

    The id is in the run's folder and never changes. With `make`, an id is created if there is none. The id is empty if
    this process finds no file of the id. Raises ConfigError: the file is empty.
    """
    path = run_dir(config) / IDENTITY_FILE
    if make and not path.exists():
        identity = uuid.uuid4().hex
        partial = path.with_name(f".{path.name}-{identity}.partial")
        write_whole(partial, identity)
        # Another process may have created the file in the meantime.
        with suppress(FileExistsError):
            path.hardlink_to(partial)
        partial.unlink()
    if not path.exists():
        return RunIdentity(config.name, "")
    if not (identity := path.read_text().strip()):
        raise ConfigError(f"{path} is empty: put the run's id back from a copy, or give this run another run.name")
    return RunIdentity(config.name, identity)
