"""The model families whose weights may be pushed into SGLang servers, and the reasons against other families.

A server finds the place of a pushed tensor by the name that the tensor has in weight files. It ignores names that it
does not know, and reports success. Some of its loaders change loaded tensors, such as the experts of a mixture or the
projections of latent attention, or load some tensors only together. No call of a server lists the names that it would
load.

So a family is allowed once a test has shown that servers take every tensor of a push. For each family of `PROVEN`,
tests/sglang/test_families.py starts a real server on the CPU and pushes new weights for all tensors. Then it compares
the server's log-probs with those of transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from asyncrl.config.schema import EngineConfig, ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.modelling.opening import open_config

PROVEN: frozenset[str] = frozenset(
    {
        *("qwen3_moe", "mixtral", "glm4_moe", "olmoe"),
        *("qwen2", "qwen3", "llama", "mistral", "gemma2", "gemma3_text", "phi3"),
        *("glm4", "olmo2", "smollm3", "ernie4_5", "seed_oss"),
        "qwen2_5_vl",
    }
)
"""The families that have passed the test with SGLang 0.5.23. A family is named by the `model_type` of its
configuration."""

_DEEPSEEK = (
    "SGLang 0.5.23 on a CPU gives log-probs that are 3 nats from those of transformers, even for the folder with which "
    "it was started, so the test cannot judge pushes"
)

UNPROVEN: Mapping[str, str] = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v2"), _DEEPSEEK),
    "gpt_oss": "SGLang 0.5.23 has no attention with sinks for the CPU, so the test cannot run it "
    "(TorchNativeAttnBackend takes no `sinks`)",
    "minimax_m2": "SGLang 0.5.23 computes its norms of queries and keys on a GPU only, so the test cannot run it",
    "qwen2_moe": "SGLang 0.5.23 adds the shared expert by a Triton kernel, so the test cannot run it on a CPU",
}
"""Maps the `model_type` of other common families to the reason why the test fails for them."""


_LATENT = re.compile(r"\.(q_a_proj|kv_a_proj_with_mqa)\.")


def request_group(name: str) -> str:
    """Map the name of a tensor to its group. Tensors of one group must reach a server in one request.

    SGLang's loader of latent attention (DeepSeek) concatenates two projections, and drops one that arrives alone.
    """
    return _LATENT.sub(".q_a_proj and kv_a_proj_with_mqa.", name)


def check_family(engine: EngineConfig, model: ModelConfig) -> None:
    """Raises ConfigError: the engine is a fleet of SGLang servers, and the policy's family is not in `PROVEN`."""
    if engine.kind != "sglang" or engine.unproven_family:
        return
    policy = open_config(model)
    if policy.model_type not in PROVEN:
        reason = UNPROVEN.get(policy.model_type, "no test has tried this family")
        raise ConfigError(
            f"model.path={model.path} engine.kind=sglang: no test has shown that SGLang servers take every pushed "
            f"weight of a {policy.model_type} model ({reason}). They ignore weights that they do not know. Use a "
            "family listed in docs/models.md, which also says how to add one, or set engine.unproven_family=true at "
            "your own risk"
        )
