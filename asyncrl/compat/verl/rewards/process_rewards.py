"""The reward managers `qwen_prm` and `skywork_prm` of a fork of verl: a process reward model scores the steps of each
response.

The managers use the class Scorer, as the scoring pool of a run does. Rows of a batch become trajectories, and their
labels (rewards and scores) become token rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from msgspec import structs
from torch import Tensor

from asyncrl.compat.verl.batches.fields import require
from asyncrl.compat.verl.batches.from_batch import to_trajectories
from asyncrl.compat.verl.batches.protocol import DataProto
from asyncrl.compat.verl.rewards.process_keys import SPLITS, STEPS, read_keys
from asyncrl.compat.verl.rewards.reward_managers import NaiveRewardManager
from asyncrl.compat.verl.rewards.rewarding import ComputeScore, Result, RewardRow, require_finite
from asyncrl.episode.steps import split_steps
from asyncrl.errors import ScoringError
from asyncrl.scoring.models.causal import CausalPRM
from asyncrl.scoring.models.registry import load_prm
from asyncrl.scoring.scorer import Scorer
from asyncrl.scoring.shaping import scale
from asyncrl.types import Labels, Lease, Task, Trajectory

NEEDED = ("prompts", "responses", "attention_mask")
OF_A_TRAJECTORY = ("uid", "trajectory_id", "task_id", "member", "branch", "finish", "turns", "steps")
"""The fields of `from_trajectories` about trajectories. Without `trajectory_id`, each row is one trajectory."""


class _Row(NamedTuple):
    """A row of the batch, which is one branch of a trajectory.

    The response has the tokens [start, end) of the trajectory. `columns` [end - start] has the column of each of these
    tokens in the row's responses.
    """

    number: int
    start: int
    end: int
    columns: Sequence[int]


class ProcessRewardManager(NaiveRewardManager):
    """Scores steps by the process reward model `prm_model_path`; docs/verl.md lists all `keys`.

    An answer is right if `compute_score` returns an `acc` above 0.5, or a score above 0.5 if it returns no `acc`.

    The response is decoded by `input_tokenizer` (a tokenizer, or its folder or hub name), by default `tokenizer`. The
    reward model reads the text with its own template and tokenizer. If the batch has `steps`, as `from_trajectories`
    writes them, these are the steps. Otherwise responses are divided at blank lines (qwen_prm) or newlines
    (skywork_prm).

    Without `prm_model_path` there are no process scores: the reward is the bonuses and penalties for the answer.

    A batch needs the same fields as for other managers, and `uid` for `best_of_n`. The problem is `raw_prompt`, else
    the decoded prompt. Raises ConfigError: a key is wrong, or the model cannot be loaded.
    """

    family: ClassVar[str]

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int = 0,
        compute_score: ComputeScore | None = None,
        reward_fn_key: str = "data_source",
        compute_score_timeout: float | None = None,
        input_tokenizer: Any = None,
        **keys: Any,
    ) -> None:
        self.keys = read_keys(self.family, keys)
        policys = tokenizer if input_tokenizer is None else _tokenizer(input_tokenizer)
        super().__init__(policys, num_examine, compute_score, reward_fn_key, compute_score_timeout)
        self._has_rule = compute_score is not None or self.keys.needs_accuracy
        self._config = self.keys.scoring(self.family, torch.cuda.device_count())
        self._prm = load_prm(self._config.prm) if self.keys.prm_model_path else None
        self._scorer = Scorer(self._config, policys, prm=self._prm)

    def score(self, data: Any, rows: Sequence[RewardRow]) -> tuple[list[Result], Tensor]:
        """The rewards of the batch's rows, and token rewards float32[B, R].

        A response's reward is at its last token. With `prm_aggregation=raw` or `per_step`, each step's score is at the
        step's last token, and the response's last token has the bonuses and penalties.

        Raises ScoringError: a row cannot be scored. Raises InvariantError: a row has no prompt or no sampled token.
        Raises DataProtoError: a field is missing.
        """
        verdicts = self.judge(rows) if self._has_rule else None
        for number, (score, _) in enumerate(verdicts or ()):
            require_finite(score, number)
        trajectories = self._trajectories(data)
        branches = _rows_of(data, trajectories)
        leases = [
            self._lease(trajectory, data, rows, own[-1].number, verdicts)
            for trajectory, own in zip(trajectories, branches, strict=True)
        ]
        labels = self._labels(leases)
        if self.keys.prm_aggregation == "best_of_n" and self._prm is not None:
            require("uid" in data.non_tensor_batch, "prm_aggregation=best_of_n compares groups: the batch has no uid")
            labels = _of_the_best(labels, [trajectory.group_id for trajectory in trajectories])
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        results: list[Result] = [(0.0, {})] * len(rows)
        for label, own in zip(labels, branches, strict=True):
            for row in own:
                _place(rewards[row.number], row, label, self.keys.prm_aggregation in STEPS)
                told = {} if verdicts is None else verdicts[row.number][1]
                results[row.number] = float(rewards[row.number].sum()), {**told, **_parts(label)}
        return results, rewards

    def compute_prm_scores(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The model's score at each token of texts, float32[B, S], and 0 where `attention_mask` int64[B, S] is 0.

        `input_ids` int64[B, S] are tokens of the reward model. The keys decide whether a score is the logit, its
        sigmoid or its tanh. Raises ScoringError: there is no model, or it cannot read these tokens.
        """
        if not isinstance(self._prm, CausalPRM):
            raise ScoringError("compute_prm_scores needs a process reward model: set prm_model_path")
        attended = attention_mask.bool()
        texts = [ids[own].tolist() for ids, own in zip(input_ids, attended, strict=True)]
        found = [torch.from_numpy(scale(each, self._config.shaping)) for each in self._prm.score_tokens(texts)]
        scores = torch.zeros(input_ids.shape, dtype=torch.float32, device=input_ids.device)
        scores[attended] = torch.cat(found).to(scores.device)
        return scores

    def _trajectories(self, data: Any) -> list[Trajectory]:
        missing = [name for name in NEEDED if name not in data.batch]
        require(not missing, f"the batch has no {', '.join(missing)}")
        tensors = {name: data.batch[name] for name in (*NEEDED, "response_mask") if name in data.batch}
        # Trajectories need log-probs, which a batch may lack. Scores do not depend on them.
        tensors["rollout_log_probs"] = torch.zeros_like(tensors["responses"], dtype=torch.float32)
        known = OF_A_TRAJECTORY if "trajectory_id" in data.non_tensor_batch else ("uid",)
        arrays = {name: data.non_tensor_batch[name] for name in known if name in data.non_tensor_batch}
        trajectories = to_trajectories(DataProto.from_dict(tensors, arrays), version=0)
        return trajectories if "steps" in arrays else [self._with_steps(each) for each in trajectories]

    def _with_steps(self, trajectory: Trajectory) -> Trajectory:
        split = SPLITS[self.family]
        piece = cache(lambda token: str(self.tokenizer.decode([token], skip_special_tokens=True)))
        return structs.replace(trajectory, steps=split_steps(split, trajectory.tokens, trajectory.turns, piece))

    def _lease(
        self,
        trajectory: Trajectory,
        data: Any,
        rows: Sequence[RewardRow],
        number: int,
        verdicts: Sequence[Result] | None,
    ) -> Lease:
        row, known = rows[number], None
        messages = data.non_tensor_batch["raw_prompt"][number] if "raw_prompt" in data.non_tensor_batch else ()
        messages = list(messages) or [{"role": "user", "content": row.prompt}]
        if verdicts is not None:
            score, told = verdicts[number]
            given = {"rules": score, "outcome": float(score if told.get("acc") is None else told["acc"])}
            known = Labels(trajectory.id, score, score, "compute_score", extra=given)
        task = Task(trajectory.task_id, messages, row.ground_truth, str(row.data_source))
        return Lease(task, trajectory, () if self._prm is None else ("prm",), known, final=True)

    def _labels(self, leases: Sequence[Lease]) -> list[Labels]:
        labels = []
        for lease, scored in zip(leases, self._scorer.score(leases), strict=True):
            if isinstance(scored, ScoringError):
                raise ScoringError(f"{lease.trajectory.id}: {scored}") from scored
            labels.append(scored.labels)
        return labels


