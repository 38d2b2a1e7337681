"""Encodes conversations by a chat template as exact token ids: prompts, and the suffixes that follow sampled tokens.

Invariant: if prompt, sampled tokens, suffix, sampled tokens and so on are put together, they are the tokens of the
template's own rendering of the conversation. This holds if the policy writes its turns as the template does, and if the
template does not rewrite the history (`chat_checks` finds templates that do).

Sampled tokens are never decoded and encoded again. The contents of messages never become special tokens (`contents`).

A suffix comes from the rendering of a dummy conversation whose assistant turn contains a mark. The end-of-turn token
follows the mark, and the suffix is the text after this token. The suffix is tokenised together with this token. Every
tokenizer splits at the token, so the suffix does not depend on earlier text.

The results of a turn's calls are rendered together, because some templates merge consecutive tool messages. The mark is
needed because templates render an assistant turn differently if it is the last one. So the rendering without the tool
messages is in general not a prefix of the rendering with them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.chat.backend import decoder_of
from asyncrl.chat.contents import Contents
from asyncrl.chat.formats.base import Format, Functions, WrittenCall
from asyncrl.chat.formats.registry import FORMATS
from asyncrl.chat.parsing import ParsedTurn, parse_turn
from asyncrl.chat.template import MARK, OF_MODEL, QUESTION, TOOL, Messages, Template, answer, calling, result
from asyncrl.chat.thoughts import OPENING, join_thought, split_thought
from asyncrl.errors import ConfigError, RefusedError
from asyncrl.types import ToolCall

NO_FORMAT = (
    "the model's chat template shows tool calls in no known form; if the model writes them in a known form, set "
    f"actor.tool_call_format to one of {', '.join(FORMATS)}"
)
CACHED_SUFFIXES = 8192
"""The number of suffixes that are cached. To render one takes half as long as all other work of a turn, and the results
of tools such as a calculator repeat often."""
LONG = 4096
"""The number of characters above which messages are long. Long results, such as pages, seldom repeat."""
CACHED_LONG = 64
"""The number of cached suffixes of long messages."""
CACHED_TOOLS = 256
"""The number of lists of tools whose text is cached. The keys of cached suffixes and prompts share these texts."""
_NUMBERS_IMAGES = (
    "the model's chat template shows an image in a way that depends on earlier images, such as by its number, but each "
    "turn is rendered alone: leave add_vision_id out of actor.template_kwargs"
)
_IMAGE_QUESTION = {"role": "user", "content": [{"type": "image"}]}
_NO_CALLS = (
    "the chat template does not show an assistant turn that calls tools (model.chat_template names another template)"
)


class Chat:
    """A Hugging Face tokenizer's chat template. Returned arrays are cached and read-only.

    - `template_kwargs` are passed to the template, such as `enable_thinking=False`.
    - `format` is the format of calls that `tool_call_format` names. With "auto" it is the format that reads the
      template's own rendering of a call, or None if no format does.
    - `stop_ids` are the tokens that end a turn: the token with which the template ends an answer, the one with which it
      ends a turn that calls tools, the tokenizer's eos, the `stop_tokens` of the format, and `further_ends`.
    - `one_call` is true if the template shows only one call per turn.
    - `opens_thought` is true if the template's generation prompt opens a thought.
    - `piece` returns the text of one token; a part of a character is shown as U+FFFD.
    - Error messages call the template `template_name`.

    Raises ConfigError: there is no template, or it ends an assistant turn without a special token.
    """

    def __init__(
        self,
        tokenizer: Any,
        template_kwargs: Mapping[str, Any] | None = None,
        tool_call_format: str = "auto",
        further_ends: Sequence[int] = (),
        template_name: str = OF_MODEL,
    ) -> None:
        self._tokenizer = tokenizer
        self._decode = decoder_of(tokenizer)
        self._template = Template(tokenizer, template_kwargs or {}, template_name)
        self._contents = Contents(tokenizer, self._template.source, reserved=MARK)
        self.one_call = self._template.one_call
        added = sorted((text for text in tokenizer.get_added_vocab() if text.strip()), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, added)) or "(?!)")
        self._ends_at_next, self._last_end, self._answer_end, self._call_end = self._ends_of_turns()
        self.opens_thought = self._template.render([QUESTION], ()).rstrip().endswith(OPENING)
        self.format = self._recognised() if tool_call_format == "auto" else FORMATS[tool_call_format]
        of_format = self.format.stop_tokens if self.format else ()
        known = [text for text in of_format if text in tokenizer.get_added_vocab()]
        ends = [text for text in (self._last_end, self._call_end, tokenizer.eos_token, *known) if text]
        ids = [*tokenizer.convert_tokens_to_ids(ends), *further_ends]
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(ids))
        in_place = [text for text in (self._last_end, self._answer_end, self._call_end, *known) if text]
        self._ends_in_place = frozenset(tokenizer.convert_tokens_to_ids(in_place))
        self._prompt = lru_cache(maxsize=1024)(self._make_prompt)
        self._suffix = lru_cache(maxsize=CACHED_SUFFIXES)(self._make_suffix)
        self._long_suffix = lru_cache(maxsize=CACHED_LONG)(self._make_suffix)
        self._tools_text = lru_cache(maxsize=CACHED_TOOLS)(str)
        self.piece = lru_cache(maxsize=1 << 16)(lambda token: self.text([token]))

    @cached_property
    def longest_piece(self) -> int:
        """An upper limit for the number of characters in one token."""
        return max(map(len, self._tokenizer.get_vocab()))

    @cached_property
    def turn_marks(self) -> tuple[str, ...]:
        """The special tokens that the template writes between two turns of the policy."""
        between = self._template.render([QUESTION, answer(MARK), QUESTION], ()).partition(MARK)[2]
        return tuple(mark for mark in self._contents.marks if mark in between)

    def prompt(self, messages: Messages, tools: Messages) -> NDArray[np.int32]:
        """Encode a conversation up to the policy's next turn. The prompt lists the `tools`.

        Raises RefusedError: the template does not take the messages.
        """
        return self._prompt(*self._key(messages, tools))

    def suffix(self, messages: Messages, tools: Messages, last: int | None = None) -> NDArray[np.int32]:
        """Encode the text between the last token of an assistant turn and the policy's next turn.

        `messages` are the results of all the turn's calls in order (`role` tool, `name`, `content`), a user turn, or
        both. `last` is the turn's last token; None means the template's end token. If the turn was cut, or ended with
        one of `further_ends`, `last` is not an end token of the template. Then the suffix begins with the template's
        end token.

        Raises RefusedError: the template does not take the messages, or does not show calls.
        """
        key = self._key(messages, tools)
        return (self._suffix if len(key[0]) <= LONG else self._long_suffix)(*key, last)

    def renders(self, tokens: NDArray[np.int32], messages: Messages, tools: Messages) -> bool:
        """True if `tokens` decode to the text of the template's own rendering of the conversation."""
        rendered = self.rendered(messages, tools)
        return np.array_equal(rendered, tokens) or self.text(rendered) == self.text(tokens)

    def rendered(self, messages: Messages, tools: Messages) -> NDArray[np.int32]:
        """Encode the template's own rendering of a conversation. Raises RefusedError: the template does not take the
        messages, or does not show calls.

        If the last message is the policy's, the rendering ends with it. Otherwise it ends with the generation prompt
        for the policy's turn.
        """
        if messages[-1]["role"] != "assistant":
            return self.prompt(messages, tools)
        hidden, shown = self._contents.hide([messages, tools])
        text = self._template.render(hidden, shown, generation_prompt=False)
        return _frozen(self._contents.encode(self._ended(text, messages[-1])))

    def written(self, messages: Messages, tools: Messages) -> NDArray[np.int32]:
        """Encode the last message, an assistant turn, as the policy would write it, including the end token.

        This is the template's rendering of the turn. If the rendering drops or moves a part of the message, the text is
        the message itself, with calls in the model's format.

        Raises RefusedError: the template does not take the messages, or does not show calls.
        """
        *before, turn = messages
        opening = self._template.render(before, tools)
        rendered = self._ended(self._template.render(messages, tools, generation_prompt=False), turn)
        text = rendered.removeprefix(opening)
        reasoning, format = turn.get("reasoning_content", ""), self.format or FORMATS["hermes"]
        words = [reasoning, *re.split("</?think>", turn["content"])]
        if text == rendered or not all(word.strip() in text for word in words):
            text = format.join(reasoning, turn["content"])
            text = text.removeprefix("<think>\n") if opening.endswith("<think>\n") else text
            if made := [WrittenCall(**call["function"], id=call.get("id", "")) for call in turn.get("tool_calls", ())]:
                text += "\n" if text and not text.endswith("\n") else ""
                text += format.write(made)
            text = self._ended(text, turn)
        return _frozen(list(self._tokenizer.encode(text, add_special_tokens=False)))

    def _ended(self, text: str, turn: Mapping[str, Any]) -> str:
        """Cut `text`, which ends with an assistant turn, after the end token of this turn. If the text lacks this
        token, add it. Raises RefusedError: the template does not show calls."""
        end = self._call_end if turn.get("tool_calls") else self._last_end
        if not end:
            raise RefusedError(_NO_CALLS)
        return text + end if self._ends_at_next or end not in text else text[: text.rindex(end)] + end

    def text(self, tokens: Sequence[int] | NDArray[np.int32]) -> str:
        """The text of tokens, with special tokens."""
        return self._decode(np.asarray(tokens, np.int32).tolist())

    def identified(self, messages: Messages) -> Messages:
        """Give an id to each call and result. Raises RefusedError: a turn has several calls, and the template shows
        only one."""
        return self._template.identified(messages)

    def parse(self, text: str, functions: Functions) -> ParsedTurn:
        """Parse the policy's turn `text`, with the tools `functions` on offer."""
        return parse_turn(text, functions, self.format, self.one_call) if self.format else ParsedTurn(text)

    def parse_apart(self, text: str, functions: Functions) -> ParsedTurn:
        """Parse a turn, and separate thoughts from the content, even if the model's format leaves them together."""
        turn = self.parse(text, functions)
        if self.format is not None and self.format.reasoning_apart:
            return turn
        reasoning, content = split_thought(turn.content, self.opens_thought)
        return turn._replace(reasoning=reasoning, content=content)

    def with_thoughts(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
        """Move reasoning into the content, if the template does not show reasoning that is in a separate field."""
        if self._template.shows_reasoning:
            return tuple(messages)
        return tuple(
            {**message, "content": join_thought(reasoning, message["content"])}
            if (reasoning := message.get("reasoning_content"))
            else message
            for message in messages
        )

    def _ends_of_turns(self) -> tuple[bool, str, str, str]:
        """Find the texts with which the template ends turns.

        The first value is true if a turn has no end token and ends with the first token of the next turn, as in GLM's
        templates. The next values are the tokens that end the last turn, an earlier answer, and a turn with calls. The
        last of them is empty if the template does not show calls.
        """

        def after_mark(turn: dict[str, Any], *following: dict[str, Any], tools: Messages = ()) -> str:
            """The text that the template writes after the mark in `turn`."""
            messages = [QUESTION, turn, *following]
            return self._template.render(messages, tools, generation_prompt=bool(following)).partition(MARK)[2]

        try:
            closing, followed = after_mark(answer(MARK)), after_mark(answer(MARK), QUESTION)
        except RefusedError as error:
            raise ConfigError(f"the tokenizer of model.path cannot render question and answer: {error}") from error
        own, next_one = self._added.search(closing), self._added.search(followed)
        if not next_one:
            raise ConfigError(
                f"the chat template ends an assistant turn with {closing!r}, in which the tokenizer has no special "
                "token, so that the policy cannot end its turn: add one to template and tokenizer, such as <|im_end|>"
            )
        end, turn = next_one.group(), calling([{"mark": MARK}])
        try:
            closing, followed = after_mark(turn, tools=[TOOL]), after_mark(turn, result("15"), tools=[TOOL])
        except RefusedError:
            closing = followed = ""
        if own is None:
            return True, end, end, "".join(self._added.findall(followed.removeprefix(closing))[:1])
        call_end = end if end in closing else "".join(self._added.findall(closing)[-1:])
        return False, own.group(), end, call_end

    def _recognised(self) -> Format | None:
        """Find the format that reads the template's own rendering of a call as that call."""
        if not self._call_end:
            return None
        turn, shown = calling([{"mark": MARK}]), [TOOL]
        function: Mapping[str, Any] = TOOL["function"]  # type: ignore[assignment]
        try:
            opened = self._template.render([QUESTION], shown)
            asked = self._template.render([QUESTION], shown, generation_prompt=False)
            text = self._template.render([QUESTION, turn], shown, generation_prompt=False)
        except RefusedError:
            return None
        written = text.removeprefix(opened) if text.startswith(opened) else text.removeprefix(asked)
        written = written.rpartition(self._call_end)[0] or written
        expected, functions = (ToolCall(function["name"], {"mark": MARK}),), {function["name"]: function}
        return next((each for each in FORMATS.values() if parse_turn(written, functions, each).calls == expected), None)

    def _key(self, messages: Messages, tools: Messages) -> tuple[str, str]:
        """Messages and tools as JSON texts. Raises RefusedError: they contain bytes, such as an image that was not
        read."""
        try:
            # The texts of a large list of tools would take most of the caches' memory, so the keys share one text.
            return json.dumps(messages), self._tools_text(json.dumps(tools))
        except TypeError as error:
            raise RefusedError(f"messages must be text here, without images: {error}") from error

    def _make_prompt(self, *key: str) -> NDArray[np.int32]:
        return _frozen(self._contents.encode(self._template.render(*self._contents.hide([*map(json.loads, key)]))))

    def _make_suffix(self, messages_json: str, tools_json: str, last: int | None) -> NDArray[np.int32]:
        messages, tools = self._contents.hide([json.loads(messages_json), json.loads(tools_json)])
        names = [message["name"] for message in messages if message["role"] == "tool"]
        marked = calling([*([{}] * (len(names) - 1)), {"mark": MARK}], names) if names else answer(MARK)
        tail = self._template.render([QUESTION, marked, *messages], tools).partition(MARK)[2]
        if any(isinstance(message["content"], list) for message in messages):
            after_image = self._template.render([_IMAGE_QUESTION, marked, *messages], tools).partition(MARK)[2]
            if after_image != tail:
                raise RefusedError(_NUMBERS_IMAGES)
        end = self._call_end if names else self._answer_end
        if not end or end not in tail:
            raise RefusedError(_NO_CALLS)
        after = tail.partition(end)[2]
        ids = self._contents.encode(end + after)
        ended = last is None or last == ids[0] or (last in self._ends_in_place and not self._ends_at_next)
        return _frozen(ids[1:] if ended else ids)


def _frozen(ids: list[int]) -> NDArray[np.int32]:
    array = np.asarray(ids, np.int32)
    array.setflags(write=False)
    return array
