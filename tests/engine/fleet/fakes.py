"""A server that speaks as SGLang does, of either generation, and a fleet over such servers.

Its weights are one number, the version that they were made as. It samples token `weights` with log-prob -weights, so a
token shows which weights really sampled it, even if its label is wrong.
"""

from __future__ import annotations

import asyncio
import base64
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import web
from safetensors.torch import load_file

from asyncrl.engine.base import Generation
from asyncrl.engine.fleet.discovery import Discovery, listed
from asyncrl.engine.fleet.fleet import Fleet
from asyncrl.engine.fleet.folders import Folders
from asyncrl.engine.fleet.settings import FleetSettings
from asyncrl.engine.sglang.routes.opening import ServerRouteSettings
from asyncrl.engine.sglang.server import SglangServer
from asyncrl.modelling.routing import RoutingShape
from asyncrl.types import Sampling
from asyncrl.weights.canary import Canary, CanaryCheck, canary_tokens
from asyncrl.weights.routes import ServerFacts
from tests.helpers import GENEROUS_S, OWN_RUN, async_until

STEP_S = 0.001
NEEDED = {"generate": {"weights", "kv_cache"}, "update_weights_from_disk": {"weights"}}
"""The memory that a call needs."""
EXPECTED = {"w": (1,), "v": (2, 2)}
VOCABULARY = 100


def tensors(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor([float(version)]), "v": torch.zeros(2, 2)}


def canary_logprobs(tokens: Sequence[int], weights: int) -> list[float]:
    """The log-probs that weights give the canary: their spread is about 1, and they differ for each version."""
    return [-5 - weights - token % 4 for token in tokens[1:]]


def canary_check(version: int) -> CanaryCheck:
    tokens = canary_tokens(0, VOCABULARY)
    return CanaryCheck(version, Canary(tokens, tuple(canary_logprobs(tokens, version)), "float32"), "zmq")


@dataclass
class Request:
    rid: str
    given: int
    limit: int
    stop: list[int]
    done: asyncio.Event
    pairs: list[list[Any]] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    finish: str = ""
    label: str = ""


