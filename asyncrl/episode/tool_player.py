"""Leads a conversation between the policy, asyncrl's own tools or an environment, and a simulated user.

The policy writes a message. The tools answer the calls in it. If it has no calls, the user responds.

If the task has no user, a turn without calls ends the conversation. It also ends when the user ends it, or at a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from asyncrl.chat.history import Message
from asyncrl.chat.parsing import ParsedTurn
from asyncrl.chat.template import result
from asyncrl.episode.completions import Completion
from asyncrl.episode.episode import Episode
from asyncrl.episode.images import TooManyImagesError
from asyncrl.episode.limits import LimitError
from asyncrl.episode.recorder import CompletionRequest
from asyncrl.grammar import KEY, read_grammar
from asyncrl.tools.environments.environments import Environments, OpenEnvironment
from asyncrl.tools.interactions.users import InteractionLimits, Interactions, OpenInteraction
from asyncrl.tools.toolbox import OpenTools, Toolbox
from asyncrl.types import Grammar

Watch = Callable[[Sequence[Message]], None]
"""A function that is shown a conversation. It is called first with the messages of the prompt, then with each new
message."""


def unwatched(messages: Sequence[Message]) -> None:
    """Do nothing. This is the `Watch` for conversations that are not shown."""


@dataclass(frozen=True)
class ToolPlayer:
    """Plays episodes with the tools of `toolbox`, or of the task's environment.

    The task's user among `interactions` responds to turns without calls. Turns are sampled under the task's grammar, or
    under `grammar` if the task has no grammar. `watch` is called with the messages of each conversation.
    """

    toolbox: Toolbox | Environments
    grammar: Grammar | None = None
    interactions: Interactions = field(default_factory=lambda: Interactions({}, InteractionLimits()))
    watch: Watch = unwatched

    async def __call__(self, episode: Episode) -> Mapping[str, float]:
        """Play one episode. Returns the rewards of its tools. Raises ToolError: a tool or the environment failed;
        InteractionError: the user failed."""
        episode.begin()
        ticket = episode.ticket
        async with self.toolbox.open(ticket) as tools, self.interactions.open(ticket) as user:
            await self._converse(episode, tools, user)
            return await tools.rewards()

    def counters(self) -> Mapping[str, float]:
        """The counts of tools and users, by the names of metrics."""
        of_users = {f"interaction_{name}": count for name, count in asdict(self.interactions.counts).items()}
        return {**self.toolbox.counters(), **of_users}

    async def _converse(
        self, episode: Episode, tools: OpenTools | OpenEnvironment, user: OpenInteraction | None
    ) -> None:
        """Let the policy and its tools or user take turns until the conversation ends."""

        def read_turn(text: str, ended: bool) -> ParsedTurn:
            return episode.chat.parse(text, tools.functions) if ended else ParsedTurn(text)

        task, recorder = episode.ticket.task, episode.recorder
        messages = await episode.images.show(tools.prompt(task.messages))
        form = task.extra_info.get(KEY)
        grammar = self.grammar if form is None else read_grammar(form)
        self.watch(messages)
        while True:
            try:
                request = CompletionRequest(messages, tuple(tools.shown), grammar=grammar)
                completion = await episode.complete(request, read_turn)
            except LimitError:
                if not recorder.completions:
                    raise
                return
            messages = (*messages, completion.message)
            self.watch(messages[-1:])
            try:
                following = await self._response(episode, tools, user, messages, completion)
            except TooManyImagesError:
                recorder.truncated = True
                return
            if not following:
                return
            self.watch(following)
            messages += following

    async def _response(
        self,
        episode: Episode,
        tools: OpenTools | OpenEnvironment,
        user: OpenInteraction | None,
        messages: tuple[Message, ...],
        completion: Completion,
    ) -> tuple[Message, ...]:
        """The messages that follow `completion`, the last of `messages`. Empty if the conversation is over."""
        if completion.turn.calls:
            return await self._tool_results(episode, tools, completion)
        if user is None or completion.finish_reason != "stop":
            return ()
        return await self._user_message(episode, user, messages)

    async def _tool_results(
        self, episode: Episode, tools: OpenTools | OpenEnvironment, completion: Completion
    ) -> tuple[Message, ...]:
        if not episode.recorder.turns_left:
            episode.recorder.truncated = True
            return ()
        calls, ids = completion.turn.calls, completion.turn.ids
        with episode.timed("tools"):
            results = await tools.answer(calls)
        if tools.turn_reward is not None:
            episode.recorder.score(tools.turn_reward)
        answered = zip(calls, results, ids, strict=True)
        return await episode.images.show([result(content, call.name, id) for call, content, id in answered])

    async def _user_message(
        self, episode: Episode, user: OpenInteraction, messages: tuple[Message, ...]
    ) -> tuple[Message, ...]:
        recorder = episode.recorder
        with episode.timed("user"):
            reply = await user.respond(messages)
        if reply.score is not None:
            recorder.score(reply.score)
        if reply.ends:
            return ()
        if not (recorder.turns_left and user.may_go_on):
            recorder.truncated = True
            return ()
        return await episode.images.show([{"role": "user", "content": reply.content}])
