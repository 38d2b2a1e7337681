"""Math-Shepherd: a causal model that says '+' or '-' at the marker behind each step.

The folder is the published checkpoint (huggingface.co/peiyi9979/math-shepherd-mistral-7b-prm): a causal model with its
tokenizer. The input is the problem and the steps as one text, each step ended by the marker and a newline. It was
trained on steps that begin with "Step 1: ".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncrl.errors import ScoringError
from asyncrl.scoring.models.causal import CausalPRM
from asyncrl.scoring.models.encoding import Encode, Encoded, problem_and_steps, single_token
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
    ids = {
        name: single_token(tokenizer, f" {text}", f"{key}.params.{name}={text}")
        for name, text in (("marker", params.marker), ("good", params.good), ("bad", params.bad))
    }
    labels = ids["good"], ids["bad"]
    return lambda transcript: encode(transcript, tokenizer, params.marker, ids["marker"]), labels


def encode(transcript: Transcript, tokenizer: Any, marker: str, marker_id: int) -> Encoded:
    """One text, tokenised as one; a step is read where its own marker stands, also where the text says it elsewhere.

    Raises ScoringError: a marker is not a token of its own.
    """
    problem, steps = problem_and_steps(transcript)
    text, ends = problem, []
    for index, step in enumerate(steps):
        text += f"{' ' if index == 0 else chr(10)}{step} {marker}"
        ends.append(len(text))
    tokens = tokenizer(text, return_offsets_mapping=True, split_special_tokens=True)
    by_end = {end: index for index, (start, end) in enumerate(tokens["offset_mapping"]) if end > start}
    positions = [by_end.get(end, 0) for end in ends]
    if any(tokens["input_ids"][position] != marker_id for position in positions):
        raise ScoringError(f"the tokenizer joins the marker {marker!r} with the text around it")
    return Encoded(tokens["input_ids"], [[position] for position in positions])
