"""Gives advice for a run, based on the shares of time in which its processes were idle.

Each piece of advice names its numbers, and is given only if the numbers support it.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.schema import ReplayConfig
from asyncrl.runs.settings import ViewSettings
from asyncrl.runs.shares import IdleShares

STARVED, SERVED = 0.2, 0.05
"""The learner waits too much if it is idle for more than the share STARVED of its time, and hardly at all if it is idle
for less than SERVED."""
BUSY = 0.1
"""Actors or scorers limit the run if they are idle for less than this share of their time."""
ACTORS_IDLE, SCORERS_IDLE = 0.5, 0.8
"""Actors, or scorers, are too many if they are idle for more than this share of their time and the learner does not
wait."""
SCHEDULER_BUSY = 0.9
"""A scheduler limits its server if it takes more than this share of a core. It is one thread of Python."""
QUEUED = 8
"""A server has too little room if at least this many requests wait. Fewer are normal: each new request waits for the
next step."""
SATURATED = 0.9
"""Actors limit their servers if their event loops use more than this share of a core each."""
MUCH_TOO_OLD = 0.05
"""Too many tokens are too old if they are more than this share of the sampled ones."""
LONG_PHASE = 0.2
"""Publishing weights should take less than this share of a step's time, and so should waiting for checkpoints."""
MOST_OF = 0.5
"""A reason is the cause of the learner's waiting if it explains more than this share of the waiting time."""

FINE = "nothing waits longer than it should"
_WAITS_FOR = {
    "episodes": "episodes",
    "labels": "labels",
    "store": "room in the store",
    "old_groups": "groups that would have become too old",
}
"""The words for the thing that the learner waits for, by the cause of the wait."""


def advise(seen: IdleShares, settings: ViewSettings) -> list[str]:
    """Give advice in sentences, the most important first; empty if nothing should be changed."""
    return [
        *_slow_servers(seen, settings),
        *_starved(seen, settings),
        *_served(seen, settings),
        *_too_old(seen, settings),
        *_long_phases(seen, settings),
    ]


def _slow_servers(seen: IdleShares, settings: ViewSettings) -> Iterator[str]:
    """Advice for servers that are slower than their GPUs, while the learner waits for them."""
    if seen.learner_idle <= STARVED:
        return
    if seen.without_graphs >= MOST_OF:
        yield (
            f"on average {seen.without_graphs:.1f} servers decoded without CUDA graphs: remove arguments about graphs "
            "from engine.server.arguments, and restart the run, which gives each server graphs for all its requests"
        )
    if seen.queued >= QUEUED:
        yield (
            f"on average {seen.queued:.0f} requests waited in servers: remove --max-running-requests and "
            f"--max-total-tokens from engine.server.arguments, or lower actor.concurrency from {settings.concurrency}"
        )
    if seen.scheduler_busy is not None and seen.scheduler_busy > SCHEDULER_BUSY:
        own = settings.per_gpu
        mend = "add GPUs for servers" if own is None else f"set engine.server.per_gpu={own + 1}"
        yield f"the scheduler of a server took {seen.scheduler_busy:.0%} of a core, which limits the server: {mend}"


def _starved(seen: IdleShares, settings: ViewSettings) -> Iterator[str]:
    """Advice for a learner that waits too much."""
    if seen.learner_idle <= STARVED or not seen.waited:
        return
    idle = f"the learner was idle for {seen.learner_idle:.0%} of the last {seen.steps} steps"
    cause, share = max(seen.waited.items(), key=lambda each: each[1])
    if share < MOST_OF * seen.learner_idle:
        if share >= SERVED:
            yield f"{idle}, {_several_waits(seen)}: see `asyncrl trace RUN --explain-step STEP`"
        return
    idle += f", {share:.0%} waiting for"
    if cause == "labels":
        yield from _more_scorers(f"{idle} labels", seen)
    elif cause == "store":
        yield (
            f"{idle} {_WAITS_FOR[cause]}: raise replay.max_store_gb from {settings.replay.max_store_gb:g}, or keep "
            "less with replay.retention"
        )
    elif cause == "old_groups":
        lag, old = settings.replay.max_lag, settings.replay.old_groups
        kept = ", with replay.old_groups.mask=true, which trains groups without their tokens that are too old"
        kept = kept if settings.can_mask and old.mask is False else ""
        shorter = "set replay.old_groups.wait_s=0"
        if old.wait_s is not None:
            shorter = f"lower replay.old_groups.wait_s from {old.wait_s:g}"
        yield f"{idle} {_WAITS_FOR[cause]}: raise replay.max_lag from {lag} to {lag + 1}, or {shorter}{kept}"
    else:
        yield from _more_episodes(f"{idle} episodes", seen, settings)


def _several_waits(seen: IdleShares) -> str:
    """The causes of the learner's waits with their shares, the longest first, without those that hardly matter."""
    waits = sorted(seen.waited.items(), key=lambda each: -each[1])
    return " and ".join(f"{share:.0%} waiting for {_WAITS_FOR[cause]}" for cause, share in waits if share >= SERVED)


def _more_scorers(waits: str, seen: IdleShares) -> Iterator[str]:
    if seen.scorers_idle is None:
        return
    busy = f"{waits}, while scorers were busy for {1 - seen.scorers_idle:.0%}"
    if seen.scorers_idle < BUSY:
        yield f"{busy}: set cluster.scorers={seen.scorers + 1}"
    elif seen.scorers_idle > ACTORS_IDLE:
        yield f"{busy}: more scorers do not help; a single label takes long, so look at the slowest part of the reward"


