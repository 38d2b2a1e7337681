"""Outcome models on an HTTP server.

- `json`: see remote.py.
- `classify`: an SGLang server with a reward model or a sequence classifier, whose `/classify` gives the logits of all
  labels. The input and the score are as in sequence_classifier.py, and `tokenizer` is the served model's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from asyncrl.config.option import option
from asyncrl.config.schema import ScoringModelConfig
from asyncrl.errors import ScoringError
from asyncrl.scoring.models.encoding import Encode
from asyncrl.scoring.models.remote import JsonEndpoint, RemoteModel, RemoteParams, connect, served_tokenizer
from asyncrl.scoring.models.sequence_classifier import reading
from asyncrl.scoring.transcript import Transcript


@dataclass(frozen=True)
class Params(RemoteParams):
    contract: str = option("json", "the requests that the server answers", choices=("json", "classify"))
    label: int = option(1, "the index of the good label, if the model has several labels", "[0, inf)")


def load(config: ScoringModelConfig, params: Params, key: str) -> RemoteModel[float]:
    """The model at the URL. Sends no request. Raises ConfigError: a setting is impossible."""
    endpoint, name = connect(config, params, key)
    ask: Callable[[Sequence[Transcript]], list[Any]] = endpoint.post_episodes
    if params.contract == "classify":
        encode = reading(served_tokenizer(config, params, key), key)
        ask = partial(_classify, endpoint, encode, params.label)

    def score(transcripts: Sequence[Transcript]) -> list[float]:
        scores = endpoint.numbers(ask(transcripts), len(transcripts))
        if not all(math.isfinite(score) for score in scores):
            raise ScoringError(f"{name} gave scores that are not finite: {scores!r:.200}")
        return scores

    return RemoteModel(name, score)


def _classify(endpoint: JsonEndpoint, encode: Encode, label: int, transcripts: Sequence[Transcript]) -> list[float]:
    ids = [list(encode(transcript).ids) for transcript in transcripts]
    answer = endpoint.post("/classify", {"input_ids": ids})
    try:
        return [_score(each["embedding"], label) for each in answer]
    except (LookupError, TypeError, ValueError) as error:
        raise ScoringError(f"{endpoint.url}/classify gave no scores ({error!r}): {answer!r:.200}") from error


def _score(logits: Sequence[float], label: int) -> float:
    """The logit if there is only one, else the probability of `label`."""
    if len(logits) == 1:
        return logits[0]
    highest = max(logits)
    weights = [math.exp(logit - highest) for logit in logits]
    return weights[label] / sum(weights)
