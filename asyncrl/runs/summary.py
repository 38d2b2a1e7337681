"""Summarises a run from its metrics files and its store. The summary covers all starts of a resumed run.

`summary.json` in the run's folder has the summary for programs, and `summary_text.py` shows it to people.
"""

from __future__ import annotations

import logging
import shlex
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from asyncrl.config.commands import runnable
from asyncrl.config.locations import SUMMARY_FILE, steps_in_newest_checkpoint
from asyncrl.errors import StoreError
from asyncrl.machine.files import write_whole
from asyncrl.replay.batches import cohorts
from asyncrl.replay.batches.old_groups import LIMITS_REACHED
from asyncrl.replay.batches.old_tokens import MASKED
from asyncrl.replay.batches.selection import Selection, sum_selections
from asyncrl.replay.counters import unreported
from asyncrl.replay.store.records import ENDS, TrajectoryState
from asyncrl.runs.elapsed import elapsed_s
from asyncrl.runs.failures import KINDS, FailureGroup, count_letters, group_failures, shown_end
from asyncrl.runs.health.evidence import MOST_STEPS, read_evidence, recent_shares
from asyncrl.runs.health.health import judge
from asyncrl.runs.health.trends import averaged_steps, values_of
from asyncrl.runs.lines import decoded, finite
from asyncrl.runs.role_errors import RoleErrors
from asyncrl.runs.run import COMPLETE, Run
from asyncrl.runs.shares import totals, waited_for
from asyncrl.text import json_text

log = logging.getLogger(__name__)

HELD_OUT = ("outcome", "accuracy", "reward", "failed")
MOST_REASONS = 5
LONGEST_REASON = 200
_EXPORTS = ("model", "adapter", "critic")
_FOLDERS = (*_EXPORTS, "checkpoints", "metrics", "replay", "logs")
_ENGINE = ("tokens", "seconds", "idle_seconds")
_WAITED = ("labels", "old_groups")


