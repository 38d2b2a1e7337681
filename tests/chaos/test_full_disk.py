"""A run on a small file system that is full: no process ends, and the run goes on once there is room."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.support import ROOT

pytestmark = pytest.mark.slow

MOUNT = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs"]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder on which a namespace of our own may mount a file system."""
    folder = tmp_path / "small"
    folder.mkdir()
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here, so no small file system can be mounted")
    tried = subprocess.run(["unshare", "-Urm", *MOUNT, str(folder)], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no small file system can be mounted here: {tried.stderr.strip()}")
    return folder


def in_namespace(*command: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(
        ["unshare", "-Urm", sys.executable, "-m", *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_whose_disk_is_full_keeps_every_role_and_goes_on_once_there_is_room(small: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    in_namespace("tests.chaos.full_disk", str(small), str(other))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_clients_with_many_requests_deliver_again_soon_after_there_is_room(small: Path) -> None:
    in_namespace("tests.chaos.full_disk_deliveries", str(small), "20")


@pytest.mark.heavy
def test_whatever_a_role_writes_waits_for_room_or_is_counted(small: Path) -> None:
    in_namespace("tests.chaos.full_files", str(small))
