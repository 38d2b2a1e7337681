"""What a configuration names by dotted path."""

from __future__ import annotations

import importlib
from typing import Any

from asyncrl.errors import ConfigError


def imported(path: str, told: str, form: str = "module.function") -> Any:
    """What `path`, module.attribute, names; `told` is how the configuration has it, such as `scoring.rule=a.b`, and
    `form` what it should be.

    Raises ConfigError, which says how to mend it.
    """
    module, _, attribute = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise ConfigError(
            f"{told} cannot be imported ({type(error).__name__}: {error}); give {form}, with the module's folder on "
            "PYTHONPATH"
        ) from error
