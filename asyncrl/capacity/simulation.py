"""A discrete-event simulation of a run: actors, engines, scorers and learner around the real replay.

A batch of a large run is as many small batches, one of each replay shard. So a batch of more than
LARGEST_BATCH trajectories is simulated as one shard, with its share of the engines and scorers. That is a little too
fast, since the slowest of many trajectories is slower than the slowest of few.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean

import simpy
from msgspec import Struct
from msgspec.structs import replace

from asyncrl.capacity.description import RunDescription, Sizes, TypicalEpisode
from asyncrl.capacity.engines import Process, SimulatedEngines
from asyncrl.capacity.replay import SimulatedReplay
from asyncrl.errors import ConfigError
from asyncrl.types import BatchPlan, Ticket

LARGEST_BATCH = 256
FEWEST_GROUPS = 16
"""The trajectories of a batch of a simulated shard. Its slowest groups decide when it is complete, and few say
little."""
MOST_EPISODES = 1_000_000
"""The groups of a simulation, which takes about a second for 1,000."""
MOST_TURNS = 20_000_000
EPISODES_OF_AN_ACTOR = 64
MOST_FAILED = 0.5
"""The replay slows tickets down, or ends the run, where nearly everything fails."""
LEASE = 32


class Forecast(Struct, frozen=True):
    """The result of a simulation, from the end of the first steps on. Idle shares are shares of time; for engines and
    scorers they are means over all of them. `lags` has the share of the trained trajectories by lag, `discarded` is the
    share of the sampled tokens that were thrown away with their trajectories. `requests` is the mean number of requests
    of one engine while it has any.
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
    """Simulate `first` learner steps, in which the run fills up, and `steps` more, which count. By default the first
    steps cover as many versions as a trajectory may live, and one more. `progress` is told which share is done.

    Raises ConfigError: so much fails or is refused that the run would stand still, or there are too many episodes.
    """
    if run.rates.failed > MOST_FAILED:
        raise ConfigError(f"{run.rates.failed:.0%} of the episodes fail: mend that first, or lower rates.failed")
    if run.sizes.filter_zero_variance and run.rates.zero_variance == 1:
        raise ConfigError("all groups have equal rewards, which the filter refuses: lower rates.zero_variance")
    first = (run.sizes.max_lag + 2) * run.sizes.publish_every if first is None else first
    shards = max(1, min(run.sizes.batch_size // LARGEST_BATCH, _groups(run.sizes) // FEWEST_GROUPS))
    share = _share(run.sizes, shards)
    kept = (1 - run.rates.failed) * (1 - run.rates.zero_variance if run.sizes.filter_zero_variance else 1)
    episodes = int((first + steps) * share.batch_size / kept) + run.sizes.scorers // shards
    turns = int(episodes * fmean(fmean(episode.turns for episode in task) for task in run.rates.tasks))
    for what, count, most in (("episodes", episodes, MOST_EPISODES), ("turns", turns, MOST_TURNS)):
        if count > most:
            raise ConfigError(
                f"{first} steps to fill the run and {steps} that count have too many {what} to simulate ({count:,}, at "
                f"most {most:,}): lower max_lag, group_size, scorers, GPUs or --steps, or the rates of what is thrown "
                "away"
            )
    environment = simpy.Environment()
    with SimulatedReplay(share, len(run.rates.tasks), seed, lambda: environment.now) as replay:
        return _Simulation(run, shards, environment, replay, seed, progress).forecast(first, steps)


def _groups(sizes: Sizes) -> int:
    return sizes.batch_size // sizes.group_size


def _share(sizes: Sizes, shards: int) -> Sizes:
    return replace(sizes, batch_size=_groups(sizes) // shards * sizes.group_size)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """The processes that wait for something, the one that has waited longest first."""

    environment: simpy.Environment
    events: deque[simpy.Event] = field(default_factory=deque)

    def wait(self) -> simpy.Event:
        self.events.append(self.environment.event())
        return self.events[-1]

    def wake(self, count: int | None = None) -> None:
        """Wake the first `count`, or all."""
        for _ in range(len(self.events) if count is None else min(count, len(self.events))):
            self.events.popleft().succeed()


@dataclass(frozen=True, slots=True)
class _Observed:
    """Sums up to one moment."""

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
        # Shares of a shard may be parts of one engine or scorer.
        self._shards = run.sizes.batch_size / _share(run.sizes, shards).batch_size
        self._scorers = max(1, round(run.sizes.scorers / self._shards))
        self._label_s = run.rates.label_s * self._scorers * self._shards / run.sizes.scorers
        self._engines = SimulatedEngines(environment, run.sizes.engines / self._shards, run.rates)
        self._actors, self._idle_scorers, self._learner = (_Waiting(environment) for _ in range(3))
        self._episodes: dict[str, tuple[TypicalEpisode, int]] = {}
        self._learner_s = self._scorer_idle_s = 0.0
        self._idle_since: dict[str, float] = {}
        self._plans: list[BatchPlan] = []
        self._next_step: int | None = None

    def forecast(self, first: int, steps: int) -> Forecast:
        sizes, room = self._sizes, self._sizes.engines * self._sizes.concurrency
        self._planned_steps = first + steps
        # Admission lets no more run; with some more actors it is still what limits them.
        admitted = (sizes.max_lag + 1) * sizes.batch_size * sizes.publish_every * sizes.oversample
        episodes = max(1, round(min(room, 2 * admitted) / self._shards))
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
        lags = Counter(version - self._episodes[name][1] for version, name in names)
        trained = sum(self._episodes[name][0].sampled for _, name in names)
        sampled = sum(self._episodes[name][0].sampled for plan in self._plans for name in plan.ids)
        thrown_away = sum(self._episodes[name][0].sampled for name in self._replay.thrown_away())
        return Forecast(
            sizes=self._sizes,
            seconds_per_step=seconds / len(plans),
            trajectories_per_s=len(names) * self._shards / seconds,
            tokens_per_s=trained * self._shards / seconds,
            learner_idle=1 - (after.learner_s - before.learner_s) / seconds,
            engine_idle=engine_idle_s / seconds,
            scorer_idle=(after.scorer_idle_s - before.scorer_idle_s) / seconds / self._scorers,
            requests=(after.request_s - before.request_s) / max(seconds - engine_idle_s, 1e-9),
            lags={lag: count / len(names) for lag, count in sorted(lags.items())},
            discarded=thrown_away / (thrown_away + sampled),
        )

    def _act(self, name: str, concurrency: int) -> Process:
        """An actor: keeps its episodes running."""
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
        """One episode."""
        dice = random.Random(f"{self._seed} {ticket.id}")
        while self._engines.version < ticket.min_version:
            yield self._engines.switched
        episode = dice.choice(self._rates.tasks[int(ticket.task.id)])
        calls, tokens = max(1, episode.turns - 1), episode.sampled / episode.turns
        yield self._engines.generate(min(1.0, tokens))
        oldest = self._engines.version
        for turn in range(episode.turns):
            yield self._engines.generate(tokens if turn else max(0.0, tokens - 1))
            newest = self._engines.version
            if episode.tools_s and turn < calls:
                yield self._environment.timeout(episode.tools_s / calls)
        del holding[ticket.id]
        if dice.random() < self._rates.failed:
            self._replay.fail(ticket)
            self._actors.wake()
        else:
            self._episodes[ticket.id] = (episode, oldest)
            self._replay.put(ticket, oldest, newest)
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
                # The replay may have given room to more episodes.
                self._actors.wake()
                yield self._learner.wait()
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
        """While the learner trains a batch it takes the next one, as soon as there is one."""
        if self._next_step is not None and self._replay.plan(self._next_step, ahead=True) is not None:
            self._next_step = None
