"""Renders demonstrations as tokens and masks, for supervised fine-tuning.

The tokens are the same as if the policy had sampled the demonstration's assistant turns in an episode: the prompt, the
turns with their end tokens, and between them the suffixes that the chat template adds. If the template rewrites the
history, the tokens are those of an episode with actor.history=sampled.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from asyncrl.chat.chat import Chat
from asyncrl.chat.chat_checks import as_tool
from asyncrl.chat.messages import read_messages
from asyncrl.chat.parsing import problem_of_arguments
from asyncrl.data.demonstrations import Demonstration, DemonstrationFile
from asyncrl.data.rendered import (
    Rendered,
    RenderedDemonstrations,
    files_of,
    read_rendered,
    write_rendered,
)
from asyncrl.errors import DataError, RefusedError, StoppedError
from asyncrl.machine.files import when_there_is_room
from asyncrl.machine.long_work import tracked

log = logging.getLogger(__name__)

_OF_TOKENIZERS = (".json", ".jinja", ".model", ".txt")
_CHUNK_BYTES = 16 << 20
_NULLS = " (Parquet gives every struct all fields of its column, as nulls: write the arguments as JSON text)"


def demonstration_tokens(
    chat: Chat, shown: Demonstration, functions: Mapping[str, Mapping[str, Any]]
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """The token ids int32[T] up to the end of the last assistant turn, and a mask bool[T] that is true on assistant
    turns. The first `shown.context` messages are rendered as a task's prompt, and are not learned.

    The template gets the demonstration's own tools. If it has none, the template gets all `functions`, as for a task.
    Raises RefusedError for these reasons:

    - The chat template does not take the messages.
    - There is no assistant turn.

    And for these reasons in the turns that are learned:

    - An assistant turn is the first message, follows another assistant turn, or is empty.
    - An assistant turn contains an end-of-turn token before its end, or a special token that begins another turn.
    - An assistant turn calls a tool that is not on offer, or with wrong arguments.
    """
    messages = read_messages(shown.messages)
    tools = [as_tool(each) for each in shown.tools or functions.values()]
    check_calls(messages, tools, first=shown.context)
    turns = [
        number for number, message in enumerate(messages) if message["role"] == "assistant" and number >= shown.context
    ]
    if not turns:
        raise RefusedError("there is no assistant turn to learn")
    parts: list[NDArray[np.int32]] = []
    after = 0
    for turn in turns:
        if turn == 0 or messages[turn - 1]["role"] == "assistant":
            raise RefusedError(f"message {turn} is an assistant turn, but follows no message of another role")
        check_turn(messages[turn], turn)
        context = messages[after:turn]
        parts.append(chat.suffix(context, tools, int(parts[-1][-1])) if parts else chat.prompt(context, tools))
        parts.append(turn_tokens(chat, messages[: turn + 1], tools))
        after = turn + 1
    mask = np.repeat([index % 2 == 1 for index in range(len(parts))], [len(part) for part in parts])
    return np.concatenate(parts), mask


def check_turn(message: Mapping[str, Any], number: int) -> None:
    """Raises RefusedError: the assistant turn `message` has no text, no calls and no thoughts."""
    if not any(message.get(key) for key in ("content", "tool_calls", "reasoning_content")):
        raise RefusedError(f"message {number} is an assistant turn without content and tool_calls")


def check_calls(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], first: int = 0) -> None:
    """Check the calls of the messages from number `first` on, so that the policy learns no call that fails.

    Raises RefusedError: an assistant turn calls a tool that `tools` lacks, or with arguments that the tool's schema
    refuses. Without tools any call passes.
    """
    offered = {str(function.get("name")): function for function in map(_function, tools)}
    if not offered:
        return
    for number, message in enumerate(messages[first:], first):
        for call in map(_function, message.get("tool_calls") or ()):
            name, arguments = str(call.get("name")), call.get("arguments")
            if name not in offered:
                raise RefusedError(
                    f"message {number} calls the tool {name}, and the tools on offer are {', '.join(sorted(offered))} "
                    "(actor.tools, or the row's tools)"
                )
            if not isinstance(arguments, Mapping):
                raise RefusedError(
                    f"message {number} calls the tool {name} with {arguments!r:.80}: arguments must be a JSON object"
                )
            if problem := problem_of_arguments(arguments, offered[name]):
                hint = _NULLS if None in arguments.values() else ""
                raise RefusedError(f"message {number} calls the tool {name}, but {problem}{hint}")


def turn_tokens(
    chat: Chat, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> NDArray[np.int32]:
    """The ids of the last message, an assistant turn, with its end token.

    Raises RefusedError: the chat template does not take the messages, or the turn contains an end token before its end,
    or a special token that begins another turn.
    """
    written, number = chat.written(messages, tools), len(messages) - 1
    if ends := set(written[:-1].tolist()) & set(chat.stop_ids):
        text = chat.text([min(ends)])
        raise RefusedError(f"message {number} contains {text!r}, which would end the turn")
    # Only the message is searched: some templates write such tokens within a turn, too.
    said = json.dumps(messages[-1], ensure_ascii=False)
    if forged := [mark for mark in chat.turn_marks if mark in said]:
        raise RefusedError(
            f"message {number} contains {forged[0]!r}, which the chat template writes between turns: the policy would "
            "learn to begin the next turn itself"
        )
    return written


def _function(call: Any) -> Mapping[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def render_file(
    chat: Chat,
    file: DemonstrationFile,
    functions: Mapping[str, Mapping[str, Any]],
    limit: int,
    overlong: str,
    stop: threading.Event | None = None,
) -> RenderedDemonstrations:
    """Render all demonstrations of a file.

    `overlong` (algorithm.sft.overlong) decides what happens to demonstrations of more than `limit` tokens. If a
    demonstration has nothing to learn within its first `limit` tokens, it is left out, too. Raises DataError: a
    demonstration cannot be rendered or is refused (then the error names row and column), or all are left out. Raises
    StoppedError: `stop` was set meanwhile.
    """
    rows: list[Rendered] = []
    cut = left_out = 0
    for row, shown in enumerate(tracked(file, "rendering demonstrations", len(file), "demonstrations")):
        if stop is not None and stop.is_set():
            raise StoppedError("stopped while demonstrations were rendered; nothing was started")
        try:
            tokens, mask = demonstration_tokens(chat, shown, functions)
        except RefusedError as error:
            raise DataError(f"{file.place(row)}, column {file.column}: {error}; mend or drop the row") from error
        if len(tokens) > limit:
            if overlong == "refuse":
                raise DataError(
                    f"{file.place(row)}, column {file.column}: it has {len(tokens)} tokens, and the limit is {limit} "
                    "(algorithm.sft.max_tokens, or else actor.max_tokens): raise it, or set algorithm.sft.overlong to "
                    "leave_out or cut"
                )
            tokens, mask = tokens[:limit], mask[:limit]
            if overlong == "leave_out" or not mask.any():
                left_out += 1
                continue
            cut += 1
        rows.append((tokens, mask))
    if not rows:
        raise DataError(f"all {left_out} demonstrations have more than {limit} tokens: raise algorithm.sft.max_tokens")
    rendered = RenderedDemonstrations.of(rows, cut, left_out)
    log.info(
        "%d demonstrations have %d tokens, of which %d are learned; %d are cut to %d tokens, and %d are left out",
        *(len(rendered), len(rendered.tokens), rendered.trained.sum(), cut, limit, left_out),
    )
    return rendered


def found_or_rendered(
    folder: Path,
    sources: Sequence[str],
    tokenizer: Path,
    render: Callable[[DemonstrationFile], RenderedDemonstrations],
    stop: threading.Event | None = None,
    settings: str = "",
) -> RenderedDemonstrations:
    """Read the rendered demonstrations in `folder`, or render them into it.

    They are rendered if the folder lacks them, or if `sources`, the files in the folder `tokenizer` or the `settings`
    have changed since they were rendered.

    Raises DataError for the reasons of `render` and `DemonstrationFile`; StoppedError: `stop` was set meanwhile.
    """
    files = [*chain.from_iterable(map(files_of, sources)), *_files_of_tokenizer(tokenizer)]
    made_from = _digest_of(files, settings)
    if folder.exists():
        try:
            if (found := read_rendered(folder)).made_from == made_from:
                return found
            log.info("the files, the template or the tools have changed: %s is rendered again", ", ".join(sources))
        except DataError as error:
            log.warning("%s; they are rendered again", error)
    rendered = replace(render(DemonstrationFile(sources)), made_from=made_from)
    when_there_is_room(lambda: write_rendered(rendered, folder), stop or threading.Event(), str(folder))
    return rendered


def _files_of_tokenizer(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*")) if path.suffix in _OF_TOKENIZERS and path.is_file()]


def _digest_of(files: Iterable[Path], settings: str) -> str:
    """A digest of the settings, and of the files' names and contents. The contents are read because sizes alone would
    not show every change."""
    digest = xxh3_128(settings.encode())
    for path in files:
        digest.update(path.name.encode(errors="surrogateescape"))
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return str(digest.hexdigest())
