"""Sets environment variables of NCCL. They must be set before the process makes its first NCCL group."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from asyncrl.network.interfaces import loopback_interface
from asyncrl.weights.routes import RouteSettings


def agree_with_servers(routes: RouteSettings, environment: MutableMapping[str, str] = os.environ) -> None:
    """Forbid NCCL in this process to allocate memory with CUDA's cuMem functions, if actors bring weights to their
    servers by NCCL. SGLang forbids it, too.

    All processes in a group with such an actor must do the same. A variable that is already set keeps its value.
    """
    if routes.nccl_into_servers:
        environment.setdefault("NCCL_CUMEM_ENABLE", "0")


def keep_to_loopback(routes: RouteSettings, actor: bool, environment: MutableMapping[str, str] = os.environ) -> None:
    """Let NCCL in this process listen only on the loopback interface. `actor` is true in an actor's process, and false
    in the learner's. NCCL has one interface for all groups of a process. If NCCL may send weights to other machines,
    this function changes nothing, and the environment decides the interface.
    """
    if not (routes.broadcasts_to_other_machines or (actor and routes.nccl_into_servers)):
        environment["NCCL_SOCKET_IFNAME"] = f"={loopback_interface()}"
