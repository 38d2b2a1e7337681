"""Calls one SGLang server, whose release may be older than 0.5.22.

Since SGLang 0.5.22, an update has a begin and an end call, and answers show which version sampled which token. Earlier
servers have neither, and crash if they are flushed while they have requests, so no request may continue through an
update.

With SGLang's overlap schedule, which is on by default on GPUs, a pause `in_place` leaves the results of the last step
in a queue. The tokens of this step, one for each request, are recorded after the update. So they would get the new
version although the old version sampled them. A pause `retract` empties the queue first.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.base import PlacedImage
from asyncrl.engine.fleet.http import Http, ServerRefusedError
from asyncrl.engine.fleet.server import Segment, ServerFaultError, as_segment, check_overrides
from asyncrl.engine.fleet.update import Update
from asyncrl.engine.sglang.facts import facts_of
from asyncrl.engine.sglang.launch import OVERRIDES_FLAG
from asyncrl.engine.sglang.requests import (
    RoutingRequest,
    generate_body,
    logprob_body,
    read_logprobs,
    read_segment,
)
from asyncrl.engine.sglang.routes.base import CONTROL_S, ServerEnd, ServerRoute
from asyncrl.engine.sglang.routes.kept import reason_to_keep_none
from asyncrl.engine.sglang.routes.opening import ServerRouteSettings, open_server_routes
from asyncrl.modelling.routing import RoutingShape
from asyncrl.types import Sampling
from asyncrl.weights.canary import QUANTIZED, UNKNOWN
from asyncrl.weights.routes import ServerFacts
from asyncrl.weights.threads import in_own_thread

logger = logging.getLogger(__name__)

SPANS_SINCE = (0, 5, 22)
FLUSHES = 500
FLUSH_RETRY_S = 0.01


class SglangServer:
    """An `InferenceServer` (see the fleet's protocol) at `url`.

    - The server must accept `context` tokens, and must have been started with `overrides` of its model's configuration.
    - A check may take `silence_s` seconds, and a call of an update may take `load_s` seconds.
    - `settings` configure the routes of weights, and `look` finds the facts that decide on a route. The actor's own
      servers run on `taken_gpus`.
    - If the policy's `routing` is given, the server must report the experts of tokens.
    """

    def __init__(
        self,
        url: str,
        *,
        context: int,
        settings: ServerRouteSettings | None = None,
        taken_gpus: Sequence[int] = (),
        silence_s: float = 60.0,
        load_s: float = 300.0,
        overrides: Mapping[str, Any] | None = None,
        look: Callable[[str, int, Mapping[str, Any], Sequence[int]], ServerFacts] = facts_of,
        routing: RoutingShape | None = None,
    ) -> None:
        self.url = url
        self._http = Http(url)
        self._context = context
        self._silence_s = silence_s
        self._end = ServerEnd(url, self._http, load_s)
        self._settings = settings or ServerRouteSettings()
        self._taken_gpus = taken_gpus
        self._look = look
        self._routing = routing
        self._overrides = overrides or {}
        self._routes: dict[str, ServerRoute] = {}
        self._left_out = ""
        self._label: str | None = None
        self._overlaps = False
        self._by_seed = False
        self.precision = UNKNOWN

    @property
    def spans(self) -> bool:
        return self._end.spans

    @property
    def loads_after_requests(self) -> bool:
        """True if the server has no spans, so that its answers do not show which version sampled which token. In such a
        server an update waits for the requests, unless the server is paused."""
        # If a server with spans loaded while its requests end, tokens that are sampled between two parts of an update
        # would count as sampled by the new version.
        return not self.spans

    @property
    def route(self) -> str:
        """The route of weights into the server; "" if it has not joined, or if no route is left."""
        return next(iter(self._routes), "")

    async def join(self) -> None:
        """Examine the server (see `InferenceServer`).

        Raises ServerFaultError also if its context is too short, its configuration differs, it reports no experts, or
        it keeps prefixes in a storage.
        """
        info = await self._get("server_info")
        self._end.spans = _version(info) >= SPANS_SINCE
        self._overlaps = not info.get("disable_overlap_schedule", True)
        if info.get("hicache_storage_backend"):
            raise ServerFaultError(
                f"{self.url} also keeps keys and values in a storage, where those of older weights outlive a flush; "
                "start the server without --hicache-storage-backend"
            )
        self._by_seed = bool(info.get("enable_deterministic_inference"))
        self._end.ranks = int(info.get("tp_size") or 1)
        self._end.keeps_none = reason_to_keep_none(info)
        self.precision = _precision(info)
        longest = info.get("context_length")
        if longest and int(longest) < self._context:
            raise ServerFaultError(
                f"{self.url} takes {longest} tokens, actor.max_tokens is {self._context}; "
                "start the server with a longer --context-length"
            )
        given = json.loads(info.get("json_model_override_args") or "{}")
        check_overrides(self.url, self._overrides, given, OVERRIDES_FLAG)
        if self._routing is not None and not info.get("enable_return_routed_experts"):
            raise ServerFaultError(
                f"{self.url} does not report the experts of tokens, which engine.return_routed_experts needs; start "
                "the server with --enable-return-routed-experts"
            )
        self._label = None
        await self.leave()
        await self._open_routes(info)
        await self.abort()
        await self.resume()
        if self.spans:
            with suppress(ServerRefusedError):
                await self._post("/end_weight_update")
        # A flush makes the server collect garbage. This takes 0.4 s unless the objects made at the server's start are
        # frozen.
        with suppress(ServerRefusedError, ServerFaultError):
            await self._post("/freeze_gc")

    async def check(self) -> None:
        """Check the server (see `InferenceServer`)."""
        # The scheduler answers `/server_info` during a pause, too, but `/health` answers 503 then.
        await self._get("server_info")
        await self._check_label()

    async def _check_label(self) -> None:
        model = await self._get("model_info")
        if self._label is not None and model.get("weight_version") != self._label:
            raise ServerFaultError(f"{self.url} has weights {model.get('weight_version')!r}, not {self._label!r}")

    async def generate(
        self,
        rid: str,
        tokens: NDArray[np.int32],
        sampling: Sampling,
        stop: Sequence[int],
        salt: str | None,
        routed_from: int | None = None,
        images: Sequence[PlacedImage] = (),
    ) -> Segment:
        routing = None
        if routed_from is not None and self._routing is not None:
            routing = RoutingRequest(self._routing, routed_from, len(tokens))
        start = routing and routing.start
        body = generate_body(rid, tokens, sampling, stop, salt, start, images, self._by_seed)
        try:
            answer = await self._http.call("POST", "/generate", msgspec.json.encode(body))
        except ServerRefusedError as error:
            # SGLang gives this answer to a request that is aborted while it waits for an update.
            if f"{rid} was aborted" in str(error):
                return as_segment((), (), (), sampling, stop, "abort")
            raise
        return read_segment(answer, sampling, stop, routing, len(tokens) if images else None)

    async def logprobs(
        self, tokens: Sequence[int], salt: str | None, start: int = 1, images: Sequence[PlacedImage] = ()
    ) -> NDArray[np.float32]:
        body = msgspec.json.encode(logprob_body(tokens, salt, start, images))
        return read_logprobs(await self._http.call("POST", "/generate", body, self._end.load_s), tokens, start)

    async def abort(self, rid: str | None = None) -> None:
        await self._post("/abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    async def pause(self, mode: str) -> None:
        await self._post("/pause_generation", {"mode": "retract" if self.retracts(mode) else mode})

    def retracts(self, mode: str) -> bool:
        return mode == "retract" or self._overlaps

    async def resume(self) -> None:
        await self._post("/continue_generation")

    async def prepare(self, update: Update) -> None:
        await self._by_a_route(lambda route: route.prepare(update))
        if not self._end.keeps_none:
            # The server may keep a buffer open between updates (routes/kept.py). A restart closes it, and shows as a
            # wrong label. So the label is checked before the load refers to the buffer.
            await self._check_label()

    async def load(self, update: Update) -> None:
        await self._by_a_route(lambda route: route.send(update))
        self._label = update.label

    async def _open_routes(self, info: Mapping[str, Any]) -> None:
        facts = await in_own_thread(partial(self._look, *self._end.address, info, self._taken_gpus))
        self._routes, self._left_out = open_server_routes(self._end, facts, self._settings)
        if self._routes:
            names = ", else ".join(self._routes)
            logger.info("weights go into %s by %s%s", self.url, names, self._left_out and f" ({self._left_out})")

    async def _by_a_route(self, act: Callable[[ServerRoute], Awaitable[None]]) -> None:
        """Call `act` with the best remaining route. A route that the server refuses is left out until the server joins
        again."""
        while self._routes:
            name, route = next(iter(self._routes.items()))
            try:
                return await act(route)
            except ServerRefusedError as error:
                del self._routes[name]
                await route.reset()
                self._left_out += f"{self._left_out and '; '}not by {name}: {error}"
                logger.warning("weights do not go into %s by %s: %s", self.url, name, error)
        raise ServerFaultError(f"{self.url} takes no weights, {self._left_out}; see weights.into_servers")

    async def flush(self) -> None:
        """Flush the cache (see `InferenceServer`)."""
        # The flush is repeated, since the server refuses it while a request that it has just answered is still in its
        # queues.
        for _ in range(FLUSHES):
            with suppress(ServerRefusedError):
                return await self._post("/flush_cache")
            await asyncio.sleep(FLUSH_RETRY_S)
        raise ServerFaultError(f"{self.url} keeps the prefixes of older weights: it refuses to flush them")

    async def free(self, memory: Sequence[str]) -> None:
        """Free memory (see `FreeingServer`). SGLang's scheduler dies if it is not idle, or if the memory is freed
        already."""
        await self._end.post("/release_memory_occupation", {"tags": list(memory)})

    async def regain(self, memory: Sequence[str]) -> None:
        await self._end.post("/resume_memory_occupation", {"tags": list(memory)})

    async def close(self) -> None:
        await self._http.close()

    async def leave(self) -> None:
        for route in self._routes.values():
            await route.reset()

    async def _get(self, path: str) -> Mapping[str, Any]:
        """Get the answer to /`path`, or to its name in older servers, /get_`path`."""
        for name in (path, f"get_{path}"):
            with suppress(ServerRefusedError):
                answer = await self._http.get(f"/{name}", self._silence_s)
                if isinstance(answer, dict):
                    return answer
                raise ServerFaultError(f"{self.url} is not an SGLang server: /{name} answered {str(answer)[:200]!r}")
        raise ServerFaultError(f"{self.url} is not an SGLang server of a known kind: it has no /{path}")

    async def _post(self, path: str, body: Any = None) -> None:
        await self._http.post(path, body, CONTROL_S)


def _precision(info: Mapping[str, Any]) -> str:
    if info.get("quantization") or "fp" in str(info.get("kv_cache_dtype")):
        return QUANTIZED
    return str(info.get("dtype") or UNKNOWN)


def _version(info: Mapping[str, Any]) -> tuple[int, ...]:
    numbers = re.match(r"\d+(\.\d+)*", str(info.get("version", "")))
    if numbers is None:
        raise ServerFaultError(f"/server_info has no version: {str(info)[:200]}")
    return tuple(int(number) for number in numbers.group().split("."))
