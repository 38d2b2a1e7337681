"""Describes the situation of a run at one moment as plain data, from its files, its stores and its replay's status.

From this, `stalls` derives which role waits for which.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.config.locations import ALIVE_FOLDER
from asyncrl.machine.doing import Doing, read_doing
from asyncrl.runs.lines import Tail
from asyncrl.runs.processes import ProcessRecord
from asyncrl.runs.run import Run
from asyncrl.runs.scorers import files_of_scorer
from asyncrl.runs.settings import ViewSettings
from asyncrl.runs.state.status import StatusSample, StoreSummary

ROW_S = 60.0
"""A row of metrics that is older than this many seconds does not describe the present, and is left out."""


@dataclass(frozen=True, slots=True)
class RoleNow:
    """A role of a supervised run.

    - `runs`: true if the role has a process;
    - `placed`: true if it has a host;
    - `silent_s`: the seconds since its last heartbeat; None if it had none;
    - `does`: the work that it reports;
    - `does_s`: the seconds that this work has taken so far;
    - `part_silent_s`: if the report names a silent part of the role, the seconds of that silence;
    - `row`: its newest row of metrics; empty if the row is old.
    """

    name: str
    runs: bool = True
    placed: bool = True
    restarts: int = 0
    silent_s: float | None = None
    does: Doing | None = None
    does_s: float = 0.0
    part_silent_s: float = 0.0
    row: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ShardNow:
    """A shard of the replay.

    - `wanted`: the number of groups that a step needs from the shard;
    - `answers`: true if the shard's status could be read;
    - `ready`: the number of groups that may be trained;
    - `scoring`: the number of groups whose members are all stored, but not all scored;
    - `playing`: the number of all other open groups;
    - `held_out_scoring`, `held_out_playing`: the same for evaluations, where each attempt is a group;
    - `pending`: the number of tickets (permissions to run an episode) that no actor has taken;
    - `waiting`: the number of episodes that no scorer has taken;
    - `actors`, `scorers`: the number of episodes that each actor or scorer holds;
    - `needs`: for each actor, the oldest policy version that may start at least one of the training episodes that it
      holds (`asyncrl.replay.starts.fresh_starts`);
    - `silence_s`: the seconds since the last request of each actor and scorer;
    - `committed`, `capacity`, `age_bound`: the metrics of the replay with these names (docs/metrics.md);
    - `is_full`: true if the store is so full that no tickets are issued;
    - `failing`: the reason why the shard issues few tickets; empty if there is none;
    - `refusing`: the reason why the shard's filters refuse every group; empty if they do not;
    - `busy`: the reason why the shard postpones requests; empty if it does not;
    - `learner_waits_s`: the seconds for which the learner has waited; None if it does not wait;
    - `old_groups`: the old groups for which the learner waits, as the end of a sentence; empty if it waits for none.
    """

    name: str
    wanted: int
    answers: bool = True
    ready: int = 0
    scoring: int = 0
    playing: int = 0
    held_out_scoring: int = 0
    held_out_playing: int = 0
    pending: int = 0
    waiting: int = 0
    actors: Mapping[str, int] = field(default_factory=dict)
    scorers: Mapping[str, int] = field(default_factory=dict)
    needs: Mapping[str, int] = field(default_factory=dict)
    silence_s: Mapping[str, float] = field(default_factory=dict)
    committed: int = 0
    capacity: int = 0
    age_bound: int = 0
    is_full: bool = False
    failing: str = ""
    refusing: str = ""
    busy: str = ""
    learner_waits_s: float | None = None
    old_groups: str = ""

    @property
    def takes(self) -> bool:
        """True if the shard accepts the requests of roles."""
        return self.answers and not self.busy


@dataclass(frozen=True, slots=True)
class Situation:
    """A run at one moment.

    - `roles`: the roles by name; empty without a supervisor;
    - `step`: the step that the learner trains or waits for;
    - `version`: the newest published policy version.
    """

    shards: Sequence[ShardNow]
    roles: Mapping[str, RoleNow] = field(default_factory=dict)
    step: int = 0
    version: int = 0
    max_lag: int = 0
    group_size: int = 1
    lease_s: float = 30.0
    hang_s: float = 600.0

    def of(self, kind: str) -> list[RoleNow]:
        """The roles of a kind: actor, scoring, learner or replay."""
        return [role for name, role in self.roles.items() if name == kind or name.startswith(f"{kind}-")]


class RolesReader:
    """Reads the state of each role in the run's folder. `clock` gives seconds since 1970."""

    def __init__(self, run: Run, clock: Callable[[], float] = time.time) -> None:
        self._run, self._clock = run, clock
        self._tails: dict[str, Tail] = {}

    def read(self, processes: Mapping[str, ProcessRecord], shards: int) -> dict[str, RoleNow]:
        """The roles in `processes`, which the supervisor of a run with `shards` shards wrote."""
        return {name: self._role(name, record, shards) for name, record in processes.items()}

    def _role(self, name: str, record: ProcessRecord, shards: int) -> RoleNow:
        now, beats = self._clock(), self._run.folder / ALIVE_FOLDER / name
        try:
            silent_s = max(0.0, now - beats.stat().st_mtime)
        except OSError:
            silent_s = None
        does = read_doing(beats)
        files = files_of_scorer(name, shards) if name.startswith("scoring-") else [name]
        row: dict[str, Any] = {}
        for file in files:
            row.update(self._row(file, now))
        return RoleNow(
            name,
            runs=bool(record.pid),
            placed=bool(record.host),
            restarts=record.restarts,
            silent_s=silent_s,
            does=does,
            does_s=max(0.0, now - does.since) if does else 0.0,
            part_silent_s=max(0.0, now - does.silent_since) if does and does.silent else 0.0,
            row=row,
        )

    def _row(self, file: str, now: float) -> dict[str, Any]:
        tail = self._tails.setdefault(file, self._run.raw_tail(file))
        tail.read()
        newest = tail.recent[-1] if tail.recent else {}
        return newest if now - newest.get("time", 0.0) <= ROW_S else {}


