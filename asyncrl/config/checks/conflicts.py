"""All combinations of options that cannot work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from asyncrl.config.bind import PROMETHEUS_FIX, is_loopback
from asyncrl.config.checks.actor import actor_conflicts
from asyncrl.config.checks.data import data_conflicts, group_demonstration_conflicts
from asyncrl.config.checks.deployment import (
    cluster_conflicts,
    colocation_conflicts,
    network_conflicts,
    weights_conflicts,
)
from asyncrl.config.checks.engine import engine_conflicts
from asyncrl.config.checks.learner import learner_conflicts
from asyncrl.config.checks.scoring import scoring_conflicts
from asyncrl.config.schema import (
    LearnerConfig,
    ModelConfig,
    ObserveConfig,
    ReplayConfig,
    RunConfig,
    SftConfig,
    TrainConfig,
)
from asyncrl.machine.remote_folder import is_url


def conflicts(config: TrainConfig) -> Iterator[str]:
    """Every combination that cannot work, as `KEY [KEY ...]: FIX`. The first key is the one to change.

    Each value must already meet its own constraint.
    """
    data, actor, engine, replay = config.data, config.actor, config.engine, config.replay
    learner, scoring, cluster, network = config.learner, config.scoring, config.cluster, config.network
    yield from _run(config.run)
    yield from _model(config.model)
    yield from data_conflicts(data, actor)
    yield from group_demonstration_conflicts(data, actor, scoring, config.implicit.train)
    yield from actor_conflicts(actor, engine.kind, network.insecure)
    yield from engine_conflicts(engine, actor, cluster.actors or 1)
    yield from _replay(replay, learner)
    if replay.old_groups.mask:
        yield from _old_groups("mask", replay)
        if config.implicit.train:
            yield (
                "replay.old_groups.mask implicit.train: the process model learns from whole episodes; set the first "
                "key to false"
            )
    yield from _observe(config.observe, network.insecure, learner.export)
    yield from learner_conflicts(config)
    yield from _demonstrations(config.algorithm.sft)
    yield from scoring_conflicts(scoring, config.algorithm, replay.filter)
    yield from weights_conflicts(config.weights, engine, network)
    yield from cluster_conflicts(cluster)
    if cluster.colocated:
        yield from colocation_conflicts(cluster, engine, replay, config.weights, learner.nodes)
    yield from network_conflicts(network, replay.shards, makes_keys=cluster.launcher != "local")


def _run(run: RunConfig) -> Iterator[str]:
    if Path(run.name).name != run.name or run.name == "..":
        yield "run.name: it is the name of a folder in run.dir; use a name without slashes that is not . or .."


def _model(model: ModelConfig) -> Iterator[str]:
    if model.path.startswith(("http://", "https://")):
        yield "model.path: a web server lists no files; name a model on the hub as OWNER/NAME, or use s3:// or the like"
    if model.revision is not None and (is_url(model.path) or Path(model.path).is_dir()):
        yield "model.revision model.path: only models on the hub have revisions; set the first to null"


def _observe(observe: ObserveConfig, insecure: bool, exports: bool) -> Iterator[str]:
    shown = "prometheus" in observe.sinks
    if shown and not is_loopback(observe.prometheus_host) and not insecure:
        yield f"observe.prometheus_host: other machines can reach this address: {PROMETHEUS_FIX}"
    if "episodes" in observe.upload and not observe.keep_episodes:
        yield "observe.upload observe.keep_episodes: no episodes are kept; raise the second, or leave out episodes"
    if "model" in observe.upload and not exports:
        yield "observe.upload learner.export: no model is exported; set the second to true, or leave out model"


def _replay(replay: ReplayConfig, learner: LearnerConfig) -> Iterator[str]:
    groups = learner.batch_size // learner.group_size
    if replay.shards > groups:
        yield (
            "replay.shards learner.batch_size learner.group_size: each shard needs a group of each batch; use at "
            f"most {groups} shards"
        )
    if replay.shard >= replay.shards:
        yield f"replay.shard replay.shards: shards are numbered from 0 to {replay.shards - 1}"
    lowest, highest = replay.filter.min_reward, replay.filter.max_reward
    if lowest is not None and highest is not None and lowest > highest:
        yield "replay.filter.min_reward replay.filter.max_reward: every group would be refused; lower the first key"
    if replay.old_groups.wait_s:
        yield from _old_groups("wait_s", replay)
        if replay.sampler.kind != "oldest":
            yield (
                "replay.sampler.kind replay.old_groups.wait_s: a step that has waited for old groups must train them "
                "first; use oldest, or set the second key to 0"
            )
    if replay.source is not None and not Path(replay.source).is_dir():
        yield "replay.source: name the replay folder of a finished run, such as runs/NAME/replay"


def _old_groups(name: str, replay: ReplayConfig) -> Iterator[str]:
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


def _demonstrations(sft: SftConfig) -> Iterator[str]:
    if sft.path == []:
        yield "algorithm.sft.path: name one or more files of demonstrations, or set null for none"
    if sft.steps is not None and sft.schedule == "constant":
        yield "algorithm.sft.steps algorithm.sft.schedule: a constant weight does not fall; use linear or cosine"