@dataclass(frozen=True, slots=True)
class Change:
    """A value at the beginning and at the end of a run."""

    first: float
    last: float

    def __str__(self) -> str:
        return f"{self.first:.3g} -> {self.last:.3g}"


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The results of a run.

    - `result` is done, solved, stopped or failed (running or unfinished in a report). `reason` says why the run failed,
      or why its tasks count as solved.
    - `steps` is the number of trained steps. The newest checkpoint covers the first `steps_kept` of them; a resumed run
      repeats the others.
    - `reward`, `outcome` and `entropy` are means over the first and over the last `averaged` steps; `None` without any
      step.
    - `held_out` has the outcome, accuracy and reward of the first and of the last evaluation. If any episode failed,
      the entry `failed` has the numbers of episodes that these means leave out. Without an evaluation it is empty.
    - `trajectories` counts training trajectories by their final state. The entry `unused` counts the trajectories
      without a final state.
    - `decided` has the number, mean length, turns and reward of the decided episodes by their end
      (`asyncrl.replay.batches.selection`).
    - `old_groups` has the number of sampled tokens that were thrown away because their group was too old
      (`tokens_evicted`), and of tokens that were masked as too old (`tokens_masked`). `evicted` and `masked` are their
      shares of the accepted tokens. The learner waited for old groups for `waited_s` seconds, and `wait_limits` of its
      waits reached their limit.
    - `failures` counts failed attempts at episodes and at their scoring. A failed scoring is tried again.
    - `dead_letters` counts the dead letters that are kept, by their kind. A dead letter of a scoring or of a skipped
      plan is the record of a trajectory that was given up.
    - `reasons` counts the failures that are kept as dead letters, the most frequent reason first.
    - `changes` are the keys of the configuration that changed when the run resumed, each with the first step that used
      the new value.
    - `errors` are the errors in the logs of roles, each with its role and its count.
    - `elapsed_s` are the seconds for which the run has run, without pauses between its starts.
    - `shares` are the truncated share of the newest episodes, and the malformed share of the newest tool calls.
    - `warnings` say what is wrong with the run. They include the warnings of its newest start. `remarks` say what else
      is worth knowing.
    - `speed` has the seconds of the actor that ran for longest, sampled tokens a second and the largest lag. It also
      has shares of the steps' time (the learner was idle, or waited for labels) and of the actors' time (their engines
      were idle).
    - `files` are the existing folders, by their content.
    - `next` has the commands to use next.
    """

    run: str
    result: str
    reason: str
    steps: int
    steps_kept: int
    planned_steps: int
    averaged: int
    reward: Change | None
    outcome: Change | None
    entropy: Change | None
    held_out: dict[str, Change]
    trajectories: dict[str, int]
    decided: dict[str, dict[str, float]]
    old_groups: dict[str, float]
    failures: dict[str, int]
    dead_letters: dict[str, int]
    reasons: dict[str, int]
    shares: dict[str, float]
    warnings: list[str]
    changes: list[str]
    errors: list[str]
    elapsed_s: float
    remarks: list[str]
    speed: dict[str, float]
    files: dict[str, str]
    next: list[str]


class _Step(msgspec.Struct):
    """The values that a summary needs of a row of the learner. A row without a reward trained nothing."""

    step: int
    reward: float | None = msgspec.field(default=None, name="reward/mean")
    outcome: float = msgspec.field(default=0.0, name="outcome/mean")
    entropy: float | None = None
    lag: int | float = msgspec.field(default=0, name="lag/max")
    seconds: float = msgspec.field(default=0.0, name="seconds/step")
    idle: float = 0.0


_STEP = msgspec.json.Decoder(_Step)


@dataclass(slots=True)
class _Steps:
    """Summarises the steps of a run, which may be millions: it keeps sums, and the first and the last few steps."""

    done: int = 0
    trained: int = 0
    seconds: float = 0.0
    idle_seconds: float = 0.0
    max_lag: float = 0
    first: list[_Step] = field(default_factory=list)
    last: deque[_Step] = field(default_factory=lambda: deque(maxlen=MOST_STEPS))

    def add(self, line: bytes) -> None:
        """Count a line of the learner's metrics."""
        if (row := decoded(_STEP, line)) is None:
            return
        self.done = row.step + 1
        if row.reward is None:
            return
        self.trained += 1
        self.seconds += row.seconds
        self.idle_seconds += row.idle * row.seconds
        self.max_lag = max(self.max_lag, finite(row.lag) or 0)
        if len(self.first) < MOST_STEPS:
            self.first.append(row)
        self.last.append(row)

    def change(self, name: str, averaged: int) -> Change | None:
        """The means of a value over the first and over the last `averaged` steps."""
        first, last = (
            values_of([{name: getattr(row, name)} for row in rows], name) for rows in (self.first, self.last)
        )
        return mean_change(first, last, averaged)


def mean_change(first: Sequence[float], last: Sequence[float], averaged: int) -> Change | None:
    """The means of the first and of the last `averaged` values; `None` if there are no first or no last values."""
    return Change(fmean(first[:averaged]), fmean(last[-averaged:])) if first and last else None


