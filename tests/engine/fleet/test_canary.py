"""A server serves no version whose canary it does not repeat; the others and its requests go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from asyncrl.engine.fleet.folders import Folders
from asyncrl.engine.fleet.server import ServerFaultError
from asyncrl.engine.sglang.requests import read_logprobs
from asyncrl.errors import EngineError, WeightsError
from asyncrl.types import Sampling
from asyncrl.weights.canary import Canary, CanaryCheck, CanaryError
from asyncrl.weights.folders import read_folder, write_folder
from tests.engine.fleet.fakes import (
    STEP_S,
    FakeSglang,
    assert_true,
    canary_check,
    canary_logprobs,
    counter,
    fleet_over,
    fleet_with,
    ids,
    run,
    sample,
    servers_ready,
    serving,
    tensors,
)
from tests.helpers import OWN_RUN, async_until

pytestmark = pytest.mark.slow


class KeepsOldWeights(FakeSglang):
    """Takes updates, says so, and goes on with the weights that it has, as long as `stale`."""

    stale = False

    async def _update_weights_from_disk(self, body: Any) -> Any:
        old = self.weights
        answer = await super()._update_weights_from_disk(body)
        if self.stale:
            self.weights = old
        return answer


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort", "drain"])
@pytest.mark.parametrize("version", ["0.5.23", "0.5.17"])
def test_versions_that_are_what_they_say_are_served_in_every_mode(mode: str, version: str) -> None:
    async def scenario() -> None:
        server = FakeSglang(version)
        async with serving(server), fleet_over(server, mode=mode) as fleet:
            await fleet.update_weights(0, tensors(0), canary_check(0))
            working = [asyncio.create_task(sample(fleet, 200, f"s{index}")) for index in range(4)]
            for push in (1, 2, 3):
                await fleet.update_weights(push, tensors(push), canary_check(push))
                await async_until(lambda start=server.sampled: server.sampled > start + 20 or not server.running)
            assert_true(*await asyncio.gather(*working))
            assert counter(fleet, "server_updates") == 4
            assert counter(fleet, "server_faults") == counter(fleet, "canary_failures") == 0
            assert counter(fleet, "canary_difference") == 0 < counter(fleet, "canary_allowed")

    run(scenario)


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
def test_a_server_that_keeps_its_old_weights_serves_nothing_of_the_version_and_the_other_takes_its_requests(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Tokens show which weights really sampled them: none of a stale server has the new version's label."""

    async def scenario() -> None:
        bad, good = KeepsOldWeights(), FakeSglang()
        async with serving(bad, good), fleet_over(bad, good, mode=mode) as fleet:
            await fleet.update_weights(1, tensors(1), canary_check(1))
            await servers_ready(fleet, 2)
            working = [asyncio.create_task(sample(fleet, 300, f"s{index}")) for index in range(6)]
            await async_until(lambda: bad.running and good.running)
            bad.stale = True
            await fleet.update_weights(2, tensors(2), canary_check(2))
            await async_until(lambda: counter(fleet, "canary_failures") > 1)
            assert_true(*await asyncio.gather(*working))
            assert_true(await sample(fleet, 5, "later"))
            assert counter(fleet, "servers_ready") == 1
            bad.stale = False
            await servers_ready(fleet, 2)
            assert_true(*await asyncio.gather(*(sample(fleet, 5, f"t{index}") for index in range(4))))

    run(scenario)
    [lost, *_] = [record.getMessage() for record in caplog.records if "is lost" in record.getMessage()]
    assert "version 2, received by zmq, fails its canary in http" in lost
    assert "(loaded by disk)" in lost
    assert "differ from the learner's by 1 on average" in lost