class QwenPRMRewardManager(ProcessRewardManager):
    """Scores by Qwen2.5-Math-PRM. By default a step's score is the logit of the positive label minus the logit of the
    negative label."""

    family = "qwen_prm"


class SkyworkPRMRewardManager(ProcessRewardManager):
    """Scores by Skywork-o1-Open-PRM. By default a step's score is the sigmoid of its value."""

    family = "skywork_prm"

    def __init__(
        self, tokenizer: Any, prm_model_path: str | None = None, num_examine: int = 0, *args: Any, **keys: Any
    ) -> None:
        super().__init__(tokenizer, num_examine, *args, prm_model_path=prm_model_path, **keys)


def _tokenizer(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(given)


def _rows_of(data: Any, trajectories: Sequence[Trajectory]) -> list[list[_Row]]:
    """The rows of each trajectory, in the order of its branches."""
    attended = data.batch["attention_mask"].bool().cpu()
    size = data.batch["prompts"].shape[1]
    names = data.non_tensor_batch.get("trajectory_id", range(len(data)))
    branches = data.non_tensor_batch.get("branch", [0] * len(data))
    numbers: dict[Any, list[int]] = {}
    for number, name in enumerate(names):
        numbers.setdefault(name, []).append(number)
    found = []
    for trajectory, own in zip(trajectories, numbers.values(), strict=True):
        spans = zip(sorted(own, key=lambda number: branches[number]), trajectory.branches, strict=True)
        found.append(
            [
                _Row(number, start + int(attended[number, :size].sum()), end, _columns(attended[number, size:]))
                for number, (start, end) in spans
            ]
        )
    return found


def _columns(attended: Tensor) -> list[int]:
    columns: list[int] = attended.nonzero()[:, 0].tolist()
    return columns


def _of_the_best(labels: Sequence[Labels], groups: Sequence[str]) -> list[Labels]:
    """The labels of all members. A positive process score is subtracted from the reward of each member that is not the
    best of its group."""
    # Negative scores stay, as in algorithms/rewards/best_of_n.py, so that a worse score never gives a higher reward.
    best: dict[str, float] = {}
    for label, group in zip(labels, groups, strict=True):
        best[group] = max(label.extra["process"], best.get(group, label.extra["process"]))
    return [
        replace(label, reward=label.reward - max(label.extra["process"], 0.0))
        if label.extra["process"] < best[group]
        else label
        for label, group in zip(labels, groups, strict=True)
    ]


def _place(rewards: Tensor, row: _Row, label: Labels, by_step: bool) -> None:
    """Add the label's scores to the rewards float32[R] of a row, in place."""
    if by_step:
        for end, score in zip(label.step_ends.tolist(), label.step_scores.tolist(), strict=True):
            if row.start < end <= row.end:
                rewards[row.columns[end - row.start - 1]] += score
    rewards[row.columns[-1]] += label.reward


def _parts(label: Labels) -> dict[str, Any]:
    """The parts of the reward by name; `acc` is 1 for a right answer."""
    names = {"accuracy": "acc", "rules": "score"}
    parts = {names.get(name, name): value for name, value in label.extra.items() if name != "environment"}
    return {**parts, "step_scores": label.step_scores.tolist()}
