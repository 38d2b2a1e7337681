"""Warns of settings that have no effect, since another setting excludes them.

They are no errors: presets and translated files set some of them, and files with settings of servers may be tried with
the embedded engine.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from asyncrl.config.option import options
from asyncrl.config.schema import EngineConfig, FilterConfig, ServerConfig, ShapingConfig

log = logging.getLogger("asyncrl.train")


def warn_of_unused_servers(engine: EngineConfig) -> None:
    """Log a warning for servers, and for settings of servers, that this run does not use."""
    for line in _of_servers(engine):
        log.warning("%s", line)


def warn_of_unused_scores(group_filter: FilterConfig, shaping: ShapingConfig) -> None:
    """Log a warning for a score that no filter compares, and for a weight that no number has."""
    for line in _of_scores(group_filter, shaping):
        log.warning("%s", line)


def _of_servers(engine: EngineConfig) -> Iterator[str]:
    if engine.kind == "embedded":
        if engine.names_servers:
            yield "engine.urls, engine.urls_file, engine.router: no effect, since the embedded engine uses no servers"
        if engine.launches:
            yield "engine.launch: no effect, since the embedded engine uses no servers"
    changed = [each.name for each in options(ServerConfig) if getattr(engine.server, each.name) != each.default]
    if changed and (engine.kind == "embedded" or not engine.launches):
        keys = ", ".join(f"engine.server.{name}" for name in changed)
        yield f"{keys}: no effect, since the actors of this run start no servers"


def _of_scores(group_filter: FilterConfig, shaping: ShapingConfig) -> Iterator[str]:
    if group_filter.score != FilterConfig().score and not group_filter.zero_variance:
        yield "replay.filter.score: no effect without replay.filter.zero_variance=true"
    if shaping.process_weight and shaping.prm_aggregation == "per_step":
        yield (
            "scoring.shaping.process_weight: no effect, since scoring.shaping.prm_aggregation=per_step makes no number "
            "that could have a weight"
        )
