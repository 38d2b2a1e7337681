"""Describes the role whose metrics a sink takes, and checks that the sink's package is installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Source:
    """A role of a run.

    - `role`: the name of the role's file of metrics, such as `learner` or `actor-0`;
    - `project`: the name under which a service groups runs;
    - `config`: the run's configuration, as plain values without secrets;
    - `identity`: gives the run's id. The id is empty until the replay has made it, and on machines that do not see the
      run's folder.
    """

    run_dir: Path
    role: str
    project: str
    config: Mapping[str, Any]
    identity: Callable[[], str]

    @property
    def run(self) -> str:
        return self.run_dir.name

    def lasting_name(self) -> str | None:
        """A unique name, which this role has again after a restart; None if the run's id is unknown."""
        identity = self.identity()
        return f"{identity}-{self.role}" if identity else None


def need(package: str, sink: str) -> None:
    """Check that the package of a sink is installed. Raises ConfigError: it is not."""
    if find_spec(package) is None:
        raise ConfigError(f"observe.sinks has {sink}, which needs an extra: pip install 'asyncrl[{sink}]'")
