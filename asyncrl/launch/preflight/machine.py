"""Checks before anything starts that this machine has the configured ports, GPUs, programs and disk space."""

from __future__ import annotations

import logging
import shutil
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from asyncrl.config import locations
from asyncrl.config.schema import (
    EngineConfig,
    LearnerConfig,
    NetworkConfig,
    ReplayConfig,
    RunConfig,
    ScoringConfig,
    TrainConfig,
)
from asyncrl.engine.sglang.probe import without_sglang
from asyncrl.errors import ConfigError, UnavailableError
from asyncrl.launch.placement.placement import place
from asyncrl.launch.placement.pools import Host
from asyncrl.launch.processes import this_host
from asyncrl.machine.ports import try_port, who_listens

log = logging.getLogger("asyncrl.train")

CHECKPOINT_BYTES = 12
"""The bytes of a parameter in a checkpoint: the weight and the two averages of AdamW, in float32."""
EXPORT_BYTES = 4
MB, GB = 1e6, 1e9
LITTLE_ROOM = 10 * GB
"""A disk with more room than this, in addition to the room for checkpoints, has enough for the episodes of most
runs."""
SERVERS_ON_CPU = "engine.server.arguments=[--device,cpu] runs servers on the CPU"


def check_ports(network: NetworkConfig, learner: LearnerConfig, shards: int) -> None:
    """Raises UnavailableError, with one line for each port that the configuration names and that is taken here."""
    taken = []
    for key, host, count in (
        ("replay_port", network.replay_address, shards),
        ("weights_port", network.learner_address, 1),
    ):
        first = getattr(network, key)
        for port in range(first, first + count) if first else ():
            try:
                try_port(host, port)
            except OSError as error:
                fix = "if another run uses it, set network.replay_port=0 network.weights_port=0 (both)"
                why = f"port {port} cannot be used ({error}){who_listens(port)}"
                taken.append(f"network.{key}={first}: {why}; {fix}")
    if learner.nodes > 1 and learner.rendezvous is not None:
        host, _, number = learner.rendezvous.rpartition(":")
        try:
            try_port(host, int(number))
        except OSError as error:
            taken.append(
                f"learner.rendezvous={learner.rendezvous}: it cannot be used ({error})"
                f"{who_listens(int(number))}; name another port"
            )
    if taken:
        raise UnavailableError("\n".join(taken))


def check_devices(config: TrainConfig, gpus: int | None = None) -> None:
    """Raises ConfigError, with one line for each option that asks for more than a machine with `gpus` GPUs has. If
    `gpus` is None, this counts the GPUs of this machine."""
    if gpus is None:
        import torch

        gpus = torch.cuda.device_count()
    cluster, engine = config.cluster, config.engine
    has = f"this machine has {gpus} GPUs" if gpus != 1 else "this machine has one GPU"
    lines = [
        *_lacking_for_scores(config.scoring, gpus, has),
        *_lacking_for_training(config.model.attention, config.learner.interface, gpus, has),
    ]
    if (cluster.gpus or 0) > gpus:
        fewer = f"at most {gpus}" if gpus else "0, and engine.kind=embedded for a small model on the CPU"
        lines.append(f"cluster.gpus={cluster.gpus}: {has}; use {fewer}")
    try:
        place(config, [this_host(cluster, gpus)])
    except ConfigError as error:
        lines += str(error).splitlines()
    if engine.launches:
        lines += _without_servers(engine, this_host(cluster, gpus), gpus)
    if lines:
        raise ConfigError("\n".join(lines))


def _lacking_for_scores(scoring: ScoringConfig, gpus: int, has: str) -> Iterator[str]:
    for key, model in (("scoring.prm", scoring.prm), ("scoring.outcome_model", scoring.outcome_model)):
        kind = model.device.partition(":")[0]
        if model.is_configured and kind == "cuda" and not gpus:
            yield f"{key}.device={model.device}: {has}; use auto or cpu"
        if model.is_configured and model.gpus > 1:
            if gpus < model.gpus:
                yield f"{key}.gpus={model.gpus}: {has}; use at most {max(1, gpus)}"
            elif find_spec("accelerate") is None:
                yield f"{key}.gpus={model.gpus}: the package accelerate is not installed; install asyncrl[spread]"


def _lacking_for_training(attention: str, interface: str | None, gpus: int, has: str) -> Iterator[str]:
    if attention not in ("auto", "sdpa") and not gpus:
        yield f"model.attention={attention}: training with it needs a GPU, and {has}; use auto"
    elif attention == "flash_attention_2" and find_spec("flash_attn") is None:
        yield "model.attention=flash_attention_2: the package flash_attn is not installed; install it, or use auto"
    interfaces = [name for _, name in socket.if_nameindex()]
    if interface not in (None, *interfaces):
        yield f"learner.interface={interface}: this machine has {', '.join(interfaces)} only"


def _without_servers(engine: EngineConfig, host: Host, gpus: int) -> Iterator[str]:
    """Yield the reasons why no actor could start servers on this `host`, whose machine has `gpus` GPUs."""
    if not host.gpus and engine.server.device in (None, "cuda"):
        none = "cluster.gpus=0" if gpus else "this machine has 0 GPUs"
        yield f"engine.kind={engine.kind}: servers need a GPU, and {none}; {SERVERS_ON_CPU} (docs/engines.md)"
    if reason := without_sglang(engine.python, engine.server.environment):
        default = " (the default)" if engine.python == EngineConfig().python else ""
        mend = "name a Python that has SGLang (docs/gpu.md), and try it with `asyncrl doctor --python PATH`"
        yield f"engine.python={engine.python}{default}: {reason}; {mend}"


def check_disk(
    run: RunConfig, learner: LearnerConfig, replay: ReplayConfig, parameters: int, free: int, saved: int | None = None
) -> None:
    """Compare the bytes that the run will write with the `free` bytes of its disk.

    `parameters` counts the policy's parameters. Checkpoints hold `saved` of them, or all of them if `saved` is None.
    Raises ConfigError: not even one checkpoint fits. Logs a warning if the checkpoints and the exported model do not
    all fit. It also logs a warning if the episodes may take more than the rest of the disk, and this rest is below
    `LITTLE_ROOM`. With a larger rest there is no warning, because most runs never come near the limit of their store.
    """
    checkpoint = (parameters if saved is None else saved) * CHECKPOINT_BYTES
    folder, kept = locations.run_dir(run), learner.keep_checkpoints
    if free < checkpoint:
        raise ConfigError(
            f"run.dir={run.dir}: {_size(free)} are free there, and one checkpoint takes {_size(checkpoint)}; make "
            "room, or choose a folder on another disk"
        )
    # A new checkpoint is complete before the oldest one is deleted.
    needed = (kept + 1) * checkpoint + learner.export * parameters * EXPORT_BYTES
    stored = replay.max_store_gb * GB * replay.shards if replay.retention == "all" else 0.0
    rest = free - needed
    if rest < 0 or rest < min(stored, LITTLE_ROOM):
        episodes = f", and the stored episodes up to {_size(stored)} (replay.max_store_gb)" if stored else ""
        log.warning(
            "%s may fill its disk: %s are free, %d checkpoints and the model take about %s%s",
            *(folder, _size(free), kept + 1, _size(needed), episodes),
        )


def _size(count: float) -> str:
    """Write a number of bytes for people."""
    return f"{count / GB:.1f} GB" if count >= GB else f"{count / MB:.1f} MB"


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk on which `folder` is, or will be."""
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    return shutil.disk_usage(there).free
