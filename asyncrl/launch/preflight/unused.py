"""Warns of settings that have no effect, since another setting excludes them.

They are no errors: presets and translated files set some of them, and files with settings of servers may be tried with
the embedded engine.
"""

from __future__ import annotations

import logging

from asyncrl.config.option import options
from asyncrl.config.schema import EngineConfig, FilterConfig, ServerConfig, ShapingConfig

log = logging.getLogger("asyncrl.train")


def warn_of_unused_servers(engine: EngineConfig) -> None:
    """Log a warning with the servers, and the settings of servers, that this run does not use."""
    changed = [each.name for each in options(ServerConfig) if getattr(engine.server, each.name) != each.default]
    unused = [f"engine.server.{name}" for name in changed]
    if engine.kind == "embedded":
        named = [name for name in ("urls", "urls_file", "router", "launch") if getattr(engine, name)]
        unused = [*(f"engine.{name}" for name in named), *unused]
    elif engine.launches:
        return
    if unused:
        log.warning("%s: no effect, since the actors of this run start no servers", ", ".join(unused))


def warn_of_unused_scores(group_filter: FilterConfig, shaping: ShapingConfig) -> None:
    """Log a warning for a score that no filter compares, and for a weight that no number has."""
    if group_filter.score != FilterConfig().score and not group_filter.zero_variance:
        log.warning("replay.filter.score: no effect without replay.filter.zero_variance=true")
    if shaping.process_weight and shaping.prm_aggregation == "per_step":
        log.warning(
            "scoring.shaping.process_weight: no effect, since scoring.shaping.prm_aggregation=per_step makes no number "
            "that could have a weight"
        )
