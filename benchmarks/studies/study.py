"""The declaration of a study: factors with levels, each a few keys of `asyncrl train`. Its runs are all combinations.

Most studies train small policies on a rung of the demo's ladder of tasks. A study with an `experiment` trains the
model that its command names with `--model`.

A run's settings are the common ones, then the study's, then those of its levels. Two factors of a study never set the
same key. The fingerprint of a run is a hash of all its settings.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from asyncrl.commands.demo.ladder.prepare import WARM_START_STEPS
from asyncrl.commands.demo.ladder.tasks import RUNGS, Rung

Settings = Mapping[str, Any]
Levels = Mapping[str, str]
"""The level of each factor of a cell."""

EXPERIMENT, MODEL_PATH = "experiment", "model.path"
RUNG, HELD_OUT, WARM_START = "rung", "held_out", "warm_start"
"""Settings that are no keys of `asyncrl train`: the rung of the ladder, the rung of the held-out tasks if it is another
one, and the updates that make the policy."""

MODEL = "{model}"
"""A placeholder in settings for the policy's folder."""

LR = "learner.lr"
BATCH = 32
SEARCH, MAIN = "search", "main"
SEARCH_SEED = 100
"""The seed of searches for learning rates. No reported run has it."""

COMMON: Settings = {
    "learner.export": False,
    # Has an effect on the metric of the entropy only.
    "algorithm.entropy_weight": 1e-9,
    "replay.durability": "os",
    "network.replay_port": 0,
    "network.weights_port": 0,
    "observe.keep_episodes": 0,
    "observe.keep_evaluated": 0,
    "observe.spans": False,
}
"""The settings of every run."""

LADDER: Settings = {
    **COMMON,
    RUNG: "brackets",
    WARM_START: WARM_START_STEPS,
    "actor.concurrency": 64,
    "actor.max_turn_tokens": 16,
    "actor.max_tokens": 768,
    "engine.slots": 64,
    "engine.max_length": 768,
    "scoring.rule": "exact_number",
    "learner.steps": 40,
    "learner.batch_size": BATCH,
    "learner.group_size": 8,
    "learner.minibatches": 2,
    "learner.micro_tokens": 8192,
    # The best learning rate that `age` found for the default correction.
    LR: 3e-5,
    "learner.betas": [0.9, 0.95],
    "learner.eval_every": 8,
    "learner.checkpoint_every": 10,
    "cluster.cpus": 2,
    "cluster.actors": 1,
    "cluster.scorers": 1,
    "cluster.learner_ranks": 1,
    "cluster.actor_threads": 1,
    "cluster.learner_threads": 1,
    "cluster.scorer_threads": 1,
}
"""The settings of every run on the ladder, sized for a core or two."""

UNPACED: Settings = {
    "replay.sampler.kind": "fifo",
    "replay.spare_batches": None,
    "replay.old_groups.wait_s": 0.0,
    "replay.old_groups.mask": False,
}
"""Settings with which data become as old as the age bound allows, and too old groups are thrown away. They are in no
fingerprint, since results were measured before the keys existed."""


@dataclass(frozen=True)
class Search:
    """A search for learning rates. Every level of `factor` gets one run for each of `rates`, at the level `at` of each
    other factor. All runs of the level then use the rate with the highest mean accuracy over the run."""

    factor: str
    rates: Sequence[float]
    at: Levels


