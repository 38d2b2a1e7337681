"""Finds the files that a run chooses, one of each group: shipped files by name, a user's files by name or path.

Hydra finds the shipped files itself. A user's file is read and checked here, with the files in its `defaults`, and
stored in Hydra's memory for one composition. So it can be in any folder, and needs no line `# @package`.

The keys of a file win over the keys of the files in its `defaults`, unless `defaults` lists `_self_`. Then the entries
after `_self_` win over the file's own keys. A relative path in `defaults` is relative to the file.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from asyncrl.config.files import GROUPS, choices
from asyncrl.config.keys import did_you_mean, nearest
from asyncrl.config.option import as_yaml
from asyncrl.config.setting import set_value, typed_defaults
from asyncrl.errors import ConfigError

FAILURES = (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError, RecursionError)
"""The errors that Hydra, OmegaConf and YAML raise for words and files that they cannot use."""

ENDINGS = (".yaml", ".yml")
OWN_KEYS = "_self_"
PACKAGE = re.compile(r"#\s*@package\s+(\S+)")


class GroupFiles:
    """The files that a run has chosen.

    - `folder`: has further files by name, such as experiment/NAME.yaml
    - `wrong`: gets a line for each mistake in a chosen file
    - `others`: true once a file is chosen that is not shipped

    Raises ConfigError: the folder does not exist.
    """

    def __init__(self, folder: Path | None) -> None:
        if folder is not None and not folder.is_dir():
            raise ConfigError(f"--config-dir={folder}: there is no such folder")
        self.wrong: list[str] = []
        self.others = False
        self._folder = folder
        self._within: list[Path] = []
        self._names: set[tuple[str, str]] = set()

    def __enter__(self) -> GroupFiles:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the files from Hydra's memory: Hydra would copy them at each composition."""
        store = ConfigStore.instance().repo
        for group, name in self._names:
            store[group].pop(f"{name}.yaml", None)

    def choose(self, group: str, given: Any, base: Path = Path()) -> str | None:
        """Hydra's name for a file of `group`. `given` is the file's name or path. The result is `None` for `experiment`
        if no file is given. A relative path is relative to `base`.

        Raises ConfigError: there is no such file, or both asyncrl and the folder have a file of this name.
        """
        if group not in GROUPS:
            raise ConfigError(f"{group}: there is no such group{did_you_mean(group, GROUPS)}")
        if given is None and group == "experiment":
            return None
        if isinstance(given, dict):
            raise ConfigError(
                f"{group}: choose a file with {group}=NAME, and set keys one by one with {group}.KEY=VALUE"
            )
        known, shipped = choices(group, self._folder), choices(group)
        name = as_yaml(given)
        if name.endswith(ENDINGS):
            path = base / Path(name).expanduser()
            if not path.is_file():
                near = did_you_mean(path.name, [each.name for each in path.parent.glob("*.y*ml")])
                raise ConfigError(f"{group}={name}: there is no file {path.absolute()}{near}")
            return self._stored(group, path)
        if name not in known:
            beside = {each.stem: f"./{each.name}" for each in base.glob("*.yaml")}
            near = nearest(name, [*known, *beside])
            hint = f"; use one of {', '.join(known)}, or the path of a .yaml file"
            if near:
                hint = f"; did you mean {near if near in known else beside[near]}?"
            if name in beside:
                hint = f"; for the file {name}.yaml write {group}=./{name}.yaml"
            raise ConfigError(f"{group}={name}: there is no such file{hint}")
        if name not in shipped:
            return self._stored(group, known[name])
        if known[name] != shipped[name]:
            raise ConfigError(f"{group}={name}: asyncrl has a file of this name; rename {known[name]}")
        return name

    def _stored(self, group: str, path: Path) -> str:
        """Store a file that is outside of Hydra's search path, and return Hydra's name for it."""
        self.others = True
        name = f"file-{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"
        if path.resolve() in self._within:
            self.wrong.append(f"{path}: defaults: the file includes itself")
            return name
        self._within.append(path.resolve())
        try:
            package, content = self._read(group, path)
            ConfigStore.instance().store(group=group, name=name, node=content, package=package)
            self._names.add((group, name))
        except ConfigError as error:
            self.wrong.append(f"{path}: {error}")
        self._within.pop()
        return name

    def _read(self, group: str, path: Path) -> tuple[str, dict[Any, Any]]:
        """The section whose keys the file sets, and the file's content. Raises ConfigError: the file is malformed."""
        try:
            text = path.read_text()
            content = OmegaConf.to_container(OmegaConf.load(path))
        except FAILURES as error:
            raise ConfigError(f"it cannot be read as YAML: {reason(error)}") from error
        if not isinstance(content, dict):
            raise ConfigError("it must hold KEY: VALUE lines")
        found = PACKAGE.search(text)
        package = found[1] if found else "_global_" if group == "experiment" else group
        defaults = content.pop("defaults", [])
        refused = set_value(typed_defaults(), package.removeprefix("_global_"), content)
        self.wrong += [f"{path}: {line}" for line in refused.values()]
        if not isinstance(defaults, list):
            raise ConfigError("defaults must be a list, such as [override /algorithm: dapo]")
        try:
            defaults = [self._entry(group, entry, path.parent) for entry in defaults]
        except ConfigError as error:
            raise ConfigError(f"defaults: {error}") from error
        return package, {**content, "defaults": defaults if OWN_KEYS in defaults else [*defaults, OWN_KEYS]}

    def _entry(self, group: str, entry: Any, base: Path) -> Any:
        """An entry of a file's `defaults`, with Hydra's names of the files. Raises ConfigError like `choose`."""
        if isinstance(entry, dict):
            return {key: self.choose(str(key).rpartition(" ")[2].strip("/"), name, base) for key, name in entry.items()}
        return entry if entry == OWN_KEYS else self.choose(group, entry, base)


def reason(error: Exception) -> str:
    """The first lines of a library's message, joined to one line."""
    lines = [line.strip() for line in str(error).splitlines()]
    return "; ".join(
        line for line in lines[:4] if line and not line.startswith(("See http", "full_key", "object_type"))
    )
