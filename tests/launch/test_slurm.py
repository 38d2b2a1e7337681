"""A run as a job of Slurm, with stubs of its programs. tests/slurm has the real ones."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

import asyncrl
from asyncrl.config.exits import EXIT_STOPPED
from asyncrl.config.schema import RunConfig, TrainConfig
from asyncrl.errors import ConfigError, UnavailableError
from asyncrl.launch.addresses import RunAddresses
from asyncrl.launch.local import role_commands
from asyncrl.launch.placement.placement import Placement, place, settle
from asyncrl.launch.placement.pools import Host
from asyncrl.launch.preflight.settled import check_settled
from asyncrl.launch.role_process import RoleCommand
from asyncrl.launch.slurm import job
from asyncrl.launch.slurm.chain import ChainLink, parse, submit
from asyncrl.launch.slurm.commands import (
    SlurmJob,
    SlurmNode,
    forget_options_of_job,
    has_ended_early,
    requeue,
    step_command,
    this_job,
)
from asyncrl.launch.slurm.job import name_task, requeue_this_job
from asyncrl.launch.slurm.launcher import SlurmLauncher
from asyncrl.launch.slurm.ray_nodes import AUTH_VARIABLES, REPLAY_RESOURCE, RayNodes, ask_for_token, starts_ray
from asyncrl.launch.slurm.step import NodeReport, count_gpus
from asyncrl.machine.child import kill_group, start_guarded
from asyncrl.observe.sinks import metrics_file
from asyncrl.runs.lines import read_lines
from tests.chaos.world import World
from tests.helpers import GENEROUS_S, until
from tests.launch.stub_slurm import ADDRESS, write_programs

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launchers" / "slurm_launch.sh"
SCRIPTS = [LAUNCH, *sorted((ROOT / "launchers" / "examples").glob("*.sh"))]
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a,b"}


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which the stub writes what scontrol was asked to do."""
    monkeypatch.setenv("PATH", f"{write_programs(tmp_path / 'bin')}:{os.environ['PATH']}")
    monkeypatch.setenv("STUB_REQUESTS", str(tmp_path / "requests"))
    return tmp_path / "requests"


def make_config(folder: Path, **cluster: object) -> TrainConfig:
    config = TrainConfig(run=RunConfig(name="run", dir=str(folder)))
    for name, value in cluster.items():
        setattr(config.cluster.slurm, name, value)
    config.network.replay_port = config.network.weights_port = 0
    return config


def launcher_of(config: TrainConfig, job: SlurmJob, found: Sequence[NodeReport] = ()) -> SlurmLauncher:
    return SlurmLauncher(config.cluster, RunAddresses.of(config), job, found)


def reports(*nodes: str, gpus: int = 0) -> list[NodeReport]:
    return [
        NodeReport(node, gpus, 4, f"10.0.0.{index}", 20000, True, asyncrl.__version__)
        for index, node in enumerate(nodes, 1)
    ]


def placed(config: TrainConfig, *hosts: Host) -> Placement:
    placement = place(config, hosts)
    settle(config.cluster, config.learner, placement)
    return placement


