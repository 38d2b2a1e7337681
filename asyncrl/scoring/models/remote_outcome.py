"""Outcome models behind HTTP.

- `json`: the plain contract of remote.py.
- `classify`: an SGLang server with a reward model or a sequence classifier, through `/classify`, which gives the logits
  of all labels. Input and score are made as sequence_classifier.py makes them, the input with the served model's
  tokenizer (`tokenizer`, a folder or hub name).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from asyncrl.errors import ConfigError, ScoringError
from asyncrl.scoring.models.checkpoint import Checkpoint
from asyncrl.scoring.models.encoding import Encode
from asyncrl.scoring.models.remote import (
    RemoteParams,
    connect,
    numbers,
    plain_contract,
    remote_name,
    require_contract,
)
from asyncrl.scoring.models.sequence_classifier import encoder
from asyncrl.scoring.models.service import Service
from asyncrl.scoring.transcript import Transcript

if TYPE_CHECKING:
    from asyncrl.config.schema import ScoringModelConfig


@dataclass(frozen=True)
class Params(RemoteParams):
    """`label` is the good one of several."""

    tokenizer: str = ""
    label: int = 1


class RemoteOutcomeModel:
    """A server that scores episodes, by the plain contract where `encode` is None."""

    def __init__(self, name: str, service: Service, encode: Encode | None, label: int) -> None:
        self.name = name
        self._service = service
        self._encode = encode
        self._label = label

    def score(self, transcripts: Sequence[Transcript]) -> list[float]:
        """See OutcomeModel."""
        given = (
            self._classify(transcripts, self._encode) if self._encode else plain_contract(self._service, transcripts)
        )
        scores = numbers(given, len(transcripts), self._service)
        if not all(math.isfinite(score) for score in scores):
            raise ScoringError(f"{self.name} gave scores that are not finite: {scores!r:.200}")
        return scores

    def _classify(self, transcripts: Sequence[Transcript], encode: Encode) -> list[float]:
        ids = [list(encode(transcript).ids) for transcript in transcripts]
        answer = self._service.post("/classify", {"input_ids": ids})
        try:
            return [_score(each["embedding"], self._label) for each in answer]
        except (LookupError, TypeError, ValueError) as error:
            raise ScoringError(f"{self._service.url}/classify gave no scores ({error!r}): {answer!r:.200}") from error


def _score(logits: Sequence[float], label: int) -> float:
    """The only logit, or the probability of `label` among several."""
    if len(logits) == 1:
        return logits[0]
    highest = max(logits)
    weights = [math.exp(logit - highest) for logit in logits]
    return weights[label] / sum(weights)


def load(config: ScoringModelConfig, params: Params, key: str) -> RemoteOutcomeModel:
    """The service at the URL, which is not asked yet. Raises ConfigError."""
    require_contract(params.contract, ("json", "classify"), key)
    service = connect(config, params, key)
    encode = None
    if params.contract == "classify":
        if not params.tokenizer:
            raise ConfigError(f"{key}.params.tokenizer must be set: the folder or hub name of the served model's")
        encode = encoder(Checkpoint(replace(config, path=params.tokenizer), f"{key}.params.tokenizer").tokenizer(), key)
    return RemoteOutcomeModel(remote_name(service, params), service, encode, params.label)
