"""Roles on other hosts: what is checked before the start, which addresses and keys they get, and how they end."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Event

import psutil
import pytest

from asyncrl.config.schema import ClusterConfig, ModelConfig, RunConfig, TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.addresses import RunAddresses
from asyncrl.launch.hosts import launcher as launcher_module
from asyncrl.launch.hosts.launcher import LEASE_S, NO_CONNECTION, HostsLauncher
from asyncrl.launch.placement.placement import PlacedRole, Placement, place
from asyncrl.launch.placement.pools import Host
from asyncrl.launch.plan import show_plan
from asyncrl.launch.role_process import RoleCommand, RoleProcess
from tests.helpers import has_ended, until

SHELL = """
case "$1" in
dead) echo "no route to host" >&2; exit 255 ;;
polite) sh -c "$2"; echo "Goodbye" ;;
away) exec sh -c "$(printf %s "$2" | sed s,/.canary-,/.other-,)" ;;
old) echo '{"version": "0.0", "sees": true, "gpus": 0, "cpus": 1}' ;;
*) echo "Welcome, 7 users are here"; sh -c "$2" ;;
esac
""".replace("\n", " ")
"""Runs its second argument on the host of its first one, which is always this machine."""
SLEEPS = "import signal, time; print('ready', flush=True); time.sleep(600)"


def launcher_of(config: TrainConfig, lease_s: float = LEASE_S) -> HostsLauncher:
    return HostsLauncher(config.cluster, RunAddresses.of(config), lease_s)


def make_config(folder: Path, hosts: Sequence[str]) -> TrainConfig:
    cluster = ClusterConfig("hosts", list(hosts), ["sh", "-c", SHELL, "sh", "{host}"], gpus=0, cpus=3)
    return TrainConfig(RunConfig("run", str(folder)), ModelConfig(path="m"), cluster=cluster)


@pytest.mark.slow
def test_hosts_that_cannot_be_used_are_all_named_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        launcher_of(make_config(tmp_path, ["here", "dead", "away", "old"])).hosts()
    dead, away, old = str(refused.value).splitlines()
    assert dead.startswith("cluster.hosts: dead cannot run asyncrl (no route to host): sh -c ")
    assert (
        away
        == f"cluster.hosts: away does not share the folder {tmp_path}/run; set run.dir to one that all hosts "
        + ("read and write")
    )
    assert old.startswith("cluster.hosts: old has asyncrl 0.0, this host ")
    assert not (tmp_path / "run").exists()
    assert launcher_of(make_config(tmp_path, ["a", "polite"])).hosts() == [Host(0, 3), Host(0, 3)]


def test_a_refused_plan_over_hosts_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match=r"cluster\.hosts: dead cannot run asyncrl"):
        show_plan(make_config(tmp_path / "there" / "runs" / "of-mine", ["here", "dead"]))
    assert list((tmp_path / "there").iterdir()) == []


@pytest.mark.slow
def test_a_run_that_other_machines_can_reach_gets_keys_and_each_role_knows_the_addresses(tmp_path: Path) -> None:
    config = make_config(tmp_path, ["a", "b"])
    config.network.replay_host, config.network.learner_host = "10.0.0.1", "10.0.0.2"
    launcher_of(config).prepare(place(config, [Host(0, 3)] * 2), Event())
    assert config.network.keys == str(tmp_path / "run" / "keys")
    assert (tmp_path / "run" / "keys" / "server.secret").stat().st_mode & 0o077 == 0
    config.network.replay_host = None
    with pytest.raises(ConfigError, match=r"cluster\.hosts: a has no address .*; set network\.replay_host"):
        launcher_of(config).prepare(place(config, [Host(0, 3)] * 2), Event())
    with pytest.raises(ConfigError, match="a has no address"):
        show_plan(config)
    config.cluster.hosts = ["localhost", "b"]
    with pytest.raises(ConfigError, match=r"localhost is 127\.0\.0\.1 here, which other hosts cannot reach"):
        launcher_of(config).prepare(place(config, [Host(0, 3)] * 2), Event())


def start(tmp_path: Path, lease_s: float = 60.0) -> tuple[RoleProcess, Path]:
    """A role that runs on a host, and its log."""
    launcher = launcher_of(make_config(tmp_path, ["a", "b"]), lease_s)
    role = PlacedRole("actor-0", "actor", (), "rollout", 1, (2, 3), threads=1, cpus=1)
    launcher.set_placement(Placement((), (role,)))
    log = tmp_path / "actor-0.log"
    process = launcher.start(RoleCommand(role.name, [sys.executable, "-c", SLEEPS]), log, {"MARK": "it's here"})
    until(lambda: process.poll() is None and process.pid and "ready" in log.read_text())
    return process, log


@pytest.mark.slow
def test_a_role_on_another_host_has_its_environment_and_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    process, _ = start(tmp_path)
    environment = psutil.Process(process.pid).environ()
    assert (process.host, environment["CUDA_VISIBLE_DEVICES"], environment["MARK"]) == ("b", "2,3", "it's here")
    process.terminate()
    assert until(process.poll) == -signal.SIGTERM
    process, _ = start(tmp_path)
    process.kill()
    assert until(process.poll) == -signal.SIGKILL


def test_a_kill_on_a_host_that_is_away_waits_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor kills late roles one by one, and meanwhile keeps the leases of the others."""
    process, _ = start(tmp_path)
    keeper = psutil.Process(process.pid).parent()
    assert keeper is not None
    keeper.suspend()
    try:
        process.kill()
        assert process.poll() is None
        monkeypatch.setattr(launcher_module, "KILLED_S", 0.0)
        monkeypatch.setattr(launcher_module, "LATE_S", 0.0)
        monkeypatch.setattr(process, "lease_s", 0.0)
        assert until(process.poll) == NO_CONNECTION
    finally:
        keeper.resume()
    until(lambda: has_ended(process.pid))


@pytest.mark.slow
@pytest.mark.heavy
def test_a_role_whose_connection_breaks_ends_before_it_counts_as_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, _ = start(tmp_path, lease_s=5.0)
    role = psutil.Process(process.pid)
    connection = next(each for each in psutil.Process().children() if role in each.children(recursive=True))
    # A busy host may be late to end it.
    monkeypatch.setattr(launcher_module, "LATE_S", 3600.0)
    connection.kill()
    until(lambda: process.poll() is None and has_ended(role.pid))
    assert process.poll() is None
    monkeypatch.setattr(launcher_module, "LATE_S", 0.0)
    assert until(process.poll) == NO_CONNECTION
