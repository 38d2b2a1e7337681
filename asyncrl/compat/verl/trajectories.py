"""Converts asyncrl's trajectories and labels to batches in verl's layout, and back.

A row is one branch of a trajectory; an episode has several branches if its agent rewrote its history. Prompts [B, P]
are padded on the left, responses [B, R] on the right. A response begins with the first token that the policy sampled,
and includes tool results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.compat.verl.fields import objects, require
from asyncrl.compat.verl.padding import compute_position_id_with_mask
from asyncrl.compat.verl.protocol import DataProto
from asyncrl.scoring.rules.verl import USER_TURN_REWARDS, rollout_reward_scores
from asyncrl.types import (
    DIGEST_BYTES,
    NO_MASS,
    NO_ROUTING,
    NO_VERSION,
    Finish,
    Labels,
    Role,
    Step,
    Task,
    ToolCall,
    Trajectory,
    Turn,
    runs_of,
)

UNSAMPLED = 0.0
"""The log-prob and score of tokens that the policy did not sample."""
UNROUTED = 255
"""Each byte of `routed_expert_bytes` for a token without routed experts, as in Trajectory."""


IMAGES_OF_VERL = ("multi_modal_data", "multi_modal_inputs")

OF_RESPONSES = ("response_mask", "rollout_log_probs", "old_log_probs", "versions", "token_level_scores")
"""Fields of shape [B, R]."""


class _Branch(NamedTuple):
    """A branch with the tokens [start, end) of its trajectory. [response, end) is the response."""

    trajectory: Trajectory
    number: int
    start: int
    response: int
    end: int
    turns: Sequence[Turn]
    steps: Sequence[Step]


def from_trajectories(
    trajectories: Sequence[Trajectory],
    pad_token_id: int,
    labels: Sequence[Labels] | None = None,
    tasks: Mapping[str, Task] | None = None,
    max_prompt_length: int | None = None,
    max_response_length: int | None = None,
) -> DataProto:
    """A batch of the branches of all `trajectories`, in order.

    `batch` has:

    - prompts int64[B, P], responses int64[B, R]; P and R are the maximum lengths if given, else the longest lengths
    - input_ids, attention_mask and position_ids int64[B, P + R]
    - response_mask int64[B, R], 1 on sampled tokens; versions int64[B, R], NO_VERSION on tokens not sampled
    - rollout_log_probs float32[B, R]
    - with `labels`: token_level_scores and token_level_rewards float32[B, R], with the shaped reward at the last token
      of each response
    - if a turn has a grammar: grammar_mass float32[B, R], 1 on padding
    - if a trajectory has routed experts: routed_expert_bytes uint8[B, P + R, W]; a row uses its first `routing_width`
      bytes per token

    `non_tensor_batch` has:

    - `uid`, the group's id, and the other fields that `to_trajectories` reads
    - `images`: spans and digests of images, without the image bytes
    - with `labels`: the fields that `to_labels` reads
    - with `tasks` (by id): raw_prompt, data_source, reward_model, extra_info and tools_kwargs, as in verl's data sets

    Raises DataProtoError: a prompt or a response is longer than its maximum length; nothing is truncated.
    """
    branches = [branch for trajectory in trajectories for branch in _branches(trajectory)]
    prompts = _longest("prompt", [each.response - each.start for each in branches], max_prompt_length)
    responses = _longest("response", [each.end - each.response for each in branches], max_response_length)
    tensors = _tensors(branches, prompts, responses, pad_token_id)
    arrays = columns([_facts(branch) for branch in branches])
    if labels is not None:
        by_id = {each.trajectory_id: each for each in labels}
        judged = [by_id[each.trajectory.id] for each in branches]
        lengths = [branch.end - branch.response for branch in branches]
        scores = score_rows([label.reward for label in judged], lengths, responses)
        tensors |= {"token_level_scores": scores, "token_level_rewards": scores.clone()}
        arrays |= columns([label_fields(label) for label in judged])
    if tasks is not None:
        arrays |= columns([task_fields(tasks[each.trajectory.task_id].copy()) for each in branches])
    return DataProto.from_dict(tensors, arrays)


def score_rows(rewards: Sequence[float], lengths: Sequence[int], width: int) -> Tensor:
    """The scores float32[B, width], with each row's reward at the last token of its response (`lengths`)."""
    scores = torch.full((len(rewards), width), UNSAMPLED)
    for row, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        if length:
            scores[row, length - 1] = reward
    return scores


def to_trajectories(data: DataProto, version: int | None = None) -> list[Trajectory]:
    """The trajectories of a batch in verl's layout, in the order of their first rows.

    A batch of `from_trajectories` gives equal trajectories. A batch from verl needs prompts, responses, attention_mask,
    and rollout_log_probs or old_log_probs. If it has no response_mask, all response tokens count as sampled. Each run
    of sampled tokens becomes one assistant turn and one step, and rows with the same `uid` become one group.

    If the batch has no `versions`, `version` is the policy version of all sampled tokens. Raises DataProtoError: a
    field is missing, or rows have images in verl's form. Raises InvariantError: the values do not form a trajectory.
    """
    for name in IMAGES_OF_VERL:
        shown = any(bool(each) for each in data.non_tensor_batch.get(name, ()))
        require(not shown, f"{name} has images or videos, which trajectories do not have: leave these rows out")
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

    The reward is the sum of token_level_scores in the trajectory's last row. Missing fields are left out. If the
    outcome is missing, it is `acc`, or the reward if `acc` is missing too.

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


def task_fields(task: Task) -> dict[str, Any]:
    """The task as fields of one row, with the names of verl's data sets."""
    return {
        "raw_prompt": [dict(message) for message in task.messages],
        "data_source": task.data_source,
        "reward_model": {"style": "rule", "ground_truth": task.ground_truth},
        "extra_info": dict(task.extra_info),
        "tools_kwargs": task.tools_kwargs,
    }


