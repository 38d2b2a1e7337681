"""`asyncrl train`: the whole run on this machine, from one command line."""

from __future__ import annotations

import fcntl
import logging
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import yaml

from asyncrl.config import locations
from asyncrl.config.changes import by_key, changed_keys
from asyncrl.config.load import role_main
from asyncrl.config.locations import CONFIG_FILE
from asyncrl.config.option import as_yaml
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.preflight import preflight
from asyncrl.launch.run_folder import is_begun, set_aside, steps_in_newest_checkpoint
from asyncrl.launch.summary import report
from asyncrl.launch.supervisor import RoleCommand, RunFailedError, Supervisor
from asyncrl.machine import process
from asyncrl.machine.files import write_whole
from asyncrl.machine.ports import free_ports
from asyncrl.observe.dashboard import Dashboard

log = logging.getLogger("asyncrl.train")

ROLE_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


def role_commands(config: TrainConfig, path: Path) -> list[RoleCommand]:
    """Every process of a run on one machine, in the order of starting (any order works). All read the configuration
    that the run's folder has at `path`: files that a user changes during the run change nothing in it."""
    cluster, shards = config.cluster, config.replay.shards

    def command(name: str, module: str, *more: str) -> RoleCommand:
        return role_command(name, module, path, *more)

    return [
        *([command("replay", "replay")] if shards == 1 else []),
        *(command(f"replay-{shard}", "replay", f"replay.shard={shard}") for shard in range(shards) if shards > 1),
        *(command(f"scoring-{index}", "scoring") for index in range(cluster.scorers)),
        *(command(f"actor-{index}", "actor") for index in range(cluster.actors)),
        command("learner", "learner"),
    ]


def role_command(name: str, module: str, path: Path, *more: str) -> RoleCommand:
    """A process that reads the configuration at `path`."""
    quoted = str(path.absolute()).replace("'", "\\'")
    return RoleCommand(name, [sys.executable, "-m", f"asyncrl.{module}", f"experiment='{quoted}'", *more])


def choose_ports(config: TrainConfig) -> None:
    """Sets the ports that the configuration leaves open, so that all roles share them.

    Raises UnavailableError: none is free.
    """
    for key, count in (("replay_port", config.replay.shards), ("weights_port", 1)):
        if not getattr(config.network, key):
            setattr(config.network, key, free_ports(count))


