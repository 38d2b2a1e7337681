"""Reads `config.yaml` in a run's folder, and returns the values that views need."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from asyncrl.config.locations import CONFIG_FILE
from asyncrl.config.schema import TrainConfig
from asyncrl.config.unread import unread_scores
from asyncrl.errors import ConfigError
from asyncrl.runs.settings import ViewSettings

if TYPE_CHECKING:
    from asyncrl.replay.settings import ReplaySettings


def read_config(run_dir: Path) -> TrainConfig:
    """The configuration in a run's folder. Raises ConfigError: another version of asyncrl wrote it, or it is damaged;
    OSError: it cannot be read."""
    path = run_dir / CONFIG_FILE
    try:
        written = OmegaConf.load(path)
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainConfig), written))
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{path} is of another version of asyncrl ({reason}): inspect it with that version"
        ) from error
    except (YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {' '.join(str(error).split())}") from error
    assert isinstance(config, TrainConfig)
    return config


def settings_of(config: TrainConfig) -> ViewSettings:
    """The values that views need."""
    learner, cluster, engine = config.learner, config.cluster, config.engine
    return ViewSettings(
        steps=learner.total_steps,
        batch_size=learner.batch_size,
        group_size=learner.group_size,
        learning_rate=learner.lr,
        publish_every=learner.publish_every,
        checkpoint_every=learner.checkpoint_every,
        concurrency=config.actor.at_once(learner.batch_size),
        is_colocated=cluster.colocated,
        hang_s=cluster.hang_timeout_s,
        engine=engine.kind,
        servers=engine.server.count,
        per_gpu=None if cluster.colocated or engine.server.tp_size > 1 else engine.server.together,
        keys=config.network.keys,
        model=config.model,
        algorithm=config.algorithm,
        unread=unread_scores(config.scoring, config.algorithm, config.replay.filter.score),
        replay=config.replay,
        can_mask=config.can_mask,
    )


def read_replay_settings(run_dir: Path, shard: int) -> ReplaySettings:
    """The settings of one shard of a run's replay. Raises ConfigError and OSError as `read_config` does."""
    # Only this function needs this import, which loads the reader of task files and takes longer than all others.
    from asyncrl.replay.from_config import replay_settings

    config = read_config(run_dir)
    return replay_settings(replace(config, replay=replace(config.replay, shard=shard)))
