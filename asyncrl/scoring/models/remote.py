"""What remote models share: their parameters, their name, and the plain JSON contract.

The plain contract, `json`: POST {"episodes": [{"segments": [{"text", "plain", "is_step"}]}]} to the URL is answered by
{"scores": [...]}, one entry an episode, in order: from a process reward model a list of one probability a step, from an
outcome model a number. `plain` is the text without the policy's special tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from asyncrl.errors import ConfigError, ScoringError
from asyncrl.scoring.models.service import Service
from asyncrl.scoring.transcript import Transcript

if TYPE_CHECKING:
    from asyncrl.config.schema import ScoringModelConfig


@dataclass(frozen=True)
class RemoteParams:
    """`version` is stamped on labels; `timeout_s` bounds one request with its retries, and stays under the lease."""

    contract: str = "json"
    version: str = "unversioned"
    timeout_s: float = 20.0
    retries: int = 2


def connect(config: ScoringModelConfig, params: RemoteParams, key: str) -> Service:
    """The service at the URL. Raises ConfigError: it is no URL, or a bound is impossible."""
    url = urlsplit(config.path or "")
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"{key}.path={config.path}: a remote model needs a URL, such as http://127.0.0.1:30000")
    if params.timeout_s <= 0 or params.retries < 0:
        raise ConfigError(f"{key}.params: timeout_s must be positive, and retries 0 or more")
    if config.long_inputs != "refuse":
        raise ConfigError(f"{key}.long_inputs={config.long_inputs}: a remote model refuses by itself what is too long")
    assert config.path is not None
    return Service(config.path, params.timeout_s, params.retries)


def remote_name(service: Service, params: RemoteParams) -> str:
    """Where it is, and the version that the configuration gives it."""
    return f"{service.url.partition('://')[2]}@{params.version}"


def require_contract(contract: str, known: Sequence[str], key: str) -> None:
    """Raises ConfigError: there is no such contract."""
    if contract not in known:
        raise ConfigError(f"{key}.params.contract={contract}: use one of {', '.join(known)}")


def plain_contract(service: Service, transcripts: Sequence[Transcript]) -> list[Any]:
    """One entry a transcript, unchecked. Raises ScoringError: their number is wrong. Raises UnavailableError."""
    episodes = [
        {"segments": [{"text": each.text, "plain": each.plain, "is_step": each.is_step} for each in transcript]}
        for transcript in transcripts
    ]
    answer = service.post("", {"episodes": episodes})
    scores = answer.get("scores") if isinstance(answer, dict) else None
    if not isinstance(scores, list) or len(scores) != len(transcripts):
        raise ScoringError(
            f'{service.url} must answer {{"scores": [...]}} with {len(transcripts)} entries: {answer!r:.200}'
        )
    return scores


def numbers(values: Any, count: int, service: Service) -> list[float]:
    """`count` numbers. Raises ScoringError: it is something else."""
    if not isinstance(values, list) or len(values) != count:
        raise ScoringError(f"{service.url} must give {count} scores, and gave {values!r:.200}")
    if not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        raise ScoringError(f"{service.url} gave scores that are no numbers: {values!r:.200}")
    return [float(value) for value in values]
