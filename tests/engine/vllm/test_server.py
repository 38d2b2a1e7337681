"""vLLM's requests and answers, on exchanges that were recorded from a real server."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from asyncrl.config.schema import ModelConfig, TrainConfig
from asyncrl.engine.fleet.server import ServerFaultError, Span
from asyncrl.engine.from_config import open_server
from asyncrl.engine.vllm.requests import (
    NO_LOGPROB,
    completion_body,
    generate_body,
    logprob_body,
    read_logprobs,
    read_segment,
)
from asyncrl.engine.vllm.server import VllmServer
from asyncrl.types import Sampling
from tests.engine.fleet.fakes import ids
from tests.engine.support import tiny_model
from tests.engine.vllm.exchanges import CONTEXT, LABEL, START, live

RECORDED = json.loads(Path(__file__).with_name("exchanges.json").read_text())
SPANS, SILENT = "with --enable-scale-out", "without"
ENDPOINTS = {SPANS: "/inference/v1/generate", SILENT: "/v1/completions"}


class Replay:
    """Answers what was asked of the real server as that did, and refuses everything else."""

    def __init__(self, exchanges: list[dict[str, Any]]) -> None:
        self.exchanges = copy.deepcopy(exchanges)
        self.asked: list[str] = []

    def change(self, path: str, change: Callable[[Any], Any]) -> None:
        """Change the answer at `path`."""
        for each in self.exchanges:
            if each["path"].startswith(path):
                each["answer"] = change(each["answer"])

    async def answer(self, http: web.Request) -> web.Response:
        self.asked.append(str(http.rel_url))
        body = await http.json() if http.can_read_body else None
        for each in self.exchanges:
            if (each["method"], each["path"], each["body"]) == (http.method, str(http.rel_url), body):
                answer = each["answer"]
                return web.Response(
                    text=answer if isinstance(answer, str) else json.dumps(answer), status=each["status"]
                )
        return web.Response(text=f"this was never asked of the real server: {body}", status=400)


def opened(url: str, context: int = CONTEXT, seeds: dict[str, int] | None = None) -> VllmServer:
    return VllmServer(url, context=context, tied=False, seeds=seeds)


@asynccontextmanager
async def replaying(replay: Replay, open_server: Callable[[str], VllmServer] = opened) -> AsyncIterator[VllmServer]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", replay.answer)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server = open_server(f"http://127.0.0.1:{runner.addresses[0][1]}")
    try:
        yield server
    finally:
        await server.close()
        await runner.cleanup()


def recorded_choice(kind: str, rid: str) -> Any:
    [answer] = [each["answer"] for each in RECORDED[kind] if (each["body"] or {}).get("request_id") == rid]
    return answer["choices"][0]


@pytest.mark.parametrize("kind", ENDPOINTS)
async def test_a_server_is_sent_what_the_real_one_was_sent_and_its_answers_are_read(kind: str) -> None:
    replay = Replay(RECORDED[kind])
    async with replaying(replay) as server:
        segments = await live(server)
        assert server.spans == (kind == SPANS)
    assert [segment.finish for segment in segments.values()] == ["length", "stop", "cut"]
    for name, rid in (("whole", "whole"), ("stopped", "stopped"), ("aborted", "long")):
        choice, segment = recorded_choice(kind, rid), segments[name]
        logprobs = choice["logprobs"]
        logprobs = logprobs["token_logprobs"] if kind == SILENT else [each["logprob"] for each in logprobs["content"]]
        assert segment.tokens.tolist() == choice["token_ids"]
        np.testing.assert_array_equal(segment.logprobs, np.array(logprobs, np.float32))
        assert segment.spans == (Span(LABEL, 0, len(segment.tokens)),)
    assert replay.asked.count(ENDPOINTS[kind]) == 3 + (kind == SPANS)
    assert ("/update_weight_version" in replay.asked) == (kind == SPANS)


@pytest.mark.parametrize("kind", ENDPOINTS)
def test_a_request_overrides_every_default_that_bends_logprobs_or_ends_a_turn(kind: str) -> None:
    if kind == SPANS:
        body = generate_body("r", ids(1, 2), Sampling(0.7, 9), (8,), "salt")
        asked = body["sampling_params"]
        assert body["token_ids"] == [1, 2]
    else:
        body = asked = completion_body("policy", "r", ids(1, 2), Sampling(0.7, 9), (8,), "salt")
        assert (body["model"], body["prompt"], body["return_token_ids"]) == ("policy", [1, 2], True)
    assert (asked["temperature"], asked["max_tokens"], asked["stop_token_ids"]) == (0.7, 9, (8,))
    assert (asked["top_p"], asked["top_k"], asked["min_p"], asked["repetition_penalty"]) == (1.0, 0, 0.0, 1.0)
    assert (asked["presence_penalty"], asked["frequency_penalty"]) == (0.0, 0.0)
    assert (asked["ignore_eos"], asked["logprobs"]) == (True, 0)
    assert body["cache_salt"] == "salt"


def told(**changes: Any) -> bytes:
    """The recorded answer of four tokens, changed."""
    return json.dumps({"choices": [{**recorded_choice(SPANS, "whole"), **changes}]}).encode()


def with_logprob(value: float) -> bytes:
    logprobs = copy.deepcopy(recorded_choice(SPANS, "whole")["logprobs"])
    logprobs["content"][1]["logprob"] = value
    return told(logprobs=logprobs)


def test_a_request_that_met_an_update_tells_which_weights_sampled_which_token() -> None:
    versions = [{"version": "2-me", "start": 0, "end": 3}, {"version": "3-me", "start": 3, "end": 4}]
    segment = read_segment(told(weight_versions=versions), Sampling(1.0, 4), ())
    assert segment.spans == (Span("2-me", 0, 3), Span("3-me", 3, 4))


def test_an_abort_before_the_first_token_gives_an_empty_segment() -> None:
    empty = told(token_ids=[], logprobs={"content": []}, weight_versions=None, finish_reason="abort")
    segment = read_segment(empty, Sampling(1.0, 4), ())
    assert (len(segment.tokens), len(segment.logprobs), segment.spans, segment.finish) == (0, 0, (), "cut")


@pytest.mark.parametrize(
    "broken",
    [
        b'{"more": ' + b"[" * 10**5,
        b"text",
        b'{"choices": []}',
        told(token_ids=[-1]),
        with_logprob(float("nan")),
        with_logprob(NO_LOGPROB),
    ],
)
def test_an_answer_that_lacks_what_a_trajectory_needs_is_a_fault(broken: bytes) -> None:
    with pytest.raises(ServerFaultError):
        read_segment(broken, Sampling(1.0, 9), ())


async def joined(replay: Replay, open_server: Callable[[str], VllmServer] = opened) -> None:
    async with replaying(replay, open_server) as server:
        await server.join()


def with_settings(**settings: Any) -> Replay:
    replay = Replay(RECORDED[SPANS])
    replay.change("/server_info", lambda answer: {"vllm_config": {**answer["vllm_config"], **settings}})
    return replay


async def test_a_server_that_would_not_be_right_is_refused_with_the_flag_that_it_needs() -> None:
    with pytest.raises(ServerFaultError, match="--max-model-len"):
        await joined(Replay(RECORDED[SPANS]), partial(opened, context=5000))
    with pytest.raises(ServerFaultError, match="--logprobs-mode processed_logprobs"):
        await joined(with_settings(model_config={"logprobs_mode": "raw_logprobs"}))
    # As happened in vLLM: the prefix cache is reset, and the next request finds its prefix in the CPU's memory.
    with pytest.raises(ServerFaultError, match=r"outlive an update.*without --kv-transfer-config"):
        await joined(with_settings(kv_transfer_config={"kv_connector": "OffloadingConnector"}))
    with pytest.raises(ServerFaultError, match="--kv-offloading-size"):
        await joined(with_settings(cache_config={"kv_offloading_size": 4.0}))
    await joined(with_settings(kv_transfer_config=None, cache_config={"kv_offloading_size": None}))
    with pytest.raises(ServerFaultError, match="VLLM_SERVER_DEV_MODE=1"):
        await joined(Replay([each for each in RECORDED[SPANS] if not each["path"].startswith("/server_info")]))


async def test_two_servers_of_a_fleet_with_the_same_seed_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    seeds: dict[str, int] = {}

    async def warnings(seed: int | None) -> int:
        recorded = RECORDED[SPANS][1]["answer"]["vllm_config"]["model_config"]
        caplog.clear()
        replay = with_settings(model_config={**recorded, **({} if seed is None else {"seed": seed})})
        async with replaying(replay, partial(opened, seeds=seeds)) as server:
            await server.join()
            await server.join()
        return sum("start each server with another --seed" in each for each in caplog.messages)

    assert [await warnings(seed) for seed in (0, 1, 0, None)] == [0, 0, 1, 0]


async def test_a_policy_with_tied_embeddings_is_refused_on_a_cpu_alone(tmp_path: Path) -> None:
    async def joined_on(device: str, tied: bool) -> None:
        tiny_model(tie_word_embeddings=tied).save_pretrained(tmp_path)
        config = TrainConfig(model=ModelConfig(path=str(tmp_path)))
        config.actor.max_tokens, config.engine.kind = CONTEXT, "vllm"

        def configured(url: str) -> VllmServer:
            server = open_server(config, url)
            assert isinstance(server, VllmServer)
            return server

        await joined(with_settings(device_config={"device": device}), configured)

    with pytest.raises(ServerFaultError, match="tie_word_embeddings"):
        await joined_on("cpu", tied=True)
    await joined_on("cpu", tied=False)
    await joined_on("cuda", tied=True)


async def test_a_server_that_knows_no_versions_yet_is_asked_for_completions() -> None:
    """vLLM 0.27.1 answers `/inference/v1/generate` without versions; earlier ones do not tell if they flushed."""
    replay = Replay(RECORDED[SILENT])
    older = {"status": 200, "answer": {"choices": [{"index": 0, "token_ids": [5]}]}}
    for each in replay.exchanges:
        each.update(older if each["path"] == ENDPOINTS[SPANS] else {})
    replay.change("/reset_prefix_cache", lambda answer: "")
    async with replaying(replay) as server:
        assert (await live(server))["whole"].finish == "length"
    assert "/v1/completions" in replay.asked


async def test_a_cache_that_was_not_flushed_is_a_fault() -> None:
    replay = Replay(RECORDED[SPANS])
    replay.change("/reset_prefix_cache", lambda answer: {"success": False})
    async with replaying(replay) as server:
        with pytest.raises(ServerFaultError, match="prefixes of older weights"):
            await live(server)


@pytest.mark.parametrize("kind", ENDPOINTS)
async def test_a_restart_is_seen_by_a_check_and_by_a_request_whose_answer_does_not_tell(kind: str) -> None:
    replay = Replay(RECORDED[kind])
    async with replaying(replay) as server:
        await live(server)
        replay.change("/metrics", lambda text: text.replace("time_seconds 1.", "time_seconds 2."))
        with pytest.raises(ServerFaultError, match="was restarted"):
            await (server.check() if kind == SPANS else server.generate("whole", START, Sampling(0.7, 4), (), None))


def answer_of(prompt_logprobs: Any) -> bytes:
    """An answer in the form of vLLM's documentation; it was not recorded from a real server."""
    choice = {"index": 0, "finish_reason": "length", "prompt_logprobs": prompt_logprobs}
    return json.dumps({"choices": [choice]}).encode()


def test_log_probs_of_a_prompt_are_those_of_its_own_tokens() -> None:
    given = [None, *({str(token): {"logprob": -token / 2, "rank": 3}, "5": {"logprob": -0.1}} for token in (8, 9))]
    assert read_logprobs(answer_of(given), [7, 8, 9]).tolist() == [-4.0, -4.5]
    body = logprob_body("policy", [7, 8, 9], "3-me")
    asked = {"prompt": [7, 8, 9], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "cache_salt": "3-me"}
    assert {name: body[name] for name in asked} == asked
    for wrong in (None, given[:2], [None, None, {"9": {"logprob": -1.0}}]):
        with pytest.raises(ServerFaultError, match="not as expected"):
            read_logprobs(answer_of(wrong), [7, 8, 9])
