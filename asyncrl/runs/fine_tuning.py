"""Shows and summarises a run of `asyncrl sft`, in the same way as a training, from the rows of its learner."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from rich.console import Console

from asyncrl.config.commands import runnable
from asyncrl.config.locations import CONFIG_FILE, steps_in_newest_checkpoint
from asyncrl.runs.elapsed import earlier_s, elapsed_s
from asyncrl.runs.health.evidence import MOST_STEPS
from asyncrl.runs.health.trends import averaged_steps
from asyncrl.runs.lines import Row
from asyncrl.runs.live_rows import LiveRows
from asyncrl.runs.pace import PACE_STEPS, pace
from asyncrl.runs.progress import number
from asyncrl.runs.role_errors import RoleErrors
from asyncrl.runs.run import Run
from asyncrl.runs.state.situation import RolesReader
from asyncrl.runs.state.working import working
from asyncrl.runs.summary import Change, files_of, mean_change, quoted, record_summary
from asyncrl.runs.summary_text import as_text
from asyncrl.text import duration

HELD_OUT = "eval/loss"


class FineTuningTable:
    """Shows the progress of a fine-tuning until its `with` block ends, as `TerminalTable` shows that of a training."""

    def __init__(
        self,
        run: Run,
        steps: int,
        restarts: Callable[[], dict[str, int]],
        clock: Callable[[], float] = time.monotonic,
        console: Console | None = None,
    ) -> None:
        self._run, self._steps, self._restarts, self._clock = run, steps, restarts, clock
        self._learner, self._held_out = run.tail("learner", PACE_STEPS), run.tail("evaluation")
        self._roles, self._errors = RolesReader(run), RoleErrors(run.folder, from_now=True)
        self._view = LiveRows(console, clock)
        self._began = clock() - earlier_s(run)

    def __enter__(self) -> FineTuningTable:
        self._view.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._view.__exit__(kind, error, trace)

    def update(self) -> None:
        """Show the newest values, if it is time."""
        if self._view.is_due():
            for text in self._errors.new_texts():
                self._view.tell(text)
            rows = self.rows()
            self._view.show(pace(self._learner.recent, self._steps), rows)

    def rows(self) -> list[tuple[str, str]]:
        """The names and formatted values that are shown."""
        values, held_out = self._learner.read(), self._held_out.read()
        now = pace(self._learner.recent, self._steps)
        works = working(self._roles.read(self._run.processes(), shards=1))
        rows = [
            ("elapsed", duration(self._clock() - self._began)),
            ("step", f"{now.done}/{self._steps}"),
            *([("left", duration(now.left_s))] if now.left_s else []),
            *([("now", works)] if works else []),
            ("loss", number(values.get("loss"))),
            *([("held-out loss", number(held_out[HELD_OUT]))] if HELD_OUT in held_out else []),
            ("epoch", number(values.get("sft/epoch"))),
            ("lr", number(values.get("lr"))),
            ("trained tokens/s", number(values.get("tokens_per_s"))),
        ]
        rows += self._errors.rows()
        if restarts := sum(self._restarts().values()):
            rows.append(("restarts", str(restarts)))
        return rows


@dataclass(frozen=True, slots=True)
class FineTuningSummary:
    """The results of a fine-tuning.

    - `result` is done, stopped or failed, and `reason` says why it failed.
    - `steps`, `steps_kept`, `planned_steps`, `errors`, `elapsed_s`, `files`, `next`: as in `RunSummary`.
    - `loss` has the means over the first and over the last `averaged` steps; `None` without a step.
    - `held_out_loss` has the values of the first and of the last evaluation; `None` without an evaluation.
    - `epochs` is the number of passes through the demonstrations. `tokens_per_s` is the number of trained tokens,
      divided by the seconds of all steps.
    """

    run: str
    result: str
    reason: str
    steps: int
    steps_kept: int
    planned_steps: int
    averaged: int
    loss: Change | None
    held_out_loss: Change | None
    epochs: float
    tokens_per_s: float
    errors: list[str]
    elapsed_s: float
    files: dict[str, str]
    next: list[str]


def summarise_fine_tuning(run: Run, planned_steps: int, result: str, reason: str) -> FineTuningSummary:
    """The summary of the fine-tuning in a folder."""
    first: list[Row] = []
    last: list[Row] = []
    seconds = tokens = 0.0
    for row in run.rows("learner"):
        if "loss" in row:
            seconds, tokens = seconds + row.get("seconds/step", 0.0), tokens + row.get("tokens", 0.0)
            first, last = [*first, row][:MOST_STEPS], [*last, row][-MOST_STEPS:]
    steps = last[-1]["step"] + 1 if last else 0
    averaged = averaged_steps(steps)
    held_out = [row[HELD_OUT] for row in sorted(run.rows("evaluation"), key=_step) if HELD_OUT in row]
    errors = RoleErrors(run.folder)
    errors.read()
    return FineTuningSummary(
        run=str(run.folder),
        result=result,
        reason=reason,
        steps=steps,
        steps_kept=steps_in_newest_checkpoint(run.folder),
        planned_steps=planned_steps,
        averaged=averaged,
        loss=mean_change([row["loss"] for row in first], [row["loss"] for row in last], averaged),
        held_out_loss=Change(held_out[0], held_out[-1]) if held_out else None,
        epochs=last[-1].get("sft/epoch", 0.0) if last else 0.0,
        tokens_per_s=round(tokens / max(seconds, 1e-9), 1),
        errors=[str(error) for error in errors.all],
        elapsed_s=round(elapsed_s(run), 1),
        files=files_of(run, result == "done"),
        next=_next(run, result == "done"),
    )


def _step(row: Mapping[str, Any]) -> int:
    return int(row["step"])


def _next(run: Run, done: bool) -> list[str]:
    asyncrl = runnable()
    look = f"{asyncrl} dashboard {quoted(run.folder)}"
    model = run.folder / "model"
    if done and model.exists():
        return [f"{asyncrl} train model.path={quoted(model)} run.name=NAME data.train=FILE", look]
    if done:  # learner.export=false
        return [f"{asyncrl} export {quoted(run.folder)}", look]
    return [f"{asyncrl} sft experiment={quoted(run.folder / CONFIG_FILE)}", look]


def fine_tuning_rows(summary: FineTuningSummary) -> Sequence[tuple[str, str]]:
    """The facts of a summary for people, with their names. A fact with an empty name continues the fact before it."""
    steps = f"{summary.steps} of {summary.planned_steps} steps"
    if summary.result != "done":
        if summary.steps_kept < summary.steps:
            steps += f", {summary.steps_kept} of them in the newest checkpoint"
        steps += "; the same command resumes it"
    rows = [("result", f"{summary.result} after {steps}")]
    if summary.loss:
        span = "first and last step" if summary.averaged == 1 else f"first and last {summary.averaged} steps"
        rows.append(("loss", f"{summary.loss} ({span})"))
    if summary.held_out_loss:
        rows.append(("held-out loss", f"{summary.held_out_loss} (first and last)"))
    rows += [
        ("epochs", f"{summary.epochs:.3g}"),
        ("elapsed", duration(summary.elapsed_s)),
        ("speed", f"{summary.tokens_per_s:.0f} trained tokens/s"),
    ]
    rows += [("error", text) for text in summary.errors]
    rows += list(summary.files.items())
    return rows + [("" if index else "next", command) for index, command in enumerate(summary.next)]


def write_fine_tuning_summary(run: Run, planned_steps: int, result: str, reason: str) -> str:
    """Write the summary of a fine-tuning into its folder, and return it as text."""
    summary = summarise_fine_tuning(run, planned_steps, result, reason)
    record_summary(run, asdict(summary))
    return as_text(fine_tuning_rows(summary))
