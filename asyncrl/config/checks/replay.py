"""The combinations of options of `replay` that cannot work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from asyncrl.config.schema import LearnerConfig, ReplayConfig


def replay_conflicts(replay: ReplayConfig, learner: LearnerConfig, demonstrated: bool) -> Iterator[str]:
    """The reasons why groups cannot be stored, filtered or sampled in this way. `demonstrated`: groups may also have a
    demonstration."""
    groups = learner.batch_size // learner.group_size
    if replay.shards > max(1, groups):
        yield (
            "replay.shards learner.batch_size learner.group_size: each shard needs a group of each batch; use at "
            f"most {groups} shards"
        )
    if replay.shard >= replay.shards:
        yield f"replay.shard replay.shards: shards are numbered from 0 to {replay.shards - 1}"
    lowest, highest = replay.filter.min_reward, replay.filter.max_reward
    if lowest is not None and highest is not None and lowest > highest:
        yield "replay.filter.min_reward replay.filter.max_reward: every group would be refused; lower the first key"
    if replay.filter.zero_variance and learner.group_size == 1 and not demonstrated:
        yield (
            "replay.filter.zero_variance learner.group_size: the filter would drop every group, since a single score "
            "equals itself; set the first to false"
        )
    yield from old_groups_conflicts(replay)
    if replay.source is not None and not Path(replay.source).is_dir():
        yield "replay.source: name the replay folder of a finished run, such as runs/NAME/replay"


def old_groups_conflicts(replay: ReplayConfig) -> Iterator[str]:
    """The reasons why groups that become too old cannot be treated as `replay.old_groups` says."""
    if replay.old_groups.wait_s:
        yield from _without_effect("wait_s", replay)
        if replay.sampler.kind != "oldest":
            yield (
                "replay.sampler.kind replay.old_groups.wait_s: a step that has waited for old groups must train them "
                "first; use oldest, or set the second key to 0"
            )
    if replay.old_groups.mask:
        yield from _without_effect("mask", replay)


def _without_effect(name: str, replay: ReplayConfig) -> Iterator[str]:
    """The reasons why the option `name` of `replay.old_groups` would have no effect, or a wrong one."""
    off = {"wait_s": "0", "mask": "false"}[name]
    key = f"replay.old_groups.{name}"
    if not replay.max_lag:
        yield f"{key} replay.max_lag: every batch has only groups of its own version; set the first key to {off}"
    if replay.sampler.max_times_sampled > 1:
        yield (
            f"{key} replay.sampler.max_times_sampled: groups that are trained again grow old on purpose; set the "
            f"first key to {off}, or the second to 1"
        )
