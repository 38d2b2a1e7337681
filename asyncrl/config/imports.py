"""Imports the objects that a configuration names by their dotted path."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import Any

from asyncrl.config.keys import nearest
from asyncrl.errors import ConfigError
from asyncrl.text import is_own, reason_of


def imported(path: str, setting: str, form: str = "module.function") -> Any:
    """The object at `path` (module.attribute). Error messages quote `setting` and `form`.

    - `setting`: the option with its value, such as `scoring.rule=a.b`
    - `form`: the expected form of the path

    Raises ConfigError: the object cannot be imported.
    """
    module, _, attribute = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name is None or f"{module}.".startswith(f"{error.name}."):
            raise _refusal(setting, error, form, path) from error
        raise ConfigError(
            f"{setting} cannot be imported: it needs the module {error.name}, which is not found; install it in the "
            f"environment of asyncrl, put its folder on PYTHONPATH, or move {attribute} into a file of its own "
            "without that import"
        ) from error
    except Exception as error:
        raise _refusal(setting, error, form, path) from error


def _refusal(setting: str, error: Exception, form: str, path: str) -> ConfigError:
    fix = _near(path, error) or f"; give {form}, with the module's folder on PYTHONPATH"
    return ConfigError(f"{setting} cannot be imported ({reason_of(error)}){fix}")


def _near(path: str, error: Exception) -> str:
    """A text such as `; did you mean my_rewards.length_bonus?`, if a module or an object has a similar name."""
    module, _, attribute = path.rpartition(".")
    if isinstance(error, AttributeError) and module in sys.modules:
        near = nearest(attribute, [name for name in vars(sys.modules[module]) if not name.startswith("_")])
        return f"; did you mean {module}.{near}?" if near else ""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return ""
    parent, _, missing = error.name.rpartition(".")
    # Installed packages have thousands of modules, and a similar one would be no help.
    folders = getattr(sys.modules.get(parent), "__path__", ()) if parent else filter(is_own, sys.path)
    near = nearest(missing, [each.name for each in pkgutil.iter_modules(folders)])
    return f"; did you mean {path.replace(missing, near, 1)}?" if near else ""
