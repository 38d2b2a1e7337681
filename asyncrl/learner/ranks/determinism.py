"""Makes training repeat bit for bit on the same GPUs (`learner.deterministic`). On the CPU training always repeats."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

import torch

VARIABLES = {
    # Without workspaces of a fixed size, the results of cuBLAS can depend on which streams run at the same time.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # transformers reads this for the package flash_attn. torch's own kernels follow torch.use_deterministic_algorithms.
    "FLASH_ATTENTION_DETERMINISTIC": "1",
}


def be_deterministic(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let torch use only kernels that repeat their result. An operation without such a kernel raises RuntimeError with
    its name. Call this before the first work on a GPU. Variables that are already set keep their values. Attention
    afterwards takes the flash kernel even if cuDNN's is faster, since cuDNN has no deterministic backward pass.
    """
    from torch._inductor import config as compiler

    for name, value in VARIABLES.items():
        environment.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # Without this, the compiler chooses between kernels by their measured speed, and kernels round differently.
    compiler.deterministic = True