def _more_episodes(waits: str, seen: IdleShares, settings: ViewSettings) -> Iterator[str]:
    if seen.actors_idle is None:
        return
    lag = settings.replay.max_lag
    larger_lag = f"raise replay.max_lag from {lag} to {lag + 1}"
    engines = f"{waits}, while engines were busy for {1 - seen.actors_idle:.0%}"
    if settings.engine != "embedded" and seen.loops_busy is not None and seen.loops_busy > SATURATED:
        yield (
            f"{waits}, while each actor used {seen.loops_busy:.0%} of a core, so that servers wait for their actors: "
            f"set cluster.actors={seen.actors + 1}, which divides the servers among more actors, if each has a GPU "
            "with servers"
        )
    elif seen.actors_idle < BUSY and settings.engine == "embedded" and _uses_all_cores(seen):
        yield f"{engines}: the {seen.cores} cores of this machine limit the run"
    elif seen.actors_idle < BUSY:
        yield f"{engines}: add engines ({_more_engines(seen, settings)})"
    elif seen.pending >= 1 and seen.too_old > MUCH_TOO_OLD:
        return  # More episodes at once would be older still; `_too_old` has the advice.
    elif seen.pending >= 1:
        more = 2 * settings.concurrency
        yield (
            f"{engines} and {seen.pending:.0f} tickets waited for an actor: raise actor.concurrency from "
            f"{settings.concurrency} to {more}"
        )
    elif not settings.is_colocated:
        yield f"{engines}, since admission allowed no more episodes: {larger_lag}"


def _uses_all_cores(seen: IdleShares) -> bool:
    """True if a further engine would have no core of its own. The learner also needs a core."""
    return seen.cores is not None and seen.actors + 1 >= seen.cores


def _more_engines(seen: IdleShares, settings: ViewSettings) -> str:
    if settings.engine == "embedded":
        return f"cluster.actors={seen.actors + 1}"
    if settings.servers is not None:
        return f"engine.server.count={settings.servers + 1}"
    return "engine.urls, or cluster.actors if the run starts its servers"


def _served(seen: IdleShares, settings: ViewSettings) -> Iterator[str]:
    """Advice for a run with more actors or scorers than the learner needs."""
    if seen.learner_idle >= SERVED:
        return
    waits = f"the learner waited for {seen.learner_idle:.0%} of the last {seen.steps} steps"
    if seen.actors_idle is not None and seen.actors_idle > ACTORS_IDLE:
        fewer = f"cluster.actors={seen.actors - 1}" if seen.actors > 1 else "fewer servers or GPUs for generation"
        yield (
            f"{waits}, while engines were idle for {seen.actors_idle:.0%}: use {fewer}, or give the "
            f"learner more GPUs; a learner.batch_size above {settings.batch_size} also keeps the engines busy"
        )
    if seen.scorers_idle is not None and seen.scorers_idle > SCORERS_IDLE and seen.scorers > 1:
        yield (
            f"{waits}, while {seen.scorers} scorers were idle for {seen.scorers_idle:.0%}: "
            f"cluster.scorers={seen.scorers - 1} is enough"
        )


def _too_old(seen: IdleShares, settings: ViewSettings) -> Iterator[str]:
    if seen.too_old <= MUCH_TOO_OLD:
        return
    lag, replay = settings.replay.max_lag, settings.replay
    thrown = f"{seen.too_old:.0%} of the sampled tokens of the last {seen.steps} steps were thrown away as too old"
    larger, kept = f"raise replay.max_lag from {lag} to {lag + 1}", _ways_to_keep(settings)
    if replay.oversample > 1:
        yield f"{thrown}: lower replay.oversample from {replay.oversample:g}"
    elif seen.learner_idle > STARVED:
        yield (
            f"{thrown}: {larger}; or lower actor.concurrency from {settings.concurrency}, if engines make as many "
            f"tokens a second with fewer requests at once{kept}"
        )
    elif _could_pace(replay):
        yield f"{thrown}, while the learner hardly waits: set replay.sampler.kind=oldest replay.spare_batches=0.5{kept}"
    else:
        yield f"{thrown}: {larger}, or lower actor.concurrency from {settings.concurrency}{kept}"


def _ways_to_keep(settings: ViewSettings) -> str:
    """The options of replay.old_groups that would throw away fewer groups, as the end of a sentence. Empty if there are
    none left."""
    old = settings.replay.old_groups
    wait = f"{'a longer ' if old.wait_s is None else ''}replay.old_groups.wait_s"
    left = {
        "replay.old_groups.mask=true": settings.can_mask and old.mask is False,
        wait: settings.replay.can_wait and not old.wait_s,
    }
    ways = [way for way, is_left in left.items() if is_left]
    where = "(docs/replay.md#groups-that-become-too-old)"
    return f"; or keep such groups with {' or '.join(ways)} {where}" if ways else ""


def _could_pace(replay: ReplayConfig) -> bool:
    """True if the run could limit how many episodes are played ahead of the learner (pacing), but pacing is off or the
    sampler does not suit it."""
    return replay.can_pace and (replay.spare_batches is None or replay.sampler.kind == "fifo")


def _long_phases(seen: IdleShares, settings: ViewSettings) -> Iterator[str]:
    for phase, what, key, value in (
        ("publish", "publishing weights", "learner.publish_every", settings.publish_every),
        ("checkpoint", "waiting for checkpoints", "learner.checkpoint_every", settings.checkpoint_every),
    ):
        share = seen.phases.get(phase, 0.0)
        if share > LONG_PHASE:
            yield f"{what} took {share:.0%} of the last {seen.steps} steps: raise {key} from {value} to {2 * value}"
