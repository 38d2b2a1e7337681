"""Process reward models behind HTTP.

- `json`: the plain contract of remote.py.
- `generate`: an SGLang server with a causal model that judges by label tokens, asked for their log-probs at the steps
  through `/generate`: one request an episode.
- `score`: such a model through SGLang's `/v1/score`: one request an episode, one item a step.

For the last two `format` says how transcripts are read (math_shepherd or rlhflow), and `tokenizer` is the folder or hub
name of the served model's tokenizer. `parallel` requests are under way at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from asyncrl.errors import ConfigError, ScoringError
from asyncrl.scoring.models import math_shepherd, rlhflow
from asyncrl.scoring.models.base import StepScores
from asyncrl.scoring.models.checkpoint import Checkpoint
from asyncrl.scoring.models.encoding import Encode, Encoded
from asyncrl.scoring.models.label_tokens import Labels
from asyncrl.scoring.models.remote import (
    RemoteParams,
    connect,
    numbers,
    plain_contract,
    remote_name,
    require_contract,
)
from asyncrl.scoring.models.service import Service
from asyncrl.scoring.transcript import Transcript

if TYPE_CHECKING:
    from asyncrl.config.schema import ScoringModelConfig


@dataclass(frozen=True)
class Params(RemoteParams):
    """See the module."""

    format: str = "rlhflow"
    tokenizer: str = ""
    parallel: int = 8


class PlainRemotePRM:
    """A server that knows the plain contract."""

    def __init__(self, name: str, service: Service) -> None:
        self.name = name
        self._service = service

    def score(self, transcripts: Sequence[Transcript]) -> list[StepScores]:
        """See ProcessRewardModel."""
        given = plain_contract(self._service, transcripts)
        steps = [sum(segment.is_step for segment in transcript) for transcript in transcripts]
        pairs = zip(given, steps, strict=True)
        return [StepScores.of_probabilities(numbers(each, count, self._service)) for each, count in pairs]


Ask = Callable[[Service, Encoded, Labels], StepScores]


class SGLangPRM:
    """An SGLang server with a causal model that judges by label tokens."""

    def __init__(self, name: str, service: Service, encode: Encode, labels: Labels, ask: Ask, parallel: int) -> None:
        self.name = name
        self._service = service
        self._encode = encode
        self._labels = labels
        self._ask = ask
        self._parallel = parallel

    def score(self, transcripts: Sequence[Transcript]) -> list[StepScores]:
        """See ProcessRewardModel."""
        inputs = [self._encode(transcript) for transcript in transcripts]
        with ThreadPoolExecutor(self._parallel) as pool:
            return list(pool.map(self._score, inputs))

    def _score(self, encoded: Encoded) -> StepScores:
        if not encoded.reads:
            return StepScores.of_logits([])
        return self._ask(self._service, encoded, self._labels)


def load(config: ScoringModelConfig, params: Params, key: str) -> PlainRemotePRM | SGLangPRM:
    """The service at the URL, which is not asked yet. Raises ConfigError."""
    require_contract(params.contract, ("json", *_ASK), key)
    service = connect(config, params, key)
    name = remote_name(service, params)
    if params.contract == "json":
        return PlainRemotePRM(name, service)
    encode, labels = _reading(config, params, key)
    return SGLangPRM(name, service, encode, labels, _ASK[params.contract], params.parallel)


def _reading(config: ScoringModelConfig, params: Params, key: str) -> tuple[Encode, Labels]:
    if not params.tokenizer:
        raise ConfigError(f"{key}.params.tokenizer must be set: the folder or hub name of the served model's tokenizer")
    tokenizer = Checkpoint(replace(config, path=params.tokenizer), f"{key}.params.tokenizer").tokenizer()
    match params.format:
        case "rlhflow":
            return rlhflow.reading(tokenizer, rlhflow.Params(), key)
        case "math_shepherd":
            return math_shepherd.reading(tokenizer, math_shepherd.Params(), key)
    raise ConfigError(f"{key}.params.format={params.format}: use one of rlhflow, math_shepherd")


def ask_generate(service: Service, encoded: Encoded, labels: Labels) -> StepScores:
    """The log-probs of both labels behind each position that is read. Raises ScoringError."""
    reads = [read for (read,) in encoded.reads]
    # The entry of a token holds what is foretold before it, so that one more token makes the last read's entry.
    ids = [*encoded.ids[: reads[-1] + 1], labels[0]]
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": reads[0],
        "token_ids_logprob": list(labels),
    }
    answer = service.post("/generate", body)
    try:
        entries = answer["meta_info"]["input_token_ids_logprobs"]
        found = [{token: logprob for logprob, token, *_ in entries[read + 1 - len(ids)]} for read in reads]
        logits = [each[labels[0]] - each[labels[1]] for each in found]
    except (LookupError, TypeError, ValueError) as error:
        raise ScoringError(
            f"{service.url}/generate gave no log-probs of the labels ({type(error).__name__}: {error}): {answer!r:.200}"
        ) from error
    return StepScores.of_logits(logits)


def ask_score(service: Service, encoded: Encoded, labels: Labels) -> StepScores:
    """The probability of the good label behind each position that is read. Raises ScoringError."""
    reads = [read for (read,) in encoded.reads]
    prompt = reads[0]
    body = {
        "query": list(encoded.ids[:prompt]),
        "items": [list(encoded.ids[prompt : read + 1]) for read in reads],
        "label_token_ids": list(labels),
        "apply_softmax": True,
    }
    answer: Any = service.post("/v1/score", body)
    scores = answer.get("scores") if isinstance(answer, dict) else None
    if not isinstance(scores, list) or len(scores) != len(reads):
        raise ScoringError(f"{service.url}/v1/score must give {len(reads)} scores: {answer!r:.200}")
    pairs = [numbers(pair, 2, service) for pair in scores]
    if not all(math.isclose(sum(pair), 1, abs_tol=1e-3) for pair in pairs):
        raise ScoringError(f"{service.url}/v1/score gave probabilities that do not add up to 1: {pairs!r:.200}")
    return StepScores.of_probabilities([good for good, _ in pairs])


_ASK: dict[str, Ask] = {"generate": ask_generate, "score": ask_score}
