"""What a configuration must satisfy beyond its types: each option's constraint, and the combinations of options.

Every refusal names the keys with their values, and the fix.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from operator import attrgetter

from asyncrl.config.combinations import conflicts
from asyncrl.config.keys import sections
from asyncrl.config.option import as_yaml, options
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import ConfigError


def check(config: TrainConfig) -> None:
    """Refuse a configuration that cannot work, before anything starts. Raises ConfigError with one line a refusal."""
    if lines := refusals(config):
        raise ConfigError("\n".join(lines))


def refusals(config: TrainConfig, known_bad: Collection[str] = ()) -> list[str]:
    """One line for each value or combination that cannot be.

    `known_bad` are keys that were refused already. Combinations with these keys, or with values that break their own
    constraint, are not judged.
    """
    config, bad, lines = copy.deepcopy(config), set(known_bad), []
    for prefix, section in sections(config):
        for option in options(type(section)):
            key, given = prefix + option.name, getattr(section, option.name)
            if key not in bad and not option.allows(given):
                lines.append(f"{key}={as_yaml(given)}: it must be {option.allowed}")
                bad.add(key)
            if key in bad:
                setattr(section, option.name, option.default)
    for conflict in conflicts(config):
        keys, _, fix = conflict.partition(": ")
        if bad.isdisjoint(keys.split()):
            lines.append(f"{' with '.join(f'{key}={as_yaml(attrgetter(key)(config))}' for key in keys.split())}: {fix}")
    return lines
