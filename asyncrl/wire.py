"""Encodes messages and the data types of `types` as frames: a small msgpack header, then one raw buffer per array.

The header is `[PROTOCOL, kind, sequence, body, [[name, dtype, shape], ...]]`. Arrays never pass through msgpack, and
decoded arrays are views of the received buffers.

The decoder trusts no sender. It first walks over the header, and refuses a list that has fewer elements than it
announces. Dtypes come from a closed list, and a buffer must have exactly the announced number of bytes. So the memory
and time for a message are bounded by its size.

`encode` truncates a `reason`. msgpack_values.py encodes the values of a body.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, Generic, TypeVar, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import RefusedError, WireError
from asyncrl.msgpack_values import JSON_TYPES, MAX_DEPTH, UNREADABLE, check_keys, check_plain, decoder, pack, to_plain
from asyncrl.text import cut
from asyncrl.types import Labels, RunIdentity, Task, Trajectory, dtype_of

T = TypeVar("T")

PROTOCOL = 6
MAX_HEADER_BYTES = 4 << 20
MAX_LARGE_HEADER_BYTES = 256 << 20
"""The largest header of a message with many tasks, which is accepted only from a trusted peer."""
LEVELS_OF_ARGUMENTS = 5
"""The depth of a tool call's arguments in the body of a trajectory."""
TASKS_BYTES = 64 << 20
"""The largest size of the tasks in one reply; the next reply has further tasks. A ground truth may have megabytes."""
MAX_REASON_CHARS = 2000
"""The largest length of a `reason`, which explains a failure to people and may come from a long exception."""
MAX_ARRAYS = 4096
MAX_EMPTY_SIDE = 64
"""The longest side of an array without elements. The size of a message does not bound this side, but readers may
allocate memory by its length."""

Buffer = bytes | bytearray | memoryview
_DTYPES = {name: np.dtype(name) for name in ("<i4", "<i8", "<f4", "<f8", "|b1", "|u1", "<u2")}
_COUNT = struct.Struct("<I")


class _Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    protocol: int
    kind: str
    sequence: int
    body: msgspec.Raw
    arrays: list[tuple[str, str, list[int]]]


class _Run(msgspec.Struct, frozen=True):
    run: Any = None


_WALK = msgspec.msgpack.Decoder(msgspec.Raw)
_HEADER = msgspec.msgpack.Decoder(_Header)
_BODY = decoder(dict[str, Any])
_RUN = msgspec.msgpack.Decoder(_Run)


class Message(msgspec.Struct, frozen=True, eq=False, dict=True):
    """One message.

    - `sequence`: pairs a reply with its request.
    - `content`: the body. In a message to send, it is a mapping of plain values or a typed struct. In a received
      message, it is packed bytes, which `body` reads as plain values, and `read` as a type.
    - `frames`: the received frames of a decoded message.
    """

    kind: str
    sequence: int = 0
    content: Any = {}
    arrays: Mapping[str, NDArray[Any]] = {}
    frames: Sequence[Buffer] = ()

    @cached_property
    def body(self) -> Mapping[str, Any]:
        """The body as plain values. Raises WireError: a value is not plain, or is nested too deep."""
        if not isinstance(self.content, msgspec.Raw):
            return self.content  # type: ignore[no-any-return]
        values: Mapping[str, Any] = self.read(_BODY)
        check_plain(values)
        return values

    def read(self, decoder: msgspec.msgpack.Decoder[T]) -> T:
        """The body as the type of `decoder`, without unknown fields. Raises WireError: the body is not valid.

        The values of fields of type `Any` are not checked: call `check_plain` for each of them.
        """
        packed = self.content if isinstance(self.content, msgspec.Raw) else pack(self.content, "its body")
        try:
            check_keys(packed)
            return decoder.decode(packed)
        except UNREADABLE as error:
            raise WireError(f"the body of a message {self.kind!r:.50} cannot be read: {error}") from error


