"""The ids of tasks, groups and episodes. Only this file makes and reads them.

| id | example | names |
|---|---|---|
| task | `openai/gsm8k/train/17` | a row of a task file: data source, split, index |
| group of the feed | `t000000012` | the feed's group number 12, counted over all shards |
| group of a task that runs again | `r000000003` | the third task that was requeued or evicted |
| group of an evaluation | `e7-000042` | held-out task 42, run for policy version 7 |
| the same, a later attempt | `e7-a3-000042` | attempt 3 of several at that task; the first is attempt 0 |
| ticket and its trajectory | `t000000012.3.0` | attempt 0 of member 3 of that group |

Groups of one kind sort in the order in which they were opened. The last number of a group's id, modulo the number of
shards, is the shard that it lives on.
"""

from __future__ import annotations

import re

from asyncrl.errors import RefusedError

FEED, AGAIN, EVALUATION = "t", "r", "e"
"""The first letters of groups."""

_LAST_NUMBER = re.compile(r"(\d+)\D*$")


def task_id(source: str, split: str, index: object) -> str:
    return f"{source}/{split}/{index}"


def feed_group(number: int) -> str:
    return f"{FEED}{number:09d}"


def again_group(number: int) -> str:
    return f"{AGAIN}{number:09d}"


def evaluation_group(version: int, row: int, attempt: int = 0) -> str:
    return f"{evaluation_prefix(version)}{f'a{attempt}-' if attempt else ''}{row:06d}"


def evaluation_prefix(version: int) -> str:
    """The beginning of the ids of the evaluation of a version."""
    return f"{EVALUATION}{version}-"


def evaluated_version(name: str) -> int:
    """The policy version of the evaluation to which a group, or the group of a ticket, belongs."""
    return int(name.removeprefix(EVALUATION).partition("-")[0])


def held_out_row(group: str) -> int:
    """The row of the held-out task that a group of an evaluation runs."""
    return int(group.rpartition("-")[2])


def ticket_id(group: str, member: int, attempt: int) -> str:
    return f"{attempts_of(group, member)}{attempt}"


def attempts_of(group: str, member: int) -> str:
    """The beginning of the ids of all attempts at a member."""
    return f"{group}.{member}."


def attempt_of(ticket: str) -> int:
    return int(ticket.rsplit(".", 1)[1])


def is_evaluation(name: str) -> bool:
    """True if a group, or the group of a ticket, belongs to an evaluation."""
    return name.startswith(EVALUATION)


def opening_order(ticket: str) -> tuple[bool, str]:
    """A sort key: tickets in the order in which the feed opened their groups, and then the tickets of other groups."""
    return not ticket.startswith(FEED), ticket


def shard_of(name: str, shards: int) -> int:
    """The shard on which a group, a ticket or a trajectory lives. Raises RefusedError: this is no id of one."""
    found = _LAST_NUMBER.search(name.split(".", 1)[0])
    if found is None:
        raise RefusedError(f"{name!r} is no id of a trajectory; one looks like t000000012.3.0")
    return int(found[1]) % shards
