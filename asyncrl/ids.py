"""Makes and reads the ids of tasks, groups and episodes. No other file knows their form.

| id | example | names |
|---|---|---|
| task | `openai/gsm8k/train/17` | a row of a task file: data source, split, index |
| group of the feed | `t000000012` | the feed's group number 12, counted over all shards |
| group of a requeued or evicted task | `r000000003` | group number 3 of such tasks, counted over all shards |
| group of an evaluation | `e7-000042` | held-out task 42, run for policy version 7 |
| the same, a later attempt | `e7-a3-000042` | attempt 3 at that task; attempts are counted from 0 |
| ticket and its trajectory | `t000000012.3.0` | attempt 0 of member 3 of group `t000000012` |

The feed (`replay/starts/feed.py`) chooses the training tasks one after another. Sorted by id, the groups of the feed
are in the order in which they were opened, and so are the groups of requeued and evicted tasks. The shard of a group is
the last number of its id, modulo the number of shards.
"""

from __future__ import annotations

import re

from asyncrl.errors import RefusedError

FEED, AGAIN, EVALUATION = "t", "r", "e"
"""The first letters of group ids."""

TRIAL_GROUP = f"{FEED}999999999"
"""The group of the trial episodes, which the checks before a run play. Its number is larger than any that the feed
reaches."""

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
    """The common prefix of the group ids of a version's evaluation."""
    return f"{EVALUATION}{version}-"


def evaluated_version(name: str) -> int:
    """The policy version of the evaluation to which a group or a ticket belongs."""
    return int(name.removeprefix(EVALUATION).partition("-")[0])


def held_out_row(group: str) -> int:
    """The row number of the held-out task, from the id of an evaluation's group."""
    return int(group.rpartition("-")[2])


def ticket_id(group: str, member: int, attempt: int) -> str:
    return f"{attempts_of(group, member)}{attempt}"


def attempts_of(group: str, member: int) -> str:
    """The common prefix of the ticket ids of all attempts at one member of a group."""
    return f"{group}.{member}."


def attempt_of(ticket: str) -> int:
    return int(ticket.rsplit(".", 1)[1])


def is_evaluation(name: str) -> bool:
    """True if a group or a ticket belongs to an evaluation."""
    return name.startswith(EVALUATION)


def opening_order(ticket: str) -> tuple[bool, str]:
    """A sort key for tickets. The tickets of the feed come first, in the order of their groups. All other tickets
    follow."""
    return not ticket.startswith(FEED), ticket


def shard_of(name: str, shards: int) -> int:
    """The shard of a group, a ticket or a trajectory. Raises RefusedError: the name is not such an id."""
    found = _LAST_NUMBER.search(name.split(".", 1)[0])
    if found is None:
        raise RefusedError(f"{name!r} is not the id of a trajectory, such as t000000012.3.0")
    return int(found[1]) % shards
