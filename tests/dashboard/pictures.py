"""Makes the pictures of the page in docs/ from runs of the demo: `python -m tests.dashboard.pictures RUN...`.

The first run has a picture of each view. If there are more runs, a picture shows the table of all. The picture of an
episode is from a group with different rewards. A picture has 256 colours, which keeps its file small.
"""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from asyncrl.observe.kept.episode import HELD_OUT, KeptRow
from asyncrl.runs.kept import KeptEpisodes
from tests.dashboard.browser import Browser, browser
from tests.dashboard.support import dashboard

DOCS = Path(__file__).parents[2] / "docs"
CANVASES = "[...document.querySelectorAll('article:not([hidden]) canvas')].filter((each) => each.width).length >= 2"
FACTS = "document.querySelector('.choices dd') !== null"
TOKENS = "document.querySelectorAll('.turn.assistant .token').length > 10 && document.querySelector('.member') !== null"
SETTLE_S = 1.0


class Picture(NamedTuple):
    """`view` is the state in the page's address, `shown` an expression that is true once the page shows it, and `act` a
    script to run then."""

    file: str
    view: str
    width: int
    height: int
    scheme: str
    shown: str
    act: str = "0"


TABLE = Picture(
    "dashboard_runs.png", "tab=runs", 1280, 350, "light", "document.querySelectorAll('table.runs tbody tr').length > 1"
)


def pictures(run: Path) -> list[Picture]:
    """The pictures of a run that has kept episodes."""
    episode = chosen_episode(KeptEpisodes(run).rows())
    token = "document.querySelector('.turn.assistant [data-place=\"10\"]')"
    opener = f"document.querySelector('[data-group=\"{episode.step}/{episode.group_id}\"]')"
    return [
        Picture("dashboard.png", "tab=overview", 1280, 960, "light", f"{CANVASES} && {FACTS}"),
        Picture("dashboard_phone.png", "tab=figures", 390, 844, "dark", CANVASES),
        Picture(
            "dashboard_episodes.png",
            f"tab=episodes&step={episode.step - 3}..{episode.step}",
            *(1280, 960, "light", f"{opener} !== null", f"{opener}.click(), document.activeElement.blur()"),
        ),
        Picture(
            "dashboard_episode.png",
            f"tab=episodes&episode={episode.step}/{episode.id}&colour=logprob",
            *(1280, 1240, "light", TOKENS, f"{token}?.click()"),
        ),
    ]


def chosen_episode(rows: Sequence[KeptRow]) -> KeptRow:
    """The worst episode of the newest trained group with more than two different rewards, or else of the newest."""
    groups: dict[tuple[int, str], list[KeptRow]] = defaultdict(list)
    for row in rows:
        if HELD_OUT not in row.flags:
            groups[row.step, row.group_id].append(row)
    rewards = {key: [row.reward for row in members] for key, members in groups.items()}
    key = max(groups, key=lambda key: (len(set(rewards[key])) > 2, key))
    return min(groups[key], key=lambda row: row.reward)


async def take(page: Browser, url: str, picture: Picture, folder: Path) -> None:
    """Open a view, and write its picture into `folder`."""
    await page.resize(picture.width, picture.height, mobile=picture.width < 500)
    await page.prefer(picture.scheme)
    await page.open("about:blank")
    await page.open(f"{url}#{picture.view}")
    await page.until(picture.shown)
    await page.run(f"void ({picture.act})")
    # Figures grow to their sizes, and are drawn again.
    await asyncio.sleep(SETTLE_S)
    path = folder / picture.file
    await page.picture(path)
    Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)


def main(runs: Sequence[Path], folder: Path = DOCS) -> None:
    """Make all pictures of the first run, and that of the table if there are several runs."""

    async def visit(url: str, wanted: Sequence[Picture]) -> None:
        async with browser() as page:
            for picture in wanted:
                await take(page, url, picture, folder)

    with dashboard(runs[0]) as url:
        asyncio.run(visit(url, pictures(runs[0])))
    if len(runs) > 1:
        with dashboard(*runs) as url:
            asyncio.run(visit(url, [TABLE]))


if __name__ == "__main__":
    main([Path(each) for each in sys.argv[1:]])
