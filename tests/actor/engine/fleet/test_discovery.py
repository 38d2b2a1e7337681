"""Lists of servers that change: what is written half, or is not there for a moment, adds and ends nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncrl.actor.engine.fleet.discovery import behind_router, in_file
from tests.actor.engine.fleet.fakes import FakeSglang, counter, fleet_over, servers_ready, serving, tensors

A, B = "http://a:30000", "http://b:30000"


def looks(path: Path, *texts: str | None) -> list[Sequence[str] | None]:
    """What is discovered by one look at each of the texts; None is a file that is not there."""

    async def scenario() -> list[Sequence[str] | None]:
        discover, found = in_file(path), []
        for text in texts:
            path.unlink(missing_ok=True)
            if text is not None:
                path.write_text(text)
            found.append(await discover())
        return found

    return asyncio.run(scenario())


def test_a_list_counts_once_two_looks_have_found_it(tmp_path: Path) -> None:
    whole = f"# ours\n{A}\n\n  {B}\n"
    assert looks(tmp_path / "urls", whole, whole, whole) == [None, [A, B], [A, B]]


@pytest.mark.parametrize("moment", ["", f"{A}\n", f"{A}\nhttp://b:3000", None])
def test_a_list_that_is_being_written_counts_neither_for_those_who_are_not_in_it_nor_for_half_a_url(
    tmp_path: Path, moment: str | None
) -> None:
    whole = f"{A}\n{B}\n"
    found = looks(tmp_path / "urls", whole, whole, moment, whole, moment, whole, whole)
    assert found == [None, [A, B], None, None, None, None, [A, B]]


def test_a_list_that_stays_empty_is_meant_so(tmp_path: Path) -> None:
    assert looks(tmp_path / "urls", f"{A}\n", f"{A}\n", "", "") == [None, [A], None, []]


async def test_no_server_leaves_while_the_list_is_rewritten_again_and_again(tmp_path: Path) -> None:
    servers, urls = (FakeSglang(), FakeSglang()), tmp_path / "urls"
    async with serving(*servers):
        whole = "".join(f"{server.url}\n" for server in servers)
        urls.write_text(whole)
        looked = asyncio.Event()
        look = in_file(urls)

        async def discover() -> Sequence[str] | None:
            found = await look()
            looked.set()
            return found

        async with fleet_over(discover=discover) as fleet:
            await fleet.update_weights(0, tensors(0))
            await servers_ready(fleet, 2)
            for cut in ["", whole, whole[:10], whole, servers[0].url, whole, "", whole]:
                urls.write_text(cut)
                looked.clear()
                await looked.wait()
            assert counter(fleet, "servers") == 2
    assert all(server.calls.count("freeze_gc") == 1 for server in servers), "each joined once"


@pytest.mark.parametrize("name", ["workers", "list_workers"])
async def test_a_router_that_has_just_started_and_names_its_workers_one_by_one_ends_nobody(name: str) -> None:
    """Older routers know `/list_workers` only."""
    router, named = FakeSglang(), [[], [A], [B, A], [A, B], [], [], [B], [A, B], [A, B]]

    async def workers(body: object) -> object:
        urls = named.pop(0)
        return {"workers": [{"url": url} for url in urls]} if name == "workers" else {"urls": urls}

    router.answers[name] = workers
    async with serving(router):
        discover = behind_router(router.url)
        found = [await discover() for _ in range(len(named))]
    assert found == [None, None, None, [A, B], None, None, None, None, [A, B]]


@pytest.mark.parametrize("answer", [{"workers": [5]}, {"workers": ["url"]}, {"workers": 5}, {}, [], "busy"])
async def test_a_router_that_answers_nonsense_changes_nothing(answer: object) -> None:
    router = FakeSglang()

    async def workers(body: object) -> object:
        return answer

    router.answers["workers"] = workers
    async with serving(router):
        discover = behind_router(router.url)
        assert [await discover() for _ in range(2)] == [None, None]
