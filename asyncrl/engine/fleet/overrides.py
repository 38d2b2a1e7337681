"""Whether a server changes its model's configuration as `model.override_config` says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from asyncrl.engine.fleet.server import ServerFaultError


def check_overrides(url: str, wanted: Mapping[str, Any], given: Mapping[str, Any], flag: str) -> None:
    """Raises ServerFaultError: the server at `url` was started with `given` for its `flag`, which lacks some of what is
    `wanted`, so that its log-probs would not be the learner's."""
    lacking = {name: value for name, value in wanted.items() if name not in given or given[name] != value}
    if lacking:
        raise ServerFaultError(
            f"{url} was started without model.override_config, at least {', '.join(lacking)}; start it with "
            f"{flag} '{json.dumps(dict(wanted))}'"
        )
