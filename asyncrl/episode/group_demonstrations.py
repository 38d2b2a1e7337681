"""The demonstration of a task as a member of the task's groups.

It is recorded as the episode that it would be if the policy had sampled what it says: with the same prompt, the same
suffixes between turns, the same turns, calls and steps. So scorers judge it as they judge the other members. No tool
runs, since the demonstration has the results, and no engine is asked.
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
from asyncrl.episode.demonstrations import check_turn, said, with_names
from asyncrl.episode.recorder import CompletionRequest, EpisodeLimits, Recorder
from asyncrl.episode.steps import Split
from asyncrl.errors import RefusedError
from asyncrl.types import DEMONSTRATED, Ticket, ToolCall, Trajectory


@dataclass(frozen=True, slots=True)
class DemonstrationRecorder:
    """Records the demonstrations of tasks with the tools `functions` on offer, by name, where a task names none. Only
    the limits of tokens hold. `as_rendered` as for Recorder, `step_split` as for `split_steps`."""

    chat: Chat
    functions: Mapping[str, Mapping[str, Any]]
    limits: EpisodeLimits
    as_rendered: bool = False
    step_split: Split = "turn"

    def __call__(self, ticket: Ticket) -> Trajectory:
        """The trajectory of the demonstration that the ticket's task has; what follows its last assistant turn is left
        away.

        Raises RefusedError: the task shows images, the chat template does not take the messages, an assistant turn
        follows another one or has a token within that would end it, or the demonstration is too long. Raises
        InvariantError: as Recorder.
        """
        task, chat = ticket.task, self.chat
        if image_blocks(task.messages):
            raise RefusedError("its task shows images, behind which no demonstration can be recorded")
        messages = (*without_images(task.messages), *read_messages(list(with_names(task.demonstration))))
        schemas = [as_tool(each) for each in task.tools or self.functions.values()]
        functions = {each["function"]["name"]: each["function"] for each in schemas}
        turns = [turn for turn in range(len(task.messages), len(messages)) if messages[turn]["role"] == "assistant"]
        most = self.limits.max_tokens
        limits = replace(self.limits, max_turns=len(turns), max_turn_tokens=most)
        recorder = Recorder(ticket, limits, chat, self.as_rendered)
        for turn in turns:
            if messages[turn - 1]["role"] == "assistant":
                raise RefusedError("an assistant turn follows another one without a message between them")
            check_turn(task.demonstration[turn - len(task.messages)], turn)
            tokens = said(chat, messages[: turn + 1], schemas)
            reservation = recorder.reserve(CompletionRequest(messages[:turn], tuple(schemas)))
            if (length := len(reservation.branch) + len(tokens)) > most or len(tokens) > reservation.branch.reserved:
                raise RefusedError(
                    f"it has {length} tokens up to here, more than there may be (actor.max_tokens={most})"
                )
            calls = chat.parse(chat.text(tokens[:-1]), functions).calls
            sampled = Generation(
                tokens, np.zeros(len(tokens), np.float32), np.full(len(tokens), DEMONSTRATED, np.int32), "stop"
            )
            made = [call for call in calls if isinstance(call, ToolCall)]
            recorder.record(reservation, sampled, messages[turn], made)
        return recorder.trajectory({}, {}, self.step_split)
