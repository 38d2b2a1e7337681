"""Labels leased trajectories: rules and models score single episodes, and managers score whole groups.

The reward is computed (shaping.py) once the episode has the scores of all kinds that it needs. Every episode gets
labels or an error. An episode that cannot be scored does not affect others: if a model fails on a batch, the batch's
members are scored one by one.

If the server of a reward model seems to be unavailable, it is tested with an easy episode. If it answers, it is
available, and the error counts as a failure of the episode that was to be scored.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.schema import ScoringConfig
from asyncrl.config.schema.scoring import GROUP_KIND
from asyncrl.errors import AsyncrlError, ScoringError, UnavailableError
from asyncrl.scoring import shaping
from asyncrl.scoring.answers import answer_texts, rule_input, texts_of_steps
from asyncrl.scoring.managers import GroupJudge, ManagerScore, manager_name
from asyncrl.scoring.models.base import OutcomeModel, ProcessRewardModel, RewardModel
from asyncrl.scoring.rules import votes
from asyncrl.scoring.rules.base import RuleScores
from asyncrl.scoring.rules.registry import rule_names
from asyncrl.scoring.shaping import Scores
from asyncrl.scoring.step_rewards import StepInput, StepRewards
from asyncrl.scoring.transcript import Decoder, Passage, Transcript, transcripts
from asyncrl.scoring.verifier import Verifier
from asyncrl.text import reason_of
from asyncrl.types import MAX_REASONS, Labels, Lease, Reason, Trajectory

logger = logging.getLogger(__name__)

T = TypeVar("T")

_EASY = (Passage("1 + 1 =", False), Passage(" 2", True))
_NO_SCORES, _NO_ENDS = np.zeros(0, np.float32), np.zeros(0, np.int32)


class KindUnavailableError(ScoringError):
    """The service that gives scores of `kind` cannot be reached. The episode is not at fault."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


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


