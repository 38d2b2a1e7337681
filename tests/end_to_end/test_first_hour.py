"""The page docs/first_run.md works as it is: its blocks, one after the other, in an empty folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.end_to_end.support import ROOT
from tests.packaging.check_wheel import build, install

pytestmark = pytest.mark.long

PAGE = (ROOT / "docs" / "first_run.md").read_text().partition("\n## After the first run")[0]
BLOCK = re.compile(r"(?:`(\S+)`:\n)?(?:<!--.*?-->\n)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHORT = {
    "asyncrl demo --model-only model": "python quick_model.py",
    "max_turn_tokens: 48": "max_turn_tokens: 8",
    "  steps: 10": "  steps: 2",
    "inspect step runs/first 5": "inspect step runs/first 1",
    "learner.steps=15": "learner.steps=3",
    "checkpoint_every: 5": "checkpoint_every: 1",
    "eval_every: 5": "eval_every: 2",
    "  retention: all": "  retention: all\nnetwork:\n  replay_port: 0\n  weights_port: 0",
}
"""The changes that make the page's run a matter of seconds, for a policy that learns nothing, and give it free
ports."""
QUICK_MODEL = """
from pathlib import Path
from asyncrl.commands.demo.prepare import Effort, make_policy
make_policy(Path("model"), Path(".cache/demo"), 0, print, Effort(2, 2, 4))
"""


def follow(page: str, folder: Path, environment: Mapping[str, str]) -> str:
    """Writes the files of the page into the folder and runs its commands there; returns what they printed."""
    printed = []
    for name, language, text in BLOCK.findall(page):
        if language == "sh":
            command = ["bash", "-e", "-o", "pipefail", "-c", text]
            ended = subprocess.run(
                command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            printed.append(ended.stdout)
            assert ended.returncode == 0, f"{text}{ended.stdout}"
        elif name:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
    return "\n".join(printed)


def environment(commands: Path) -> dict[str, str]:
    """This process's environment with another folder's commands first, and without its way to this checkout."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, "PATH": f"{commands}:{os.environ['PATH']}"}


def test_the_page_of_the_first_run_works_from_top_to_bottom(tmp_path: Path) -> None:
    page = PAGE
    for long, short in SHORT.items():
        assert long in page
        page = page.replace(long, short)
    (tmp_path / "quick_model.py").write_text(QUICK_MODEL)
    here = {**environment(Path(sys.executable).parent), "PYTHONPATH": str(ROOT)}
    follow(page, tmp_path, here)
    assert (tmp_path / "runs/first/checkpoints/step-000003").exists()
    assert (tmp_path / "runs/first/model/model.safetensors").exists()


@pytest.mark.timeout(
    2400
)  # It makes the page's model as a user does, which takes minutes, unless `make demo` has made it.
def test_the_page_of_the_first_run_works_as_it_stands_with_the_installed_wheel(tmp_path: Path) -> None:
    command = install(build(tmp_path), tmp_path / "environment", full=False)
    folder = tmp_path / "empty"
    folder.mkdir()
    if (made := ROOT / ".cache/demo").exists():
        shutil.copytree(made, folder / ".cache/demo")
    printed = follow(PAGE, folder, environment(command.parent))
    # The line that follows the run may show the second evaluation first; the summary has both.
    changes = re.findall(r"held-out accuracy +([\d.]+) -> ([\d.]+)", printed)
    first, last = map(float, changes[0])
    assert last > max(first, 0.8)
