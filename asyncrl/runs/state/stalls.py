"""Explains in plain sentences why a run waits: by a chain of waits, from the role that waits to the cause.

`chain` is a pure function. The chain begins with the learner, since a run makes progress if the learner does. If
the learner works, the chain says why actors have nothing to do. Of several shards, actors or scorers the chain names
the worst one and the number of further ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from asyncrl.runs.state.situation import RoleNow, ShardNow, Situation
from asyncrl.runs.state.working import does
from asyncrl.text import duration

SILENT_S = 5.0
"""A role is silent if it has written no heartbeat for more than this many seconds. It should write one every second."""
MOST_IDLE = 0.9
"""An engine that is idle for a larger share of its time, although episodes run, lacks requests. The cause is then the
tools, users or agents of the episodes."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A link of a chain.

    - `who`: such as "learner"; empty if `what` has its own subject;
    - `what`: the activity of `who`, such as "waits for a batch";
    - `seconds`: the duration of the activity so far; None if it is unknown;
    - `fault`: true if `who` is silent, down or failing, and no setting of the run fixes that.
    """

    who: str
    what: str
    seconds: float | None = None
    fault: bool = False

    @property
    def does(self) -> str:
        """The activity of `who`, and its duration."""
        return self.what if self.seconds is None else f"{self.what} for {duration(self.seconds)}"

    def __str__(self) -> str:
        return f"{self.who} {self.does}".lstrip()


def sentence(waits: Sequence[Wait]) -> str:
    """The chain as one sentence; empty if no role waits."""
    return ": ".join(map(str, waits))


def faults(now: Situation) -> dict[str, Wait]:
    """The roles that are silent or do not run, even if no role waits for them."""
    found = {name: _not_working(role, now) for name, role in now.roles.items()}
    return {name: wait for name, wait in found.items() if wait is not None and wait.fault}


def chain(now: Situation) -> list[Wait]:
    """The chain of waits, down to a cause; empty if the learner works and actors have tickets, the permissions to run
    an episode."""
    learners = now.of("learner")
    if stopped := _worst(learners, now):
        return [stopped]
    phase, seconds = _phase(learners, now)
    if phase == "wait":
        return [Wait("learner", f"waits for the batch of step {now.step}", seconds), *_batch(now)]
    if phase == "evaluate":
        return [Wait("learner", f"waits for the evaluation of version {now.version}", seconds), *_evaluation(now)]
    return _idle_actors(now, phase, seconds)


def _phase(learners: Sequence[RoleNow], now: Situation) -> tuple[str, float | None]:
    """The phase of the learner and its seconds so far. The replay knows if the learner waits, even without a
    supervisor."""
    waits = [each.learner_waits_s for each in now.shards if each.learner_waits_s is not None]
    if waits:
        return "wait", max(waits)
    return next(((role.does.phase, role.does_s) for role in learners if role.does), ("", None))


def _batch(now: Situation) -> list[Wait]:
    """The reasons why the batch of the learner's step is not complete."""
    missing = [shard for shard in now.shards if shard.ready < shard.wanted or not shard.takes or shard.old_groups]
    if not missing:
        return []
    shard = max(missing, key=lambda each: (not each.takes, each.wanted - each.ready))
    found = _missing(shard, now)
    others = len(missing) - 1
    if others and found:
        found[0] = replace(
            found[0], what=f"{found[0].what} ({others} more shard{'s lack' if others > 1 else ' lacks'} groups)"
        )
    return found


def _missing(shard: ShardNow, now: Situation) -> list[Wait]:
    lacks, of_shard = shard.wanted - shard.ready, f" of {shard.name}" if len(now.shards) > 1 else ""
    if stopped := _stopped(shard, now):
        return [stopped]
    if shard.old_groups:
        return [Wait("", f"{shard.old_groups}{of_shard}"), *_of_old_groups(shard, now)]
    if shard.failing:
        return [_failing(shard)]
    if shard.refusing:
        return [Wait(shard.name, f"has no group to train: {shard.refusing}", fault=True)]
    if shard.scoring >= lacks:
        return [Wait("", f"{lacks} of {shard.wanted} groups{of_shard} wait for labels"), *_scorers(shard, now)]
    if shard.playing:
        return [
            Wait("", f"{lacks} of {shard.wanted} groups{of_shard} wait for episodes"),
            *_actors(shard, now, now.version - now.max_lag),
        ]
    return [_no_tickets(shard, now)]


def _of_old_groups(shard: ShardNow, now: Situation) -> list[Wait]:
    """The reason why the old groups of a shard are not complete."""
    if shard.playing:
        return _actors(shard, now, now.version - now.max_lag)
    return _scorers(shard, now) if shard.scoring else []


