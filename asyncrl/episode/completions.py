"""Reads the sampled tokens of a completion as a turn, and cuts the turn at a stop text of the request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl.chat.chat import Chat
from asyncrl.chat.history import Message
from asyncrl.chat.parsing import ParsedTurn
from asyncrl.chat.template import answer, calling, with_reasoning
from asyncrl.engine.base import Generation
from asyncrl.episode.recorder import CompletionRequest

ReadTurn = Callable[[str, bool], ParsedTurn]
"""Reads a turn's text. The second argument is true if the policy ended the turn, and false if a limit cut it."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One turn of the policy. If the policy wrote a stop text of the request, `message` and `turn` end before this stop
    text.

    - `message`: the turn in the form that templates take, without calls if a call of `turn` is malformed
    - `turn`: the turn as it was read
    - `finish_reason`: stop or length
    - `prompt`: the tokens of the conversation before the turn
    - `sampled`: all sampled tokens, which the episode records
    - `stop`: the stop text that the policy wrote; empty if it wrote none
    """

    message: Message
    turn: ParsedTurn
    finish_reason: str
    prompt: NDArray[np.int32]
    sampled: Generation
    stop: str = ""


class ReadText(NamedTuple):
    """A turn that was read from text.

    - `whole`: the whole turn
    - `shown`: the turn that the caller gets, which ends before the text `stop`
    - `stop`: the stop text that the policy wrote; empty if it wrote none
    - `only_stop`: true if nothing but `stop` was cut from the turn
    """

    whole: ParsedTurn
    shown: ParsedTurn
    stop: str = ""
    only_stop: bool = False


def read_sampled(chat: Chat, request: CompletionRequest, sampled: Generation, read_turn: ReadTurn) -> ReadText:
    """Read sampled tokens as a turn, and as the shorter turn that the caller gets if the text has a stop text."""
    ended = sampled.finish_reason == "stop"
    text = chat.text(sampled.tokens[:-1] if ended else sampled.tokens)
    read = (lambda part, _: ParsedTurn(part)) if request.grammar is not None else read_turn
    whole = read(text, ended)
    found = [(at, stop) for stop in request.stop if (at := text.find(stop)) >= 0]
    if not found:
        return ReadText(whole, whole)
    at, stop = min(found)
    return ReadText(whole, read(text[:at], True), stop, text[at:].strip() == stop.strip())


def message_of(turn: ParsedTurn) -> Message:
    """The turn in the form that templates take."""
    if made := turn.made:
        message = calling([call.arguments for call in made], [call.name for call in made], turn.content, turn.ids)
    else:
        message = answer(turn.content)
    return with_reasoning(message, turn.reasoning)