class FakeSglang:
    """A fake server. `says` maps the number of tokens so far, with the prompt, to the next token; by default the
    weights' own.

    `answers` replaces what it answers to a call, by name.
    """

    def __init__(self, version: str = "0.5.23", says: Callable[[int], int | None] = lambda _: None) -> None:
        self.version = version
        self.says = says
        self.url = ""
        self.calls: list[str] = []
        self.salts: list[str | None] = []
        self.prompts: list[list[int]] = []
        self.limits: list[int] = []
        self.grammars: list[dict[str, str]] = []
        self.seeds: list[int | None] = []
        self.more_info: dict[str, Any] = {}
        """Further entries of its answer to `server_info`."""
        self.sampled = 0
        self.refuses: set[str] = set()
        self.hangs: set[str] = set()
        self.answers: dict[str, Callable[[Any], Awaitable[Any]]] = {}
        self.holds: Callable[[Request], bool] = lambda _: False
        """Requests that wait for their last tokens, so that what a test does meanwhile may take any time."""
        self.loading: Callable[[], Awaitable[None]] | None = None
        """The work of an update once nothing runs, before its weights are there."""
        self.crimes: list[str] = []
        """The calls that would have killed a real server."""
        self._transports: set[Any] = set()
        self.context = 4096
        self.overlap = False
        self.routing: RoutingShape | None = None
        """The shape of experts that it tells, by `experts_at` a token's place and the weights that computed it last."""
        self.routed_from: list[int | None] = []
        self.restart()

    def restart(self) -> None:
        """Start as a new process: with the weights of its folder, and without requests."""
        self.label, self.weights = "default", 50
        self.running: list[Request] = []
        self.uncounted: list[tuple[Request, int]] = []
        self.paused = self.open = False
        self.loads = 0
        self.aborted_in_wait: set[str] = set()
        self.waiting: set[str] = set()
        self.freed: set[str] = set()

    @property
    def new(self) -> bool:
        return self.version == "0.5.23"

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{name}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._dying = asyncio.Event()
        self._stepper = asyncio.create_task(self._steps())

    @property
    def connections(self) -> int:
        """The number of connections that clients have open."""
        return sum(not transport.is_closing() for transport in self._transports)

    async def die(self) -> None:
        """Die as by kill -9: every connection is cut."""
        self._stepper.cancel()
        self._dying.set()
        for request in self.running:
            request.done.set()
        await self._runner.cleanup()

    def cut(self) -> None:
        """Cut every connection, as the end of the process does."""
        for transport in self._transports:
            transport.abort()
        self._transports.clear()

    async def _steps(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            for request in [] if self.paused else list(self.running):
                # One may have a token that is not counted yet, and one is left for the next weights.
                if len(request.pairs) < request.limit - 2 or not self.holds(request):
                    self._step(request)

    def _step(self, request: Request) -> None:
        said = self.says(request.given + len(request.pairs))
        self.sampled += 1
        request.pairs.append([-float(self.weights), self.weights if said is None else said, None])
        request.labels.append(self.label)
        if request.pairs[-1][1] in request.stop:
            self.finish(request, "stop")
        elif len(request.pairs) >= request.limit:
            self.finish(request, "length")

    def hold_until(self, version: int) -> None:
        """No request ends before `version` is loaded."""
        self.holds = lambda _: self.weights < version

    def finish(self, request: Request, finish: str) -> None:
        self.running.remove(request)
        request.finish, request.label = finish, self.label
        request.done.set()

    async def _answer(self, http: web.Request) -> web.Response:
        name = http.match_info["name"]
        self.calls.append(name)
        self._transports |= {http.transport} - {None}
        body = await http.json() if http.can_read_body else {}
        if name in self.hangs:
            await self._dying.wait()
            return web.Response(status=503)
        if name in self.refuses:
            return web.json_response({"message": "refused"}, status=400)
        if self.freed & NEEDED.get(name, set()):
            self.crimes.append(f"{name} without {sorted(self.freed)}")
        answer = await self.answers.get(name, getattr(self, f"_{name}", self._unknown))(body)
        return answer if isinstance(answer, web.Response) else web.json_response(answer)

    async def _unknown(self, body: Any) -> web.Response:
        return web.Response(status=404)

    async def _server_info(self, body: Any) -> Any:
        info = {"version": self.version, "tp_size": 2, "context_length": self.context}
        told = {} if self.routing is None else {"enable_return_routed_experts": True}
        return {**info, **told, **self.more_info, "disable_overlap_schedule": not self.overlap}

    async def _get_model_info(self, body: Any) -> Any:
        return {"weight_version": self.label}

    async def _model_info(self, body: Any) -> Any:
        return await (self._get_model_info if self.new else self._unknown)(body)

    async def _health(self, body: Any) -> web.Response:
        return web.Response(status=503 if self.paused else 200)

    async def _generate(self, body: Any) -> Any:
        sampling = body["sampling_params"]
        if "logprob_start_len" in body:
            return await self._logprobs(body["input_ids"], body["logprob_start_len"])
        self.salts.append(body.get("extra_key"))
        given, limit, stop = body["input_ids"], sampling["max_new_tokens"], sampling["stop_token_ids"]
        self.prompts.append(given)
        self.limits.append(limit)
        self.seeds.append(sampling.get("sampling_seed"))
        self.grammars.append({kind: sampling[kind] for kind in ("json_schema", "regex", "ebnf") if kind in sampling})
        self.waiting.add(body["rid"])
        while self.loads and not self.paused:
            # As in SGLang: a request that comes while an update waits or loads comes after it.
            await asyncio.sleep(STEP_S)
        self.waiting.discard(body["rid"])
        if self._dying.is_set():
            return web.Response(status=500)
        if body["rid"] in self.aborted_in_wait:
            return web.json_response({"error": {"message": f"Request {body['rid']} was aborted"}}, status=400)
        request = Request(body["rid"], len(given), limit, stop, asyncio.Event())
        self.running.append(request)
        await request.done.wait()
        if not request.finish:
            return web.Response(status=500)
        meta: dict[str, Any] = {
            "weight_version": request.label,
            "output_token_logprobs": request.pairs,
            "finish_reason": {"type": request.finish, "matched": None},
        }
        if self.new:
            meta["weight_versions"] = _spans(request.labels)
        self.routed_from.append(body.get("routed_experts_start_len"))
        if self.routing is not None and body.get("return_routed_experts"):
            places = np.arange(body["routed_experts_start_len"], len(given) + len(request.pairs) - 1)
            meta["routed_experts"] = base64.b64encode(experts_at(self.routing, places, self.weights).tobytes()).decode()
        return {"output_ids": [pair[1] for pair in request.pairs], "meta_info": meta}

    async def _logprobs(self, tokens: list[int], start: int) -> Any:
        while self.paused:
            await asyncio.sleep(STEP_S)
        given = [None, *canary_logprobs(tokens, self.weights)[start:]]
        pairs = [[logprob, token, None] for logprob, token in zip(given, tokens[start:], strict=True)]
        return {"output_ids": [], "meta_info": {"input_token_logprobs": pairs}}

    async def _abort_request(self, body: Any) -> Any:
        for request in list(self.running):
            if body.get("abort_all") or request.rid.startswith(body["rid"]):
                self.finish(request, "abort")
        self.aborted_in_wait |= {rid for rid in self.waiting if body.get("abort_all") or rid.startswith(body["rid"])}
        return {}

    async def _pause_generation(self, body: Any) -> Any:
        """Pause. With overlap a step is at work: its tokens are counted now, or after a pause in_place."""
        self.paused = True
        self.uncounted = [(request, self.weights) for request in self.running if self.overlap]
        if body["mode"] == "retract":
            self._count()
        return {}

    async def _continue_generation(self, body: Any) -> Any:
        self._count()
        self.paused = False
        return {}

    def _count(self) -> None:
        uncounted, self.uncounted = self.uncounted, []
        now = self.weights
        for request, self.weights in uncounted:
            if request in self.running:
                self._step(request)
        self.weights = now

    async def _begin_weight_update(self, body: Any) -> Any:
        if not self.new:
            return await self._unknown(body)
        if self.open:
            return web.json_response({"message": "open already"}, status=400)
        self.open = True
        return {}

    async def _end_weight_update(self, body: Any) -> Any:
        if not self.new:
            return await self._unknown(body)
        if not self.open:
            return web.json_response({"message": "none open"}, status=400)
        self.open = False
        return {}

    async def _update_weights_from_disk(self, body: Any) -> Any:
        assert not body["flush_cache"]
        self.loads += 1
        try:
            while self.running and not self.paused:
                await asyncio.sleep(STEP_S)
            if self.loading is not None:
                await self.loading()
            self.weights = int(load_file(f"{body['model_path']}/model.safetensors")["w"])
            self.label = body["weight_version"]
        finally:
            self.loads -= 1
        return {}

    async def _flush_cache(self, body: Any) -> Any:
        if self.running and not self.paused:
            return web.Response(status=400)
        return {}

    async def _release_memory_occupation(self, body: Any) -> Any:
        if self.running or self.freed & set(body["tags"]):
            self.crimes.append(f"freed {body['tags']} with {len(self.running)} requests and without {self.freed}")
        self.freed |= set(body["tags"])
        self.weights = 60 if "weights" in self.freed else self.weights
        return {}

    async def _resume_memory_occupation(self, body: Any) -> Any:
        if not self.freed >= set(body["tags"]):
            self.crimes.append(f"regained {body['tags']} without {self.freed}")
        self.freed -= set(body["tags"])
        return {}


def experts_at(shape: RoutingShape, places: np.ndarray[Any, Any], weights: int) -> np.ndarray[Any, Any]:
    """int32[T, layers, top_k] as SGLang tells them: of all layers, among which those without a router have zeros."""
    found = (places[:, None, None] + weights + np.arange(shape.top_k)) % shape.experts
    return (found * np.isin(np.arange(shape.depth), shape.layers)[:, None]).astype(np.int32)


def _spans(labels: list[str]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    for index, label in enumerate(labels):
        if spans and spans[-1]["version"] == label:
            spans[-1]["end"] = index + 1
        else:
            spans.append({"version": label, "start": index, "end": index + 1})
    return spans


@asynccontextmanager
async def serving(*servers: FakeSglang) -> AsyncIterator[None]:
    try:
        for server in servers:
            await server.start()
        yield
    finally:
        for server in servers:
            with suppress(Exception):
                await server.die()


@asynccontextmanager
async def kept(fleet: Fleet) -> AsyncIterator[None]:
    """Keeps a fleet, and closes it at the end."""
    keeper = asyncio.create_task(fleet.keep())
    try:
        yield
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await fleet.close()


@asynccontextmanager
async def fleet_over(
    *servers: FakeSglang,
    mode: str = "retract",
    discover: Discovery | None = None,
    kind: type[SglangServer] = SglangServer,
    into_servers: str = "auto",
    here: bool = False,
    folders: Folders | None = None,
    limits_s: Mapping[str, float] | None = None,
    routing: RoutingShape | None = None,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Fleet]:
    """A fleet over `servers`, kept until the end, with `settings` of FleetSettings. A call to a server may take as long
    as `limits_s` has for its URL, else longer than a slow machine needs."""

    def open_server(url: str) -> SglangServer:
        limit_s = (limits_s or {}).get(url, 60.0)
        routes = ServerRouteSettings(into_servers, bucket_bytes=8)
        limits = {"silence_s": limit_s, "load_s": limit_s}
        return kind(url, context=64, settings=routes, look=lambda *_: ServerFacts(here), routing=routing, **limits)

    space = tempfile.TemporaryDirectory()
    usual = {"wait_s": 60.0, "check_s": 0.02, "retry_s": 0.02, "mode": mode}
    fleet = Fleet(
        discover or listed([server.url for server in servers]),
        open_server,
        expected=EXPECTED,
        vocabulary=VOCABULARY,
        settings=FleetSettings(**{**usual, **(settings or {})}),
        folders=folders or Folders(Path(space.name), lambda folder: None, OWN_RUN),
        routed=routing is not None,
        **options,
    )
    with space:
        async with kept(fleet):
            yield fleet


@asynccontextmanager
async def fleet_with(version: int, *servers: FakeSglang, **options: Any) -> AsyncIterator[Fleet]:
    """`servers` and a fleet over them, all of which have `version`."""
    async with serving(*servers), fleet_over(*servers, **options) as fleet:
        await fleet.update_weights(version, tensors(version))
        await servers_ready(fleet, len(servers))
        yield fleet


def counter(fleet: Fleet, name: str) -> float:
    return fleet.stats().counters[name]


async def servers_ready(fleet: Fleet, count: int) -> None:
    await async_until(lambda: counter(fleet, "servers_ready") == count)


async def sample(fleet: Fleet, count: int = 5, session: str = "s") -> Generation:
    """One turn of `count` tokens at temperature 1."""
    return await fleet.generate(ids(), Sampling(1.0, count), (), session)


def run(scenario: Callable[[], Awaitable[Any]], seconds: float = GENEROUS_S) -> Any:
    return asyncio.run(asyncio.wait_for(scenario(), seconds))


def ids(*tokens: int) -> np.ndarray[Any, Any]:
    return np.array(tokens or (1, 2, 3), np.int32)


def assert_true(*generations: Generation) -> None:
    """Every token was really sampled by the version recorded for it."""
    for got in generations:
        np.testing.assert_array_equal(got.versions, got.tokens)
        np.testing.assert_array_equal(got.logprobs, -got.versions.astype(np.float32))
