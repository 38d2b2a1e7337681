"""The fleet over fake servers: what is aborted, retracted, killed or late costs no request and no wrong version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from asyncrl.engine.fleet.discovery import in_file
from asyncrl.engine.fleet.folders import Folders
from asyncrl.engine.fleet.server import Segment
from asyncrl.engine.sglang.server import SglangServer
from asyncrl.errors import EngineError, WeightsError
from asyncrl.types import Sampling
from tests.engine.fleet.fakes import (
    VOCABULARY,
    FakeSglang,
    assert_true,
    counter,
    fleet_over,
    fleet_with,
    ids,
    sample,
    servers_ready,
    serving,
    tensors,
)
from tests.helpers import OWN_RUN, async_until

pytestmark = pytest.mark.slow

LONG = 300


@pytest.mark.parametrize(
    ("mode", "version"), [("retract", "0.5.23"), ("abort", "0.5.23"), ("retract", "0.5.17"), ("in_place", "0.5.23")]
)
async def test_tokens_that_are_computed_again_after_an_update_are_counted(mode: str, version: str) -> None:
    server = FakeSglang(version)
    async with fleet_with(0, server, mode=mode) as fleet:
        first = await sample(fleet, 5)
        assert counter(fleet, "recomputed_tokens") == 0
        server.hold_until(1)
        call = asyncio.create_task(fleet.generate(ids(1, 2, 3, *first.tokens), Sampling(1.0, LONG), (), "s"))
        await async_until(lambda: server.running)
        await fleet.update_weights(1, tensors(1))
        second = await call
        assert_true(second)
        old = int((second.versions == 0).sum())
        assert counter(fleet, "recomputed_tokens") == (0 if mode == "in_place" else 8 + old)
        # Another turn continues what is cached.
        await fleet.generate(ids(1, 2, 3, *first.tokens, *second.tokens), Sampling(1.0, 5), (), "s")
        assert counter(fleet, "recomputed_tokens") == (0 if mode == "in_place" else 8 + old)
        await fleet.update_weights(2, tensors(2))
        await fleet.generate(ids(1, 2, 3), Sampling(1.0, 5), (), "s")
        again = 0 if mode == "in_place" else 11 + old
        assert counter(fleet, "recomputed_tokens") == again
        fleet.release("s")


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_what_a_server_computes_again_since_it_was_lost_is_counted(mode: str) -> None:
    server = FakeSglang()
    async with fleet_with(0, server, mode=mode) as fleet:
        first = await sample(fleet, 5)
        server.refuses |= {"model_info", "get_model_info"}
        await async_until(lambda: not counter(fleet, "servers_ready"))
        server.refuses.clear()
        await fleet.generate(ids(1, 2, 3, *first.tokens), Sampling(1.0, 2), (), "s")
        assert counter(fleet, "recomputed_tokens") == 3 + 5


async def test_what_a_pause_in_place_takes_from_requests_under_the_overlap_schedule_is_counted_too() -> None:
    """The pause retracts: the prompt stays in the cache, which is not flushed, but the sampled tokens do not."""
    server = FakeSglang()
    server.overlap = True
    async with fleet_with(0, server, mode="in_place") as fleet:
        server.hold_until(1)
        call = asyncio.create_task(sample(fleet, LONG))
        await async_until(lambda: server.running and len(server.running[0].pairs) > 3)
        await fleet.update_weights(1, tensors(1))
        got = await call
        assert_true(got)
        assert counter(fleet, "recomputed_tokens") == int((got.versions == 0).sum()) > 0


async def test_a_cut_turn_goes_on_behind_what_it_has_with_the_tokens_that_are_left() -> None:
    server = FakeSglang()
    async with fleet_with(0, server, mode="abort") as fleet:
        server.hold_until(1)
        call = asyncio.create_task(sample(fleet, LONG))
        await async_until(lambda: server.running and len(server.running[0].pairs) > 3)
        await fleet.update_weights(1, tensors(1))
        got = await call
    first, second = server.prompts
    assert first == ids().tolist()
    assert second == [*first, *got.tokens[: len(second) - len(first)]]
    assert len(got.tokens) == LONG


async def test_a_turn_that_the_server_ends_at_its_own_mark_goes_on_and_ends_at_ours() -> None:
    server = FakeSglang()
    async with fleet_with(9, server) as fleet:
        call = asyncio.create_task(fleet.generate(ids(), Sampling(1.0, 50), (4,), "s"))
        await async_until(lambda: server.running)
        server.finish(server.running[0], "stop")
        await async_until(lambda: len(server.prompts) == 2)
        server.says = lambda count: 4
        got = await call
    assert got.finish_reason == "stop"
    assert got.tokens.tolist().index(4) == len(got.tokens) - 1


async def test_a_server_that_dies_costs_each_turn_a_segment_at_most_and_joins_again_with_a_whole_push() -> None:
    servers = FakeSglang(), FakeSglang()
    segment, turns = 20, 8
    async with fleet_with(3, *servers, settings={"segment_tokens": segment}) as fleet:
        calls = [asyncio.create_task(sample(fleet, LONG, f"s{i}")) for i in range(turns)]
        await async_until(lambda: len(servers[0].running) == 4 and servers[0].sampled > 4 * 5 * segment)
        await servers[0].die()
        taken = await asyncio.gather(*calls)
        servers[0].restart()
        await servers[0].start(servers[0].port)
        await servers_ready(fleet, 2)
        lost, faults = counter(fleet, "lost_segments"), counter(fleet, "server_faults")
    assert_true(*taken)
    assert all(len(each.tokens) == LONG for each in taken)
    assert 0 < lost <= 4
    assert servers[0].sampled + servers[1].sampled - turns * LONG <= lost * segment
    assert faults == 1
    assert servers[0].weights == 3


async def test_a_server_that_was_restarted_between_two_checks_is_not_believed() -> None:
    server = FakeSglang()
    async with fleet_with(3, server, settings={"check_s": 60.0}) as fleet:
        server.restart()
        assert_true(await sample(fleet))


async def test_a_server_that_failed_an_update_gets_no_requests_until_it_has_a_whole_one() -> None:
    good, bad = FakeSglang(), FakeSglang()
    async with fleet_with(0, good, bad) as fleet:
        bad.refuses.add("update_weights_from_disk")
        await fleet.update_weights(1, tensors(1))
        await async_until(lambda: counter(fleet, "server_faults") >= 1)
        taken = await asyncio.gather(*(sample(fleet, 5, f"s{i}") for i in range(6)))
        assert not bad.prompts
        bad.refuses.clear()
        await servers_ready(fleet, 2)
    assert_true(*taken)
    assert all(set(each.versions) == {1} for each in taken)
    assert bad.weights == 1


async def test_a_server_that_hangs_in_an_update_holds_nobody() -> None:
    good, slow = FakeSglang(), FakeSglang()
    async with serving(good, slow), fleet_over(good, slow, limits_s={slow.url: 0.3}) as fleet:
        await fleet.update_weights(0, tensors(0))
        await servers_ready(fleet, 2)
        slow.hangs.add("update_weights_from_disk")
        for version in (1, 2, 3):
            await fleet.update_weights(version, tensors(version))
            assert set((await sample(fleet)).versions) == {version}
        await async_until(lambda: counter(fleet, "server_faults") >= 1)


async def test_each_join_and_each_silence_when_a_server_should_join_is_told_but_no_refusal() -> None:
    server, heard, joins = FakeSglang(), list[tuple[str, bool]](), list[None]()

    class Counting(SglangServer):
        async def join(self) -> None:
            joins.append(None)
            await super().join()

    def hear(url: str, joined: bool) -> None:
        heard.append((url, joined))

    async with serving(server), fleet_over(server, limits_s={server.url: 1.0}, heard=hear, kind=Counting) as fleet:
        await fleet.update_weights(0, tensors(0))
        await async_until(lambda: (server.url, True) in heard)
        server.hangs.add("server_info")
        await async_until(lambda: heard[-2:] == [(server.url, False)] * 2)
        await server.die()
        await async_until(lambda: "Cannot connect" in next(iter(fleet._endpoints.values())).fault)
        told, tried = len(heard), len(joins)
        await async_until(lambda: len(joins) > tried + 2)
        assert len(heard) == told
        server.hangs.clear()
        server.restart()
        await server.start(server.port)
        await servers_ready(fleet, 1)
        assert heard[-1] == (server.url, True)


async def test_a_hung_server_is_lost_and_its_requests_go_elsewhere() -> None:
    hung, good = FakeSglang(), FakeSglang()
    async with serving(hung, good), fleet_over(hung, good, limits_s={hung.url: 1.0}) as fleet:
        await fleet.update_weights(0, tensors(0))
        await servers_ready(fleet, 2)
        hung.hangs |= {"generate", "server_info"}
        assert_true(*await asyncio.gather(*(sample(fleet, LONG, f"s{i}") for i in range(4))))


async def test_a_late_joiner_gets_the_newest_weights_first_and_a_leaver_ends_its_requests(tmp_path: Path) -> None:
    first, late, urls = FakeSglang(), FakeSglang(), tmp_path / "urls"
    async with serving(first, late):
        urls.write_text(f"# servers\n{first.url}/\n")
        async with fleet_over(discover=in_file(urls)) as fleet:
            await fleet.update_weights(0, tensors(0))
            await fleet.update_weights(1, tensors(1))
            urls.write_text(f"{first.url}\n{late.url}\n")
            await servers_ready(fleet, 2)
            assert not late.prompts
            taken = await asyncio.gather(*(sample(fleet, 5, f"s{i}") for i in range(4)))
            assert late.prompts
            call = asyncio.create_task(sample(fleet, LONG, "leaving"))
            await async_until(lambda: first.running or late.running)
            leaver, stayer = (first, late) if first.running else (late, first)
            urls.write_text(f"{stayer.url}\n")
            await async_until(lambda: counter(fleet, "servers") == 1)
            left = len(leaver.prompts)
            urls.unlink()
            await sample(fleet, 5, "leaving too")
            assert len(leaver.prompts) == left
            taken.append(await call)
    assert_true(*taken)
    assert all(set(each.versions) == {1} for each in taken)


async def test_weights_that_cannot_be_written_are_a_fault_and_written_again(tmp_path: Path) -> None:
    broken = [True]

    def write_config(folder: Path) -> None:
        if broken.pop() if broken else False:
            raise OSError("no space left")

    folders = Folders(tmp_path, write_config, OWN_RUN)
    async with fleet_with(3, FakeSglang(), folders=folders) as fleet:
        assert counter(fleet, "server_faults") == 1
        assert_true(await sample(fleet))


async def test_servers_load_folders_of_which_the_newest_stay_until_the_end(tmp_path: Path) -> None:
    server = FakeSglang()
    folders = Folders(tmp_path, lambda folder: (folder / "config.json").write_text("{}"), OWN_RUN)
    async with fleet_with(0, server, folders=folders) as fleet:
        for version in range(1, 4):
            await fleet.update_weights(version, tensors(version))
        assert sorted(path.name for path in folders.directory.iterdir()) == ["v00000002", "v00000003"]
        assert (folders.path(3) / "config.json").exists()
        assert_true(await sample(fleet))
    assert not folders.directory.exists()


async def test_a_joining_server_ends_half_an_update_and_freezes_its_garbage_if_it_knows_how() -> None:
    server = FakeSglang()
    server.open = server.paused = True
    server.refuses.add("freeze_gc")
    async with fleet_with(5, server, mode="abort") as fleet:
        assert_true(await sample(fleet))
    assert server.calls.index("freeze_gc") < server.calls.index("update_weights_from_disk")


@pytest.mark.parametrize("how", ["release", "cancel"])
async def test_a_turn_that_nobody_wants_any_more_ends_on_the_server_too_and_keeps_its_segments(how: str) -> None:
    server = FakeSglang()
    async with fleet_with(1, server, settings={"segment_tokens": 20}) as fleet:
        call = asyncio.create_task(sample(fleet, 100_000))
        await async_until(lambda: len(server.prompts) > 3)
        if how == "release":
            fleet.release("s")
            fleet.release("s")
            got = await call
            assert_true(got)
            assert got.finish_reason == "abort"
            assert len(got.tokens) >= 60
            assert len(got.tokens) % 20 == 0
        else:
            call.cancel()
        await async_until(lambda: not server.running)
        assert fleet.stats().running == 0


async def test_a_session_that_is_released_just_as_its_request_answers_begins_anew_when_it_is_used_again() -> None:
    server, answered = FakeSglang("0.5.17"), list[Callable[[], None]]()

    class Watched(SglangServer):
        async def generate(self, *arguments: Any, **options: Any) -> Segment:
            segment = await super().generate(*arguments, **options)
            while answered:
                answered.pop()()
            return segment

    async with fleet_with(0, server, mode="in_place", kind=Watched) as fleet:
        answered.append(lambda: fleet.release("s"))
        call = asyncio.create_task(sample(fleet, 100_000))
        await async_until(lambda: server.running)
        server.finish(server.running[0], "abort")
        assert (await call).finish_reason == "abort"
        await fleet.update_weights(1, tensors(1))
        assert_true(await sample(fleet))
    assert server.salts[-1] == server.label


async def test_what_no_server_would_take_is_refused_before_it_is_sent() -> None:
    server = FakeSglang()
    async with serving(server), fleet_over(server) as fleet:
        with pytest.raises(WeightsError, match=r"1 misshapen \(v\)"):
            await fleet.update_weights(0, {**tensors(0), "v": np.zeros(3)})
        with pytest.raises(WeightsError, match=r"1 unknown \(z\)"):
            await fleet.update_weights(0, {**tensors(0), "z": tensors(0)["w"]})
        await fleet.update_weights(4, tensors(4))
        with pytest.raises(WeightsError, match="version 4 is not newer than 4"):
            await fleet.update_weights(4, tensors(4))
        for bad in (ids(100), ids(-1), np.zeros(0, np.int32)):
            with pytest.raises(EngineError, match="token"):
                await fleet.generate(bad, Sampling(), (), "s")
        server.refuses.add("generate")
        with pytest.raises(EngineError, match="answered 400"):
            await sample(fleet)
        assert counter(fleet, "server_faults") == 0
    assert server.weights == 4


async def test_a_server_that_passes_every_check_and_fails_every_request_fails_no_turn_beside_another_one() -> None:
    sick, well = FakeSglang(), FakeSglang()

    async def fail(body: Any) -> web.Response:
        return web.Response(status=500)

    async with fleet_with(1, sick, well) as fleet:
        sick.answers["generate"] = fail
        for turn in range(8):
            assert_true(await sample(fleet, 3, f"s{turn}"))
        assert "generate" in sick.calls


SPAN = {"start": 0, "end": 1}


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"output_ids": None}, "not as expected"),
        ({"output_ids": [1, 1]}, "2 tokens have 1 log-probs"),
        ({"output_token_logprobs": []}, "1 tokens have 0 log-probs"),
        ({"weight_versions": []}, "1 tokens have 1 log-probs and the versions"),
        ({"weight_versions": [{"start": 1, "end": 1}]}, "1 tokens have 1 log-probs and the versions"),
        ({"weight_versions": [SPAN, SPAN]}, "1 tokens have 1 log-probs and the versions"),
        ({"output_token_logprobs": [[0.5]]}, "log-probs are not finite, or above 0"),
        ({"output_token_logprobs": [[-1e39]]}, "log-probs are not finite, or above 0"),
        ({"output_ids": [VOCABULARY]}, f"sampled token {VOCABULARY}; the policy has ids up to {VOCABULARY - 1}"),
        ({"weight_versions": [{**SPAN, "version": "0-another"}]}, "not from this fleet"),
    ],
)
async def test_an_answer_that_cannot_be_true_is_a_fault_of_the_server_and_a_turn_fails_after_so_many(
    wrong: dict[str, Any], reason: str
) -> None:
    server = FakeSglang()

    async def broken(body: Any) -> Any:
        changed = {"output_ids": [1], "output_token_logprobs": [[-0.5]], "weight_versions": [SPAN], **wrong}
        spans = [{"version": server.label, **span} for span in changed.pop("weight_versions")]
        meta = {"finish_reason": {"type": "length"}, "weight_version": server.label, "weight_versions": spans}
        return {"output_ids": changed.pop("output_ids"), "meta_info": meta | changed}

    async with fleet_with(0, server, settings={"attempts": 2}) as fleet:
        server.answers["generate"] = broken
        with pytest.raises(EngineError, match="2 requests in a row failed.*" + reason):
            await sample(fleet, 1)
        assert counter(fleet, "lost_segments") == 2
        del server.answers["generate"]
        assert_true(await sample(fleet, 1))


@pytest.mark.parametrize("storage", ["file", None])
async def test_a_server_that_keeps_prefixes_in_a_storage_never_joins(
    caplog: pytest.LogCaptureFixture, storage: str | None
) -> None:
    # As happened in SGLang: a flush leaves the storage, from which prefixes of older weights are read again.
    server = FakeSglang()
    server.more_info = {"enable_hierarchical_cache": True, "hicache_storage_backend": storage}
    with caplog.at_level("INFO"):
        async with serving(server), fleet_over(server) as fleet:
            await async_until(
                lambda: "without --hicache-storage-backend" in caplog.text or server.url + " joined" in caplog.text
            )
            assert (f"{server.url} joined" in caplog.text) is (storage is None)
            assert counter(fleet, "servers") == 1


async def test_a_server_whose_context_is_too_short_never_joins_and_turns_wait_for_a_bounded_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = FakeSglang()
    server.context = 32
    with caplog.at_level("INFO"):
        async with serving(server), fleet_over(server, settings={"wait_s": 0.2}) as fleet:
            await async_until(lambda: "actor.max_tokens is 64" in caplog.text)
            with pytest.raises(EngineError, match=r"no server was ready for 0\.2 s"):
                await sample(fleet)


async def test_a_url_that_is_no_sglang_server_is_named_with_its_answer(caplog: pytest.LogCaptureFixture) -> None:
    server = FakeSglang()

    async def page(body: Any) -> Any:
        return web.Response(text="<html>hello</html>")

    server.answers["server_info"] = page
    async with serving(server), fleet_over(server) as fleet:
        await async_until(lambda: fleet._last_fault())
        assert "is not an SGLang server: /server_info answered '<html>hello</html>'" in fleet._last_fault()
    assert not [record for record in caplog.records if record.exc_info]


async def test_an_unexpected_error_that_stays_the_same_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    server, tries = FakeSglang(), 0

    async def strange(body: Any) -> Any:
        nonlocal tries
        tries += 1
        return {"version": "0.5.23", "json_model_override_args": "no json"}

    server.answers["server_info"] = strange
    async with serving(server), fleet_over(server):
        await async_until(lambda: tries > 3)
    assert len([record for record in caplog.records if record.exc_info]) == 1
