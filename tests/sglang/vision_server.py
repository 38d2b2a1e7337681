"""Runs in SGLang's Python: a server on the CPU for models that read images.

The module of their processors imports models whose kernels the CPU build lacks, and SGLang passes over all of it then.
Here these kernels have names, and nothing calls them; the rest is SGLang's own.
"""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import sgl_kernel  # noqa: F401
import torch

MODELS = Path(str(find_spec("sglang").origin)).parent / "srt" / "models"  # type: ignore[union-attr]
USED = {name for file in MODELS.glob("*.py") for name in re.findall(r"ops\.sgl_kernel\.(\w+)", file.read_text())}
# Every process that it spawns imports this file. The names last as long as the library.
LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")
for each in sorted(USED):
    if not hasattr(torch.ops.sgl_kernel, each):
        LIBRARY.define(f"{each}(Tensor input) -> Tensor")

if __name__ == "__main__":
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args

    launch_server(prepare_server_args(sys.argv[1:]))
