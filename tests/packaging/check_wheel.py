"""`python -m tests.packaging.check_wheel [--full]`: the wheel works outside the repository.

Builds the wheel, installs it into a bare virtual environment, and runs its commands and the demo in an empty folder.
The bare environment uses the dependencies of this one. With `--full` it installs them itself, pinned by
constraints.txt, which downloads several gigabytes.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
DEMO = ("demo", "--json", "learner.steps=2", "learner.eval_every=0")


def build(folder: Path) -> Path:
    """The wheel of this checkout."""
    run([*PIP, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], ROOT)
    return next(folder.glob("asyncrl-*.whl"))


def check_contents(wheel: Path) -> None:
    """Check that the wheel has the configuration files, the dashboard's page and the types marker.

    Its description may have no relative links, since these lead nowhere on a package index.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    page = {str(path.relative_to(ROOT)) for path in (ROOT / "asyncrl/dashboard/page").rglob("*") if path.is_file()}
    configs = {"asyncrl/configs/train.yaml", "asyncrl/configs/experiment/demo.yaml"}
    missing = {"asyncrl/py.typed", *configs, *page} - names
    assert not missing, f"the wheel has no {missing}"
    relative = re.findall(r"\]\((?!https?:|#)[^)]*\)", metadata)
    assert not relative, f"links that lead nowhere on a package index: {relative}"


def install(wheel: Path, environment: Path, full: bool) -> Path:
    """The `asyncrl` command of a new virtual environment that has the wheel."""
    run([sys.executable, "-m", "venv", "--without-pip", str(environment)], ROOT)
    python = environment / "bin" / "python"
    dependencies = ["--constraint", str(ROOT / "constraints.txt")] if full else ["--no-deps"]
    run([*PIP, "--python", str(python), "install", "--quiet", *dependencies, str(wheel)], ROOT)
    if not full:
        packages = next(environment.glob("lib/python*/site-packages"))
        here = [path for path in sys.path if path.endswith("site-packages")]
        (packages / "dependencies.pth").write_text("".join(f"{path}\n" for path in here))
    return environment / "bin" / "asyncrl"


def check_commands(command: Path, folder: Path) -> None:
    """Check that a user's first commands work in an empty folder."""
    expected = {
        ("--version",): "asyncrl ",
        ("--help",): "usage: asyncrl",
        ("train", "--help"): "gsm8k_calculator",
        ("train", "--cfg", "job", "algorithm=dapo"): "clip_high: 0.28",
        ("algorithms", "loss"): "algorithm.loss",
        DEMO: '"trajectories": {"trained": 128,',
    }
    for arguments, text in expected.items():
        sys.stdout.write(f"asyncrl {' '.join(arguments)}\n")
        assert text in run([str(command), *arguments], folder), f"{arguments} did not print {text!r}"


def run(command: list[str], folder: Path) -> str:
    """Return the output of a command, run in a folder and without this process's PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="install the dependencies anew")
    full = parser.parse_args().full
    with tempfile.TemporaryDirectory(prefix="asyncrl-wheel-") as name:
        folder = Path(name)
        wheel = build(folder)
        check_contents(wheel)
        command = install(wheel, folder / "environment", full)
        empty = folder / "empty"
        empty.mkdir()
        check_commands(command, empty)
    sys.stdout.write("the wheel works\n")


if __name__ == "__main__":
    main()
