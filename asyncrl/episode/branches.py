"""Holds the branches of an episode: token sequences that grow turn by turn. Each has the columns of a trajectory, such
as log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl.chat.history import Message, repeats, same_message
from asyncrl.engine.base import PlacedImage
from asyncrl.types import DIGEST_BYTES, NO_ROUTING, NO_VERSION, Grammar, Role, ToolCall, Turn

if TYPE_CHECKING:
    from asyncrl.modelling.routing import RoutedTokens


class Branch:
    """One token sequence of at most `capacity` tokens.

    `session` is the name under which the engine knows the branch. `reserved` is the number of tokens that are reserved
    for a completion in flight, or 0 if none is in flight.
    """

    def __init__(self, session: str, capacity: int) -> None:
        self.session = session
        self.turns: list[Turn] = []
        self.reserved = 0
        self._images: list[PlacedImage] = []
        self._tokens = np.empty(capacity, np.int32)
        self._logprobs = np.empty(capacity, np.float32)
        self._versions = np.empty(capacity, np.int32)
        self._grammar_mass = np.ones(capacity, np.float32)
        self._routing: NDArray[np.uint8] | None = None

    def __len__(self) -> int:
        return self.turns[-1].end if self.turns else 0

    @property
    def tokens(self) -> NDArray[np.int32]:
        """A view of the tokens so far, int32[T]."""
        return self._tokens[: len(self)]

    def columns(self, length: int) -> tuple[NDArray[Any], ...]:
        """Views of the first `length` tokens, and of their log-probs, versions and grammar masses. The grammar mass is
        the probability of all tokens that a grammar allowed."""
        return self._tokens[:length], self._logprobs[:length], self._versions[:length], self._grammar_mass[:length]

    def images_within(self, length: int) -> list[PlacedImage]:
        """The images among the first `length` tokens."""
        return [image for image in self._images if image.end <= length]

    def turns_within(self, length: int) -> list[Turn]:
        """The turns within the first `length` tokens."""
        return [turn for turn in self.turns if turn.end <= length]

    def add(
        self,
        tokens: NDArray[np.int32],
        role: Role,
        calls: Sequence[ToolCall] = (),
        logprobs: NDArray[np.float32] | float = 0.0,
        versions: NDArray[np.int32] | int = NO_VERSION,
        finish_reason: str = "",
        images: Sequence[PlacedImage] = (),
    ) -> None:
        """Add a turn with its tool calls, and with the `images` among its tokens.

        Tokens that the policy did not sample have the log-prob 0 and no version.
        """
        start = len(self)
        self._images = [*self.images_within(start), *(moved(image, start) for image in images)]
        end = start + len(tokens)
        self._tokens[start:end], self._logprobs[start:end], self._versions[start:end] = tokens, logprobs, versions
        self._grammar_mass[start:end] = 1.0
        if self._routing is not None:
            self._routing[start:end] = 255
        self.turns.append(Turn(start, end, role, finish_reason, tuple(calls)))

    def note_experts(self, routing: Sequence[RoutedTokens]) -> None:
        """Note which experts of a mixture of experts computed the tokens. A token keeps the experts that computed it
        first."""
        for each in routing:
            if self._routing is None:
                self._routing = np.full((len(self._tokens), each.rows.shape[1]), 255, np.uint8)
            known = self._routing[each.start : min(each.end, len(self))]
            # The first experts led to the sampled token. A later request may compute the prefix again, with other
            # experts.
            missing = (known == 255).all(1)
            known[missing] = each.rows[: len(known)][missing]

    def experts(self, length: int) -> NDArray[np.uint8] | None:
        """The experts of the first `length` tokens, as in Trajectory. None if the engine reports no experts."""
        return None if self._routing is None else self._routing[:length]

    def cut(self, length: int) -> None:
        """Remove the tokens from `length` on. A turn that loses tokens has the finish reason `length`."""
        turns = self.turns_within(length)
        if len(turns) < len(self.turns) and (split := self.turns[len(turns)]).start < length:
            turns.append(split._replace(end=length, finish_reason="length", tool_calls=()))
        self.turns = turns

    def keep(self, turn: Turn, kept: NDArray[np.bool_]) -> list[Turn]:
        """Change tokens of the policy's `turn` to context: those on which `kept`, bool[tokens of the turn], is false.

        The turn is divided where `kept` changes. Returns the parts that are kept. All of them but the last have the
        finish reason `length`.
        """
        others = turn.start + np.flatnonzero(~kept)
        self._logprobs[others], self._versions[others], self._grammar_mass[others] = 0.0, NO_VERSION, 1.0
        bounds = [0, *(1 + np.flatnonzero(kept[1:] != kept[:-1])).tolist(), len(kept)]
        spans = [(turn.start + start, turn.start + end, bool(kept[start])) for start, end in pairwise(bounds)]
        last = max((end for _, end, is_kept in spans if is_kept), default=0)
        parts = []
        for start, end, is_kept in spans:
            if not is_kept:
                parts.append(Turn(start, end, Role.TOOL))
            elif end == last:
                parts.append(turn._replace(start=start, end=end))
            else:
                parts.append(turn._replace(start=start, end=end, finish_reason="length", tool_calls=()))
        at = self.turns.index(turn)
        self.turns[at : at + 1] = parts
        return [part for part in parts if part.role is Role.ASSISTANT]

    def mark_grammar(self, grammar: Grammar, mass: NDArray[np.float32] | None) -> None:
        """Mark the last turn as sampled under `grammar`. `mass` is as in Trajectory; None if it was not measured."""
        turn = self.turns[-1]
        self.turns[-1] = turn._replace(grammar=grammar.kind)
        self._grammar_mass[turn.start : turn.end] = 0.0 if mass is None else mass


def moved(image: PlacedImage, by: int) -> PlacedImage:
    """The same image, placed `by` tokens later."""
    return image._replace(start=image.start + by, end=image.end + by)


def image_arrays(images: Sequence[PlacedImage]) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """The spans and digests of images, as in Trajectory."""
    spans = np.array([(image.start, image.end) for image in images], np.int32).reshape(-1, 2)
    return spans, np.frombuffer(b"".join(image.name for image in images), np.uint8).reshape(-1, DIGEST_BYTES)


def routed_experts(branches: Sequence[tuple[NDArray[np.uint8] | None, int]]) -> NDArray[np.uint8]:
    """The experts of all branches, concatenated. `branches` has a pair for each branch: its rows of experts (or None),
    and its length."""
    width = next((rows.shape[1] for rows, _ in branches if rows is not None), 0)
    if not width:
        return NO_ROUTING
    return np.concatenate(
        [np.full((length, width), 255, np.uint8) if rows is None else rows for rows, length in branches]
    )


class Prefix(NamedTuple):
    """The tokens of `branch` up to the end of `turn`, a completion.

    These tokens show the list of `tools` and the conversation `messages`, whose last message is the completion. If only
    a stop text was cut from the completion's end, `shown` is the completion as the caller got it, otherwise None.
    """

    branch: Branch
    turn: Turn
    messages: tuple[Message, ...]
    tools: tuple[Message, ...]
    shown: Message | None = None

    def repeated_by(self, messages: Sequence[Message]) -> bool:
        """True if `messages` begin with this conversation."""
        before = self.messages[:-1]
        if len(messages) <= len(before) or not repeats(messages[: len(before)], before):
            return False
        return self.is_repeated_as(messages[len(before)])

    def is_repeated_as(self, message: Message) -> bool:
        """True if `message` repeats the completion."""
        return any(same_message(message, each) for each in (self.messages[-1], self.shown) if each is not None)

    def begins(self, tokens: NDArray[np.int32]) -> bool:
        """True if `tokens` begin with these tokens."""
        return len(tokens) >= self.turn.end and np.array_equal(tokens[: self.turn.end], self.tokens)

    @property
    def is_last(self) -> bool:
        """True if the completion is at the end of its branch."""
        return len(self.branch) == self.turn.end

    @property
    def tokens(self) -> NDArray[np.int32]:
        return self.branch.tokens[: self.turn.end]

    @property
    def images(self) -> list[PlacedImage]:
        return self.branch.images_within(self.turn.end)
