"""Makes the table of presets in docs/algorithms.md from the files in `configs/algorithm`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from asyncrl.algorithms import registry
from asyncrl.config.files import choices
from asyncrl.config.option import part_text
from asyncrl.config.schema import AlgorithmConfig

HEAD = ("preset", "what it is", "advantage", "loss", "correction", "aggregation", "further")


def preset_rows() -> list[list[str]]:
    """A row for each preset, with the cells of HEAD."""
    return [_row(name, path) for name, path in choices("algorithm").items()]


def _row(name: str, path: Path) -> list[str]:
    text = path.read_text()
    meaning = " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("#"))
    chosen = asdict(AlgorithmConfig()) | yaml.safe_load(text)
    parts = [part_text(chosen[kind]) for kind in HEAD[2:6]]
    return [f"`{name}`", meaning, *parts, "; ".join(_further(chosen))]


def _further(chosen: Mapping[str, Any]) -> Iterator[str]:
    """The data that the preset needs, and the further keys that it sets."""
    advantage: Any = registry.find("advantage", chosen["advantage"]["name"])
    if advantage.needs_critic:
        yield f"has a critic (`critic.path`); value {part_text(chosen['value'])}"
    if advantage.needs_steps:
        learned = ", or `implicit.train=true`" if advantage.name == "prime" else ""
        yield f"needs step scores, for example from `scoring.prm.path` or `scoring.steps`{learned}"
    if chosen["reward"]:
        yield f"reward {part_text(chosen['reward'])}"
    if chosen["proximal"] != AlgorithmConfig().proximal:
        yield f"proximal {chosen['proximal']}"
    if chosen["lr_scale"]["name"] != "none":
        yield f"lr_scale {part_text(chosen['lr_scale'])}"
    if chosen["kl"]["name"] != "none":
        yield f"KL {part_text(chosen['kl'])}"
    if chosen["entropy_weight"]:
        yield f"entropy_weight {chosen['entropy_weight']}"
