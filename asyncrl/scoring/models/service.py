"""A scorer behind HTTP: JSON posted with bounded retries and within a time limit, on the standard library alone."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from asyncrl.errors import ScoringError

_FIRST_PAUSE_S = 0.1
_CHUNK = 1 << 16
_MAX_BYTES = 1 << 28


class Service:
    """Posts JSON under a base URL.

    A connection that fails, a status of 429 and one from 500 on are tried again, at most `retries` times and after a
    growing pause, as long as the time limit of the call allows; other statuses are final.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float,
        retries: int,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._retries = retries
        self._clock = clock
        self._pause = pause

    def post(self, path: str, body: Any) -> Any:
        """The JSON that answers. Raises ScoringError: there is none in time, or it is refused."""
        url, data = self.url + path, json.dumps(body).encode()
        deadline = self._clock() + self._timeout_s
        for attempt in range(self._retries + 1):
            try:
                return json.loads(self._ask(url, data, deadline))
            except urllib.error.HTTPError as error:
                said = error.read(300).decode(errors="replace")
                failure = f"status {error.code}: {said}"
                if error.code != 429 and error.code < 500:
                    break
            except (OSError, http.client.HTTPException) as error:
                failure = f"{type(error).__name__}: {error}"
            except ValueError as error:
                failure = f"the answer is not JSON: {error}"
                break
            wait = _FIRST_PAUSE_S * 2**attempt
            if attempt == self._retries or self._clock() + wait >= deadline:
                break
            self._pause(wait)
        raise ScoringError(f"{url} gave no scores ({failure})")

    def _ask(self, url: str, data: bytes, deadline: float) -> bytes:
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="POST")
        answer = b""
        with urllib.request.urlopen(request, timeout=self._left(deadline)) as response:
            while chunk := response.read1(_CHUNK):
                answer += chunk
                self._left(deadline)
                if len(answer) > _MAX_BYTES:
                    raise ValueError(f"it is longer than {_MAX_BYTES} bytes")
            if response.length:
                raise ConnectionError(f"the answer breaks off {response.length} bytes before its end")
        return answer

    def _left(self, deadline: float) -> float:
        left = deadline - self._clock()
        if left <= 0:
            raise TimeoutError(f"no complete answer within {self._timeout_s} s")
        return left
