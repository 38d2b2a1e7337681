"""Makes the labels of an episode from the scores that rules, models and managers give to it.

The reward is computed (shaping.py) once the episode has the scores of all kinds that it needs. Until then its labels
are partial.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.schema import ScoringConfig
from asyncrl.config.schema.scoring import GROUP_KIND
from asyncrl.errors import ScoringError
from asyncrl.scoring import shaping
from asyncrl.scoring.answers import answer_texts, texts_of_steps
from asyncrl.scoring.managers import ManagerScore, manager_name
from asyncrl.scoring.models.base import OutcomeModel, ProcessRewardModel
from asyncrl.scoring.rules import votes
from asyncrl.scoring.rules.base import RuleScores
from asyncrl.scoring.rules.registry import rule_names
from asyncrl.scoring.shaping import Scores
from asyncrl.scoring.transcript import Decoder
from asyncrl.types import MAX_REASONS, Labels, Lease, Reason, Trajectory

T = TypeVar("T")

_NO_SCORES, _NO_ENDS = np.zeros(0, np.float32), np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class ScoredEpisode:
    """The labels of one lease. `final` is true if no further scorer has to add scores. Then the labels come with
    numbers for metrics and for the alarm on reward hacking.

    - `step_scores`: the scores float32[K] of all K steps before shaping
    - `repeated`: the share of repeated steps
    - `agree`: true if the process model agrees with the rules or the manager on the answer; None if one side gave no
      score
    """

    labels: Labels
    final: bool
    step_scores: Scores = field(default_factory=lambda: _NO_SCORES)
    repeated: float = 0.0
    agree: bool | None = None


class Labeller:
    """Makes labels. `prm` and `outcome_model` are the models of the Scorer, or None."""

    def __init__(
        self,
        config: ScoringConfig,
        tokenizer: Decoder,
        prm: ProcessRewardModel | None,
        outcome_model: OutcomeModel | None,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._prm = prm
        self._outcome_model = outcome_model

    def label(
        self,
        lease: Lease,
        rules: Future[RuleScores] | ScoringError | None,
        outcome: float | ScoringError | None,
        steps: Scores | ScoringError | None,
        rewarded: Future[Scores] | ScoringError | None,
        judged: Future[ManagerScore] | ScoringError | None,
    ) -> ScoredEpisode:
        """Put the scores of one lease together as labels. Raises ScoringError: a kind in `lease.kinds` gave no
        score."""
        before = lease.partial
        numbers, vote = (dict(before.extra), before.vote) if before else ({}, "")
        reasons = [*before.reasons] if before else []
        if rules is not None:
            by_rule = _given(rules).result()
            vote = by_rule.vote
            reasons += by_rule.reasons
            numbers |= {"outcome": by_rule.outcome, "rules": by_rule.total}
            numbers |= {f"rule/{name}": score for name, score in by_rule.scores.items()}
        if outcome is not None:
            numbers["outcome_model"] = _given(outcome)
        if judged is not None:
            by_manager = _given(judged).result()
            numbers = {"outcome": by_manager.outcome} | numbers | {"manager": by_manager.reward}
            numbers |= {f"manager/{name}": score for name, score in by_manager.extra.items()}
            vote = vote or by_manager.vote or self._plain_vote(lease)
            reasons += [Reason("manager", by_manager.reason)] if by_manager.reason else []
        scores = before.step_scores if before else _NO_SCORES
        if steps is not None:
            scores = _given(steps)
            if not len(scores):
                raise ScoringError("the episode has no steps to score")
        if rewarded is not None:
            scores = _given(rewarded).result()
        if lease.final:
            return self._finish(lease, numbers, scores, vote, reasons)
        ends = _ends(lease) if len(scores) else _NO_ENDS
        said = tuple(reasons[:MAX_REASONS])
        labels = Labels(lease.trajectory.id, 0.0, 0.0, self._name(lease), scores, ends, numbers, vote, said)
        return ScoredEpisode(labels, False)

    def _finish(
        self,
        lease: Lease,
        numbers: Mapping[str, float],
        step_scores: Scores,
        vote: str,
        reasons: Sequence[Reason],
    ) -> ScoredEpisode:
        """The final labels, from the numbers of all kinds. `step_scores` has the scores of all steps, or is empty if
        nothing scored them."""
        config, trajectory, shadow = self._config.shaping, lease.trajectory, self._config.shadow
        steps = shaping.step_texts(trajectory, texts_of_steps(trajectory, self._tokenizer))
        counted, kept = step_scores, list(range(len(step_scores)))
        models = {name: score for name, score in numbers.items() if name == "outcome_model"}
        if len(step_scores):
            # The numbers of a user's function (scoring.steps) count unchanged: it decides itself what a repeated or a
            # late step earns.
            if self._config.steps is None:
                counted, kept = shaping.earned(step_scores, steps, trajectory.sampled_tokens, config)
            if config.prm_aggregation != "per_step":
                models["process"] = shaping.aggregate(counted, config.prm_aggregation)
        scores = {} if shadow else dict(models)
        scores |= {name: numbers[name] for name in ("rules", "manager") if name in numbers}
        if "outcome" in numbers:
            scores["accuracy"] = shaping.accuracy(numbers["outcome"])
        scores["environment"] = shaping.environment(trajectory, config)
        reward, parts = shaping.shape(scores, trajectory.sampled_tokens, config)
        further = {name: score for name, score in numbers.items() if name.startswith(("rule/", "manager/"))}
        if shadow or not len(step_scores):
            for_algorithms, ends = _of_turns(trajectory)
        else:
            for_algorithms, ends = shaping.transformed(counted, config), _ends(lease)[kept]
        shadowed = {f"shadow/{name}": score for name, score in models.items() if shadow}
        labels = Labels(
            trajectory_id=trajectory.id,
            reward=reward,
            outcome=_outcome(numbers.get("outcome"), scores, counted, trajectory.id),
            scorer=self._name(lease),
            step_scores=for_algorithms,
            step_ends=ends,
            extra=further | parts | shadowed,
            vote=vote,
            reasons=tuple(reasons[:MAX_REASONS]),
        )
        share = sum(shaping.repeated(steps)) / max(1, len(steps))
        return ScoredEpisode(labels, True, step_scores, share, self._agree(step_scores, scores.get("accuracy")))

    def _plain_vote(self, lease: Lease) -> str:
        answer, _ = answer_texts(lease.trajectory, self._tokenizer, self._config.strip_thoughts)
        return votes.vote(None, votes.read_plainly, answer)

    def _agree(self, step_scores: Scores, accuracy: float | None) -> bool | None:
        # The numbers of the function scoring.steps have no middle, above which an answer would count as right.
        if accuracy is None or not len(step_scores) or self._config.steps is not None:
            return None
        config = self._config.shaping
        return (shaping.aggregate(step_scores, config.prm_aggregation) >= shaping.middle(config)) == bool(accuracy)

    def _name(self, lease: Lease) -> str:
        """The names, with versions, of all scorers of the lease so far."""
        before = [lease.partial.scorer] if lease.partial else []
        names = {
            "rules": rule_names(self._config, lease.task.data_source),
            "steps": self._config.steps or "",
            "outcome_model": self._outcome_model.name if self._outcome_model else "",
            "prm": self._prm.name if self._prm else "",
            GROUP_KIND: manager_name(self._config, lease.task.data_source),
        }
        return "+".join([*before, *(names[kind] for kind in lease.kinds)])


def _outcome(rules: float | None, scores: Mapping[str, float], steps: Scores, trajectory_id: str) -> float:
    """The score of the rules, or else of the outcome model, or else of the process model, or else the mean of the
    steps. Raises ScoringError: no score exists."""
    mean = float(steps.mean()) if len(steps) else None
    for score in (rules, scores.get("outcome_model"), scores.get("process"), mean):
        if score is not None:
            return score
    raise ScoringError(f"no rule and no model says anything about {trajectory_id}: see scoring.needs")


def _ends(lease: Lease) -> NDArray[np.int32]:
    return np.array([step.end for step in lease.trajectory.steps], np.int32)


def _of_turns(trajectory: Trajectory) -> tuple[Scores, NDArray[np.int32]]:
    """The rewards float32[k] of turns that have one, and the ends int32[k] of these turns."""
    ends = [turn.end for turn in trajectory.turns if turn.score is not None]
    return np.array(trajectory.turn_scores, np.float32), np.array(ends, np.int32)


def _given(result: T | ScoringError) -> T:
    if isinstance(result, ScoringError):
        raise result
    return result
