"""The codec: what is encoded comes back bit for bit. Everything else is refused with a reason, and costs no more than
its bytes."""

from __future__ import annotations

import contextlib
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from msgspec import structs

from asyncrl import wire
from asyncrl.errors import WireError
from asyncrl.msgpack_values import MAX_DEPTH
from asyncrl.types import (
    DEMONSTRATED,
    NO_ROUTING,
    Finish,
    Labels,
    Reason,
    Role,
    Step,
    ToolCall,
    Trajectory,
    Turn,
    runs_of,
)
from asyncrl.wire import PROTOCOL, Message, decode, encode, join, split
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
    cut = draw(st.integers(1, length - 1))
    mask = np.arange(length) >= cut
    grammar = draw(st.sampled_from(["", "regex"]))
    finish = draw(st.sampled_from(Finish))
    version = DEMONSTRATED if finish is Finish.DEMONSTRATION else draw(st.integers(0, 2**31 - 1))
    bounds = sorted(draw(st.sets(st.integers(0, cut))))
    images = np.array(list(zip(bounds[::2], bounds[1::2], strict=False)), np.int32).reshape(-1, 2)
    mass = np.where(mask, draw(hnp.arrays(np.float32, length, elements=st.floats(0, 1, width=32))), 1)
    return Trajectory(
        id=draw(st.text(min_size=1, max_size=20)),
        task_id=draw(st.text(max_size=20)),
        group_id=draw(st.text(max_size=20)),
        member=draw(st.integers(0, 100)),
        tokens=draw(hnp.arrays(np.int32, length, elements=st.integers(0, 2**31 - 1))),
        logprobs=np.where(mask & (version >= 0), -1.5, 0).astype(np.float32),
        version_runs=runs_of(np.where(mask, version, -1).astype(np.int32)),
        turns=(
            Turn(0, cut, Role.PROMPT),
            Turn(
                *(
                    cut,
                    length,
                    Role.ASSISTANT,
                    "stop",
                    (ToolCall("t", draw(st.dictionaries(st.text(), PLAIN))),),
                    grammar,
                ),
                score=draw(st.none() | st.floats(-1, 1)),
            ),
        ),
        steps=(Step(cut, length),),
        finish=finish,
        rewards={"r": draw(st.floats(-1, 1))},
        timings={"generate": 0.5},
        grammar_mass=mass.astype(np.float32) if grammar else np.zeros(0, np.float32),
        routed_experts=draw(st.just(NO_ROUTING) | hnp.arrays(np.uint8, st.tuples(st.just(length), st.integers(1, 9)))),
        image_spans=images,
        image_digests=draw(hnp.arrays(np.uint8, (len(images), 32))),
    )


def received(body: bytes = b"\x80", layout: Any = (), *frames: bytes) -> Message:
    """Decode a message that another side sent with a packed body."""
    return decode([header(body, layout), *frames])


def header(body: bytes, layout: Any = ()) -> bytes:
    packed = [msgpack.packb(each) for each in (PROTOCOL, "x", 0)]
    return b"".join([b"\x95", *packed, body, msgpack.packb(layout)])


def nested(depth: int) -> Any:
    value = None
    for _ in range(depth):
        value = [value]
    return value


DEPTHS = (MAX_DEPTH + 1, 500, 1000, 1020, 5000)
WIDE = [{"a": [index, {}]} for index in range(1000)]


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
        "task": Message("task", 1, wire.task_body(task)),
    }
    read = {name: decode([bytes(frame) for frame in encode(message)]) for name, message in sent.items()}
    assert read["failed"].body == {"ticket": readable, "reason": readable}
    assert wire.read_labels(read["labels"]).extra == {readable: 1.0}
    assert wire.read_trajectory(read["trajectory"]).rewards == {readable: 1.0}
    assert wire.read_task(read["task"].body).messages[0]["content"] == readable


