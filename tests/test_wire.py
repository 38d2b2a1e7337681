"""The codec: what is encoded comes back bit for bit, and whatever else arrives is refused with a reason."""

from __future__ import annotations

import contextlib
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from asyncrl import wire
from asyncrl.errors import WireError
from asyncrl.types import BatchPlan, Finish, Labels, Purpose, Role, Step, Ticket, ToolCall, Trajectory, Turn
from asyncrl.wire import Message, decode, encode, join, split
from tests.helpers import make_task, make_trajectory

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
ARRAYS = hnp.arrays(
    st.sampled_from(["<i4", "<i8", "<f4", "<f8", "|b1", "|u1", "<u2"]), hnp.array_shapes(min_dims=0, max_side=5)
)
BODIES = st.dictionaries(st.text(max_size=8), PLAIN, max_size=4)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    length = draw(st.integers(2, 50))
    mask = np.zeros(length, np.bool_)
    cut = draw(st.integers(1, length - 1))
    mask[cut:] = True
    return Trajectory(
        id=draw(st.text(min_size=1, max_size=20)),
        task_id=draw(st.text(max_size=20)),
        group_id=draw(st.text(max_size=20)),
        member=draw(st.integers(0, 100)),
        tokens=draw(hnp.arrays(np.int32, length, elements=st.integers(0, 2**31 - 1))),
        loss_mask=mask,
        logprobs=np.where(mask, -1.5, 0).astype(np.float32),
        versions=np.where(mask, draw(st.integers(0, 2**31 - 1)), -1).astype(np.int32),
        turns=(
            Turn(0, cut, Role.PROMPT),
            Turn(cut, length, Role.ASSISTANT, "stop", (ToolCall("t", draw(st.dictionaries(st.text(), PLAIN))),)),
        ),
        steps=(Step(cut, length),),
        finish=draw(st.sampled_from(Finish)),
        rewards={"r": draw(st.floats(-1, 1))},
        timings={"generate": 0.5},
    )


@given(text=st.text(st.characters(codec=None, categories=None), min_size=1, max_size=50))
def test_whatever_text_a_message_holds_it_can_be_sent_and_read(text: str) -> None:
    readable = text.encode("utf-8", "replace").decode()
    task = make_task(id=text, messages=[{"role": "user", "content": text}], extra_info={text: [text]})
    sent = {
        "failed": Message("failed", 1, {"ticket": text, "reason": text}),
        "labels": wire.labels_message(Labels(text, 1.0, 1.0, text, extra={text: 1.0})),
        "trajectory": wire.trajectory_message(
            make_trajectory(id=text, task_id=text, group_id=text, rewards={text: 1.0}, timings={text: 1.0})
        ),
        "ticket": Message("ticket", 1, wire.ticket_body(Ticket(text, task, text, 0, Purpose.TRAIN, 1.0, 0))),
    }
    read = {name: decode([bytes(frame) for frame in encode(message)]) for name, message in sent.items()}
    assert read["failed"].body == {"ticket": readable, "reason": readable}
    assert wire.read_labels(read["labels"]).extra == {readable: 1.0}
    assert wire.read_trajectory(read["trajectory"]).rewards == {readable: 1.0}
    assert wire.read_ticket(read["ticket"].body).task.messages[0]["content"] == readable


def test_a_reason_of_any_length_is_cut_and_says_so() -> None:
    (frame,) = encode(Message("failed", 1, {"reason": "begin" + "x" * 50_000_000 + "end"}))
    reason = decode([bytes(frame)]).body["reason"]
    assert len(reason) < 3000
    assert reason.startswith("begin")
    assert reason.endswith("end")
    assert "characters cut" in reason


