"""One vLLM server, started with VLLM_SERVER_DEV_MODE=1 for its control calls. Weights reach it as a folder.

It tells no versions, so no request may live on through an update; and it does not name its weights, so that a restart
is known by the start time of its process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.actor.engine.fleet.http import Http, ServerRefusedError
from asyncrl.actor.engine.fleet.server import Segment, ServerFaultError
from asyncrl.actor.engine.fleet.update import Update
from asyncrl.actor.engine.vllm.requests import completion_body, read_completion
from asyncrl.types import Sampling

if TYPE_CHECKING:
    from asyncrl.config.schema import TrainConfig

CONTROL_S = 30.0
_STARTED = re.compile(r"^process_start_time_seconds(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class VllmServer:
    """A `Server` (see the fleet's protocol) at `url`, which must take `context` tokens."""

    spans = False

    def __init__(self, url: str, *, context: int, silence_s: float = 60.0, load_s: float = 300.0) -> None:
        self.url = url
        self._http = Http(url)
        self._context = context
        self._silence_s = silence_s
        self._load_s = load_s
        self._model = ""
        self._label = ""
        self._started: str | None = None

    @classmethod
    def of(cls, config: TrainConfig, url: str) -> VllmServer:
        """As configured."""
        engine, weights = config.engine, config.weights
        return cls(url, context=config.actor.max_tokens, silence_s=engine.silence_s, load_s=weights.load_s)

    async def join(self) -> None:
        """As in the protocol; also refuses a server whose context is too short."""
        try:
            [model, *_] = (await self._http.get("/v1/models", self._silence_s))["data"]
            self._model, longest = model["id"], int(model["max_model_len"])
        except (ServerRefusedError, KeyError, TypeError, ValueError) as error:
            raise ServerFaultError(f"this is no vLLM server that we know: {error!r}") from error
        if longest < self._context:
            raise ServerFaultError(
                f"{self.url} takes {longest} tokens, actor.max_tokens is {self._context}; "
                "start the server with a longer --max-model-len"
            )
        self._started = await self._start_time()
        await self.abort()

    async def check(self) -> None:
        await self._http.get("/health", self._silence_s)
        if (started := await self._start_time()) != self._started:
            raise ServerFaultError(f"{self.url} was started anew at {started}, and has lost the weights it was given")

    async def generate(
        self, rid: str, tokens: NDArray[np.int32], sampling: Sampling, stop: Sequence[int], salt: str | None
    ) -> Segment:
        label = self._label
        body = completion_body(self._model, rid, tokens, sampling, stop, salt)
        return read_completion(await self._http.post("/v1/completions", body), sampling.max_new_tokens, stop, label)

    async def abort(self, rid: str | None = None) -> None:
        """As in the protocol; a single request ends with its connection, which its caller has closed."""
        if rid is None:
            await self.pause("abort")
            await self.resume()

    async def pause(self, mode: str) -> None:
        await self._post(f"/pause?mode={mode}&clear_cache=false")

    async def resume(self) -> None:
        await self._post("/resume")

    async def load(self, update: Update) -> None:
        async with update.folder() as folder:
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            await self._http.post("/collective_rpc", body, self._load_s)
        self._label = update.label

    async def flush(self) -> None:
        await self._post("/reset_prefix_cache")

    async def close(self) -> None:
        await self._http.close()

    async def _start_time(self) -> str:
        found = _STARTED.search(str(await self._http.get("/metrics", self._silence_s)))
        if found is None:
            raise ServerFaultError(f"{self.url}/metrics does not tell when the server was started")
        return found.group(1)

    async def _post(self, path: str, body: Any = None) -> None:
        await self._http.post(path, body, CONTROL_S)