def test_a_reason_of_any_length_is_cut_and_says_so() -> None:
    (frame,) = encode(Message("failed", 1, {"reason": "begin" + "x" * 50_000_000 + "end"}))
    reason = decode([bytes(frame)]).body["reason"]
    assert len(reason) < 3000
    assert reason.startswith("begin")
    assert reason.endswith("end")
    assert "characters cut" in reason


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (10**4200, "cannot be encoded: an integer has 1745 bytes; at most 1700"),
        (object(), "object"),
        (nested(50_000), "recursion"),
        ("x" * (5 << 20), "too long"),
    ],
)
def test_what_cannot_be_encoded_or_is_too_long_to_be_taken_is_refused_by_name(value: Any, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        encode(Message("tickets", 1, {"x": value}))


@pytest.mark.slow
@given(kind=st.text(max_size=20), sequence=st.integers(0, 2**40), body=BODIES, arrays=st.lists(ARRAYS, max_size=4))
def test_a_message_comes_back_as_it_was(kind: str, sequence: int, body: dict[str, Any], arrays: list[Any]) -> None:
    sent = Message(kind, sequence, body, {str(index): array for index, array in enumerate(arrays)})
    got = decode(split(join(encode(sent))))
    assert (got.kind, got.sequence, got.body) == (kind, sequence, body)
    for name, array in sent.arrays.items():
        assert got.arrays[name].dtype == array.dtype
        assert got.arrays[name].shape == array.shape
        assert got.arrays[name].tobytes() == array.tobytes()


@pytest.mark.slow
@given(trajectories())
def test_a_trajectory_comes_back_bit_for_bit(sent: Trajectory) -> None:
    got = wire.read_trajectory(decode(encode(wire.trajectory_message(sent))))
    for name in Trajectory.__struct_fields__:
        ours, theirs = getattr(sent, name), getattr(got, name)
        assert theirs.tobytes() == ours.tobytes() if isinstance(ours, np.ndarray) else theirs == ours


def test_encoding_and_decoding_copy_no_array() -> None:
    trajectory = make_trajectory()
    frames = encode(wire.trajectory_message(trajectory))
    assert np.shares_memory(np.frombuffer(frames[1], np.int32), trajectory.tokens)
    assert np.shares_memory(decode(frames).arrays["tokens"], trajectory.tokens)


@pytest.mark.parametrize(("name", "value"), [("vote", "72"), ("reasons", (Reason("judge", "it is 72"),))])
def test_labels_come_back_with_every_field_and_are_refused_without_one(name: str, value: Any) -> None:
    message = wire.labels_message(Labels("t", 0.5, 1.0, "s", **{name: value}))
    assert getattr(wire.read_labels(decode(encode(message))), name) == value
    rest = {each: given for each, given in message.body.items() if each != name}
    with pytest.raises(WireError, match=f"missing required field `{name}`"):
        wire.read_labels(decode(encode(Message("labels", 0, rest, message.arrays))))


def test_labels_with_reasons_beyond_bounds_are_refused() -> None:
    message = wire.labels_message(Labels("t", 0.5, 1.0, "s"))
    for reasons in ([["judge", "x"]] * 33, [["judge", "x" * 4001]], [["judge"]]):
        with pytest.raises(WireError):
            wire.read_labels(decode(encode(Message("labels", 0, {**message.body, "reasons": reasons}, message.arrays))))


def test_labels_and_tasks_come_back_as_they_were() -> None:
    labels = Labels("t", 0.5, 1.0, "s", np.array([0.25], np.float32), np.array([8], np.int32), {"prm": 0.25})
    got = wire.read_labels(decode(encode(wire.labels_message(labels))))
    assert (got.trajectory_id, got.reward, got.outcome, got.extra) == ("t", 0.5, 1.0, {"prm": 0.25})
    assert (got.step_scores.tolist(), got.step_ends.tolist()) == ([0.25], [8])
    shown = [{"role": "assistant", "content": "1"}]
    task = make_task(tools=[{"name": "add"}], extra_info={"raw": b"x", "nested": [1, None]}, demonstration=shown)
    assert wire.read_task(decode(encode(Message("task", 0, wire.task_body(task)))).body) == task


def test_numbers_of_numpy_travel_as_plain_ones() -> None:
    assert decode(encode(Message("x", 0, {"reward": np.float64(0.5)}))).body == {"reward": 0.5}


@pytest.mark.slow
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
def test_noise_is_a_message_or_refused(noise: bytes) -> None:
    for read in (lambda: decode(split(noise)).body, lambda: decode([noise]).body, lambda: received(noise).body):
        with contextlib.suppress(WireError):
            read()


@pytest.mark.parametrize(
    "packed",
    [
        (b"\xdd" + (500_000).to_bytes(4, "big")) * 500 + b"\xc0" * 500_000,
        (b"\xdc\xff\xff") * 900 + b"\xc0" * 70_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff\xa1a",
        b"\xdb\xff\xff\xff\xffabc",
        b"\xc6\xff\xff\xff\xffabc",
    ],
)
def test_memory_is_taken_for_what_came_and_not_for_what_is_announced(packed: bytes) -> None:
    frames = [header(packed), header(b"\x81\xa1a" + packed), packed]
    tracemalloc.start()
    try:
        for frame in frames:
            with pytest.raises(WireError):
                assert decode([frame]).body
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * len(packed) + 100_000


@pytest.mark.parametrize("value", [WIDE, nested(MAX_DEPTH - 1), "\u0708" * 1000])
def test_what_is_wide_or_has_bytes_of_containers_in_its_text_is_taken(value: Any) -> None:
    assert received(msgpack.packb({"a": value})).body == {"a": value}


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"\xc1", b"\x90", b"\x80\x80", b"\x81\x01\x02", b"\x81\xa1a\xa1\xff"),
        *(b"\x81\xa1a\xc7\x05\x05aaaaa", msgpack.packb({"a": msgpack.Timestamp(5)}), b"\x81\xa1a\x81\x91\x01\x02"),
        *(b"\x81\xa1a" + b"\x91" * depth + b"\xc0" for depth in DEPTHS),
        *(b"\x81\xa1a" * (depth + 1) + b"\xc0" for depth in DEPTHS),
    ],
)
def test_a_body_that_is_no_map_of_plain_values_or_too_deep_is_refused(body: bytes) -> None:
    with pytest.raises(WireError):
        assert received(body).body


