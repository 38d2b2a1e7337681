"""Makes vLLM's requests and reads its answers, without a socket.

There are two endpoints. The answers of `/inference/v1/generate` show which weights sampled which token; this endpoint
needs a server started with `--enable-scale-out`. Every server has `/v1/completions`, whose answers do not name the
weights.

Under a grammar, vLLM sets the logits of tokens that are not allowed to -inf before it computes log-probs. So log-probs
are renormalised over the allowed tokens (tests/vllm/test_grammars.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.fleet.server import Segment, ServerFaultError, Span, TokenId, as_segment
from asyncrl.types import Sampling

NEUTRAL = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
"""Values that turn filters off. Every request has them, since by default vLLM uses the model's
generation_config.json."""

_GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}
"""vLLM's names of the kinds of grammars."""

NO_LOGPROB = -9999.0
"""The number that vLLM writes if a log-prob is not a number, or is missing."""


def generate_body(
    rid: str, tokens: NDArray[np.int32], sampling: Sampling, stop: Sequence[int], salt: str | None
) -> dict[str, Any]:
    """The body of `/inference/v1/generate`."""
    parameters = {**_parameters(sampling, stop), "detokenize": False}
    body = {"request_id": rid, "token_ids": tokens.tolist(), "sampling_params": parameters}
    return body if salt is None else {**body, "cache_salt": salt}


def completion_body(
    model: str, rid: str, tokens: NDArray[np.int32], sampling: Sampling, stop: Sequence[int], salt: str | None
) -> dict[str, Any]:
    """The body of `/v1/completions`."""
    body = {"model": model, "request_id": rid, "prompt": tokens.tolist(), "return_token_ids": True}
    body |= _parameters(sampling, stop)
    return body if salt is None else {**body, "cache_salt": salt}


def logprob_body(model: str, tokens: Sequence[int], salt: str | None) -> dict[str, Any]:
    """The body of `/v1/completions` that requests the log-probs of `tokens`. One token is sampled, too, since vLLM
    samples at least one."""
    body = {"model": model, "prompt": list(tokens), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    return {**body, **NEUTRAL} if salt is None else {**body, **NEUTRAL, "cache_salt": salt}


def _parameters(sampling: Sampling, stop: Sequence[int]) -> dict[str, Any]:
    """The sampling parameters of a request. Only end tokens in `stop` end the request, and under a grammar also the
    model's own end tokens.
    """
    # vLLM allows the model's own end tokens once a grammar is complete. If it ignored such a token, it would continue
    # without a grammar. `logprobs` 0 requests log-probs of the sampled tokens only.
    grammar = sampling.grammar
    own = {"temperature": sampling.temperature, "max_tokens": sampling.max_new_tokens, "stop_token_ids": stop}
    if grammar is not None:
        own["structured_outputs"] = {_GRAMMARS[grammar.kind]: grammar.text}
    return {**own, "ignore_eos": grammar is None, "logprobs": 0, **NEUTRAL}


class _Sampled(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct, gc=False):
    """The log-probs in an answer: `content` of `/inference/v1/generate`, or `token_logprobs` of `/v1/completions`."""

    content: list[_Sampled] | None = None
    token_logprobs: list[float] | None = None


class _Choice(msgspec.Struct, gc=False):
    finish_reason: str
    token_ids: list[TokenId] | None
    logprobs: _Logprobs | None
    weight_versions: tuple[Span, ...] | None = None


class _Answer(msgspec.Struct, gc=False):
    choices: tuple[_Choice]


_ANSWER = msgspec.json.Decoder(_Answer)


class _Prompted(msgspec.Struct, gc=False):
    """The log-prob of each token of the prompt, by the token's id; None for the first token."""

    prompt_logprobs: list[dict[str, _Sampled] | None]


class _PromptedAnswer(msgspec.Struct, gc=False):
    choices: tuple[_Prompted]


_PROMPTED = msgspec.json.Decoder(_PromptedAnswer)


def read_logprobs(answer: bytes, tokens: Sequence[int], start: int = 1) -> NDArray[np.float32]:
    """The log-probs [T - start] in an answer to `logprob_body`.

    Raises ServerFaultError: the answer has another form, or other tokens.
    """
    try:
        [choice] = _PROMPTED.decode(answer).choices
        wanted = zip(tokens[start:], choice.prompt_logprobs[start:], strict=True)
        given = [(each or {})[str(token)].logprob for token, each in wanted]
    except (KeyError, ValueError, RecursionError) as error:
        raise ServerFaultError(f"log-probs of a prompt are not as expected: {error!r}: {answer[:300]!r}") from error
    return np.array(given, np.float32)


def read_segment(answer: bytes, sampling: Sampling, stop: Sequence[int], label: str | None = None) -> Segment:
    """Read the segment in an answer of either endpoint to a request with `sampling`.

    `label` names the weights of all tokens; None: the answer names them.

    Raises ServerFaultError: the answer lacks data that a trajectory needs.
    """
    try:
        [choice] = _ANSWER.decode(answer).choices
    except (ValueError, RecursionError) as error:
        raise ServerFaultError(f"an answer is not as expected: {error}: {answer[:300]!r}") from error
    tokens, found = choice.token_ids or [], choice.logprobs or _Logprobs()
    logprobs = found.token_logprobs or [sampled.logprob for sampled in found.content or ()]
    if min(logprobs, default=0.0) <= NO_LOGPROB:
        raise ServerFaultError("some tokens have no log-prob")
    spans = (choice.weight_versions or ()) if label is None else (Span(label, 0, len(tokens)),)
    return as_segment(tokens, logprobs, spans, sampling, stop, choice.finish_reason)