@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_what_a_server_answers_before_the_verdict_waits_for_it(mode: str) -> None:
    """The server goes on with its requests, or gets those that were cut, while it answers the canary. They end at once,
    under weights that fail."""

    async def scenario() -> None:
        bad, good = KeepsOldWeights(), FakeSglang()
        asked, go_on = asyncio.Event(), asyncio.Event()

        async def slow(tokens: list[int], start: int) -> Any:
            if bad.stale:
                asked.set()
                await go_on.wait()
            return await FakeSglang._logprobs(bad, tokens, start)

        bad._logprobs = slow  # type: ignore[method-assign]
        async with serving(bad, good), fleet_over(bad, good, mode=mode) as fleet:
            await fleet.update_weights(1, tensors(1), canary_check(1))
            await servers_ready(fleet, 2)
            working = [asyncio.create_task(sample(fleet, 60, f"s{index}")) for index in range(4)]
            await async_until(lambda: bad.running and good.running)
            bad.stale = True
            bad.holds = lambda _: not asked.is_set()
            updating = asyncio.create_task(fleet.update_weights(2, tensors(2), canary_check(2)))
            await asked.wait()
            sampled = bad.sampled
            await async_until(lambda: bad.sampled > sampled and not bad.running)
            await asyncio.sleep(5 * STEP_S)
            go_on.set()
            await updating
            assert_true(*await asyncio.gather(*working))
            assert counter(fleet, "lost_segments") > 0

    run(scenario)


def test_a_version_that_no_server_passes_ends_its_update_and_a_newer_one_or_itself_may_follow() -> None:
    async def scenario() -> None:
        servers = [KeepsOldWeights(), KeepsOldWeights()]
        async with serving(*servers), fleet_over(*servers, settings={"wait_s": 0.5}) as fleet:
            await fleet.update_weights(1, tensors(1), canary_check(1))
            await servers_ready(fleet, 2)
            for server in servers:
                server.stale = True
            for _ in range(2):
                before = counter(fleet, "canary_failures")
                with pytest.raises(CanaryError, match=r"no server is left .* version 3, received by zmq"):
                    await fleet.update_weights(3, tensors(3), canary_check(3))
                assert counter(fleet, "canary_failures") > before
            with pytest.raises(EngineError, match=r"no server was ready .* version 3, received by zmq"):
                await sample(fleet)
            assert fleet.version == 1
            with pytest.raises(CanaryError):
                await fleet.update_weights(4, tensors(4), canary_check(4))
            servers[0].stale = False
            while fleet.version < 4:
                # The stale server may be asked alone, while the other one is still on its way back.
                with suppress(CanaryError):
                    await fleet.update_weights(4, tensors(4), canary_check(4))
            assert_true(await sample(fleet))
            with pytest.raises(WeightsError, match="is not newer than 4"):
                await fleet.update_weights(4, tensors(4), canary_check(4))

    run(scenario)


@pytest.mark.parametrize(
    ("answer", "advised"),
    [
        (lambda: web.json_response({"message": "no log-probs of prompts"}, status=400), True),
        (lambda: web.Response(status=500), False),
        (lambda: {"output_ids": [], "meta_info": {"input_token_logprobs": [[-1.0, 8, None]]}}, False),
        (lambda: {"output_ids": [], "meta_info": {}}, False),
    ],
)
def test_a_late_joiner_is_checked_and_only_one_that_refuses_the_canary_says_how_to_do_without(
    answer: Callable[[], Any], advised: bool
) -> None:
    """One that crashed, or gave too few log-probs, may have wrong weights."""

    async def scenario() -> None:
        first, late = FakeSglang(), FakeSglang()

        async def refused(tokens: list[int], start: int) -> Any:
            return answer()

        late._logprobs = refused  # type: ignore[method-assign]
        urls: list[str] = []

        async def discover() -> list[str]:
            return list(urls)

        async with serving(first, late), fleet_over(first, discover=discover) as fleet:
            urls.append(first.url)
            await fleet.update_weights(1, tensors(1), canary_check(1))
            urls.append(late.url)
            await async_until(lambda: counter(fleet, "canary_failures") > 0)
            fault = next(each.fault for each in fleet._endpoints.values() if each.fault)
            assert "did not answer the canary" in fault
            assert ("weights.canary=false turns the canary off" in fault) == advised
            del late._logprobs
            await servers_ready(fleet, 2)

    run(scenario)


