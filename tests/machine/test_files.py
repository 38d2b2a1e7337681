"""A file is whole or not there: the old text or the new one, whenever its writer is killed."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asyncrl.machine.files import save_tensors, share, write_whole

KILLED = """
import os, signal, sys
from pathlib import Path
from asyncrl.machine.files import write_whole
setattr(os, sys.argv[2], lambda *arguments, **options: os.kill(os.getpid(), signal.SIGKILL))
write_whole(Path(sys.argv[1]), "new")
"""


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_file_whose_writer_is_killed_has_the_old_text(tmp_path: Path, moment: str) -> None:
    write_whole(tmp_path / "file", "old")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "file"), moment], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "file").read_text() == "old"
    write_whole(tmp_path / "file", "again")
    assert (tmp_path / "file").read_text() == "again"


def test_a_new_text_replaces_the_old_one_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "file"
    for text in ("one", "two \u00e9"):
        write_whole(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert list(path.parent.iterdir()) == [path]


def test_tensors_that_cannot_be_written_name_their_file(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "weights.safetensors"
    with pytest.raises(FileNotFoundError) as error:
        save_tensors({"weight": torch.zeros(1)}, path)
    assert error.value.filename == str(path)


@pytest.mark.parametrize(("folder", "file"), [(0o755, 0o644), (0o750, 0o640), (0o700, 0o600), (0o777, 0o644)])
def test_tensors_are_read_by_those_who_may_read_their_folder(folder: int, file: int, tmp_path: Path) -> None:
    tmp_path.chmod(folder)
    save_tensors({"weight": torch.zeros(1)}, tmp_path / "saved")
    (tmp_path / "secret").touch(0o600)
    share(tmp_path / "secret")
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("saved", "secret")] == [file, file]
