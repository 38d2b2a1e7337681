"""Runs programs of the policy on a server of SandboxFusion.

    POST URL/run_code {"code": ..., "language": "python", "stdin": ..., "run_timeout": 8, "memory_limit_MB": 1024, ...}
    200 {"status": "Success", "message": "", "compile_result": null,
         "run_result": {"status": "Finished", "execution_time": 0.02, "return_code": 0, "stdout": ..., "stderr": ...}}

The program's result counts, even if the server calls the run `Failed`. If the server fails, is busy or gives an invalid
answer, the request is retried. After `TRIES` attempts, SandboxError is raised.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from asyncrl.sandbox.sandbox import ProgramResult, SandboxError, SandboxLimits

TRIES = 3
FIRST_WAIT_S = 0.25
QUEUE_S = 60.0
"""The seconds that a request may take in addition to the time limits of compiling and running the program. A busy
server may let a request wait that long."""

MAX_BYTES = 16 << 20
"""The maximum number of bytes in one answer."""

_PATH = "/run_code"


class FusionSandbox:
    """Runs programs on the server at `url`, which may end with `/run_code`.

    `first_wait_s` is the pause after the first of `tries` attempts. Each further pause is twice as long as the last.
    """

    def __init__(self, url: str, tries: int = TRIES, first_wait_s: float = FIRST_WAIT_S) -> None:
        self._url = url.rstrip("/").removesuffix(_PATH) + _PATH
        self._tries = tries
        self._first_wait_s = first_wait_s

    async def check(self) -> None:
        """Do nothing: the server may start later than its clients."""

    async def run(
        self, program: str, limits: SandboxLimits, *, stdin: bytes = b"", errors: bool = True
    ) -> ProgramResult:
        """Run a program, see `sandbox.run`. The result has standard output first, and then standard error. Raises
        SandboxError.

        The server applies only the limits of wall time and memory.
        """
        body = {
            "code": program.encode(errors="replace").decode(),
            "language": "python",
            "stdin": stdin.decode(errors="replace"),
            "compile_timeout": limits.wall_s,
            "run_timeout": limits.wall_s,
            "memory_limit_MB": limits.memory_mb,
        }
        timeout = aiohttp.ClientTimeout(total=2 * limits.wall_s + QUEUE_S)
        reason = ""
        async with aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as session:
            for attempt in range(self._tries):
                if attempt:
                    await asyncio.sleep(self._first_wait_s * 2 ** (attempt - 1))
                try:
                    return read_answer(await self._request(session, body), errors)
                except TimeoutError:
                    # There is no retry, because it would take as long again.
                    raise SandboxError(f"{self._url} took more than {timeout.total:g} s") from None
                except (aiohttp.ClientError, ValueError, RecursionError) as error:
                    reason = (str(error) or repr(error))[:300]
        raise SandboxError(f"{self._url} failed {self._tries} times, at last with {reason}")

    async def _request(self, session: aiohttp.ClientSession, body: Mapping[str, Any]) -> Any:
        """Send a request. Returns None for an answer that is too large.

        Raises ValueError: the server failed, or the answer is not JSON; SandboxError: the server refuses the request.
        """
        async with session.post(self._url, json=body, allow_redirects=False) as response:
            content = bytearray()
            async for part in response.content.iter_chunked(1 << 16):
                content += part
                if len(content) > MAX_BYTES:
                    break
            if 400 <= response.status < 500 and response.status != 429:
                raise SandboxError(
                    f"{self._url} refused the request with status {response.status}: {bytes(content[:300])!r}"
                )
            if response.status != 200:
                raise ValueError(f"status {response.status}: {bytes(content[:300])!r}")
            # If a large answer is not JSON, it comes from another kind of server, and is not the output of a program.
            is_output = len(content) > MAX_BYTES and content.lstrip().startswith(b"{")
            return None if is_output else json.loads(content)


def read_answer(answer: Any, errors: bool) -> ProgramResult:
    """Read the program's result. Raises ValueError: the server failed, or the answer is malformed."""
    if answer is None:
        return ProgramResult(f"(the output has more than {MAX_BYTES >> 20} MiB)", 1)
    match answer:
        case {"status": "SandboxError"}:
            raise ValueError(f"SandboxError: {str(answer.get('message'))[:300]}")
        # If a program did not compile, there is no `run_result`.
        case {"status": "Success" | "Failed", "run_result": {"status": str()} as ran}:
            pass
        case {"status": "Failed", "compile_result": {"status": str()} as ran}:
            pass
        case _:
            raise ValueError(f"an answer without results: {answer!r:.300}")
    printed = f"{ran.get('stdout') or ''}{(ran.get('stderr') or '') if errors else ''}"
    took = ran.get("execution_time")
    seconds = float(took) if isinstance(took, int | float) else None
    match ran:
        case {"status": "TimeLimitExceeded"}:
            return ProgramResult(printed, None, seconds)
        case {"status": "Finished", "return_code": int(code)}:
            return ProgramResult(printed, code if code >= 0 else 128 - code, seconds)
    raise ValueError(f"a result without its status: {ran!r:.300}")
