"""Replaces `$NAME` in a configuration by environment variables, so that secrets need not be written into it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from asyncrl.errors import ConfigError

_VARIABLE = re.compile(r"\$(?:(\$)|([A-Za-z_][A-Za-z0-9_]*))")


def with_variables(text: str, setting: str, variables: Mapping[str, str]) -> str:
    """Return `text`, the value of the option `setting`, with each $NAME replaced by its value in `variables`, and each
    $$ by a dollar sign.

    Raises ConfigError: a variable does not exist.
    """

    def value(match: re.Match[str]) -> str:
        dollar, name = match.groups()
        if name is not None and name not in variables:
            raise ConfigError(
                f"{setting}: the environment of this process has no variable {name}; set it where asyncrl is started, "
                "or write $$ for a dollar sign"
            )
        return "$" if dollar else variables[name]

    return _VARIABLE.sub(value, text)
