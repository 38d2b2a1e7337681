"""Records the demonstration of a task as a member of the task's groups.

The trajectory is the same as if the policy had sampled the demonstration's assistant turns in an episode: prompt,
suffixes, turns, calls and steps. So scorers judge it like the other members. No tool is called, because the
demonstration contains the tools' results, and the engine samples nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from asyncrl.chat.chat import Chat
from asyncrl.chat.chat_checks import as_tool
from asyncrl.chat.image_blocks import image_blocks, without_images
from asyncrl.chat.messages import read_messages
from asyncrl.engine.base import Generation
from asyncrl.episode.demonstrations import check_calls, check_turn, turn_tokens
from asyncrl.episode.limits import EpisodeLimits
from asyncrl.episode.recorder import CompletionRequest, Recorder
from asyncrl.episode.steps import Split
from asyncrl.errors import RefusedError
from asyncrl.types import DEMONSTRATED, Ticket, ToolCall, Trajectory


@dataclass(frozen=True, slots=True)
class DemonstrationRecorder:
    """Records the demonstrations of tasks. `functions` are the tools by name; a task's own tools replace them.

    Only the token limits in `limits` apply. `as_rendered`: see Recorder; `step_split`: see `split_steps`.
    """

    chat: Chat
    functions: Mapping[str, Mapping[str, Any]]
    limits: EpisodeLimits
    as_rendered: bool = False
    step_split: Split = "turn"

    def __call__(self, ticket: Ticket) -> Trajectory:
        """Record the demonstration of the ticket's task, up to its last assistant turn.

        Raises InvariantError as `Recorder.trajectory` does, and RefusedError for these reasons:

        - The task shows images.
        - The chat template does not take the messages.
        - An assistant turn is empty, or follows another assistant turn.
        - An assistant turn contains an end token before its end, or a special token that begins another turn.
        - An assistant turn calls a tool that is not on offer, or with wrong arguments.
        - The demonstration is too long.
        """
        task, chat = ticket.task, self.chat
        if image_blocks(task.messages):
            raise RefusedError("the task shows images, which demonstrations do not support")
        messages = (*without_images(task.messages), *read_messages(task.demonstration))
        schemas = [as_tool(each) for each in task.tools or self.functions.values()]
        functions = {each["function"]["name"]: each["function"] for each in schemas}
        check_calls(messages, schemas, first=len(task.messages))
        turns = [turn for turn in range(len(task.messages), len(messages)) if messages[turn]["role"] == "assistant"]
        most = self.limits.max_tokens
        limits = replace(self.limits, max_turns=len(turns), max_turn_tokens=most)
        recorder = Recorder(ticket, limits, chat, self.as_rendered)
        for turn in turns:
            if messages[turn - 1]["role"] == "assistant":
                raise RefusedError("an assistant turn follows another one without a message between them")
            check_turn(messages[turn], turn)
            tokens = turn_tokens(chat, messages[: turn + 1], schemas)
            reservation = recorder.reserve(CompletionRequest(messages[:turn], tuple(schemas)))
            if (length := len(reservation.branch) + len(tokens)) > most or len(tokens) > reservation.branch.reserved:
                raise RefusedError(f"message {turn} ends after {length} tokens; the limit is actor.max_tokens={most}")
            calls = chat.parse(chat.text(tokens[:-1]), functions).calls
            sampled = Generation(
                tokens, np.zeros(len(tokens), np.float32), np.full(len(tokens), DEMONSTRATED, np.int32), "stop"
            )
            made = [call for call in calls if isinstance(call, ToolCall)]
            recorder.record(reservation, sampled, messages[turn], made)
        return recorder.trajectory({}, {}, self.step_split)
