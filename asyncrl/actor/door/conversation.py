"""What an agent's requests make of one episode: branches of tokens. Nothing here waits or talks to anybody.

A request repeats the conversation so far. Where it only adds to what was said, its tokens continue those of the branch,
by the exact suffix of the chat template. Otherwise a new branch begins: behind the point up to which it agrees, where
there is one, else with the whole conversation as a prompt. What was sampled before is mere context there.

What holds: every answer that the agent was given is in the loss mask of exactly one branch, that in which it was
sampled, with its log-probs and versions; in a branch every token follows from those before it; all branches together
never have more than `max_total_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.actor.chat import Chat
from asyncrl.actor.door.branch import Branch
from asyncrl.actor.door.messages import Ask, Message
from asyncrl.actor.engine.base import Generation
from asyncrl.actor.episode import Limits
from asyncrl.types import Role, ToolCall


@dataclass(eq=False)
class _Point:
    """Where a conversation stood behind an answer: its messages, and where that is in a branch."""

    messages: tuple[Message, ...]
    tools: tuple[Message, ...]
    branch: Branch
    length: int
    ended_by_policy: bool
    continued: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where the answer to `ask` will stand: at the end of `branch`, with room for so many tokens."""

    ask: Ask
    branch: Branch
    room: int
    behind: _Point | None


class Conversation:
    """The branches of one episode; `name` begins the names of their sessions.

    `limits` are those of one branch, but for `max_turns`, and `max_total_tokens` that of all. `truncated` is set while
    the last request was one that the limits refused: an agent may go on by rewriting its history.
    """

    def __init__(self, name: str, chat: Chat, limits: Limits, max_total_tokens: int) -> None:
        self.branches: list[Branch] = []
        self.truncated = False
        self._name = name
        self._chat = chat
        self._limits = limits
        self._max_total_tokens = max_total_tokens
        self._points: list[_Point] = []
        self._begun = 0

    @property
    def turns(self) -> int:
        """Answers that were recorded."""
        return len(self._points)

    def prepare(self, ask: Ask) -> Place | None:
        """Where the policy is to write the answer, or None where no room would be left. The place must be given to
        `record` or `withdraw`.

        A branch is given to one request at a time: another one that comes meanwhile, or comes again, gets its own.
        """
        point = self._agreeing(ask)
        added = ask.messages[len(point.messages) :] if point else ()
        suffix = self._chat.suffix(added, ask.tools) if point else self._chat.prompt(ask.messages, ask.tools)
        behind = point if point and not point.continued else None
        copied = point.branch.tokens[: point.length] if point and not behind else suffix[:0]
        length = len(copied) + len(suffix) + (behind.length if behind else 0)
        left = self._max_total_tokens - sum(branch.claimed for branch in self.branches)
        room = min(self._limits.max_turn_tokens, self._limits.max_tokens - length, left - len(copied) - len(suffix))
        if room < 1:
            self.truncated = True
            return None
        branch = behind.branch if behind else self._new_branch()
        if behind:
            behind.continued = True
        if len(copied):
            branch.add_context(copied, Role.PROMPT)
        branch.add_context(suffix, Role.TOOL if point else Role.PROMPT)
        branch.reserved = room = min(room, ask.max_tokens or room)
        return Place(ask, branch, room, behind)

    def record(self, place: Place, generation: Generation, answer: Message, calls: Sequence[ToolCall]) -> None:
        """Add what was sampled; `answer` is what the agent is given, as it is read back, with these calls of tools."""
        ask, branch = place.ask, place.branch
        branch.add_turn(generation, calls)
        self.truncated = False
        said = (*ask.messages, answer)
        self._points.append(_Point(said, ask.tools, branch, len(branch.tokens), generation.finish_reason == "stop"))

    def withdraw(self, place: Place) -> bool:
        """There will be no answer: all is as before the request. False if that leaves nothing of the branch."""
        if place.behind is None:
            self.branches.remove(place.branch)
            return False
        place.behind.continued = False
        place.branch.cut(place.behind.length)
        return True

    def answered(self) -> list[Branch]:
        """The branches that have answers, in the order of their last ones."""
        return list(reversed(dict.fromkeys(point.branch for point in reversed(self._points))))

    def _agreeing(self, ask: Ask) -> _Point | None:
        """The latest point that the request goes on from. Behind an answer that was cut there is none: to go on, one
        would have to write the end of the turn in the policy's name."""
        for point in reversed(self._points):
            count = len(point.messages)
            agrees = ask.messages[:count] == point.messages and ask.tools == point.tools
            if agrees and point.ended_by_policy and _is_context(ask.messages[count:]):
                return point
        return None

    def _new_branch(self) -> Branch:
        self._begun += 1
        branch = Branch(f"{self._name}/{self._begun}")
        self.branches.append(branch)
        return branch


def _is_context(messages: Sequence[Message]) -> bool:
    """Whether the policy is to answer behind these, and wrote none of them."""
    return bool(messages) and all(message["role"] != "assistant" for message in messages)
