"""Leases to labels: each episode is judged by the rules and models that its lease names; the last of them shapes what
all have found.

Every episode ends in labels or in the reason why there are none. One that cannot be scored does not touch the others:
where a batch fails in a model, its members are scored one by one. Whether a service is away, or cannot score this
episode, is found out with an episode that every model can score.
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
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.schema import ScoringConfig
from asyncrl.errors import AsyncrlError, ScoringError, UnavailableError
from asyncrl.scoring.answers import answer_texts, response_text
from asyncrl.scoring.models.base import OutcomeModel, ProcessRewardModel
from asyncrl.scoring.outages import AwayError
from asyncrl.scoring.rules.base import Case, Verdict
from asyncrl.scoring.rules.registry import rule_names
from asyncrl.scoring.shaping import Found, shape
from asyncrl.scoring.steps import Scores, aggregate, earned, middle, repeated, said_at, scale, transformed
from asyncrl.scoring.transcript import Decoder, Passage, Transcript, transcripts
from asyncrl.text import reason_of
from asyncrl.types import Labels, Lease

logger = logging.getLogger(__name__)

T = TypeVar("T")

_EASY = [Passage("1 + 1 =", False), Passage(" 2", True)]
_NO_SCORES, _NO_ENDS = np.zeros(0, np.float32), np.zeros(0, np.int32)


class Rules(Protocol):
    """Judges cases by rule, several at once; see `Verifier`."""

    def submit(self, case: Case) -> Future[Verdict]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """The labels of one lease. Of a final one also what the guards watch: every step's score float32[K] before anything
    was taken away, the share of steps that repeat another, and whether process model and rules agree on the answer."""

    labels: Labels
    final: bool
    step_scores: Scores = field(default_factory=lambda: _NO_SCORES)
    repeated: float = 0.0
    agree: bool | None = None


class Scorer:
    """Labels episodes; what is None must not be asked for by a lease. Several threads may share one: models are asked
    by one at a time."""

    def __init__(
        self,
        config: ScoringConfig,
        tokenizer: Decoder,
        rules: Rules | None = None,
        prm: ProcessRewardModel | None = None,
        outcome_model: OutcomeModel | None = None,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._rules = rules
        self._prm = prm
        self._outcome_model = outcome_model
        self._models = threading.Lock()

    def score(self, leases: Sequence[Lease]) -> Iterator[Scored | ScoringError]:
        """What became of each lease, in order, as it is ready: of some AwayError. Rules run while the models do."""
        verdicts = [self._judge(lease) if "rules" in lease.kinds else None for lease in leases]
        outcomes = self._ask("outcome_model", self._outcome_model, self._read_outcomes, leases)
        steps = self._ask("prm", self._prm, self._read_steps, leases)
        for index, lease in enumerate(leases):
            findings = (verdicts[index], outcomes.get(index), steps.get(index))
            yield _attempt(partial(self._label, lease, *findings))

    def _judge(self, lease: Lease) -> Future[Verdict] | ScoringError:
        def submit() -> Future[Verdict]:
            trajectory, tokenizer = lease.trajectory, self._tokenizer
            answer, full_answer = answer_texts(trajectory, tokenizer, self._config.strip_thoughts)
            response = response_text(trajectory, tokenizer)
            case = Case(lease.task, trajectory, answer, response, full_answer=full_answer)
            return _served(self._rules, "rules").submit(case)

        return _attempt(submit)

    def _ask(
        self,
        kind: str,
        model: OutcomeModel | ProcessRewardModel | None,
        read: Callable[[Sequence[Lease]], list[T]],
        leases: Sequence[Lease],
    ) -> dict[int, T | ScoringError]:
        """What a model says of the leases that name it, by their index."""
        chosen = [index for index, lease in enumerate(leases) if kind in lease.kinds]

        def ask(asked: Sequence[Lease]) -> list[T]:
            try:
                return read(asked)
            except UnavailableError as error:
                raise (ScoringError(str(error)) if _answers(model) else AwayError(kind, str(error))) from error

        with self._models:
            said: list[T | ScoringError] = _together_or_singly(ask, [leases[index] for index in chosen])
        return dict(zip(chosen, said, strict=True))

    def _read_outcomes(self, leases: Sequence[Lease]) -> list[float]:
        model = _served(self._outcome_model, "outcome_model")
        scores = model.score([self._transcripts(lease)[-1] for lease in leases])
        if len(scores) != len(leases) or not all(math.isfinite(score) for score in scores):
            raise ScoringError(f"{model.name} gave {scores!r:.200} for {len(leases)} episodes")
        return scores

    def _read_steps(self, leases: Sequence[Lease]) -> list[Scores]:
        model = _served(self._prm, "prm")
        asked = [self._transcripts(lease) for lease in leases]
        branches = [branch for each in asked for branch in each]
        scores = [scale(each, self._config.shaping) for each in model.score(branches)]
        found = [each.shape for each in scores]
        wanted = [(sum(passage.is_step for passage in branch),) for branch in branches]
        if found != wanted:
            raise ScoringError(f"{model.name} gave scores of shapes {found} for steps of shapes {wanted}")
        if not all(np.isfinite(each).all() for each in scores):
            raise ScoringError(f"{model.name} gave a step score that is not finite")
        rest = iter(scores)
        return [np.concatenate([*islice(rest, len(each))]) for each in asked]

    def _transcripts(self, lease: Lease) -> list[Transcript]:
        return transcripts(lease.trajectory, self._tokenizer, lease.task)

    def _label(
        self,
        lease: Lease,
        verdict: Future[Verdict] | ScoringError | None,
        outcome: float | ScoringError | None,
        steps: Scores | ScoringError | None,
    ) -> Scored:
        """Raises ScoringError: one of the kinds has none to give."""
        partial_labels = lease.partial
        found = dict(partial_labels.extra) if partial_labels else {}
        if verdict is not None:
            judged = _given(verdict).result()
            found |= {"outcome": judged.outcome, "rules": judged.total}
            found |= {f"rule/{name}": score for name, score in judged.scores.items()}
        if outcome is not None:
            found["outcome_model"] = _given(outcome)
        scores = partial_labels.step_scores if partial_labels else _NO_SCORES
        if steps is not None:
            scores = _given(steps)
            if not len(scores):
                raise ScoringError("the episode has no steps to score")
        if lease.final:
            return self._finish(lease, found, scores)
        ends = _ends(lease) if len(scores) else _NO_ENDS
        return Scored(Labels(lease.trajectory.id, 0.0, 0.0, self._name(lease), scores, ends, found), final=False)

    def _finish(self, lease: Lease, found: Mapping[str, float], scores: Scores) -> Scored:
        """The labels with the reward, from all that was found; `scores` are those of all steps, or empty."""
        config, trajectory, shadow = self._config.shaping, lease.trajectory, self._config.shadow
        texts = [each.plain for branch in self._transcripts(lease) for each in branch if each.is_step]
        said = said_at(trajectory, texts)
        counted, process = _NO_SCORES, None
        kept: list[int] = []
        if len(scores):
            counted, kept = earned(scores, said, trajectory.sampled_tokens, config)
            process = aggregate(counted, config.prm_aggregation)
        models = {"outcome_model": found.get("outcome_model"), "process": process}
        parts = Found(
            trajectory.sampled_tokens,
            rules=found.get("rules"),
            outcome=found.get("outcome"),
            outcome_model=None if shadow else models["outcome_model"],
            process=None if shadow else models["process"],
            environment=float(sum(trajectory.rewards.values())),
        )
        shaped = shape(parts, config)
        by_rule = {name: score for name, score in found.items() if name.startswith("rule/")}
        shadowed = {f"shadow/{name}": score for name, score in models.items() if shadow and score is not None}
        labels = Labels(
            trajectory_id=trajectory.id,
            reward=shaped.reward,
            outcome=_outcome(parts, counted, trajectory.id),
            scorer=self._name(lease),
            step_scores=_NO_SCORES if shadow else transformed(counted, config),
            step_ends=_NO_ENDS if shadow else _ends(lease)[kept],
            extra=by_rule | dict(shaped.parts) | shadowed,
        )
        share = sum(repeated(said)) / max(1, len(said))
        return Scored(labels, True, scores, share, self._agree(scores, parts.accuracy))

    def _agree(self, scores: Scores, accuracy: float | None) -> bool | None:
        if accuracy is None or not len(scores):
            return None
        how = self._config.shaping.prm_aggregation
        said = aggregate(scores, "mean_response" if how == "per_step" else how)
        assert said is not None
        return (said >= middle(self._config.shaping)) == bool(accuracy)

    def _name(self, lease: Lease) -> str:
        """The names of all that scored so far, with versions."""
        before = [lease.partial.scorer] if lease.partial else []
        names = {
            "rules": rule_names(self._config, lease.task.data_source),
            "outcome_model": self._outcome_model.name if self._outcome_model else "",
            "prm": self._prm.name if self._prm else "",
        }
        return "+".join([*before, *(names[kind] for kind in lease.kinds)])


def _outcome(found: Found, steps: Scores, trajectory_id: str) -> float:
    """The verdict of the first kind that has one, the mean of the steps at last. Raises ScoringError: nothing was found
    out."""
    mean = float(steps.mean()) if len(steps) else None
    for score in (found.outcome, found.outcome_model, found.process, mean):
        if score is not None:
            return score
    raise ScoringError(f"no rule and no model says anything about {trajectory_id}: see scoring.needs")


def _ends(lease: Lease) -> NDArray[np.int32]:
    return np.array([step.end for step in lease.trajectory.steps], np.int32)


def _served(scorer: T | None, kind: str) -> T:
    if scorer is None:
        raise ScoringError(f"this process does not serve {kind}: see scoring.serve")
    return scorer


def _given(result: T | ScoringError) -> T:
    if isinstance(result, ScoringError):
        raise result
    return result


def _together_or_singly(ask: Callable[[Sequence[Lease]], list[T]], leases: Sequence[Lease]) -> list[T | ScoringError]:
    """What is said of each lease. Who is away is not asked for the others."""
    if not leases:
        return []
    together: list[T] | ScoringError = _attempt(partial(ask, leases))
    if not isinstance(together, ScoringError):
        return [*together]
    if isinstance(together, AwayError) or len(leases) == 1:
        return [together] * len(leases)
    said: list[T | ScoringError] = []
    for lease in leases:
        one: list[T | ScoringError] = _together_or_singly(ask, [lease])
        said += one
        if isinstance(one[0], AwayError):
            return said + one * (len(leases) - len(said))
    return said


def _answers(model: OutcomeModel | ProcessRewardModel | None) -> bool:
    """Whether the model scores an episode that every model can."""
    try:
        return model is not None and len(model.score([_EASY])) == 1
    except UnavailableError:
        return False
    except Exception:
        logger.debug("not even an easy episode was scored", exc_info=True)
        return True


def _attempt(work: Callable[[], T]) -> T | ScoringError:
    try:
        return work()
    except AwayError as error:
        return error
    except AsyncrlError as error:
        return ScoringError(str(error))
    except CancelledError:
        return ScoringError("the rules were closed before they came to this episode")
    except Exception as error:
        logger.exception("scoring failed")
        return ScoringError(reason_of(error))
