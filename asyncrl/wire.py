"""Messages and trajectories as frames: a small msgpack header, then one raw buffer an array.

The header is `[PROTOCOL, kind, sequence, body, [[name, dtype, shape], ...]]`. Arrays never pass through msgpack.
Nothing is believed: dtypes come from a closed list, and a buffer must have exactly the bytes that its header announces,
so that nothing is allocated on a stranger's word. Decoded arrays are views of the received buffers.

`encode` is where all text leaves a process: what has no encoding is replaced there, and a `reason` is cut.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import InvariantError, RefusedError, WireError
from asyncrl.text import cut
from asyncrl.types import (
    NO_VERSION,
    BatchPlan,
    Finish,
    Labels,
    Purpose,
    Role,
    RunIdentity,
    Step,
    Task,
    Ticket,
    ToolCall,
    Trajectory,
    Turn,
)
from asyncrl.unpacking import unpack

PROTOCOL = 3
READABLE = (2, PROTOCOL)
"""Stores hold messages as they came, and those of 2 have the same trajectories and labels. A request of 2 does not say
its run, for which replay and learner refuse it."""
MAX_HEADER_BYTES = 4 << 20
MAX_LARGE_HEADER_BYTES = 256 << 20
"""For headers that carry many tasks with their prompts, from a side that is known."""
TASKS_BYTES = 64 << 20
"""Of the tasks in one reply: what is beyond them comes with the next, since a ground truth may have megabytes."""
MAX_REASON_CHARS = 2000
"""The `reason` in a body tells people why something failed. It may come from an exception of any length."""
MAX_ARRAYS = 4096
MAX_EMPTY_SIDE = 64
"""An array without elements cannot be as long as it likes: others take memory by its length."""

Buffer = bytes | bytearray | memoryview
_DTYPES = {name: np.dtype(name) for name in ("<i4", "<i8", "<f4", "<f8", "|b1", "|u1", "<u2")}
_COUNT = struct.Struct("<I")
_ROLES = {role.value: role for role in Role}


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """One message. `sequence` pairs a reply with its request; `body` holds small plain values; `frames` are what it was
    decoded from, if it was."""

    kind: str
    sequence: int = 0
    body: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    frames: Sequence[Buffer] = ()


def encode(message: Message, max_header_bytes: int = MAX_HEADER_BYTES) -> list[Buffer]:
    """Frames of a message; array frames share memory with the arrays. Half of a surrogate pair becomes a question mark.

    Raises WireError: a value of the body has no encoding (an integer of more than 64 bits, an object, a list within
    hundreds of others), or the header would be larger than the other side takes.
    """
    arrays = [np.asarray(array, order="C") for array in message.arrays.values()]
    layout = [(name, array.dtype.str, array.shape) for name, array in zip(message.arrays, arrays, strict=True)]
    body = message.body
    if "reason" in body:
        body = {**body, "reason": cut(str(body["reason"]), MAX_REASON_CHARS)}
    try:
        header = msgpack.packb([PROTOCOL, message.kind, message.sequence, body, layout], unicode_errors="replace")
    except (ValueError, TypeError, OverflowError) as error:
        raise WireError(f"a message {message.kind:.50} cannot be encoded: {error}") from error
    if len(header) > max_header_bytes:
        raise WireError(
            f"a message {message.kind:.50} cannot be sent: its header has {len(header)} bytes of at most "
            f"{max_header_bytes}; its texts are too long"
        )
    return [header, *(array.data.cast("B") if array.size else b"" for array in arrays)]


def run_field(run: RunIdentity | None) -> dict[str, Any]:
    """What a request's body says of the run that asks; nothing where there is none."""
    return {} if run is None else {"run": [run.name, run.id]}


def check_run(request: Message, own: RunIdentity, server: str, port: str) -> None:
    """Raises RefusedError: the request is of another run than the server's `own`, or does not say its run. `port` is
    the setting of the server's."""
    match request.body.get("run"):
        case [str(name), str(number)]:
            theirs = RunIdentity(name, number)
        case _:
            raise RefusedError(
                f"this is the {server} of run {own}; {request.kind!r:.50} does not say which run's it is"
            )
    if not theirs.may_be(own):
        raise RefusedError(
            f"this is the {server} of run {own}, not of {theirs}: look at network.host, {port}, run.name and run.dir"
        )


def decode(frames: Sequence[Buffer], max_header_bytes: int = MAX_HEADER_BYTES) -> Message:
    """The message in `frames`. Raises WireError with the reason where they are malformed."""
    if not frames:
        raise WireError("a message needs a header frame")
    kind, sequence, body, layout = _header(frames[0], max_header_bytes)
    if len(layout) != len(frames) - 1:
        raise WireError(f"the header announces {len(layout)} arrays, {len(frames) - 1} came")
    arrays: dict[str, NDArray[Any]] = {}
    for entry, frame in zip(layout, frames[1:], strict=True):
        name, array = _array(entry, frame)
        if name in arrays:
            raise WireError(f"array {name!r} comes twice")
        arrays[name] = array
    return Message(kind, sequence, body, arrays, frames)


