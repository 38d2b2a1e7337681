"""A chat template as exact token ids: prompts, and the suffixes that follow what the policy sampled.

What must hold: prompt, sampled tokens, suffix, sampled tokens, ... is the tokenisation of the template's own rendering
of the whole conversation, wherever the policy wrote canonical text. Sampled tokens are never decoded and encoded again.

A suffix is found by rendering a dummy conversation whose assistant turn holds a mark: it is what the template writes
after the end-of-turn token that follows the mark. It is tokenised behind that end-of-turn token, at which every
tokenizer splits, so that nothing depends on what stands before it. Results are rendered together, since some templates
merge consecutive tool messages. The mark is needed: templates render the same assistant turn differently when it is the
last one, so that the conversation without the tool messages is in general no prefix of the one with them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError

_MARK = "asyncrlmark"
_QUESTION = {"role": "user", "content": "question"}

Messages = Sequence[Mapping[str, Any]]


class Chat:
    """A Hugging Face tokenizer's chat template. Returned arrays are cached and read-only.

    `template_kwargs` are passed to the template, such as `enable_thinking=False`. `stop_ids` are the tokenizer's eos
    and the token with which the template ends an assistant turn.

    Raises ConfigError: there is no template, or it ends an assistant turn with no token of its own.
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})
        end_id, self._end_text = self._end_of_turn()
        eos = tokenizer.eos_token_id
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(i for i in (end_id, eos) if i is not None))
        self._prompt = lru_cache(maxsize=1024)(self._make_prompt)
        self._suffix = lru_cache(maxsize=1024)(self._make_suffix)
        self._piece = lru_cache(maxsize=1 << 16)(lambda token: self.text([token]))

    def prompt(self, messages: Messages, tools: Messages) -> NDArray[np.int32]:
        """Ids of a conversation, up to where the policy begins to write; `tools` are what the template lists."""
        return self._prompt(json.dumps([messages, tools]))

    def suffix(self, messages: Messages, tools: Messages) -> NDArray[np.int32]:
        """Ids between the stop token of an assistant turn and where the policy writes next.

        `messages` are the results of all the turn's calls in order (`role` tool, `name`, `content`), a user turn, or
        both.

        Raises ConfigError: the template cannot render them.
        """
        return self._suffix(json.dumps([messages, tools]))

    def text(self, tokens: Sequence[int] | NDArray[np.int32]) -> str:
        """What the tokens say, marks included."""
        return str(
            self._tokenizer.decode(
                [int(token) for token in tokens], skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def piece(self, token: int) -> str:
        """What one token says; a part of a character reads U+FFFD."""
        return self._piece(int(token))

    def _end_of_turn(self) -> tuple[int, str]:
        if not self._tokenizer.chat_template:
            raise ConfigError("the tokenizer of model.path has no chat template; save one with it")
        answer = {"role": "assistant", "content": _MARK}
        closing = self._render([_QUESTION, answer], [], generation_prompt=False).rpartition(_MARK)[2]
        marks = set(self._tokenizer.get_added_vocab().values())
        for token in self._encode(closing):
            if token in marks:
                return token, str(self._tokenizer.convert_ids_to_tokens(token))
        raise ConfigError(
            f"the chat template ends an assistant turn with {closing!r}, in which the tokenizer has no special token; "
            "the policy could not say that its turn is over: add one, such as <|im_end|>, to template and tokenizer"
        )

    def _make_prompt(self, key: str) -> NDArray[np.int32]:
        messages, tools = json.loads(key)
        return _frozen(self._encode(self._render(messages, tools)))

    def _make_suffix(self, key: str) -> NDArray[np.int32]:
        messages, tools = json.loads(key)
        results = [message for message in messages if message["role"] == "tool"]
        for number, message in enumerate(results):
            message.setdefault("tool_call_id", f"call{number:05d}")
        text = self._render([_QUESTION, _dummy_turn(results), *messages], tools)
        tail = text.partition(_MARK)[2]
        _, end, after = tail.partition(self._end_text)
        if not end:
            raise ConfigError(
                f"the chat template does not render an assistant turn that calls tools and ends with {self._end_text}"
            )
        return _frozen(self._encode(end + after)[1:])

    def _render(self, messages: Messages, tools: Messages, generation_prompt: bool = True) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **self._template_kwargs,
            )
        )

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _dummy_turn(results: Messages) -> dict[str, Any]:
    """An assistant turn that made the calls which `results` answer; the mark is the last thing that it says."""
    if not results:
        return {"role": "assistant", "content": _MARK}
    calls: list[dict[str, Any]] = [
        {"id": result["tool_call_id"], "type": "function", "function": {"name": result["name"], "arguments": {}}}
        for result in results
    ]
    calls[-1]["function"]["arguments"] = {"mark": _MARK}
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _frozen(ids: list[int]) -> NDArray[np.int32]:
    array = np.asarray(ids, np.int32)
    array.setflags(write=False)
    return array
