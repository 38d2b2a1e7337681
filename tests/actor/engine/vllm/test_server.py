"""vLLM's requests and answers, on exchanges written down from its documentation: it was not run here."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from asyncrl.actor.engine.fleet.discovery import listed
from asyncrl.actor.engine.fleet.fleet import Fleet, Rules
from asyncrl.actor.engine.fleet.folders import Folders
from asyncrl.actor.engine.fleet.server import ServerFaultError, Span
from asyncrl.actor.engine.fleet.signal import Signal
from asyncrl.actor.engine.fleet.switch import Switcher
from asyncrl.actor.engine.vllm.requests import completion_body, read_completion
from asyncrl.actor.engine.vllm.server import VllmServer
from asyncrl.types import Sampling
from tests.actor.engine.fleet.fakes import EXPECTED, ids, tensors

ANSWER: dict[str, Any] = {
    "id": "cmpl-r",
    "object": "text_completion",
    "created": 1,
    "model": "policy",
    "choices": [
        {
            "index": 0,
            "text": "hi",
            "logprobs": {
                "text_offset": [0, 1],
                "token_logprobs": [-0.25, -1.5],
                "tokens": ["h", "i"],
                "top_logprobs": [{"h": -0.25}, {"i": -1.5}],
            },
            "finish_reason": "stop",
            "stop_reason": 8,
            "token_ids": [7, 8],
            "prompt_token_ids": [1, 2],
        }
    ],
    "usage": {"prompt_tokens": 2, "total_tokens": 4, "completion_tokens": 2},
}


def choice(**changes: Any) -> dict[str, Any]:
    return {**ANSWER, "choices": [{**ANSWER["choices"][0], **changes}]}


def test_a_request_asks_for_token_ids_and_logprobs_and_overrides_every_default_that_bends_them() -> None:
    body = completion_body("policy", "r", ids(1, 2), Sampling(0.7, 9), (8,), "salt")
    assert body["prompt"] == [1, 2]
    assert (body["temperature"], body["max_tokens"], body["stop_token_ids"]) == (0.7, 9, [8])
    assert (body["top_p"], body["top_k"], body["min_p"], body["repetition_penalty"]) == (1.0, 0, 0.0, 1.0)
    assert body["return_token_ids"] is True
    assert body["logprobs"] == 0
    assert body["cache_salt"] == "salt"


@pytest.mark.parametrize(
    ("answer", "stop", "finish"),
    [
        (ANSWER, (8,), "stop"),
        (ANSWER, (), "cut"),
        (choice(finish_reason="length"), (), "length"),
        (choice(finish_reason="abort"), (), "cut"),
    ],
)
def test_an_answer_becomes_a_segment_under_the_label_that_it_was_asked_under(answer, stop, finish) -> None:
    segment = read_completion(answer, 9, stop, "3-me")
    assert segment.tokens.tolist() == [7, 8]
    assert segment.logprobs.tolist() == [-0.25, -1.5]
    assert segment.spans == (Span("3-me", 0, 2),)
    assert segment.finish == finish


@pytest.mark.parametrize(
    "answer", ["text", {"choices": []}, choice(token_ids=None), choice(logprobs=None), choice(token_ids=[7])]
)
def test_an_answer_that_lacks_what_a_trajectory_needs_is_a_fault(answer) -> None:
    with pytest.raises(ServerFaultError):
        read_completion(answer, 9, (), "3-me")


class FakeVllm:
    """Answers as above, and keeps what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.started = "1.76e+09"

    async def start(self) -> str:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self.runner = web.AppRunner(app, shutdown_timeout=0)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def _answer(self, http: web.Request) -> web.Response:
        path = http.match_info["path"]
        self.calls.append((str(http.rel_url), await http.json() if http.can_read_body else None))
        if path == "metrics":
            return web.Response(text=f"# HELP x\nprocess_start_time_seconds {self.started}\nother 3\n")
        if path == "v1/models":
            return web.json_response({"data": [{"id": "policy", "max_model_len": 100}]})
        return web.json_response(ANSWER if path == "v1/completions" else {})


def test_weights_reach_it_as_a_folder_while_it_is_idle_and_again_after_a_restart(tmp_path: Path) -> None:
    fake, changed = FakeVllm(), Signal()

    async def scenario() -> Any:
        url = await fake.start()
        fleet = Fleet(
            listed([url]),
            lambda url: VllmServer(url, context=64),
            Switcher("retract", True, 1.0, changed),
            changed,
            expected=EXPECTED,
            vocabulary=100,
            rules=Rules(check_s=0.02),
            folders=Folders(tmp_path, lambda folder: None),
        )
        keeper = asyncio.create_task(fleet.keep())
        await fleet.update_weights(3, tensors(3))
        got = await fleet.generate(ids(1, 2), Sampling(1.0, 9), (8,), "s")
        fake.started = "1.77e+09"
        while fleet.stats().counters["server_updates"] < 2:
            await asyncio.sleep(0.01)
        keeper.cancel()
        await fleet.close()
        await fake.runner.cleanup()
        return got

    got = asyncio.run(asyncio.wait_for(scenario(), 20))
    np.testing.assert_array_equal(got.versions, [3, 3])
    assert got.finish_reason == "stop"
    loads = [body for path, body in fake.calls if path == "/collective_rpc"]
    folder = str(tmp_path / "v00000003")
    assert loads == [{"method": "reload_weights", "kwargs": {"weights_path": folder}}] * 2
    paths = [path for path, _ in fake.calls]
    assert paths.index("/collective_rpc") < paths.index("/reset_prefix_cache") < paths.index("/v1/completions")
    assert "/pause?mode=abort&clear_cache=false" in paths