def _header(frame: Buffer, max_bytes: int) -> tuple[str, int, dict[str, Any], list[Any]]:
    if len(frame) > max_bytes:
        raise WireError(f"the header has {len(frame)} bytes; at most {max_bytes} are taken")
    try:
        header = unpack(frame)
    except WireError as error:
        raise WireError(f"the header cannot be read: {error}") from error
    if not isinstance(header, list) or not header:
        raise WireError("the header is no list")
    if header[0] not in READABLE:
        raise WireError(
            f"the message speaks protocol {header[0]!r}, this side speaks {PROTOCOL}; use one asyncrl version"
        )
    if len(header) != 5 or not all(map(isinstance, header[1:], (str, int, dict, list))) or len(header[4]) > MAX_ARRAYS:
        raise WireError("the header must be [protocol, kind, sequence, body, arrays]")
    return header[1], header[2], header[3], header[4]


def _array(entry: Any, frame: Buffer) -> tuple[str, NDArray[Any]]:
    # Plain tests, since `match` on classes takes fifteen times as long.
    name, code, shape = entry if isinstance(entry, list) and len(entry) == 3 else (None, None, None)
    if not (isinstance(name, str) and isinstance(code, str) and isinstance(shape, list)) or (
        code not in _DTYPES or len(shape) > 8
    ):
        raise WireError(f"an array must be [name, dtype, shape] with a dtype of {sorted(_DTYPES)}, not {entry!r:.100}")
    dtype, announced = _DTYPES[code], _DTYPES[code].itemsize
    for size in shape:
        if type(size) is not int or not 0 <= size < 1 << 40:
            raise WireError(f"array {name!r} has the impossible shape {shape!r:.100}")
        announced *= size
    if announced != len(frame):
        raise WireError(f"array {name!r} announces {announced} bytes, {len(frame)} came")
    if not announced and max(shape) > MAX_EMPTY_SIDE:
        raise WireError(f"array {name!r} is empty, and claims {max(shape)} rows of nothing")
    if code == "|b1" and announced and np.frombuffer(frame, np.uint8).max() > 1:
        raise WireError(f"array {name!r} has truth values other than 0 and 1")
    array = np.frombuffer(frame, dtype)
    return name, array if len(shape) == 1 else array.reshape(shape)


def join(frames: Sequence[Buffer]) -> bytes:
    """Frames as one value for a store: their count, their lengths, then their bytes."""
    lengths = struct.pack(f"<{len(frames) + 1}I", len(frames), *(len(frame) for frame in frames))
    return b"".join([lengths, *frames])


def split(value: Buffer) -> list[memoryview]:
    """The frames of a joined value, as views of it. Raises WireError where lengths do not add up."""
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
        raise WireError(f"a stored value has {len(view)} bytes, its frames announce {start}")
    return frames


def trajectory_message(trajectory: Trajectory, sequence: int = 0) -> Message:
    """A trajectory as a message of kind `trajectory`. Versions travel as runs, and the loss mask is where they are."""
    body = {
        "id": trajectory.id,
        "task": trajectory.task_id,
        "group": trajectory.group_id,
        "member": trajectory.member,
        "turns": [
            [t.start, t.end, t.role.value, t.finish_reason, [[c.name, c.arguments] for c in t.tool_calls]]
            for t in trajectory.turns
        ],
        "steps": [[s.start, s.end] for s in trajectory.steps],
        "finish": trajectory.finish.value,
        "rewards": dict(trajectory.rewards),
        "timings": dict(trajectory.timings),
    }
    arrays = {
        "tokens": trajectory.tokens,
        "logprobs": trajectory.logprobs,
        "versions": version_runs(trajectory.versions),
    }
    return Message("trajectory", sequence, body, arrays)


def version_runs(versions: NDArray[np.int32]) -> NDArray[np.int32]:
    """versions int32[T] as runs of equal values, int32[R, 2]: where each starts, and its version."""
    changes = (versions[1:] != versions[:-1]).nonzero()[0]
    runs = np.zeros((len(changes) + 1, 2), np.int32)
    runs[1:, 0] = changes + 1
    runs[:, 1] = versions[runs[:, 0]]
    return runs


def read_version_runs(runs: NDArray[np.int32], length: int) -> NDArray[np.int32]:
    """versions int32[length] from their runs. Raises WireError where these do not cover the length in order."""
    if runs.dtype != np.int32 or runs.ndim != 2 or runs.shape[1] != 2 or not len(runs):
        raise WireError(f"version runs are {runs.dtype}{list(runs.shape)}; they must be int32[R, 2]")
    starts = runs[:, 0].tolist()
    lengths = [end - start for start, end in zip(starts, [*starts[1:], length], strict=True)]
    if starts[0] != 0 or min(lengths) <= 0:
        raise WireError(f"version runs do not cover {length} tokens in order")
    return np.repeat(runs[:, 1], lengths)


