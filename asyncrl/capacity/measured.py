"""Measures the rates and sizes of a run from its metrics and its store.

The first steps are left out, since the engines are still empty then, and models compile. The metrics have only means
over the episodes that ended between two rows, but the store has every single episode. For an episode whose data was
deleted, the store has only its numbers of tokens and turns, and its total seconds. Its seconds in tools are then
estimated: the total seconds, minus the mean wait until the engine served the version of the episode, and minus the time
that its tokens take at the mean speed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
from msgspec.structs import replace

from asyncrl.capacity.description import Rates, RunDescription, Sizes, TypicalEpisode
from asyncrl.errors import ConfigError
from asyncrl.ids import is_evaluation
from asyncrl.runs.from_config import read_config
from asyncrl.runs.health.evidence import STALE_S, STALE_VERSIONS, not_ended
from asyncrl.runs.lines import Row
from asyncrl.runs.run import Run
from asyncrl.runs.scorers import idle_of_workers, process_of

Workers = Sequence[Sequence[Row]]
"""The rows of each worker of a scorer."""
FIRST_STEPS = 2
FEWEST_STEPS = 3
SHORTEST_S = 1.0
"""Two rows of an actor's metrics give a rate only if at least this many seconds lie between them."""
MOST_TASKS = 500
GENERATION = ("wait", "generate")
"""The phases of an episode whose seconds the simulation computes. The seconds of all other phases, in tools or the
agent, are taken as they were measured."""
NEEDED = f"the planner needs a run of at least {FEWEST_STEPS} steps after its first {FIRST_STEPS}"
ENOUGH_STEPS = 20
"""The number of steps over which a mean is reliable."""
MORE_STEPS = "`asyncrl resume {} learner.steps=30` continues the run"


def describe(run: Run) -> RunDescription:
    """Measure the rates and sizes of a run that has a folder. Raises ConfigError: the run has too few steps, or its
    files lack data; StoreError: its store cannot be read."""
    config = read_config(run.folder)
    learner, replay, engine = config.learner, config.replay, config.engine
    configured = Sizes(
        engines=1,
        engine_gpus=engine.server.tp_size if engine.launches else 1,
        concurrency=config.actor.at_once(learner.batch_size),
        learner_gpus=config.cluster.ranks * learner.nodes,
        scorers=1,
        batch_size=learner.batch_size,
        group_size=learner.group_size,
        publish_every=learner.publish_every,
        max_lag=replay.max_lag,
        max_times_sampled=replay.sampler.max_times_sampled,
        oversample=replay.oversample,
        sampler=replay.sampler.kind,
        spare_batches=replay.spare_batches,
        wait_s=replay.old_groups.wait_s,
        masks_old=False if config.implicit.train else replay.old_groups.mask,
        filter_zero_variance=replay.filter.zero_variance,
    )
    try:
        return _described(run, configured, engine.server.together if engine.launches else 1)
    except (KeyError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"the metrics of {run.folder} cannot be used: {error!r}; the run trained no tokens, or the metrics are "
            "damaged or from a different version of asyncrl"
        ) from error


