"""The pages of kept episodes in a real browser: filter, open, colour, group, keyboard, sizes, hostile text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from asyncrl.commands.demo.tokenizer import build_tokenizer
from asyncrl.observe.kept.episode import KeptStep
from asyncrl.observe.kept.writing import KeptWriter
from asyncrl.types import Role
from tests.dashboard import pictures
from tests.dashboard.browser import Browser, browse, needs_chromium
from tests.dashboard.support import dashboard, make_run
from tests.dashboard.test_episode_page import played
from tests.dashboard.test_episode_routes import make_kept
from tests.observe.kept.examples import example_episode
from tests.runs.support import write_run

pytestmark = [pytest.mark.browser, pytest.mark.slow, needs_chromium]

ROWS = "document.querySelectorAll('table.list tbody tr').length"
TURNS = "document.querySelectorAll('.turn').length"
SUMMARY = "document.querySelector('.summary')?.textContent ?? ''"


def text_of(selector: str) -> str:
    return f"document.querySelector({json.dumps(selector)})?.textContent ?? ''"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_kept(tmp_path_factory.mktemp("runs") / "run")


def type_into(name: str, value: str) -> str:
    """A script that writes into a field of the filters, as a person would."""
    field = f"document.querySelector('[name={name}]')"
    return f"{field}.focus(), {field}.value = {json.dumps(value)}, {field}.dispatchEvent(new Event('input'))"


def test_the_table_is_filtered_sorted_and_leads_to_an_episode(run: Path) -> None:
    async def visit(page: Browser) -> None:
        await page.until(f"{ROWS} === 48")
        await page.run(type_into("reward", "0.5.."))
        await page.until(f"{ROWS} === 24")
        assert "reward=0.5.." in await page.run("location.hash")
        await page.run("document.querySelector('[name=flag]').value = 'best'")
        await page.run("document.querySelector('[name=flag]').dispatchEvent(new Event('change'))")
        await page.until(f"{ROWS} === 4")
        assert await page.run(SUMMARY) == "4 of 48 kept episodes of steps 0 to 3"
        await page.run("[...document.querySelectorAll('thead a')].find((a) => a.textContent === 'lag').click()")
        await page.until("document.querySelector('[aria-sort=descending]')?.textContent.startsWith('lag')")
        await page.run("document.querySelector('tbody a').click()")
        await page.until(f"{TURNS} === 6")
        await page.until(f"({text_of('.around span')}) === '1 of 4'")
        await page.run("history.back()")
        await page.until(f"{ROWS} === 4")

    with dashboard(run) as url:
        browse(f"{url}#tab=episodes&rows=episodes", visit)


def test_a_group_is_one_row_that_opens_to_its_members(run: Path) -> None:
    async def visit(page: Browser) -> None:
        await page.until(f"{ROWS} === 12")
        assert await page.run(SUMMARY) == "48 kept episodes of steps 0 to 3, in 12 groups"
        first = await page.run(text_of("tbody tr"))
        for expected in ("What is 3 + 0?", "\u2192 3", "4 members", "The answer is 3.", "1 truncated"):
            assert expected in first
        await page.run("document.querySelector('.opener').focus()")
        await page.press("Enter")
        await page.until(f"{ROWS} === 16")
        assert await page.run("document.activeElement.getAttribute('aria-expanded')") == "true"
        assert "I added two numbers." in await page.run("document.querySelectorAll('.member-row')[1].textContent")
        await page.run("document.querySelectorAll('.member-row a')[1].click()")
        await page.until(f"({text_of('h2')}).includes('t000000009.1.0')")

    with dashboard(run) as url:
        browse(f"{url}#tab=episodes", visit)


def test_a_search_goes_through_the_text_of_episodes(run: Path) -> None:
    async def visit(page: Browser) -> None:
        await page.until(f"{ROWS} === 12")
        await page.run(type_into("text", "added TWO numbers"))
        await page.until(f"({SUMMARY}) === '12 of 48 kept episodes of steps 0 to 3'")
        assert "1 of 4 members" in await page.run(text_of("tbody tr"))
        await page.run("document.querySelector('.kinds a:last-child').click()")
        await page.until("location.hash.includes('rows=episodes')")
        await page.until("document.querySelectorAll('tbody a.id').length === 12")

    with dashboard(run) as url:
        browse(f"{url}#tab=episodes", visit)


def test_hostile_tasks_and_answers_in_the_list_are_shown_as_text(tmp_path: Path) -> None:
    run = make_kept(tmp_path / "run")
    hostile = "<script>window.hit = 1</script><img src=x onerror='window.hit = 1'>\u202eevil\x1b[31m\x00"
    tokenizer = build_tokenizer()

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text if text.startswith("user") else hostile))

    episodes = [example_episode(9, 0, member, encode) for member in range(4)]
    tasks = [
        replace(each.task, messages=[{"role": "user", "content": hostile}], ground_truth=hostile)
        for each in episodes
        if each.task
    ]
    KeptWriter(run, 1 << 30).add(
        KeptStep(9, [replace(each, task=task) for each, task in zip(episodes, tasks, strict=True)])
    )

    async def visit(page: Browser) -> None:
        await page.until(f"({text_of('tbody tr')}).includes('<script>window.hit')")
        await page.run("document.querySelector('.opener').click()")
        await page.until("document.querySelectorAll('.member-row').length === 4")
        shown = await page.run("document.querySelector('table.list').textContent")
        assert shown.count("<img src=x") >= 6
        assert {"\x1b", "\x00", "\u202e"}.isdisjoint(shown)
        assert await page.run("[window.hit ?? null, document.images.length]") == [None, 0]
        assert await page.run("getComputedStyle(document.querySelector('th.texts')).unicodeBidi") == "isolate"

    with dashboard(run) as url:
        browse(f"{url}#tab=episodes&step=9", visit)


def test_a_filter_that_makes_no_sense_says_what_to_write(run: Path) -> None:
    async def visit(page: Browser) -> None:
        await page.until(f"({SUMMARY}).includes('write 3, 3..9, 3.. or ..9')")
        await page.run("document.querySelector('.clear').click()")
        await page.until(f"{ROWS} === 12")

    with dashboard(run) as url:
        browse(f"{url}#tab=episodes&lag=many", lambda page: refusing(page, visit))


async def refusing(page: Browser, visit: Any) -> None:
    """Visit a page whose first request is refused on purpose, which the console tells."""
    await visit(page)
    page.errors[:] = [error for error in page.errors if "400" not in error and "503" not in error]


COLOUR = "getComputedStyle(document.querySelector('.turn.assistant .token')).backgroundColor"


def test_tokens_are_coloured_by_what_is_chosen_and_the_address_keeps_it(run: Path) -> None:
    async def visit(page: Browser) -> None:
        await page.until(f"{TURNS} === 4")
        colours = []
        for name in ("sampled", "logprob", "advantage", "weight", "version", "score", "none"):
            await page.run(f"document.querySelector('input[value={name}]').click()")
            await page.until(f"(new URLSearchParams(location.hash.slice(1)).get('colour') ?? 'sampled') === '{name}'")
            colours.append(await page.run(COLOUR))
            assert await page.run(text_of(".meaning"))
        assert len(set(colours)) >= 6
        assert colours[-1] == "rgba(0, 0, 0, 0)"
        given = "getComputedStyle(document.querySelector('.turn.prompt .token')).backgroundColor"
        assert await page.run(given) == "rgba(0, 0, 0, 0)"

    with dashboard(run) as url:
        browse(f"{url}#tab=episodes&episode=3/t000000009.0.0", visit)


def test_a_token_tells_its_values_to_the_mouse_and_to_the_keyboard(run: Path) -> None:
    async def visit(page: Browser) -> None:
        await page.until(f"{TURNS} === 4")
        move = "new MouseEvent('mouseover', {bubbles: true})"
        await page.run(f"document.querySelectorAll('.turn.assistant .token')[2].dispatchEvent({move})")
        await page.until(f"({text_of('.inspector')}).includes('importance weight')")
        await page.run("document.querySelector('.turn.assistant .tokens').focus()")
        await page.press("ArrowRight")
        await page.press("ArrowRight")
        await page.until(f"({text_of('.inspector .values')}).includes('log-prob')")
        assert await page.run("document.querySelector('.token.current').dataset.place") == "1"
        await page.press("Escape")
        await page.until("!document.querySelector('.token.current')")

    with dashboard(run) as url:
        browse(f"{url}#tab=episodes&episode=3/t000000009.0.0", visit)


def test_members_of_the_group_stand_side_by_side_and_are_switched(run: Path) -> None:
    async def visit(page: Browser) -> None:
        await page.until("document.querySelectorAll('.member').length === 4")
        assert await page.run(text_of(".member.chosen")) != ""
        assert "member 3 differs from here on" in await page.run(text_of(".conversation"))
        await page.run("document.querySelectorAll('.member')[1].click()")
        await page.until(f"({text_of('h2')}).includes('t000000009.1.0')")
        assert await page.run("document.querySelectorAll('.branch').length") == 2
        assert "its first 6 tokens are as in branch 0" in await page.run(
            text_of(".branch-rule:not(:empty) ~ *, .conversation")
        )
        await page.run("document.querySelectorAll('.branch')[1].click()")
        await page.until("document.querySelector('.token.current') !== null")
        await page.run("document.querySelector('.step-score').click()")
        await page.until("document.querySelector('.turn.assistant .token.current') !== null")

    with dashboard(run) as url:
        browse(f"{url}#tab=episodes&episode=3/t000000009.0.0", visit)


def test_hostile_text_is_shown_as_text_with_marks_for_what_cannot_be_seen(run: Path) -> None:
    async def visit(page: Browser) -> None:
        await page.until(f"{TURNS} === 4")
        shown = await page.run(text_of(".turn.tool .tokens"))
        assert "<script>alert(1)</script>" in shown
        assert "\u27e8ESC\u27e9[31mred" in shown
        assert {"\x1b", "\x00", "\u202e", "\u202c"}.isdisjoint(shown)
        assert await page.run("document.scripts.length") == await page.run(
            "document.head.querySelectorAll('script').length"
        )

    with dashboard(run) as url:
        browse(f"{url}#tab=episodes&episode=3/t000000009.3.0", visit)


def test_a_huge_turn_is_folded_and_comes_as_it_is_asked_for(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    episode = played([(Role.PROMPT, "ask"), (Role.ASSISTANT, "I search."), (Role.TOOL, "x" * 300_000)])
    KeptWriter(run, 1 << 30).add(KeptStep(episode.row.step, [episode]))
    tokens = "document.querySelectorAll('.turn.tool .token').length"

    async def visit(page: Browser) -> None:
        await page.until(f"{TURNS} === 3")
        assert await page.run(tokens) == 1200
        await page.run("document.querySelector('.turn.tool .turn-foot button').click()")
        assert "298,800 tokens not shown" in await page.run(text_of(".turn.tool .turn-foot"))
        await page.run("document.querySelectorAll('.turn.tool .turn-foot button')[1].click()")
        await page.until(f"{tokens} === 2400")
        assert "token ids instead of text" in (await page.run(text_of(".problem"))).lower()

    with dashboard(run) as url:
        browse(f"{url}#tab=episodes&episode={episode.row.step}/{episode.row.id}", visit)


def test_dead_letters_of_a_run_without_a_store_say_why_there_are_none(run: Path) -> None:
    async def visit(page: Browser) -> None:
        await page.until("document.querySelector('.dead-letters .hint')?.textContent.includes('store')")

    with dashboard(run) as url:
        browse(f"{url}#tab=episodes&view=dead", lambda page: refusing(page, visit))


@pytest.mark.parametrize("width", [1280, 390])
def test_the_pages_fit_the_window_and_are_reached_by_the_keyboard(run: Path, width: int) -> None:
    async def visit(page: Browser) -> None:
        await page.resize(width, mobile=width < 500)
        await page.until(f"{ROWS} === 48")
        assert await page.run("document.documentElement.scrollWidth") <= width
        await page.run("document.querySelector('.filters input').focus()")
        for _ in range(60):
            await page.press("Tab")
            if await page.run("document.activeElement.matches('tbody a')"):
                break
        await page.press("Enter")
        await page.until(f"{TURNS} >= 4")
        assert await page.run("document.documentElement.scrollWidth") <= width
        await page.run("document.querySelector('.turn.assistant .token').click()")
        await page.until("document.querySelector('.inspector .values') !== null")
        assert await page.run("document.documentElement.scrollWidth") <= width

    with dashboard(run) as url:
        browse(f"{url}#tab=episodes&rows=episodes", visit)


def test_the_pictures_of_the_docs_can_be_made(tmp_path: Path) -> None:
    folder = write_run(make_kept(tmp_path / "run"), [0.5] * 4)
    pictures.main([folder], tmp_path)
    sizes = {path.name: Image.open(path).size for path in tmp_path.glob("*.png")}
    assert sizes == {each.file: (each.width, each.height) for each in pictures.pictures(folder)}