@pytest.mark.parametrize("links", [True, False])
def test_good_weights_of_another_route_replace_those_that_all_servers_refused(tmp_path: Path, links: bool) -> None:
    """The first ones come as a folder of the learner, or as tensors that the actor writes to a folder."""

    async def scenario() -> None:
        server, folders = FakeSglang(), Folders(tmp_path / "held", lambda folder: None, OWN_RUN)
        path = write_folder(tmp_path / "pushed", 2, tensors(7), lambda folder: None)
        async with serving(server), fleet_over(server, folders=folders) as fleet:
            await fleet.update_weights(1, tensors(1), canary_check(1))
            with pytest.raises(CanaryError):
                await fleet.update_weights(2, read_folder(path, 2) if links else tensors(7), canary_check(2))
            while fleet.version < 2:
                # The server may be loading the first ones again when the second ones arrive.
                with suppress(CanaryError):
                    await fleet.update_weights(2, tensors(2), canary_check(2))
            assert_true(await sample(fleet))

    run(scenario)


class Full(FakeSglang):
    """A server whose places are all taken: the canary waits for the end of all requests."""

    async def _logprobs(self, tokens: list[int], start: int) -> Any:
        while self.running:
            await asyncio.sleep(STEP_S)
        return await super()._logprobs(tokens, start)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_canary_that_waits_in_the_queue_of_a_full_server_cuts_its_turns_and_loses_none(mode: str) -> None:
    async def scenario() -> None:
        server = Full()
        async with serving(server), fleet_over(server, mode=mode, settings={"canary_s": 0.05}) as fleet:
            await fleet.update_weights(1, tensors(1), canary_check(1))
            server.holds = lambda request: request.limit == 200
            working = asyncio.create_task(sample(fleet, 200))
            await async_until(lambda: server.running)
            await fleet.update_weights(2, tensors(2), canary_check(2))
            assert_true(await working)
            assert counter(fleet, "cut_segments") > 0
            assert counter(fleet, "lost_segments") == counter(fleet, "server_faults") == 0

    run(scenario)


def test_a_server_that_never_answers_its_canary_is_lost_and_the_version_is_not_blamed() -> None:
    async def scenario() -> None:
        server = FakeSglang()
        async with serving(server), fleet_over(server, limits_s={server.url: 0.3}) as fleet:
            server.hangs.add("generate")
            updating = asyncio.create_task(fleet.update_weights(1, tensors(1), canary_check(1)))
            await async_until(lambda: "did not answer the canary of version 1: http" in fleet._last_fault())
            assert counter(fleet, "canary_failures") == 0
            server.hangs.clear()
            await updating

    run(scenario)


def test_ids_that_would_kill_a_server_are_not_sent() -> None:
    async def scenario() -> None:
        async with fleet_with(1, FakeSglang()) as fleet:
            check = CanaryCheck(2, Canary((1, 100), (-1.0,), "float32"), "zmq")
            with pytest.raises(WeightsError, match="must load the same model"):
                await fleet.update_weights(2, tensors(2), check)
            got = await fleet.generate(ids(), Sampling(1.0, 3), (), "s")
            assert_true(got)

    run(scenario)


def test_log_probs_of_a_prompt_are_read_with_and_without_the_first_token_and_must_be_of_its_tokens() -> None:
    tokens = [7, 8, 9]
    later = [[logprob, token, None] for token, logprob in zip(tokens[1:], canary_logprobs(tokens, 1), strict=True)]

    def answer(pairs: Any) -> bytes:
        return str({"meta_info": {"input_token_logprobs": pairs}}).replace("'", '"').replace("None", "null").encode()

    for pairs in ([[None, 7, None], *later], later):
        assert read_logprobs(answer(pairs), tokens).tolist() == canary_logprobs(tokens, 1)
    for wrong in ([], later[:1], [[-1.0, 8, None], [-1.0, 10, None]]):
        with pytest.raises(ServerFaultError, match="other tokens"):
            read_logprobs(answer(wrong), tokens)
    with pytest.raises(ServerFaultError, match="not as expected"):
        read_logprobs(b"{}", tokens)