@dataclass(frozen=True)
class Run:
    """One run of `asyncrl train`. `stage` is SEARCH or MAIN."""

    study: str
    stage: str
    levels: Levels
    seed: int
    settings: Settings

    @property
    def task(self) -> str:
        """The name of the rung, or the experiment and its model."""
        if EXPERIMENT in self.settings:
            return f"{self.settings[EXPERIMENT]} {MODEL_PATH}={self.settings[MODEL_PATH]}"
        return str(self.settings[RUNG])

    @property
    def rung(self) -> Rung:
        return RUNGS[self.settings[RUNG]]

    @property
    def held_out(self) -> Rung:
        return RUNGS[self.settings.get(HELD_OUT, self.settings[RUNG])]

    @property
    def lr(self) -> float:
        return float(self.settings[LR])

    @property
    def fingerprint(self) -> str:
        text = json.dumps([self.study, self.stage, dict(self.settings), self.seed], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        """The name of the run's folder, which is different for other settings."""
        words = [f"{factor}_{level}" for factor, level in self.levels.items()]
        parts = [self.stage, *words, f"lr_{self.lr:g}", f"seed_{self.seed}", self.fingerprint]
        return re.sub(r"[^\w.-]+", "_", "-".join(parts))


@dataclass(frozen=True)
class Study:
    """`factors` has the settings of each level by its name. `target` is the accuracy to which samples are counted.
    `experiment` is a configuration file with tasks and all that a run on them needs, for a study of a pretrained model.
    `skipped` are parts of cells that make no sense. `baseline` are the levels with which each cell is compared seed by
    seed, or none.

    The picture has a panel for each level of the factor `panels`, and colours for the remaining factors. It shows
    accuracy over samples or seconds (`over`), or the second figure of `compared` (keys of `pictures.COMPARED`) over the
    first. `shown` (keys of `report.FIGURES`) are the figures of the page's tables, which have the first factor's levels
    as columns.

    Raises ValueError: the declaration contradicts itself.
    """

    name: str
    question: str
    factors: Mapping[str, Mapping[str, Settings]]
    panels: str
    settings: Settings = field(default_factory=dict)
    experiment: str = ""
    target: float = 0.65
    search: Search | None = None
    skipped: Sequence[Levels] = ()
    over: Literal["samples", "seconds"] = "samples"
    compared: tuple[str, str] | None = None
    baseline: Levels = field(default_factory=dict)
    shown: Sequence[str] = ("best accuracy", "gain", "samples to target")

    def __post_init__(self) -> None:
        for one, other in itertools.combinations(self.factors, 2):
            if shared := _keys(self.factors[one]) & _keys(self.factors[other]):
                raise ValueError(f"{self.name}: {one} and {other} both set {', '.join(sorted(shared))}")
        for levels in (*self.skipped, self.baseline, self.search.at if self.search else {}):
            for factor, level in levels.items():
                if level not in self.factors.get(factor, {}):
                    raise ValueError(f"{self.name}: {factor} has no level {level}")
        if self.panels not in self.factors:
            raise ValueError(f"{self.name}: there is no factor {self.panels}")
        if self.search and {self.search.factor, *self.search.at} != set(self.factors):
            raise ValueError(f"{self.name}: the search must name every factor")

    def cells(self, only: Mapping[str, Collection[str]] | None = None) -> Iterator[Levels]:
        """Every combination of levels that is not skipped. For factors in `only`, only the named levels."""
        only = only or {}
        chosen = [[name for name in levels if name in only.get(factor, levels)] for factor, levels in self._items()]
        for names in itertools.product(*chosen):
            cell = dict(zip(self.factors, names, strict=True))
            if not any(each.items() <= cell.items() for each in self.skipped):
                yield cell

    def settings_of(self, levels: Levels) -> dict[str, Any]:
        base = {**COMMON, EXPERIMENT: self.experiment} if self.experiment else LADDER
        settings = {**base, **self.settings}
        for factor, level in levels.items():
            settings |= self.factors[factor][level]
        return settings

    def searches(self, level: str, changed: Settings) -> list[Run]:
        """The runs of the search for a level's learning rate, by rising rate."""
        assert self.search is not None
        levels = {factor: self.search.at.get(factor, level) for factor in self.factors}
        settings = {**self.settings_of(levels), **changed}
        return [
            Run(self.name, SEARCH, levels, SEARCH_SEED, {**settings, LR: rate}) for rate in sorted(self.search.rates)
        ]

    def run(self, levels: Levels, seed: int, lr: float | None, changed: Settings) -> Run:
        """A run with reported results. `lr` is the result of the search, or None without a search."""
        settings = {**self.settings_of(levels), **changed}
        return Run(self.name, MAIN, levels, seed, settings if lr is None else {**settings, LR: lr})

    def _items(self) -> Iterator[tuple[str, Mapping[str, Settings]]]:
        return iter(self.factors.items())


def _keys(levels: Mapping[str, Settings]) -> set[str]:
    return {key for settings in levels.values() for key in settings}


def overrides(settings: Settings, model: str) -> list[str]:
    """The arguments of the command line. A slow tool in the settings replaces the rung's tool."""
    rung = RUNGS[settings[RUNG]] if RUNG in settings else None
    of_rung = {"actor.tools": rung.tools, "actor.max_turns": rung.most_turns} if rung else {}
    words = {**of_rung, **UNPACED, **settings}
    ours = (RUNG, HELD_OUT, WARM_START)
    return [f"{key}={_word(value).replace(MODEL, model)}" for key, value in words.items() if key not in ours]


def _word(value: Any) -> str:
    """A value in Hydra's grammar: names are not quoted, since Hydra keeps the text of quoted ones unchanged."""
    match value:
        case bool():
            return str(value).lower()
        case None:
            return "null"
        case str():
            return value
        case Mapping():
            return "{" + ",".join(f"{key}:{_word(each)}" for key, each in value.items()) + "}"
        case Sequence():
            return "[" + ",".join(map(_word, value)) + "]"
        case _:
            return str(value)
