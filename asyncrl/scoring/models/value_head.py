"""Process reward models with a value head, stored in asyncrl's own format. A step's logit is the head's value at the
step's last token.

The folder holds a backbone for `AutoModel` with its tokenizer, and `value_head.safetensors` with `weight` float[1, H]
and `bias` float[1]. The model reads the policy's text with its special tokens, through the model's own tokenizer, so it
must be trained for a policy with the same template. A step without tokens is read at the token before the step.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.schema import ScoringModelConfig
from asyncrl.errors import ScoringError
from asyncrl.scoring.models.causal import CausalPRM, CausalReader, linear
from asyncrl.scoring.models.checkpoint import Checkpoint
from asyncrl.scoring.models.encoding import Encoded, tokenize
from asyncrl.scoring.transcript import Transcript

HEAD_FILE = "value_head.safetensors"


@dataclass(frozen=True)
class Params:
    """This family of models has no parameters."""


def load(config: ScoringModelConfig, params: Params, key: str) -> CausalPRM:
    """The model in the folder. Raises ConfigError: the folder is not of this family."""
    checkpoint = Checkpoint(config, key)
    if not (checkpoint.folder / HEAD_FILE).is_file():
        raise checkpoint.refuse(
            f"there is no {HEAD_FILE} in it; name a folder of family value_head, or set {key}.family"
        )
    backbone, tokenizer = checkpoint.causal_model("AutoModel"), checkpoint.tokenizer()
    weight, bias = checkpoint.tensors({"weight": (1, backbone.config.hidden_size), "bias": (1,)})

    def encode(transcript: Transcript) -> Encoded:
        ids, spans = tokenize(transcript, tokenizer)
        if spans and spans[0][1] == 0:
            raise ScoringError("the transcript begins with a step that has no text")
        return Encoded(ids, [[end - 1] for _, end in spans])

    readout = linear(weight[0], bias)
    reader = CausalReader(backbone, readout, config.micro_tokens, micro_inputs=config.micro_inputs)
    return CausalPRM(checkpoint, encode, {reader: 1.0})
