"""RLHFlow's process reward models: each step is a user turn, and '+' or '-' is what the assistant says to it.

The folder is the published checkpoint (such as huggingface.co/RLHFlow/Llama3.1-8B-PRM-Deepseek-Data): a causal model
with its tokenizer and chat template. The first user turn is the problem, a blank and the first step. Every assistant
turn holds '+', and the step is read at the position before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncrl.scoring.models.causal import CausalPRM
from asyncrl.scoring.models.encoding import Encode, Encoded, chat_frame, problem_and_steps, single_token, words
from asyncrl.scoring.models.label_tokens import Labels, load_label_model
from asyncrl.scoring.transcript import Transcript

if TYPE_CHECKING:
    from asyncrl.config.schema import ScoringModelConfig


@dataclass(frozen=True)
class Params:
    """`good` and `bad` are what the assistant may say to a step."""

    good: str = "+"
    bad: str = "-"


@dataclass(frozen=True, slots=True)
class Frame:
    """What the template writes before the first turn, before the assistant's answer, and before the next user turn."""

    first: list[int]
    to_assistant: list[int]
    to_user: list[int]


def load(config: ScoringModelConfig, params: Params, key: str) -> CausalPRM:
    """The model in the folder. Raises ConfigError: it has no chat template, or the labels are no tokens."""
    return load_label_model(config, key, lambda tokenizer: reading(tokenizer, params, key))


def reading(tokenizer: Any, params: Params, key: str) -> tuple[Encode, Labels]:
    """How transcripts are read, and the label tokens. Raises ConfigError."""
    good = single_token(tokenizer, params.good, f"{key}.params.good={params.good}")
    bad = single_token(tokenizer, params.bad, f"{key}.params.bad={params.bad}")
    first, to_assistant, to_user, _, _ = chat_frame(tokenizer, ["user", "assistant"] * 2, key)
    frame = Frame(first, to_assistant, to_user)
    return lambda transcript: encode(transcript, tokenizer, frame, good), (good, bad)


def encode(transcript: Transcript, tokenizer: Any, frame: Frame, good: int) -> Encoded:
    """The conversation up to the last answer; a step is read where its answer is foretold."""
    problem, steps = problem_and_steps(transcript)
    ids: list[int] = []
    reads = []
    for index, step in enumerate(steps):
        opening, said = (frame.to_user, step) if index else (frame.first, f"{problem} {step}")
        ids += [*opening, *words(tokenizer, said), *frame.to_assistant, good]
        reads.append([len(ids) - 2])
    return Encoded(ids, reads)
