"""Lets verl's reward managers judge whole groups in a separate process. This file has the code that runs in the scorer.

The process runs the program that `config/extensions.py` names, and gives the managers batches of
verl's type.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from asyncrl import wire
from asyncrl.config.extensions import EXTENSIONS
from asyncrl.config.imports import imported
from asyncrl.config.schema import ModelConfig, ScoringConfig
from asyncrl.errors import AsyncrlError, ScoringError
from asyncrl.ids import is_evaluation
from asyncrl.scoring.judges import JudgePool, Limits
from asyncrl.scoring.verifier import policy_settings
from asyncrl.types import Lease
from asyncrl.wire import Message

PROGRAM = EXTENSIONS["scoring.manager"]
"""The module of the process. Its function `check` checks a manager's settings without making the manager."""

START_TIMEOUT_S = 600.0
"""The maximum seconds that the process may take to start. The limit is high because a manager may load models when it
is made."""

Group = Sequence[Lease]


@dataclass(frozen=True, slots=True)
class ManagerScore:
    """The scores of one member of a group.

    - `reward`: the manager's reward
    - `outcome`: 1 for a right answer
    - `extra`: further numbers by name
    - `vote`: a short form of the answer; empty if the manager gives none
    - `reason`: explains the scores; empty if the manager gives none
    """

    reward: float
    outcome: float
    extra: Mapping[str, float] = field(default_factory=dict)
    vote: str = ""
    reason: str = ""


class GroupJudge(Protocol):
    """Judges whole groups. Each member of a group gets a future with its scores.

    The members of a group fail together, with an AsyncrlError.
    """

    def submit(self, groups: Sequence[Group]) -> list[list[Future[ManagerScore]]]: ...


class Managers:
    """The managers of `config.manager`, made with the policy's tokenizer, in one process.

    One call of the process judges up to `batch_groups` groups. All groups of a call have the same manager settings, and
    all belong either to training or to evaluations. If a call fails, each of its groups is judged again in a separate
    call, so that only the faulty group fails.

    The process may take `start_timeout_s` to start. With `starts_later` it starts with the first call. Raises
    ConfigError: a manager cannot be made.
    """

    def __init__(
        self,
        config: ScoringConfig,
        policy: ModelConfig | None,
        start_timeout_s: float = START_TIMEOUT_S,
        starts_later: bool = False,
        stacks_level: int = logging.WARNING,
    ) -> None:
        self._config = config.manager
        settings = {
            "managers": managers_by_source(config),
            "timeout_s": config.manager.timeout_s,
            **policy_settings(policy),
        }
        limits = Limits(
            "the reward manager",
            config.manager.timeout_s,
            "scoring.manager.timeout_s",
            config.rule_memory_mb,
            start_timeout_s,
            stacks_level,
        )
        self._pool = JudgePool(PROGRAM, settings, 1, limits, starts_later)

    def submit(self, groups: Sequence[Group]) -> list[list[Future[ManagerScore]]]:
        """See GroupJudge. `close` fails the groups that are not judged yet."""
        futures: list[list[Future[ManagerScore]]] = [[Future() for _ in group] for group in groups]
        calls: dict[str, list[int]] = {}
        for index, group in enumerate(groups):
            settings = self._config.of(group[0].task.data_source)
            calls.setdefault(json.dumps([settings, _is_evaluation(group)], sort_keys=True), []).append(index)
        size = self._config.batch_groups
        for indices in calls.values():
            for start in range(0, len(indices), size):
                chosen = indices[start : start + size]
                self._call([groups[index] for index in chosen], [futures[index] for index in chosen])
        return futures

    def close(self) -> None:
        """Ends the process, even if it is busy."""
        self._pool.close()

    def _call(self, groups: Sequence[Group], futures: Sequence[list[Future[ManagerScore]]]) -> None:
        try:
            asked = self._pool.submit(_request(groups), partial(_read, groups))
        except AsyncrlError as error:
            for future in [each for members in futures for each in members]:
                future.set_exception(error)
        else:
            asked.add_done_callback(partial(self._finish, groups, futures))

    def _finish(
        self,
        groups: Sequence[Group],
        futures: Sequence[list[Future[ManagerScore]]],
        asked: Future[list[list[ManagerScore]]],
    ) -> None:
        error = ScoringError("the managers were closed") if asked.cancelled() else asked.exception()
        if error is None:
            for members, scores in zip(futures, asked.result(), strict=True):
                for future, score in zip(members, scores, strict=True):
                    future.set_result(score)
        elif len(groups) == 1 or asked.cancelled():
            for future in [each for members in futures for each in members]:
                future.set_exception(error)
        else:
            for group, members in zip(groups, futures, strict=True):
                self._call([group], [members])


def managers_by_source(config: ScoringConfig) -> dict[str, Mapping[str, Any] | None]:
    """The settings of the managers by data source; the key "" is for all other sources."""
    return {source: config.manager.of(source) for source in ("", *config.manager.sources)}


def manager_name(config: ScoringConfig, data_source: str) -> str:
    """The manager of a data source, as written in the configuration; empty if the source has no manager."""
    settings = config.manager.of(data_source)
    return "" if settings is None else str(settings["name"])


def check_managers(config: ScoringConfig) -> None:
    """Raises ConfigError: a manager or its function cannot be imported, or does not take its parameters."""
    for source, settings in managers_by_source(config).items():
        if settings is not None:
            key = f"scoring.manager.sources.{source}" if source in config.manager.sources else "scoring.manager"
            imported(f"{PROGRAM}.check", key)(settings, key)


def _is_evaluation(group: Group) -> bool:
    return is_evaluation(group[0].trajectory.group_id)


def _request(groups: Sequence[Group]) -> list[Message]:
    """The messages of one call: its head, then the members of all groups."""
    leases = [lease for group in groups for lease in group]
    head = {
        "evaluation": _is_evaluation(groups[0]),
        "version": max(lease.trajectory.newest_version for lease in leases),
    }
    members = []
    for lease in leases:
        message = wire.trajectory_message(lease.trajectory)
        members.append(Message("member", 0, {**message.body, "row": wire.task_body(lease.task)}, message.arrays))
    return [Message("judge", 0, head), *members]


def _read(groups: Sequence[Group], reply: Message) -> list[list[ManagerScore]]:
    found = [ManagerScore(*each) for each in reply.body["scores"]]
    if len(found) != (members := sum(map(len, groups))):
        raise ScoringError(f"the manager's process gave {len(found)} scores for {members} members")
    scores = iter(found)
    return [[next(scores) for _ in group] for group in groups]
