"""A file is there whole or not at all: the old text or the new one, whenever its writer is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.machine.files import write_whole
from tests.launch.test_local import make_config

KILLED = """
import os, signal, sys
from dataclasses import asdict
from pathlib import Path
from asyncrl.launch.resume import claim
from tests.launch.test_local import make_config

moment = sys.argv[2]
real = getattr(os, moment)

def kill(*arguments, **options):
    if moment == "write":
        real(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)

if moment == "open":
    def audit(event, arguments):
        if event == "open" and "config.yaml" in str(arguments[0]) and "w" in str(arguments[1]):
            kill()
    sys.addaudithook(audit)
else:
    setattr(os, moment, kill)
config = make_config()
config.learner.steps = 12345
claim(config, Path(sys.argv[1]))
"""


@pytest.mark.parametrize("moment", ["open", "fsync", "replace"])
def test_a_run_whose_supervisor_is_killed_while_it_writes_the_configuration_can_be_resumed(
    tmp_path: Path, moment: str
) -> None:
    from asyncrl.launch.resume import claim

    assert not claim(make_config(), tmp_path)
    before = (tmp_path / "config.yaml").read_text()
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), moment], cwd=Path(__file__).parents[2])
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "config.yaml").read_text() == before
    assert claim(make_config(), tmp_path)


def test_what_is_written_replaces_what_was_there_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "file"
    for text in ("one", "two \u00e9"):
        write_whole(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert list(path.parent.iterdir()) == [path]
