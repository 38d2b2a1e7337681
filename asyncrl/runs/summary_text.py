"""Shows the summary of a run to people, one fact a line.

The console shows these lines at the end of `asyncrl train`, however that ends, and the report has them, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict

from asyncrl.runs.failures import shown_end
from asyncrl.runs.run import Run
from asyncrl.runs.summary import RunSummary, record_summary, summarise
from asyncrl.text import duration, printable


def as_text(rows: Iterable[tuple[str, str]]) -> str:
    """Facts with their names for people, one per line."""
    return "".join(f"  {name:<19}{printable(text)}\n" for name, text in rows)


def summary_rows(summary: RunSummary) -> list[tuple[str, str]]:
    """The facts of a summary for people, with their names. A fact with an empty name continues the fact before it."""
    steps = f"{summary.steps} of {summary.planned_steps} steps"
    if summary.result in ("stopped", "failed"):
        if summary.steps_kept < summary.steps:
            steps += f", {summary.steps_kept} of them in the newest checkpoint"
        steps += "; the same command resumes it"
    rows = [("result", f"{summary.result} after {steps}")]
    if summary.result == "solved":
        rows.append(("solved", summary.reason))
    if summary.reward and summary.outcome:
        span = "first and last step" if summary.averaged == 1 else f"first and last {summary.averaged} steps"
        rows += [("reward", f"{summary.reward} ({span})"), ("outcome", str(summary.outcome))]
    if summary.entropy:
        rows.append(("entropy", f"{summary.entropy} nats a token"))
    if summary.shares:
        rows.append(("newest episodes", ", ".join(f"{share:.0%} {name}" for name, share in summary.shares.items())))
    for name, change in summary.held_out.items():
        missing = "; the means leave these out" if name == "failed" else ""
        rows.append((f"held-out {name}", f"{change} (first and last{missing})"))
    if summary.trajectories:
        rows.append(("trajectories", ", ".join(f"{count} {end}" for end, count in summary.trajectories.items())))
    if "evicted" in summary.decided:
        lengths = ", ".join(f"{shown_end(end)} {each['length']:.0f}" for end, each in summary.decided.items())
        rows.append(("mean tokens", lengths))
    if text := old_groups_text(summary.old_groups):
        rows.append(("old groups", text))
    if any(summary.failures.values()):
        rows.append(("failures", ", ".join(f"{count} {kind}" for kind, count in summary.failures.items())))
    if count := sum(summary.dead_letters.values()):
        parts = ", ".join(f"{of_kind} of {kind}s" for kind, of_kind in summary.dead_letters.items())
        rows.append(("dead letters", f"{count}: {parts}"))
        rows += [("", f"{count} x {reason}") for reason, count in summary.reasons.items()]
    rows.append(("elapsed", duration(summary.elapsed_s)))
    if speed := summary.speed:
        rows.append(
            (
                "speed",
                f"{speed['tokens_per_s']:.0f} sampled tokens/s, largest lag {speed['max_lag']:.0f}, "
                f"learner idle {speed['learner_idle']:.0%}, engine idle {speed['engine_idle']:.0%}",
            )
        )
    rows += [("changed", text) for text in summary.changes]
    rows += [("error", text) for text in summary.errors]
    rows += [("remark", text) for text in summary.remarks]
    rows += [("warning", text) for text in summary.warnings]
    rows += [("episodes" if name == "replay" else name, path) for name, path in summary.files.items()]
    return rows + [("" if index else "next", command) for index, command in enumerate(summary.next)]


def old_groups_text(old: Mapping[str, float]) -> str:
    """The tokens that were thrown away or masked as too old, and the waits for old groups, for people. `old` is
    `RunSummary.old_groups`. Empty if there were none."""
    parts = [
        f"{old[f'tokens_{name}']:,.0f} sampled tokens {what} ({old[name]:.1%} of the accepted ones)"
        for name, what in (("evicted", "thrown away"), ("masked", "masked"))
        if old[f"tokens_{name}"]
    ]
    if old["waited_s"]:
        parts.append(f"the learner waited {duration(old['waited_s'])} for them")
    if limits := old["wait_limits"]:
        parts.append(f"{limits:.0f} {'wait' if limits == 1 else 'waits'} reached the limit")
    return ", ".join(parts)


def write_summary(run: Run, planned_steps: int, result: str, reason: str, resume: str) -> str:
    """Write the summary into the run's folder, and return it as text."""
    summary = summarise(run, planned_steps, result, reason, resume)
    record_summary(run, asdict(summary))
    return as_text(summary_rows(summary))
