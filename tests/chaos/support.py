"""Servers as processes of their own, and ways to harm the file of a replay."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Self

from asyncrl.data.writing import write_tasks
from asyncrl.machine.ports import free_ports
from asyncrl.machine.process import WORKER_VARIABLE
from asyncrl.replay.client.client import ReplayClient
from asyncrl.types import RunIdentity
from tests.end_to_end.support import ROOT
from tests.helpers import GENEROUS_S, make_task, until


class Target:
    """`python -m MODULE ARGUMENT...`, which listens at `endpoint` and logs to a file in `folder`.

    A `with` block starts it, and kills it in the end.
    """

    endpoint: str

    def __init__(self, folder: Path, module: str, *arguments: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "log"
        self._command = [sys.executable, "-m", module, *arguments]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def start(self) -> None:
        pipe = subprocess.PIPE
        # As under a supervisor: a client that says that the run is done does not end it.
        environment = {**os.environ, WORKER_VARIABLE: "target"}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdin=pipe, stdout=pipe, stderr=log, cwd=ROOT, text=True, env=environment
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def alive(self) -> bool:
        return self.process.poll() is None

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def resident_bytes(self) -> int:
        """Memory of its own, without files that it has mapped."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) << 10  # type: ignore[index]


class ReplayProcess(Target):
    """A replay over a store in `folder`; the same store and port at every `start`."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        port, tasks = free_ports(1), folder / "tasks.parquet"
        settings = [f"run.dir={folder}", "run.name=run", f"network.replay_port={port}", f"data.train={tasks}"]
        super().__init__(folder, "asyncrl.replay", "model.path=unused", *settings, *overrides)
        write_tasks(tasks, (make_task(index) for index in range(8)))
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.store = folder / "run" / "replay"
        self.data = self.store / "data.mdb"
        self._clients = ExitStack()

    def __exit__(self, *error: object) -> None:
        self._clients.close()
        super().__exit__(*error)

    def client(self, worker: str = "a", **options: Any) -> ReplayClient:
        """A client that is closed at the end of a `with` block at the latest."""
        client = ReplayClient(self.endpoint, worker, "1", **{"run": RunIdentity("run"), **options})
        self._clients.callback(client.close)
        return client

    def status(self, **options: Any) -> dict[str, Any]:
        """Return the status of the replay, as a client with these `options` gets it."""
        with closing(self.client("observer", give_up_s=GENEROUS_S, **options)) as client:
            return dict(client.status())

    def wait_for_log(self, text: str) -> None:
        until(lambda: text in self.log())

    def fails_with(self, message: str) -> None:
        """Wait until the process ends by itself. Fails unless its status is 1 and its last line has `message`."""
        assert self.process.wait(GENEROUS_S) == 1, self.log()
        assert re.search(message, self.log().splitlines()[-1]), self.log()

    def limit_file_size(self, size: int | None) -> None:
        """Let writes beyond `size` bytes of a file fail from now on, as on a full disk. None lifts the limit."""
        _, hard = resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


def flip(file: Path, pattern: bytes, offset: int) -> None:
    """Flip a bit `offset` bytes into every occurrence of `pattern`."""
    content = bytearray(file.read_bytes())
    places = [found.start() + offset for found in re.finditer(re.escape(pattern), content)]
    assert places, pattern
    for place in places:
        content[place] ^= 1
    file.write_bytes(content)


def read_or_refuse(store: Path) -> dict[str, Any]:
    """Read a store in another process. Return its exit `status`, and the `values` that it read or the `error`."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.read_store", str(store)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=GENEROUS_S,
        check=False,
    )
    return {"status": done.returncode, **(json.loads(done.stdout) if done.stdout else {"error": done.stderr})}
