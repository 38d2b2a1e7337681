"""`python -m tests.learner.compiled_once MODEL FILE`: compiles a policy as a learner does. Writes to FILE how many
graphs torch compiled, and how many it found in its cache."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from torch._dynamo.utils import counters

from asyncrl.config.schema import ModelConfig
from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.learner.batch.prefixes import EVERY
from asyncrl.learner.model.policy import load_policy
from tests.learner.support import random_sequences
from tests.one_rank import one_rank


def main(model: str, file: str) -> None:
    with one_rank() as ranks:
        policy = load_policy(ModelConfig(model, activations=0.7, compile=True), 1.0, ranks, 64)
        sequences = random_sequences(9, 9, 30)
        for sharing in (None, EVERY):
            policy(PackedSequences.of([sequences[0], *sequences], sharing))[0].sum().backward()
    names = {"compiled": "fxgraph_cache_miss", "found": "fxgraph_cache_hit"}
    Path(file).write_text(json.dumps({name: counters["inductor"][counter] for name, counter in names.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
