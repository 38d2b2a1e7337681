"""RLHFlow's process reward models: each step is a user turn, and the assistant answers it with '+' or '-'.

The folder is the published checkpoint (such as huggingface.co/RLHFlow/Llama3.1-8B-PRM-Deepseek-Data): a causal model
with its tokenizer and chat template. The first user turn is the problem, a space and the first step. In the input every
assistant turn is '+'. A step is read at the position before its '+', where the model predicts '+' or '-'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from asyncrl.config.option import option
from asyncrl.config.schema import ScoringModelConfig
from asyncrl.scoring.models.causal import CausalPRM, LabelTokens, label_prm
from asyncrl.scoring.models.checkpoint import Checkpoint
from asyncrl.scoring.models.encoding import Encode, Encoded, chat_frame, problem_and_steps, single_token, words
from asyncrl.scoring.transcript import Transcript


@dataclass(frozen=True)
class Params:
    good: str = option("+", "the assistant's answer to a good step")
    bad: str = option("-", "the assistant's answer to a bad step")


def load(config: ScoringModelConfig, params: Params, key: str) -> CausalPRM:
    """The model in the folder. Raises ConfigError: it has no chat template, or a label is not a single token."""
    return label_prm(Checkpoint(config, key), lambda tokenizer: reading(tokenizer, params, key))


def reading(tokenizer: Any, params: Params, key: str) -> tuple[Encode, LabelTokens]:
    """The encoding of transcripts, and the label tokens. Raises ConfigError: see `load`."""
    good = single_token(tokenizer, params.good, f"{key}.params.good={params.good}")
    bad = single_token(tokenizer, params.bad, f"{key}.params.bad={params.bad}")
    first, to_assistant, to_user, _, _ = chat_frame(tokenizer, ["user", "assistant"] * 2, key)

    def encode(transcript: Transcript) -> Encoded:
        problem, steps = problem_and_steps(transcript)
        ids: list[int] = []
        reads = []
        for index, step in enumerate(steps):
            opening, text = (to_user, step) if index else (first, f"{problem} {step}")
            ids += [*opening, *words(tokenizer, text), *to_assistant, good]
            reads.append([len(ids) - 2])
        return Encoded(ids, reads)

    return encode, (good, bad)
