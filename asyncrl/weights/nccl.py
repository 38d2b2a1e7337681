"""What a process must settle before its first NCCL group: what all on one machine agree on, and where it listens."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from asyncrl.config.bind import is_loopback

if TYPE_CHECKING:
    from asyncrl.config.schema import TrainConfig


def agree_with_servers(config: TrainConfig) -> None:
    """Have NCCL in this process go without cuMem, as SGLang does, where an actor brings weights to its servers by NCCL.

    Whoever else is in a group with that actor must do the same. Call it before the first group; what the environment
    says already stays.
    """
    if _servers_by_nccl(config):
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")


def keep_to_loopback(config: TrainConfig, actor: bool) -> None:
    """Have NCCL in this process, an `actor`'s or the learner's, listen on the loopback interface alone.

    The environment decides where weights may go to other machines by NCCL: it knows one interface for all groups of a
    process. Call it before the first group.
    """
    weights = config.weights
    broadcast = "distributed" in (weights.channel, weights.fallback) and not is_loopback(config.network.host)
    if not (broadcast or (actor and _servers_by_nccl(config))):
        os.environ["NCCL_SOCKET_IFNAME"] = f"={loopback_interface()}"


def loopback_interface() -> str:
    """The name of the network interface that only this machine reaches: lo, or lo0."""
    return next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))


def _servers_by_nccl(config: TrainConfig) -> bool:
    return config.engine.kind != "embedded" and config.weights.into_servers == "nccl"
