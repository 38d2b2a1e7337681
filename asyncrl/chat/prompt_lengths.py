"""Encodes the prompts of tasks, and truncates prompts that are too long."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.chat.chat import Chat
from asyncrl.chat.chat_checks import as_tool
from asyncrl.chat.image_blocks import without_images
from asyncrl.types import Task


def prompt_tokens(chat: Chat, task: Task, functions: Mapping[str, Mapping[str, Any]]) -> NDArray[np.int32]:
    """Encode the task's messages, with the task's own tools or else all `functions`. An image counts as one token.

    Raises RefusedError: the chat template does not take the messages.
    """
    tools = task.tools or functions.values()
    return chat.prompt(without_images(task.messages), [as_tool(each) for each in tools])


def cut_prompt(tokens: NDArray[np.int32], limit: int, truncation: str) -> NDArray[np.int32]:
    """Keep at most `limit` tokens: drop the first (`left`), the last (`right`) or the middle tokens (`middle`).

    Source: verl, `verl.utils.torch_functional.postprocess_data`.
    """
    if len(tokens) <= limit:
        return tokens
    head = {"left": 0, "right": limit, "middle": limit // 2}[truncation]
    return np.concatenate([tokens[:head], tokens[len(tokens) - (limit - head) :]])
