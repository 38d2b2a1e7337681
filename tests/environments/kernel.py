"""Runs cells in a real kernel of Jupyter, and prints a line of JSON for each: what it printed, or how it failed.

The lines of standard input are JSON: `{"code": TEXT}`, and `"interrupt": PATH` to interrupt the cell once PATH exists.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from queue import Empty
from typing import Any

from jupyter_client.manager import KernelManager, start_new_kernel

LIMIT_S = 240.0
POLL_S = 0.2


def run(manager: KernelManager, client: Any, code: str, interrupt: Path | None) -> dict[str, str]:
    """Run a cell. Returns its text on standard output, and the name and text of its error, if it failed."""
    sent, printed, error = client.execute(code), "", ""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if interrupt is not None and interrupt.exists():
            manager.interrupt_kernel()
            interrupt = None
        try:
            message = client.get_iopub_msg(timeout=POLL_S)
        except Empty:
            continue
        if message["parent_header"].get("msg_id") != sent:
            continue
        content = message["content"]
        if message["msg_type"] == "stream" and content["name"] == "stdout":
            printed += content["text"]
        elif message["msg_type"] == "error":
            error = f"{content['ename']}: {content['evalue']}"
        elif message["msg_type"] == "status" and content["execution_state"] == "idle":
            return {"printed": printed, "error": error}
    raise TimeoutError(f"the cell runs for more than {LIMIT_S:g} s: {code}")


if __name__ == "__main__":
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        for line in sys.stdin:
            cell = json.loads(line)
            path = cell.get("interrupt")
            answer = run(manager, client, cell["code"], Path(path) if path else None)
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
