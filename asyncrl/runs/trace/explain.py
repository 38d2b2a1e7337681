"""Explains the duration of a learner step or of an episode, in a few sentences from the spans.

The time of an episode is divided among its spans: each moment belongs to the innermost span at that moment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from asyncrl.errors import RefusedError
from asyncrl.runs.trace.reading import US, RoleSpans, Trace, TraceSpan, episodes_of, number_of, text_of

LAST_GROUPS = 3
"""The number of groups of a batch that are described: the groups that were complete last."""
LONGEST = 8
LEAST_SHARE = 0.01
"""An activity that took a smaller share of an episode's time is left out."""
IDLE = ("wait", "fetch", "release", "onload", "offload")
"""The phases in which the learner has nothing to compute."""
PHRASES = {
    "queued": "waiting for a free slot of the actor",
    "wait": "waiting for a policy version",
    "generate": "generating",
    "segment": "generating",
    "tools": "between tool calls",
    "user": "waiting for the simulated user",
    "agent": "in the agent, without generating",
    "episode": "in the actor, otherwise",
    "ticket": "between replay and actor",
    "deliver": "being delivered",
    "label queue": "waiting for a scorer",
    "label": "being scored",
}


@dataclass
class Share:
    """The seconds that an episode spent on one activity, the number of spans of this activity, and the number of tokens
    sampled in these spans."""

    seconds: float = 0.0
    spans: int = 0
    tokens: int = 0


@dataclass
class EpisodeStory:
    """All spans of one episode."""

    name: str
    spans: list[TraceSpan] = field(default_factory=list)

    @property
    def start(self) -> int:
        return min(span.start for span in self.spans)

    @property
    def end(self) -> int:
        return max(span.end for span in self.spans)

    @property
    def labelled(self) -> int:
        """The time at which the episode's last label was stored; 0 if it has none."""
        return max((span.end for span in self.spans if span.name == "label"), default=0)

    def value(self, name: str, key: str) -> Any:
        """The value `key` of the newest span `name` that has it; empty if there is none."""
        return next((span.values[key] for span in reversed(self.spans) if span.name == name and key in span.values), "")

    def shares(self) -> dict[str, Share]:
        """The shares of the episode's time, the largest first."""
        found: defaultdict[str, Share] = defaultdict(Share)
        for span, microseconds in innermost(self.spans):
            found[phrase(span)].seconds += microseconds / US
        known = sum(each.seconds for each in found.values())
        found["in no recorded span"].seconds += (self.end - self.start) / US - known
        for span in self.spans:
            share = found[phrase(span)]
            if span.name != "segment":
                share.spans += 1
                share.tokens += (number_of(span.values, "tokens") or 0) if span.name == "generate" else 0
        ordered = sorted(found.items(), key=lambda each: -each[1].seconds)
        return {name: share for name, share in ordered if share.seconds >= 0.0005}


def phrase(span: TraceSpan) -> str:
    """Describe a span in words."""
    if span.name.startswith("tool "):
        return f"in {span.name}"
    return PHRASES.get(span.name, span.name)


def innermost(spans: Sequence[TraceSpan]) -> Iterator[tuple[TraceSpan, int]]:
    """Divide the time among the spans: yield a span and the number of microseconds for which it was the innermost one.
    Of two spans with equal starts and equal ends, the one that was recorded first is the inner one."""
    edges = sorted({edge for span in spans for edge in (span.start, span.end)})
    for begin, end in pairwise(edges):
        there = [span for span in spans if span.start <= begin and end <= span.end]
        if there:
            yield max(there, key=lambda span: span.order), end - begin


def explain_step(trace: Trace, step: int) -> list[str]:
    """Explain how long the learner took for `step`, and why it was idle. Raises RefusedError: it has no spans."""
    phases = [span for span in trace.spans(_is("learner")) if span.values.get("step") == step]
    if not phases:
        raise RefusedError(f"there are no spans of step {step}: it has not been done, or its spans were dropped")
    first = phases[0].role
    phases = _newest_attempt([span for span in phases if span.role == first and span.track == "steps"])
    wait = [span for span in phases if span.name == "wait"]
    groups, missing = _groups_and_causes(trace, step, wait)
    lines = _step_lines(step, phases, missing)
    if not groups:
        return [*lines, "The replay has no spans of the groups in its batch."]
    plan = max(group.end for group in groups)
    groups.sort(key=lambda group: -group.start)
    members = sum(len(episodes_of(group)) for group in groups)
    lines.append(
        f"Its batch has {_count(len(groups), 'group')} with {_count(members, 'episode')}. The last group was complete "
        f"{_seconds((plan - groups[0].start) / US)} before the plan was made, the first "
        f"{_seconds((plan - groups[-1].start) / US)}."
    )
    last = groups[:LAST_GROUPS]
    stories = episode_stories(trace, {name for group in last for name in episodes_of(group)})
    lines.append("The groups that were complete last:")
    for group in last:
        lines += _group_lines(group, [stories[name] for name in episodes_of(group) if name in stories])
    return lines


def _newest_attempt(phases: list[TraceSpan]) -> list[TraceSpan]:
    """The spans of the newest attempt at a step. `phases` has the spans of all attempts, in the order in which they
    ended. A learner that resumes repeats steps after its checkpoint.

    An attempt may begin with an evaluation. Its wait and its other phases follow. An attempt that was stopped in its
    evaluation is left out.
    """
    waits = [index for index, span in enumerate(phases) if span.name == "wait"]
    if not waits:
        return phases
    evaluations = [span for span in phases[: waits[-1]] if span.name == "evaluate"]
    return [*evaluations[-1:], *(span for span in phases[waits[-1] :] if span.name != "evaluate")]


