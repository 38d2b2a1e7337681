"""Keys that were renamed or removed: the old key, and its new key or what to do instead.

An old key is refused with this in the message. An entry holds for the keys below it, too.
"""

from __future__ import annotations

from collections.abc import Mapping

RENAMED: Mapping[str, str] = {
    "actor.door_host": "actor.chat_api_host",
    "actor.door_port": "actor.chat_api_port",
    "hydra": "asyncrl reads the command line itself; --config-dir DIR adds a folder of configuration files",
    "engine.prefix_cache": "it follows from weights.mode: in_place keeps prefixes apart by version, others flush them",
    "engine.server.first_gpu": "`asyncrl train` chooses the GPUs (docs/cluster.md); by hand, set CUDA_VISIBLE_DEVICES",
    "engine.sampling": "it allowed neutral values only; leave it out (actor.temperature sets the temperature)",
    "model.recompute": "model.activations says how much is kept: 0 for recompute=true, 1 for recompute=false",
    "observe.console": "observe.sinks lists where metrics go; its default is [console]",
    "observe.wandb": "observe.sinks lists where metrics go: observe.sinks=[console,wandb]",
    "observe.wandb_project": "observe.project",
    "weights.fallback": "weights that the channel does not bring come by zmq",
    "weights.staging": "it follows from weights.into_servers",
    "weights.transports": "set weights.into_servers to one way, or leave it at auto",
}


def advice(key: str) -> str | None:
    """What to do instead of using an old key; None where the key was never renamed."""
    for old, new in RENAMED.items():
        if key == old or key.startswith(f"{old}."):
            return f"{old} was removed: {new}" if " " in new else f"the key is now {new}{key.removeprefix(old)}"
    return None
