from __future__ import annotations

import pytest

from asyncrl.config.schema import EngineConfig, FilterConfig, ServerConfig, ShapingConfig
from asyncrl.launch.preflight.unused import warn_of_unused_scores, warn_of_unused_servers

STARTS_NONE = ": no effect, since the actors of this run start no servers"
TWO = ServerConfig(tp_size=2)


@pytest.mark.parametrize(
    ("engine", "group_filter", "shaping", "told"),
    [
        (EngineConfig(), FilterConfig(), ShapingConfig(), []),
        (EngineConfig("sglang", server=TWO), FilterConfig(), ShapingConfig(), []),
        (EngineConfig("sglang", urls=["http://a"]), FilterConfig(True, "outcome"), ShapingConfig(), []),
        (EngineConfig(urls=["http://a"]), FilterConfig(), ShapingConfig(), ["engine.urls" + STARTS_NONE]),
        (
            EngineConfig(launch=True, server=TWO),
            FilterConfig(),
            ShapingConfig(),
            ["engine.launch, engine.server.tp_size" + STARTS_NONE],
        ),
        (
            EngineConfig("vllm", urls=["http://a"], server=TWO),
            FilterConfig(),
            ShapingConfig(),
            ["engine.server.tp_size" + STARTS_NONE],
        ),
        (EngineConfig(), FilterConfig(score="outcome"), ShapingConfig(), ["replay.filter.score: no effect"]),
        (
            EngineConfig(),
            FilterConfig(),
            ShapingConfig(process_weight=1.0, prm_aggregation="per_step"),
            ["scoring.shaping.process_weight: no effect"],
        ),
    ],
)
def test_a_start_warns_of_settings_without_an_effect(
    engine: EngineConfig,
    group_filter: FilterConfig,
    shaping: ShapingConfig,
    told: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn_of_unused_servers(engine)
    warn_of_unused_scores(group_filter, shaping)
    assert len(caplog.messages) == len(told)
    assert all(part in line for part, line in zip(told, caplog.messages, strict=True))
