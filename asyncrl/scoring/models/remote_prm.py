"""Process reward models on an HTTP server.

- `json`: see remote.py.
- `generate`: an SGLang server with a causal model that judges by label tokens. One `/generate` request for each episode
  returns the labels' log-probs at the steps.
- `score`: the same kind of model through SGLang's `/v1/score`, with one request for each episode and one item for each
  step.

For `generate` and `score`, `format` names the encoding of transcripts (math_shepherd or rlhflow), and `tokenizer` the
tokenizer of the served model. At most `parallel` requests run at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from asyncrl.config.option import option
from asyncrl.config.schema import ScoringModelConfig
from asyncrl.errors import ScoringError
from asyncrl.scoring.models import math_shepherd, rlhflow
from asyncrl.scoring.models.base import StepScores
from asyncrl.scoring.models.causal import LabelTokens
from asyncrl.scoring.models.encoding import Encoded
from asyncrl.scoring.models.remote import JsonEndpoint, RemoteModel, RemoteParams, connect, served_tokenizer
from asyncrl.scoring.transcript import Transcript


@dataclass(frozen=True)
class Params(RemoteParams):
    contract: str = option("json", "the requests that the server answers", choices=("json", "generate", "score"))
    format: str = option("rlhflow", "the encoding of transcripts", choices=("rlhflow", "math_shepherd"))
    parallel: int = option(8, "requests at once", "[1, inf)")


def load(config: ScoringModelConfig, params: Params, key: str) -> RemoteModel[StepScores]:
    """The model at the URL. Sends no request. Raises ConfigError: a setting is impossible."""
    endpoint, name = connect(config, params, key)
    if params.contract == "json":
        return RemoteModel(name, partial(_json, endpoint))
    tokenizer = served_tokenizer(config, params, key)
    if params.format == "rlhflow":
        encode, labels = rlhflow.reading(tokenizer, rlhflow.Params(), key)
    else:
        encode, labels = math_shepherd.reading(tokenizer, math_shepherd.Params(), key)
    request = _generate if params.contract == "generate" else _score

    def score_one(encoded: Encoded) -> StepScores:
        return request(endpoint, encoded, labels) if encoded.reads else StepScores.of_logits([])

    def score(transcripts: Sequence[Transcript]) -> list[StepScores]:
        inputs = [encode(transcript) for transcript in transcripts]
        with ThreadPoolExecutor(params.parallel) as pool:
            return list(pool.map(score_one, inputs))

    return RemoteModel(name, score)


def _json(endpoint: JsonEndpoint, transcripts: Sequence[Transcript]) -> list[StepScores]:
    steps = [sum(passage.is_step for passage in transcript) for transcript in transcripts]
    pairs = zip(endpoint.post_episodes(transcripts), steps, strict=True)
    return [StepScores.of_probabilities(endpoint.numbers(each, count)) for each, count in pairs]


def _generate(endpoint: JsonEndpoint, encoded: Encoded, labels: LabelTokens) -> StepScores:
    """Score the steps by the log-probs of both labels after each position that is read.

    Raises ScoringError: the answer lacks these log-probs.
    """
    reads = [read for (read,) in encoded.reads]
    # The server reports the prediction after a position in the entry of the next token. So one more token, no matter
    # which, must follow the last position that is read.
    ids = [*encoded.ids[: reads[-1] + 1], labels[0]]
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": reads[0],
        "token_ids_logprob": list(labels),
    }
    answer = endpoint.post("/generate", body)
    try:
        entries = answer["meta_info"]["input_token_ids_logprobs"]
        by_label = [{token: logprob for logprob, token, *_ in entries[read + 1 - len(ids)]} for read in reads]
        logits = [each[labels[0]] - each[labels[1]] for each in by_label]
    except (LookupError, TypeError, ValueError) as error:
        raise ScoringError(
            f"{endpoint.url}/generate gave no log-probs of the labels ({error!r}): {answer!r:.200}"
        ) from error
    return StepScores.of_logits(logits)


def _score(endpoint: JsonEndpoint, encoded: Encoded, labels: LabelTokens) -> StepScores:
    """Score the steps by the good label's probability after each position that is read.

    Raises ScoringError: the answer lacks these probabilities.
    """
    reads = [read for (read,) in encoded.reads]
    prompt = reads[0]
    body = {
        "query": list(encoded.ids[:prompt]),
        "items": [list(encoded.ids[prompt : read + 1]) for read in reads],
        "label_token_ids": list(labels),
        "apply_softmax": True,
    }
    scores = endpoint.post_for_scores("/v1/score", body, len(reads))
    pairs = [endpoint.numbers(pair, 2) for pair in scores]
    if not all(math.isclose(sum(pair), 1, abs_tol=1e-3) for pair in pairs):
        raise ScoringError(f"{endpoint.url}/v1/score gave probabilities that do not add up to 1: {pairs!r:.200}")
    return StepScores.of_probabilities([good for good, _ in pairs])