def _branches(trajectory: Trajectory) -> list[_Branch]:
    turns: list[list[Turn]] = [[]]
    for turn in trajectory.turns:
        if turn.role is Role.PROMPT and turn.start > 0:
            turns.append([])
        turns[-1].append(turn)
    found = []
    for index, (start, end) in enumerate(trajectory.branches):
        sampled = np.flatnonzero(trajectory.loss_mask[start:end])
        response = start + int(sampled[0]) if len(sampled) else end
        steps = [step for step in trajectory.steps if start <= step.start < end]
        found.append(_Branch(trajectory, index, start, response, end, turns[index], steps))
    return found


def _longest(what: str, lengths: Sequence[int], given: int | None) -> int:
    longest = max(lengths, default=0)
    require(given is None or longest <= given, f"a {what} has {longest} tokens; max_{what}_length is {given}")
    return longest if given is None else given


def _tensors(branches: Sequence[_Branch], prompts: int, responses: int, pad: int) -> dict[str, Tensor]:
    rows = len(branches)
    ids = np.full((rows, prompts + responses), pad, np.int64)
    attention = np.zeros((rows, prompts + responses), np.int64)
    sampled = np.zeros((rows, responses), np.int64)
    logprobs = np.full((rows, responses), UNSAMPLED, np.float32)
    versions = np.full((rows, responses), NO_VERSION, np.int64)
    mass = np.ones((rows, responses), np.float32)
    for row, (trajectory, _, start, response, end, *_) in enumerate(branches):
        whole = slice(prompts - (response - start), prompts + (end - response))
        answer = slice(0, end - response)
        ids[row, whole] = trajectory.tokens[start:end]
        attention[row, whole] = 1
        sampled[row, answer] = trajectory.loss_mask[response:end]
        logprobs[row, answer] = trajectory.logprobs[response:end]
        versions[row, answer] = trajectory.versions[response:end]
        if trajectory.grammar_mass.size:
            mass[row, answer] = trajectory.grammar_mass[response:end]
    mask = torch.from_numpy(attention)
    routing = _routing(branches, prompts, responses)
    has_grammars = any(branch.trajectory.grammar_mass.size for branch in branches)
    return {
        "prompts": torch.from_numpy(ids[:, :prompts].copy()),
        "responses": torch.from_numpy(ids[:, prompts:].copy()),
        "input_ids": torch.from_numpy(ids),
        "attention_mask": mask,
        "position_ids": compute_position_id_with_mask(mask),
        "response_mask": torch.from_numpy(sampled),
        "rollout_log_probs": torch.from_numpy(logprobs),
        "versions": torch.from_numpy(versions),
        **({"grammar_mass": torch.from_numpy(mass)} if has_grammars else {}),
        **({"routed_expert_bytes": torch.from_numpy(routing)} if routing.size else {}),
    }


def _routing(branches: Sequence[_Branch], prompts: int, responses: int) -> NDArray[np.uint8]:
    """The routed experts of all branches, uint8[B, P + R, W]; W is 0 if no trajectory has routed experts."""
    width = max((branch.trajectory.routed_experts.shape[1] for branch in branches), default=0)
    found = np.full((len(branches), prompts + responses, width), UNROUTED, np.uint8)
    for row, (trajectory, _, start, response, end, *_) in enumerate(branches):
        experts = trajectory.routed_experts
        if experts.size:
            found[row, prompts - (response - start) : prompts + (end - response), : experts.shape[1]] = experts[
                start:end
            ]
    return found


def _facts(branch: _Branch) -> dict[str, Any]:
    trajectory, start = branch.trajectory, branch.start
    calls = [[[call.name, dict(call.arguments)] for call in turn.tool_calls] for turn in branch.turns]
    return {
        "uid": trajectory.group_id,
        "trajectory_id": trajectory.id,
        "task_id": trajectory.task_id,
        "member": trajectory.member,
        "branch": branch.number,
        "finish": str(trajectory.finish),
        "turns": [
            [
                *(turn.start - start, turn.end - start, str(turn.role), turn.finish_reason, calls[index]),
                *(turn.score, turn.grammar),
            ]
            for index, turn in enumerate(branch.turns)
        ],
        "steps": [[step.start - start, step.end - start] for step in branch.steps],
        "reward_scores": rollout_reward_scores(trajectory),
        "turn_scores": trajectory.turn_scores,
        "timings": dict(trajectory.timings),
        "routing_width": trajectory.routed_experts.shape[1],
        "images": [
            [begin - start, end - start, digest.tobytes().hex()]
            for (begin, end), digest in zip(trajectory.image_spans.tolist(), trajectory.image_digests, strict=True)
            if start <= begin < branch.end
        ],
        "__num_turns__": sum(1 for _ in groupby(turn.role for turn in branch.turns)),
    }


def label_fields(label: Labels) -> dict[str, Any]:
    """The label as fields of a row, without the reward."""
    return {
        "outcome": label.outcome,
        "scorer": label.scorer,
        "step_scores": label.step_scores.tolist(),
        "step_ends": label.step_ends.tolist(),
        "extra_scores": dict(label.extra),
    }


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[Any]]:
    """The values of B rows as one array [B] of objects for each name."""
    found: dict[str, NDArray[Any]] = {}
    for name in rows[0] if rows else ():
        found[name] = objects([values[name] for values in rows])
    return found


class _Row(NamedTuple):
    """One branch without padding. Its arrays are [T]; `facts` are the non-tensor fields of its trajectory."""

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
    """The trajectory of these branches. `members` is the last member index given out in each group."""
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
