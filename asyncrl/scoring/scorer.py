"""Scores leased trajectories: rules and models score single episodes, and managers score whole groups.

Every episode gets labels (see labels.py) or an error. An episode that cannot be scored does not affect others: if a
model fails on a batch, the batch's members are scored one by one.

If a call of a reward model reports that the model's server is unavailable, the server gets an easy episode as a test.
If the server answers the test, it is available. Then the episode of the failed call counts as failed.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from asyncrl.config.schema import ScoringConfig
from asyncrl.config.schema.scoring import GROUP_KIND
from asyncrl.errors import AsyncrlError, ScoringError, UnavailableError
from asyncrl.machine.process import is_ctrl_c
from asyncrl.scoring import shaping
from asyncrl.scoring.answers import answer_texts, rule_input, texts_of_steps
from asyncrl.scoring.labels import Labeller, ScoredEpisode
from asyncrl.scoring.managers import GroupJudge, ManagerScore
from asyncrl.scoring.models.base import OutcomeModel, ProcessRewardModel, RewardModel
from asyncrl.scoring.rules.base import RuleScores
from asyncrl.scoring.shaping import Scores
from asyncrl.scoring.step_rewards import StepInput, StepRewards
from asyncrl.scoring.transcript import Decoder, Passage, Transcript, transcripts
from asyncrl.scoring.verifier import Verifier
from asyncrl.text import reason_of
from asyncrl.types import Lease

logger = logging.getLogger(__name__)

T = TypeVar("T")

WAIT_S = 1.0

_EASY = (Passage("1 + 1 =", False), Passage(" 2", True))


class KindUnavailableError(ScoringError):
    """The service that gives scores of `kind` cannot be reached. The episode is not at fault."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Scorer:
    """Labels episodes. A lease fails if it names a kind of score for which this Scorer was given None. Several threads
    may share one Scorer: it calls models from one thread at a time."""

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
        self._labeller = Labeller(config, tokenizer, prm, outcome_model)
        self._models_lock = threading.Lock()
        self._told_of_images = False

    def score(
        self, leases: Sequence[Lease], called: Callable[[], None] = lambda: None
    ) -> Iterator[ScoredEpisode | ScoringError]:
        """Yield the result of each lease in the order of `leases`, as soon as it and all results before it are ready.
        An error is a KindUnavailableError if the service of any kind in the lease is unavailable.

        Rules, managers and the function of step rewards run at the same time as the models. If a group was leased as a
        whole, `leases` must have the leases of all its members. `called` is called when a call of a model has ended,
        with scores or an error. It is also called every WAIT_S seconds while the models work for another thread.
        """
        judged = self._judge(leases)
        rules = _submitted("rules", self._submit, leases)
        rewarded = _submitted("steps", self._submit_steps, leases)
        outcomes = self._score_with("outcome_model", self._outcome_model, self._outcome_scores, leases, called)
        steps = self._score_with("prm", self._prm, self._step_scores, leases, called)
        for index, lease in enumerate(leases):
            scores = rules.get(index), outcomes.get(index), steps.get(index), rewarded.get(index), judged.get(index)
            away = next((each for each in scores if isinstance(each, KindUnavailableError)), None)
            yield _attempt(partial(self._labeller.label, lease, *scores)) if away is None else away

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
        called: Callable[[], None],
    ) -> dict[int, T | ScoringError]:
        """The scores that a model gives to the leases that name `kind`. The keys are the indices of the leases."""
        chosen = [index for index, lease in enumerate(leases) if kind in lease.kinds]

        def checked(members: Sequence[Lease]) -> list[T]:
            try:
                return score(members)
            except UnavailableError as error:
                reason = str(error)
                raise (ScoringError(reason) if _answers(model) else KindUnavailableError(kind, reason)) from error
            finally:
                called()

        with self._models(called):
            results: list[T | ScoringError] = _together_or_singly(checked, [leases[index] for index in chosen])
        return dict(zip(chosen, results, strict=True))

    @contextmanager
    def _models(self, called: Callable[[], None]) -> Iterator[None]:
        """Hold the lock of the models. A wait for another thread does not count as a hang, since that thread itself
        notices if its call hangs."""
        while not self._models_lock.acquire(timeout=WAIT_S):
            called()
        try:
            yield
        finally:
            self._models_lock.release()

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


def _served(scorer: T | None, kind: str) -> T:
    if scorer is None:
        raise ScoringError(f"this process does not serve {kind}: see scoring.serve")
    return scorer


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
        if model is None:
            return False
        model.score([[*_EASY]])
        return True
    except UnavailableError:
        return False
    except BaseException as error:
        if is_ctrl_c(error):
            raise
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
        return ScoringError(
            "the processes of the rules or of `scoring.steps` were closed before this episode was scored"
        )
    except BaseException as error:
        # A model of a user's class may raise any exception, which would otherwise end the scoring thread.
        if is_ctrl_c(error):
            raise
        failed = ScoringError(reason_of(error))
        failed.__cause__ = error
        return failed
