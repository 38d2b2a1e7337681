"""Simulates a run event by event: actors, engines, scorers and learner around the real replay.

For a batch of more than LARGEST_BATCH trajectories, only a part of the batch (a shard) is simulated, with its share of
the engines and scorers. The forecast is then slightly too fast, since the slowest of many trajectories is slower than
the slowest of few.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean

import simpy
from msgspec import Struct
from msgspec.structs import replace

from asyncrl.capacity.description import RunDescription, Sizes, TypicalEpisode
from asyncrl.capacity.engines import Process, SimulatedEngines
from asyncrl.capacity.replay import SimulatedReplay, simulated_settings
from asyncrl.errors import ConfigError
from asyncrl.types import BatchPlan, Ticket

LARGEST_BATCH = 256
FEWEST_GROUPS = 16
"""The smallest number of groups in the batch of a simulated shard. The slowest groups of a batch decide when it is
complete, and among too few groups the speed of the slowest one depends too much on chance."""
MOST_EPISODES = 1_000_000
"""The largest number of simulated episodes. More would take too long."""
MOST_TURNS = 20_000_000
EPISODES_OF_AN_ACTOR = 64
MOST_FAILED = 0.5
"""The largest share of failed episodes: if more fail, the replay may slow tickets down or end the run."""
LEASE = 32
LOOK_S = 0.5
"""The time after which a learner that may wait for old groups asks for its batch again."""
COUNTED = ("episodes", "length", "turns")
"""The values that a forecast has of decided episodes, which were trained or removed. Rewards are left out, since they
are not simulated."""


class Forecast(Struct, frozen=True):
    """The result of a simulation, without its first steps.

    - `learner_idle`, `engine_idle` and `scorer_idle` are shares of time, as means over all engines or all scorers.
    - `requests` is the mean number of requests of one engine while it is busy.
    - `lags` maps each lag to the share of the trained trajectories that have it. It is the lag of the oldest trained
      token.
    - `discarded` is the share of sampled tokens that were thrown away over the whole simulation, with their trajectory
      or by a mask.
    - `decided` maps each end of an episode, such as trained or evicted, to the number, mean length and turns of the
      episodes with this end. `biased` has the quantities by which the age bound chose. Both cover the whole simulation
      (`asyncrl.replay.batches.selection`).
    """

    sizes: Sizes
    seconds_per_step: float
    trajectories_per_s: float
    tokens_per_s: float
    learner_idle: float
    engine_idle: float
    scorer_idle: float
    requests: float
    lags: dict[int, float]
    discarded: float
    decided: dict[str, dict[str, float]]
    biased: list[str]

    @property
    def gpu_hours_per_step(self) -> float:
        return self.sizes.gpus * self.seconds_per_step / 3600


def simulate(
    run: RunDescription,
    steps: int = 30,
    first: int | None = None,
    seed: int = 0,
    progress: Callable[[float], object] = lambda share: None,
) -> Forecast:
    """Simulate `first` learner steps, which fill the run, and then `steps` steps, which are measured. By default the
    first steps cover max_lag + 2 versions. `progress` is called with the share of the steps that is done.

    Raises ConfigError: so many episodes fail, or so many groups are refused, that the run cannot progress; or there are
    too many episodes or turns to simulate.
    """
    if run.rates.failed > MOST_FAILED:
        raise ConfigError(f"{run.rates.failed:.0%} of the episodes fail: fix that first, or lower rates.failed")
    if run.sizes.filter_zero_variance and run.rates.zero_variance == 1:
        raise ConfigError(
            "in every group all rewards are equal, and the filter refuses such groups: lower rates.zero_variance"
        )
    first = (run.sizes.max_lag + 2) * run.sizes.publish_every if first is None else first
    shards = max(1, min(run.sizes.batch_size // LARGEST_BATCH, _groups(run.sizes) // FEWEST_GROUPS))
    share = _share(run.sizes, shards)
    kept = (1 - run.rates.failed) * (1 - run.rates.zero_variance if run.sizes.filter_zero_variance else 1)
    episodes = int((first + steps) * share.batch_size / kept) + run.sizes.scorers // shards
    turns = int(episodes * fmean(fmean(episode.turns for episode in task) for task in run.rates.tasks))
    for what, count, most in (("episodes", episodes, MOST_EPISODES), ("turns", turns, MOST_TURNS)):
        if count > most:
            raise ConfigError(
                f"{first} steps to fill the run and {steps} measured steps have too many {what} to simulate "
                f"({count:,}, at most {most:,}): lower max_lag, group_size, scorers, GPUs or --steps, or rates.failed "
                "and rates.zero_variance"
            )
    environment = simpy.Environment()
    settings = simulated_settings(share, len(run.rates.tasks), seed)
    with SimulatedReplay(settings, lambda: environment.now) as replay:
        return _Simulation(run, shards, environment, replay, seed, progress).forecast(first, steps)


def _groups(sizes: Sizes) -> int:
    return sizes.batch_size // sizes.group_size


def _share(sizes: Sizes, shards: int) -> Sizes:
    return replace(sizes, batch_size=_groups(sizes) // shards * sizes.group_size)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """The processes that wait for an event. The one that has waited longest is first."""

    environment: simpy.Environment
    events: deque[simpy.Event] = field(default_factory=deque)

    def wait(self) -> simpy.Event:
        self.events.append(self.environment.event())
        return self.events[-1]

    def wake(self, count: int | None = None) -> None:
        """Wake the first `count` processes. `None`: all."""
        for _ in range(len(self.events) if count is None else min(count, len(self.events))):
            self.events.popleft().succeed()


@dataclass(frozen=True, slots=True)
class _Observed:
    """Sums of seconds up to a point in time."""

    time: float
    learner_s: float
    engine_idle_s: float
    request_s: float
    scorer_idle_s: float


class _Simulation:
    def __init__(
        self,
        run: RunDescription,
        shards: int,
        environment: simpy.Environment,
        replay: SimulatedReplay,
        seed: int,
        progress: Callable[[float], object],
    ) -> None:
        self._progress, self._planned_steps = progress, 0
        self._run, self._rates, self._sizes = run, run.rates, run.sizes
        self._environment, self._replay, self._seed = environment, replay, seed
        # The shard's share of the engines and scorers need not be a whole number.
        self._shards = run.sizes.batch_size / _share(run.sizes, shards).batch_size
        self._scorers = max(1, round(run.sizes.scorers / self._shards))
        self._label_s = run.rates.label_s * self._scorers * self._shards / run.sizes.scorers
        self._engines = SimulatedEngines(environment, run.sizes.engines / self._shards, run.rates)
        self._actors, self._idle_scorers, self._learner = (_Waiting(environment) for _ in range(3))
        self._episodes: dict[str, tuple[TypicalEpisode, Mapping[int, float]]] = {}
        self._learner_s = self._scorer_idle_s = 0.0
        self._idle_since: dict[str, float] = {}
        self._plans: list[BatchPlan] = []
        self._next_step: int | None = None

    def forecast(self, first: int, steps: int) -> Forecast:
        sizes, room = self._sizes, self._sizes.engines * self._sizes.concurrency
        self._planned_steps = first + steps
        # The actors need no more slots than twice the number of episodes that the age bound lets run.
        episodes = max(1, round(min(room, 2 * sizes.admitted) / self._shards))
        for begin in range(0, episodes, EPISODES_OF_AN_ACTOR):
            concurrency = min(EPISODES_OF_AN_ACTOR, episodes - begin)
            self._environment.process(self._act(f"actor-{begin}", concurrency))
        for number in range(self._scorers):
            self._environment.process(self._score(f"scorer-{number}"))
        self._environment.run(self._environment.process(self._learn(0, first)))
        before = self._observed()
        self._environment.run(self._environment.process(self._learn(first, first + steps)))
        return self._found(before, self._observed(), self._plans[first:])

    def _observed(self) -> _Observed:
        self._engines.update()
        now = self._environment.now
        idle_s = self._scorer_idle_s + sum(now - since for since in self._idle_since.values())
        return _Observed(now, self._learner_s, self._engines.idle_s, self._engines.request_s, idle_s)

    def _found(self, before: _Observed, after: _Observed, plans: list[BatchPlan]) -> Forecast:
        seconds, engine_idle_s = after.time - before.time, after.engine_idle_s - before.engine_idle_s
        names = [(plan.version, name) for plan in plans for name in plan.ids]
        lags = Counter(lag for plan in plans for lag in self._lags(plan))
        trained = sum(map(self._trained, plans))
        in_plans = sum(self._episodes[name][0].sampled for plan in self._plans for name in plan.ids)
        # Rounding can make the difference slightly negative.
        masked = max(0.0, in_plans - sum(map(self._trained, self._plans)))
        thrown_away = sum(self._episodes[name][0].sampled for name in self._replay.ids())
        selection = self._replay.selection()
        return Forecast(
            sizes=self._sizes,
            seconds_per_step=seconds / len(plans),
            trajectories_per_s=len(names) * self._shards / seconds,
            tokens_per_s=trained * self._shards / seconds,
            learner_idle=1 - (after.learner_s - before.learner_s) / seconds,
            engine_idle=engine_idle_s / seconds,
            scorer_idle=(after.scorer_idle_s - before.scorer_idle_s) / seconds / self._scorers,
            requests=(after.request_s - before.request_s) / max(seconds - engine_idle_s, 1e-9),
            lags={lag: count / lags.total() for lag, count in sorted(lags.items())},
            discarded=(thrown_away + masked) / (thrown_away + in_plans),
            decided={end: {name: each[name] for name in COUNTED} for end, each in selection.described().items()},
            biased=[name for name in selection.biased() if name in COUNTED],
        )

    def _young(self, plan: BatchPlan) -> Iterator[dict[int, float]]:
        """Yield the versions that sampled the trained tokens of each trajectory, with their numbers of tokens."""
        for index, name in enumerate(plan.ids):
            first = plan.first_trained[index] if plan.first_trained else 0
            yield {version: tokens for version, tokens in self._episodes[name][1].items() if version >= first}

    def _trained(self, plan: BatchPlan) -> float:
        """The number of trained tokens of a plan."""
        return sum(sum(versions.values()) for versions in self._young(plan))

    def _lags(self, plan: BatchPlan) -> Iterator[int]:
        """The lags of those trajectories of a plan that have trained tokens."""
        return (plan.version - min(versions) for versions in self._young(plan) if versions)

    def _act(self, name: str, concurrency: int) -> Process:
        """Act as an actor, which keeps `concurrency` episodes running."""
        holding: dict[str, None] = {}
        ended = _Waiting(self._environment)
        while True:
            if want := concurrency - len(holding):
                for ticket in self._replay.tickets(name, tuple(holding), want):
                    holding[ticket.id] = None
                    self._environment.process(self._play(ticket, holding, ended))
            if len(holding) == concurrency:
                yield ended.wait()
            else:
                yield self._actors.wait()

    def _play(self, ticket: Ticket, holding: dict[str, None], ended: _Waiting) -> Process:
        """Play the episode of a ticket."""
        dice, started = random.Random(f"{self._seed} {ticket.id}"), self._environment.now
        while self._engines.version < ticket.min_version:
            yield self._engines.switched
        waited = self._environment.now - started
        episode = dice.choice(self._rates.tasks[int(ticket.task.id)])
        calls, tokens = max(1, episode.turns - 1), episode.sampled / episode.turns
        versions: defaultdict[int, float] = defaultdict(float)
        for turn in range(episode.turns):
            began = self._engines.progress
            yield self._engines.generate(tokens)
            for version, count in self._engines.versions_between(began, began + tokens):
                versions[version] += count
            if episode.tools_s and turn < calls:
                yield self._environment.timeout(episode.tools_s / calls)
        del holding[ticket.id]
        if dice.random() < self._rates.failed:
            self._replay.fail(ticket)
            self._actors.wake()
        else:
            self._episodes[ticket.id] = (episode, versions)
            timings = {"wait": waited, "play": self._environment.now - started - waited}
            self._replay.put(ticket, sorted(versions), episode.sampled, episode.turns, timings)
            self._idle_scorers.wake(1)
        ended.wake()

    def _score(self, name: str) -> Process:
        while True:
            self._idle_since[name] = self._environment.now
            while not (leased := self._replay.lease(name, LEASE)):
                yield self._idle_scorers.wait()
            self._scorer_idle_s += self._environment.now - self._idle_since.pop(name)
            for trajectory in leased:
                yield self._environment.timeout(self._label_s)
                self._replay.label(name, trajectory, self._reward(trajectory))
                if self._replay.has_batch():
                    self._learner.wake()
                    self._plan_ahead()
            if self._sizes.filter_zero_variance:
                self._actors.wake()

    def _reward(self, trajectory: str) -> float:
        group, member, _ = trajectory.split(".")
        equal = random.Random(f"{self._seed} {group}").random() < self._rates.zero_variance
        return 1.0 if equal else float(int(member) % 2)

    def _learn(self, begin: int, end: int) -> Process:
        for step in range(begin, end):
            while (plan := self._replay.plan(step)) is None:
                # The replay may now admit more episodes.
                self._actors.wake()
                woken = self._learner.wait()
                # No event occurs when the longest wait for old groups is over, so the learner also asks after LOOK_S.
                yield woken if self._sizes.wait_s == 0 else woken | self._environment.timeout(LOOK_S)
            self._plans.append(plan)
            self._next_step = step + 1
            self._plan_ahead()
            tokens = sum(self._episodes[name][0].tokens for name in plan.ids) * self._shards
            seconds = self._rates.step_s + self._rates.token_s * tokens / self._sizes.learner_gpus
            version, publishes = divmod(step + 1, self._sizes.publish_every)
            seconds += 0 if publishes else self._rates.publish_s
            self._learner_s += seconds
            yield self._environment.timeout(seconds)
            self._next_step = None
            self._replay.end_step(step + 1, None if publishes else version)
            self._progress((step + 1) / self._planned_steps)
            if not publishes:
                self._environment.process(self._engines.switch(version))
            self._actors.wake()

    def _plan_ahead(self) -> None:
        """Take the next batch as soon as it is complete, while the learner still trains the current one."""
        if self._next_step is not None and self._replay.plan(self._next_step, ahead=True) is not None:
            self._next_step = None
