"""Opens the engines of `asyncrl try` that sample from a model: the embedded engine, or a running server."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.schema import EngineConfig, ModelConfig
from asyncrl.engine.base import Engine, Generation, PlacedImage
from asyncrl.engine.embedded import EmbeddedEngine
from asyncrl.engine.fleet.server import InferenceServer, Segment
from asyncrl.engine.scripted import VERSION, EngineWithoutUpdates
from asyncrl.errors import ConfigError
from asyncrl.types import Sampling


def open_engine(
    engine: EngineConfig, model: ModelConfig, seed: int, opened: Callable[[str], InferenceServer]
) -> Engine:
    """The embedded engine with the model's own weights, or the SGLang server of `engine.urls`. `opened` opens a server.
    Raises ConfigError: `asyncrl try` cannot use this kind of engine, or this number of servers.
    """
    if engine.kind == "embedded":
        return EmbeddedEngine.load(model, engine, seed=seed, initial_version=VERSION)
    if engine.kind != "sglang":
        # An engine for vLLM must join the server as an actor does. This would end the requests of the server's other
        # users.
        raise ConfigError(f"engine.kind={engine.kind}: use sglang, embedded or --answers to try an episode")
    if len(engine.urls) != 1:
        raise ConfigError("engine.urls: name exactly one server, such as http://HOST:PORT")
    return ServerEngine(opened(engine.urls[0]))


class ServerEngine(EngineWithoutUpdates):
    """Samples from one running server, without changing the server."""

    def __init__(self, server: InferenceServer) -> None:
        super().__init__()
        self._server = server

    async def generate(
        self,
        tokens: NDArray[np.int32],
        sampling: Sampling,
        stop: Sequence[int],
        session: str,
        images: Sequence[PlacedImage] = (),
    ) -> Generation:
        parts: list[Segment] = []
        sampled = np.zeros(0, np.int32)
        while True:
            left = Sampling(sampling.temperature, sampling.max_new_tokens - len(sampled), sampling.grammar)
            so_far = np.concatenate([tokens, sampled])
            parts.append(await self._server.generate(uuid.uuid4().hex, so_far, left, stop, None, images=images))
            sampled = np.concatenate([part.tokens for part in parts])
            if parts[-1].finish != "cut" or not len(parts[-1].tokens):
                break
        logprobs = np.concatenate([part.logprobs for part in parts])
        finish = "stop" if parts[-1].finish == "stop" else "length"
        return Generation(sampled, logprobs, np.full(len(sampled), VERSION, np.int32), finish)

    async def close(self) -> None:
        await self._server.close()