def test_a_job_knows_its_nodes_and_those_of_each_component(stub: Path) -> None:
    assert this_job(JOB) == SlurmJob("7", (SlurmNode("a", ADDRESS), SlurmNode("b", ADDRESS)))
    parts = {"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "a", "SLURM_JOB_NODELIST_HET_GROUP_1": "b,c"}
    job = this_job({**JOB, **parts})
    assert [(node.name, node.group) for node in job.nodes] == [("a", 0), ("b", 1), ("c", 1)]
    assert job.groups == [0, 1]
    with pytest.raises(ConfigError, match=r"sbatch launchers/slurm_launch.sh"):
        this_job({})


def test_a_step_shares_all_of_its_node_and_takes_no_shape_from_the_job() -> None:
    nodes = [SlurmNode("a", "10.0.0.1", 1), SlurmNode("b", "10.0.0.2", 1)]
    assert step_command("look", nodes, ["--container-image=x"], ["enroot"], ["true"]) == [
        *("srun", "--het-group=1", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--nodelist=a,b", "--overlap"),
        *("--cpu-bind=none", "--mpi=none", "--export=ALL", "--job-name=look", "--container-image=x", "enroot", "true"),
    ]
    environment = {"SLURM_NTASKS": "8", "SLURM_CPUS_PER_TASK": "2", "SLURM_GPUS_PER_TASK": "1", "SLURM_JOB_ID": "7"}
    forget_options_of_job(environment)
    assert environment == {"SLURM_JOB_ID": "7"}


def test_roles_go_to_the_nodes_of_their_pools_with_their_gpus(tmp_path: Path) -> None:
    config = make_config(tmp_path, python="py", container=["box"])
    nodes = (SlurmNode("a", "a"), SlurmNode("b", "b"))
    launcher = launcher_of(config, SlurmJob("7", nodes), reports("a", "b", gpus=2))
    placement = placed(config, *launcher.hosts())
    launcher.prepare(placement, threading.Event())
    commands = {role.name: launcher.role_command(role) for role in role_commands(placement, tmp_path / "config.yaml")}
    for role in placement.roles:
        command = commands[role.name]
        assert f"--nodelist={nodes[role.node].name}" in command
        start = command.index("box")
        assert command[start : start + 6] == [
            *("box", "py", "-m", "asyncrl.launch.slurm.step", "role", ",".join(map(str, role.gpus or ())))
        ]
        assert command[start + 6 : start + 9] == ["py", "-m", f"asyncrl.{role.module}"]
    learner = placement.of("learner")[0]
    assert learner.gpus == (0, 1)
    network = config.network
    assert (network.replay_address, network.learner_address) == ("10.0.0.1", "10.0.0.1")
    assert (network.replay_port, network.weights_port) == (20000, 20001)
    assert network.keys is not None
    assert stat.S_IMODE(Path(network.keys).stat().st_mode) == 0o700


def test_a_learner_over_several_nodes_meets_at_its_first_one_by_the_named_interface(tmp_path: Path) -> None:
    config = make_config(tmp_path, interface="ib0")
    names = ("a", "b", "c", "d")
    launcher = launcher_of(
        config, SlurmJob("7", tuple(SlurmNode(each, each) for each in names)), reports(*names, gpus=1)
    )
    placement = placed(config, *launcher.hosts())
    launcher.prepare(placement, threading.Event())
    with pytest.raises(ConfigError, match=r"network\.insecure"):
        check_settled(config, placement)
    config.network.insecure = True
    launcher.prepare(placement, threading.Event())
    assert config.learner.nodes == 2
    assert (config.learner.rendezvous, config.learner.interface) == ("10.0.0.1:20002", "ib0")


@pytest.mark.slow
def test_nodes_tell_what_they_have_and_each_that_cannot_be_used_is_named(stub: Path, tmp_path: Path) -> None:
    job = this_job(JOB)
    found = launcher_of(make_config(tmp_path / "good"), job).hosts()
    assert [host.cpus for host in found] == [len(os.sched_getaffinity(0))] * 2
    assert not (tmp_path / "good" / "run").exists(), "the canary is gone, and so is its empty folder"
    launcher = launcher_of(make_config(tmp_path, interface="nothing0"), job)
    with pytest.raises(ConfigError, match="node a: there is no network interface nothing0") as raised:
        launcher.hosts()
    assert "node b" in str(raised.value)
    elsewhere = ["sh", "-c", 'exec "$@" --canary=/nowhere', "sh"]
    with pytest.raises(ConfigError, match=r"run.dir=.*: node a does not see a file"):
        launcher_of(make_config(tmp_path, container=elsewhere), job).hosts()
    with pytest.raises(ConfigError, match=r"node b of the job has not reported"):
        launcher_of(make_config(tmp_path, container=["false"]), job).hosts()


def is_ready(log_file: Path) -> bool:
    return "ready" in log_file.read_text()


@pytest.mark.slow
def test_a_role_is_asked_to_stop_or_killed_through_its_step_and_each_start_of_a_job_has_its_logs(
    stub: Path, tmp_path: Path
) -> None:
    config = make_config(tmp_path)
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (logs / "learner.log").write_text("of a run without Slurm")
    polite = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(130))\n"
        "signal.signal(signal.SIGUSR2, lambda *_: sys.exit(7))\n"
        "print('ready', flush=True)\ntime.sleep(600)"
    )
    for attempt in (1, 2):
        launcher = launcher_of(config, this_job(JOB), reports("a", "b"))
        launcher.prepare(placed(config, *launcher.hosts()), threading.Event())
        log_file = logs / "learner.log"
        for ask, status in (("terminate", 130), ("drain", 7), ("kill", -9)):
            step = launcher.start(RoleCommand("learner", [sys.executable, "-c", polite]), log_file, {})
            assert (step.poll(), step.host) == (None, "a")
            until(partial(is_ready, log_file))
            getattr(step, ask)()
            assert until(step.poll) == status
            log_file.resolve().write_text("")
        assert (logs / "latest").readlink() == Path(f"attempt-{attempt}")
        assert log_file.resolve() == logs / f"attempt-{attempt}" / "learner.log"
    assert (logs / "learner.before-slurm.log").read_text() == "of a run without Slurm"


