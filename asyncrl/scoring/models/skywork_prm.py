"""Skywork-o1-Open-PRM: a value head beside a causal model, read at the newline behind each step.

The folder is the published checkpoint: a causal model with its tokenizer, and among its weights `v_head.summary.weight`
[1, H] and `v_head.summary.bias` [1] on the final hidden states. The input is bos, the problem and a newline, then each
step and a newline, tokenised piece by piece as in github.com/SkyworkAI/skywork-o1-prm-inference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncrl.scoring.models.causal import CausalPRM, CausalReader, linear
from asyncrl.scoring.models.checkpoint import Checkpoint
from asyncrl.scoring.models.encoding import Encoded, problem_and_steps, single_token, words
from asyncrl.scoring.transcript import Transcript

if TYPE_CHECKING:
    from asyncrl.config.schema import ScoringModelConfig


@dataclass(frozen=True)
class Params:
    """`marker` ends each step."""

    marker: str = "\n"


def load(config: ScoringModelConfig, params: Params, key: str) -> CausalPRM:
    """The model in the folder. Raises ConfigError: the folder is not of this family."""
    checkpoint = Checkpoint(config, key)
    backbone, tokenizer = checkpoint.causal_model("AutoModel"), checkpoint.tokenizer()
    shapes = {"v_head.summary.weight": (1, backbone.config.hidden_size), "v_head.summary.bias": (1,)}
    weight, bias = checkpoint.tensors(shapes)
    marker = single_token(tokenizer, params.marker, f"{key}.params.marker={params.marker!r}")
    reader = CausalReader(backbone, linear(weight[0], bias), config.micro_tokens)
    return CausalPRM(
        checkpoint.name, lambda each: encode(each, tokenizer, marker), reader, config.long_inputs == "drop_oldest"
    )


def encode(transcript: Transcript, tokenizer: Any, marker: int) -> Encoded:
    """Bos, problem, newline, and each step with the marker, at which it is read."""
    problem, steps = problem_and_steps(transcript)
    ids = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    ids += words(tokenizer, problem + "\n")
    reads = []
    for step in steps:
        ids += [*words(tokenizer, step), marker]
        reads.append([len(ids) - 1])
    return Encoded(ids, reads)
