"""The fleet over fake servers: what is aborted, retracted, killed or late costs no request and no wrong version."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest

from asyncrl.actor.engine.fleet.discovery import behind_router, in_file
from asyncrl.actor.engine.fleet.fleet import CLOSE_S
from asyncrl.actor.engine.fleet.folders import Folders
from asyncrl.actor.engine.sglang import launch
from asyncrl.actor.engine.sglang.server import SglangServer
from asyncrl.errors import EngineError, WeightsError
from asyncrl.launch.supervisor import STOP_S
from asyncrl.types import Sampling
from asyncrl.weights.folders import versions_in
from tests.actor.engine.fleet.fakes import FakeSglang, assert_true, fleet_over, ids, run, serving, tensors
from tests.helpers import GENEROUS_S, OWN_RUN, async_until

LONG = Sampling(1.0, 300)


def counter(fleet, name):
    return fleet.stats().counters[name]


@pytest.mark.parametrize("version", ["0.5.23", "0.5.17"])
@pytest.mark.parametrize("mode", ["in_place", "retract", "abort", "drain"])
@pytest.mark.parametrize("segment_tokens", [0, 70])
def test_turns_survive_pushes_in_every_mode_and_each_token_has_the_version_that_sampled_it(
    mode, version, segment_tokens
):
    servers = FakeSglang(version), FakeSglang(version)

    async def scenario():
        async with serving(*servers), fleet_over(*servers, mode=mode, segment_tokens=segment_tokens) as fleet:
            await fleet.update_weights(0, tensors(0))
            taken = []

            async def turns(session):
                while not taken or fleet.version < 4:
                    taken.append(await fleet.generate(ids(), LONG, (), session))

            workers = [asyncio.create_task(turns(f"s{i}")) for i in range(8)]
            for push in range(1, 5):
                await async_until(lambda: any(server.running for server in servers))
                await fleet.update_weights(push, tensors(push))
            await asyncio.gather(*workers)
            return taken, fleet.version

    got, served = run(scenario)
    assert served == 4
    assert all(len(each.tokens) == 300 and each.finish_reason == "length" for each in got)
    for each in got:
        assert_true(each)
    assert mode == "drain" or any(len(set(each.versions)) > 1 for each in got)


def test_a_server_without_spans_is_updated_as_by_abort_and_never_flushed_under_requests():
    server = FakeSglang("0.5.17")

    async def scenario():
        async with serving(server), fleet_over(server, mode="retract") as fleet:
            await fleet.update_weights(0, tensors(0))
            call = asyncio.create_task(fleet.generate(ids(), LONG, (), "s"))
            await async_until(lambda: server.running)
            await fleet.update_weights(1, tensors(1))
            await call

    run(scenario)
    assert "pause_generation" not in server.calls
    assert "begin_weight_update" not in server.calls
    assert "abort_request" in server.calls[server.calls.index("generate") :]


def test_a_cut_turn_goes_on_behind_what_it_has_with_the_tokens_that_are_left():
    server = FakeSglang()

    async def scenario():
        async with serving(server), fleet_over(server, mode="abort") as fleet:
            await fleet.update_weights(0, tensors(0))
            call = asyncio.create_task(fleet.generate(ids(7, 8), LONG, (), "s"))
            await async_until(lambda: server.running and len(server.running[0].pairs) > 3)
            await fleet.update_weights(1, tensors(1))
            return await call

    got = run(scenario)
    first, second = server.prompts
    assert first == [7, 8]
    assert second[:2] == [7, 8]
    assert second[2:] == got.tokens[: len(second) - 2].tolist()
    assert len(got.tokens) == 300


def test_a_turn_that_the_server_ends_at_its_own_mark_goes_on_and_ends_at_ours():
    server = FakeSglang(says=lambda count: None)

    async def scenario():
        async with serving(server), fleet_over(server) as fleet:
            await fleet.update_weights(9, tensors(9))
            call = asyncio.create_task(fleet.generate(ids(), Sampling(1.0, 50), (4,), "s"))
            await async_until(lambda: server.running)
            server._end(server.running[0], "stop")
            await async_until(lambda: len(server.prompts) == 2)
            server.says = lambda count: 4
            return await call

    got = run(scenario)
    assert got.finish_reason == "stop"
    assert got.tokens[-1] == 4
    assert 4 not in got.tokens[:-1]


def test_a_server_that_dies_is_missed_by_nobody_and_joins_again_with_a_whole_push():
    servers = FakeSglang(), FakeSglang()

    async def scenario():
        async with serving(*servers), fleet_over(*servers) as fleet:
            await fleet.update_weights(3, tensors(3))
            await async_until(lambda: counter(fleet, "servers_ready") == 2)
            calls = [asyncio.create_task(fleet.generate(ids(), LONG, (), f"s{i}")) for i in range(8)]
            await async_until(lambda: len(servers[0].running) == 4)
            await servers[0].die()
            got = await asyncio.gather(*calls)
            servers[0].restart()
            await servers[0].start(servers[0].port)
            await async_until(lambda: counter(fleet, "servers_ready") == 2)
            return got, dict(fleet.stats().counters)

    got, counters = run(scenario)
    for each in got:
        assert_true(each)
        assert len(each.tokens) == 300
    assert counters["lost_segments"] == 4
    assert counters["server_faults"] == 1
    assert servers[0].weights == 3


def test_a_server_that_was_restarted_between_two_looks_is_not_believed():
    server = FakeSglang()

    async def scenario():
        async with serving(server), fleet_over(server) as fleet:
            await fleet.update_weights(3, tensors(3))
            server.restart()
            return await fleet.generate(ids(), Sampling(1.0, 5), (), "s")

    assert_true(run(scenario))


def test_a_server_that_failed_an_update_gets_no_requests_until_it_has_a_whole_one():
    good, bad = FakeSglang(), FakeSglang()

    async def scenario():
        async with serving(good, bad), fleet_over(good, bad) as fleet:
            await fleet.update_weights(0, tensors(0))
            await async_until(lambda: counter(fleet, "servers_ready") == 2)
            bad.refuses.add("update_weights_from_tensor")
            await fleet.update_weights(1, tensors(1))
            await async_until(lambda: counter(fleet, "server_faults") >= 1)
            asked = len(bad.prompts)
            got = await asyncio.gather(*(fleet.generate(ids(), Sampling(1.0, 5), (), f"s{i}") for i in range(6)))
            assert len(bad.prompts) == asked
            bad.refuses.clear()
            await async_until(lambda: counter(fleet, "servers_ready") == 2)
            return got

    for each in run(scenario):
        assert_true(each)
        assert set(each.versions) == {1}
    assert bad.weights == 1


def test_a_server_that_hangs_in_an_update_holds_nobody():
    good, slow = FakeSglang(), FakeSglang()

    async def scenario():
        async with serving(good, slow), fleet_over(good, slow, limits_s={slow.url: 0.3}) as fleet:
            await fleet.update_weights(0, tensors(0))
            await async_until(lambda: counter(fleet, "servers_ready") == 2)
            slow.hangs.add("update_weights_from_tensor")
            for version in (1, 2, 3):
                await fleet.update_weights(version, tensors(version))
                got = await fleet.generate(ids(), Sampling(1.0, 5), (), "s")
                assert set(got.versions) == {version}
            await async_until(lambda: counter(fleet, "server_faults") >= 1)

    run(scenario)


def test_a_late_joiner_gets_the_newest_weights_before_its_first_request(tmp_path: Path):
    first, late = FakeSglang(), FakeSglang()
    urls = tmp_path / "urls"

    async def scenario():
        async with serving(first, late):
            urls.write_text(f"# servers\n{first.url}/\n")
            async with fleet_over(discover=in_file(urls)) as fleet:
                await fleet.update_weights(0, tensors(0))
                await fleet.update_weights(1, tensors(1))
                urls.write_text(f"{first.url}\n{late.url}\n")
                await async_until(lambda: counter(fleet, "servers_ready") == 2)
                assert not late.prompts
                got = await asyncio.gather(*(fleet.generate(ids(), Sampling(1.0, 5), (), f"s{i}") for i in range(4)))
                assert late.prompts
                call = asyncio.create_task(fleet.generate(ids(), LONG, (), "leaving"))
                await async_until(lambda: first.running or late.running)
                leaver, stayer = (first, late) if first.running else (late, first)
                urls.write_text(f"{stayer.url}\n")
                await async_until(lambda: counter(fleet, "servers") == 1)
                left = len(leaver.prompts)
                urls.unlink()
                await fleet.generate(ids(), Sampling(1.0, 5), (), "leaving too")
                assert len(leaver.prompts) == left
                return [*got, await call]

    for each in run(scenario):
        assert_true(each)
        assert set(each.versions) == {1}


@pytest.mark.parametrize("newer", [True, False])
def test_the_servers_behind_a_router_are_found(newer):
    server, router = FakeSglang(), FakeSglang()

    async def workers(body):
        return {"workers": [{"url": server.url}]} if newer else {"urls": [server.url]}

    setattr(router, "_workers" if newer else "_list_workers", workers)

    async def scenario():
        async with serving(server, router), fleet_over(discover=behind_router(router.url)) as fleet:
            await fleet.update_weights(2, tensors(2))
            return await fleet.generate(ids(), Sampling(1.0, 5), (), "s")

    assert_true(run(scenario))


def test_a_session_stays_with_its_server_and_new_ones_go_where_fewest_are():
    servers = FakeSglang(), FakeSglang()

    async def scenario():
        async with serving(*servers), fleet_over(*servers) as fleet:
            await fleet.update_weights(0, tensors(0))
            await async_until(lambda: counter(fleet, "servers_ready") == 2)
            for turn in range(3):
                for index in range(4):
                    await fleet.generate(ids(index, turn), Sampling(1.0, 2), (), f"s{index}")

    run(scenario)
    homes = [{prompt[0] for prompt in server.prompts} for server in servers]
    assert [len(home) for home in homes] == [2, 2]
    assert not homes[0] & homes[1]


def test_sessions_leave_a_crowded_server_for_one_that_joined_late(tmp_path: Path):
    first, late = FakeSglang(), FakeSglang()
    urls = tmp_path / "urls"

    async def scenario():
        async with serving(first, late):
            urls.write_text(f"{first.url}\n")
            async with fleet_over(discover=in_file(urls)) as fleet:
                await fleet.update_weights(0, tensors(0))
                for turn in range(2):
                    for index in range(20):
                        await fleet.generate(ids(index, turn), Sampling(1.0, 2), (), f"s{index}")
                    urls.write_text(f"{first.url}\n{late.url}\n")
                    await async_until(lambda: counter(fleet, "servers_ready") == 2)

    run(scenario)
    moved = {prompt[0] for prompt in late.prompts}
    assert 5 <= len(moved) <= 10


def test_weights_that_cannot_be_written_are_a_fault_and_written_again(tmp_path: Path):
    server = FakeSglang()
    broken = [True]

    def write_config(folder: Path) -> None:
        if broken.pop() if broken else False:
            raise OSError("no space left")

    async def scenario():
        options = {"transports": ("disk",), "folders": Folders(tmp_path, write_config, OWN_RUN)}
        async with serving(server), fleet_over(server, **options) as fleet:
            await fleet.update_weights(3, tensors(3))
            assert counter(fleet, "server_faults") == 1
            return await fleet.generate(ids(), Sampling(1.0, 5), (), "s")

    assert_true(run(scenario))


def test_weights_go_by_disk_to_a_server_that_takes_no_tensors(tmp_path: Path):
    server = FakeSglang()
    server.refuses.add("update_weights_from_tensor")
    folders = Folders(tmp_path, lambda folder: (folder / "config.json").write_text("{}"), OWN_RUN)

    async def scenario():
        options = {"transports": ("tensor", "disk"), "folders": folders}
        async with serving(server), fleet_over(server, **options) as fleet:
            for version in range(4):
                await fleet.update_weights(version, tensors(version))
            assert sorted(versions_in(folders.directory, OWN_RUN)) == [2, 3]
            assert (folders.path(3) / "config.json").exists()
            return await fleet.generate(ids(), Sampling(1.0, 5), (), "s")

    assert_true(run(scenario))
    assert not folders.directory.exists()


def test_prefixes_are_salted_by_version_where_they_are_not_flushed():
    server = FakeSglang()

    async def scenario():
        async with serving(server), fleet_over(server, mode="in_place") as fleet:
            for version in range(2):
                await fleet.update_weights(version, tensors(version))
                await fleet.generate(ids(), Sampling(1.0, 5), (), "s")

    run(scenario)
    assert "flush_cache" not in server.calls
    assert len(set(server.salts)) == 2


def test_half_an_update_that_another_actor_left_is_ended_at_joining():
    server = FakeSglang()
    server.open = server.paused = True

    async def scenario():
        async with serving(server), fleet_over(server, mode="abort") as fleet:
            await fleet.update_weights(5, tensors(5))
            return await fleet.generate(ids(), Sampling(1.0, 5), (), "s")

    assert_true(run(scenario))


@pytest.mark.parametrize("how", ["release", "cancel"])
def test_a_turn_that_nobody_wants_any_more_ends_on_the_server_too(how):
    server = FakeSglang()

    async def scenario():
        async with serving(server), fleet_over(server) as fleet:
            await fleet.update_weights(0, tensors(0))
            call = asyncio.create_task(fleet.generate(ids(), Sampling(1.0, 100_000), (), "s"))
            await async_until(lambda: server.running)
            if how == "release":
                fleet.release("s")
                assert (await call).finish_reason == "abort"
            else:
                call.cancel()
            await async_until(lambda: not server.running)
            assert fleet.stats().running == 0

    run(scenario)


def test_what_no_server_would_take_is_refused_at_the_door():
    server = FakeSglang()

    async def scenario():
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
                    await fleet.generate(bad, LONG, (), "s")
            server.refuses.add("generate")
            with pytest.raises(EngineError, match="answered 400"):
                await fleet.generate(ids(), LONG, (), "s")
            assert counter(fleet, "server_faults") == 0

    run(scenario)
    assert server.weights == 4


def test_a_turn_fails_after_a_bounded_number_of_faults_and_a_bounded_wait():
    server = FakeSglang()

    async def scenario():
        async with serving(server), fleet_over(server, wait_s=0.2) as fleet:
            with pytest.raises(EngineError, match=r"no server was ready for 0\.2 s"):
                await fleet.generate(ids(), LONG, (), "s")
        async with serving(server), fleet_over(server, attempts=2) as fleet:
            await fleet.update_weights(0, tensors(0))

            async def broken(body):
                return {"output_ids": [1], "meta_info": {}}

            server._generate = broken
            with pytest.raises(EngineError, match=r"2 servers in a row failed.*not as expected"):
                await fleet.generate(ids(), LONG, (), "s")

    run(scenario)


def test_a_server_whose_context_is_too_short_never_joins(caplog):
    server = FakeSglang()
    server.context = 32

    async def scenario():
        async with serving(server), fleet_over(server, wait_s=0.3) as fleet:
            await async_until(lambda: "actor.max_tokens is 64" in caplog.text)
            with pytest.raises(EngineError, match="no server"):
                await fleet.generate(ids(), LONG, (), "s")

    with caplog.at_level("INFO"):
        run(scenario)


def test_a_hung_server_is_lost_and_its_requests_go_elsewhere():
    servers = FakeSglang(), FakeSglang()

    async def scenario():
        async with serving(*servers), fleet_over(*servers, limits_s={servers[0].url: 1.0}) as fleet:
            await fleet.update_weights(0, tensors(0))
            await async_until(lambda: counter(fleet, "servers_ready") == 2)
            servers[0].hangs |= {"generate", "server_info"}
            return await asyncio.gather(*(fleet.generate(ids(), LONG, (), f"s{i}") for i in range(4)))

    for each in run(scenario):
        assert_true(each)


def test_a_fleet_that_is_closed_in_an_update_ends_whatever_its_server_says():
    server = FakeSglang()

    async def scenario():
        async with serving(server):
            async with fleet_over(server) as fleet:
                server.hangs.add("update_weights_from_tensor")
                server.refuses.add("end_weight_update")
                updating = asyncio.create_task(fleet.update_weights(1, tensors(1)))
                await async_until(lambda: "update_weights_from_tensor" in server.calls)
                keepers = list(fleet._keepers.values())
            updating.cancel()
            assert all(keeper.done() for keeper in keepers)

    run(scenario)


def test_a_fleet_parts_with_all_its_servers_at_once(monkeypatch):
    servers, parting, all_parting = (FakeSglang(), FakeSglang(), FakeSglang()), [], asyncio.Event()
    close = SglangServer.close

    async def meeting(self):
        parting.append(self.url)
        if len(parting) == len(servers):
            all_parting.set()
        await all_parting.wait()
        await close(self)

    monkeypatch.setattr(SglangServer, "close", meeting)

    async def scenario():
        async with serving(*servers), fleet_over(*servers) as fleet:
            await fleet.update_weights(1, tensors(1))

    run(scenario)
    assert sorted(parting) == sorted(server.url for server in servers)


def test_a_server_that_will_not_be_parted_from_holds_up_neither_the_end_nor_the_others(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr("asyncrl.actor.engine.fleet.errands.PARTING_S", 0.2)
    good, stuck, closed = FakeSglang(), FakeSglang(), []
    close = SglangServer.close

    async def hang_or_close(self):
        await (asyncio.Event().wait() if self.url == stuck.url else close(self))
        closed.append(self.url)

    monkeypatch.setattr(SglangServer, "close", hang_or_close)
    held = Folders(tmp_path / "held", lambda folder: None, OWN_RUN)

    async def scenario():
        async with serving(good, stuck), fleet_over(stuck, good, transports=("disk",), folders=held) as fleet:
            await fleet.update_weights(1, tensors(1))
            await async_until(lambda: counter(fleet, "servers_ready") == 2)

    run(scenario)
    assert closed == [good.url]
    assert not held.directory.exists()
    assert "1 servers were not parted from" in caplog.text


def test_a_server_that_is_silent_in_the_end_of_an_update_costs_no_more_than_the_limit_and_leaves_no_connection(
    monkeypatch,
):
    for name, seconds in (("PARTING_S", 0.2), ("CUT_S", 0.1)):
        monkeypatch.setattr(f"asyncrl.actor.engine.fleet.errands.{name}", seconds)
    server, forever = FakeSglang(), asyncio.Event()

    async def reset(self):
        await forever.wait()

    async def scenario():
        async with serving(server):
            async with fleet_over(server) as fleet:
                await fleet.update_weights(1, tensors(1))
                server.hangs |= {"update_weights_from_tensor", "end_weight_update"}
                updating = asyncio.create_task(fleet.update_weights(2, tensors(2)))
                await async_until(lambda: server.calls.count("update_weights_from_tensor") == 2)
                monkeypatch.setattr(SglangServer, "_reset", reset)
                [member] = fleet._members.values()
            updating.cancel()
            assert member.server._http._session.closed

    run(scenario)


def test_a_fleet_that_is_closed_while_it_writes_a_version_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr("asyncrl.actor.engine.fleet.fleet.FOLDERS_S", 0.1)
    server, begun, go_on = FakeSglang(), threading.Event(), threading.Event()

    def slowly(folder):
        begun.set()
        go_on.wait(GENEROUS_S)

    async def scenario():
        async with serving(server):
            folders = Folders(tmp_path / "held", slowly, OWN_RUN)
            async with fleet_over(server, transports=("disk",), folders=folders) as fleet:
                updating = asyncio.create_task(fleet.update_weights(1, tensors(1)))
                await async_until(begun.is_set)
            updating.cancel()
            assert folders.directory.exists()
            go_on.set()
            await async_until(lambda: not folders.directory.exists())

    run(scenario)


def test_the_supervisor_waits_longer_than_the_end_of_a_fleet_takes():
    assert STOP_S > CLOSE_S + launch.STOP_S


def test_a_fleet_that_is_closed_parts_with_a_server_that_is_still_leaving_too(monkeypatch):
    stays, leaves, closed = FakeSglang(), FakeSglang(), []
    close = SglangServer.close

    async def note(self):
        closed.append(self.url)
        await close(self)

    monkeypatch.setattr(SglangServer, "close", note)
    servers = [leaves]

    async def discover():
        return [server.url for server in servers]

    async def scenario():
        async with serving(stays, leaves):
            async with fleet_over(discover=discover) as fleet:
                await fleet.update_weights(1, tensors(1))
                turn = asyncio.create_task(fleet.generate(ids(), Sampling(1.0, 10**6), (), "s"))
                await async_until(lambda: leaves.running)
                servers[:] = [stays]
                await async_until(lambda: stays.url in fleet._members and leaves.url not in fleet._members)
                assert not closed
            turn.cancel()

    run(scenario)
    assert sorted(closed) == sorted([stays.url, leaves.url])


def test_a_server_comes_back_however_often_its_updates_have_failed(monkeypatch):
    monkeypatch.setattr("asyncrl.actor.engine.fleet.member.RETRY_S", 0.001)
    server = FakeSglang()
    server.refuses.add("update_weights_from_tensor")

    async def scenario():
        async with serving(server), fleet_over(server) as fleet:
            updating = asyncio.create_task(fleet.update_weights(1, tensors(1)))
            await async_until(lambda: server.calls.count("update_weights_from_tensor") > 1)
            (member,) = fleet._members.values()
            member._failed_updates = 5000
            tried = server.calls.count("update_weights_from_tensor")
            await async_until(lambda: server.calls.count("update_weights_from_tensor") > tried + 1)
            server.refuses.clear()
            await updating

    run(scenario)


def test_a_server_that_joins_is_asked_to_freeze_its_garbage_and_need_not_know_how():
    server = FakeSglang()
    server.refuses.add("freeze_gc")

    async def scenario():
        async with serving(server), fleet_over(server) as fleet:
            await fleet.update_weights(1, tensors(1))

    run(scenario)
    assert server.calls.index("freeze_gc") < server.calls.index("update_weights_from_tensor")