def _evaluation(now: Situation) -> list[Wait]:
    """The reasons why the newest evaluation is not complete."""
    for shard in now.shards:
        if stopped := _stopped(shard, now):
            return [stopped]
    scoring = [shard for shard in now.shards if shard.held_out_scoring]
    playing = [shard for shard in now.shards if shard.held_out_playing]
    count = sum(shard.held_out_scoring + shard.held_out_playing for shard in now.shards)
    if not count:
        return []
    if playing:
        return [Wait("", f"{count} held-out episodes are not done"), *_actors(playing[0], now, now.version)]
    return [Wait("", f"{count} held-out episodes wait for labels"), *_scorers(scoring[0], now)]


def _stopped(shard: ShardNow, now: Situation) -> Wait | None:
    """The reason why a shard of the replay does not answer or postpones requests; `None` if it works."""
    if shard.answers and shard.busy:
        # Its heartbeat may say less: on a full disk it cannot be written.
        return Wait(shard.name, f"postpones requests: {shard.busy}", fault=True)
    role = now.roles.get(shard.name)
    if role is not None and (stopped := _not_working(role, now)):
        return stopped
    return None if shard.answers else Wait(shard.name, "does not answer", fault=True)


def _failing(shard: ShardNow) -> Wait:
    return Wait(shard.name, f"issues few tickets: {shard.failing}", fault=True)


def _no_tickets(shard: ShardNow, now: Situation) -> Wait:
    """The reason why a shard issues no tickets for the groups that it lacks."""
    if shard.is_full:
        return Wait(
            shard.name,
            "issues no tickets, since its store is full: raise replay.max_store_gb, or keep less with replay.retention",
        )
    if shard.committed + now.group_size > shard.capacity:
        why = f"replay.max_lag={now.max_lag}"
        if shard.capacity < shard.age_bound:
            why = f"{why} allows {shard.age_bound}, replay.spare_batches fewer"
        return Wait(
            shard.name,
            f"issues no tickets: {shard.committed} of {shard.capacity} trajectories are admitted at version "
            f"{now.version} ({why})",
        )
    if now.roles and not now.of("actor"):
        return Wait("", "no actor runs", fault=True)
    return _worst(now.of("actor"), now) or Wait("", "no actor asks for tickets")


def _actors(shard: ShardNow, now: Situation, version: int) -> list[Wait]:
    """The reason why a shard's episodes take long. An actor's tickets need the weights of `version`, or of the newer
    version that `shard.needs` has for the actor."""
    actors = now.of("actor")
    if shard.failing:
        return [_failing(shard)]
    holders = [role for role in actors if role.name in shard.actors]
    # An actor that has stopped is the cause only if it has tickets, or if no other actor takes any.
    stopped = _worst(holders, now) or (None if holders else _worst(actors, now)) or _silent(shard, shard.actors, now)
    if stopped:
        return [stopped]
    if not shard.actors:
        none_runs = bool(now.roles) and not actors
        who = "no actor runs" if none_runs else "no actor takes them"
        return [Wait("", f"{shard.pending} tickets wait for an actor, and {who}", fault=none_runs)]
    for found in (
        _longest(holders, lambda role: _without_servers(role)),
        _longest(holders, lambda role: _behind(role, max(version, shard.needs.get(role.name, version)))),
        _longest(holders, lambda role: _idle_engine(role, shard)),
    ):
        if found:
            return [found]
    held = sum(shard.actors.values())
    return [Wait(_names(shard.actors), f"{_verb(shard.actors, 'plays', 'play')} {held} episodes")]


def _without_servers(role: RoleNow) -> Wait | None:
    servers, ready = role.row.get("servers"), role.row.get("servers_ready")
    if ready is None or ready > 0:
        return None
    if not servers:
        return Wait(role.name, "has found no server", fault=True)
    return Wait(role.name, f"has no server that takes requests: 0 of {servers:.0f} are ready", fault=True)


def _behind(role: RoleNow, version: int) -> Wait | None:
    serves = role.row.get("version")
    if serves is None or serves >= version:
        return None
    has = f"serves version {serves:.0f}" if serves >= 0 else "serves no version yet"
    return Wait(role.name, f"waits for weights of version {version} and {has}")


def _idle_engine(role: RoleNow, shard: ShardNow) -> Wait | None:
    if role.row.get("idle", 0.0) <= MOST_IDLE or not role.row.get("running"):
        return None
    held = shard.actors[role.name]
    return Wait(
        role.name,
        f"plays {held} episodes, and its engine was idle for {role.row['idle']:.0%} of the last seconds: "
        "the tools, users or agents of the episodes take long",
    )


