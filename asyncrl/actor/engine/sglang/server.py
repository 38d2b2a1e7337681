"""One SGLang server, of two generations.

From 0.5.22 on, updates stand between begin and end, and answers tell which version sampled which token. Earlier ones
know neither, and die of a flush under requests: no request may live on there through an update.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.actor.engine.fleet.http import Http, ServerRefusedError
from asyncrl.actor.engine.fleet.server import Segment, ServerFaultError
from asyncrl.actor.engine.fleet.update import Update
from asyncrl.actor.engine.sglang.requests import generate_body, read_segment
from asyncrl.actor.engine.sglang.transports.base import CONTROL_S, ServerEnd, Transport
from asyncrl.actor.engine.sglang.transports.disk import DiskTransport
from asyncrl.actor.engine.sglang.transports.distributed import DistributedTransport
from asyncrl.actor.engine.sglang.transports.ipc import IpcTransport
from asyncrl.actor.engine.sglang.transports.tensor import TensorTransport
from asyncrl.types import Sampling

if TYPE_CHECKING:
    from asyncrl.config.schema import TrainConfig

logger = logging.getLogger(__name__)

SPANS_SINCE = (0, 5, 22)
FLUSH_S = 5.0
FLUSH_RETRY_S = 0.05


class SglangServer:
    """An `InferenceServer` (see the fleet's protocol) at `url`.

    `context` is the number of tokens that it must take. A check waits `silence_s` for it, a process group `timeout_s`,
    any other call of an update `load_s`. Groups go beyond loopback only where `insecure`.
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
        timeout_s: float = 30.0,
        insecure: bool = False,
    ) -> None:
        self.url = url
        self._http = Http(url)
        self._context = context
        self._silence_s = silence_s
        self._end = end = ServerEnd(url, self._http, bucket_bytes, load_s)
        ways: Mapping[str, Callable[[], Transport]] = {
            "tensor": lambda: TensorTransport(end),
            "disk": lambda: DiskTransport(end),
            "distributed": lambda: DistributedTransport(end, timeout_s, insecure),
            "ipc": lambda: IpcTransport(end),
        }
        self._transports = {name: ways[name]() for name in transports}
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
            timeout_s=config.weights.timeout_s,
            insecure=config.network.insecure,
        )

    @property
    def spans(self) -> bool:
        return self._end.spans

    async def join(self) -> None:
        """As in the protocol; also refuses a server whose context is too short."""
        info = await self._get("server_info")
        self._end.spans = _version(info) >= SPANS_SINCE
        self._end.ranks = int(info.get("tp_size") or 1)
        longest = info.get("context_length")
        if longest and int(longest) < self._context:
            raise ServerFaultError(
                f"{self.url} takes {longest} tokens, actor.max_tokens is {self._context}; "
                "start the server with a longer --context-length"
            )
        self._label = None
        await self.leave()
        await self.abort()
        await self.resume()
        if self.spans:
            with suppress(ServerRefusedError):
                await self._post("/end_weight_update")
        # A flush collects garbage: 0.4 s where the objects of the start are among it, since no warm-up froze them.
        with suppress(ServerRefusedError, ServerFaultError):
            await self._post("/freeze_gc")

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
        body = msgspec.json.encode(generate_body(rid, tokens, sampling, stop, salt))
        answer = await self._http.call("POST", "/generate", body)
        return read_segment(answer, sampling.max_new_tokens, stop)

    async def abort(self, rid: str | None = None) -> None:
        await self._post("/abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    async def pause(self, mode: str) -> None:
        await self._post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._post("/continue_generation")

    async def load(self, update: Update) -> None:
        """As in the protocol, by the first of the transports that the server takes."""
        refusals: list[str] = []
        for name, transport in self._transports.items():
            try:
                await transport.send(update)
            except ServerRefusedError as error:
                logger.warning("%s took no weights by %s: %s", self.url, name, error)
                refusals.append(f"{name}: {error}")
            else:
                self._label = update.label
                return
        raise ServerFaultError(f"{self.url} took no weights by {'; '.join(refusals)}")

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

    async def leave(self) -> None:
        for transport in self._transports.values():
            await transport.reset()

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
