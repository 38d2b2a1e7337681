"""Skywork-o1-Open-PRM: a causal model with a value head, which is read at the newline after each step.

The folder is the published checkpoint: a causal model with its tokenizer. Its weights include the head on the final
hidden states: `v_head.summary.weight` [1, H] and `v_head.summary.bias` [1].

The input is bos, the problem and a newline, then each line and a newline. Lines are tokenised one by one, as in
github.com/SkyworkAI/skywork-o1-prm-inference, where each line is a step. A step of several lines is read at its last
newline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from asyncrl.config.option import option
from asyncrl.config.schema import ScoringModelConfig
from asyncrl.scoring.models.causal import CausalPRM, CausalReader, linear
from asyncrl.scoring.models.checkpoint import Checkpoint
from asyncrl.scoring.models.encoding import Encoded, problem_and_steps, single_token, words
from asyncrl.scoring.transcript import Transcript


@dataclass(frozen=True)
class Params:
    marker: str = option("\n", "ends each step")


def load(config: ScoringModelConfig, params: Params, key: str) -> CausalPRM:
    """The model in the folder. Raises ConfigError: the folder is not of this family."""
    checkpoint = Checkpoint(config, key)
    backbone, tokenizer = checkpoint.causal_model("AutoModel"), checkpoint.tokenizer()
    shapes = {"v_head.summary.weight": (1, backbone.config.hidden_size), "v_head.summary.bias": (1,)}
    weight, bias = checkpoint.tensors(shapes)
    marker = single_token(tokenizer, params.marker, f"{key}.params.marker={params.marker!r}")
    readout = linear(weight[0], bias)
    reader = CausalReader(backbone, readout, config.micro_tokens, micro_inputs=config.micro_inputs)
    return CausalPRM(checkpoint, lambda each: encode(each, tokenizer, params.marker, marker), {reader: 1.0})


def encode(transcript: Transcript, tokenizer: Any, text_of_marker: str, marker: int) -> Encoded:
    problem, steps = problem_and_steps(transcript)
    ids = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    ids += words(tokenizer, problem + "\n")
    reads = []
    for step in steps:
        for line in step.split(text_of_marker):
            ids += [*words(tokenizer, line), marker]
        reads.append([len(ids) - 1])
    return Encoded(ids, reads)