@contextmanager
def exclusively(run_dir: Path) -> Iterator[None]:
    """Lock the run folder. Raises ConfigError: another supervisor has locked it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "supervised").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"{run_dir} is being run by another process; stop it, or choose another run.name"
            ) from error
        try:
            yield
        finally:
            if list(run_dir.iterdir()) == [run_dir / "supervised"]:  # Nothing started.
                shutil.rmtree(run_dir)


def check_resume(config: TrainConfig, run_dir: Path) -> None:
    """Raises ConfigError: the folder holds a run that has begun, and it cannot resume with this configuration."""
    try:
        _changes(config, run_dir)
    except ConfigError:
        if is_begun(run_dir):
            raise


def _changes(config: TrainConfig, run_dir: Path) -> list[str]:
    """A line for each key that the run in the folder had with another value; none if there is no run.

    Raises ConfigError: the run cannot resume with this configuration.
    """
    path = run_dir / CONFIG_FILE
    if not path.exists():
        return []
    before, after = by_key(yaml.safe_load(path.read_text())), by_key(asdict(config))
    try:
        changed = changed_keys(before, after)
    except ConfigError as error:
        raise ConfigError(f"{run_dir} holds a run: {error}") from error
    return [f"{key}={as_yaml(after[key])} from now on, before {as_yaml(before[key])}" for key in changed]


def claim(config: TrainConfig, run_dir: Path) -> bool:
    """Write the run's configuration into its folder; True if the folder holds an earlier part of the same run.

    Raises ConfigError: the run cannot resume with this configuration.
    """
    path = run_dir / CONFIG_FILE
    resumed = path.exists()
    for line in _changes(config, run_dir):
        log.info("%s", line)
    write_whole(path, yaml.safe_dump(asdict(config), sort_keys=False))
    return resumed


def claim_or_begin_anew(config: TrainConfig, run_dir: Path) -> bool:
    """As `claim`; but a run that has not begun a step, because its first start failed, does not keep its name: with
    another configuration it begins anew."""
    try:
        return claim(config, run_dir)
    except ConfigError:
        if is_begun(run_dir):
            raise
        aside = set_aside(run_dir)
        log.info("%s held a run that never began a step; it begins anew, and what it had is in %s", run_dir, aside)
        return claim(config, run_dir)


def is_past_its_steps(config: TrainConfig, run_dir: Path) -> bool:
    """Whether the run has done more steps than `config` asks for; says so."""
    done, wanted = steps_in_newest_checkpoint(run_dir), config.learner.steps
    if past := done > wanted:
        log.warning(
            "%s has done %d steps, so learner.steps=%d leaves nothing to do; to train on, set a greater learner.steps "
            "than %d",
            *(run_dir, done, wanted, done),
        )
    return past


def train(config: TrainConfig, overrides: Sequence[str]) -> bool:
    """Run everything until the learner is done (True) or a signal comes (False).

    A run that has done more steps than `config` asks for starts nothing. `overrides` is the command line, for the
    command that resumes. On a host of the learner other than the first, everything is the ranks of this host. Raises
    AsyncrlError: the run cannot start or go on.
    """
    if config.learner.node:
        return _train_on_other_host(config)
    run_dir = locations.run_dir(config.run)
    stop = process.stop_on_signals()
    with exclusively(run_dir):
        preflight(config, partial(check_resume, run_dir=run_dir))
        # The ports come first, so that the configuration in the run's folder has those of its replay.
        choose_ports(config)
        resumed = claim_or_begin_anew(config, run_dir)
        if is_past_its_steps(config, run_dir):
            return True
        locations.run_identity(config.run, make=True)
        log.info("%s %s; logs are in %s", "resuming" if resumed else "starting", run_dir, run_dir / "logs")
        supervisor = Supervisor(
            role_commands(config, run_dir / CONFIG_FILE),
            run_dir,
            ROLE_ENVIRONMENT,
            config.cluster.max_restarts,
            "learner",
            config.cluster.restart_pause_s,
        )
        result, reason = "failed", ""
        try:
            with Dashboard(config, run_dir, lambda: supervisor.restarts) as dashboard:
                done = supervisor.run(stop.is_set, dashboard.update)
            result = "done" if done else "stopped"
        except RunFailedError as error:
            reason = str(error)
            raise
        finally:
            resume = shlex.join(["asyncrl", "train", *overrides])
            sys.stderr.write(report(run_dir, config.learner.steps, result, reason, resume))
        return done


def _train_on_other_host(config: TrainConfig) -> bool:
    """Its folder within that of the run has the logs of the learner's ranks here."""
    folder, stop = locations.run_dir(config.run) / f"host-{config.learner.node}", process.stop_on_signals()
    with exclusively(folder):
        write_whole(folder / CONFIG_FILE, yaml.safe_dump(asdict(config), sort_keys=False))
        supervisor = Supervisor(
            [role_command("learner", "learner", folder / CONFIG_FILE)],
            folder,
            ROLE_ENVIRONMENT,
            config.cluster.max_restarts,
            "learner",
            config.cluster.restart_pause_s,
        )
        log.info("host %d of the learner; logs are in %s", config.learner.node, folder / "logs")
        return supervisor.run(stop.is_set, lambda: None)


def run(config: TrainConfig) -> None:
    if not train(config, sys.argv[1:]):
        sys.exit(130)


def main() -> None:
    """The entry of the command line."""
    role_main(run)
