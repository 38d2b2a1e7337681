"""The lines of a figure that add up several files, computed by the page in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dashboard.browser import Browser, browse, needs_chromium
from tests.dashboard.support import dashboard, make_run

pytestmark = [pytest.mark.browser, pytest.mark.slow, needs_chromium]

SUMS = """import(new URL('lines.js', document.baseURI)).then(({ linesOf }) => {
  const files = TIMES.map((time, index) => ({
    file: `actor-${index}`, time, step: time, columns: { tokens_per_s: time.map(() => 1) },
  }));
  const spec = { file: 'actor-*', name: 'tokens_per_s', combine: 'sum' };
  return linesOf(spec, { places: (axis, series) => series.time }, 'time', files)[0].y;
})"""
FAR_S, NEAR_S = 144, 5
"""The distances of the rows that are read of a long file, and of those that are written meanwhile."""


def test_files_add_up_if_their_rows_lie_far_apart_and_those_that_have_ended_do_not(tmp_path: Path) -> None:
    far, near = range(0, 10 * FAR_S, FAR_S), range(10 * FAR_S, 10 * FAR_S + 20 * NEAR_S, NEAR_S)
    goes_on, ends = [*far, *near], [time + 1 for time in far]
    pause = 10**5
    resumed = [*far[:3], *(pause + time for time in range(0, 60, NEAR_S))]
    expected = [
        ([[*far], ends], [1, *[2] * 19]),
        ([goes_on, [time + 1 for time in goes_on]], [1, *[2] * 59]),
        ([[*far], ends[:4]], [1, *[2] * 9, *[1] * 4]),
        ([resumed, ends[:3]], [1, *[2] * 5, *[1] * 12]),
        ([[*near], [near[0] + 1]], [1, 2, *[2] * 6, *[1] * 13]),
    ]

    async def visit(page: Browser) -> None:
        for times, sums in expected:
            assert await page.run(SUMS.replace("TIMES", str(times))) == sums, times

    with dashboard(make_run(tmp_path / "run")) as url:
        browse(url, visit)
