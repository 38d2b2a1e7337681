"""What an agent's requests make of one episode: branches of tokens. Nothing here waits or talks to anybody.

A request repeats the conversation so far. Where it only adds to what was said, its tokens continue those of the branch,
by the exact suffix of the chat template. Otherwise a new branch begins: behind the point up to which it agrees, where
there is one, else with the whole conversation as a prompt. What was sampled before is mere context there.

An answer that was cut by its length has no end. Where the template renders the conversation just as it stands in the
branch, but for the end of that turn, the branch goes on with that end as context; otherwise a new one begins. With
`as_rendered` the template's rendering decides behind every answer.

What holds: every answer that was recorded is in the loss mask of exactly one branch, that in which it was sampled, with
its log-probs and versions; in a branch every token follows from those before it; limits hold, whatever is under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.actor.chat import Chat
from asyncrl.actor.chat_api.branch import Branch
from asyncrl.actor.chat_api.messages import Ask, Message
from asyncrl.actor.engine.base import Generation
from asyncrl.errors import BusyError, RefusedError
from asyncrl.types import Role, ToolCall


class LimitError(RefusedError):
    """A limit of the episode leaves no room for a request; `code` names it in the API's words."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


@dataclass(frozen=True, slots=True)
class ConversationLimits:
    """Answers of an episode, tokens of one answer, of one branch, and of all branches together."""

    max_turns: int
    max_turn_tokens: int
    max_tokens: int
    max_total_tokens: int