def situation(now: StatusSample, settings: ViewSettings, roles: Mapping[str, RoleNow]) -> Situation:
    """The situation of a running run, at the moment of a sample."""
    shards, groups = len(now.shards), settings.batch_size // settings.group_size
    solved = [bool(live and live.get("solved")) for live in now.answers]

    def wanted(shard: int) -> int:
        # While another shard still has groups to train, steps need no groups from a shard whose tasks are solved.
        return 0 if solved[shard] and not all(solved) else len(range(shard, groups, shards))

    return Situation(
        [
            _shard("replay" if shards == 1 else f"replay-{shard}", wanted(shard), summary, live)
            for shard, (summary, live) in enumerate(zip(now.shards, now.answers, strict=True))
        ],
        roles,
        step=now.store.learner_step,
        version=now.store.counters["version"],
        max_lag=settings.replay.max_lag,
        group_size=settings.group_size,
        lease_s=settings.replay.lease_s,
        hang_s=settings.hang_s,
    )


def _shard(name: str, wanted: int, summary: StoreSummary, live: Mapping[str, Any] | None) -> ShardNow:
    counters, counts = summary.counters, summary.counts
    status = live or {}
    silence = status.get("silence_s", {})
    return ShardNow(
        name,
        wanted,
        answers=live is not None,
        ready=counters["depth_ready"],
        **{kind: counts["groups"][kind] for kind in ("scoring", "playing", "held_out_scoring", "held_out_playing")},
        pending=counters["depth_tickets"] - counts["actors"].total(),
        waiting=counts["states"]["waiting"],
        actors=counts["actors"],
        scorers=counts["scorers"],
        needs=summary.needs,
        silence_s={**silence.get("actors", {}), **silence.get("scorers", {})},
        committed=counters["committed"],
        capacity=status.get("capacity", 0),
        age_bound=status.get("age_bound", 0),
        is_full=counters["live_bytes"] > status.get("high_water_bytes", float("inf")),
        failing=status.get("failing", ""),
        refusing=status.get("refusing") or status.get("solved", ""),
        busy=status.get("busy", ""),
        learner_waits_s=status.get("learner_waits_s"),
        old_groups=status.get("old_groups", ""),
    )
