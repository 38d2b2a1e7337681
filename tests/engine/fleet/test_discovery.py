"""Lists of servers that change: a list that is half written, or missing for a moment, changes no server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncrl.engine.fleet.discovery import behind_router, in_file
from tests.engine.fleet.fakes import FakeSglang, serving

A, B = "http://a:30000", "http://b:30000"


WHOLE = f"# ours\n{A}\n\n  {B}\n"


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([WHOLE, WHOLE, WHOLE], [None, [A, B], [A, B]]),
        ([f"{A}\n", f"{A}\n", "", ""], [None, [A], None, []]),
        *(
            ([WHOLE, WHOLE, moment, WHOLE, moment, WHOLE, WHOLE], [None, [A, B], None, None, None, None, [A, B]])
            for moment in ("", f"{A}\n", f"{A}\nhttp://b:3000", None)
        ),
    ],
)
async def test_a_list_counts_once_two_looks_have_found_it_be_it_empty_and_what_is_half_written_does_not(
    tmp_path: Path, texts: list[str | None], expected: list[Sequence[str] | None]
) -> None:
    """None is a file that is not there."""
    path, found = tmp_path / "urls", []
    discover = in_file(path)
    for text in texts:
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        found.append(await discover())
    assert found == expected


async def test_a_list_that_cannot_be_read_is_logged_less_often_than_it_is_looked_for_and_as_no_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    router, looks = FakeSglang(), 20

    async def workers(body: object) -> object:
        return "busy"

    router.answers["workers"] = workers
    async with serving(router):
        for discover in (in_file(tmp_path / "urls"), behind_router(router.url)):
            caplog.clear()
            assert [await discover() for _ in range(looks)] == [None] * looks
            lines = [each.getMessage() for each in caplog.records if each.name == "asyncrl.engine.fleet.discovery"]
            assert 0 < len(lines) < looks
            assert all("no server is added or removed" in line for line in lines)


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