def test_servers_ignore_the_signals_that_slurm_sends_to_all_processes_of_a_role(tmp_path: Path) -> None:
    code = "import os, signal; [os.kill(0, each) for each in (signal.SIGUSR1, signal.SIGUSR2)]; print('lives')"
    server = start_guarded([sys.executable, "-c", code], tmp_path / "log", {})
    server.wait(GENEROUS_S)
    assert (tmp_path / "log").read_text() == "lives\n"
    kill_group(server)


def test_the_nodes_of_a_job_become_a_ray_cluster_with_the_head_on_the_first_one(tmp_path: Path) -> None:
    job = SlurmJob("7", tuple(SlurmNode(name, name) for name in ("a", "b")))
    config = make_config(tmp_path, python="/shared/python")
    config.cluster.launcher, config.cluster.cpus = "ray", 3
    nodes = RayNodes(config.cluster, tmp_path / "run", launcher_of(config, job, reports("a", "b", gpus=2)))
    head, other = nodes.commands().items()
    start = ["/shared/python", "-m", "ray.scripts.scripts", "start", "--block"]
    for (_, command), name, address in ((head, "a", "10.0.0.1"), (other, "b", "10.0.0.2")):
        own = command[command.index("/shared/python") :]
        assert own[: len(start)] == start
        assert f"--nodelist={name}" in command
        assert {f"--node-ip-address={address}", "--num-cpus=3", "--num-gpus=2"} <= set(own)
    assert (head[0], other[0]) == ("ray-head", "ray-b")
    assert "--head" in head[1]
    assert "--head" not in other[1]
    assert f"--address={nodes.address}" == "--address=10.0.0.1:20000" == other[1][-1]
    assert any(REPLAY_RESOURCE in word for word in head[1])