def _described(run: Run, configured: Sizes, together: int) -> RunDescription:
    """Return the rates and the sizes of the run. Most sizes are the `configured` ones. Only the numbers of engines and
    scorers, and the concurrency, come from the engines and scorers that ran last. `together` is the number of servers
    on a GPU, which count as one engine. All workers of a scorer, one for each shard of the replay, count as one
    scorer."""
    # Rows without these metrics are left out. They belong to steps that a stop cut short or that trained nothing.
    whole = {"reward/mean", "seconds/publish"}
    folder, rows = run.folder, [row for row in run.raw_rows("learner") if whole <= row.keys()]
    steps = rows[FIRST_STEPS:]
    actors = list(_files(run, "actor").values())
    scorers = _by_scorer(_files(run, "scoring"))
    if len(steps) < FEWEST_STEPS:
        raise ConfigError(f"{folder} has metrics of {len(rows)} steps, but {NEEDED}; {MORE_STEPS.format(folder)}")
    if not actors or not scorers:
        raise ConfigError(
            f"{folder} has no metrics of its {'scorers' if actors else 'actors'}; the planner needs those of all roles"
        )
    windows = [window for rows in actors for window in _windows(rows, together)]
    if not windows:
        raise ConfigError(f"{folder}: its actors finished no episodes while they logged metrics; let it run for longer")
    pass_s, request_s = decoding_times(windows)
    requests = [each for each, _ in windows]
    last = [rows[-1] for rows in actors]
    updates = sum(row["weights_updates"] for row in last) or 1
    rates = Rates(
        tasks=_tasks(run, actors),
        pass_s=pass_s,
        request_s=request_s,
        switch_s=sum(row["weights_switch_s"] for row in last) / updates,
        transfer_s=sum(row["weights_transfer_s"] for row in last) / updates,
        failed=_share(sum(row["failed"] for row in last), sum(row["episodes"] for row in last)),
        zero_variance=_mean(row["groups/zero_variance"] for row in steps),
        label_s=_label_s(scorers),
        requests=[min(requests), max(requests)],
        steps=len(steps),
        **_learner_rates(steps, configured.learner_gpus, configured.publish_every),
    )
    running = not_ended(actors)
    engines = round(sum(_engines(rows[-1], together) for rows in running))
    concurrency = max(1, configured.concurrency * len(running) // engines)
    count = len(_running_scorers(scorers, steps))
    return RunDescription(rates, replace(configured, engines=engines, concurrency=concurrency, scorers=count))


def _running_scorers(scorers: Sequence[Workers], steps: Sequence[Row]) -> list[Workers]:
    """Leave out the scorers that have ended while others went on. A scorer logs no version, so this looks at the time
    of the newest steps instead."""
    ended_s = [max(rows[-1]["time"] for rows in workers) for workers in scorers]
    since = min(max(ended_s) - STALE_S, steps[-STALE_VERSIONS]["time"])
    return [workers for workers, end_s in zip(scorers, ended_s, strict=True) if end_s >= since]


def _files(run: Run, role: str) -> dict[str, Sequence[Row]]:
    """The rows of the processes or workers of a role, by their names. Processes and workers without rows are left
    out."""
    found = {name: list(run.raw_rows(name)) for name in run.roles(f"{role}-*")}
    return {name: rows for name, rows in found.items() if rows}


def _by_scorer(files: Mapping[str, Sequence[Row]]) -> list[Workers]:
    scorers: dict[str, list[Sequence[Row]]] = defaultdict(list)
    for name, rows in files.items():
        scorers[process_of(name)].append(rows)
    return list(scorers.values())


def _windows(rows: Sequence[Row], together: int) -> Iterator[tuple[float, float]]:
    """Yield two numbers for each pair of successive rows of an actor: the mean number of requests of one engine while
    it was busy, and the tokens that it sampled per second during that time.
    """
    for before, after in pairwise(rows):
        seconds = after["seconds"] - before["seconds"]
        busy = seconds * (1 - after.get("idle", 1.0))
        engines = _engines(after, together)
        tokens = after["tokens"] - before["tokens"]
        if seconds >= SHORTEST_S and busy > 0 and tokens > 0 and "generate_s" in after:
            requests = (after["episodes"] - before["episodes"]) * after["generate_s"] / busy
            yield requests / engines, tokens / busy / engines


def _engines(row: Row, together: int) -> float:
    """Return the number of engines of an actor with this row."""
    return max(1.0, float(row.get("servers", 1)) / together)


def decoding_times(windows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the `pass_s` and `request_s`, both at least 0, that fit the windows best. A window has the requests of an
    engine and its tokens per second."""
    requests = np.array([max(1.0, each) for each, _ in windows])
    seconds = requests / np.array([rate for _, rate in windows])
    # Errors are relative, so that windows with few and with many requests have the same weight.
    columns = np.stack([1 / seconds, requests / seconds], axis=1)
    (pass_s, request_s), *_ = np.linalg.lstsq(columns, np.ones(len(windows)), rcond=None)
    if request_s < 0 or len(windows) == 1:
        return float(len(windows) / (1 / seconds).sum()), 0.0
    if pass_s < 0:
        return 0.0, float(len(windows) / (requests / seconds).sum())
    return float(pass_s), float(request_s)


def _learner_rates(steps: Sequence[Row], ranks: int, publish_every: int) -> dict[str, float]:
    """Return the rates of the learner. More ranks shorten the time of training in proportion. The rest of a step does
    not depend on their number."""
    trained = sum(row["seconds/train"] + row["seconds/proximal"] for row in steps)
    published, total = (sum(row[f"seconds/{phase}"] for row in steps) for phase in ("publish", "step"))
    rest = total - trained - published - sum(row["seconds/wait"] for row in steps)
    return {
        "token_s": trained * ranks / sum(row["tokens"] for row in steps),
        "step_s": rest / len(steps),
        "publish_s": published * publish_every / len(steps),
    }


def _label_s(scorers: Iterable[Workers]) -> float:
    """The seconds that one scorer needs per trajectory, from the rows in which it labelled trajectories or handed them
    on. A scorer is busy while one of its workers is."""
    busy, labelled = 0.0, 0.0
    for workers in scorers:
        measured = [(*_labelling(rows), rows[-1]["time"] - rows[0]["time"]) for rows in workers]
        shares = [own / seconds for own, _, seconds in measured if own]
        if shares:
            together = (1 - idle_of_workers(1 - share for share in shares)) / sum(shares)
            busy += together * sum(own for own, _, _ in measured)
            labelled += sum(count for _, count, _ in measured)
    return busy / labelled if labelled else 0.0


def _labelling(rows: Sequence[Row]) -> tuple[float, float]:
    """The seconds in which a worker labelled trajectories or handed them on, and the number of these trajectories."""
    busy, labelled = 0.0, 0.0
    for before, after in pairwise(rows):
        # After a restart of a scorer, its counters begin at 0, so that the difference is negative.
        if (more := after["labelled"] + after["handed_on"] - before["labelled"] - before["handed_on"]) > 0:
            busy += (1 - after["idle"]) * (after["time"] - before["time"])
            labelled += more
    return busy, labelled


def _tasks(run: Run, actors: Sequence[Sequence[Row]]) -> list[list[TypicalEpisode]]:
    """Return the episodes of the newest groups, one list for each group. Raises ConfigError: the store has no
    episodes."""
    rows = [row for rows in actors for row in rows if "generate_s" in row]
    groups: dict[str, list[TypicalEpisode]] = defaultdict(list)
    with run.stored() as stored:
        records = stored.records()
        found = [each for each in records if not (is_evaluation(each[0]) or each[1].is_demonstration)]
        sampled_s = _mean(row["generate_s"] for row in rows) / max(1.0, _mean(record.sampled for _, record in found))
        waited_s = _mean(row.get("wait_s", 0.0) for row in rows)
        for name, record in reversed(found):
            if record.group not in groups and len(groups) == MOST_TASKS:
                continue
            trajectory = stored.trajectory(name)
            tools_s = record.seconds - waited_s - sampled_s * record.sampled
            if trajectory is not None:
                tools_s = sum(seconds for phase, seconds in trajectory.timings.items() if phase not in GENERATION)
            episode = TypicalEpisode(record.sampled, record.tokens, max(1, record.turns), max(0.0, tools_s))
            groups[record.group].append(episode)
    if not groups:
        raise ConfigError(f"{run.folder} has stored no episodes: {NEEDED}; {MORE_STEPS.format(run.folder)}")
    return list(groups.values())


def _mean(values: Iterable[float]) -> float:
    found = [value for value in values if math.isfinite(value)]
    return sum(found) / len(found) if found else 0.0


def _share(part: float, rest: float) -> float:
    return part / (part + rest) if part else 0.0
