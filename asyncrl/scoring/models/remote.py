"""The code that all models on HTTP servers share: parameters, the client that posts JSON, and the contract `json`.

In the contract `json`, the request is POST {"episodes": [{"segments": [{"text", "plain", "is_step"}]}]}. The server
answers {"scores": [...]}, with one entry for each episode, in order. For a process reward model, an entry is a list
with one probability for each step; for an outcome model, it is a number. `plain` is the text without the policy's
special tokens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic
from urllib.parse import urlsplit

import aiohttp

from asyncrl.config.option import option
from asyncrl.config.schema import ScoringModelConfig
from asyncrl.errors import ConfigError, ScoringError, UnavailableError
from asyncrl.masking import masked_text
from asyncrl.scoring.models.base import Score
from asyncrl.scoring.models.checkpoint import Checkpoint
from asyncrl.scoring.transcript import Transcript

_FIRST_PAUSE_S = 0.1
_CHUNK = 1 << 16
_MAX_BYTES = 1 << 28
_REFUSED = (400, 413, 422)
"""Statuses that blame the request. All others, except 200, blame the server or the network."""


@dataclass(frozen=True)
class RemoteParams:
    contract: str
    version: str = option("unversioned", "recorded on labels")
    timeout_s: float = option(20.0, "seconds for one request with its retries; keep it under the lease", "(0, inf)")
    retries: int = option(2, "how often a failed request is sent again", "[0, inf)")
    tokenizer: str | None = option(None, "folder or hub name of the served model's tokenizer, for SGLang's contracts")


@dataclass(frozen=True)
class RemoteModel(Generic[Score]):
    """A RewardModel whose `score` sends requests."""

    name: str
    score: Callable[[Sequence[Transcript]], list[Score]]


class JsonEndpoint:
    """Posts JSON under a base URL.

    After a broken connection, status 429 or a status from 500 on, the request is sent again, at most `retries` times
    and after a growing pause. `timeout_s` limits the total time of a request with its retries.
    """

    def __init__(
        self, url: str, timeout_s: float, retries: int, pause: Callable[[float], Awaitable[object]] = asyncio.sleep
    ) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._retries = retries
        self._pause = pause

    def post(self, path: str, body: Any) -> Any:
        """The JSON of the answer.

        Raises ScoringError: the server refuses the request, or the answer is not JSON. Raises UnavailableError: no
        complete answer arrived in time.
        """
        return asyncio.run(self._post(self.url + path, json.dumps(body).encode()))

    async def _post(self, url: str, data: bytes) -> Any:
        failure = ""
        try:
            async with asyncio.timeout(self._timeout_s), aiohttp.ClientSession(trust_env=True) as session:
                for attempt in range(self._retries + 1):
                    if attempt:
                        await self._pause(_FIRST_PAUSE_S * 2 ** (attempt - 1))
                    try:
                        status, answer = await _request(session, url, data)
                    except (aiohttp.ClientError, OSError) as error:
                        failure = f"{type(error).__name__}: {error}"
                        continue
                    if status == 200:
                        return json.loads(answer)
                    failure = f"status {status}: {answer[:300].decode(errors='replace')}"
                    if status in _REFUSED:
                        raise ScoringError(f"{url} gave no scores ({failure})")
                    if status != 429 and status < 500:
                        break
        except (ValueError, RecursionError) as error:
            raise ScoringError(f"{url} gave no scores (the answer is not JSON: {error})") from error
        except TimeoutError:
            failure = f"no whole answer within {self._timeout_s:g} s{failure and ', before that '}{failure}"
        raise UnavailableError(f"{url} gave no scores ({failure})")

    def post_episodes(self, transcripts: Sequence[Transcript]) -> list[Any]:
        """One unchecked entry for each transcript, by the contract `json`. Raises: see `post_for_scores`."""
        episodes = [
            {"segments": [{"text": each.text, "plain": each.plain, "is_step": each.is_step} for each in transcript]}
            for transcript in transcripts
        ]
        return self.post_for_scores("", {"episodes": episodes}, len(transcripts))

    def post_for_scores(self, path: str, body: Any, count: int) -> list[Any]:
        """The `count` unchecked entries of `scores` in the answer.

        Raises: see `post`. Also raises ScoringError: the answer has another number of entries.
        """
        answer = self.post(path, body)
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if not isinstance(scores, list) or len(scores) != count:
            raise ScoringError(
                f'{self.url}{path} must answer {{"scores": [...]}} with {count} entries: {answer!r:.200}'
            )
        return scores

    def numbers(self, values: Any, count: int) -> list[float]:
        """`values` as `count` numbers. Raises ScoringError: `values` has another form."""
        if not isinstance(values, list) or len(values) != count:
            raise ScoringError(f"{self.url} must give {count} scores, and gave {values!r:.200}")
        if not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
            raise ScoringError(f"{self.url} gave scores that are not numbers: {values!r:.200}")
        return [float(value) for value in values]


async def _request(session: aiohttp.ClientSession, url: str, data: bytes) -> tuple[int, bytes]:
    unbounded, headers = aiohttp.ClientTimeout(total=None), {"Content-Type": "application/json"}
    answer = bytearray()
    async with session.post(url, data=data, headers=headers, timeout=unbounded, allow_redirects=False) as response:
        async for chunk in response.content.iter_chunked(_CHUNK):
            answer += chunk
            if len(answer) > _MAX_BYTES:
                raise ScoringError(f"{url} gave no scores (the answer is longer than {_MAX_BYTES} bytes)")
    return response.status, bytes(answer)


def connect(config: ScoringModelConfig, params: RemoteParams, key: str) -> tuple[JsonEndpoint, str]:
    """The endpoint and the model's name. Sends no request. Raises ConfigError: a setting is impossible."""
    path = config.path or ""
    if urlsplit(path).scheme not in ("http", "https") or not urlsplit(path).hostname:
        raise ConfigError(f"{key}.path={config.path}: a remote model needs a URL, such as http://127.0.0.1:30000")
    if config.long_inputs != "refuse":
        raise ConfigError(f"{key}.long_inputs={config.long_inputs}: a remote model refuses inputs that are too long")
    endpoint = JsonEndpoint(path, params.timeout_s, params.retries)
    return endpoint, f"{masked_text(endpoint.url).partition('://')[2]}@{params.version}"


def served_tokenizer(config: ScoringModelConfig, params: RemoteParams, key: str) -> Any:
    """The tokenizer of the served model. Raises ConfigError: it is not set, or cannot be loaded."""
    key = f"{key}.params.tokenizer"
    if params.tokenizer is None:
        raise ConfigError(f"{key} must be set: the folder or hub name of the served model's tokenizer")
    return Checkpoint(replace(config, path=params.tokenizer), key).tokenizer()