@pytest.mark.parametrize("within", [b"", b"\x81\xa1a", b"\x81\xa1a\x92\x01"])
def test_thousands_of_lists_as_keys_are_refused_before_a_map_is_made_of_them(within: bytes) -> None:
    # A sender can choose lists that have one hash in Python. A map of those takes time by the square of their number.
    keys = b"".join(b"\x91" + msgpack.packb(index) + b"\xc0" for index in range(2000))
    message = received(b"\x81\xa1a" + within + b"\xde" + (2000).to_bytes(2, "big") + keys)
    with pytest.raises(WireError, match="Expected `str`, got `array` - at `key`"):
        assert message.body


def with_arguments(arguments: Any) -> Message:
    """A trajectory as it is received, with a call of a tool."""
    message = wire.trajectory_message(make_trajectory())
    turns = [[0, 4, "prompt", "", []], [4, 8, "assistant", "stop", [["tool", arguments]]]]
    return decode(encode(structs.replace(message, content={**message.body, "turns": turns})))


@pytest.mark.parametrize("bad", [{"a": {5: 1}}, {"a": nested(MAX_DEPTH + 1)}, {"a": [b"no JSON"]}])
def test_a_call_of_a_tool_with_arguments_that_are_no_json_or_too_deep_is_refused(bad: Any) -> None:
    with pytest.raises(WireError):
        wire.read_trajectory(with_arguments(bad))


def test_a_trajectory_is_refused_if_its_body_is_too_deep_to_be_read_as_plain_values() -> None:
    """The replay reads a stored body when labels come, and the verifier reads one for each episode."""
    deepest = next(depth for depth in reversed(range(MAX_DEPTH)) if is_taken(with_arguments({"a": nested(depth)})))
    assert with_arguments({"a": nested(deepest)}).body
    with pytest.raises(WireError):
        assert with_arguments({"a": nested(deepest + 1)}).body


