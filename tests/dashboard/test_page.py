"""The page in a real browser: figures, states in the address, keyboard, sizes, colours, hostile text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from asyncrl.observe.sinks import JsonLines, metrics_file
from tests.dashboard.browser import Browser, browse, needs_chromium
from tests.dashboard.support import dashboard, make_run
from tests.runs.support import write_run
from tests.runs.test_table import fine_tuning

pytestmark = [pytest.mark.browser, pytest.mark.slow, needs_chromium]

DRAWN = "document.querySelectorAll('article:not([hidden]) canvas').length"
INKED = """[...document.querySelectorAll('article:not([hidden]) canvas')].every((canvas) =>
  new Uint32Array(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.buffer).some(Boolean))"""
FULL: Mapping[str, Any] = {
    **{"reward/min": 0.0, "reward/max": 1.0, "outcome/mean": 0.5, "lag/0": 3.0, "lag/1": 5.0, "lag/max": 1.0},
    **{"idle": 0.25, "seconds/step": 2.0, "seconds/wait": 0.5, "seconds/train": 1.5, "grad_norm": 1.0},
    **{"updates_skipped": 0.0, "groups/zero_variance": 0.0, "tokens_per_s": 50.0, "mismatch/kl": 0.01},
}


def add_rows(folder: Path, file: str, rows: list[dict[str, Any]]) -> None:
    """More rows of a role, a second apart after those of `make_run`."""
    sink = JsonLines(metrics_file(folder, file), clock=iter(range(1000, 10**9)).__next__)
    for step, row in enumerate(rows):
        sink.log(step, row)
    sink.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = make_run(tmp_path / "one", 30, **FULL)
    add_rows(folder, "actor-0", [{"version": 1.0, "tokens_per_s": 100.0, "idle": 0.1}] * 30)
    add_rows(folder, "replay", [{"accepted": 8 * row, "trained": 6 * row, "depth_ready": 2} for row in range(30)])
    return folder


def test_the_first_look_has_its_numbers_and_figures(run: Path) -> None:
    async def visit(page: Browser) -> None:
        await page.until(f"{DRAWN} >= 2 && {INKED}")
        text = await page.run("document.body.innerText")
        for expected in ("one", "Is it learning?", "30", "elapsed", "a step takes", "2 s", "Roles"):
            assert expected in text
        assert await page.run("location.search") == ""

    with dashboard(run) as url:
        browse(url, visit)


def test_a_run_that_is_resumed_goes_on_in_the_open_page(run: Path) -> None:
    async def visit(page: Browser) -> None:
        state = "document.querySelector('dd.state')?.textContent"
        await page.until(f"{state} === 'stopped'")
        (run / "supervised").write_text('{"host": "another", "pid": 7}')
        await page.until(f"{state} === 'running'")
        (run / "supervised").unlink()
        await page.until(f"{state} === 'stopped'")

    with dashboard(run) as url:
        browse(url, visit)


def test_an_answer_that_fails_once_is_asked_for_again(run: Path) -> None:
    async def visit(page: Browser) -> None:
        await page.until("document.querySelector('dd.state')?.textContent === 'running'")
        await page.run("window.real = fetch; window.asked = 0")
        refused = """Promise.resolve(new Response('{"error": "busy"}', {status: 503}))"""
        of_overview = "String(given[0]).includes('/overview') && asked++ === 0"
        await page.run(f"window.fetch = (...given) => {of_overview} ? {refused} : real(...given); 0")
        await page.until("asked > 1")

    (run / "supervised").write_text('{"host": "another", "pid": 7}')
    with dashboard(run) as url:
        browse(url, visit)


def test_a_run_that_goes_on_comes_first_and_its_time_goes_on_without_new_rows(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "two", 10, **FULL)
    (other / "supervised").write_text('{"host": "another", "pid": 7}')

    async def visit(page: Browser) -> None:
        elapsed = (
            "[...document.querySelectorAll('.facts div')].find((one) => one.innerText.startsWith('elapsed'))?.innerText"
        )
        await page.until("document.querySelector('.overview h2')?.textContent === 'two'")
        first = await page.until(f"({elapsed})?.includes(' d') && ({elapsed})")
        assert "9 s" not in first

    with dashboard(run, other) as url:
        browse(f"{url}#tab=overview", visit)


def test_a_link_opens_the_same_figures_axis_range_and_smoothing(run: Path) -> None:
    async def visit(page: Browser) -> None:
        await page.until(f"{DRAWN} === 2 && {INKED}")
        assert await page.run("document.querySelector('#axis').value") == "samples"
        assert await page.run("document.querySelector('#smooth').value") == "0.5"
        await page.run(
            "document.querySelector('#axis').value = 'tokens', "
            "document.querySelector('#axis').dispatchEvent(new Event('change'))"
        )
        assert "x=tokens" in await page.run("location.hash")
        await page.until(f"{DRAWN} === 2")
        await page.run("history.back()")
        await page.until("document.querySelector('#axis').value === 'samples'")
        titles = await page.run("[...document.querySelectorAll('article:not([hidden]) h3')].map((h) => h.textContent)")
        assert titles == ["Reward", "Lag of trained trajectories trajectories"]

    with dashboard(run) as url:
        browse(f"{url}#tab=figures&show=reward,lag&x=samples&smooth=0.5&range=20..120", visit)


def test_what_is_written_meanwhile_is_drawn(run: Path) -> None:
    async def visit(page: Browser) -> None:
        legend = "document.querySelector('#figure-reward .legend')?.textContent"
        await page.until(f"{legend}?.includes('2.9')")
        learner = JsonLines(metrics_file(run, "learner"))
        learner.log(30, {"reward/mean": 7.25, "lag/3": 4.0})
        await page.until(f"{legend}.includes('7.25')")
        await page.until("document.querySelector('#figure-lag .legend').textContent.includes('lag 3')")
        learner.close()

    with dashboard(run) as url:
        browse(f"{url}#tab=figures&show=reward,lag", visit)


def test_several_runs_are_laid_over_each_other_and_chosen(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "two", 10, **FULL)

    async def visit(page: Browser) -> None:
        legend = "document.querySelector('#figure-reward .legend')?.textContent ?? ''"
        await page.until(f"['one', 'two'].every((each) => ({legend}).includes(each))")
        await page.until("document.querySelectorAll('#figure-lag').length === 2")
        await page.run("document.querySelector('[data-run=two]').click()")
        await page.until(f"!({legend}).includes('two')")
        assert "runs=one" in await page.run("location.hash")

    with dashboard(run, other) as url:
        browse(f"{url}#tab=figures", visit)


def test_several_runs_begin_with_a_table_that_is_filtered_sorted_and_leads_to_a_run(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"lr-{lr}", [lr] * 4, {"learner.lr": lr, "run.seed": 1}) for lr in (0.1, 0.3, 0.2)]
    names = "[...document.querySelectorAll('table.runs tbody .name')].map((each) => each.textContent).join()"

    async def visit(page: Browser) -> None:
        await page.until(f"({names}).split(',').length === 3")
        text = await page.run("document.querySelector('table.runs').innerText")
        for expected in ("stopped", "4 of 4", "25% \u2192 75%", "grpo, ppo", "learner.lr=0.3"):
            assert expected in text
        assert "run.seed" not in text
        await page.run("[...document.querySelectorAll('thead a')].find((a) => a.textContent === 'reward').click()")
        await page.until(f"({names}) === 'lr-0.3,lr-0.2,lr-0.1'")
        await page.run("document.querySelector('[type=search]').value = 'LR=0.2'")
        await page.run("document.querySelector('[type=search]').dispatchEvent(new Event('input'))")
        await page.until(f"({names}) === 'lr-0.2'")
        await page.run("document.querySelector('table.runs input').click()")
        await page.until("location.hash.includes('runs=lr-0.1,lr-0.3')")
        await page.run("document.querySelector('table.runs tbody a').click()")
        await page.until("document.querySelector('.overview h2')?.textContent === 'lr-0.2'")
        assert await page.run("document.querySelectorAll('.overview').length") == 1

    with dashboard(*runs) as url:
        browse(url, visit)


def test_of_many_runs_the_newest_are_drawn_at_first_and_fine_tunings_stand_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"run-{number}", [0.5]) for number in range(9)]
    for number, run in enumerate(runs):
        os.utime(run / "config.yaml", (1000.0 + number, 1000.0 + number))
    runs.append(fine_tuning(tmp_path / "sft", [2.0, 1.0]))

    async def visit(page: Browser) -> None:
        await page.until("document.querySelectorAll('table.runs').length === 2")
        assert "2 \u2192 1" in await page.run("document.querySelectorAll('table.runs')[1].innerText")
        assert await page.run("document.querySelectorAll('table.runs :checked').length") == 6
        await page.run("location.hash = 'tab=overview'")
        await page.until("document.querySelectorAll('.overview').length === 6")
        shown = await page.run("[...document.querySelectorAll('.run')].map((each) => each.dataset.run)")
        assert shown == [f"run-{number}" for number in range(3, 9)]
        assert await page.run("document.querySelector('#runs .all').textContent") == "6 of 10 runs"

    with dashboard(*runs) as url:
        browse(url, visit)


@pytest.mark.parametrize("width", [1280, 390])
def test_the_table_of_hostile_runs_fits_and_is_text(tmp_path: Path, width: int) -> None:
    name = "<img src=x onerror=hit()>\u202e" + "n" * 150
    values = {"model.path": HOSTILE.encode(errors="replace").decode(), "run.seed": 3}
    runs = [write_run(tmp_path / name, [1e9, -1e9], values), write_run(tmp_path / "two", [0.5])]

    async def visit(page: Browser) -> None:
        await page.resize(width, mobile=width < 500)
        await page.until("document.querySelector('table.runs')?.textContent.includes('<script>window.hit')")
        shown = await page.run("document.querySelector('table.runs').textContent")
        assert not {"\u202e", "\x1b", "\x00"} & set(shown)
        assert await page.run("[window.hit ?? null, document.images.length]") == [None, 0]
        assert await page.run("document.documentElement.scrollWidth") <= width
        nameless = "[...document.querySelectorAll('a, button, input')].filter((one) => one.offsetParent && "
        nameless += "!(one.getAttribute('aria-label') || one.textContent.trim() || one.labels?.length)).length"
        assert await page.run(nameless) == 0

    with dashboard(*runs) as url:
        browse(url, visit)


def test_of_several_runs_a_figure_draws_one_line_each_and_others_on_demand(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "two", 10, **FULL)
    legend = "[...document.querySelectorAll('#figure-reward .legend .foreign')].map((each) => each.textContent).join()"

    async def visit(page: Browser) -> None:
        await page.until(f"({legend}) === 'one,two'")
        choose = "document.querySelector('#figure-reward select')"
        options = await page.run(f"[...{choose}.options].map((each) => each.textContent)")
        assert options == ["mean", "largest", "smallest", "all lines"]
        await page.run(f"{choose}.value = 'all', {choose}.dispatchEvent(new Event('change'))")
        await page.until(f"({legend}).split(',').length === 6")
        assert "lines=reward:all" in await page.run("decodeURIComponent(location.hash)")
        await page.run("document.querySelector('[data-run=two]').click()")
        await page.until(f"({legend}) === 'mean,largest,smallest'")
        assert await page.run(f"{choose}.hidden")

    with dashboard(run, other) as url:
        browse(f"{url}#tab=figures", visit)


def test_a_click_on_the_legend_hides_a_line_and_shows_it_again(run: Path) -> None:
    axis = "document.querySelector('#figure-reward canvas').toDataURL()"

    async def visit(page: Browser) -> None:
        await page.until(f"{DRAWN} === 1 && {INKED}")
        before = await page.run(axis)
        await page.run("document.querySelector('#figure-reward .legend button').focus()")
        await page.press("Enter")
        await page.until(f"{axis} !== {before!r}")
        assert await page.run("document.activeElement.getAttribute('aria-pressed')") == "false"
        for place in (1, 2):
            await page.run(f"document.querySelectorAll('#figure-reward .legend button')[{place}].click()")
        assert await page.run("document.querySelectorAll('.legend [aria-pressed=false]').length") == 3
        for place in range(3):
            await page.run(f"document.querySelectorAll('#figure-reward .legend button')[{place}].click()")
        await page.until(f"{axis} === {before!r}")

    with dashboard(run) as url:
        browse(f"{url}#tab=figures&show=reward", visit)


def test_shares_parts_of_the_reward_and_the_time_in_tools_have_figures(run: Path) -> None:
    counters = ("episodes", "truncated", "failed", "tool_calls", "tool_malformed", "tool_unknown", "tool_refused")
    rows = [dict(zip(counters, (20 * n, 5 * n, 2 * n, 50 * n, 4 * n, n, 0), strict=True)) for n in range(30)]
    # A process that starts again counts from 0.
    add_rows(run, "actor-1", [{**row, "tools_s": 1.5} for row in (*rows, *rows[:9])])
    parts = {
        "rule/exact_mean": 0.25,
        "rules_mean": 0.5,
        "environment_mean": 1.0,
        "reward_mean": 9.0,
        "style_mean": 0.75,
    }
    add_rows(run, "scoring-0", [parts] * 30)

    async def visit(page: Browser) -> None:
        for figure, expected in (
            ("truncated", "truncated at a limit 25%failed 10%"),
            ("calls", "malformed or unknown 10%refused by the tool 0%"),
            ("parts", "exact 0.25all rules 0.5environment 1style 0.75"),
            ("tool_time", "tools of an episode 1.5 s"),
        ):
            legend = f"document.querySelector('#figure-{figure} .legend')?.textContent.replaceAll('\u00a0', ' ')"
            await page.run(f"location.hash = 'tab=figures&show={figure}'")
            wanted = expected.replace(" ", "")
            await page.until(f"({legend})?.replaceAll(' ', '') === {wanted!r}")

    with dashboard(run) as url:
        browse(f"{url}#tab=figures", visit)


def test_fine_tunings_have_figures_of_their_own(run: Path, tmp_path: Path) -> None:
    tuning = fine_tuning(tmp_path / "sft", [2.0, 1.0])
    drawn = "[...document.querySelectorAll('section:not([hidden]) article:not([hidden])')]"

    async def visit(page: Browser) -> None:
        await page.until("document.querySelector('#figure-sft-demonstrations:not([hidden])') !== null")
        titles = await page.run("[...document.querySelectorAll('section:not([hidden]) h2')].map((h) => h.textContent)")
        assert titles[0] == "Learning"
        assert titles[-1] == "Fine-tunings \u00b7 Learning"
        jumps = await page.run(
            "[...document.querySelectorAll('.jumps button:not([hidden])')].map((b) => b.textContent)"
        )
        assert jumps == titles
        ids = await page.run(f"{drawn}.map((each) => each.id)")
        assert {each for each in ids if each.startswith("figure-sft-")} == {
            "figure-sft-loss",
            "figure-sft-demonstrations",
        }
        legend = await page.run("document.querySelector('#figure-gradient .legend').textContent")
        assert "sft" not in legend
        await page.run("location.hash = 'tab=overview&runs=sft'")
        await page.until("document.querySelector('.headline')?.textContent === 'loss 2 \u2192 1'")
        assert await page.run("document.querySelectorAll('.warning').length") == 0

    with dashboard(run, tuning) as url:
        browse(f"{url}#tab=figures&runs=one,sft", visit)


def test_a_click_in_a_figure_leads_to_the_episodes_of_that_step(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "two", 10, **FULL)
    place = "document.querySelector('#figure-reward a.episodes:not([hidden])')"
    middle = """(() => { const { left, top, width, height } = document.querySelector('.u-over').getBoundingClientRect();
      return [left + width * 10.2 / 29, top + height / 2] })()"""

    async def visit(page: Browser) -> None:
        await page.until(f"{DRAWN} === 1 && {INKED}")
        assert await page.run(place) is None
        await page.click(*await page.run(middle))
        assert await page.until(f"{place}?.textContent") == "episodes of step 10 of one"
        await page.run(f"{place}.click()")
        await page.until("location.hash.includes('tab=episodes')")
        assert "step=10..10" in await page.run("location.hash")

    with dashboard(run, other) as url:
        browse(f"{url}#tab=figures&show=reward", visit)


def test_any_metric_is_found_by_its_name_and_added(run: Path) -> None:
    async def visit(page: Browser) -> None:
        await page.until(f"{DRAWN} >= 2")
        await page.until(
            "(() => { const box = document.querySelector('#search'); box.focus(); box.value = 'depth ready';"
            " box.dispatchEvent(new Event('input'));"
            " return document.querySelectorAll('#found button').length === 1 })()"
        )
        await page.press("ArrowDown")
        await page.press("Enter")
        await page.until("document.querySelector('h3')?.textContent.startsWith('depth_ready')")
        assert "more=replay:depth_ready" in await page.run("decodeURIComponent(location.hash)")

    with dashboard(run) as url:
        browse(f"{url}#tab=figures", visit)


def test_everything_is_reached_by_the_keyboard_and_says_what_it_is(run: Path) -> None:
    async def visit(page: Browser) -> None:
        await page.until(f"{DRAWN} >= 2")
        seen = []
        for _ in range(24):
            await page.press("Tab")
            seen.append(await page.run("document.activeElement.id || document.activeElement.className"))
        assert seen[0] == "skip"
        assert {"axis", "smooth", "search", "plot"} <= set(seen)
        await page.run("document.querySelector('.plot').focus()")
        await page.press("ArrowLeft")
        await page.until("document.querySelector('.legend .place').textContent.length > 0")
        await page.press("+")
        await page.until("location.hash.includes('range=')")
        await page.press("Escape")
        await page.until("!location.hash.includes('range=')")
        every = "[...document.querySelectorAll('a, button, input, select, [role=img]')]"
        named = "one.getAttribute('aria-label') || one.textContent.trim() || one.labels?.length"
        nameless = f"{every}.filter((one) => one.offsetParent && !({named})).map((one) => one.outerHTML)"
        assert await page.run(nameless) == []

    with dashboard(run) as url:
        browse(f"{url}#tab=figures", visit)


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_fits_wide_and_narrow_windows_light_and_dark(run: Path, width: int) -> None:
    async def visit(page: Browser) -> None:
        await page.resize(width, mobile=width < 500)
        for scheme in ("light", "dark"):
            await page.prefer(scheme)
            for tab in ("overview", "figures"):
                await page.run(f"location.hash = 'tab={tab}'")
                await page.until(f"{DRAWN} >= 2 && {INKED}")
                assert await page.run("document.documentElement.scrollWidth") <= width
                background = await page.run("getComputedStyle(document.body).backgroundColor")
                assert (int(background[4:].split(",")[0]) > 127) is (scheme == "light")

    with dashboard(run) as url:
        browse(url, visit)


HOSTILE = "<script>window.hit = 1</script><img src=x onerror='window.hit = 1'>\u202eevil\x1b[31m\x00 \udcff"


def test_hostile_text_is_shown_as_text(run: Path, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "<img src=x onerror=hit()>\u202e", 5, **{**FULL, f"agent/{HOSTILE}": 1.0})
    add_rows(folder, "replay", [{"failing": HOSTILE + "x" * 10_000_000, "newest_failure": HOSTILE, "depth_dead": 1}])

    async def visit(page: Browser) -> None:
        await page.until(f"{DRAWN} >= 2")
        await page.until("document.querySelector('.warning')?.textContent.includes('<script>window.hit')")
        shown = await page.run("document.querySelector('.warning').textContent")
        assert len(shown) < 5000
        assert not {"\u202e", "\x1b", "\x00"} & set(shown)
        await page.run("location.hash = 'tab=figures'")
        await page.until(
            "(() => { const box = document.querySelector('#search'); box?.focus(); box && (box.value = 'agent');"
            " box?.dispatchEvent(new Event('input')); return document.querySelectorAll('#found button').length })()"
        )
        await page.run("document.querySelector('#found button').click()")
        await page.until("document.querySelector('h3')?.textContent.includes('<script>')")
        assert await page.run("[window.hit ?? null, document.images.length]") == [None, 0]
        name = "getComputedStyle(document.querySelector('.run .foreign')).unicodeBidi"
        assert await page.run(name) == "isolate"

    with dashboard(folder) as url:
        browse(url, visit)


def test_a_page_whose_server_has_ended_says_so(run: Path) -> None:
    async def visit(page: Browser) -> None:
        await page.until(f"{DRAWN} >= 2")
        await page.run("(globalThis.fetch = () => Promise.reject(new TypeError('gone')), 1)")
        await page.until("document.querySelector('#status').textContent.includes('asyncrl dashboard')")

    with dashboard(run) as url:
        browse(url, visit)
