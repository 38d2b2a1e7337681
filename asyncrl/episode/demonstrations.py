"""A demonstration as the tokens that an episode would have if the policy had said the same.

The prompt, what the policy writes in each turn with the token that ends it, and the suffixes between turns are those of
`recorder`: with a template that rewrites nothing, the tokens and the mask are exactly those of such an episode. With a
template that rewrites the history, they are those of an episode with actor.history=sampled.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from asyncrl.chat.chat import Chat
from asyncrl.chat.chat_checks import as_tool
from asyncrl.chat.from_config import open_chat
from asyncrl.chat.messages import read_messages
from asyncrl.config.schema import TrainConfig
from asyncrl.data.demonstrations import Demonstration, DemonstrationFile
from asyncrl.data.from_config import run_demonstrations
from asyncrl.data.rendered import Rendered, RenderedDemonstrations, files_of, read_rendered, write_rendered
from asyncrl.errors import DataError, RefusedError, StoppedError
from asyncrl.machine.files import when_there_is_room
from asyncrl.machine.long_work import tracked
from asyncrl.modelling.tokenizer import tokenizer_source
from asyncrl.tools.offered import Offer

log = logging.getLogger(__name__)

_OF_TOKENIZERS = (".json", ".jinja", ".model", ".txt")
_CHUNK_BYTES = 16 << 20


def demonstration_tokens(
    chat: Chat, shown: Demonstration, functions: Mapping[str, Mapping[str, Any]]
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Ids int32[T] up to the end of the last assistant turn, and bool[T], true on assistant turns with their ends. The
    template lists the demonstration's own tools, or else all `functions` on offer, as for a task.

    Raises RefusedError: the chat template does not take the messages; an assistant turn is the first message, follows
    another one, has neither text nor calls, or has a token within that would end it; there is no such turn.
    """
    messages = read_messages(list(with_names(shown.messages)))
    tools = [as_tool(each) for each in shown.tools or functions.values()]
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise RefusedError("there is no assistant turn, which could be learned")
    parts: list[NDArray[np.int32]] = []
    after = 0
    for turn in turns:
        if after == turn:
            raise RefusedError(f"message {turn} is an assistant turn without a message of somebody else before it")
        check_turn(shown.messages[turn], turn)
        context = messages[after:turn]
        parts.append(chat.suffix(context, tools, int(parts[-1][-1])) if parts else chat.prompt(context, tools))
        parts.append(said(chat, messages[: turn + 1], tools))
        after = turn + 1
    mask = np.repeat([index % 2 == 1 for index in range(len(parts))], [len(part) for part in parts])
    return np.concatenate(parts), mask


def check_turn(message: Mapping[str, Any], number: int) -> None:
    """Raises RefusedError: the assistant turn `message` says nothing."""
    if all(message.get(key) is None for key in ("content", "tool_calls", "reasoning_content")):
        raise RefusedError(f"message {number} has neither content nor tool_calls, and its turn would be learned")


def said(chat: Chat, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> NDArray[np.int32]:
    """Ids of the last message, an assistant turn, with its end. Raises RefusedError: the chat template does not take
    the messages, or the turn has a token within that would end it."""
    written = chat.written(messages, tools)
    if ends := set(written[:-1].tolist()) & set(chat.stop_ids):
        text = chat.text([min(ends)])
        raise RefusedError(f"message {len(messages) - 1} has {text!r} in it, which ends a turn; leave such marks out")
    return written


def with_names(messages: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The messages, with the tool's name at each result that has neither a name nor the id of a call: results answer
    the calls before them in order."""
    waiting: list[str] = []
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list) and calls:
            waiting = [str(_function(call).get("name")) for call in calls]
        if message["role"] == "tool" and waiting:
            name = waiting.pop(0)
            yield message if message.get("tool_call_id") or message.get("name") else {**message, "name": name}
        else:
            yield message


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
    """All demonstrations of a file. What becomes of those of more than `limit` tokens is as algorithm.sft.overlong
    says; one whose first `limit` tokens have nothing to learn is left out, too.

    Raises DataError, which names row and column: one cannot be rendered, or is refused, or none is left; StoppedError.
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
                    f"{file.place(row)}, column {file.column}: it has {len(tokens)} tokens, and {limit} are the most "
                    "(algorithm.sft.max_tokens, or else actor.max_tokens): raise that, or set algorithm.sft.overlong "
                    "to leave_out or cut"
                )
            tokens, mask = tokens[:limit], mask[:limit]
            if overlong == "leave_out" or not mask.any():
                left_out += 1
                continue
            cut += 1
        rows.append((tokens, mask))
    if not rows:
        raise DataError(f"all {left_out} demonstrations have more than {limit} tokens: raise algorithm.sft.max_tokens")
    return RenderedDemonstrations.of(rows, cut, left_out)


def _contents(config: TrainConfig, sources: Sequence[str]) -> str:
    """A digest of the files that the tokens depend on: another one where the content has changed, and no size has."""
    digest = xxh3_128()
    tokenizer = Path(tokenizer_source(config.model).path)
    beside = [path for path in sorted(tokenizer.glob("*")) if path.suffix in _OF_TOKENIZERS and path.is_file()]
    for path in (*chain.from_iterable(map(files_of, sources)), *beside):
        digest.update(path.name.encode(errors="surrogateescape"))
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return str(digest.hexdigest())


def prepare_demonstrations(
    config: TrainConfig, sources: Sequence[str], stop: threading.Event | None = None
) -> RenderedDemonstrations:
    """The rendered demonstrations of `sources`. They are rendered into the run's folder if it does not have them, or if
    the content of the files or of the tokenizer's has changed since then.

    Raises DataError: as `render_file` and `DemonstrationFile`; ConfigError: the chat template or a tool cannot be used;
    StoppedError: `stop` was set meanwhile.
    """
    folder, made_from = run_demonstrations(config).folder(sources), _contents(config, sources)
    if folder.exists():
        try:
            if (found := read_rendered(folder)).made_from == made_from:
                return found
            log.info("%s has changed: demonstrations are rendered again", ", ".join(map(str, sources)))
        except DataError as error:
            log.warning("%s; they are rendered again", error)
    file, schemas = DemonstrationFile(sources), Offer(config.actor).always
    most, overlong = run_demonstrations(config).max_tokens, config.algorithm.sft.overlong
    rendered = render_file(open_chat(config), file, schemas, most, overlong, stop)
    rendered = replace(rendered, made_from=made_from)
    when_there_is_room(lambda: write_rendered(rendered, folder), stop or threading.Event(), str(folder))
    log.info(
        "%d demonstrations have %d tokens, of which %d are learned; %d are cut to %d tokens, and %d are left out",
        *(len(rendered), len(rendered.tokens), rendered.trained.sum(), rendered.cut, most, rendered.left_out),
    )
    return rendered
