"""Makes SGLang's requests and reads its answers, without a socket.

SGLang computes log-probs after the temperature is applied, but before any filter, such as top_p. So requests set only
the temperature. At temperature 0, SGLang takes the largest logit and reports log-probs at temperature 1, as an engine
must. The sampled tokens include the stop token.

Under a grammar, SGLang first sets the logits of tokens that are not allowed to -inf. So log-probs are renormalised over
the allowed tokens (tests/sglang/test_grammars.py).
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.base import Alternatives, PlacedImage, collapsed
from asyncrl.engine.fleet.server import Segment, ServerFaultError, Span, TokenId, as_segment
from asyncrl.modelling.routing import RoutedTokens, RoutingError, RoutingShape
from asyncrl.types import Sampling

NEUTRAL = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "min_new_tokens": 0,
}
"""Values that turn filters and penalties off. Every request has them, since a server may have been started with other
defaults (`--preferred-sampling-params`)."""


def generate_body(
    rid: str,
    tokens: NDArray[np.int32],
    sampling: Sampling,
    stop: Sequence[int],
    salt: str | None,
    routed_from: int | None = None,
    images: Sequence[PlacedImage] = (),
    by_seed: bool = False,
) -> dict[str, Any]:
    """The body of `/generate`. With `routed_from` it requests the experts of all tokens from this position on.

    `by_seed`: the server was started with `--enable-deterministic-inference`. Then the seed and the position determine
    its random numbers. Without a seed in the request, all requests would have the same seed, and all members of a group
    would be the same episode.
    """
    # SGLang wants one placeholder for each image, and repeats it once for each feature of the image.
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": collapsed(tokens, images).tolist(),
        "return_logprob": True,
        "sampling_params": {
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_new_tokens,
            "stop_token_ids": stop,
            **({} if sampling.grammar is None else {sampling.grammar.kind: sampling.grammar.text}),
            **({"sampling_seed": sampling.seed} if by_seed else {}),
            **NEUTRAL,
        },
    }
    if sampling.alternatives:
        body["top_logprobs_num"] = sampling.alternatives
    if routed_from is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": routed_from}
    if images:
        body["image_data"] = _urls(images)
    return body if salt is None else {**body, "extra_key": salt}


def _urls(images: Sequence[PlacedImage]) -> list[str]:
    """The `data:` URLs of images."""
    # The base64 of a JPEG begins with a slash; without `data:`, SGLang 0.5.23 takes it for the path of a file.
    return [f"data:image;base64,{base64.b64encode(each.data).decode()}" for each in images]


def logprob_body(
    tokens: Sequence[int], salt: str | None, start: int = 1, images: Sequence[PlacedImage] = ()
) -> dict[str, Any]:
    """The body of `/generate` that samples nothing and requests the log-probs of `tokens` from `start` on.

    `images` are before `start`.
    """
    body: dict[str, Any] = {
        "input_ids": collapsed(np.array(tokens, np.int32), images).tolist(),
        "return_logprob": True,
        "logprob_start_len": start - 1,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 0, **NEUTRAL},
    }
    if images:
        body["image_data"] = _urls(images)
    return body if salt is None else {**body, "extra_key": salt}


class _Given(msgspec.Struct, array_like=True, gc=False):
    """The log-prob and the token at a position of the prompt. The prompt's first token has no log-prob."""

    logprob: float | None
    token: TokenId


class _GivenMeta(msgspec.Struct, gc=False):
    input_token_logprobs: list[_Given]


class _GivenAnswer(msgspec.Struct, gc=False):
    meta_info: _GivenMeta


_GIVEN = msgspec.json.Decoder(_GivenAnswer)


def read_logprobs(answer: bytes, tokens: Sequence[int], start: int = 1) -> NDArray[np.float32]:
    """The log-probs [T - start] in an answer to `logprob_body`; nan for a missing one.

    Raises ServerFaultError: the answer has another form, or other tokens.
    """
    try:
        given = _GIVEN.decode(answer).meta_info.input_token_logprobs
    except (ValueError, RecursionError) as error:
        raise ServerFaultError(f"log-probs of /generate are not as expected: {error}: {answer[:300]!r}") from error
    # The answer begins with the token before `start`, without a log-prob; some releases leave this token out.
    wanted = list(tokens[start:])
    last = given[len(given) - len(wanted) :]
    if [each.token for each in last] != wanted:
        raise ServerFaultError(f"/generate gives log-probs of other tokens: {answer[:300]!r}")
    return np.array([each.logprob for each in last], np.float32)


