"""What an agent's requests make of one episode: branches of tokens. Nothing here waits or talks to anybody.

A request repeats the conversation so far. Where it only adds to what was said, its tokens continue those of the branch,
by the exact suffix of the chat template. Otherwise a new branch begins: behind the point up to which it agrees, where
there is one, else with the whole conversation as a prompt. What was sampled before is mere context there.

What holds: every sampled token is in the loss mask of exactly one branch, that in which it was sampled, with its
log-prob and version; and a branch is one sequence in which every token follows from those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from asyncrl.actor.chat import Chat
from asyncrl.actor.door.messages import Ask, Message
from asyncrl.actor.engine.base import Generation
from asyncrl.types import NO_VERSION, Role, Turn


@dataclass(eq=False)
class Branch:
    """One token sequence that grows. `name` is the engine's session."""

    name: str
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    versions: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    turns: list[Turn] = field(default_factory=list)

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        return np.asarray(self.versions != NO_VERSION)

    @property
    def sampled(self) -> int:
        return int(self.loss_mask.sum())

    def add_context(self, tokens: NDArray[np.int32], role: Role) -> None:
        none = np.zeros(len(tokens), np.float32), np.full(len(tokens), NO_VERSION, np.int32)
        self._add(tokens, *none, Turn(len(self.tokens), len(self.tokens) + len(tokens), role))

    def add_turn(self, generation: Generation) -> None:
        start, end = len(self.tokens), len(self.tokens) + len(generation.tokens)
        turn = Turn(start, end, Role.ASSISTANT, generation.finish_reason)
        self._add(generation.tokens, generation.logprobs, generation.versions, turn)

    def _add(
        self, tokens: NDArray[np.int32], logprobs: NDArray[np.float32], versions: NDArray[np.int32], turn: Turn
    ) -> None:
        self.tokens = np.concatenate([self.tokens, tokens])
        self.logprobs = np.concatenate([self.logprobs, logprobs])
        self.versions = np.concatenate([self.versions, versions])
        self.turns.append(turn)


@dataclass(eq=False)
class _Point:
    """Where a conversation stood behind an answer: its messages, and where that is in a branch."""

    messages: tuple[Message, ...]
    tools: tuple[Message, ...]
    branch: Branch
    length: int
    ended_by_policy: bool
    continued: bool = False


class Conversation:
    """The branches of one episode; `name` begins the names of their sessions.

    `fits` tells whether a prompt of so many tokens leaves room for an answer.
    """

    def __init__(self, name: str, chat: Chat, fits: Callable[[int], bool]) -> None:
        self.branches: list[Branch] = []
        self.truncated = False
        self._name = name
        self._chat = chat
        self._fits = fits
        self._points: list[_Point] = []

    @property
    def turns(self) -> int:
        """Answers that were recorded."""
        return len(self._points)

    def prepare(self, ask: Ask) -> Branch | None:
        """The branch to continue, its tokens up to where the policy writes, or None where no room would be left.

        A branch is given to one request at a time: another one that comes meanwhile, or comes again, gets its own.
        """
        point = self._agreeing(ask)
        added = ask.messages[len(point.messages) :] if point else ()
        suffix = self._chat.suffix(added, ask.tools) if point else self._chat.prompt(ask.messages, ask.tools)
        if not self._fits((point.length if point else 0) + len(suffix)):
            self.truncated = True
            return None
        branch = self._branch(point)
        branch.add_context(suffix, Role.TOOL if point else Role.PROMPT)
        return branch

    def record(self, ask: Ask, branch: Branch, generation: Generation, answer: Message) -> None:
        """Add what was sampled behind `prepare`; `answer` is what the agent is given, as it is read back."""
        branch.add_turn(generation)
        by_policy = generation.finish_reason == "stop"
        self._points.append(_Point((*ask.messages, answer), ask.tools, branch, len(branch.tokens), by_policy))

    def main(self) -> Branch | None:
        """The branch that is trained: the one with the most sampled tokens, the first of equals."""
        return max((branch for branch in self.branches if branch.sampled), key=lambda each: each.sampled, default=None)

    def _agreeing(self, ask: Ask) -> _Point | None:
        """The latest point that the request goes on from. Behind an answer that was cut there is none: to go on, one
        would have to write the end of the turn in the policy's name."""
        for point in reversed(self._points):
            count = len(point.messages)
            agrees = ask.messages[:count] == point.messages and ask.tools == point.tools
            if agrees and point.ended_by_policy and _is_context(ask.messages[count:]):
                return point
        return None

    def _branch(self, point: _Point | None) -> Branch:
        if point and not point.continued:
            point.continued = True
            return point.branch
        branch = Branch(f"{self._name}/{len(self.branches)}")
        self.branches.append(branch)
        if point:
            branch.add_context(point.branch.tokens[: point.length], Role.PROMPT)
        return branch


def _is_context(messages: Sequence[Message]) -> bool:
    """Whether the policy is to answer behind these, and wrote none of them."""
    return bool(messages) and all(message["role"] != "assistant" for message in messages)
