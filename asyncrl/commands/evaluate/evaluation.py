"""Evaluates a model or a checkpoint: plays the attempts, and writes the result into the evaluation's folder."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from asyncrl.commands.checkpoints import checkpoint_of
from asyncrl.commands.evaluate.from_config import EvaluationRequest, play, require_same, without_training
from asyncrl.commands.evaluate.results import EvaluationResult, read_result
from asyncrl.commands.export import write_policy
from asyncrl.config.changes import values_of
from asyncrl.config.locations import CONFIG_FILE
from asyncrl.config.refusals import may_exist
from asyncrl.config.schema import RunConfig
from asyncrl.data.from_config import run_tasks
from asyncrl.errors import ConfigError, StoppedError
from asyncrl.launch.ownership import exclusively
from asyncrl.launch.preflight.paths import check_imports, named_code
from asyncrl.launch.preflight.preflight import preflight
from asyncrl.launch.preflight.tasks.task_files import read_files
from asyncrl.launch.survivors import end_here
from asyncrl.machine import process
from asyncrl.machine.files import write_whole
from asyncrl.runs.finding import find_run
from asyncrl.runs.run import Run
from asyncrl.text import json_text

log = logging.getLogger("asyncrl.commands.evaluate")

RESULT_FILE = "evaluation.json"
PATTERN_MARKS = str.maketrans("*?[]", "____")
ADD_TASKS = "name the tasks with --data TASKS, or data=TASKS in Python (docs/data.md)"


def requested(
    target: str, data: str | None, attempts: int, step: int | None, words: Sequence[str], config_dir: Path | None
) -> EvaluationRequest:
    """The request to evaluate `target`, which is a run or a model. `data` names the tasks; if it is None, they are
    those of the run's data.eval. `step` is the number of steps after which the checkpoint was written; if it is None,
    the checkpoint is the newest. Raises ConfigError: the arguments do not fit together."""
    run = find_run(target)
    if attempts < 1:
        raise ConfigError(f"n={attempts}: there must be at least one attempt")
    sources = [data] if data is not None else _held_out(run, target)
    for each in sources:
        if not may_exist(each):
            raise ConfigError(f"data={each}: the file does not exist; see docs/data.md")
    if run is None and step is not None:
        raise ConfigError(f"step={step}: {target} is not a run, since it has no {CONFIG_FILE}")
    if run is None:
        log.info("%s is evaluated as a model, since it has no %s", target, CONFIG_FILE)
    return EvaluationRequest(run.folder if run else None, target, sources, attempts, words, config_dir)


def _held_out(run: Run | None, target: str) -> list[str]:
    """The held-out tasks of a run. Raises ConfigError: it has none, or a model is evaluated."""
    if run is None:
        if not Path(target).exists():
            raise ConfigError(
                f"there is neither a run nor a folder {target}; if it is a model's name on the hub, {ADD_TASKS}"
            )
        raise ConfigError(f"{target} is not a run, since it has no {CONFIG_FILE}; for a model, {ADD_TASKS}")
    sources = run.real_values()["data.eval"]
    if not sources:
        raise ConfigError(f"{run.folder} has no data.eval; {ADD_TASKS}")
    return list(sources)


def evaluate(
    request: EvaluationRequest, steps: int | None, threshold: float, stop: threading.Event | None = None
) -> tuple[Path, EvaluationResult]:
    """Run an evaluation, or read a finished one. Return the folder and the result. Setting `stop` ends the evaluation;
    by default signals set it.

    Raises ConfigError or DataError: the configuration or the data cannot be used. Raises CheckpointError: the
    checkpoint does not exist. Raises StoppedError: `stop` was set. Raises AsyncrlError: the evaluation failed.
    """
    config, checkpoint = request.read(), None
    # The tasks are read before anything loads torch, so that a wrong column is refused at once.
    read = read_files(run_tasks(without_training(config, request, Path(config.run.dir))))
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
    if stop is None:
        # A finished evaluation is only shown, and a signal ends that at once.
        stop = threading.Event() if has_ended else process.stop_on_signals()
    if not has_ended:
        check_imports(named_code(config.data, config.algorithm, config.actor, config.scoring), stop)
        preflight(config, stop=stop, read=read)
    with exclusively(folder):
        end_here(folder, stop)
        if checkpoint is not None and not model.exists():
            write_policy(config.model, checkpoint, model)
        if stop.is_set():
            raise StoppedError("stopped before the evaluation began")
        if has_ended:
            log.info("showing the result of the finished evaluation; remove %s to evaluate again", folder)
        else:
            play(measured, folder, stop)
        sources = [task.data_source for task in run_tasks(measured).usable(request.data, held_out=True)]
        with Run(folder).stored() as stored:
            result = read_result(stored, sources, request.attempts, threshold)
        write_whole(
            folder / RESULT_FILE, f"{json_text(_described(config.actor.temperature, request, steps, result))}\n"
        )
        for weights in model.glob("*.safetensors"):
            weights.unlink()
    return folder, result


def _folder(run: RunConfig, request: EvaluationRequest, steps: int | None) -> Path:
    """The folder of an evaluation. Unless run.name is set, its name has the step (or the model's name), the first file,
    and the number of attempts."""
    evaluated = _name_of(request.model) if steps is None else f"step-{steps:06d}"
    name = f"{evaluated}-{Path(request.data[0]).stem}-n{request.attempts}".translate(PATTERN_MARKS)
    if any(word.lstrip("+").startswith("run.name=") for word in request.words):
        name = run.name
    return (request.run or Path(run.dir)) / "evaluations" / name


def _name_of(model: str) -> str:
    """The model's part of a folder's name. A run writes its model into a folder `model`. For such a folder, this part
    also has the run's name."""
    path = Path(model)
    return f"{path.parent.name}-{path.name}" if path.name == "model" and path.parent.name else path.name


def _described(
    temperature: float, request: EvaluationRequest, steps: int | None, result: EvaluationResult
) -> dict[str, Any]:
    """The result for JSON, with the model, the data and the temperature. Values that are not finite become null."""
    greedy = request.attempts == 1
    what = {"run": str(request.run), "step": steps} if request.run is not None else {"model": request.model}
    data = request.data[0] if len(request.data) == 1 else list(request.data)
    how = {"data": data, "temperature": 0.0 if greedy else temperature}
    return {**what, **how, **_finite(asdict(result))}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
