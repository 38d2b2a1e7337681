"""The page draws a real run: the demo, while it trains and after."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dashboard.browser import Browser, browse, needs_chromium
from tests.dashboard.support import dashboard
from tests.helpers import GENEROUS_S, until

pytestmark = [pytest.mark.browser, pytest.mark.slow, needs_chromium]

ROOT = Path(__file__).parents[2]
STEPS = 5
PREPARATION_S = 1200.0
"""The limit for the preparation of the demo, if none is prepared, on a machine that may have much else to do."""


def test_the_demo_is_drawn_while_it_trains_and_after(tmp_path: Path) -> None:
    words = [f"learner.steps={STEPS}", "learner.eval_every=2", f"run.dir={tmp_path}", "run.name=demo"]
    ports = ["network.replay_port=0", "network.weights_port=0"]
    command = [sys.executable, "-m", "asyncrl", "demo", *words, *ports]
    log, environment = tmp_path / "log", {**os.environ, "PYTHONPATH": str(ROOT)}
    with log.open("w") as output:
        demo = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, env=environment)

    async def visit(page: Browser) -> None:
        state = "document.querySelector('dd.state')?.textContent"
        await page.until(f"{state} === 'running'")
        await page.until("document.querySelector('#figure-reward .legend b')?.textContent > ''")
        assert await page.run(f"{state} === 'running' || document.body.innerText.includes('{STEPS} of {STEPS}')")
        assert "learner" in await page.run("document.querySelector('table').innerText")
        await page.until(f"{state} === 'done' && document.body.innerText.includes('{STEPS} of {STEPS}')")
        await page.run("location.hash = 'tab=figures&show=versions,flow,phases,accuracy'")
        await page.until("document.querySelectorAll('article:not([hidden]) canvas').length >= 3")

    try:
        until(lambda: demo.poll() is not None or (tmp_path / "demo" / "metrics").is_dir(), PREPARATION_S)
        assert demo.poll() is None, log.read_text()
        with dashboard(tmp_path / "demo") as url:
            browse(url, visit)
        assert demo.wait(timeout=GENEROUS_S) == 0, log.read_text()
        assert "asyncrl dashboard" in log.read_text()
    finally:
        if demo.poll() is None:
            demo.send_signal(signal.SIGINT)
            demo.wait(timeout=GENEROUS_S)
