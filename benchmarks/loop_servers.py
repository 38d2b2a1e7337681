"""The arguments of the servers of benchmarks.gpu_loop: those that a run would give to servers that it starts."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import pynvml
from transformers import AutoConfig

from asyncrl.config.schema import ServerConfig
from asyncrl.engine.sglang.fitting import (
    GpuMemory,
    cache_tokens,
    fitting_arguments,
    requests_of_server,
    together_arguments,
    token_bytes,
)
from asyncrl.engine.sglang.probe import installed_version
from asyncrl.launch.placement.dealing import memory_shares
from asyncrl.machine.gpu_use import gpu_bytes

SERVER_MEMORY = 0.75
"""The servers' share of a GPU of their own. The rest has room for versions of the weights (`ipc`)."""
BFLOAT16_BYTES = 2


def own_arguments(options: argparse.Namespace) -> list[str]:
    """The arguments of `--server`."""
    return shlex.split(options.server)


def shared_memory(gpus: Sequence[int]) -> Mapping[str, float]:
    """The shares of the memory of a GPU that servers share with the learner."""
    return memory_shares({"learner": (0,), "actor": gpus}, {})


class Fitted:
    """Memory and arguments of servers that play `episodes` at once together, of at most `longest` tokens each."""

    def __init__(self, options: argparse.Namespace, model: Path, longest: int, episodes: int, servers: int) -> None:
        self._options = options
        self._model = model
        self._longest = longest
        self._requests = requests_of_server(episodes, servers)

    def on(self, gpu: int) -> tuple[float | None, list[str]]:
        """The share of a server that has GPU number `gpu` to itself, and the arguments."""
        options, own = self._options, own_arguments(self._options)
        if not options.gpus:
            return None, own
        share = shared_memory([0])["actor"] if gpu == 0 else SERVER_MEMORY
        fitted = fitting_arguments(ServerConfig(arguments=own), self._requests, self._version)
        if options.per_gpu == 1:
            return share, [*fitted, *own]
        tokens = cache_tokens(self._memory, share, options.per_gpu, self._requests * self._longest, self._longest)
        return None, [*fitted, *together_arguments(ServerConfig(arguments=own), tokens), *own]

    @cached_property
    def _version(self) -> tuple[int, ...]:
        return installed_version(self._options.python, {})

    @cached_property
    def _memory(self) -> GpuMemory:
        gpu = gpu_bytes(pynvml)
        assert gpu is not None
        weights = sum(file.stat().st_size for file in self._model.glob("*.safetensors"))
        return GpuMemory(gpu, weights, token_bytes(AutoConfig.from_pretrained(self._model), BFLOAT16_BYTES))
