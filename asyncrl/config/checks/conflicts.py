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
from asyncrl.config.checks.replay import replay_conflicts
from asyncrl.config.checks.scoring import scoring_conflicts
from asyncrl.config.schema import (
    ModelConfig,
    ObserveConfig,
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
    yield from engine_conflicts(engine, actor, cluster)
    yield from replay_conflicts(replay, learner, data.demonstration is not None)
    if replay.old_groups.mask and config.implicit.train:
        yield (
            "replay.old_groups.mask implicit.train: the process model learns from whole episodes; set the first key to "
            "false"
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
    if "episodes" in observe.upload and not (observe.keep_episodes or observe.keep_evaluated):
        kept = "observe.keep_episodes observe.keep_evaluated"
        yield f"observe.upload {kept}: no episodes are kept; raise one of them, or leave out episodes"
    if "model" in observe.upload and not exports:
        yield "observe.upload learner.export: no model is exported; set the second to true, or leave out model"


def _demonstrations(sft: SftConfig) -> Iterator[str]:
    if sft.path == []:
        yield "algorithm.sft.path: name one or more files of demonstrations, or set null for none"
    if sft.steps is not None and sft.schedule == "constant":
        yield "algorithm.sft.steps algorithm.sft.schedule: a constant weight does not fall; use linear or cosine"
