"""Math-Shepherd: a causal model that says '+' or '-' at the marker behind each step.

The folder is the published checkpoint (huggingface.co/peiyi9979/math-shepherd-mistral-7b-prm): a causal model with its
tokenizer. The input is the problem and the steps as one text, each step ended by the marker and a newline; a marker in
a step's own text is written out. It was trained on steps that begin with "Step 1: ".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncrl.errors import ConfigError, ScoringError
from asyncrl.scoring.models.causal import CausalPRM
from asyncrl.scoring.models.encoding import Encode, Encoded, Marker, marker, problem_and_steps, single_token
from asyncrl.scoring.models.label_tokens import Labels, load_label_model
from asyncrl.scoring.transcript import Transcript

if TYPE_CHECKING:
    from asyncrl.config.schema import ScoringModelConfig


@dataclass(frozen=True)
class Params:
    """`marker` ends each step; `good` and `bad` are the labels that follow it."""

    marker: str = "ки"
    good: str = "+"
    bad: str = "-"


def load(config: ScoringModelConfig, params: Params, key: str) -> CausalPRM:
    """The model in the folder. Raises ConfigError: marker or labels are no tokens of its tokenizer."""
    return load_label_model(config, key, lambda tokenizer: reading(tokenizer, params, key))


def reading(tokenizer: Any, params: Params, key: str) -> tuple[Encode, Labels]:
    """How transcripts are read, and the label tokens. Raises ConfigError."""
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{key}: {type(tokenizer).__name__} does not tell where in a text its tokens stand; "
            "add the tokenizer.json of the same tokenizer to the folder"
        )
    good, bad = (
        single_token(tokenizer, f" {text}", f"{key}.params.{name}={text}")
        for name, text in (("good", params.good), ("bad", params.bad))
    )
    end = marker(tokenizer, f" {params.marker}", f"{key}.params.marker={params.marker}")
    return lambda transcript: encode(transcript, tokenizer, params.marker, end), (good, bad)


def encode(transcript: Transcript, tokenizer: Any, text_of_end: str, end: Marker) -> Encoded:
    """One text, tokenised as one; a step is read where its own marker stands.

    Raises ScoringError: a marker is not a token of its own.
    """
    problem, steps = problem_and_steps(transcript)
    text, ends = problem, set()
    for index, step in enumerate(steps):
        text += f"{' ' if index == 0 else chr(10)}{step} {text_of_end}"
        ends.add(len(text))
    tokens = tokenizer(text, return_offsets_mapping=True, split_special_tokens=True)
    ids: list[int] = []
    reads = []
    for token, (start, stop) in zip(tokens["input_ids"], tokens["offset_mapping"], strict=True):
        is_end = token == end.token and start < stop and stop in ends
        reads += [[len(ids)]] if is_end else []
        ids += [token] if is_end else end.written_out([token])
    if len(reads) != len(steps):
        raise ScoringError(f"the tokenizer joins the marker {text_of_end!r} with the text around it")
    return Encoded(ids, reads)
