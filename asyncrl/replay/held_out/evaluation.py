"""Evaluates policy versions on the held-out tasks. An evaluation attempts each task once or several times. The episodes
of evaluations do not count in admission, and the learner does not train on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from asyncrl import ids
from asyncrl.replay.held_out.tally import SAMPLE, SOURCES, tallies
from asyncrl.replay.settings import ReplaySettings
from asyncrl.replay.store.records import EvaluationRecord, GroupRecord, TrajectoryRecord, TrajectoryState, forget
from asyncrl.replay.store.transaction import Transaction
from asyncrl.types import Purpose, Trajectory

PAGE = 1000
SAMPLED_EVALUATIONS = 3
"""The number of latest evaluations that keep a sample of episodes with their data. The learner may still be reading the
sample of an earlier evaluation.
"""


def start(
    tx: Transaction,
    settings: ReplaySettings,
    version: int,
    open_group: Callable[[Transaction, str, GroupRecord], None],
) -> None:
    """Open a group of one member for each attempt at each held-out task of this shard. A second call has no effect.

    Every attempt has its own group, so that the other attempts go on if one finally fails."""
    if EvaluationRecord.load(tx, version) is not None:
        return
    if not settings.keeps_all:
        _forget_samples(tx)
    rows = range(settings.shard, len(settings.held_out), settings.shards)
    EvaluationRecord(len(rows) * settings.eval_attempts).save(tx, version)
    for attempt in range(settings.eval_attempts):
        for row in rows:
            group = GroupRecord(row, Purpose.EVAL, version, [0], [False])
            open_group(tx, ids.evaluation_group(version, row, attempt), group)


def count_episode(tx: Transaction, version: int, trajectory: Trajectory) -> None:
    """Add an episode's tokens, and the versions that sampled them, to the evaluation of `version`."""
    evaluation = EvaluationRecord.of(tx, version)
    evaluation.tokens += trajectory.sampled_tokens
    evaluation.newer_tokens += int(np.count_nonzero(trajectory.versions > version))
    evaluation.newest = max(evaluation.newest, trajectory.newest_version)
    evaluation.save(tx, version)


def count_task(tx: Transaction, version: int, episode: TrajectoryRecord | None) -> None:
    """Count one attempt at a held-out task as done, with the scores of its labelled `episode`. `None`: the attempt
    failed, and does not count in the means."""
    evaluation = EvaluationRecord.of(tx, version)
    evaluation.done += 1
    if episode is None:
        evaluation.failed += 1
    else:
        evaluation.outcome += episode.outcome
        evaluation.right += episode.outcome >= 1
        evaluation.reward += episode.reward
    evaluation.save(tx, version)


def take_sample(tx: Transaction, settings: ReplaySettings, group: str, record: GroupRecord, episode: str) -> bool:
    """Add a finished episode to the sample of its evaluation. The data of the sample is kept, so that people can read
    it. False if the episode does not belong to the sample. The sample has the first attempt at each of a few tasks.
    These tasks are the same in each evaluation, and are spread evenly over the held-out tasks."""
    tasks, shard, shards = len(settings.held_out), settings.shard, settings.shards
    own, wanted = len(range(shard, tasks, shards)), len(range(shard, settings.evaluation_sample, shards))
    place = (record.row - shard) // shards
    if group != ids.evaluation_group(record.version, record.row) or place * wanted % own >= wanted:
        return False
    evaluation = EvaluationRecord.of(tx, record.version)
    evaluation.sample.append(episode)
    evaluation.save(tx, record.version)
    return True


def _forget_samples(tx: Transaction) -> None:
    """Delete the data of older samples, to make room for one more."""
    found = tx.items(EvaluationRecord.table, EvaluationRecord)
    # The keys are ordered by version.
    sampled = [int.from_bytes(key, "big") for key, evaluation in found if evaluation.sample]
    for version in sampled[: 1 - SAMPLED_EVALUATIONS]:
        evaluation = EvaluationRecord.of(tx, version)
        for episode in evaluation.sample:
            forget(tx, episode)
        evaluation.sample = []
        evaluation.save(tx, version)


def result(tx: Transaction, version: int, attempts: int) -> dict[str, Any] | None:
    """The result of an evaluation with `attempts` attempts per task. `None` while it is incomplete. `outcome` and
    `reward` are means over the scored attempts. `accuracy` is the share of scored attempts with an outcome of at least
    1. `sources` has a Tally for each data source. `sample` has the ids of the kept episodes."""
    evaluation = EvaluationRecord.load(tx, version)
    if evaluation is None or evaluation.done < evaluation.total:
        return None
    scored = evaluation.done - evaluation.failed
    return {
        "outcome": evaluation.outcome / scored if scored else float("nan"),
        "accuracy": evaluation.right / scored if scored else float("nan"),
        "reward": evaluation.reward / scored if scored else float("nan"),
        "count": scored,
        "failed": evaluation.failed,
        "tokens": evaluation.tokens,
        "newer_tokens": evaluation.newer_tokens,
        "newest_version": evaluation.newest,
        SAMPLE: evaluation.sample,
        SOURCES: tallies(_scored(tx, version), attempts),
    }


def _scored(tx: Transaction, version: int) -> Iterator[tuple[int, TrajectoryRecord]]:
    """The scored attempts of an evaluation, each with the row of its task."""
    prefix, after = ids.evaluation_prefix(version), ""
    while page := TrajectoryRecord.page(tx, prefix, after, PAGE, backwards=False):
        for _, record in page:
            if record.state is TrajectoryState.EVALUATED:
                yield ids.held_out_row(record.group), record
        after = page[-1][0]
