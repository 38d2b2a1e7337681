"""Counts the tokens of tasks' prompts, with the tools of each task as an actor shows them."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from asyncrl.chat.chat import Chat
from asyncrl.chat.prompt_lengths import prompt_tokens
from asyncrl.data.reading import TaskFile
from asyncrl.errors import DataError, RefusedError, StoppedError, ToolError
from asyncrl.machine.long_work import tracked
from asyncrl.tools.offered import Offer


def measured(chat: Chat, offer: Offer, tasks: TaskFile, stop: threading.Event | None = None) -> NDArray[np.int32]:
    """The number of tokens of each prompt, as int32[rows]. Raises DataError: the chat template refuses a task, or a
    tool is wrong; StoppedError: `stop` was set meanwhile."""
    lengths = np.zeros(len(tasks), np.int32)
    for row, task in enumerate(tracked(tasks, "measuring prompts", len(tasks), "tasks")):
        if stop is not None and stop.is_set():
            raise StoppedError("stopped while prompts were measured; nothing was started")
        try:
            lengths[row] = len(prompt_tokens(chat, task, offer.functions(task)))
        except RefusedError as error:
            raise DataError(f"{tasks.place(row)} has messages that the chat template refuses: {error}") from error
        except ToolError as error:
            raise DataError(f"{tasks.place(row)}: {error}") from error
    return lengths