def _scorers(shard: ShardNow, now: Situation) -> list[Wait]:
    """The reason why a shard's trajectories have no labels."""
    scorers = now.of("scoring")
    holders = [role for role in scorers if role.name in shard.scorers]
    stopped = _worst(holders, now) or (None if holders else _worst(scorers, now)) or _silent(shard, shard.scorers, now)
    if stopped:
        return [stopped]
    if now.roles and not scorers:
        return [Wait("", "no scorer runs", fault=True)]
    if unavailable := _longest(scorers, _unavailable):
        return [unavailable]
    if not shard.scorers:
        return [Wait("", f"{shard.waiting} trajectories wait for a scorer, and no scorer takes them")]
    held = sum(shard.scorers.values())
    more = f", and {shard.waiting} more wait" if shard.waiting else ""
    return [Wait(_names(shard.scorers), f"{_verb(shard.scorers, 'scores', 'score')} {held} trajectories{more}")]


def _unavailable(role: RoleNow) -> Wait | None:
    text = role.row.get("unavailable")
    return Wait(role.name, f"cannot reach a service that it needs: {text}", fault=True) if text else None


def _idle_actors(now: Situation, phase: str, seconds: float | None) -> list[Wait]:
    """The reason why actors have no tickets while the learner works."""
    for shard in now.shards:
        if stopped := _stopped(shard, now):
            return [stopped]
    if any(shard.playing or shard.held_out_playing for shard in now.shards):
        return []
    blocked = [_no_tickets(shard, now) for shard in now.shards]
    if not blocked:
        return []
    works = Wait("learner", does(phase, now.step), seconds) if phase else None
    return [blocked[0], *([works] if works else [])]


def _worst(roles: Iterable[RoleNow], now: Situation) -> Wait | None:
    """The role that has been stopped for longest, and the number of further stopped roles."""
    return _longest(roles, lambda role: _not_working(role, now))


def _longest(roles: Iterable[RoleNow], why: Callable[[RoleNow], Wait | None]) -> Wait | None:
    """The longest wait that `why` finds for a role, and the number of further roles with a wait."""
    found = [wait for role in roles if (wait := why(role))]
    if not found:
        return None
    worst = max(found, key=lambda wait: wait.seconds or 0.0)
    others = f"{worst.who} (and {len(found) - 1} more)" if len(found) > 1 else worst.who
    return replace(worst, who=others)


def _not_working(role: RoleNow, now: Situation) -> Wait | None:
    """The reason why a role does not work; `None` if it works."""
    again = f" (restart {role.restarts})" if role.restarts else ""
    if not role.placed:
        return Wait(role.name, "waits for room on a host", fault=True)
    if not role.runs:
        return Wait(role.name, f"does not run{again}, see logs/{role.name}.log", fault=True)
    if role.silent_s is not None and role.silent_s > SILENT_S and role.does is not None:
        is_blocked = f"is {role.does.work} and " if role.does.work else ""
        return Wait(role.name, f"{is_blocked}has been silent", role.silent_s, fault=True)
    if role.does is not None and role.does.silent:
        return Wait(f"{role.name}'s {role.does.silent}", "has been silent", role.part_silent_s, fault=True)
    if role.does is not None and role.does.work:
        return Wait(role.name, f"is {role.does.work}")
    if role.does is None or role.does.phase == "start":
        return Wait(role.name, f"has been starting{again}", role.does_s if role.does else None)
    return None


def _silent(shard: ShardNow, holders: Mapping[str, int], now: Situation) -> Wait | None:
    """Find a worker that holds work, has sent no request lately, and was not started by a supervisor."""
    silent = {
        name: seconds
        for name, seconds in shard.silence_s.items()
        if name in holders and name not in now.roles and seconds > now.lease_s / 2
    }
    if not silent:
        return None
    worst = max(silent, key=silent.__getitem__)
    more = f" (and {len(silent) - 1} more)" if len(silent) > 1 else ""
    return Wait(f"{worst}{more}", "has been silent", silent[worst], fault=True)


def _names(holders: Mapping[str, int]) -> str:
    """The name of the worker that holds most items, and the number of further workers."""
    most = max(holders, key=holders.__getitem__)
    return most if len(holders) == 1 else f"{most} and {len(holders) - 1} more"


def _verb(holders: Mapping[str, int], one: str, many: str) -> str:
    return one if len(holders) == 1 else many
