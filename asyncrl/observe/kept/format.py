"""Encodes and decodes the file of one step's kept episodes: `step-NNNNNNNNN.kept`.

`wire.join` builds the file from a head in msgpack and a frame for each episode. The head has the rows of all episodes
and each group's task once. An episode's frame joins its trajectory, its labels and its `ARRAYS`, each encoded as a
message by `wire`. Nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import InvariantError, StoreError, WireError
from asyncrl.msgpack_values import check_plain, decoder, pack
from asyncrl.observe.kept.episode import ARRAYS, KeptEpisode, KeptRow, KeptStep
from asyncrl.wire import (
    MAX_LARGE_HEADER_BYTES,
    Buffer,
    Message,
    decode,
    encode,
    join,
    labels_message,
    read_labels,
    read_task,
    read_trajectory,
    split,
    task_body,
    trajectory_message,
)

FORMAT = 1
"""The number of this format. Files with another number are refused."""
PATTERN = "step-*.kept"
FOLDER = "episodes"
"""The subfolder of a run for its kept episodes."""
EVALUATED_FOLDER = f"{FOLDER}/evaluated"
"""The subfolder of a run for its kept held-out episodes. Its files have the same format."""


class _Head(msgspec.Struct, frozen=True):
    format: int
    step: int
    rows: Sequence[KeptRow]
    tasks: Mapping[str, Any]


_HEAD = decoder(_Head)


def file_name(step: int) -> str:
    return f"step-{step:09d}.kept"


def encode_step(kept: KeptStep) -> bytes:
    """The content of a step's file. Raises WireError: a value cannot be encoded or is too large."""
    tasks = {each.row.group_id: task_body(each.task) for each in kept.episodes if each.task is not None}
    head = pack(
        _Head(FORMAT, kept.step, [each.row for each in kept.episodes], tasks), f"the sample of step {kept.step}"
    )
    return join([head, *map(_encode, kept.episodes)])


def _encode(episode: KeptEpisode) -> bytes:
    numbers = Message("kept", arrays={name: getattr(episode, name) for name in ARRAYS})
    messages = (trajectory_message(episode.trajectory), labels_message(episode.labels), numbers)
    return join([join(encode(each, MAX_LARGE_HEADER_BYTES)) for each in messages])


class StepFile:
    """The content of a step's file, decoded lazily. Raises StoreError: the file is damaged, or has another format."""

    def __init__(self, content: Buffer, path: Path) -> None:
        self._path = path
        try:
            head, *self._frames = split(content)
            self._head: _Head = _HEAD.decode(head)
        except (WireError, msgspec.MsgspecError, ValueError) as error:
            raise self._damaged(error) from error
        if self._head.format != FORMAT:
            raise StoreError(f"{path} has format {self._head.format}, this version of asyncrl reads {FORMAT}")
        if len(self._frames) != len(self._head.rows):
            raise self._damaged(f"{len(self._head.rows)} rows, {len(self._frames)} episodes")

    @property
    def rows(self) -> Sequence[KeptRow]:
        return self._head.rows

    def episode(self, index: int) -> KeptEpisode:
        """Decode the episode of row `index`. Raises StoreError: the episode is damaged."""
        row = self._head.rows[index]
        try:
            played, judged, trained = (
                decode(split(frame), MAX_LARGE_HEADER_BYTES) for frame in split(self._frames[index])
            )
            task = self._head.tasks.get(row.group_id)
            if task is not None:
                check_plain(task)
            return KeptEpisode(
                row,
                read_trajectory(played),
                read_labels(judged),
                None if task is None else read_task(task),
                *(trained.arrays[name] for name in ARRAYS),
            )
        except (WireError, InvariantError, KeyError, ValueError) as error:
            raise self._damaged(error) from error

    def _damaged(self, reason: object) -> StoreError:
        return StoreError(f"{self._path} is damaged ({reason}): delete it; only a sample of episodes is lost")
