"""Finds the configuration files. Each group of files has a folder, and a run chooses one file of each group by its
name."""

from __future__ import annotations

from pathlib import Path

from asyncrl.version import PACKAGE

GROUPS = ("algorithm", "engine", "scoring", "experiment")


def config_dir() -> Path:
    """The folder of the shipped configuration files. In a checkout it is next to the package, and in an installed
    asyncrl it is inside the package."""
    inside, beside = PACKAGE / "configs", PACKAGE.parent / "configs"
    return inside if inside.is_dir() else beside


def choices(group: str, folder: Path | None = None) -> dict[str, Path]:
    """The files of a group by name: the shipped files, and the files of `folder`."""
    homes = [home / group for home in (config_dir(), folder) if home is not None]
    found = {str(path.relative_to(home).with_suffix("")): path for home in homes for path in home.rglob("*.yaml")}
    return dict(sorted(found.items()))