@dataclass(eq=False)
class _Point:
    """Where a conversation stood behind an answer: its messages, and where that is in a branch."""

    messages: tuple[Message, ...]
    tools: tuple[Message, ...]
    branch: Branch
    length: int
    ended_by_policy: bool  # not cut by its length
    continued: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Start:
    """How a request begins: behind the point `behind` of its branch, or else in a new branch with the tokens up to the
    point `copied`, if any; then `added`."""

    behind: _Point | None
    copied: _Point | None
    added: NDArray[np.int32]

    @property
    def new(self) -> int:
        """Tokens that it adds to the episode."""
        return len(self.added) + (self.copied.length if self.copied else 0)

    @property
    def length(self) -> int:
        """Tokens that the policy will see."""
        return self.new + (self.behind.length if self.behind else 0)


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where the answer to `ask` will stand: at the end of `branch`, which reserves its room. `refused` tells that the
    limits had refused the request before."""

    ask: Ask
    branch: Branch
    behind: _Point | None
    refused: bool


class Conversation:
    """The branches of one episode; `name` begins the names of their sessions.

    `truncated` is set while nothing was answered that was asked since a limit refused a request: an agent may make room
    by rewriting its history, and go on.
    """

    def __init__(self, name: str, chat: Chat, limits: ConversationLimits, as_rendered: bool = False) -> None:
        self.branches: list[Branch] = []
        self.truncated = False
        self._name = name
        self._chat = chat
        self._limits = limits
        self._as_rendered = as_rendered
        self._points: list[_Point] = []
        self._begun = 0
        self._under_way = 0

    @property
    def answers(self) -> int:
        """Answers that were recorded."""
        return len(self._points)

    def answered(self) -> list[Branch]:
        """The branches that have answers, in the order of their last ones."""
        return list(reversed(dict.fromkeys(point.branch for point in reversed(self._points))))

    def prepare(self, ask: Ask) -> Place:
        """Where the policy is to write the answer. The place must be given to `record` or `withdraw`.

        A branch is given to one request at a time: another one that comes meanwhile, or comes again, gets its own.

        Raises LimitError: there is no room. Raises BusyError: there may be room once others have their answers.
        """
        start = self._start(ask)
        room = self._room(start, self._under_way, sum(branch.reserved for branch in self.branches))
        if room < 1:
            if self._room(start, 0, 0) > 0:
                raise BusyError("answers that are under way may take the rest of the episode's room")
            self.truncated = True
            raise self._limit()
        self._under_way += 1
        branch = self._branch(start)
        branch.reserved = min(room, ask.max_tokens or room)
        return Place(ask, branch, start.behind, self.truncated)

    def record(self, place: Place, generation: Generation, answer: Message, calls: Sequence[ToolCall]) -> None:
        """Add what was sampled; `answer` is what the agent is given, as it is read back, with these calls of tools."""
        self._under_way -= 1
        ask, branch = place.ask, place.branch
        branch.add_answer(generation, calls)
        self.truncated = self.truncated and not place.refused
        said = (*ask.messages, answer)
        self._points.append(_Point(said, ask.tools, branch, len(branch.tokens), generation.finish_reason == "stop"))

    def withdraw(self, place: Place) -> str | None:
        """There will be no answer: all is as before the request. Returns the session that ends with it, if any."""
        self._under_way -= 1
        if place.behind is None:
            self.branches.remove(place.branch)
            return place.branch.name
        place.behind.continued = False
        place.branch.cut(place.behind.length)
        return None

    def _start(self, ask: Ask) -> _Start:
        point = self._agreeing(ask)
        added = None if point is None else self._continuing(point, ask)
        if point is None or added is None:
            return _Start(None, None, self._chat.prompt(ask.messages, ask.tools))
        return _Start(None, point, added) if point.continued else _Start(point, None, added)

    def _agreeing(self, ask: Ask) -> _Point | None:
        """The latest point that the request goes on from."""
        for point in reversed(self._points):
            count = len(point.messages)
            agrees = ask.messages[:count] == point.messages and ask.tools == point.tools
            if agrees and _is_context(ask.messages[count:]):
                return point
        return None

    def _continuing(self, point: _Point, ask: Ask) -> NDArray[np.int32] | None:
        """What the request adds behind the point; none where that would not be what the template renders."""
        tokens = point.branch.tokens[: point.length]
        added = self._chat.suffix(ask.messages[len(point.messages) :], ask.tools, int(tokens[-1]))
        if point.ended_by_policy and not self._as_rendered:
            return added
        try:
            same = self._chat.renders(np.concatenate([tokens, added]), ask.messages, ask.tools)
        except RefusedError:
            same = point.ended_by_policy
        return added if same else None

    def _room(self, start: _Start, under_way: int, reserved: int) -> int:
        """Tokens that an answer may have beside those `under_way`, for which so many tokens are `reserved`."""
        limits = self._limits
        if self.answers + under_way >= limits.max_turns:
            return 0
        taken = sum(len(branch.tokens) for branch in self.branches) + reserved
        left = limits.max_total_tokens - taken - start.new
        return min(limits.max_turn_tokens, limits.max_tokens - start.length, left)

    def _limit(self) -> LimitError:
        limits = self._limits
        if self.answers >= limits.max_turns:
            return LimitError("turn_limit", f"actor.max_turns={limits.max_turns} answers were given")
        return LimitError(
            "context_length_exceeded",
            f"no room is left in actor.max_tokens={limits.max_tokens} of the conversation, or in "
            f"actor.max_total_tokens={limits.max_total_tokens} of the episode",
        )

    def _branch(self, start: _Start) -> Branch:
        if start.behind:
            start.behind.continued = True
            start.behind.branch.add_context(start.added, Role.TOOL)
            return start.behind.branch
        self._begun += 1
        branch = Branch(f"{self._name}/{self._begun}")
        self.branches.append(branch)
        if start.copied:
            length, source = start.copied.length, start.copied.branch
            calls = [call for turn in source.turns_until(length) for call in turn.tool_calls]
            branch.add_context(source.tokens[:length], Role.PROMPT, calls)
        branch.add_context(start.added, Role.TOOL if start.copied else Role.PROMPT)
        return branch


def _is_context(messages: Sequence[Message]) -> bool:
    """Whether the policy is to answer behind these, and wrote none of them."""
    return bool(messages) and all(message["role"] != "assistant" for message in messages)
