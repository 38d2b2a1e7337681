"""`cluster.autoscale`: adapts the numbers of actors and scorers of a run to its metrics.

One rule names the role that limits the run. The number of a role's processes changes by one at a time, and only after
the rule has named the same change several times in a row. The thresholds for adding a process and for removing one lie
apart, so that the numbers do not oscillate.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from asyncrl.config.schema.cluster import AutoscaleConfig, ClusterConfig
from asyncrl.errors import ConfigError
from asyncrl.observe.sinks import metrics_file
from asyncrl.runs.lines import Tail
from asyncrl.runs.scorers import files_of_scorer, idle_of_workers, process_of
from asyncrl.runs.state.advice import ACTORS_IDLE, BUSY, SATURATED, SCORERS_IDLE, SERVED, STARVED

log = logging.getLogger("asyncrl.train")

OLD = 0.9
"""Too many actors run if the mean lag is above this share of `replay.max_lag` and the learner does not wait."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The newest metrics of a run that the rule needs.

    - `learner_idle`, `actors_idle`, `scorers_idle`: the share of time for which these roles were idle;
    - `loops_busy`: the share of time for which the event loops of actors used their cores;
    - `waiting_batches`: the number of batches that wait for scores;
    - `lag_share`: the mean lag as a share of `replay.max_lag`.
    """

    learner_idle: float
    actors_idle: float
    scorers_idle: float
    waiting_batches: float
    lag_share: float
    loops_busy: float = 0.0


@dataclass(frozen=True, slots=True)
class ScaleChange:
    """A change of a role's number of processes by one.

    - `name`: actors or scorers;
    - `by`: +1 or -1;
    - `reason`: why the number should change.
    """

    name: str
    by: int
    reason: str


def wished_change(seen: Workload) -> ScaleChange | None:
    """Return the change that the rule wants, or `None` for no change. It may be beyond the configured bounds."""
    waits = f"the learner waits for {seen.learner_idle:.0%} of its time"
    if seen.learner_idle > STARVED:
        if seen.scorers_idle < BUSY and seen.waiting_batches >= 1:
            queue = f"{seen.waiting_batches:.1f} batches wait for scores"
            return ScaleChange("scorers", +1, f"{waits}, {queue}, and scorers are idle for {seen.scorers_idle:.0%}")
        if seen.loops_busy > SATURATED:
            used = f"each actor uses {seen.loops_busy:.0%} of a core, so that servers wait for their actors"
            return ScaleChange("actors", +1, f"{waits}, and {used}")
        if seen.actors_idle < BUSY:
            return ScaleChange("actors", +1, f"{waits}, and actors are idle for {seen.actors_idle:.0%}")
    elif seen.learner_idle < SERVED:
        if seen.actors_idle > ACTORS_IDLE:
            return ScaleChange("actors", -1, f"{waits}, and actors are idle for {seen.actors_idle:.0%}")
        if seen.lag_share > OLD:
            return ScaleChange("actors", -1, f"{waits}, and the mean lag is {seen.lag_share:.0%} of replay.max_lag")
        if seen.scorers_idle > SCORERS_IDLE and seen.waiting_batches < 1:
            return ScaleChange("scorers", -1, f"{waits}, and scorers are idle for {seen.scorers_idle:.0%}")
    return None


class Patience:
    """Lets a change pass if the rule named it `config.patience` times in a row and the configured bounds allow it."""

    def __init__(self, config: AutoscaleConfig) -> None:
        self._bounds = {"actors": config.actors, "scorers": config.scorers}
        self._times = config.patience
        self._last: tuple[str, int] | None = None
        self._count = 0

    def passes(self, change: ScaleChange | None, counts: Mapping[str, int]) -> bool:
        """True if `change` is due now. `counts` has the numbers of running actors and scorers."""
        if change is None or not self._allows(change, counts):
            self._last, self._count = None, 0
            return False
        kind = (change.name, change.by)
        self._count = self._count + 1 if kind == self._last else 1
        self._last = kind
        if self._count < self._times:
            return False
        self._count = 0
        return True

    def _allows(self, change: ScaleChange, counts: Mapping[str, int]) -> bool:
        bounds = self._bounds[change.name]
        if not bounds:
            return False
        # `asyncrl train` or `asyncrl scale` may have set a number beyond the bounds. The rule may then bring it back.
        count, (least, most) = counts[change.name] + change.by, bounds
        return count >= least if change.by < 0 else count <= most


@dataclass(frozen=True, slots=True)
class RunSizes:
    """Sizes of a run, from its configuration."""

    shards: int
    batch_size: int
    max_lag: int


class Autoscaler:
    """Reads the metrics of a run every `cluster.autoscale.every_s` seconds, and calls `scale` with a new number of
    actors or scorers.

    `scale` also sets the number in `cluster`. Each change is logged with its reason. `clock` gives seconds.
    """

    def __init__(
        self,
        cluster: ClusterConfig,
        sizes: RunSizes,
        run_dir: Path,
        scale: Callable[[Mapping[str, int]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster, self._settings, self._sizes, self._run_dir = cluster, cluster.autoscale, sizes, run_dir
        self._scale, self._clock = scale, clock
        self._patience = Patience(self._settings)
        self._tails: dict[str, Tail] = {}
        self._next = clock() + self._settings.every_s
        self._step = -1
        self._found: dict[str, float | None] = {}

    def update(self) -> None:
        """Look at the metrics if that is due, and scale. Called at every poll of the supervisor."""
        if not (self._settings.actors or self._settings.scorers) or self._clock() < self._next:
            return
        self._next = self._clock() + self._settings.every_s
        counts = {"actors": self._cluster.actors or 1, "scorers": self._cluster.scorers or 1}
        seen = self._look(counts)
        change = wished_change(seen) if seen is not None else None
        if not self._patience.passes(change, counts) or change is None:
            return
        count = counts[change.name] + change.by
        try:
            self._scale({change.name: count})
        except ConfigError as error:
            log.warning(
                "cluster.autoscale wants %s=%d (%s), which is refused: %s", change.name, count, change.reason, error
            )
        else:
            log.info("cluster.autoscale: %s=%d, since %s", change.name, count, change.reason)

    def _read(self, name: str) -> dict[str, float]:
        """Return the newest metrics of a role. They are empty until the role has written some after the first look,
        because older values may come from an earlier process.
        """
        values = self._tails.setdefault(name, Tail(metrics_file(self._run_dir, name))).read()
        found = self._found.setdefault(name, values.get("time"))
        return {} if values.get("time") == found else values

    def _scorer_idle(self, name: str) -> float | None:
        """The share of time in which a scorer was idle; `None` until one of its workers has written metrics."""
        workers = filter(None, map(self._read, files_of_scorer(name, self._sizes.shards)))
        shares = [worker["idle"] for worker in workers]
        return idle_of_workers(shares) if shares else None

    def _forget(self, module: str, count: int) -> None:
        """Forget the metrics of removed processes, now that the role has only `count` processes."""
        kept = {f"{module}-{index}" for index in range(count)}
        for name in [name for name in self._found if name.startswith(f"{module}-") and process_of(name) not in kept]:
            del self._found[name], self._tails[name]

    def _look(self, counts: Mapping[str, int]) -> Workload | None:
        """Return the workload, or `None` if the learner has done no step since the last look or a role has no metrics
        yet."""
        shards, max_lag = self._sizes.shards, self._sizes.max_lag
        learner = self._read("learner")
        replays = [self._read("replay" if shards == 1 else f"replay-{shard}") for shard in range(shards)]
        actors = [self._read(f"actor-{index}") for index in range(counts["actors"])]
        found = [self._scorer_idle(f"scoring-{index}") for index in range(counts["scorers"])]
        for count, name in ((len(actors), "actor"), (len(found), "scoring")):
            self._forget(name, count)
        scorers = [idle for idle in found if idle is not None]
        if len(scorers) < len(found) or not all((learner, *replays, *actors)) or learner["step"] == self._step:
            return None
        self._step = int(learner["step"])
        waiting = sum(replay["depth_waiting"] for replay in replays)
        return Workload(
            learner_idle=learner["idle"],
            actors_idle=fmean(actor["idle"] for actor in actors),
            scorers_idle=fmean(scorers),
            waiting_batches=waiting / self._sizes.batch_size,
            lag_share=learner["lag/mean"] / max_lag if max_lag else 0.0,
            loops_busy=fmean(actor.get("loop_busy", 0.0) for actor in actors),
        )