def explain_episode(trace: Trace, name: str) -> list[str]:
    """Explain the time that an episode took. Raises RefusedError: it has no spans."""
    story = episode_stories(trace, {name}).get(name)
    if story is None:
        raise RefusedError(f"there are no spans of an episode {name}: it has not begun, or its spans were dropped")
    group = name.split(".", 1)[0]
    ready = [
        span for span in trace.spans(_is("replay")) if span.name == "ready" and text_of(span.values, "group") == group
    ]
    task, worker = story.value("episode", "task"), story.value("ticket", "worker")
    what = f"{name}{f' of task {task}' if task else ''}{f' on {worker}' if worker else ''}"
    until = "its label" if story.labelled else "its last recorded span"
    lines = [f"{what} took {_seconds((story.end - story.start) / US)} from its ticket until {until}:"]
    lines += _share_lines(story, "  ")
    lines.append("Its longest parts, each with its start in seconds after the ticket:")
    parts = [span for span in story.spans if span.name not in ("episode", "ticket", "segment", "agent", "tools")]
    longest = sorted(parts, key=lambda span: -span.duration)[:LONGEST]
    for span in sorted(longest, key=lambda span: span.start):
        lines.append(
            f"  {(span.start - story.start) / US:+9.1f}  {span.name}: {_seconds(span.seconds)}{_details(span)}"
        )
    if failed := story.value("episode", "failed"):
        lines.append(f"It failed: {failed}")
    for span in ready if story.labelled else ():
        waited = f"Its group was complete {_seconds((span.start - story.labelled) / US)} after its label"
        if (step := span.values.get("step")) is not None:
            lines.append(f"{waited}, and waited {_seconds(span.seconds)} for the plan of step {step}.")
        else:
            lines.append(f"{waited}, and was {span.values.get('outcome', 'closed')} after {_seconds(span.seconds)}.")
    return lines


def episode_stories(trace: Trace, names: Collection[str]) -> dict[str, EpisodeStory]:
    """The spans of the episodes `names`, by the name of the episode."""
    stories: dict[str, EpisodeStory] = {}
    for span in trace.spans(_is("actor", "replay")):
        name = text_of(span.values, "episode")
        if name in names:
            stories.setdefault(name, EpisodeStory(name)).spans.append(span)
    return stories


def _groups_and_causes(trace: Trace, step: int, wait: Sequence[TraceSpan]) -> tuple[list[TraceSpan], dict[str, float]]:
    """The groups that were planned for the step, and the seconds for which the learner waited for each missing thing,
    by the name of that thing. The learner asks all shards at once, so the shard with the longest wait counts."""
    groups: list[TraceSpan] = []
    missing: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in trace.spans(_is("replay")):
        if span.name == "ready" and span.values.get("step") == step:
            groups.append(span)
        elif span.track == "learner waits":
            common = sum(max(0, min(span.end, each.end) - max(span.start, each.start)) for each in wait)
            if common:
                missing[span.name.removeprefix("no ")][span.role] += common / US
    return groups, {name: max(shards.values()) for name, shards in missing.items()}


def _step_lines(step: int, phases: Sequence[TraceSpan], missing: dict[str, float]) -> list[str]:
    seconds = {span.name: span.seconds for span in sorted(phases, key=lambda span: span.start)}
    before = seconds.pop("evaluate", 0.0)
    total = seconds.pop("step", sum(seconds.values()))
    idle = sum(seconds.get(name, 0.0) for name in IDLE)
    by_phase = ", ".join(f"{name} {_seconds(value)}" for name, value in seconds.items())
    lines = [
        f"Step {step} took {_seconds(total)}: {by_phase}.",
        f"The learner was idle for {_seconds(idle)} of it ({idle / total:.0%})." if total else "",
    ]
    if before >= 0.05:
        lines.append(f"Before it, the learner waited {_seconds(before)} for an evaluation.")
    if missing:
        causes = " and ".join(f"{name} for {_seconds(value)}" for name, value in missing.items())
        lines.append(f"While the learner waited for its batch, the replay lacked {causes}.")
    return [line for line in lines if line]


def _group_lines(group: TraceSpan, stories: Sequence[EpisodeStory]) -> list[str]:
    name = text_of(group.values, "group")
    waited = f"  {name} waited {_seconds(group.seconds)} for the plan"
    if not stories:
        return [f"{waited}."]
    last = max(stories, key=lambda story: story.labelled)
    took = (last.end - last.start) / US
    header = f"{waited}. Its last episode was {last.name}, {_seconds(took)} from its ticket to its label:"
    return [header, *_share_lines(last, "    ")]


def _share_lines(story: EpisodeStory, indent: str) -> Iterator[str]:
    total = (story.end - story.start) / US
    shown = {name: share for name, share in story.shares().items() if share.seconds >= LEAST_SHARE * total}
    for name, share in shown.items():
        more = f", {_count(share.spans, 'time')}" if share.spans > 1 else ""
        more += f", {_count(share.tokens, 'token')}" if share.tokens else ""
        yield f"{indent}{share.seconds / total:4.0%}  {_seconds(share.seconds)} {name}{more}"


def _details(span: TraceSpan) -> str:
    shown = ("tokens", "version", "worker", "server", "outcome", "reason", "error")
    details = ", ".join(f"{key} {span.values[key]}" for key in shown if span.values.get(key) not in (None, ""))
    return f" ({details})" if details else ""


def _is(*kinds: str) -> Callable[[RoleSpans], bool]:
    return lambda role: role.kind in kinds


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if abs(value) < 1 else f"{value:.1f} s"