def test_a_job_makes_no_ray_cluster_where_its_run_names_one_or_wants_none(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    assert not starts_ray(config.cluster, {})
    config.cluster.launcher = "ray"
    assert starts_ray(config.cluster, {})
    assert not starts_ray(config.cluster, {"RAY_ADDRESS": "10.0.0.1:6379"})
    config.cluster.ray.address = "10.0.0.1:6379"
    assert not starts_ray(config.cluster, {})


def test_the_ray_cluster_of_a_job_asks_for_a_token_that_the_owner_of_the_run_alone_can_read(tmp_path: Path) -> None:
    first, again, own = dict[str, str](), dict[str, str](), {"RAY_AUTH_MODE": "disabled"}
    for environment in (first, again, own):
        ask_for_token(tmp_path, environment)
    token = Path(first["RAY_AUTH_TOKEN_PATH"])
    assert (first, first["RAY_AUTH_MODE"]) == (again, "token"), "a requeued job keeps it"
    assert len(token.read_text()) == 64
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert own == {"RAY_AUTH_MODE": "disabled"}, "what the user says goes"


def test_a_ray_node_that_ends_before_the_others_have_joined_is_named_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    config = make_config(tmp_path, python="/no/python")
    config.cluster.launcher = "ray"
    job = SlurmJob("7", (SlurmNode("a", "a"),))
    programs = write_programs(tmp_path / "bin")
    for name in AUTH_VARIABLES:
        monkeypatch.setenv(name, "")  # What is set here is undone, and the token is of this test's own.
        monkeypatch.delenv(name)
    (programs / "srun").write_text("#!/bin/sh\necho no room for this step; exit 3\n")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    nodes = RayNodes(config.cluster, tmp_path / "run", launcher_of(config, job, reports("a")))
    with (
        pytest.raises(UnavailableError, match="ray-head ended with status 3:\nno room for this step"),
        nodes.running(threading.Event()),
    ):
        pytest.fail("there is no cluster")


def test_a_task_of_an_array_is_a_run_of_its_own_with_its_number_as_the_seed(tmp_path: Path) -> None:
    run, other = make_config(tmp_path).run, make_config(tmp_path).run
    name_task(run, {"SLURM_ARRAY_TASK_ID": "3"})
    assert (run.name, run.seed) == ("run-3", 3)
    name_task(other, {})
    assert other == make_config(tmp_path).run


def test_a_job_that_slurm_does_not_requeue_is_named_with_the_reason(stub: Path) -> None:
    requeue("7")
    assert stub.read_text() == "requeue 7\n"
    with pytest.raises(UnavailableError, match="scontrol requeue refused: Requested operation is presently disabled"):
        requeue("refused")


@pytest.mark.parametrize(
    ("limit", "end", "early"),
    [
        ("01:00:00", "2026-01-02T11:00:00", False),
        ("01:00:00", "2026-01-02T11:00:20", False),
        ("01:00:00", "2026-01-02T10:57:00", True),
        ("2-00:00:00", "2026-01-02T11:00:00", True),
        ("UNLIMITED", "2026-01-02T11:00:00", True),
        ("UNLIMITED", "2027-01-02T10:00:00", False),
        ("UNLIMITED", "Unknown", False),
    ],
)
def test_a_job_that_was_cancelled_after_the_notice_is_not_requeued(
    stub: Path, monkeypatch: pytest.MonkeyPatch, limit: str, end: str, early: bool
) -> None:
    times = f"RunTime=00:57:00 TimeLimit={limit} StartTime=2026-01-02T10:00:00 EndTime={end} Deadline=N/A"
    monkeypatch.setenv("STUB_JOB", times)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert has_ended_early("7") == early
    assert requeue_this_job() == (EXIT_STOPPED if early else 0)
    assert ("requeue 7" in stub.read_text()) != early


def test_a_node_whose_gpus_slurm_has_hidden_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "NoDevFiles")
    assert count_gpus() == 0


def test_a_chain_takes_variables_for_an_option_and_refuses_options_behind_the_words() -> None:
    _, _, options, rest = parse(["launch.sh", "2", "--export", "FOO=1,ALL", "--nodes=2", "run.name=a b", "+x=1"])
    assert (options, rest) == (["--export", "FOO=1,ALL", "--nodes=2"], ["run.name=a b", "+x=1"])
    with pytest.raises(ConfigError, match=r"--time=4:00:00 comes after run\.name=a"):
        parse(["launch.sh", "2", "run.name=a", "--time=4:00:00"])


