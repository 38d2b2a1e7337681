"""Converts a batch in verl's layout to asyncrl's trajectories and labels.

The batch may come from `to_batch.py`, which describes the layout, or from verl itself. A batch from verl has no turns
and steps, so they are derived from the masks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.compat.verl.batches.fields import UNSAMPLED, require
from asyncrl.compat.verl.batches.protocol import DataProto
from asyncrl.scoring.rules.verl import USER_TURN_REWARDS
from asyncrl.types import (
    DIGEST_BYTES,
    NO_MASS,
    NO_ROUTING,
    NO_VERSION,
    Finish,
    Labels,
    Role,
    Step,
    ToolCall,
    Trajectory,
    Turn,
    runs_of,
)

IMAGES_OF_VERL = ("multi_modal_data", "multi_modal_inputs")
OF_RESPONSES = ("response_mask", "rollout_log_probs", "old_log_probs", "versions", "token_level_scores")
"""Fields of shape [B, R]."""


def to_trajectories(data: DataProto, version: int | None = None) -> list[Trajectory]:
    """The trajectories of a batch in verl's layout, in the order of their first rows.

    A batch that `from_trajectories` made gives trajectories equal to the original ones. A batch from verl needs
    prompts, responses, attention_mask, and rollout_log_probs or old_log_probs. If it has no response_mask, all response
    tokens count as sampled. Each run of sampled tokens becomes one assistant turn and one step, and rows with the same
    `uid` become one group.

    If the batch has no `versions`, `version` is the policy version of all sampled tokens. Raises DataProtoError: a
    field is missing, or rows have images in verl's form. Raises InvariantError: the values do not form a trajectory.
    """
    for name in IMAGES_OF_VERL:
        shown = any(bool(each) for each in data.non_tensor_batch.get(name, ()))
        require(not shown, f"{name} has images or videos, which cannot be converted here: leave these rows out")
    needed = ("prompts", "responses", "attention_mask")
    missing = [name for name in needed if data.batch is None or name not in data.batch]
    require(not missing, f"the batch has no {', '.join(missing)}")
    logprobs = data.batch.get("rollout_log_probs", data.batch.get("old_log_probs"))
    require(logprobs is not None, "the batch has neither rollout_log_probs nor old_log_probs")
    require(
        "versions" in data.batch or version is not None, "the batch has no versions: pass the `version` of its policy"
    )
    check_widths(data.batch)
    for name in needed[:2]:
        ids = data.batch[name]
        fits = not ids.is_floating_point() and (not ids.numel() or int(ids.max()) < 2**31)
        require(fits, f"{name} has ids that are not whole numbers below 2^31")
    rows = [_row(data, row, logprobs, version) for row in range(len(data))]
    names = data.non_tensor_batch.get("trajectory_id", np.arange(len(data)))
    parts: dict[Any, list[_Row]] = {}
    for name, row in zip(names.tolist(), rows, strict=True):
        parts.setdefault(name, []).append(row)
    members: dict[str, int] = {}
    return [_joined(sorted(each, key=lambda row: row.facts["branch"]), members) for each in parts.values()]


def check_widths(batch: Any) -> None:
    """Raises DataProtoError: the attention mask or a field in OF_RESPONSES has a wrong number of columns."""
    prompts = batch["prompts"].shape[1]
    whole = prompts + batch["responses"].shape[1] if "responses" in batch else batch["attention_mask"].shape[1]
    widths = {"attention_mask": whole, **dict.fromkeys(OF_RESPONSES, whole - prompts)}
    for name, width in widths.items():
        if name in batch:
            found = batch[name].shape[1]
            require(
                found == width, f"{name} has {found} columns; with these prompts and responses it must have {width}"
            )


def to_labels(data: DataProto, scorer: str = "verl") -> list[Labels]:
    """The labels of a batch's trajectories, in the order of `to_trajectories`.

    The reward is the sum of token_level_scores in the trajectory's last row. Scores of steps, and further scores, are
    empty if the batch has none. A missing outcome is `acc`, or the reward if `acc` is missing too.

    Raises DataProtoError: the batch has no token_level_scores.
    """
    require(data.batch is not None and "token_level_scores" in data.batch, "the batch has no token_level_scores")
    rewards = data.batch["token_level_scores"].sum(-1).tolist()
    names = data.non_tensor_batch.get("trajectory_id")
    found: dict[str, Labels] = {}
    for row, reward in enumerate(rewards):
        facts = {name: values[row] for name, values in data.non_tensor_batch.items()}
        name = _name(facts, row) if names is None else str(names[row])
        given = {
            "step_scores": np.array(facts.get("step_scores", ()), np.float32),
            "step_ends": np.array(facts.get("step_ends", ()), np.int32),
            "extra": facts.get("extra_scores", {}),
        }
        outcome = float(facts.get("outcome", facts.get("acc", reward)))
        found[name] = Labels(name, reward, outcome, str(facts.get("scorer", scorer)), **given)
    return list(found.values())


class _Row(NamedTuple):
    """A row: one branch of T tokens without padding. Its arrays are [T], and [T, W] for `routed_experts`.

    `facts` are the row's non-tensor fields. `_known` adds those that the batch lacks.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    grammar_mass: NDArray[np.float32]
    routed_experts: NDArray[np.uint8]
    facts: Mapping[str, Any]


