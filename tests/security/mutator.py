"""Messages as an enemy might send them: valid requests of every kind, damaged at random, by seed.

Requests that are still valid orders (give me tickets, plan a step without trajectories) are left out: who may connect
may give orders, and the honest clients must get right answers during the fuzz.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from asyncrl.replay import protocol
from asyncrl.replay.messages import decode_request, encode_request
from asyncrl.types import NOTHING_NEEDED, Role, RunIdentity, ToolCall, Turn
from asyncrl.wire import PROTOCOL, Message, encode, join, labels_message, trajectory_message
from tests.helpers import OWN_RUN, make_labels, make_trajectory
from tests.replay.test_requests import LISTS_AS_KEYS, VALID, WHO

Frames = list[bytes]

CALLS = Turn(4, 8, Role.ASSISTANT, "stop", (ToolCall("calculator", {"expression": "1+1", "nested": [[{"a": [1]}]]}),))
TRAJECTORIES = [
    make_trajectory(id="nobody", group_id="nothing", **changes)
    for changes in (
        {},
        {"length": 400},
        {"turns": (Turn(0, 4, Role.PROMPT), CALLS), "rewards": {"tool": 0.5}, "timings": {"generate": 1.5}},
    )
]
REPLAY_REQUESTS: Sequence[Frames] = [
    [bytes(frame) for frame in encode_request(request, number, RunIdentity("run"), frames)]
    for number, (request, frames) in enumerate(
        [
            *((protocol.PutTrajectory(0), encode(trajectory_message(each))) for each in TRAJECTORIES),
            (protocol.PutLabels(*WHO), encode(labels_message(make_labels("nobody")))),
            (protocol.PutGroupLabels(*WHO), [join(encode(labels_message(make_labels("nobody"))))]),
            *((request, ()) for request in VALID if not request.frames and request.kind != "SkipPlan"),
        ]
    )
]
WEIGHT_REQUESTS: Sequence[Frames] = [
    [bytes(frame) for frame in encode(Message(kind, 1, {**body, "run": [OWN_RUN.name, OWN_RUN.id]}))]
    for kind, body in (
        ("manifest", {"holds": 5, "base": ""}),
        ("join", {"holds": 5, "backend": "gloo"}),
        ("chunk", {"version": 1, "start": 0, "stop": 4096}),
    )
]
DEEP: Any = []
for _ in range(990):
    DEEP = [DEEP]
HOSTILE: Sequence[Any] = [
    *(None, True, False, 0, 1, -1, 1 << 31, -(1 << 31), 10**9, 10**18, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1),
    *(0.5, -0.0, 1e308, float("inf"), float("-inf"), float("nan")),
    *("", "many", "\0", "\U0001f600" * 200, "x" * 600, "nobody", b"", b"\xff" * 40),
    *([], [[]], [None], [1, 2], ["nobody"] * 300, [["a", "<f4", [1]]], {}, {"a": 1}, {"": {"": {}}}),
    *(DEEP, msgpack.ExtType(5, b""), msgpack.Timestamp(1), list(range(100)), {str(i): i for i in range(50)}),
]
DTYPES = ["<i4", "<f4", "|b1", "|u1", "<i8", "|O", "<f2", "|V9", "<U4", ">i4", ""]
SHAPES: Sequence[Any] = [
    *(
        [],
        [0],
        [1],
        [-1],
        [1 << 39],
        [1 << 40],
        [0, 1 << 39, 1 << 39, 1 << 39],
        [1 << 39, 0],
        [1 << 30, 0],
        [1] * 9,
        [1.5],
        [True],
        ["1"],
        None,
    ),
    *([8], [4, 2], [2, 2, 2], [1 << 20] * 3, [(1 << 64) - 1]),
]
BOMBS = [
    (b"\xdd" + struct.pack(">I", 50_000)) * 500 + b"\xc0" * 50_000,
    (b"\xdc" + struct.pack(">H", 60_000)) * 1000,
    b"\x91" * 5000,
    b"\x81\xa1a" * 3000,
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff\xa1a",
    b"\xdb\xff\xff\xff\xff" + b"x" * 100,
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x05",
    b"\x95\x01\xa6status\xcf" + b"\xff" * 8 + b"\x80\x90",
    b"\xc1" * 50,
    LISTS_AS_KEYS,
]


class Mutator:
    """An endless stream of damaged `requests`, the same for the same seed."""

    def __init__(self, requests: Sequence[Frames], seed: int) -> None:
        self._random = random.Random(seed)
        self._bases = requests
        self._kinds = [msgpack.unpackb(frames[0])[1] for frames in requests]
        self._ways: list[Callable[[Frames], Frames]] = [
            *(self._flip, self._flip, self._cut, self._grow, self._drop, self._double, self._swap, self._insert),
            *([self._retype] * 8 + [self._reshape] * 4),
            *(self._remove, self._rename, self._invent, self._invent, self._lie, self._lie, self._noise),
        ]

    def message(self) -> Frames:
        """The next message; it is damaged in one to three ways."""
        while True:
            frames = list(self._random.choice(self._bases))
            for _ in range(self._random.choice((1, 1, 2, 3))):
                frames = self._random.choice(self._ways)(frames) or [b""]
            if self._random.random() < 0.001:
                frames[0] = self._random.choice(BOMBS)
            if not is_order(frames):
                return frames

    def _position(self, frames: Frames) -> int:
        return self._header(frames) if self._random.random() < 0.7 else self._random.randrange(len(frames))

    def _header(self, frames: Frames) -> int:
        """The index of a frame with structure: a header, or that of the trajectory or labels after it."""
        return self._random.randrange(min(2, len(frames)))

    def _flip(self, frames: Frames) -> Frames:
        index = self._position(frames)
        frame = bytearray(frames[index] or b"\0")
        for _ in range(self._random.choice((1, 1, 2, 8))):
            frame[self._random.randrange(len(frame))] ^= 1 << self._random.randrange(8)
        frames[index] = bytes(frame)
        return frames

    def _cut(self, frames: Frames) -> Frames:
        index = self._position(frames)
        frames[index] = frames[index][: self._random.randrange(len(frames[index]) + 1)]
        return frames

    def _grow(self, frames: Frames) -> Frames:
        index = self._position(frames)
        frames[index] += self._random.randbytes(self._random.choice((1, 4, 50)))
        return frames

    def _drop(self, frames: Frames) -> Frames:
        del frames[self._random.randrange(len(frames))]
        return frames

    def _double(self, frames: Frames) -> Frames:
        index = self._random.randrange(len(frames))
        return frames[:index] + [frames[index]] * self._random.choice((2, 3, 20)) + frames[index + 1 :]

    def _swap(self, frames: Frames) -> Frames:
        self._random.shuffle(frames)
        return frames

    def _insert(self, frames: Frames) -> Frames:
        frames.insert(self._random.randrange(len(frames) + 1), self._random.randbytes(self._random.randrange(20)))
        return frames

    def _noise(self, frames: Frames) -> Frames:
        frames[self._position(frames)] = self._random.randbytes(self._random.choice((0, 1, 8, 100)))
        return frames

    def _retype(self, frames: Frames) -> Frames:
        """Another value, of another type, where a field of the body is."""
        return self._rewrite(frames, lambda header: self._replace(header[3]))

    def _remove(self, frames: Frames) -> Frames:
        return self._rewrite(frames, lambda header: header[3].pop(self._random.choice(list(header[3]))))

    def _rename(self, frames: Frames) -> Frames:
        """Another kind, or another sequence number, or another protocol."""

        def change(header: list[Any]) -> None:
            match self._random.randrange(3):
                case 0:
                    header[0] = self._random.choice((0, 2, 99, -1, "1", None, 1.5, [PROTOCOL]))
                case 1:
                    header[1] = self._random.choice([*self._kinds, *HOSTILE, "no such kind"])
                case 2:
                    header[2] = self._random.choice(HOSTILE)

        return self._rewrite(frames, change)

    def _reshape(self, frames: Frames) -> Frames:
        """Arrays that lie about themselves."""

        def change(header: list[Any]) -> None:
            layout = header[-1]
            if not layout or self._random.random() < 0.1:
                layout.append(["a", "<f4", [1 << 39]])
                return
            entry = self._random.choice(layout)
            part = self._random.randrange(3)
            entry[part] = self._random.choice((HOSTILE, DTYPES, SHAPES)[part])

        return self._rewrite(frames, change)

    def _lie(self, frames: Frames) -> Frames:
        """A message whose frames after the first have random contents of the same lengths."""
        return [frames[0], *(self._random.randbytes(len(frame)) for frame in frames[1:])]

    def _invent(self, frames: Frames) -> Frames:
        """A message whose structure is right and whose contents are anything."""
        body = {str(self._random.choice(("id", "worker", "ids", "want", "x"))): self._random.choice(HOSTILE)}
        extra = [bytes(self._random.randrange(4)) for _ in range(self._random.randrange(3))]
        kind = self._random.choice([*self._kinds, "invented"])
        return [msgpack.packb([PROTOCOL, kind, self._random.randrange(100), body, []]), *extra]

    def _rewrite(self, frames: Frames, change: Callable[[list[Any]], Any]) -> Frames:
        """Change a header where it can still be read."""
        index = self._header(frames)
        try:
            header = msgpack.unpackb(frames[index])
            change(header)
            frames[index] = msgpack.packb(header)
        except (ValueError, TypeError, IndexError, AttributeError, KeyError, msgpack.UnpackException):
            return self._noise(frames)
        return frames

    def _replace(self, node: Any) -> None:
        """Put a hostile value somewhere below `node`, a list or a dictionary that is not empty."""
        keys = list(node) if isinstance(node, dict) else range(len(node))
        key = self._random.choice(keys)
        below = node[key]
        if isinstance(below, (dict, list)) and below and self._random.random() < 0.7:
            self._replace(below)
        else:
            node[key] = self._random.choice(HOSTILE)


def is_order(frames: Frames) -> bool:
    """Return whether this is a valid request that changes what others get."""
    match decode_request(frames).request:
        case protocol.GetTickets(want=n) | protocol.LeaseTrajectories(trajectories=n) | protocol.Checkpointed(steps=n):
            return n > 0
        case protocol.Published(version=n) | protocol.Evaluate(version=n):
            return n > 0
        case protocol.RequireLabels() as request:
            return request.needs != NOTHING_NEEDED
        case protocol.PlanAtOnce():
            return True
    return False
