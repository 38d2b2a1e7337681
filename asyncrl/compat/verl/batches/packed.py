"""Converts a batch in verl's layout to the input of asyncrl's algorithms: packed tokens and episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from asyncrl.algorithms.batch import Episodes, Tokens
from asyncrl.compat.verl.batches.fields import require
from asyncrl.compat.verl.batches.from_batch import check_widths, to_labels
from asyncrl.compat.verl.batches.protocol import DataProto
from asyncrl.config.schema import LearnerConfig
from asyncrl.types import NO_VERSION

NAMES = {
    "old_log_probs": "proximal",
    "ref_log_prob": "reference",
    "values": "values",
    "advantages": "advantages",
    "returns": "returns",
}
"""verl's fields float32[B, R], each with asyncrl's name. In verl and in asyncrl, an entry belongs to the token with the
same index."""
PREPARED = {
    "rollout_is_weights": "weights",
    "token_rejected": "rejected",
    "token_selected": "selected",
    "token_lag": "lag",
    "token_streams": "streams",
    "token_collisions": "collisions",
}
"""Batch fields for further results of `Algorithm.prepare`, each with its name in `Tokens`.

A field is [B, R]. The weights of tokens in K loss streams are [B, R, K]. The dtypes are those of `Tokens`. verl itself
has only the first field, the importance weights.
"""


def to_tokens(data: DataProto, min_grammar_mass: float = LearnerConfig.min_grammar_mass) -> Tokens:
    """The N tokens of a batch, row by row and without padding.

    Rows of one trajectory become one sequence, and must be adjacent. Fields [B, R] of the batch become 0 on prompt
    tokens. If the batch has no `versions`, sampled tokens have version 0. A token is `restricted` if its grammar left
    less than `min_grammar_mass` of the probability.

    Raises DataProtoError: a field is missing, or the rows of a trajectory are not adjacent.
    """
    batch = data.batch
    needed = ("prompts", "attention_mask", "response_mask")
    missing = [name for name in needed if batch is None or name not in batch]
    require(not missing, f"the batch has no {', '.join(missing)}")
    behaviour = batch.get("rollout_log_probs", batch.get("old_log_probs"))
    require(behaviour is not None, "the batch has neither rollout_log_probs nor old_log_probs")
    check_widths(batch)
    attended = batch["attention_mask"].bool()
    mask = _packed(batch["response_mask"].bool(), attended)
    versions = batch.get("versions")
    if versions is None:
        versions = torch.where(batch["response_mask"].bool(), 0, NO_VERSION)
    owners = torch.tensor(_owners(data), dtype=torch.int64, device=attended.device)
    sequence = owners.repeat_interleave(attended.sum(-1))
    first = torch.searchsorted(sequence, sequence)
    given: dict[str, Any] = {
        ours: _packed(batch[name].float(), attended) for name, ours in NAMES.items() if name in batch
    }
    given |= {ours: _packed(batch[name], attended) for name, ours in PREPARED.items() if name in batch}
    if "grammar_mass" in batch:
        given["restricted"] = mask & (_packed(batch["grammar_mass"], attended) < min_grammar_mass)
    return Tokens(
        sequence=sequence,
        position=torch.arange(len(sequence), device=sequence.device) - first,
        mask=mask,
        behaviour=_packed(behaviour.float(), attended) * mask,
        versions=torch.where(mask, _packed(versions, attended), NO_VERSION),
        **given,
    )


def to_episodes(data: DataProto, version: int | None = None) -> Episodes:
    """The S trajectories of a batch with token_level_scores. Rows with the same `uid` form a group.

    `version` is the learner's policy version.

    Raises DataProtoError: a field is missing, or the rows of a trajectory are not adjacent.
    """
    labels = to_labels(data)
    owners = torch.tensor(_owners(data), dtype=torch.int64)
    uids = data.non_tensor_batch.get("uid", owners.numpy())
    group_of: dict[object, int] = {}
    groups = torch.zeros(len(labels), dtype=torch.int64)
    for owner, uid in zip(owners.tolist(), uids.tolist(), strict=True):
        groups[owner] = group_of.setdefault(uid, len(group_of))
    response = data.batch["response_mask"].bool()
    # In a batch that asyncrl did not make, the response mask may be 1 on padding.
    sampled = (response & data.batch["attention_mask"].bool()[:, -response.shape[1] :]).sum(-1).cpu()
    names = sorted(set(labels[0].extra).intersection(*(each.extra for each in labels))) if labels else []
    steps = torch.tensor([len(each.step_scores) for each in labels], dtype=torch.int64)
    return Episodes(
        group=groups,
        reward=torch.tensor([each.reward for each in labels]),
        outcome=torch.tensor([each.outcome for each in labels]),
        lengths=torch.zeros(len(labels), dtype=torch.int64).index_add(0, owners, sampled),
        step_scores=torch.tensor([score for each in labels for score in each.step_scores.tolist()]),
        step_sequence=torch.arange(len(labels)).repeat_interleave(steps),
        step_end=torch.tensor([end for each in labels for end in each.step_ends.tolist()], dtype=torch.int64),
        extra={name: torch.tensor([each.extra[name] for each in labels]) for name in names},
        version=version,
    )


def add_tokens(data: DataProto, tokens: Tokens, names: Sequence[str] = (*NAMES, *PREPARED)) -> DataProto:
    """Add fields of `tokens` to the batch from which `to_tokens` made them, in place.

    `names` are the fields' names in the batch. A field is [B, R] or [B, R, K], and 0 on padding. A name is skipped if
    `tokens` has None for it.
    """
    attended = data.batch["attention_mask"].bool()
    size = data.batch["prompts"].shape[1]
    for name in names:
        values = getattr(tokens, (NAMES | PREPARED)[name])
        if values is not None:
            dtype = torch.float32 if name in NAMES else values.dtype
            whole = torch.zeros((*attended.shape, *values.shape[1:]), dtype=dtype, device=attended.device)
            whole[attended] = values.to(whole.device, dtype)
            data.batch[name] = whole[:, size:].contiguous()
    return data


def _packed(values: Tensor, attended: Tensor) -> Tensor:
    """The `values` [B, R, ...] without padding: a value for each true entry of `attended` bool[B, P + R], 0 on prompt
    tokens."""
    whole = values.new_zeros((*attended.shape, *values.shape[2:]))
    whole[:, attended.shape[1] - values.shape[1] :] = values
    return whole[attended]


def _owners(data: DataProto) -> list[int]:
    """The index of each row's trajectory. Raises DataProtoError: a trajectory's rows are not adjacent."""
    names = data.non_tensor_batch.get("trajectory_id")
    if names is None:
        return list(range(len(data)))
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names.tolist()))}
    owners = [numbers[name] for name in names.tolist()]
    require(owners == sorted(owners), "rows of one trajectory must be adjacent")
    return owners