def encode(message: Message, max_header_bytes: int = MAX_HEADER_BYTES) -> list[Buffer]:
    """The frames of a message. Array frames share memory with the arrays. Half of a surrogate pair becomes a question
    mark.

    Raises WireError: the header is larger than `max_header_bytes`, or a value of the body cannot be encoded. Examples
    are an object, an integer of thousands of digits, and a list nested hundreds deep.
    """
    arrays = [np.asarray(array, order="C") for array in message.arrays.values()]
    layout = [(name, array.dtype.str, array.shape) for name, array in zip(message.arrays, arrays, strict=True)]
    body = message.content
    if isinstance(body, Mapping) and "reason" in body:
        body = {**body, "reason": cut(str(body["reason"]), MAX_REASON_CHARS)}
    header = pack((PROTOCOL, message.kind, message.sequence, body, layout), f"a message {message.kind:.50}")
    if len(header) > max_header_bytes:
        raise WireError(
            f"a message {message.kind:.50} cannot be sent: its header has {len(header)} bytes of at most "
            f"{max_header_bytes}; its texts are too long"
        )
    return [header, *(array.data.cast("B") if array.size else b"" for array in arrays)]


def decode(frames: Sequence[Buffer], max_header_bytes: int = MAX_HEADER_BYTES) -> Message:
    """The message in `frames`. Its body is decoded later. Raises WireError: the frames are malformed."""
    if not frames:
        raise WireError("a message needs a header frame")
    header = _read_header(frames[0], max_header_bytes)
    if len(header.arrays) != len(frames) - 1:
        raise WireError(f"the header announces {len(header.arrays)} arrays, but {len(frames) - 1} came")
    arrays: dict[str, NDArray[Any]] = {}
    for (name, code, shape), frame in zip(header.arrays, frames[1:], strict=True):
        if name in arrays:
            raise WireError(f"array {name!r} comes twice")
        arrays[name] = _array(name, code, shape, frame)
    return Message(header.kind, header.sequence, header.body, arrays, frames)


def _read_header(frame: Buffer, max_bytes: int) -> _Header:
    if len(frame) > max_bytes:
        raise WireError(f"the header has {len(frame)} bytes; at most {max_bytes} are allowed")
    try:
        # A decoder allocates memory for all elements that a list announces. The walk builds nothing, and fails if
        # elements are missing.
        _WALK.decode(frame)
        header = _HEADER.decode(frame)
    except UNREADABLE as error:
        raise WireError(f"the header must be [protocol, kind, sequence, body, arrays] in msgpack: {error}") from error
    if header.protocol != PROTOCOL:
        raise WireError(
            f"the message has protocol {header.protocol}, but this side reads {PROTOCOL}; use the same asyncrl version"
        )
    if len(header.arrays) > MAX_ARRAYS:
        raise WireError(f"the header announces {len(header.arrays)} arrays; at most {MAX_ARRAYS} are allowed")
    return header


def _array(name: str, code: str, shape: list[int], frame: Buffer) -> NDArray[Any]:
    dtype = _DTYPES.get(code)
    if dtype is None or len(shape) > 8:
        raise WireError(f"array {name!r:.50} is {code!r:.50}{shape!r:.50}; use a dtype of {sorted(_DTYPES)}")
    announced = dtype.itemsize
    for size in shape:
        if not 0 <= size < 1 << 40:
            raise WireError(f"array {name!r:.50} has the impossible shape {shape!r:.100}")
        announced *= size
    if announced != len(frame):
        raise WireError(f"array {name!r:.50} announces {announced} bytes, but {len(frame)} came")
    if not announced and max(shape) > MAX_EMPTY_SIDE:
        raise WireError(f"array {name!r:.50} is empty, but has a side of {max(shape)}")
    if code == "|b1" and announced and np.frombuffer(frame, np.uint8).max() > 1:
        raise WireError(f"array {name!r:.50} has truth values other than 0 and 1")
    array = np.frombuffer(frame, dtype)
    return array if len(shape) == 1 else array.reshape(shape)


def join(frames: Sequence[Buffer]) -> bytes:
    """The frames as one value for a store: the number of frames, their lengths, then their bytes."""
    return b"".join(join_parts(frames))


def join_parts(frames: Sequence[Buffer]) -> list[Buffer]:
    """The parts that `join` concatenates."""
    return [struct.pack(f"<{len(frames) + 1}I", len(frames), *map(len, frames)), *frames]


def split(value: Buffer) -> list[memoryview]:
    """The frames in a value of `join`, as views. Raises WireError: the lengths do not add up."""
    view = memoryview(value)
    if len(view) < _COUNT.size:
        raise WireError("a stored value is too short for its frame table")
    (count,) = _COUNT.unpack_from(view)
    start = _COUNT.size * (count + 1)
    if count > MAX_ARRAYS + 1 or start > len(view):
        raise WireError(f"a stored value announces {count} frames in {len(view)} bytes")
    frames = []
    for length in struct.unpack_from(f"<{count}I", view, _COUNT.size):
        frames.append(view[start : start + length])
        start += length
    if start != len(view):
        raise WireError(f"a stored value has {len(view)} bytes, but its frames announce {start}")
    return frames


