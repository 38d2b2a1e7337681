"""Finds the scores of episodes that change nothing: they have no weight, and no part of the algorithm reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from asyncrl.config.schema import AlgorithmConfig, PartConfig, ScoringConfig
from asyncrl.config.schema.scoring import short_name

READ_STEPS = ("grpo_turns", "prime", "process_grpo", "pure")
"""The advantages that always read step scores."""


def unread_scores(scoring: ScoringConfig, algorithm: AlgorithmConfig, compared: str = "") -> dict[str, str]:
    """Map the name of each score that changes nothing to the ways to use it or to do without it. The score
    `environment` comes from tools, environments and simulated users, and not every run has it. The filter of groups
    reads the score `compared`."""
    read = {*_texts(asdict(algorithm)), compared}
    if any("." in name for name in _part_names(algorithm)):
        # A part of the algorithm that the user has written may read any score.
        return {}
    found = {}
    if not scoring.shaping.environment_weight and not _reads_turns(scoring, algorithm):
        found["environment"] = (
            "give these rewards a weight (scoring.shaping.environment_weight=1.0), train each turn with its own reward "
            "(algorithm=process_grpo, or algorithm.advantage.name=grpo_turns), name `environment` in a part of the "
            "algorithm, or return no rewards"
        )
    for source, entry in _weightless_rules(scoring):
        name = f"rule/{entry.get('as') or short_name(str(entry.get('name')))}"
        found[name] = (
            f"give this rule a weight (scoring.rules.{source}), name `{name}` in a part of the algorithm, or leave the "
            "rule out"
        )
    return {name: advice for name, advice in found.items() if name not in read}


def _part_names(algorithm: AlgorithmConfig) -> Iterator[str]:
    for value in vars(algorithm).values():
        listed = value if isinstance(value, list) else [value]
        yield from (each.name for each in listed if isinstance(each, PartConfig))


def _reads_turns(scoring: ScoringConfig, algorithm: AlgorithmConfig) -> bool:
    """True if the rewards of turns are step scores that the algorithm reads."""
    advantage = algorithm.advantage
    return scoring.step_scorer is None and bool(
        advantage.name in READ_STEPS or (advantage.params or {}).get("step_weight")
    )


def _weightless_rules(scoring: ScoringConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each rule in `scoring.rules` with weight 0, and its data source. The first rule of a source is left out, because
    its score is the outcome."""
    for source, value in scoring.rules.items():
        for entry in value[1:] if isinstance(value, list) else []:
            if isinstance(entry, Mapping) and entry.get("weight", 1.0) == 0:
                yield source, entry


def _texts(value: Any) -> Iterator[str]:
    """Every text in a plain value, the keys of mappings included."""
    match value:
        case str():
            yield value
        case dict():
            for name, inner in value.items():
                yield str(name)
                yield from _texts(inner)
        case list():
            for inner in value:
                yield from _texts(inner)
