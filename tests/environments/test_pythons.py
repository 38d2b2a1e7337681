"""The virtual environments of these tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.environments.pythons import NotInstalledError, Packages, install


def imports(python: Path, module: str) -> bool:
    return subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode == 0


def test_packages_that_do_not_install_are_said_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(NotInstalledError, match="nowhere"):
        install(Packages(("./nowhere/package.whl",)), tmp_path / "broken")


def test_our_packages_are_visible_only_where_they_are_wanted(tmp_path: Path) -> None:
    alone, beside = Packages(("pip",)), Packages(("pip",), beside_ours=True)
    assert not imports(install(alone, tmp_path / "alone"), "hydra")
    assert imports(install(beside, tmp_path / "beside"), "hydra")
    marker = tmp_path / "beside" / "kept"
    marker.touch()
    install(beside, tmp_path / "beside")
    assert marker.exists(), "an environment with the same requirements is kept"
    install(alone, tmp_path / "beside")
    assert not marker.exists(), "another one takes its place"
