"""Converts asyncrl's trajectories, labels and tasks to a batch in verl's layout.

A row is one branch of a trajectory; an episode has several branches if its agent rewrote its history. Prompts [B, P]
are padded on the left, responses [B, R] on the right. A response begins with the first token that the policy sampled,
and includes tool results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.compat.verl.batches.fields import UNSAMPLED, columns, require
from asyncrl.compat.verl.batches.padding import compute_position_id_with_mask
from asyncrl.compat.verl.batches.protocol import DataProto
from asyncrl.scoring.rules.verl import rollout_reward_scores
from asyncrl.types import NO_VERSION, Labels, Role, Step, Task, Trajectory, Turn

UNROUTED = 255
"""The value of each byte of `routed_expert_bytes` for a token without routed experts. Trajectory has the same value."""


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
    - if a trajectory has routed experts: routed_expert_bytes uint8[B, P + R, W]; a row uses the first `routing_width`
      of the W bytes of each token

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
