"""Makes the settings and the store of one shard from the configuration."""

from __future__ import annotations

import json
import logging
import math
import shlex
from functools import cache, partial
from pathlib import Path

from asyncrl.config import locations
from asyncrl.config.schema import FilterConfig, ReplayConfig, SamplerConfig, TrainConfig
from asyncrl.config.schema.scoring import needs
from asyncrl.data.from_config import run_tasks
from asyncrl.machine.remote_folder import is_url, read_remote
from asyncrl.replay.batches.sampling import Fifo, Filters, Freshest, Oldest, Prioritised, Sampler
from asyncrl.replay.settings import ReplaySettings
from asyncrl.replay.starts.admission import Admission
from asyncrl.replay.starts.feed import Band, Feed
from asyncrl.replay.store.store import Store

log = logging.getLogger(__name__)

LANGUAGE_MODELS = ("text_config", "llm_config", "language_config")
HIGH_WATER = 0.8
FULL = 0.9


def replay_settings(config: TrainConfig) -> ReplaySettings:
    """The settings of shard `replay.shard`. Raises DataError: its tasks cannot be read, or are too few."""
    learner, replay, data, shard = config.learner, config.replay, config.data, config.replay.shard
    groups = learner.batch_size // learner.group_size
    batch_size = len(range(shard, groups, replay.shards)) * learner.group_size
    return ReplaySettings(
        admission=Admission(
            replay.max_lag,
            batch_size * learner.publish_every if learner.total_steps else 0,
            replay.sampler.max_times_sampled,
            replay.oversample,
        ),
        feed=Feed(
            run_tasks(config).usable(data.train),
            config.run.seed,
            data.shuffle,
            data.weights,
            Band(data.band[0], data.band[1], data.band_revisit) if data.band else None,
            shard,
            replay.shards,
        ),
        held_out=run_tasks(config).usable(data.eval, held_out=True) if data.eval else (),
        eval_attempts=learner.eval_attempts,
        evaluation_sample=config.observe.keep_evaluated,
        group_size=learner.group_size,
        batch_size=batch_size,
        publish_every=learner.publish_every,
        max_attempts=replay.max_attempts,
        temperature=config.actor.temperature,
        high_water_bytes=high_water_bytes(replay),
        greedy_sibling=config.algorithm.greedy_sibling,
        needs=cache(partial(needs, config.scoring)),
        filters=_filters(replay.filter),
        max_refused_groups=replay.filter.max_refused,
        sampler=sampler(replay.sampler),
        reissue_evicted=replay.reissue_evicted,
        spare_batches=spare_batches(replay),
        wait_s=wait_s(replay),
        masks_old=config.can_mask and masks_old(replay),
        keep_steps={"none": 0, "window": replay.retention_steps, "all": math.inf}[replay.retention],
        full_bytes=replay.max_store_gb * FULL * 1e9,
        max_failure_share=config.actor.max_failure_share,
        run=shlex.quote(str(locations.run_dir(config.run))),
        max_dead_letters=replay.max_dead_letters,
        max_dead_letter_bytes=replay.max_store_gb * replay.dead_letter_share * 1e9,
        # Normally the actor's own limit acts first. This limit is for an actor whose own limit does not work.
        longest_episode_s=config.actor.episode_timeout_s + 2 * replay.lease_s,
        vocabulary=vocabulary(config.model.path, config.model.revision),
        max_tokens=config.actor.largest_episode,
        seed=config.run.seed,
        shard=shard,
        shards=replay.shards,
    )


def _filters(config: FilterConfig) -> Filters:
    return Filters(config.zero_variance, config.score, config.min_reward, config.max_reward, config.max_tokens)


def vocabulary(model: str, revision: str | None = None) -> int | None:
    """The number of rows of the policy's embedding, from `config.json` in its folder or in the hub's cache. The
    tokenizer may have fewer ids. `None`, with a warning, if the file cannot be read on this machine."""
    try:
        config = json.loads(_config_text(model, revision))
        # The file of a multi-modal model describes its language model in a nested section.
        texts = [config[name] for name in LANGUAGE_MODELS if name in config]
        return next(int(each["vocab_size"]) for each in (*texts, config) if "vocab_size" in each)
    except (OSError, ValueError, TypeError, StopIteration) as error:
        log.warning("token ids are not checked against the vocabulary: config.json of model.path=%s: %r", model, error)
        return None


def _config_text(model: str, revision: str | None) -> str:
    """The text of config.json. Raises OSError: the file cannot be read on this machine."""
    if is_url(model):
        return read_remote(f"{model.rstrip('/')}/config.json")
    path = Path(model) / "config.json" if Path(model).is_dir() else _cached(model, revision)
    return path.read_text()


def _cached(model: str, revision: str | None) -> Path:
    """The file of a hub model in this machine's cache. Does not contact the hub. Raises OSError: it is not in the
    cache."""
    # Imported only if needed, since a replay must start quickly.
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json", revision=revision)
    if not isinstance(found, str):
        raise FileNotFoundError("it is neither a folder nor a hub model in this machine's cache")
    return Path(found)


def high_water_bytes(replay: ReplayConfig) -> int:
    """The size of one shard's store above which the shard opens no new groups."""
    return int(replay.max_store_gb * HIGH_WATER * 1e9)


def sampler(config: SamplerConfig) -> Sampler:
    """The sampler that `config.kind` names."""
    match config.kind:
        case "prioritised":
            return Prioritised(config.alpha, config.beta)
        case "freshest":
            return Freshest()
        case "fifo":
            return Fifo()
        case _:
            return Oldest()


def spare_batches(config: ReplayConfig) -> float | None:
    """The number of batches that may be complete in addition to the learner's batch. `None`: only `max_lag` limits how
    far episodes run ahead of the learner."""
    return config.spare_batches if config.can_pace else None


def wait_s(config: ReplayConfig) -> float | None:
    """The longest wait for old groups. 0: no step waits; `None`: the default limit (see `batches/old_groups.py`)."""
    given = config.old_groups.wait_s
    return given if given is not None or config.can_wait else 0.0


def masks_old(config: ReplayConfig) -> bool:
    """True if tokens that are too old are masked, in a run that can mask tokens (`TrainConfig.can_mask`)."""
    given = config.old_groups.mask
    return config.can_mask if given is None else given


def open_store(replay: ReplayConfig, run_dir: Path) -> Store:
    """The store of the shard that `replay.shard` names. Raises StoreError: it cannot be opened."""
    path = run_dir / "replay"
    path = path if replay.shards == 1 else path / str(replay.shard)
    return Store(path, int(replay.max_store_gb * 1e9), durable=replay.durability == "fsync")
