"""Imports the objects that a configuration names by their dotted path."""

from __future__ import annotations

import importlib
from typing import Any

from asyncrl.errors import ConfigError


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
            raise _refusal(setting, error, form) from error
        raise ConfigError(
            f"{setting} cannot be imported: it needs the module {error.name}, which is not found; install it in the "
            "environment of asyncrl, or put its folder on PYTHONPATH"
        ) from error
    except Exception as error:
        raise _refusal(setting, error, form) from error


def _refusal(setting: str, error: Exception, form: str) -> ConfigError:
    return ConfigError(
        f"{setting} cannot be imported ({type(error).__name__}: {error}); give {form}, with the module's folder on "
        "PYTHONPATH"
    )
