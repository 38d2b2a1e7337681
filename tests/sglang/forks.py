"""Runs in SGLang's Python: imports SGLang once, and then forks a server for each line of its input.

Imports are most of what a server's start costs, and it imports in three processes. A line is a JSON list: the server's
arguments, and the file of its log. The answer is the server's process, which leads a group. At the end of the input all
servers are killed; they also end with this process.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import traceback
from contextlib import suppress
from typing import Any

import torch.multiprocessing
from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.managers import detokenizer_manager, scheduler  # noqa: F401
from sglang.srt.models.registry import import_model_classes
from sglang.srt.server_args import prepare_server_args

PR_SET_PDEATHSIG = 1
"""The option of Linux's prctl that sets the signal which a process gets when its parent ends."""


def serve(arguments: list[str], log: str) -> int:
    """Fork a server; its process."""
    if process := os.fork():
        return process
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)):
        os.dup2(os.open(path, flags), number)
    os.dup2(1, 2)
    try:
        launch_server(prepare_server_args(arguments))
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        # Never back into the parent's loop.
        os._exit(1)


def answer(value: object) -> None:
    sys.stdout.write(f"{value}\n")
    sys.stdout.flush()


def main() -> None:
    import_model_classes("sglang.srt.models")
    set_start_method = multiprocessing.set_start_method

    def always_fork(method: str, force: bool = False) -> None:
        set_start_method("fork", force=True)

    modules: tuple[Any, ...] = (multiprocessing, torch.multiprocessing)
    for module in modules:
        module.set_start_method = always_fork
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    answer("ready")
    servers = []
    for line in sys.stdin:
        servers.append(serve(*json.loads(line)))
        answer(servers[-1])
    for server in servers:
        with suppress(ProcessLookupError):
            os.killpg(server, signal.SIGKILL)


if __name__ == "__main__":
    main()