def is_taken(message: Message) -> bool:
    try:
        wire.read_trajectory(message)
    except WireError:
        return False
    return True


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ([["a", "<f4", [1 << 39]]], "announces"),
        ([["a", "|O", [1]]], "dtype"),
        ([["a", "<f4", [-1]]], "impossible shape"),
        ([["a", "<f4", [1]], ["b", "<f4", [1]]], "announces 2 arrays"),
        ([["a", "<f4", [True]]], "header must be"),
        ([["a", "<f4", [1.0]]], "header must be"),
        ([["a", "<f4", [1] * 9]], "dtype"),
    ],
)
def test_an_array_that_lies_about_itself_is_refused_before_anything_is_allocated(layout: Any, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        received(b"\x80", layout, b"\0" * 4)


@pytest.mark.parametrize("shape", [[1 << 39, 0], [1 << 28, 0], [0, 1 << 39, 1 << 39, 1 << 39], [1 << 63], [65, 0]])
def test_an_array_without_bytes_cannot_be_as_long_as_it_likes(shape: Any) -> None:
    with pytest.raises(WireError):
        received(b"\x80", [["a", "<f4", shape]], b"")


def test_a_truth_value_is_0_or_1() -> None:
    frames = encode(Message("x", 0, {}, {"mask": np.array([True, False])}))
    with pytest.raises(WireError, match="truth values"):
        decode([frames[0], b"\x02\x01"])


@pytest.mark.parametrize("protocol", [1, PROTOCOL - 1, PROTOCOL + 1])
def test_another_protocol_is_refused_with_advice(protocol: int) -> None:
    with pytest.raises(WireError, match="use the same asyncrl version"):
        decode([msgpack.packb([protocol, "x", 0, {}, []])])


@pytest.mark.parametrize("field", ["member", "turns", "steps", "finish", "rewards", "timings", "id"])
@pytest.mark.parametrize(
    "value", [float("inf"), float("nan"), [float("inf")], [[1e308, 2, "prompt", "", []]], "x", [[]], {"r": 1e400}]
)
def test_a_trajectory_with_any_value_in_any_place_is_refused(field: str, value: Any) -> None:
    message = wire.trajectory_message(make_trajectory())
    if field == "id" and isinstance(value, str):
        return
    with pytest.raises(WireError):
        wire.read_trajectory(structs.replace(message, content={**message.body, field: value}))


@pytest.mark.parametrize(
    "name",
    ["tokens", "logprobs", "versions", "grammar_mass", "routed_experts", "image_spans", "image_digests"],
)
def test_a_trajectory_that_lacks_an_array_is_refused(name: str) -> None:
    message = wire.trajectory_message(make_trajectory())
    arrays = {each: array for each, array in message.arrays.items() if each != name}
    with pytest.raises(WireError, match="KeyError"):
        wire.read_trajectory(structs.replace(message, arrays=arrays))


@pytest.mark.parametrize("name", ["tokens", "logprobs", "versions"])
def test_a_trajectory_with_another_shape_of_an_array_is_refused(name: str) -> None:
    message = wire.trajectory_message(make_trajectory())
    for shape in ((), (1,), (1, 1), (0,), (2, 2, 2), (3, 2)):
        odd = np.zeros(shape, message.arrays[name].dtype)
        with pytest.raises(WireError):
            wire.read_trajectory(structs.replace(message, arrays={**message.arrays, name: odd}))


@pytest.mark.parametrize(
    "routing",
    [
        np.zeros((7, 4), np.uint8),
        np.zeros((9, 4), np.uint8),
        np.zeros((8, 0), np.uint8),
        np.zeros(8, np.uint8),
        np.zeros((8, 2, 2), np.uint8),
        np.zeros((8, 4), np.int32),
        np.zeros((8, 4097), np.uint8),
    ],
)
def test_routed_experts_of_another_shape_or_more_bytes_than_a_token_may_have_are_refused(routing: np.ndarray) -> None:
    message = wire.trajectory_message(make_trajectory())
    with pytest.raises(WireError, match=r"routed_experts|experts take"):
        wire.read_trajectory(structs.replace(message, arrays={**message.arrays, "routed_experts": routing}))


def test_a_trajectory_under_a_grammar_that_lacks_its_masses_is_refused() -> None:
    turns = (Turn(0, 4, Role.PROMPT), Turn(4, 8, Role.ASSISTANT, "stop", (), "regex"))
    message = wire.trajectory_message(make_trajectory(turns=turns, grammar_mass=np.ones(8, np.float32)))
    arrays = {**message.arrays, "grammar_mass": np.zeros(0, np.float32)}
    with pytest.raises(WireError, match="grammar_mass is float32"):
        wire.read_trajectory(structs.replace(message, arrays=arrays))
