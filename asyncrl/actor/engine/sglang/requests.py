"""What SGLang is asked and what it answers, without a socket.

Log-probs come after temperature and before any filter, so only the temperature is ever set. At temperature 0 SGLang
takes the largest logit and tells log-probs at temperature 1, as an engine must. The stop token is among the sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.actor.engine.fleet.server import Segment, ServerFaultError, Span, finish_of, read_spans
from asyncrl.types import Sampling

NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
"""Named in every request, since a server may have been started with other defaults."""


def generate_body(
    rid: str, tokens: NDArray[np.int32], sampling: Sampling, stop: Sequence[int], salt: str | None
) -> dict[str, Any]:
    """The body of `/generate`."""
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": tokens.tolist(),
        "return_logprob": True,
        "sampling_params": {
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_new_tokens,
            "stop_token_ids": list(stop),
            **NEUTRAL,
        },
    }
    return body if salt is None else {**body, "extra_key": salt}


def read_segment(answer: Any, limit: int, stop: Sequence[int]) -> Segment:
    """The segment in an answer of `/generate`, which was asked for `limit` tokens.

    Raises ServerFaultError: the answer lacks what a trajectory needs.
    """
    try:
        meta = answer["meta_info"]
        pairs = meta.get("output_token_logprobs") or []
        tokens = np.array([pair[1] for pair in pairs], np.int32)
        logprobs = np.array([pair[0] for pair in pairs], np.float32)
        reason = meta["finish_reason"]
        spans = _spans(meta, len(tokens))
        if len(answer["output_ids"]) != len(tokens):
            raise ValueError(f"{len(answer['output_ids'])} tokens have {len(tokens)} log-probs")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ServerFaultError(f"an answer of /generate is not as expected: {error!r}: {answer!r:.300}") from error
    if not np.isfinite(logprobs).all() or "NaN" in str(reason.get("matched")):
        raise ServerFaultError("the server gives log-probs that are not finite")
    return Segment(tokens, logprobs, spans, finish_of(tokens, limit, stop, reason["type"]))


def _spans(meta: Mapping[str, Any], count: int) -> tuple[Span, ...]:
    """Which weights sampled which tokens; servers before 0.5.22 name one version for all."""
    if "weight_versions" not in meta:
        return (Span(str(meta["weight_version"]), 0, count),)
    return read_spans(meta["weight_versions"], count)
