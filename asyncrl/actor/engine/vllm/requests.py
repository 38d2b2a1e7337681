"""What vLLM is asked and what it answers, without a socket, after the documentation of its OpenAI-compatible server.

The server must run with `--logprobs-mode processed_logprobs`: only then do log-probs come after temperature. Sampling
defaults that the model's folder may name are overridden one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.actor.engine.fleet.server import Segment, ServerFaultError, Span, finish_of
from asyncrl.types import Sampling


def completion_body(
    model: str, rid: str, tokens: NDArray[np.int32], sampling: Sampling, stop: Sequence[int], salt: str | None
) -> dict[str, Any]:
    """The body of `/v1/completions`; `logprobs` 0 asks for those of the sampled tokens alone."""
    body: dict[str, Any] = {
        "model": model,
        "request_id": rid,
        "prompt": tokens.tolist(),
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "stop_token_ids": list(stop),
        "logprobs": 0,
        "return_token_ids": True,
        "skip_special_tokens": False,
    }
    return body if salt is None else {**body, "cache_salt": salt}


def read_completion(answer: Any, limit: int, stop: Sequence[int], label: str) -> Segment:
    """The segment in an answer of `/v1/completions`; `label` is that of all its tokens.

    Raises ServerFaultError: the answer lacks what a trajectory needs.
    """
    try:
        [choice] = answer["choices"]
        tokens = np.array(choice["token_ids"] or [], np.int32)
        logprobs = np.array((choice["logprobs"] or {}).get("token_logprobs") or [], np.float32)
        reason = choice["finish_reason"]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ServerFaultError(
            f"an answer of /v1/completions is not as expected: {error!r}: {answer!r:.300}"
        ) from error
    if len(tokens) != len(logprobs) or not np.isfinite(logprobs).all():
        raise ServerFaultError(f"{len(tokens)} tokens have {np.isfinite(logprobs).sum()} finite log-probs")
    return Segment(tokens, logprobs, (Span(label, 0, len(tokens)),), finish_of(tokens, limit, stop, reason))
