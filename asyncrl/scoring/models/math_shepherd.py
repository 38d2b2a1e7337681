"""Math-Shepherd: a causal model that predicts '+' or '-' at the marker after each step.

The folder is the published checkpoint (huggingface.co/peiyi9979/math-shepherd-mistral-7b-prm): a causal model with its
tokenizer. The input is the problem and the steps as one text, each step ended by the marker and a newline. A marker
inside a step is spelled out in characters. The model was trained on steps that begin with "Step 1: ".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from asyncrl.config.option import option
from asyncrl.config.schema import ScoringModelConfig
from asyncrl.errors import ConfigError, ScoringError
from asyncrl.scoring.models.causal import CausalPRM, LabelTokens, label_prm
from asyncrl.scoring.models.checkpoint import Checkpoint
from asyncrl.scoring.models.encoding import Encode, Encoded, marker, problem_and_steps, single_token
from asyncrl.scoring.transcript import Transcript


@dataclass(frozen=True)
class Params:
    marker: str = option("ки", "ends each step")
    good: str = option("+", "the label that follows the marker of a good step")
    bad: str = option("-", "the label that follows the marker of a bad step")


def load(config: ScoringModelConfig, params: Params, key: str) -> CausalPRM:
    """The model in the folder. Raises ConfigError: for its tokenizer, the marker or a label is not a single token."""
    return label_prm(Checkpoint(config, key), lambda tokenizer: reading(tokenizer, params, key))


def reading(tokenizer: Any, params: Params, key: str) -> tuple[Encode, LabelTokens]:
    """The encoding of transcripts, and the label tokens. Raises ConfigError: see `load`, or the tokenizer has no
    tokenizer.json."""
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{key}: {type(tokenizer).__name__} does not give the position of its tokens in a text; "
            "add the tokenizer.json of the same tokenizer to the folder"
        )
    good, bad = (
        single_token(tokenizer, f" {text}", f"{key}.params.{name}={text}")
        for name, text in (("good", params.good), ("bad", params.bad))
    )
    end, written_out = marker(tokenizer, f" {params.marker}", f"{key}.params.marker={params.marker}")

    def encode(transcript: Transcript) -> Encoded:
        """Tokenise the problem and the steps as one text. Raises ScoringError: a token joins a marker with other
        text."""
        problem, steps = problem_and_steps(transcript)
        text, ends = problem, set()
        for index, step in enumerate(steps):
            text += f"{chr(10) if index else ' '}{step} {params.marker}"
            ends.add(len(text))
        tokens = tokenizer(text, return_offsets_mapping=True, split_special_tokens=True)
        ids: list[int] = []
        reads = []
        for token, (start, stop) in zip(tokens["input_ids"], tokens["offset_mapping"], strict=True):
            is_end = token == end and start < stop and stop in ends
            reads += [[len(ids)]] if is_end else []
            ids += [token] if is_end else written_out([token])
        if len(reads) != len(steps):
            raise ScoringError(f"the tokenizer joins the marker {params.marker!r} with the text around it")
        return Encoded(ids, reads)

    return encode, (good, bad)
