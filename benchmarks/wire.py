"""Measures encoding and decoding of a trajectory, compared with msgpack of lists and with a copy of its bytes.

The trajectory has T tokens in a few turns. `decode` returns a checked `Trajectory`; lists are decoded to lists, or to
unchecked arrays. Every figure is the median processor time of many runs.

A hot copy repeats one buffer. A cold copy takes the next of many buffers, so that neither source nor target is in a
cache. In use a trajectory comes from the network or the store, so the cold copy is the fair floor. Encode and decode
are measured cold, too.

    python -m benchmarks.wire --tokens 8192 --turns 2 10
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import msgpack
import numpy as np

from asyncrl.types import Finish, Role, Step, Trajectory, Turn, runs_of
from asyncrl.wire import Buffer, decode, encode, join, read_trajectory, split, trajectory_message
from benchmarks.record import write_result

COLD_BYTES = 96 << 20
"""Bytes that exceed the caches."""


def make_trajectory(
    length: int,
    count: int = 2,
    name: str = "t000000001.0.0",
    group: str = "t000000001",
    member: int = 0,
    version: int = 3,
) -> Trajectory:
    """A valid trajectory of `length` tokens in `count` turns: prompt, assistant, tool result, assistant and so on."""
    ends = np.linspace(0, length, count + 1).astype(int).tolist()
    mask = np.zeros(length, np.bool_)
    turns = []
    for index, (start, end) in enumerate(pairwise(ends)):
        sampled = index % 2 == 1
        mask[start:end] = sampled
        role = Role.ASSISTANT if sampled else Role.TOOL if index else Role.PROMPT
        turns.append(Turn(start, end, role, "stop" if sampled else ""))
    return Trajectory(
        id=name,
        task_id="task-0",
        group_id=group,
        member=member,
        tokens=np.random.default_rng(0).integers(0, 150_000, length, dtype=np.int32),
        logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        version_runs=runs_of(np.where(mask, version, -1).astype(np.int32)),
        turns=tuple(turns),
        steps=tuple(Step(turn.start, turn.end) for turn in turns if turn.role == Role.ASSISTANT),
        finish=Finish.COMPLETED,
        timings={"generate": 1.0},
    )


def copy_of(trajectory: Trajectory) -> Trajectory:
    """A copy with its own arrays."""
    frames = [bytes(frame) for frame in encode(trajectory_message(trajectory))]
    return read_trajectory(decode(frames))


def median_us(work: Callable[[Any], Any], items: Sequence[Any], runs: int) -> float:
    """Median microseconds of processor time of one call, over calls with the items in turn."""
    times = []
    for run in range(runs):
        item = items[run % len(items)]
        started = time.process_time_ns()
        work(item)
        times.append(time.process_time_ns() - started)
    return statistics.median(times) / 1e3


def to_lists(trajectory: Trajectory) -> bytes:
    """The plain alternative: everything as lists."""
    packed: bytes = msgpack.packb(
        [
            trajectory.id,
            trajectory.tokens.tolist(),
            trajectory.loss_mask.tolist(),
            trajectory.logprobs.tolist(),
            trajectory.versions.tolist(),
        ]
    )
    return packed


def to_frames(trajectory: Trajectory) -> list[Buffer]:
    return encode(trajectory_message(trajectory))


def from_frames(frames: Sequence[Buffer]) -> Trajectory:
    return read_trajectory(decode(frames))


def from_frames_with_versions(frames: Sequence[Buffer]) -> Trajectory:
    """Decode by `from_frames`, and expand versions and mask, which a trajectory stores as runs, to tokens."""
    trajectory = from_frames(frames)
    trajectory.versions, trajectory.loss_mask  # noqa: B018 - computed here
    return trajectory


def lists_to_arrays(packed: bytes) -> list[Any]:
    """Convert the lists back to arrays."""
    name, *lists = msgpack.unpackb(packed)
    return [name, *map(np.array, lists, (np.int32, np.bool_, np.float32, np.int32))]


def measure(length: int, turns: int, runs: int) -> dict[str, float]:
    """All figures, in microseconds."""
    trajectory = make_trajectory(length, turns)
    size = 13 * length
    copies = max(2, COLD_BYTES // size)
    many = [copy_of(trajectory) for _ in range(copies)]
    frames = [[bytes(frame) for frame in to_frames(each)] for each in many]
    pairs = [(np.ones(size, np.uint8), np.ones(size, np.uint8)) for _ in range(copies)]
    lists = to_lists(trajectory)

    def copy(pair: Any) -> None:
        np.copyto(pair[1], pair[0])

    figures = {
        "encode_hot": median_us(to_frames, many[:1], runs),
        "encode_cold": median_us(to_frames, many, runs),
        "decode_hot": median_us(from_frames, frames[:1], runs),
        "decode_cold": median_us(from_frames, frames, runs),
        "decode_with_versions_hot": median_us(from_frames_with_versions, frames[:1], runs),
        "unframe_hot": median_us(decode, frames[:1], runs),
        "unframe_cold": median_us(decode, frames, runs),
        "join_hot": median_us(join, frames[:1], runs),
        "split_hot": median_us(split, [join(frames[0])], runs),
        "copy_hot": median_us(copy, pairs[:1], runs),
        "copy_cold": median_us(copy, pairs, runs),
        "lists_pack": median_us(to_lists, [trajectory], max(5, runs // 20)),
        "lists_unpack": median_us(msgpack.unpackb, [lists], max(5, runs // 20)),
        "lists_unpack_to_arrays": median_us(lists_to_arrays, [lists], max(5, runs // 20)),
    }
    hot, cold = (figures[f"encode_{how}"] + figures[f"decode_{how}"] for how in ("hot", "cold"))
    framed_hot, framed_cold = (figures[f"encode_{how}"] + figures[f"unframe_{how}"] for how in ("hot", "cold"))
    return {
        **figures,
        "unchecked_times_faster_than_lists": (figures["lists_pack"] + figures["lists_unpack"]) / framed_hot,
        "unchecked_times_a_cold_copy": framed_cold / figures["copy_cold"],
        "times_faster_than_lists": (figures["lists_pack"] + figures["lists_unpack"]) / hot,
        "times_faster_than_lists_of_arrays": (figures["lists_pack"] + figures["lists_unpack_to_arrays"]) / hot,
        "times_a_hot_copy": hot / figures["copy_hot"],
        "times_a_cold_copy": cold / figures["copy_cold"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the trajectory")
    parser.add_argument("--turns", type=int, nargs="+", default=[2, 10], help="turns of the trajectory, an even number")
    parser.add_argument("--runs", type=int, default=3000, help="calls; the result is their median")
    options = parser.parse_args()
    rows = [{"turns": turns, **measure(options.tokens, turns, options.runs)} for turns in options.turns]
    for name in rows[0]:
        unit = "" if name.startswith("t") else " us"
        print(f"{name:<34}" + "".join(f"{row[name]:9.1f}{unit}" for row in rows))
    result = {"tokens": options.tokens, "bytes": 13 * options.tokens, "rows": rows}
    print(f"written to {write_result(f'wire-{options.tokens}', result)}")


if __name__ == "__main__":
    main()
