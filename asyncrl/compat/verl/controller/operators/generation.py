"""Converts prompts to tickets, and the episodes of all workers to a batch of whole groups. A ticket has the task of one
episode."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.compat.verl.batches.fields import columns, objects, require
from asyncrl.compat.verl.batches.protocol import DataProto
from asyncrl.compat.verl.batches.to_batch import from_trajectories
from asyncrl.compat.verl.controller.dispatch import Arguments, Workers
from asyncrl.compat.verl.controller.futures import materialized
from asyncrl.compat.verl.controller.operators.parts import Mode, evenly, shared_out
from asyncrl.compat.verl.controller.operators.plans import VERSION
from asyncrl.compat.verl.controller.operators.prompts import tasks_of
from asyncrl.compat.verl.controller.operators.rollout import FailedEpisode, Rollout
from asyncrl.errors import EngineError
from asyncrl.ids import ticket_id
from asyncrl.types import Purpose, Task, Ticket, Trajectory

MEMBER = "member"
"""The field with the index of each row within its group."""
DROPPED = "groups_dropped"
"""The key of `meta_info` with the number of groups that were left out, because a member failed in all attempts."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptSampling:
    """The temperature for training. With `greedy_sibling`, the first member of each group is sampled greedily."""

    temperature: float
    greedy_sibling: bool


@dataclass(frozen=True, slots=True)
class GeneratedPart:
    """The result of one worker: the outcome and the task of each row."""

    outcomes: Sequence[Trajectory | FailedEpisode]
    tasks: Sequence[Task]
    pad_token_id: int
    meta_info: Mapping[str, Any]


def generating() -> Mode:
    """The dispatch mode of `generate_sequences`. Rows get their index within the group and the id of their task before
    they are divided."""
    mode = shared_out(evenly, joined_parts)
    divide = mode["dispatch_fn"]

    def dispatch(group: Workers, prompts: Any) -> Arguments:
        return divide(group, numbered(materialized(prompts)))  # type: ignore[no-any-return]

    return {**mode, "dispatch_fn": dispatch}


def numbered(prompts: DataProto) -> DataProto:
    """The prompts with the fields MEMBER and task_id. Both may depend on the row's position in the whole batch.

    Raises DataProtoError: the prompts have no uid, or lack fields of `task_of`.
    """
    require("uid" in prompts.non_tensor_batch, "the prompts have no uid: give all rows of a group the same uid")
    fields = {**prompts.non_tensor_batch, "task_id": objects([task.id for task in tasks_of(prompts)])}
    if MEMBER not in fields:
        fields[MEMBER] = objects(_members(fields["uid"].tolist()))
    return DataProto(prompts.batch, fields, prompts.meta_info)


def _members(uids: Sequence[Any]) -> list[int]:
    """The index of each row within its group."""
    seen: Counter[Any] = Counter()
    members = []
    for uid in uids:
        members.append(seen[uid])
        seen[uid] += 1
    return members


def tickets_of(prompts: DataProto, sampling: PromptSampling, version: int) -> list[Ticket]:
    """A ticket for each row. As in verl, `meta_info` may have `temperature`, or `validate` for greedy sampling."""
    validate = bool(prompts.meta_info.get("validate", False))
    temperature = 0.0 if validate else float(prompts.meta_info.get("temperature", sampling.temperature))
    greedy = sampling.greedy_sibling and not validate
    rows = zip(tasks_of(prompts), *(prompts.non_tensor_batch[name].tolist() for name in ("uid", MEMBER)), strict=True)
    return [
        Ticket(
            id=ticket_id(str(uid), member, 0),
            task=task,
            group_id=str(uid),
            member=member,
            purpose=Purpose.EVAL if validate else Purpose.TRAIN,
            temperature=0.0 if greedy and member == 0 else temperature,
            min_version=version,
        )
        for task, uid, member in rows
    ]


def generated(prompts: DataProto, sampling: PromptSampling, rollout: Rollout) -> GeneratedPart:
    """The result of an episode for each prompt."""
    tickets = tickets_of(prompts, sampling, rollout.version)
    outcomes = rollout.run(tickets)
    return GeneratedPart(outcomes, [ticket.task for ticket in tickets], rollout.pad_token_id, prompts.meta_info)


def joined_parts(parts: Sequence[GeneratedPart]) -> DataProto:
    """The batch of all episodes, in the order of their prompts.

    A group with a failed episode is left out, logged and counted. Raises EngineError: no group is complete.
    """
    outcomes = [outcome for part in parts for outcome in part.outcomes]
    tasks = {task.id: task for part in parts for task in part.tasks}
    failures = [outcome for outcome in outcomes if isinstance(outcome, FailedEpisode)]
    dropped = {each.group_id for each in failures}
    for each in failures:
        logger.warning("group %s is left out: member %d failed: %s", each.group_id, each.member, each.reason)
    kept = [each for each in outcomes if isinstance(each, Trajectory) and each.group_id not in dropped]
    if not kept:
        reason = failures[0].reason if failures else "there are no prompts"
        raise EngineError(f"no group is complete: {reason}")
    data = from_trajectories(kept, parts[0].pad_token_id, tasks=tasks)
    tools = [{"tools": [dict(tool) for tool in tasks[name].tools]} for name in data.non_tensor_batch["task_id"]]
    versions = [int(each.versions.max()) for each in kept]
    about = {**parts[0].meta_info, VERSION: max(versions), DROPPED: len(dropped)}
    return DataProto(data.batch, {**data.non_tensor_batch, **columns(tools)}, about)