@pytest.mark.parametrize(
    ("value", "reason"),
    [(2**64, "out of range"), (-(2**63) - 1, "cannot be encoded"), (object(), "object"), ("x" * (5 << 20), "too long")],
)
def test_what_cannot_be_encoded_or_is_too_long_to_be_taken_is_refused_by_name(value: Any, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        encode(Message("tickets", 1, {"x": value}))


def test_a_value_within_too_many_lists_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(WireError, match="cannot be encoded"):
        encode(Message("tickets", 1, {"x": deep}))


@given(kind=st.text(max_size=20), sequence=st.integers(0, 2**40), body=BODIES, arrays=st.lists(ARRAYS, max_size=4))
def test_a_message_comes_back_as_it_was(kind: str, sequence: int, body: dict[str, Any], arrays: list[Any]) -> None:
    sent = Message(kind, sequence, body, {str(index): array for index, array in enumerate(arrays)})
    got = decode(split(join(encode(sent))))
    assert (got.kind, got.sequence, got.body) == (kind, sequence, body)
    for name, array in sent.arrays.items():
        assert got.arrays[name].dtype == array.dtype
        assert got.arrays[name].shape == array.shape
        assert got.arrays[name].tobytes() == array.tobytes()


@given(trajectories())
def test_a_trajectory_comes_back_bit_for_bit(sent: Trajectory) -> None:
    got = wire.read_trajectory(decode(encode(wire.trajectory_message(sent))))
    for name in ("tokens", "loss_mask", "logprobs", "versions"):
        assert getattr(got, name).tobytes() == getattr(sent, name).tobytes()
    for name in ("id", "task_id", "group_id", "member", "turns", "steps", "finish", "rewards", "timings"):
        assert getattr(got, name) == getattr(sent, name)


def test_encoding_and_decoding_copy_no_array() -> None:
    trajectory = make_trajectory()
    frames = encode(wire.trajectory_message(trajectory))
    assert np.shares_memory(np.frombuffer(frames[1], np.int32), trajectory.tokens)
    assert np.shares_memory(decode(frames).arrays["tokens"], trajectory.tokens)


def test_labels_tickets_and_plans_come_back_as_they_were() -> None:
    labels = Labels("t", 0.5, 1.0, "s", np.array([0.25], np.float32), np.array([8], np.int32), {"prm": 0.25})
    got = wire.read_labels(decode(encode(wire.labels_message(labels))))
    assert (got.trajectory_id, got.reward, got.outcome, got.extra) == ("t", 0.5, 1.0, {"prm": 0.25})
    assert (got.step_scores.tolist(), got.step_ends.tolist()) == ([0.25], [8])
    ticket = Ticket("x", make_task(), "g", 1, Purpose.EVAL, 0.0, 4)
    assert wire.ticket_body(wire.read_ticket(wire.ticket_body(ticket))) == wire.ticket_body(ticket)
    plan = BatchPlan(3, 1, ["a", "b"], ["g", "g"], [4, 5], [2, 3], [1.0, 0.5])
    assert wire.read_plan(wire.plan_body(plan)) == plan


@given(st.data())
@settings(max_examples=1500)
def test_a_mutated_message_is_refused_or_still_valid_and_never_anything_else(data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in encode(wire.trajectory_message(make_trajectory()))]
    for _ in range(data.draw(st.integers(1, 4))):
        frame = frames[data.draw(st.integers(0, len(frames) - 1))]
        match data.draw(st.integers(0, 3)):
            case 0 if frame:
                frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
            case 1 if frame:
                del frame[data.draw(st.integers(0, len(frame) - 1)) :]
            case 2:
                frame.extend(data.draw(st.binary(max_size=9)))
            case 3:
                frames.insert(data.draw(st.integers(0, len(frames))), bytearray(data.draw(st.binary(max_size=9))))
    with contextlib.suppress(WireError):
        wire.read_trajectory(decode(frames))


@given(st.binary(max_size=200))
def test_noise_is_no_stored_value(noise: bytes) -> None:
    with contextlib.suppress(WireError):
        decode(split(noise))


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ([["a", "<f4", [1 << 39]]], "announces"),
        ([["a", "|O", [1]]], "dtype"),
        ([["a", "<f4", [-1]]], "impossible shape"),
        ([["a", "<f4", [1]], ["b", "<f4", [1]]], "announces 2 arrays"),
    ],
)
def test_an_array_that_lies_about_itself_is_refused_before_anything_is_allocated(layout: Any, reason: str) -> None:
    header = msgpack.packb([wire.PROTOCOL, "x", 0, {}, layout])
    with pytest.raises(WireError, match=reason):
        decode([header, b"\0" * 4])


@pytest.mark.parametrize(
    ("shape", "frame"),
    [
        ([1 << 39, 0], b""),
        ([1 << 28, 0], b""),
        ([0, 1 << 39, 1 << 39, 1 << 39], b""),
        ([True], b"\0" * 4),
        ([1.0], b"\0" * 4),
        ([1] * 9, b"\0" * 4),
        ([1 << 64 - 1], b""),
    ],
)
def test_a_shape_that_numpy_cannot_have_or_that_has_no_end_is_refused(shape: Any, frame: bytes) -> None:
    with pytest.raises(WireError):
        decode([msgpack.packb([wire.PROTOCOL, "x", 0, {}, [["a", "<f4", shape]]]), frame])


def test_a_truth_value_is_0_or_1() -> None:
    frames = encode(Message("x", 0, {}, {"mask": np.array([True, False])}))
    with pytest.raises(WireError, match="truth values"):
        decode([frames[0], b"\x02\x01"])


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 1e400])
def test_a_reward_that_is_not_finite_is_refused(reward: float) -> None:
    with pytest.raises(WireError, match="not finite"):
        wire.read_trajectory(decode(encode(wire.trajectory_message(make_trajectory(rewards={"tool": reward})))))


@pytest.mark.parametrize("field", ["member", "turns", "steps", "finish", "rewards", "timings", "id"])
@pytest.mark.parametrize(
    "value", [float("inf"), float("nan"), [float("inf")], [[1e308, 2, "prompt", "", []]], "x", [[]]]
)
def test_a_trajectory_with_any_value_in_any_place_is_refused(field: str, value: Any) -> None:
    message = wire.trajectory_message(make_trajectory())
    if field == "id" and isinstance(value, str):
        return
    with pytest.raises(WireError):
        wire.read_trajectory(Message(message.kind, 0, {**message.body, field: value}, message.arrays))


def test_no_memory_is_taken_for_the_length_of_an_array_that_is_empty() -> None:
    message = wire.trajectory_message(make_trajectory())
    frames = [bytes(frame) for frame in encode(message)]
    header = msgpack.unpackb(frames[0])
    header[4][0] = ["tokens", "<i4", [1 << 32, 0]]
    header[4][2] = ["versions", "<i4", [1, 2]]
    with pytest.raises(WireError, match="rows of nothing"):
        decode([msgpack.packb(header), b"", frames[2], np.array([0, 1], np.int32).tobytes()])
