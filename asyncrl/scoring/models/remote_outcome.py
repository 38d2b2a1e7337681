"""Outcome models behind HTTP.

- `json`: see remote.py.
- `classify`: an SGLang server with a reward model or a sequence classifier, whose `/classify` gives the logits of all
  labels. The input and the score are those of sequence_classifier.py, and `tokenizer` is that of the served model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.config.option import option
from asyncrl.config.schema import ScoringModelConfig
from asyncrl.errors import ScoringError
from asyncrl.scoring.models.encoding import Encode
from asyncrl.scoring.models.remote import JsonEndpoint, RemoteParams, connect, served_tokenizer
from asyncrl.scoring.models.sequence_classifier import reading
from asyncrl.scoring.transcript import Transcript


@dataclass(frozen=True)
class Params(RemoteParams):
    contract: str = option("json", "the requests that the server answers", choices=("json", "classify"))
    label: int = option(1, "the good label of several", "[0, inf)")


class RemoteOutcomeModel:
    """A server that scores episodes; without `encode` by the contract `json`."""

    def __init__(self, name: str, endpoint: JsonEndpoint, encode: Encode | None, label: int) -> None:
        self.name = name
        self._endpoint = endpoint
        self._encode = encode
        self._label = label

    def score(self, transcripts: Sequence[Transcript]) -> list[float]:
        """See RewardModel."""
        encode = self._encode
        given = self._classify(transcripts, encode) if encode else self._endpoint.post_episodes(transcripts)
        scores = self._endpoint.numbers(given, len(transcripts))
        if not all(math.isfinite(score) for score in scores):
            raise ScoringError(f"{self.name} gave scores that are not finite: {scores!r:.200}")
        return scores

    def _classify(self, transcripts: Sequence[Transcript], encode: Encode) -> list[float]:
        ids = [list(encode(transcript).ids) for transcript in transcripts]
        answer = self._endpoint.post("/classify", {"input_ids": ids})
        try:
            return [_score(each["embedding"], self._label) for each in answer]
        except (LookupError, TypeError, ValueError) as error:
            raise ScoringError(f"{self._endpoint.url}/classify gave no scores ({error!r}): {answer!r:.200}") from error


def _score(logits: Sequence[float], label: int) -> float:
    """The only logit, or the probability of `label` among several."""
    if len(logits) == 1:
        return logits[0]
    highest = max(logits)
    weights = [math.exp(logit - highest) for logit in logits]
    return weights[label] / sum(weights)


def load(config: ScoringModelConfig, params: Params, key: str) -> RemoteOutcomeModel:
    """The model at the URL, to which nothing is sent yet. Raises ConfigError."""
    endpoint, name = connect(config, params, key)
    encode = reading(served_tokenizer(config, params, key), key) if params.contract == "classify" else None
    return RemoteOutcomeModel(name, endpoint, encode, params.label)
