"""Runs in SGLang's Python: a server on the CPU that tells the experts of each token.

SGLang keeps them in memory that it registers with CUDA, without which it does not start. Here that memory is plain; the
rest is SGLang's own. The scheduler's process is forked, so that it has the same allocator.
"""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

import torch
import torch.multiprocessing
from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.managers import detokenizer_manager, scheduler  # noqa: F401
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
from sglang.srt.server_args import prepare_server_args


def plain_memory(shape: tuple[int, ...], dtype: torch.dtype, **_: Any) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def main() -> None:
    set_start_method = multiprocessing.set_start_method

    def always_fork(method: str, force: bool = False) -> None:
        set_start_method("fork", force=True)

    modules: tuple[Any, ...] = (multiprocessing, torch.multiprocessing)
    for module in modules:
        module.set_start_method = always_fork
    ALLOC_MEMORY_FUNCS["cpu"] = plain_memory
    launch_server(prepare_server_args(sys.argv[1:]))


if __name__ == "__main__":
    main()