class Scorer:
    """Labels episodes. A lease fails if it names a kind of score that this Scorer cannot give, because the parameter
    for it is None. Several threads may share one Scorer: it calls models from one thread at a time."""

    def __init__(
        self,
        config: ScoringConfig,
        tokenizer: Decoder,
        rules: Verifier | None = None,
        prm: ProcessRewardModel | None = None,
        outcome_model: OutcomeModel | None = None,
        managers: GroupJudge | None = None,
        step_rewards: StepRewards | None = None,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._rules = rules
        self._prm = prm
        self._outcome_model = outcome_model
        self._managers = managers
        self._step_rewards = step_rewards
        self._models_lock = threading.Lock()
        self._told_of_images = False

    def score(self, leases: Sequence[Lease]) -> Iterator[ScoredEpisode | ScoringError]:
        """Yield the result of each lease in the order of `leases`, as soon as it and all results before it are ready.
        An error may be a KindUnavailableError.

        Rules, managers and the function of step rewards run while the models do. If a group was leased as a
        whole, `leases` must have the leases of all its members.
        """
        judged = self._judge(leases)
        rules = _submitted("rules", self._submit, leases)
        rewarded = _submitted("steps", self._submit_steps, leases)
        outcomes = self._score_with("outcome_model", self._outcome_model, self._outcome_scores, leases)
        steps = self._score_with("prm", self._prm, self._step_scores, leases)
        for index, lease in enumerate(leases):
            scores = rules.get(index), outcomes.get(index), steps.get(index), rewarded.get(index), judged.get(index)
            yield _attempt(partial(self._label, lease, *scores))

    def _judge(self, leases: Sequence[Lease]) -> dict[int, Future[ManagerScore] | ScoringError]:
        """The scores that managers give to the leases of whole groups. The keys are the indices of the leases."""
        groups: dict[str, list[int]] = {}
        for index, lease in enumerate(leases):
            if GROUP_KIND in lease.kinds:
                groups.setdefault(lease.trajectory.group_id, []).append(index)
        if not groups:
            return {}
        members = [[leases[index] for index in each] for each in groups.values()]
        futures = _attempt(lambda: _served(self._managers, GROUP_KIND).submit(members))
        found: dict[int, Future[ManagerScore] | ScoringError] = {}
        for position, each in enumerate(groups.values()):
            for place, index in enumerate(each):
                found[index] = futures if isinstance(futures, ScoringError) else futures[position][place]
        return found

    def _submit(self, lease: Lease) -> Future[RuleScores]:
        given = rule_input(lease.task, lease.trajectory, self._tokenizer, self._config.strip_thoughts)
        return _served(self._rules, "rules").submit(given)

    def _submit_steps(self, lease: Lease) -> Future[Scores]:
        trajectory, tokenizer = lease.trajectory, self._tokenizer
        answers = answer_texts(trajectory, tokenizer, self._config.strip_thoughts)
        given = StepInput(lease.task, trajectory, texts_of_steps(trajectory, tokenizer), *answers)
        return _served(self._step_rewards, "steps").submit(given)

    def _score_with(
        self,
        kind: str,
        model: RewardModel[Any] | None,
        score: Callable[[Sequence[Lease]], list[T]],
        leases: Sequence[Lease],
    ) -> dict[int, T | ScoringError]:
        """The scores that a model gives to the leases that name `kind`. The keys are the indices of the leases."""
        chosen = [index for index, lease in enumerate(leases) if kind in lease.kinds]

        def checked(members: Sequence[Lease]) -> list[T]:
            try:
                return score(members)
            except UnavailableError as error:
                reason = str(error)
                raise (ScoringError(reason) if _answers(model) else KindUnavailableError(kind, reason)) from error

        with self._models_lock:
            results: list[T | ScoringError] = _together_or_singly(checked, [leases[index] for index in chosen])
        return dict(zip(chosen, results, strict=True))

    def _outcome_scores(self, leases: Sequence[Lease]) -> list[float]:
        model = _served(self._outcome_model, "outcome_model")
        scores = model.score([self._transcripts(lease)[-1] for lease in leases])
        if len(scores) != len(leases) or not all(math.isfinite(score) for score in scores):
            raise ScoringError(f"{model.name} gave {scores!r:.200} for {len(leases)} episodes")
        return scores

    def _step_scores(self, leases: Sequence[Lease]) -> list[Scores]:
        model = _served(self._prm, "prm")
        by_lease = [self._transcripts(lease) for lease in leases]
        branches = [branch for each in by_lease for branch in each]
        # The steps are counted before the model runs, since a user's model may change these lists.
        wanted = [(sum(passage.is_step for passage in branch),) for branch in branches]
        scores = [shaping.scale(each, self._config.shaping) for each in model.score(branches)]
        shapes = [each.shape for each in scores]
        if shapes != wanted:
            raise ScoringError(f"{model.name} gave scores of shapes {shapes} for steps of shapes {wanted}")
        rest = iter(scores)
        return [np.concatenate([*islice(rest, len(each))]) for each in by_lease]

    def _transcripts(self, lease: Lease) -> list[Transcript]:
        if len(lease.trajectory.image_digests) and not self._told_of_images:
            self._told_of_images = True
            logger.warning(
                "an episode shows images, which reward models do not see: they judge only its text (docs/scoring.md)"
            )
        return transcripts(lease.trajectory, self._tokenizer, lease.task)

    def _label(
        self,
        lease: Lease,
        rules: Future[RuleScores] | ScoringError | None,
        outcome: float | ScoringError | None,
        steps: Scores | ScoringError | None,
        rewarded: Future[Scores] | ScoringError | None,
        judged: Future[ManagerScore] | ScoringError | None,
    ) -> ScoredEpisode:
        """Put the scores of one lease together as labels. Raises ScoringError: a kind in `lease.kinds` gave none."""
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


def _served(scorer: T | None, kind: str) -> T:
    if scorer is None:
        raise ScoringError(f"this process does not serve {kind}: see scoring.serve")
    return scorer


def _given(result: T | ScoringError) -> T:
    if isinstance(result, ScoringError):
        raise result
    return result


def _submitted(
    kind: str, submit: Callable[[Lease], Future[T]], leases: Sequence[Lease]
) -> dict[int, Future[T] | ScoringError]:
    """The futures of the leases that name `kind`. The keys are the indices of the leases."""
    chosen = {index: lease for index, lease in enumerate(leases) if kind in lease.kinds}
    return {index: _attempt(partial(submit, lease)) for index, lease in chosen.items()}


def _together_or_singly(score: Callable[[Sequence[Lease]], list[T]], leases: Sequence[Lease]) -> list[T | ScoringError]:
    """Score all leases in one call or, if it fails, one by one. Once a service is unavailable, it gets no requests for
    the remaining leases."""
    if not leases:
        return []
    together: list[T] | ScoringError = _attempt(partial(score, leases))
    if not isinstance(together, ScoringError):
        return [*together]
    if isinstance(together, KindUnavailableError) or len(leases) == 1:
        return [together] * len(leases)
    results: list[T | ScoringError] = []
    for lease in leases:
        one: list[T | ScoringError] = _together_or_singly(score, [lease])
        results += one
        if isinstance(results[-1], KindUnavailableError):
            return results + results[-1:] * (len(leases) - len(results))
    return results


def _answers(model: RewardModel[Any] | None) -> bool:
    """True if the model's service answers a request to score an easy episode. A failure of the model is an answer,
    too."""
    try:
        return model is not None and len(model.score([[*_EASY]])) == 1
    except UnavailableError:
        return False
    except Exception:
        logger.debug("the model cannot score an easy episode", exc_info=True)
        return True


def _attempt(work: Callable[[], T]) -> T | ScoringError:
    try:
        return work()
    except KindUnavailableError as error:
        return error
    except AsyncrlError as error:
        return ScoringError(str(error))
    except CancelledError:
        return ScoringError("the rules were closed before this episode was scored")
    except Exception as error:  # noqa: BLE001 - the worker logs it
        failed = ScoringError(reason_of(error))
        failed.__cause__ = error
        return failed