def _row(data: DataProto, row: int, logprobs: Tensor, version: int | None) -> _Row:
    batch = data.batch
    size = batch["prompts"].shape[1]
    attended = batch["attention_mask"][row].bool().cpu()
    real = attended[size:]
    prompt = batch["prompts"][row].cpu()[attended[:size]].numpy()
    response = batch["responses"][row].cpu()[real].numpy()
    given = batch.get("response_mask")
    sampled = (real if given is None else given[row].bool().cpu())[real].numpy()
    versions = batch["versions"][row].cpu()[real].numpy() if "versions" in batch else np.full(len(response), version)
    # 0 means that the mass is unknown.
    mass = batch["grammar_mass"][row].cpu()[real].numpy() if "grammar_mass" in batch else np.zeros(len(response))
    before = np.zeros(len(prompt))
    known = _known(data, row, len(prompt), sampled)
    routing = batch.get("routed_expert_bytes", torch.empty((len(data), len(attended), 0), dtype=torch.uint8))
    return _Row(
        np.concatenate([prompt, response]).astype(np.int32),
        np.concatenate([before, np.where(sampled, logprobs[row].cpu()[real].float().numpy(), UNSAMPLED)]).astype(
            np.float32
        ),
        np.concatenate([before + NO_VERSION, np.where(sampled, versions, NO_VERSION)]).astype(np.int32),
        np.concatenate([before + 1, np.where(sampled, mass, 1)]).astype(np.float32),
        routing[row].cpu()[attended, : known["routing_width"]].numpy(),
        known,
    )


def _known(data: DataProto, row: int, prompt: int, sampled: NDArray[np.bool_]) -> Mapping[str, Any]:
    """The non-tensor fields of a row. Missing fields are derived from the masks."""
    given = {name: values[row] for name, values in data.non_tensor_batch.items()}
    changes = (np.flatnonzero(sampled[1:] != sampled[:-1]) + 1).tolist()
    runs = [(start, end) for start, end in pairwise([0, *changes, len(sampled)]) if end > start]
    spans = [(prompt + start, prompt + end, bool(sampled[start])) for start, end in runs]
    roles = [(start, end, Role.ASSISTANT if policy else Role.TOOL) for start, end, policy in spans]
    return {
        "uid": f"row-{row}",
        "trajectory_id": _name(given, row),
        "task_id": str(given.get("uid", f"row-{row}")),
        "branch": 0,
        "finish": str(Finish.COMPLETED),
        "turns": [[start, end, str(role), "", []] for start, end, role in [(0, prompt, Role.PROMPT), *roles]],
        "steps": [[start, end] for start, end, policy in spans if policy],
        "reward_scores": {},
        "timings": {},
        "routing_width": 0,
        "images": [],
        **given,
    }


def _name(given: Mapping[str, Any], row: int) -> str:
    """The id for a trajectory without `trajectory_id`."""
    return f"{given.get('uid', 'row')}.{row}"


def _joined(rows: Sequence[_Row], members: dict[str, int]) -> Trajectory:
    """The trajectory of these branches. `members` has each group's last member index, and is updated."""
    first = rows[0].facts
    group = str(first["uid"])
    members[group] = members.get(group, -1) + 1
    starts = np.cumsum([0, *(len(row.tokens) for row in rows)]).tolist()
    mass = np.concatenate([row.grammar_mass for row in rows])
    routing = np.concatenate([row.routed_experts for row in rows])
    turns, steps, spans, digests = [], [], [], []
    for start, row in zip(starts, rows, strict=False):
        for begin, end, role, reason, calls, *more in row.facts["turns"]:
            called = tuple(ToolCall(*call) for call in calls)
            score, grammar = more or (None, "")
            turns.append(Turn(start + begin, start + end, Role(role), reason, called, grammar, score))
        steps += [Step(start + begin, start + end) for begin, end in row.facts["steps"]]
        spans += [(start + begin, start + end) for begin, end, _ in row.facts["images"]]
        digests += [bytes.fromhex(digest) for _, _, digest in row.facts["images"]]
    return Trajectory(
        id=str(first["trajectory_id"]),
        task_id=str(first["task_id"]),
        group_id=group,
        member=int(first.get("member", members[group])),
        tokens=np.concatenate([row.tokens for row in rows]),
        logprobs=np.concatenate([row.logprobs for row in rows]),
        version_runs=runs_of(np.concatenate([row.versions for row in rows])),
        turns=tuple(turns),
        steps=tuple(steps),
        finish=Finish(first["finish"]),
        rewards={name: each for name, each in (first["reward_scores"] or {}).items() if name != USER_TURN_REWARDS},
        timings=first["timings"] or {},
        grammar_mass=mass if any(turn.grammar for turn in turns) else NO_MASS,
        routed_experts=routing if routing.size else NO_ROUTING,
        image_spans=np.array(spans, np.int32).reshape(-1, 2),
        image_digests=np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_BYTES),
    )
