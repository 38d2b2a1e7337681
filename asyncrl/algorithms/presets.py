"""The table of presets in docs/algorithms.md, from the files of `configs/algorithm` themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from asyncrl.algorithms import registry
from asyncrl.config.files import choices
from asyncrl.config.option import as_yaml
from asyncrl.config.schema import AlgorithmConfig

HEAD = ("preset", "what it is", "advantage", "loss", "correction", "aggregation", "further")


def preset_rows() -> list[list[str]]:
    """One row a preset, with the cells of HEAD."""
    return [_row(name, path) for name, path in choices("algorithm").items()]


def _row(name: str, path: Path) -> list[str]:
    text = path.read_text()
    meaning = " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("#"))
    chosen = asdict(AlgorithmConfig()) | yaml.safe_load(text)
    parts = [_shown(chosen[kind]) for kind in HEAD[2:6]]
    return [f"`{name}`", meaning, *parts, "; ".join(_further(chosen))]


def _shown(choice: Any) -> str:
    """A part, or a list of them, with its parameters."""
    if isinstance(choice, list):
        return ", ".join(map(_shown, choice)) or "none"
    params = ", ".join(f"{name}={as_yaml(value)}" for name, value in choice.get("params", {}).items())
    return f"{choice['name']} ({params})" if params else str(choice["name"])


def _further(chosen: Mapping[str, Any]) -> Iterator[str]:
    """What the run must have for the preset, and the other keys that it sets."""
    advantage: Any = registry.find("advantage", chosen["advantage"]["name"])
    if advantage.needs_critic:
        yield f"has a critic (`critic.path`), its loss {_shown(chosen['value'])}"
    if advantage.needs_steps:
        learned = " or `implicit.train=true`" if advantage.name == "prime" else ""
        yield f"needs step scores: `scoring.prm.path`{learned}"
    if chosen["reward"]:
        yield f"reward {_shown(chosen['reward'])}"
    if chosen["proximal"] != AlgorithmConfig().proximal:
        yield f"proximal {chosen['proximal']}"
    if chosen["kl"]["name"] != "none":
        yield f"KL {_shown(chosen['kl'])}"
    if chosen["entropy_weight"]:
        yield f"entropy_weight {chosen['entropy_weight']}"
