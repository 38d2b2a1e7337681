"""What a request may hold: everything else is refused, whatever it is, and leaves no trace."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import AsyncrlError, RefusedError
from asyncrl.replay.admission import Admission
from asyncrl.replay.requests import MAX_FETCH, REQUESTS
from asyncrl.replay.service import TICKETS_A_REPLY, Service
from asyncrl.wire import Message, labels_message, trajectory_message
from tests.helpers import make_labels, make_trajectory
from tests.replay.support import Core, make_rules

WHO = {"worker": "w", "incarnation": "1"}
LABELS = labels_message(make_labels("nobody"))
VALID = [
    Message("tickets", 1, {**WHO, "holding": [], "waiting": [], "want": 1}),
    trajectory_message(make_trajectory()),
    Message("failed", 1, {"ticket": "nobody", "reason": "x"}),
    Message("lease", 1, {**WHO, "serves": ["rules"], "trajectories": 1, "tokens": 1}),
    Message("renew", 1, {"worker": "w"}),
    Message("labels", 1, {**LABELS.body, **WHO}, LABELS.arrays),
    Message("scoring-failed", 1, {**WHO, "id": "nobody", "reason": "x"}),
    Message("plan", 1, {"step": 0}),
    Message("fetch", 1, {"table": "data", "ids": []}),
    Message("published", 1, {"version": 0}),
    Message("checkpointed", 1, {"steps": 0, "kept": 0}),
    Message("evaluate", 1, {"version": 0}),
    Message("evaluation", 1, {"version": 0, "wait": False}),
    Message("status", 1, {}),
    Message("audit", 1, {}),
    Message("requeue", 1, {"ticket": "nobody"}),
    Message("discard", 1, {"ticket": "nobody"}),
    Message("skip-plan", 1, {"step": 0, "reason": "x"}),
]
FIELDS = [(request.kind, name) for request in VALID for name in REQUESTS[request.kind]]
NOTHING_OF_ANY_TYPE: list[Any] = [None, -1, 1.5, math.nan, math.inf, 1 << 63, (1 << 64) - 1, b"x", {}, [None], [[]]]


@pytest.fixture
def core(tmp_path: Path) -> Core:
    return Core(tmp_path, make_rules())


def handle(core: Core, request: Message) -> Message | None:
    with core.store.transaction() as tx, tx.nested() as nested:
        return core.service.handle(nested, request)


def request_of(kind: str, **changes: Any) -> Message:
    (valid,) = (each for each in VALID if each.kind == kind)
    return Message(kind, 1, {**valid.body, **changes}, valid.arrays)


def test_every_request_is_described_and_a_valid_one_is_taken(core: Core) -> None:
    service = Service(make_rules(), 1.0, time.monotonic)
    assert set(REQUESTS) == set(service._handlers) == {request.kind for request in VALID}
    for request in VALID:
        if request.kind not in ("requeue", "discard", "skip-plan"):  # there is no dead letter and no plan
            handle(core, request)


@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_a_field_of_another_type_or_none_is_refused(core: Core, kind: str, field: str) -> None:
    before = core.status()
    for value in NOTHING_OF_ANY_TYPE:
        with pytest.raises(AsyncrlError):
            handle(core, request_of(kind, **{field: value}))
    lacking = {name: value for name, value in request_of(kind).body.items() if name != field}
    with pytest.raises(AsyncrlError, match=field):
        handle(core, Message(kind, 1, lacking))
    assert core.status() == before


def test_a_worker_whose_name_cannot_be_kept_is_not_remembered_either(core: Core) -> None:
    for kind in ("tickets", "lease", "renew"):
        for name in ("", "w" * 501, "\u00e9" * 251):
            with pytest.raises(AsyncrlError, match="worker"):
                handle(core, request_of(kind, worker=name))
    core.tick(1000.0)


def test_what_one_reply_holds_is_bounded_whatever_is_wanted(tmp_path: Path) -> None:
    core = Core(tmp_path, make_rules(admission=Admission(max_lag=1000, per_version=4)))
    reply = handle(core, request_of("tickets", want=10**9))
    assert reply is not None
    assert len(reply.body["tickets"]) == TICKETS_A_REPLY
    for ticket in reply.body["tickets"]:
        core.put(make_trajectory(length=4, id=ticket["id"], group_id=ticket["group_id"], member=ticket["member"]))
    leased = handle(core, request_of("lease", trajectories=10**18, tokens=10**18))
    assert leased is not None
    assert len(leased.arrays) == TICKETS_A_REPLY
    name = reply.body["tickets"][0]["id"]
    with pytest.raises(AsyncrlError, match=f"up to {MAX_FETCH} ids"):
        handle(core, request_of("fetch", ids=[name] * 100_000))


def test_a_version_that_no_token_can_have_is_refused_and_status_stays_readable(core: Core) -> None:
    with pytest.raises(AsyncrlError, match="version"):
        handle(core, request_of("published", version=(1 << 64) - 1))
    reply = handle(core, request_of("status"))
    assert reply is not None
    assert reply.body["status"]["version"] == 0


def test_an_unknown_request_is_refused_with_a_short_reason(core: Core) -> None:
    with pytest.raises(RefusedError, match="unknown request") as refused:
        handle(core, Message("x" * 1_000_000))
    assert len(str(refused.value)) < 1000
