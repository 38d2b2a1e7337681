"""`asyncrl evaluate RUN|MODEL --data FILE [--n 8] [--step K] [KEY=VALUE ...]`: pass@k, best@k and maj@k, without
training.

The episodes use the same engine, tools and verifiers as in training. For a RUN (its folder or name) the configuration
is the run's, and the policy comes from a checkpoint. For a MODEL (a Hugging Face folder or a hub name) KEY=VALUE words
and experiment=NAME give the configuration, as for `asyncrl train`.

With --n 1 each task has one greedy attempt; with a larger N, attempts are sampled at actor.temperature. An attempt is
right if its outcome is at least --threshold (1). Lower the threshold if rules give graded outcomes.

For a task with n scored attempts, of which c are right, pass@k is 1 - C(n-c, k) / C(n, k). A failed attempt is repeated
as in training. If it fails again and again, it counts only as failed, not in means and estimates. docs/evaluate.md has
more.

Repeat the command to resume an interrupted evaluation, or to show a finished one. All episodes stay in the evaluation's
folder: `asyncrl inspect show e0-000000.0.0 --run FOLDER`.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from asyncrl.commands.checkpoints import checkpoint_of
from asyncrl.commands.evaluate.from_config import EvaluationRequest, require_same, without_training
from asyncrl.commands.evaluate.progress import EvaluationProgress
from asyncrl.commands.evaluate.results import EvaluationResult, read_result, shown_result
from asyncrl.commands.evaluate.samples import samples
from asyncrl.commands.export import write_policy
from asyncrl.config import locations
from asyncrl.config.changes import values_of
from asyncrl.config.commands import command_name
from asyncrl.config.exits import EXIT_FAILURE, exit_status
from asyncrl.config.load import log_to_stderr
from asyncrl.config.refusals import may_exist
from asyncrl.config.schema import RunConfig, TrainConfig
from asyncrl.config.schema.cluster import ROLES
from asyncrl.data.from_config import run_tasks
from asyncrl.errors import ConfigError, StoppedError
from asyncrl.launch.addresses import RunAddresses
from asyncrl.launch.claim import claim
from asyncrl.launch.local import role_commands
from asyncrl.launch.ownership import exclusively
from asyncrl.launch.placement.placement import place, settle
from asyncrl.launch.preflight.preflight import preflight
from asyncrl.launch.preflight.prompts import prepare_data
from asyncrl.launch.preflight.same_tasks import check_same_tasks
from asyncrl.launch.processes import ROLE_ENVIRONMENT, role_command, this_host
from asyncrl.launch.role_process import RoleCommand
from asyncrl.launch.supervisor import Supervisor
from asyncrl.launch.survivors import end_here
from asyncrl.machine import process
from asyncrl.machine.files import write_whole
from asyncrl.replay.stored import StoredRun
from asyncrl.runs.finding import find_run
from asyncrl.text import json_text

log = logging.getLogger("asyncrl.commands.evaluate")

RESULT_FILE = "evaluation.json"
EVALUATOR = "evaluator"
PATTERN_MARKS = str.maketrans("*?[]", "____")


def main(argv: Sequence[str]) -> int:
    """Evaluate, print the result, and return the exit status: 1 if no attempt was scored."""
    given = _parser().parse_intermixed_args(argv)
    log_to_stderr()
    try:
        folder, result = evaluate(_request(given), given.step, given.threshold)
    except StoppedError as error:
        log.info("%s", error)
        raise
    if given.json:
        sys.stdout.write((folder / RESULT_FILE).read_text())
    else:
        Console().print(shown_result(result))
        sys.stdout.writelines(f"\n{text}\n" for text in samples(folder, given.samples))
    log.info("the result is in %s; `asyncrl inspect show ID --run %s` shows an episode", folder / RESULT_FILE, folder)
    return 0 if result.total.scored else EXIT_FAILURE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command_name(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", metavar="RUN|MODEL", help="folder or name of a run, or folder or hub name of a model")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="keys of docs/configuration.md")
    parser.add_argument("--data", required=True, metavar="TASKS", help="tasks, as data.train takes them (docs/data.md)")
    parser.add_argument("--n", type=int, default=8, metavar="N", help="attempts at each task (8)")
    parser.add_argument("--step", type=int, metavar="K", help="evaluate a run's checkpoint after K steps (the newest)")
    parser.add_argument(
        "--threshold", type=float, default=1.0, metavar="T", help="smallest outcome that counts as right (1)"
    )
    parser.add_argument(
        "--samples", type=int, default=0, metavar="S", help="print S attempts of each data source with their scores (0)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="also find group files in DIR")
    return parser


def _request(given: argparse.Namespace) -> EvaluationRequest:
    """The request of the command line. Raises ConfigError: the arguments do not fit together."""
    run = find_run(given.target)
    if given.n < 1:
        raise ConfigError(f"--n={given.n}: there must be at least one attempt")
    if not may_exist(given.data):
        raise ConfigError(f"--data={given.data}: the file does not exist; see docs/data.md")
    if run is None and given.step is not None:
        raise ConfigError(f"--step={given.step}: {given.target} is not a run, since it has no {locations.CONFIG_FILE}")
    if run is None:
        log.info("%s is evaluated as a model, since it has no %s", given.target, locations.CONFIG_FILE)
    folder = run.folder if run else None
    return EvaluationRequest(folder, given.target, given.data, given.n, given.words, given.config_dir)


def evaluate(request: EvaluationRequest, steps: int | None, threshold: float) -> tuple[Path, EvaluationResult]:
    """Run an evaluation, or read a finished one. Return the folder and the result.

    Raises ConfigError or DataError: the configuration or the data cannot be used. Raises CheckpointError: the
    checkpoint does not exist. Raises StoppedError: a signal came. Raises AsyncrlError: the evaluation failed.
    """
    config, checkpoint = request.read(), None
    if request.run is not None and steps is None:
        checkpoint = checkpoint_of(request.run, config.learner, None)
        steps = checkpoint.steps
    folder = _folder(config.run, request, steps)
    config = without_training(config, request, folder)
    model, has_ended = folder / "model", (folder / RESULT_FILE).exists()
    if request.run is not None and not model.exists():
        checkpoint = checkpoint or checkpoint_of(request.run, config.learner, steps)
    measured = config if request.run is None else replace(config, model=replace(config.model, path=str(model)))
    require_same(values_of(measured), folder)
    if not has_ended:
        preflight(config)
    with exclusively(folder):
        end_here(folder)
        if checkpoint is not None and not model.exists():
            write_policy(config.model, checkpoint, model)
        if has_ended:
            log.info("showing the result of the finished evaluation; remove %s to evaluate again", folder)
        else:
            _run(measured, folder)
        sources = [task.data_source for task in run_tasks(measured).usable([request.data])]
        with closing(StoredRun(folder / "replay")) as stored:
            result = read_result(stored, sources, request.attempts, threshold)
        write_whole(
            folder / RESULT_FILE, f"{json_text(_described(config.actor.temperature, request, steps, result))}\n"
        )
        for weights in model.glob("*.safetensors"):
            weights.unlink()
    return folder, result


def _folder(run: RunConfig, request: EvaluationRequest, steps: int | None) -> Path:
    """The folder of an evaluation. Unless run.name is set, its name contains the step, the file and the attempts."""
    evaluated = Path(request.model).name if steps is None else f"step-{steps:06d}"
    name = f"{evaluated}-{Path(request.data).stem}-n{request.attempts}".translate(PATTERN_MARKS)
    if any(word.lstrip("+").startswith("run.name=") for word in request.words):
        name = run.name
    return (request.run or Path(run.dir)) / "evaluations" / name


def _run(config: TrainConfig, folder: Path) -> None:
    """Start the roles, with the evaluator instead of a learner, and wait for its end. Raises StoppedError."""
    stop = process.stop_on_signals()
    RunAddresses.of(config).choose_ports()
    placement = place(config, [this_host(config.cluster)], [role for role in ROLES if role != "learner"])
    settle(config.cluster, config.learner, placement)
    prepare_data(config)
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


def _described(
    temperature: float, request: EvaluationRequest, steps: int | None, result: EvaluationResult
) -> dict[str, Any]:
    """The result for JSON, with the model, the data and the temperature. Values that are not finite become null."""
    greedy = request.attempts == 1
    what = {"run": str(request.run), "step": steps} if request.run is not None else {"model": request.model}
    how = {"data": request.data, "temperature": 0.0 if greedy else temperature}
    return {**what, **how, **_finite(asdict(result))}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(exit_status(partial(main, sys.argv[1:]), "asyncrl evaluate"))
