"""The content that a request may hold: everything else is refused, and leaves no trace."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.config.changes import values_of
from asyncrl.config.schema import DataConfig, TrainConfig
from asyncrl.errors import AsyncrlError, WireError
from asyncrl.replay import protocol
from asyncrl.replay.messages import KINDS, decode_request, encode_request
from asyncrl.replay.protocol import MAX_FETCH, ReplayRequest
from asyncrl.replay.starts.admission import Admission
from asyncrl.replay.tickets import TICKETS_A_REPLY
from asyncrl.wire import PROTOCOL, Buffer, encode, join, labels_message, trajectory_message
from tests.helpers import make_labels, make_trajectory
from tests.replay.support import Core, make_settings

WHO = ("w", "1")
# Each is valid, and none changes what honest clients get: the fuzz damages these.
VALID: list[ReplayRequest] = [
    protocol.GetTickets(*WHO, ["nobody"], [], 0),
    protocol.Leave("gone", "1"),
    protocol.PutTrajectory(0),
    protocol.FailEpisode("nobody", "x"),
    protocol.LeaseTrajectories(*WHO, ["rules", "process"], 0, 4096, 1),
    protocol.RenewLease("w"),
    protocol.PutLabels(*WHO),
    protocol.PutGroupLabels(*WHO),
    protocol.FailScoring(*WHO, "nobody", "x"),
    protocol.Configure(values_of(TrainConfig(data=DataConfig(["tasks.parquet"]))), 1, 0),
    protocol.RequireLabels(0, [], False),
    protocol.GetPlan(10**6, ahead=False),
    protocol.PlanAtOnce(10**6),
    protocol.Fetch("data", ["nobody", "no one"]),
    protocol.FetchImage("nobody", bytes(32)),
    protocol.GetTask("nobody"),
    protocol.Published(0),
    protocol.Checkpointed(0, 0),
    protocol.Evaluate(0),
    protocol.GetEvaluation(0, False),
    protocol.GetStatus(),
    protocol.GetClock(),
    protocol.GetAudit(),
    protocol.Requeue("nobody"),
    protocol.Discard("nobody"),
    protocol.SkipPlan(0, "x"),
    protocol.Finished(),
]
FRAMES = {
    "PutTrajectory": encode(trajectory_message(make_trajectory())),
    "PutLabels": encode(labels_message(make_labels("nobody"))),
    "PutGroupLabels": [join(encode(labels_message(make_labels("nobody"))))],
}
_KEYS = b"".join(b"\x91" + msgspec.msgpack.encode(index) + b"\xc0" for index in range(2000))
LISTS_AS_KEYS = msgspec.msgpack.encode(
    [
        PROTOCOL,
        "Configure",
        1,
        {"values": {"a": msgspec.Raw(b"\xde" + (2000).to_bytes(2, "big") + _KEYS)}, "time": 1, "planned": 0},
    ]
)
"""The header of a request with a map of many lists as keys. A sender can choose lists that have one hash."""
FIELDS = [(request, name) for request in VALID for name in request.__struct_fields__]
NOTHING_OF_ANY_TYPE: list[Any] = [None, -1, 1.5, math.nan, math.inf, 1 << 63, (1 << 64) - 1, b"x", {}, [None], [[]]]


@pytest.fixture
def core(tmp_path: Path) -> Core:
    return Core(tmp_path, make_settings())


def fields(request: ReplayRequest, **changes: Any) -> dict[str, Any]:
    return {**msgspec.structs.asdict(request), **changes}


def send(core: Core, kind: str, body: Any, frames: list[Buffer] | None = None, run: Any = None) -> Any:
    """The body of the reply to a request as it arrives over a socket."""
    header = msgspec.msgpack.encode([PROTOCOL, kind, 1, body, run])
    reply = core.call(decode_request([header, *(FRAMES.get(kind, []) if frames is None else frames)]))
    return reply and reply.body


def test_a_request_with_thousands_of_lists_as_keys_is_refused_before_a_map_is_made_of_them() -> None:
    call = decode_request([LISTS_AS_KEYS])
    assert isinstance(call.request, WireError)
    assert "Expected `str`, got `array` - at `key`" in str(call.request)


def test_every_valid_request_is_taken(core: Core) -> None:
    assert set(KINDS) == {request.kind for request in VALID}
    for request in VALID:
        assert decode_request(encode_request(request, 7)).request == request
        # These name what is not there.
        if request.kind not in ("Fetch", "FetchImage", "GetPlan", "PlanAtOnce", "Requeue", "Discard", "SkipPlan"):
            send(core, request.kind, fields(request))


@pytest.mark.parametrize(("request_", "field"), FIELDS, ids=lambda each: getattr(each, "kind", each))
def test_a_field_of_another_type_or_none_is_refused(core: Core, request_: ReplayRequest, field: str) -> None:
    before = core.status()
    for value in NOTHING_OF_ANY_TYPE:
        with pytest.raises(WireError, match=field):
            send(core, request_.kind, fields(request_, **{field: value}))
    lacking = fields(request_)
    del lacking[field]
    with pytest.raises(WireError, match=field):
        send(core, request_.kind, lacking)
    assert core.status() == before


@pytest.mark.parametrize("body", [None, 1, [], "x", {"unknown": 1}])
def test_a_body_that_is_none_of_its_kind_is_refused(core: Core, body: Any) -> None:
    for request in VALID:
        with pytest.raises(WireError, match="malformed request"):
            send(core, request.kind, body)


def test_frames_come_only_with_requests_that_have_some(core: Core) -> None:
    for request in VALID:
        with pytest.raises(AsyncrlError):
            send(core, request.kind, fields(request), [] if request.frames else [b"x"])
    with pytest.raises(AsyncrlError, match="announces"):
        send(core, "PutTrajectory", {"images": 0}, [*FRAMES["PutTrajectory"], b""])
    assert core.status()["accepted"] == 0


@pytest.mark.parametrize("name", ["", "w" * 501, "\u00e9" * 251])
@pytest.mark.parametrize("kind", ["GetTickets", "LeaseTrajectories", "RenewLease"])
def test_a_worker_whose_name_cannot_be_kept_is_not_remembered_either(core: Core, kind: str, name: str) -> None:
    (valid,) = (each for each in VALID if each.kind == kind)
    with pytest.raises(WireError, match="worker"):
        send(core, kind, fields(valid, worker=name))
    core.tick(1000.0)
    assert core.status()["silence_s"] == {"actors": {}, "scorers": {}}


@pytest.mark.slow
def test_what_one_reply_holds_is_bounded_whatever_is_wanted(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(admission=Admission(max_lag=1000, per_version=4)))
    tickets = core.tickets(10**9)
    assert len(tickets) == TICKETS_A_REPLY
    for ticket in tickets:
        core.put(make_trajectory(ticket, length=4))
    assert len(core.leased(10**18, tokens=10**18).frames) == TICKETS_A_REPLY
    with pytest.raises(WireError, match=f"length <= {MAX_FETCH}"):
        send(core, "Fetch", {"table": "data", "ids": [tickets[0].id] * 100_000})


def test_an_unknown_request_is_refused_with_a_short_reason(core: Core) -> None:
    with pytest.raises(WireError, match="unknown kind of request") as refused:
        send(core, "x" * 1_000_000, {})
    assert len(str(refused.value)) < 1000
