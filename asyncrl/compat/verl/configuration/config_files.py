"""Reads a configuration file of verl, with the files that its list `defaults` names.

Hydra finds such a file by `--config-name` and `--config-path`, and the files in `defaults` in the same folder. Files
that verl ships are not read, because the rows of `table.py` and `recipes.py` have their values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from asyncrl.compat.verl.configuration.recipes import RECIPES, recipe_named
from asyncrl.compat.verl.configuration.sections import Section, set_key
from asyncrl.compat.yaml_files import read_yaml
from asyncrl.errors import ConfigError

ENDINGS = (".yaml", ".yml")
OF_VERL = (
    *("ppo_trainer", "ppo_megatron_trainer", "_generated_ppo_trainer", "_generated_ppo_megatron_trainer"),
    *("legacy_reward_impl", "legacy_data", "hf_model", "reward", "rollout", "rollout_correction", "distillation"),
    *("transfer_queue", "dp", "fsdp", "megatron", "torchtitan", "veomni"),
)
"""The names of configurations that verl ships."""
MOST_FILES = 64
"""The largest number of files of one configuration. More are a mistake or an attack."""
SELF = "_self_"


def find_config(name: str, folders: Sequence[Path]) -> Path | None:
    """The file `name`, with or without its ending, in the first of `folders` that has it. None: no folder has it, or
    `name` is absolute or contains `..`."""
    place = PurePath(name)
    if place.is_absolute() or ".." in place.parts:
        return None
    names = [name] if place.suffix in ENDINGS else [f"{name}{ending}" for ending in ENDINGS]
    return next((file for folder in folders for each in names if (file := folder / each).is_file()), None)


def config_names(folders: Sequence[Path]) -> list[str]:
    """The names, without their endings, of the configuration files in `folders`."""
    found = (each for folder in folders if folder.is_dir() for each in folder.iterdir())
    return sorted({each.stem for each in found if each.suffix in ENDINGS})


def is_of_verl(name: str) -> bool:
    """True if verl ships a configuration of this name."""
    stem = PurePath(name).name.removesuffix(".yaml")
    return (
        stem in OF_VERL
        or stem.partition("_")[2] in ("actor", "ref", "critic")
        or (stem.startswith(tuple(RECIPES)) and stem.endswith("_trainer"))
    )


def read_config(file: Path) -> tuple[Section, list[str]]:
    """The values of a file and of the files that it includes, and a line for each included file that is not found.

    Raises the errors in `config.group_files.FAILURES`. Raises ConfigError: a file has no keys, or there are too many
    files.
    """
    reader = _Reader(file.parent)
    return reader.read(file), reader.missing


class _Reader:
    def __init__(self, folder: Path) -> None:
        self._folders = [folder]
        self._files = 0
        self.missing: list[str] = []

    def read(self, file: Path) -> Section:
        self._files += 1
        if self._files > MOST_FILES:
            raise ConfigError(f"{file}: `defaults` names more than {MOST_FILES} files, or a file names itself")
        content = read_yaml(file)
        if not isinstance(content, dict):
            raise ConfigError(f"{file}: it must hold KEY: VALUE lines, as verl's ppo_trainer.yaml does")
        listed = content.pop("defaults", None)
        listed = listed if isinstance(listed, list) else []
        made: Section = {}
        # If `defaults` lacks `_self_`, Hydra reads the file's own keys last, so they win.
        for entry in listed if SELF in listed else [*listed, SELF]:
            for package, part in [("", content)] if entry == SELF else self._included(entry, file):
                _merge(made, package, part)
        return made

    def _included(self, entry: Any, file: Path) -> Iterator[tuple[str, Section]]:
        """The contents of the files that an entry of `defaults` names, each with the section for its keys."""
        named = entry.items() if isinstance(entry, Mapping) else [("", entry)]
        for key, value in named:
            group, _, package = str(key).removeprefix("override ").removeprefix("optional ").strip().partition("@")
            for name in value if isinstance(value, list) else [value]:
                found = find_config(f"{group}/{name}" if group else str(name), self._folders)
                if found is not None:
                    yield _section(package or group.replace("/", ".")), self.read(found)
                elif is_of_verl(str(name)):
                    yield "", recipe_named(str(name))
                elif name is not None and "optional " not in str(key):
                    self.missing.append(
                        f"Not read: {file} includes {f'{group}/' * bool(group)}{name}, which is not there"
                    )


def _section(package: str) -> str:
    return package.removeprefix("_global_").removeprefix("_here_").strip(".")


def _merge(made: Section, package: str, part: Section) -> None:
    if package:
        set_key(made, package, part)
        return
    for key, value in part.items():
        set_key(made, str(key), value)
