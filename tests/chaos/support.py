"""A replay as a process of its own, and ways to harm its file."""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from asyncrl.data.writing import write_tasks
from asyncrl.machine.ports import free_ports
from asyncrl.replay.client import ReplayClient
from asyncrl.types import RunIdentity
from tests.end_to_end.support import ROOT
from tests.helpers import GENEROUS_S, make_task, until


class ReplayProcess:
    """`python -m asyncrl.replay` over a store in `folder`; the same store and port at every `start`."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self._folder = folder
        tasks = folder / "tasks.parquet"
        write_tasks(tasks, (make_task(index) for index in range(8)))
        port = free_ports(1)
        settings = [f"run.dir={folder}", "run.name=run", f"network.replay_port={port}", f"data.train={tasks}"]
        self._command = [sys.executable, "-m", "asyncrl.replay", "model.path=unused", *settings, *overrides]
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.store = folder / "run" / "replay"
        self.data = self.store / "data.mdb"

    def start(self) -> None:
        with (self._folder / "log").open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, cwd=ROOT)

    def client(self, worker: str, **options: Any) -> ReplayClient:
        return ReplayClient(self.endpoint, worker, "1", **{"run": RunIdentity("run"), **options})

    def log(self) -> str:
        return (self._folder / "log").read_text()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def fails_with(self, message: str) -> None:
        """It ends by itself with status 1, and its last line says `message`."""
        assert self.process.wait(GENEROUS_S) == 1, self.log()
        assert re.search(message, self.log().splitlines()[-1]), self.log()

    def limit_file_size(self, size: int | None) -> None:
        """Writes behind `size` bytes fail from now on, as on a full disk; None lifts the limit."""
        _, hard = resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (hard if size is None else size, hard))

    def resident_bytes(self) -> int:
        """Memory of its own, without the mapped store."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) << 10  # type: ignore[index]


def flip(file: Path, pattern: bytes, offset: int) -> None:
    """Flip a bit `offset` bytes into every occurrence of `pattern`."""
    content = bytearray(file.read_bytes())
    places = [found.start() + offset for found in re.finditer(re.escape(pattern), content)]
    assert places, pattern
    for place in places:
        content[place] ^= 1
    file.write_bytes(content)


def read_or_refuse(store: Path) -> dict[str, Any]:
    """What another process makes of a store: its `status`, and the `values` it could read or the `error` it gave."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.read_store", str(store)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=GENEROUS_S,
        check=False,
    )
    return {"status": done.returncode, **(json.loads(done.stdout) if done.stdout else {"error": done.stderr})}


def wait_for_log(replay: ReplayProcess, text: str) -> None:
    until(lambda: text in replay.log())
