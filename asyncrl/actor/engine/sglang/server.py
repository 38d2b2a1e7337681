"""One SGLang server, of two generations.

From 0.5.22 on, updates stand between begin and end, and answers tell which version sampled which token. Earlier ones
know neither, and die of a flush under requests: no request may live on there through an update.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.actor.engine.fleet.http import Http, ServerRefusedError
from asyncrl.actor.engine.fleet.server import Segment, ServerFaultError
from asyncrl.actor.engine.fleet.update import Update
from asyncrl.actor.engine.sglang.requests import buckets, generate_body, read_segment, tensors_body
from asyncrl.types import Sampling

if TYPE_CHECKING:
    from asyncrl.config.schema import TrainConfig

logger = logging.getLogger(__name__)

SPANS_SINCE = (0, 5, 22)
CONTROL_S = 30.0
FLUSH_S = 5.0
FLUSH_RETRY_S = 0.05


class SglangServer:
    """A `Server` (see the fleet's protocol) at `url`.

    `context` is the number of tokens that it must take; `silence_s` how long a check waits for it.
    """

    def __init__(
        self,
        url: str,
        *,
        context: int,
        transports: Sequence[str] = ("tensor",),
        bucket_bytes: int = 64 << 20,
        silence_s: float = 60.0,
        load_s: float = 300.0,
    ) -> None:
        self.url = url
        self.spans = False
        self._http = Http(url)
        self._context = context
        self._ways: dict[str, Callable[[Update], Awaitable[None]]] = {
            "tensor": self._load_tensors,
            "disk": self._load_folder,
        }
        self._transports = transports
        self._bucket_bytes = bucket_bytes
        self._silence_s = silence_s
        self._load_s = load_s
        self._ranks = 1
        self._label: str | None = None

    @classmethod
    def of(cls, config: TrainConfig, url: str) -> SglangServer:
        """As configured."""
        return cls(
            url,
            context=config.actor.max_tokens,
            transports=config.weights.transports,
            bucket_bytes=config.weights.bucket_mb << 20,
            silence_s=config.engine.silence_s,
            load_s=config.weights.load_s,
        )

    async def join(self) -> None:
        """As in the protocol; also refuses a server whose context is too short."""
        info = await self._get("server_info")
        self.spans = _version(info) >= SPANS_SINCE
        self._ranks = int(info.get("tp_size") or 1)
        longest = info.get("context_length")
        if longest and int(longest) < self._context:
            raise ServerFaultError(
                f"{self.url} takes {longest} tokens, actor.max_tokens is {self._context}; "
                "start the server with a longer --context-length"
            )
        self._label = None
        await self.abort()
        await self.resume()
        if self.spans:
            with suppress(ServerRefusedError):
                await self._post("/end_weight_update")

    async def check(self) -> None:
        """As in the protocol. `/health` will not do: it answers 503 while a pause lasts. `/server_info` is answered by
        the scheduler itself."""
        await self._get("server_info")
        model = await self._get("model_info")
        if self._label is not None and model.get("weight_version") != self._label:
            raise ServerFaultError(f"{self.url} has weights {model.get('weight_version')!r}, not {self._label!r}")

    async def generate(
        self, rid: str, tokens: NDArray[np.int32], sampling: Sampling, stop: Sequence[int], salt: str | None
    ) -> Segment:
        answer = await self._http.post("/generate", generate_body(rid, tokens, sampling, stop, salt))
        return read_segment(answer, sampling.max_new_tokens, stop)

    async def abort(self, rid: str | None = None) -> None:
        await self._post("/abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    async def pause(self, mode: str) -> None:
        await self._post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._post("/continue_generation")

    async def load(self, update: Update) -> None:
        """As in the protocol, by the first of the transports that the server takes."""
        for index, transport in enumerate(self._transports):
            try:
                await self._ways[transport](update)
            except ServerRefusedError as error:
                if index + 1 == len(self._transports):
                    raise ServerFaultError(f"{self.url} took no weights: {error}") from error
                logger.warning("%s took no weights by %s: %s", self.url, transport, error)
            else:
                self._label = update.label
                return

    async def _load_tensors(self, update: Update) -> None:
        if self.spans:
            await self._post("/begin_weight_update")
        try:
            async with aclosing(self._bodies(update)) as bodies:
                async for body in bodies:
                    await self._http.post("/update_weights_from_tensor", body, self._load_s)
        finally:
            if self.spans:
                await self._post("/end_weight_update")

    async def _bodies(self, update: Update) -> AsyncGenerator[bytes, None]:
        """The buckets in order; the next one is made while one is on its way."""
        parts = list(buckets(update.tensors, self._bucket_bytes))

        def make(index: int) -> asyncio.Task[bytes]:
            label = update.label if index + 1 == len(parts) else None
            return asyncio.create_task(asyncio.to_thread(tensors_body, parts[index], self._ranks, label))

        ahead = make(0)
        try:
            for index in range(1, len(parts)):
                body, ahead = await ahead, make(index)
                yield body
            yield await ahead
        finally:
            ahead.cancel()

    async def _load_folder(self, update: Update) -> None:
        body = {"model_path": str(await update.folder()), "weight_version": update.label, "flush_cache": False}
        await self._http.post("/update_weights_from_disk", body, self._load_s)

    async def flush(self) -> None:
        """As in the protocol; a request that has just answered may still be leaving the server."""
        deadline = asyncio.get_running_loop().time() + FLUSH_S
        while True:
            try:
                return await self._post("/flush_cache")
            except ServerRefusedError as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise ServerFaultError(f"{self.url} keeps the prefixes of older weights: {error}") from error
            await asyncio.sleep(FLUSH_RETRY_S)

    async def close(self) -> None:
        await self._http.close()

    async def _get(self, path: str) -> Any:
        """The answer to `path`, under which older servers knew /get_`path`."""
        try:
            try:
                return await self._http.get(f"/{path}", self._silence_s)
            except ServerRefusedError:
                return await self._http.get(f"/get_{path}", self._silence_s)
        except ServerRefusedError as error:
            raise ServerFaultError(f"this is no SGLang server that we know: {error}") from error

    async def _post(self, path: str, body: Any = None) -> None:
        await self._http.post(path, body, CONTROL_S)


def _version(info: Any) -> tuple[int, ...]:
    numbers = re.match(r"\d+(\.\d+)*", str(info.get("version", "")))
    if numbers is None:
        raise ServerFaultError(f"the server does not tell its version: {str(info)[:200]}")
    return tuple(int(number) for number in numbers.group().split("."))