def test_a_chain_is_jobs_that_wait_for_one_another_with_the_options_and_words_that_were_given(
    stub: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["launch.sh", "3", "-N", "2", "--time=4:00:00", "run.name=a", "learner.steps=9", "--dry-run"]
    submit(words[:-1])
    assert capsys.readouterr().out.startswith("submitted, in this order: 101 102 103; to end the chain, `scancel`")
    lines = stub.read_text().splitlines()
    (name,) = {re.sub(r".*--chained=(\w+)/.*", r"\1", line) for line in lines}
    assert lines == [
        f"sbatch --parsable --no-requeue{after} -N 2 --time=4:00:00 launch.sh --chained={name}/{number}/3 run.name=a "
        "learner.steps=9"
        for number, after in ((1, ""), (2, " --dependency=afterany:101"), (3, " --dependency=afterany:102"))
    ]
    submit(words, show_only=True)
    shown = capsys.readouterr().out.splitlines()
    assert [line.partition(" -N")[0] for line in shown][
        2
    ] == "sbatch --parsable --no-requeue --dependency=afterany:JOB2"
    assert stub.read_text().splitlines() == lines, "a dry run submits nothing"


def test_a_chain_that_cannot_be_submitted_is_refused_with_what_to_do(stub: Path) -> None:
    for words in (["launch.sh"], ["launch.sh", "0"], ["launch.sh", "run.name=a"]):
        with pytest.raises(ConfigError, match="--chain: write how many jobs"):
            submit(words)
    with pytest.raises(UnavailableError, match=r"job 1 of 2 of the chain was not submitted.*More processors requested"):
        submit(["launch.sh", "2", "--nodes=31"])


def test_a_job_of_a_chain_has_nothing_to_do_once_the_run_is_done_or_was_stopped_by_hand(tmp_path: Path) -> None:
    link, other = ChainLink("a", 2, 3), ChainLink("b", 1, 3)
    assert ChainLink.of(link.option) == link
    assert link.why_nothing_is_left(tmp_path, 5) == ""
    for result, planned, reason in (("stopped", 5, ""), ("done", 4, ""), ("done", 5, "the run is done")):
        (tmp_path / "summary.json").write_text(json.dumps({"result": result, "planned_steps": planned}))
        assert link.why_nothing_is_left(tmp_path, 5) == reason
    assert link.why_nothing_is_left(tmp_path, 6) == "", "a run with more steps goes on"
    link.end(tmp_path)
    assert "stopped by `asyncrl stop`" in link.why_nothing_is_left(tmp_path, 6)
    assert other.why_nothing_is_left(tmp_path, 6) == "", "a chain that is submitted later goes on"


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["slurm", "ray"])
def test_a_job_whose_time_ends_saves_is_requeued_and_goes_on(launcher: str, stub: Path, tmp_path: Path) -> None:
    if launcher == "ray":
        pytest.importorskip("ray", reason="Ray is not installed")
    world = World.make(tmp_path)
    numbers = ("cluster.actors=1", "cluster.scorers=1", "cluster.learner_ranks=1", "learner.checkpoint_every=1000")
    words = [*world.overrides(1), *numbers, f"run.dir={tmp_path}", "run.name=run", f"cluster.launcher={launcher}"]
    run, output = tmp_path / "run", tmp_path / "output"

    def start(steps: int, *more: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **JOB, "ASYNCRL_PYTHON": sys.executable}
        with output.open("ab") as file:
            command = [str(LAUNCH), *more, *words, f"learner.steps={steps}"]
            return subprocess.Popen(command, env=environment, stdout=file, stderr=file, cwd=ROOT)

    def newest_step() -> int:
        return max((line["step"] for line in read_lines(metrics_file(run, "learner"))), default=-1)

    with start(100000) as job:
        until(lambda: newest_step() >= 2 or job.poll() is not None)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(GENEROUS_S) == 0, output.read_text()
    assert stub.read_text().splitlines()[-1] == "requeue 7"
    done = newest_step() + 1
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{done:06}"]
    with start(done + 2) as job:
        assert job.wait(GENEROUS_S) == 0, output.read_text()
    assert [line["step"] for line in read_lines(metrics_file(run, "learner"))] == list(range(done + 2))
    assert "requeue" not in "".join(stub.read_text().splitlines()[-2:])
    assert json.loads((run / "summary.json").read_text())["result"] == "done"
    assert {path.name for path in (run / "logs").glob("ray-*")} == (
        {"ray-head.log", "ray-b.log"} if launcher == "ray" else set()
    )
    requests = stub.read_text()
    with start(done + 2, "--chained=a/2/2") as job:
        assert job.wait(GENEROUS_S) == 0
    assert "job 2 of 2 of the chain has nothing to do: the run is done" in output.read_text()
    assert stub.read_text() == requests, "it starts nothing"


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A stub of Python, which prints the words that a script gives it. The test then calls the module itself: what this
    changes in the process is undone."""
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    stub = tmp_path / "python"
    stub.write_text('#!/bin/sh\n[ "$1" = -c ] || printf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    yield stub
    for number, handler in handlers.items():
        signal.signal(number, handler)


def said_by(
    script: Path, words: Sequence[str], python: Path, capfd: pytest.CaptureFixture[str]
) -> tuple[int, list[str], str]:
    """The exit status, the lines and the errors of the program that a script runs with these words."""
    variables = {**os.environ, "ASYNCRL_PYTHON": str(python)}
    given = subprocess.run([str(script), *words], capture_output=True, text=True, env=variables, check=True, cwd=ROOT)
    option, module, *passed = given.stdout.splitlines()
    assert (option, module) == ("-m", "asyncrl.launch.slurm.job")
    capfd.readouterr()
    status = job.main(passed)
    output, errors = capfd.readouterr()
    return status, output.splitlines(), errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dry-run", "--nodes=2", "--gpus-per-node=8"], "asyncrl: --nodes=2 --gpus-per-node=8: the script takes"),
        (["--dry-run", "--chain", "3"], "asyncrl: --chain: the script takes KEY=VALUE and, as its first word,"),
        (
            ["--dry-run", "model.path=m", "data.train=d", "cluster.launcher=hosts", "cluster.hosts=[a,b]"],
            "asyncrl: cluster.launcher=hosts: this script starts the roles as steps of a job",
        ),
        (
            ["--dry-run", "model.path=m", "data.train=d", "algorithm.advantage=grop"],
            "asyncrl: algorithm.advantage=grop",
        ),
    ],
)
def test_the_program_of_the_script_says_what_it_takes(
    words: list[str], message: str, python: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, _, errors = said_by(LAUNCH, [*words, f"run.dir={tmp_path}"], python, capfd)
    assert (status, errors.startswith(message)) == (2, True), errors
    assert not [*tmp_path.glob("*/*/config.yaml")], "nothing starts"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "python", "message"),
    [
        (["model.path=m", "data.train=d"], sys.executable, "asyncrl: cluster.launcher=slurm: this process is not in a"),
        (["--dry-run"], "false", "asyncrl: false has no asyncrl with its packages; activate"),
        (["--dry-run"], "/none", "asyncrl: /none has no asyncrl with its packages; activate"),
    ],
)
def test_the_script_says_where_it_has_to_run(words: list[str], python: str, message: str, tmp_path: Path) -> None:
    variables = {**os.environ, "ASYNCRL_PYTHON": python, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([str(LAUNCH), *words], capture_output=True, text=True, env=variables, cwd=tmp_path)
    assert (done.returncode, done.stderr.startswith(message)) == (2, True), done.stderr
    assert not [*tmp_path.glob("*/*/config.yaml")], "nothing starts"


@pytest.mark.slow
def test_a_python_that_finds_only_the_checkout_is_refused_without_a_traceback(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    variables = {"PATH": os.environ["PATH"], "ASYNCRL_PYTHON": str(bare)}
    done = subprocess.run([str(LAUNCH), "--dry-run"], capture_output=True, text=True, env=variables, cwd=ROOT)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "has no asyncrl with its packages; activate its environment" in done.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    checked = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("name", "nodes"), [("one_node", 1), ("two_nodes", 2), ("sixteen_nodes", 16)])
def test_an_example_prints_every_command_and_asks_slurm_for_the_nodes_of_its_pools(
    name: str, nodes: int, python: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = ROOT / "launchers" / "examples" / f"{name}.sh"
    assert f"#SBATCH --nodes={nodes}\n" in script.read_text()
    words = ("--dry-run", f"run.dir={tmp_path}", f"model.path={tmp_path}", "data.train=none")
    status, lines, errors = said_by(script, words, python, capfd)
    assert status == 0, errors
    commands = [line for line in lines if line.startswith("srun ")]
    used = {word for line in commands for word in line.split() if word.startswith("--nodelist=node")}
    assert len(used - {word for word in used if "," in word}) == nodes, "every node has a role"
    assert sum("asyncrl.learner" in line for line in commands) == {1: 1, 2: 1, 16: 8}[nodes]
    assert not (tmp_path / "run").exists(), "a dry run writes nothing"


@pytest.mark.slow
def test_a_dry_run_with_ray_inside_prints_the_steps_of_the_cluster_and_the_commands_of_the_roles(
    python: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pools = ("cluster.pools={train: {nodes: 1}, rollout: {nodes: 2}}", "cluster.roles={actor: rollout}")
    words = (f"run.dir={tmp_path}", f"model.path={tmp_path}", "data.train=none", "scoring.rule=exact_match", *pools)
    given = ("--dry-run", *words, "cluster.launcher=ray", "cluster.gpus=0")
    status, lines, errors = said_by(LAUNCH, given, python, capfd)
    assert status == 0, errors
    starts = [line for line in lines if "ray.scripts.scripts start" in line]
    assert [f"--nodelist=node{number}" in line for number, line in enumerate(starts)] == [True] * 3
    assert ["--head" in line for line in starts] == [True, False, False]
    roles = [line for line in lines if "-m asyncrl." in line and not line.startswith("srun")]
    assert [sum(f"asyncrl.{role} " in line for line in roles) for role in ("replay", "learner", "actor")] == [1, 1, 2]
