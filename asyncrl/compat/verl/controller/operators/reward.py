"""The worker that scores episodes by rules and reward models, and shapes rewards as in a run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

import torch

from asyncrl.compat.verl.batches.fields import columns, require
from asyncrl.compat.verl.batches.protocol import DataProto
from asyncrl.compat.verl.batches.to_batch import label_fields, score_rows
from asyncrl.compat.verl.controller.modes import Dispatch, register
from asyncrl.compat.verl.controller.operators.generation import DROPPED
from asyncrl.compat.verl.controller.operators.parts import by_trajectory, shared_among_collecting
from asyncrl.compat.verl.controller.operators.plans import trajectories_of
from asyncrl.compat.verl.controller.operators.prompts import tasks_of
from asyncrl.compat.verl.controller.worker import Worker
from asyncrl.config.schema import ModelConfig, ScoringConfig
from asyncrl.config.schema.scoring import GROUP_KIND, configured, needs, serves
from asyncrl.errors import ConfigError, ScoringError
from asyncrl.modelling.tokenizer import open_tokenizer
from asyncrl.scoring.labels import ScoredEpisode
from asyncrl.scoring.models.registry import load_outcome_model, load_prm
from asyncrl.scoring.scorer import KindUnavailableError, Scorer
from asyncrl.scoring.step_rewards import StepRewards
from asyncrl.scoring.verifier import Verifier
from asyncrl.types import Labels, Lease, Task, Trajectory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ScoredPart:
    """The scored rows of one worker. `failures` maps the uid of each group that cannot be scored to the reason."""

    data: DataProto | None
    failures: Mapping[str, str]


def joined_scores(parts: Sequence[ScoredPart]) -> DataProto:
    """The rows of all parts, in order, without groups that cannot be scored. Raises ScoringError: no group is left."""
    failures = {uid: reason for part in parts for uid, reason in part.failures.items()}
    for uid, reason in failures.items():
        logger.warning("group %s is left out, since it cannot be scored: %s", uid, reason)
    scored = [part.data for part in parts if part.data is not None and len(part.data)]
    whole: DataProto = DataProto.concat(scored) if scored else DataProto()
    kept = whole[[uid not in failures for uid in whole.non_tensor_batch["uid"].tolist()]] if scored else whole
    if not len(kept):
        reason = next(iter(failures.values())) if failures else "the batch has no rows"
        raise ScoringError(f"no group can be scored: {reason}")
    about = {**kept.meta_info, DROPPED: kept.meta_info.get(DROPPED, 0) + len(failures)}
    return DataProto(kept.batch, kept.non_tensor_batch, about)


def joined_rm_scores(parts: Sequence[ScoredPart]) -> DataProto:
    """The scores of all rows, in order, as `rm_scores` and `token_level_scores`. Raises ScoringError: a group cannot
    be scored."""
    failures = {uid: reason for part in parts for uid, reason in part.failures.items()}
    for uid, reason in failures.items():
        raise ScoringError(f"group {uid} cannot be scored: {reason}")
    found = [part.data.batch["token_level_scores"] for part in parts if part.data is not None]
    scores = torch.cat(found) if found else torch.zeros(0, 0)
    joined: DataProto = DataProto.from_dict({"rm_scores": scores, "token_level_scores": scores.clone()})
    return joined


class RewardWorker(Worker):
    """All rules and models of `scoring`. Each data-parallel rank scores a part of a batch.

    Call `init_model` before other methods. `model` is the configuration of the policy. A trajectory is tried up to
    `max_attempts` times. A rank has `workers_per_model` workers. Of these, only the one that collects has the rules and
    models; the others get and return no rows.
    """

    def __init__(
        self, scoring: ScoringConfig, model: ModelConfig, max_attempts: int, workers_per_model: int = 1
    ) -> None:
        super().__init__()
        self.init_mesh(tp_size=workers_per_model)
        self._scoring = scoring
        self._model = model
        self._max_attempts = max_attempts
        self._stack = ExitStack()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the models, and start the processes of rules.

        Raises ConfigError: a model or rule cannot be used, or a manager is configured. A manager needs whole groups,
        but a worker gets only a part of a batch.
        """
        if not self.collects:
            return
        scoring, model = self._scoring, self._model
        kinds = serves(scoring)
        if GROUP_KIND in configured(scoring):
            raise ConfigError(
                "scoring.manager works only in runs (asyncrl train): in a program, make the manager by "
                "load_reward_manager, and call it with the whole batch"
            )
        tokenizer = open_tokenizer(model)
        prm = load_prm(scoring.prm) if "prm" in kinds else None
        outcome = load_outcome_model(scoring.outcome_model) if "outcome_model" in kinds else None
        verifier = self._stack.enter_context(closing(Verifier(scoring, model))) if "rules" in kinds else None
        steps = self._stack.enter_context(closing(StepRewards(scoring))) if "steps" in kinds else None
        self._scorer = Scorer(scoring, tokenizer, verifier, prm, outcome, step_rewards=steps)

    @register(dispatch_mode=shared_among_collecting(by_trajectory, joined_scores))
    def compute_reward(self, data: DataProto) -> ScoredPart:
        """The batch with `token_level_scores` and `token_level_rewards`, and the fields of its labels.

        Groups that cannot be scored are left out, logged and counted. Raises ScoringError: a service cannot be reached,
        or no group can be scored.
        """
        return self._scored(data)

    @register(dispatch_mode=shared_among_collecting(by_trajectory, joined_rm_scores))
    def compute_rm_score(self, data: DataProto) -> ScoredPart:
        """A batch with `rm_scores` and `token_level_scores` alone, both float32[B, R], for `data.union`.

        Raises ScoringError: a service cannot be reached, or a group cannot be scored.
        """
        return self._scored(data)

    def _scored(self, data: DataProto) -> ScoredPart:
        if not (self.collects and len(data)):
            return ScoredPart(None, {})
        require("trajectory_id" in data.non_tensor_batch, "the batch has no trajectory_id: call generate_sequences")
        trajectories = trajectories_of(data)
        rows = dict(zip(data.non_tensor_batch["trajectory_id"].tolist(), range(len(data)), strict=True))
        tasks = tasks_of(data)
        waiting = {each.id: self._lease(each, tasks[rows[each.id]]) for each in trajectories}
        labels, failed = self._labels(waiting)
        groups = {each.id: each.group_id for each in trajectories}
        failures = {groups[name]: str(error) for name, error in failed.items()}
        kept = data[[name in labels for name in data.non_tensor_batch["trajectory_id"].tolist()]]
        return ScoredPart(_with_labels(kept, labels) if len(kept) else None, failures)

    def close(self) -> None:
        self._stack.close()

    def _lease(self, trajectory: Trajectory, task: Task) -> Lease:
        kinds = needs(self._scoring, task.data_source)
        return Lease(task, trajectory, kinds, None, final=True)

    def _labels(self, waiting: Mapping[str, Lease]) -> tuple[dict[str, Labels], dict[str, ScoringError]]:
        """The labels by trajectory id, and the last error of each trajectory that failed in all attempts."""
        labels: dict[str, Labels] = {}
        failed: dict[str, ScoringError] = {}
        for _ in range(self._max_attempts):
            left = {name: lease for name, lease in waiting.items() if name not in labels}
            for name, result in zip(left, self._results(list(left.values())), strict=True):
                if isinstance(result, KindUnavailableError):
                    raise result
                if isinstance(result, ScoringError):
                    failed[name] = result
                else:
                    labels[name] = result.labels
                    failed.pop(name, None)
        return labels, failed

    def _results(self, leases: Sequence[Lease]) -> Iterator[ScoredEpisode | ScoringError]:
        """The result of each lease, in order. A lease is a trajectory that waits for its scores. Leases are scored in
        batches of the size that a run uses."""
        batch: list[Lease] = []
        most, tokens = self._scoring.batch_trajectories, self._scoring.batch_tokens
        for lease in leases:
            size = sum(len(each.trajectory) for each in [*batch, lease])
            if batch and (len(batch) == most or size > tokens):
                yield from self._scorer.score(batch)
                batch = []
            batch.append(lease)
        yield from self._scorer.score(batch)


def _with_labels(data: DataProto, labels: Mapping[str, Labels]) -> DataProto:
    judged = [labels[name] for name in data.non_tensor_batch["trajectory_id"].tolist()]
    size = data.batch["prompts"].shape[1]
    lengths = data.batch["attention_mask"][:, size:].sum(-1).tolist()
    scores = score_rows([each.reward for each in judged], lengths, data.batch["responses"].shape[1])
    data.batch["token_level_scores"] = scores
    data.batch["token_level_rewards"] = scores.clone()
    data.non_tensor_batch |= columns([label_fields(each) for each in judged])
    return data
