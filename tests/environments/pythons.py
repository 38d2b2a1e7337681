"""Pythons with packages whose pins conflict with ours, or which are too large for everybody's environment.

Each is a virtual environment in `.cache/environments/`, made when a test first needs it and kept. It is made again if
its requirements have changed. `make clean` removes it.
"""

from __future__ import annotations

import fcntl
import shutil
import site
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".cache" / "environments"
INSTALL_S = 240
"""The limit for the installation of one environment: the largest takes 50 s on a quiet machine."""
REASON_LINES = 3


class NotInstalledError(Exception):
    """The packages could not be installed; the message says why."""


@dataclass(frozen=True, slots=True)
class Packages:
    """The packages that pip installs. With `beside_ours` our own are found after these, so asyncrl can be imported."""

    requirements: Sequence[str]
    beside_ours: bool = False


PACKAGES = {
    "verifiers-0.4": Packages(("verifiers==0.4.0",)),
    "verifiers-0.3": Packages(("verifiers==0.3.1",)),
    "openenv": Packages(("openenv==0.10.0",)),
    "textarena": Packages(("textarena==0.7.4",)),
    "notebook": Packages(("ipykernel==7.4.0",), beside_ours=True),
    "gem": Packages(("gem-llm==0.1.0",)),
}


@cache
def reason_or_python(name: str) -> str | Path:
    """The Python with the packages `name`, or why there is none: a process tries once."""
    try:
        return install(PACKAGES[name], FOLDER / name)
    except NotInstalledError as error:
        return str(error)


def install(packages: Packages, folder: Path, limit_s: float = INSTALL_S) -> Path:
    """The Python of a virtual environment in `folder` with these packages. One process makes it, others wait.

    Raises NotInstalledError.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    python, stamp = folder / "bin" / "python", folder / "installed"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (stamp.exists() and stamp.read_text() == repr(packages)):
            shutil.rmtree(folder, ignore_errors=True)
            _run([sys.executable, "-m", "venv", str(folder)], limit_s)
            if packages.beside_ours:
                _show_ours(folder)
            pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            _run([*pip, *packages.requirements], limit_s)
            stamp.write_text(repr(packages))
    return python


def _show_ours(folder: Path) -> None:
    """Let the virtual environment find our packages where its own has none of the name."""
    own = next(folder.glob("lib/python*/site-packages"))
    ours = site.getsitepackages()[0]
    (own / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")


def _run(words: Sequence[str], limit_s: float) -> None:
    """Raises NotInstalledError with the end of what the command said."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise NotInstalledError(f"it took more than {limit_s:g} s: {' '.join(words[-2:])}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise NotInstalledError(" | ".join(said[-REASON_LINES:]))
