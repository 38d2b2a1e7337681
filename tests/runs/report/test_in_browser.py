"""Reports and comparisons of a run with hostile texts, in a real browser: all is text, and nothing lies on another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from asyncrl.observe.kept.episode import KeptStep
from asyncrl.observe.kept.writing import KeptWriter
from asyncrl.observe.sinks import JsonLines, metrics_file
from asyncrl.replay import protocol
from asyncrl.runs.environment import record_environment
from asyncrl.runs.report.compare import comparison_page
from asyncrl.runs.report.comparison import compare
from asyncrl.runs.report.page import write_report
from asyncrl.runs.report.reported import read_run
from asyncrl.runs.run import Run
from asyncrl.runs.summary_text import write_summary
from tests.dashboard.browser import Browser, browse, needs_chromium
from tests.observe.kept.examples import example_episode, from_utf8, utf8
from tests.runs.inspect.support import make_run as make_store
from tests.runs.support import write_run

pytestmark = [pytest.mark.browser, pytest.mark.slow, needs_chromium]

HOSTILE = (
    "</script><script>ran=1</script><img src=http://127.0.0.2/a onerror=ran=1>\"'><svg onload=ran=1></pre></style>"
    "<style>@import 'http://127.0.0.2/b';*{display:none}</style>{{7*7}}${ran=1}<!--<base href=http://127.0.0.2>"
    "\u202eabc\u2066\x1b[31m\x07\u200b\ufeff&lt;&#60;" + "x" * 300
)
NAME = "<img src=x onerror=ran=1>{{7*7}}\u202e" + "n" * 150
BLOCKS = ("header > *", "nav > *", ".tile > *", "figure > *", ".legend > li", "td, th", ".turn > *")
HOLDERS = "td, th, .tile, .tile *, h1, h2, h3, p, figure, .legend li, summary, .turn"
FAULTS = f"""(() => {{
  const found = [], wide = (each) => each.clientWidth && each.scrollWidth > each.clientWidth + 1;
  const least = (one, two, from, to) => Math.min(one[to], two[to]) - Math.max(one[from], two[from]);
  if (wide(document.documentElement)) found.push('the page is too wide');
  for (const each of document.querySelectorAll({HOLDERS!r})) {{
    if (getComputedStyle(each).display !== 'inline' && wide(each)) found.push(`too small: ${{each.outerHTML}}`);
  }}
  for (const query of {json.dumps(BLOCKS)}) {{
    const shown = [...document.querySelectorAll(query)].map((each) => [each, each.getBoundingClientRect()]);
    shown.filter(([, box]) => box.width).forEach(([one, first], at) => shown.slice(at + 1, at + 20)
      .filter(([two]) => !one.contains(two) && one.closest('table') === two.closest('table'))
      .filter(([, box]) => least(first, box, 'left', 'right') > 1 && least(first, box, 'top', 'bottom') > 1)
      .forEach(([two]) => found.push(`${{one.outerHTML}} lies on ${{two.outerHTML}}`)));
  }}
  for (const text of document.querySelectorAll('figure svg[role=img] text')) {{
    const box = text.ownerSVGElement.getBoundingClientRect(), at = text.getBoundingClientRect();
    if (at.left < box.left - 1 || at.right > box.right + 1) found.push(`cut: ${{text.textContent}}`);
  }}
  return found.map((each) => each.slice(0, 200));
}})()"""


def hostile_run(folder: Path) -> Path:
    """A run whose names, configuration, episodes, failures, hosts and metrics are hostile."""
    values = dict.fromkeys(("model.path", "run.name", "observe.project"), HOSTILE)
    run = write_run(folder, [0.1, -1e9, 123456.789, 0.5], {**values, "data.train": [HOSTILE, HOSTILE]})
    core = make_store(run)
    for number, ticket in enumerate(core.tickets(8)):
        core.ask(protocol.FailEpisode(ticket.id, HOSTILE[number:]))
    for name in ("actor-<svg onload=ran=1>", f"scoring-{NAME}"):
        sink = JsonLines(metrics_file(run, name))
        for step in range(4):
            sink.log(step, {"idle": 0.5, "tokens_per_s": 1e15, "prm_agreement": 0.5})
    JsonLines(metrics_file(run, "evaluation")).log(
        9, {"eval/accuracy": 1.0, f"eval/pass@{HOSTILE.replace('/', '')}": 1}
    )
    record_environment(run)
    file = run / "environment.json"
    odd = {"host": HOSTILE, "cpu": HOSTILE, "gpus": [HOSTILE] * 8, "packages": {HOSTILE: HOSTILE}}
    file.write_text(json.dumps({"starts": [{**json.loads(file.read_text())["starts"][0], **odd}]}))
    write_summary(Run(run), 4, "failed", HOSTILE, HOSTILE)

    def encode(text: str) -> list[int]:
        return utf8(HOSTILE * 100 if text.startswith("tool") else text)

    played = [example_episode(0, 0, member, encode) for member in range(4)]
    KeptWriter(run, 1 << 30).add(
        KeptStep(0, [replace(each, row=structs.replace(each.row, task_id=HOSTILE)) for each in played])
    )
    return run


@pytest.mark.parametrize("width", [1280, 390])
def test_hostile_texts_run_nothing_ask_for_nothing_and_fit(
    tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.runs.report.page.decoder", lambda run: from_utf8)
    run, other = hostile_run(tmp_path / NAME), write_run(tmp_path / "other", [0.3, 0.4])
    pages = [tmp_path / "report.html", tmp_path / "comparison.html"]
    write_report(str(run), pages[0])
    pages[1].write_text(comparison_page(compare([read_run(str(run)), read_run(str(other))])))

    async def visit(page: Browser) -> None:
        await page.resize(width, mobile=width < 500)
        for each in pages:
            if each != pages[0]:
                await page.open(each.as_uri())
            await page.until(f"location.href === {each.as_uri()!r} && document.readyState === 'complete'")
            await page.run("document.querySelectorAll('details').forEach((each) => { each.open = true })")
            assert await page.run("document.body.innerText.includes('{{7*7}}')")
            assert await page.run("typeof ran") == "undefined"
            assert await page.run(FAULTS) == []
        assert set(page.requests) - {"about:blank"} == {each.as_uri() for each in pages}

    browse(pages[0].as_uri(), visit)


@pytest.mark.parametrize("width", [1280, 390])
def test_the_tables_of_a_comparison_are_whole(tmp_path: Path, width: int) -> None:
    rates = [0.5, 0.25, 0.125]
    runs = [write_run(tmp_path / f"demo-with-lr-{lr}", [lr] * 9, {"learner.lr": lr}) for lr in rates]
    page = tmp_path / "comparison.html"
    page.write_text(comparison_page(compare([read_run(str(run)) for run in runs])))
    cut = "[...document.querySelectorAll('.matched .scroll')].map((each) => each.scrollWidth - each.clientWidth)"

    async def visit(browser: Browser) -> None:
        await browser.resize(width, mobile=width < 500)
        await browser.until("document.readyState === 'complete'")
        assert await browser.run(cut) == [0] * 6
        if width == 1280:
            assert await browser.run(cut.replace(".matched ", "")) == [0] * 8

    browse(page.as_uri(), visit)
