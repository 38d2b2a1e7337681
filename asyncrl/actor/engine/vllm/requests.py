"""What vLLM is asked and what it answers, without a socket.

There are two ways to ask. `/inference/v1/generate` tells which weights sampled which token; a server has it that was
started with `--enable-scale-out`. `/v1/completions` is always there and tells nothing of weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.actor.engine.fleet.server import Segment, ServerFaultError, Span, finish_of, read_spans
from asyncrl.types import Sampling

NEUTRAL = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
"""Named in every request: what is left out comes from the `generation_config.json` of the model's folder."""

NO_LOGPROB = -9999.0
"""What vLLM writes instead of a log-prob that is not a number, or is not there."""


def generate_body(
    rid: str, tokens: NDArray[np.int32], sampling: Sampling, stop: Sequence[int], salt: str | None
) -> dict[str, Any]:
    """The body of `/inference/v1/generate`."""
    parameters = {**_parameters(sampling, stop), "detokenize": False}
    return _salted({"request_id": rid, "token_ids": tokens.tolist(), "sampling_params": parameters}, salt)


def completion_body(
    model: str, rid: str, tokens: NDArray[np.int32], sampling: Sampling, stop: Sequence[int], salt: str | None
) -> dict[str, Any]:
    """The body of `/v1/completions`."""
    asked = {"model": model, "request_id": rid, "prompt": tokens.tolist(), "return_token_ids": True}
    return _salted({**asked, **_parameters(sampling, stop)}, salt)


def read_segment(answer: Any, limit: int, stop: Sequence[int], label: str | None = None) -> Segment:
    """The segment in an answer to either. `label` is that of all its tokens where the answer does not tell.

    Raises ServerFaultError: the answer lacks what a trajectory needs.
    """
    try:
        [choice] = answer["choices"]
        tokens = np.array(choice["token_ids"] or [], np.int32)
        logprobs = np.array(_logprobs(choice["logprobs"] or {}), np.float32)
        spans = _spans(choice, len(tokens), label)
        reason = choice["finish_reason"]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ServerFaultError(f"an answer is not as expected: {error!r}: {answer!r:.300}") from error
    usable = np.isfinite(logprobs) & (logprobs > NO_LOGPROB)
    if len(tokens) != len(logprobs) or not usable.all():
        raise ServerFaultError(f"{len(tokens)} tokens have {usable.sum()} log-probs")
    return Segment(tokens, logprobs, spans, finish_of(tokens, limit, stop, reason))


def _parameters(sampling: Sampling, stop: Sequence[int]) -> dict[str, Any]:
    """`logprobs` 0 asks for those of the sampled tokens alone. Of end marks only those in `stop` count."""
    return {
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(stop),
        "ignore_eos": True,
        "logprobs": 0,
        **NEUTRAL,
    }


def _salted(body: dict[str, Any], salt: str | None) -> dict[str, Any]:
    return body if salt is None else {**body, "cache_salt": salt}


def _spans(choice: Mapping[str, Any], count: int, label: str | None) -> tuple[Span, ...]:
    return read_spans(choice["weight_versions"] or [], count) if label is None else (Span(label, 0, count),)


def _logprobs(told: Mapping[str, Any]) -> list[float]:
    if "content" in told:
        return [each["logprob"] for each in told["content"] or []]
    return told.get("token_logprobs") or []