@dataclass(frozen=True, slots=True)
class _Stored:
    """The facts of a run that are in its store. Empty if the store cannot be read.

    - `counts`: the counters of the replay
    - `trajectories`: the number of trajectories by their end
    - `letters`: the number of dead letters by their kind; `reasons`: the most frequent reasons of failures
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    trajectories: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    letters: Mapping[str, int] = field(default_factory=Counter[str])
    reasons: dict[str, int] = field(default_factory=dict)
    newest_failure: str = ""
    changes: list[str] = field(default_factory=list)
    selection: Selection = field(default_factory=Selection)

    @classmethod
    def of(cls, run: Run) -> _Stored:
        """Read the facts from the store of a run. Raises StoreError: the store cannot be read."""
        with run.stored() as stored:
            counts, letters = stored.counters(), stored.dead_letters()
            kinds = sum(stored.each(count_letters), Counter[str]())
            changes = [f"{each.text} from step {each.step}" for each in stored.changes()]
            selection = sum_selections(stored.each(cohorts.selection))
            kept = stored.each(partial(unreported, steps=steps_in_newest_checkpoint(run.folder)))
        return cls(
            counts,
            _by_end(counts, sum(each["trained"] for each in kept)),
            {"episodes": counts["failures"], "scorings": counts["scoring_failures"]},
            kinds,
            _frequent(group_failures(letters)),
            _first_line(max((letter for _, letter in letters), key=attrgetter("order")).reason) if letters else "",
            changes,
            selection,
        )


def summarise(run: Run, planned_steps: int, result: str, reason: str, resume: str) -> RunSummary:
    """The summary of the run in a folder. `resume` is the command that continues it."""
    run_dir, steps = run.folder, _Steps()
    for line in run.lines("learner"):
        steps.add(line)
    averaged, evidence = averaged_steps(steps.trained), read_evidence(run, is_running=False)
    waited_s = _waited_s(run)
    warnings: list[str] = []
    found = _Stored()
    try:
        found = _Stored.of(run)
    except StoreError as error:
        warnings.append(f"the store cannot be read: {error}")
    else:
        evidence = replace(
            evidence, counts=found.counts, newest_failure=found.newest_failure, selection=found.selection
        )
    if result == "solved":
        evidence = replace(evidence, solved=reason)
    health = judge(evidence)
    remarks = [remark for remark in health.remarks if remark != reason]
    if not steps.trained and result == "stopped":
        remarks.append("the run was stopped before its first step, so nothing was trained")
    elif not steps.trained and result not in ("done", "running"):
        failures_in = f" and `asyncrl inspect dead-letters {quoted(run_dir)}`" if found.reasons else ""
        warnings.append(f"no step was trained: see {run_dir / 'logs'}{failures_in}")
    return RunSummary(
        run=str(run_dir),
        result=result,
        reason=reason,
        steps=steps.done,
        steps_kept=steps_in_newest_checkpoint(run_dir),
        planned_steps=planned_steps,
        averaged=averaged,
        reward=steps.change("reward", averaged),
        outcome=steps.change("outcome", averaged),
        entropy=steps.change("entropy", averaged),
        held_out=_held_out(run),
        trajectories=found.trajectories,
        decided=found.selection.described(),
        old_groups=_old_groups(found.counts, waited_s["old_groups"]),
        failures=found.failures,
        dead_letters={name: found.letters[name] for name in KINDS},
        reasons=found.reasons,
        changes=found.changes,
        errors=_errors(run),
        elapsed_s=round(elapsed_s(run), 1),
        shares=recent_shares(evidence.actors),
        warnings=[*health.warnings, *warnings, *(f"at the start: {text}" for text in run.start_warnings())],
        remarks=remarks,
        speed=_speed(run, steps, waited_s["labels"]) if steps.trained else {},
        files=files_of(run, result in COMPLETE),
        next=_next(run, result, bool(found.reasons), resume),
    )


def _errors(run: Run) -> list[str]:
    found = RoleErrors(run.folder)
    found.read()
    return [str(error) for error in found.all]


def _by_end(counts: Mapping[str, int], kept: int) -> dict[str, int]:
    ends = {shown_end(state.value): counts[state] for state in ENDS if state is not TrajectoryState.EVALUATED}
    ends[TrajectoryState.TRAINED.value] += kept
    return {**ends, "unused": counts["accepted"] - sum(ends.values())}


def _frequent(groups: Iterable[FailureGroup]) -> dict[str, int]:
    counts = Counter[str]()
    for group in groups:
        counts[_first_line(group.reason)] += len(group.ids)
    return dict(counts.most_common(MOST_REASONS))


def _first_line(reason: str) -> str:
    return reason.partition("\n")[0][:LONGEST_REASON]


def _held_out(run: Run) -> dict[str, Change]:
    rows = sorted(run.rows("evaluation"), key=lambda row: row["step"])
    known = {name: [row[f"eval/{name}"] for row in rows if f"eval/{name}" in row] for name in HELD_OUT}
    if not any(known["failed"]):
        del known["failed"]
    return {name: Change(values[0], values[-1]) for name, values in known.items() if values}


def _waited_s(run: Run) -> dict[str, float]:
    """The seconds that the learner waited for each of _WAITED, as the shard with the longest wait counted them."""
    names = {cause: waited_for(cause) for cause in _WAITED}
    shards = [totals(run.rows(role), list(names.values())) for role in run.roles("replay*")]
    return {cause: max((shard[name] for shard in shards), default=0.0) for cause, name in names.items()}


def _old_groups(counts: Mapping[str, int], waited_s: float) -> dict[str, float]:
    accepted = max(1, counts.get("tokens_accepted", 0))
    tokens = {"evicted": counts.get("tokens_evicted", 0), "masked": counts.get(MASKED, 0)}
    return {
        **{f"tokens_{name}": count for name, count in tokens.items()},
        **{name: round(count / accepted, 4) for name, count in tokens.items()},
        "waited_s": round(waited_s, 1),
        "wait_limits": counts.get(LIMITS_REACHED, 0),
    }


def _speed(run: Run, steps: _Steps, waited_for_labels_s: float) -> dict[str, float]:
    actors = [totals(run.rows(role), _ENGINE) for role in run.roles("actor-*")]
    actors = [actor for actor in actors if any(actor.values())]
    actor_seconds = max(1e-9, sum(actor["seconds"] for actor in actors))
    # Actors that were added or removed meanwhile have run for a shorter time.
    seconds = max((actor["seconds"] for actor in actors), default=0.0)
    return {
        "seconds": round(seconds, 1),
        "tokens_per_s": round(sum(actor["tokens"] for actor in actors) / max(1e-9, seconds), 1),
        "max_lag": steps.max_lag,
        "learner_idle": round(steps.idle_seconds / max(1e-9, steps.seconds), 4),
        "engine_idle": round(sum(actor["idle_seconds"] for actor in actors) / actor_seconds, 4),
        "waited_for_labels": round(waited_for_labels_s / max(1e-9, steps.seconds), 4),
    }


def files_of(run: Run, done: bool) -> dict[str, str]:
    """The existing folders of a run, by their content."""
    # If an unfinished run has exports, it wrote them at an earlier end, with fewer learner.steps. So they are old.
    names = _FOLDERS if done else [name for name in _FOLDERS if name not in _EXPORTS]
    return {name: str(run.folder / name) for name in names if (run.folder / name).exists()}


def _next(run: Run, result: str, failures: bool, resume: str) -> list[str]:
    folder = quoted(run.folder)
    look = [f"list {folder} --sort reward", *([f"dead-letters {folder}"] if failures else [])]
    asyncrl = runnable()
    use = [f"{asyncrl} evaluate {folder}", f"{asyncrl} export {folder}"]
    looks = [f"{asyncrl} report {folder}", *(f"{asyncrl} inspect {command}" for command in look)]
    complete = result in COMPLETE
    return [*([] if complete or result == "running" else [resume]), *looks, *(use if complete else [])]


def quoted(path: Path) -> str:
    """A path as a word of a shell's command line."""
    return shlex.quote(str(path))


def resume_command(run: Run) -> str:
    """The command that continues a run."""
    return f"{runnable()} resume {quoted(run.folder)}"


def record_summary(run: Run, values: Mapping[str, Any]) -> None:
    """Write the values of a summary into the run's folder. If that fails, this only logs a warning."""
    try:
        write_whole(run.folder / SUMMARY_FILE, f"{json_text(values)}\n")
    except OSError as error:
        log.warning("%s was not written: %s", run.folder / SUMMARY_FILE, error)
