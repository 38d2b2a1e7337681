"""Heavy libraries write nothing of their own into the console and the logs of a run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from asyncrl.config.quiet import NO_BARS, quiet_imports
from tests.helpers import GENEROUS_S


@pytest.mark.slow
def test_transformers_and_the_hub_draw_no_bars() -> None:
    code = (
        "from asyncrl.config.quiet import quiet_imports; quiet_imports()\n"
        "from huggingface_hub.utils import are_progress_bars_disabled\n"
        "from transformers.utils.logging import is_progress_bar_enabled\n"
        "print(are_progress_bars_disabled(), is_progress_bar_enabled())"
    )
    environment = {name: value for name, value in os.environ.items() if name != NO_BARS}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=GENEROUS_S, env=environment, check=True)
    assert ended.stdout.split() == ["True", "False"]


def test_a_user_who_wants_the_bars_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NO_BARS, "0")
    quiet_imports()
    assert os.environ[NO_BARS] == "0"