class _Codec(Generic[T]):
    """Converts a data type to a message and back: array fields become frames, all other fields the body.

    `renamed` maps fields to their names in messages.
    """

    def __init__(self, kind: str, noun: type[T], **renamed: str) -> None:
        types = get_type_hints(noun)
        self._kind, self._noun = kind, noun
        self._arrays = [(name, renamed.get(name, name)) for name in types if dtype_of(types[name]) is not None]
        self._plain = [name for name in types if name not in dict(self._arrays)]
        self._wire_names = [renamed.get(name, name) for name in self._plain]
        self._values = attrgetter(*self._plain)
        members = [(name, types[name]) for name in self._plain]
        body = msgspec.defstruct(noun.__name__, members, rename=renamed)
        self._decoder = decoder(body)

    def message(self, noun: T, sequence: int = 0) -> Message:
        body = dict(zip(self._wire_names, self._values(noun), strict=True))
        arrays = {wire_name: getattr(noun, name) for name, wire_name in self._arrays}
        return Message(self._kind, sequence, body, arrays)

    def read(self, message: Message) -> T:
        """The object in a message. Raises WireError: the message is malformed, or breaks an invariant of the type."""
        values = dict(zip(self._plain, self._values(message.read(self._decoder)), strict=True))
        try:
            for name, wire_name in self._arrays:
                values[name] = message.arrays[wire_name]
            return self._noun(**values)
        except (KeyError, ValueError) as error:
            raise WireError(f"a message {self._kind!r} is invalid: {type(error).__name__}: {error}") from error


_RENAMED = {"task_id": "task", "group_id": "group", "version_runs": "versions"}
_TRAJECTORY = _Codec("trajectory", Trajectory, **_RENAMED)
_LABELS = _Codec("labels", Labels, trajectory_id="id")


trajectory_message = _TRAJECTORY.message
"""A trajectory as a message of kind `trajectory`."""
labels_message = _LABELS.message
"""Labels as a message of kind `labels`."""
read_labels = _LABELS.read
"""The labels in a message. Raises WireError: they are malformed or not finite."""


def read_trajectory(message: Message) -> Trajectory:
    """The trajectory in a message. Raises WireError: it is malformed or breaks an invariant."""
    trajectory = _TRAJECTORY.read(message)
    for turn in trajectory.turns:
        for call in turn.tool_calls:
            check_plain(call.arguments, MAX_DEPTH - LEVELS_OF_ARGUMENTS, JSON_TYPES)
    return trajectory


def task_body(task: Task) -> dict[str, Any]:
    """A task as plain values."""
    return to_plain(task)  # type: ignore[no-any-return]


def task_bytes(task: Task) -> int:
    """The size of a task in a header, in bytes. Raises WireError: the task cannot be encoded."""
    return len(pack(task, f"task {task.id:.50}"))


def read_task(body: Any) -> Task:
    """The task in plain values. Raises WireError: the values are malformed."""
    try:
        return msgspec.convert(body, Task)
    except UNREADABLE as error:
        raise WireError(f"not a task: {error}") from error


def run_field(run: RunIdentity | None) -> dict[str, Any]:
    """The field `run` for a request's body; empty if the run is None."""
    return {} if run is None else {"run": [run.name, run.id]}


def run_of(request: Message) -> RunIdentity | None:
    """The run that a request names; None if it names none."""
    match request.read(_RUN).run:
        case [str(name), str(number)]:
            return RunIdentity(name, number)
    return None


def check_run(theirs: RunIdentity | None, kind: str, own: RunIdentity, server: str, port: str) -> None:
    """Raises RefusedError: a request names a run other than the server's `own`, or names no run.

    `kind`, `server` and `port` (the setting of the server's port) are for the message.
    """
    if theirs is None:
        raise RefusedError(f"this is the {server} of run {own}, but the request {kind!r:.50} names no run")
    if not theirs.may_be(own):
        raise RefusedError(f"this is the {server} of run {own}, not of {theirs}: check network.host, {port} and run.*")