def read_trajectory(message: Message) -> Trajectory:
    """The trajectory in a message. Raises WireError where it is malformed or breaks an invariant."""
    body = message.body
    try:
        versions = read_version_runs(message.arrays["versions"], len(message.arrays["tokens"]))
        return Trajectory(
            id=_text(body["id"]),
            task_id=_text(body["task"]),
            group_id=_text(body["group"]),
            member=int(body["member"]),
            turns=tuple(
                Turn(int(start), int(end), _ROLES[role], _text(finish), () if calls == [] else _tool_calls(calls))
                for start, end, role, finish, calls in body["turns"]
            ),
            steps=tuple(Step(int(start), int(end)) for start, end in body["steps"]),
            finish=Finish(body["finish"]),
            rewards=_numbers(body["rewards"]),
            timings=_numbers(body["timings"]),
            tokens=message.arrays["tokens"],
            loss_mask=versions != NO_VERSION,
            logprobs=message.arrays["logprobs"],
            versions=versions,
        )
    except (KeyError, TypeError, ValueError, OverflowError, InvariantError) as error:
        raise WireError(f"not a trajectory: {type(error).__name__}: {error}") from error


def _tool_calls(calls: Any) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(_text(name), dict(arguments)) for name, arguments in calls)


def labels_message(labels: Labels, sequence: int = 0) -> Message:
    """Labels as a message of kind `labels`."""
    body = {
        "id": labels.trajectory_id,
        "reward": labels.reward,
        "outcome": labels.outcome,
        "scorer": labels.scorer,
        "extra": dict(labels.extra),
    }
    return Message("labels", sequence, body, {"step_scores": labels.step_scores, "step_ends": labels.step_ends})


def read_labels(message: Message) -> Labels:
    """The labels in a message. Raises WireError where they are malformed or not finite."""
    body = message.body
    try:
        return Labels(
            trajectory_id=_text(body["id"]),
            reward=float(body["reward"]),
            outcome=float(body["outcome"]),
            scorer=_text(body["scorer"]),
            step_scores=message.arrays["step_scores"],
            step_ends=message.arrays["step_ends"],
            extra=_numbers(body["extra"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError, InvariantError) as error:
        raise WireError(f"not labels: {type(error).__name__}: {error}") from error


def task_body(task: Task) -> dict[str, Any]:
    """A task as plain values."""
    return {
        "id": task.id,
        "messages": [dict(message) for message in task.messages],
        "ground_truth": task.ground_truth,
        "data_source": task.data_source,
        "tools": [dict(tool) for tool in task.tools],
        "tools_kwargs": dict(task.tools_kwargs),
        "extra_info": dict(task.extra_info),
    }


def task_bytes(task: Task) -> int:
    """How long a task is in a header."""
    return len(msgpack.packb(task_body(task), unicode_errors="replace"))


def read_task(body: Mapping[str, Any]) -> Task:
    """The task in `body`. Raises WireError where it is malformed."""
    try:
        return Task(**body)
    except (TypeError, InvariantError) as error:
        raise WireError(f"not a task: {error}") from error


def ticket_body(ticket: Ticket) -> dict[str, Any]:
    """A ticket as plain values."""
    return {
        "id": ticket.id,
        "task": task_body(ticket.task),
        "group": ticket.group_id,
        "member": ticket.member,
        "purpose": ticket.purpose.value,
        "temperature": ticket.temperature,
        "min_version": ticket.min_version,
    }


def read_ticket(body: Mapping[str, Any]) -> Ticket:
    """The ticket in `body`. Raises WireError where it is malformed."""
    try:
        return Ticket(
            id=_text(body["id"]),
            task=read_task(body["task"]),
            group_id=_text(body["group"]),
            member=int(body["member"]),
            purpose=Purpose(body["purpose"]),
            temperature=float(body["temperature"]),
            min_version=int(body["min_version"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise WireError(f"not a ticket: {type(error).__name__}: {error}") from error


def plan_body(plan: BatchPlan) -> dict[str, Any]:
    """A batch plan as plain values."""
    return asdict(plan)


def read_plan(body: Mapping[str, Any]) -> BatchPlan:
    """The batch plan in `body`. Raises WireError where it is malformed."""
    try:
        return BatchPlan(**body)
    except (TypeError, InvariantError) as error:
        raise WireError(f"not a batch plan: {error}") from error


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {value!r:.50}")
    return value


def _numbers(values: Any) -> dict[str, float]:
    numbers = {_text(name): float(value) for name, value in dict(values).items()}
    if not all(map(math.isfinite, numbers.values())):
        raise ValueError(f"a number is not finite: {numbers!r:.100}")
    return numbers
