"""One life of a server in a fleet, whose exchanges were recorded from a real vLLM (`exchanges.json` names its version).

`python -m tests.engine.vllm.exchanges URL FOLDER` records it again from the server at URL, which can load the
weights in FOLDER and has a context of 512 tokens or more; the exchanges go to the standard output.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.engine.fleet.http import Http, ServerRefusedError, decoded
from asyncrl.engine.fleet.server import Segment
from asyncrl.engine.fleet.update import Update
from asyncrl.engine.vllm.server import VllmServer
from asyncrl.types import Sampling

LABEL = "3-me"
FOLDER = "/weights/v00000003"
CONTEXT = 512
START = np.array([5, 6, 7], np.int32)


class InFolder(Update):
    """Version 3, which is in a folder already."""

    def __init__(self, path: Path) -> None:
        super().__init__(3, LABEL, {})
        self._folder = path

    async def folder(self) -> Path:
        return self._folder


async def live(server: VllmServer, folder: Path = Path(FOLDER)) -> dict[str, Segment]:
    """The answers to a request that ended by length, one that ended at a stop token, and one that was aborted."""
    await server.join()
    await server.load(InFolder(folder))
    await server.flush()
    await server.pause("retract")
    await server.load(InFolder(folder))
    await server.flush()
    await server.resume()
    whole = await server.generate("whole", START, Sampling(0.7, 4), (), None)
    stopped = await server.generate("stopped", START, Sampling(1.0, 500), tuple(range(0, 320, 8)), LABEL)
    long = asyncio.create_task(server.generate("long", START, Sampling(1.0, 500), (), None))
    while not (await asyncio.wait({long}, timeout=0.1))[0]:
        await server.abort()
    await server.check()
    return {"whole": whole, "stopped": stopped, "aborted": await long}


class _Recorder(Http):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.exchanges: list[dict[str, Any]] = []

    async def call(self, method: str, path: str, data: bytes | None = None, timeout_s: float | None = None) -> bytes:
        exchange = {"method": method, "path": path, "body": json.loads(data) if data else None, "status": 200}
        self.exchanges.append(exchange)
        try:
            answer = await super().call(method, path, data, timeout_s)
        except ServerRefusedError as error:
            exchange.update(status=int(str(error).partition(" answered ")[2][:3]), answer=str(error).partition(": ")[2])
            raise
        exchange["answer"] = _trimmed(path, decoded(answer))
        return answer


def _trimmed(path: str, answer: Any) -> Any:
    """The answer without the parts that are not used."""
    if path == "/metrics":
        return "\n".join(line for line in answer.split("\n") if "process_start_time" in line) + "\n"
    if path.startswith("/server_info"):
        read = {"model_config": ["logprobs_mode", "max_model_len", "served_model_name"], "device_config": ["device"]}
        settings = answer["vllm_config"]
        return {"vllm_config": {part: {name: settings[part][name] for name in names} for part, names in read.items()}}
    return answer


async def _record(url: str, folder: Path) -> None:
    recorder = _Recorder(url)
    server = VllmServer(url, context=CONTEXT, tied=False, http=recorder)
    await live(server, folder)
    await server.close()
    [model] = [each["answer"]["data"][0]["id"] for each in recorder.exchanges if each["path"] == "/v1/models"]
    lines = ",\n".join(json.dumps(exchange) for exchange in recorder.exchanges)
    sys.stdout.write(lines.replace(str(folder), FOLDER).replace(model, "policy") + "\n")


if __name__ == "__main__":
    asyncio.run(_record(sys.argv[1], Path(sys.argv[2])))
