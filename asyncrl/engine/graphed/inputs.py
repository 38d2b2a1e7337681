"""The inputs of a static pass: one buffer of integers, which reaches the device in one copy.

A pass has N packed tokens: one token of each sequence that decodes, then chunks of prompts, then padding. A tile is a
few neighbouring tokens of one slot, whose attention is computed together. A sampled row is a token after which the pass
samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.engine.scheduler import SlotChunk

LATEST = -1
"""The id that means: the last token that was sampled for the slot. Perhaps only the device knows this token yet."""

SMALLEST = 8
"""The smallest number of tokens of a pass."""


@dataclass(frozen=True, slots=True)
class PassShape:
    """The numbers of packed tokens, of tiles and of sampled rows for which a pass has room. A tile has at most
    `tile_tokens` tokens."""

    tokens: int
    tiles: int
    rows: int
    tile_tokens: int

    @property
    def sections(self) -> list[int]:
        """The lengths of the parts of the buffer, in the order of the fields of `PassInputs`."""
        return [self.tokens] * 3 + [self.tiles] * 2 + [self.rows] * 4

    @property
    def numbers(self) -> int:
        """The length of the buffer."""
        return sum(self.sections)


def pass_shapes(largest: int, slots: int, rows: int, tile_tokens: tuple[int, int]) -> list[PassShape]:
    """The shapes of all passes of at most `largest` tokens in `slots` slots, the smallest first.

    A pass samples at most `rows` rows. `tile_tokens` has two maximum numbers of tokens of a tile. The first is for
    passes of at most 2 tokens for each slot, which mostly decode, and the second for larger passes.
    """
    sizes, size = [largest], SMALLEST
    while size < largest:
        # From 64 tokens on, padding takes at most a third of a pass.
        sizes += [size, size * 3 // 2] if size >= 64 and size * 3 // 2 < largest else [size]
        size *= 2
    shapes = []
    for tokens in sorted(sizes):
        tile = tile_tokens[tokens > 2 * slots]
        shapes.append(PassShape(tokens, min(tokens, slots + tokens // tile + 1), min(tokens, rows), tile))
    return shapes


@dataclass(frozen=True, slots=True, eq=False)
class PassInputs:
    """The parts of a buffer int64 for a pass of `shape`, as views of a tensor or of an array.

    - `ids`, `slots` and `positions` [tokens]: the token, or `LATEST`; its slot; its position in the slot
    - `firsts` and `counts` [tiles]: a tile's first packed token, and its number of tokens (0: padding)
    - `last` [rows]: the packed token after which a row samples
    - `targets` [rows]: the row's slot, or the padding's slot
    - `noise` and `temperatures` [rows]: a random number in (0, 1) and the temperature, as the bits of a float64
    """

    shape: PassShape
    ids: Any
    slots: Any
    positions: Any
    firsts: Any
    counts: Any
    last: Any
    targets: Any
    noise: Any
    temperatures: Any

    @classmethod
    def of_tensor(cls, buffer: torch.Tensor, shape: PassShape) -> PassInputs:
        """View the beginning of `buffer`. Floating-point parts become float64."""
        *integers, noise, temperatures = buffer[: shape.numbers].split(shape.sections)
        parts = [*integers, noise.view(torch.float64), temperatures.view(torch.float64)]
        return cls(shape, *parts)

    @classmethod
    def of_array(cls, buffer: NDArray[Any], shape: PassShape) -> PassInputs:
        """Do the same as `of_tensor`, for an array."""
        bounds = np.cumsum(shape.sections)[:-1]
        *integers, noise, temperatures = np.split(buffer[: shape.numbers], bounds)
        parts = [*integers, noise.view(np.float64), temperatures.view(np.float64)]
        return cls(shape, *parts)


@dataclass(frozen=True, slots=True)
class PassTokens:
    """The packed tokens of a pass before padding.

    - `slots` and `positions`: for each decoding sequence, its slot and the position of its last sampled token
    - `chunks` and `texts`: chunks of prompts, and their tokens
    """

    slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    chunks: Sequence[SlotChunk]
    texts: Sequence[Sequence[int]]

    @property
    def count(self) -> int:
        return len(self.slots) + sum(chunk.end - chunk.start for chunk in self.chunks)

    def ends(self) -> NDArray[np.int64]:
        """The index of the last packed token of each sequence, in the order of `slots` and `chunks`."""
        lengths = np.array([chunk.end - chunk.start for chunk in self.chunks], np.int64)
        decoding = len(self.slots)
        return np.concatenate([np.arange(decoding), lengths.cumsum() + decoding - 1])

    def write(self, inputs: PassInputs, tile_tokens: int, padding: int) -> None:
        """Write tokens and tiles of at most `tile_tokens` tokens into `inputs`, which are arrays. Tokens of padding
        belong to the slot `padding`."""
        token = count = len(self.slots)
        inputs.ids[:token] = LATEST
        inputs.slots[:token] = self.slots
        inputs.positions[:token] = self.positions
        inputs.firsts[:token] = np.arange(token)
        inputs.counts[:token] = 1
        for chunk, text in zip(self.chunks, self.texts, strict=True):
            end = token + chunk.end - chunk.start
            inputs.ids[token:end] = text
            inputs.slots[token:end] = chunk.slot
            inputs.positions[token:end] = np.arange(chunk.start, chunk.end)
            firsts = np.arange(token, end, tile_tokens)
            inputs.firsts[count : count + len(firsts)] = firsts
            inputs.counts[count : count + len(firsts)] = np.minimum(end - firsts, tile_tokens)
            token, count = end, count + len(firsts)
        inputs.ids[token:] = inputs.positions[token:] = 0
        inputs.slots[token:] = padding
        inputs.firsts[count:] = inputs.counts[count:] = 0


@dataclass(frozen=True, slots=True)
class PassRows:
    """The sampled rows of a pass before padding: see `PassInputs`."""

    last: NDArray[np.int64]
    targets: NDArray[np.int64]
    noise: NDArray[np.float64]
    temperatures: NDArray[np.float64]

    def write(self, inputs: PassInputs, padding: int) -> None:
        """Write the rows into `inputs`, which are arrays. Rows of padding sample for the slot `padding`."""
        count = len(self.last)
        for part, written, other in (
            (inputs.last, self.last, 0),
            (inputs.targets, self.targets, padding),
            (inputs.noise, self.noise, 0.5),
            (inputs.temperatures, self.temperatures, 0.0),
        ):
            part[:count], part[count:] = written, other