class _Sampled(msgspec.Struct, array_like=True, gc=False):
    """A log-prob, a token and its text. Only the log-prob is read, since `output_ids` has the tokens."""

    logprob: float


class _Likely(msgspec.Struct, array_like=True, gc=False):
    """The log-prob, id and text of one of the most likely tokens."""

    logprob: float
    token: TokenId


class _Finish(msgspec.Struct, gc=False):
    type: str
    matched: Any = None


class _Meta(msgspec.Struct, gc=False):
    finish_reason: _Finish
    weight_version: str
    weight_versions: tuple[Span, ...] | None = None
    output_token_logprobs: list[_Sampled] | None = None
    routed_experts: str | None = None
    output_top_logprobs: list[list[_Likely] | None] | None = None
    prompt_tokens: int | None = None


class _Answer(msgspec.Struct, gc=False):
    output_ids: list[TokenId]
    meta_info: _Meta


_ANSWER = msgspec.json.Decoder(_Answer)


class RoutingRequest(NamedTuple):
    """A request for the experts of the tokens from `start` on, in a model of this `shape`.

    `prompt` is the number of tokens that the request continued.
    """

    shape: RoutingShape
    start: int
    prompt: int


def read_segment(
    answer: bytes,
    sampling: Sampling,
    stop: Sequence[int],
    routing: RoutingRequest | None = None,
    shown: int | None = None,
) -> Segment:
    """Read the segment in an answer of `/generate` to a request that had `sampling` and requested `routing`.

    Experts that do not fit the model are left out, since tokens without experts can be trained, too. A prompt with
    images has `shown` tokens, including the images' tokens.

    Raises ServerFaultError: the answer lacks data that a trajectory needs, or the server saw images of other sizes.
    """
    try:
        decoded = _ANSWER.decode(answer)
    except (ValueError, RecursionError) as error:
        raise ServerFaultError(f"an answer of /generate is not as expected: {error}: {answer[:300]!r}") from error
    tokens, meta = decoded.output_ids, decoded.meta_info
    if tokens and shown is not None and meta.prompt_tokens not in (None, shown):
        raise ServerFaultError(
            f"the server made {meta.prompt_tokens} tokens of a prompt with images that has {shown}: it splits images "
            "differently from the image processor of model.path; start it with the files of model.path, and without "
            "other limits on the pixels of an image"
        )
    if "NaN" in str(meta.finish_reason.matched):
        raise ServerFaultError("the server sampled from logits that are not finite")
    logprobs = [sampled.logprob for sampled in meta.output_token_logprobs or ()]
    # Servers before 0.5.22 name one version for all tokens.
    spans = (Span(meta.weight_version, 0, len(tokens)),) if meta.weight_versions is None else meta.weight_versions
    segment = as_segment(tokens, logprobs, spans, sampling, stop, meta.finish_reason.type)
    if sampling.alternatives:
        segment = replace(segment, alternatives=_alternatives(meta.output_top_logprobs, len(tokens)))
    if routing is None or meta.routed_experts is None:
        return segment
    try:
        return replace(segment, routing=_read_routing(meta.routed_experts, routing, len(tokens)))
    except ValueError as error:
        return replace(segment, routing_fault=str(error))


def _alternatives(given: Sequence[list[_Likely] | None] | None, count: int) -> Alternatives | None:
    """Read the alternatives of `count` tokens. None if the server did not give the same number for each token."""
    known = [each for each in given or () if each]
    if not known or len(known) != count or len({len(each) for each in known}) != 1:
        return None
    tokens = [[one.token for one in each] for each in known]
    logprobs = [[one.logprob for one in each] for each in known]
    return Alternatives(np.array(tokens, np.int32), np.array(logprobs, np.float32))


def _read_routing(text: str, routing: RoutingRequest, sampled: int) -> RoutedTokens:
    """Read the rows of an array int32[tokens, layers, top_k], which `text` has in base64. Layers without a router are
    left out.

    If the request's `start` is after the last row, there are no rows. Raises ValueError, or its subclass RoutingError:
    the rows do not fit the model.
    """
    shape, start = routing.shape, routing.start
    numbers = np.frombuffer(base64.b64decode(text, validate=True), "<i4")
    expected = max(0, routing.prompt + sampled - 1 - start)
    if numbers.size != expected * shape.depth * shape.top_k:
        raise RoutingError(
            f"{numbers.size} numbers came for {expected} tokens in {shape.depth} layers with {shape.top_k} experts"
        )
    experts = numbers.reshape(expected, shape.depth, shape.top_k)[:, list(shape.layers)]
    shape.check(experts)
    return RoutedTokens(start, shape.pack(experts))
