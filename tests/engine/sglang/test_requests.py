"""Requests to SGLang and its answers, which have the shapes that real servers gave."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import numpy as np
import pytest

from asyncrl.engine.fleet.server import Segment, ServerFaultError, Span
from asyncrl.engine.sglang.requests import (
    NEUTRAL,
    RoutingRequest,
    generate_body,
    logprob_body,
    read_logprobs,
    read_segment,
)
from asyncrl.modelling.routing import RoutingShape
from asyncrl.types import Grammar, Sampling


def answer(tokens: list[int], finish: dict[str, Any], **meta: Any) -> bytes:
    pairs = [[-0.5 - index, token, None] for index, token in enumerate(tokens)]
    known = {"output_token_logprobs": pairs, "finish_reason": finish, "weight_version": "3-me"}
    return json.dumps({"output_ids": tokens, "meta_info": {**known, **meta}}).encode()


def test_a_request_sets_the_temperature_and_nothing_that_bends_logprobs() -> None:
    body = generate_body("r", np.array([1, 2], np.int32), Sampling(0.7, 9), (5,), "3-me")
    sampling = body.pop("sampling_params")
    assert sampling == {"temperature": 0.7, "max_new_tokens": 9, "stop_token_ids": (5,), **NEUTRAL}
    penalties = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "min_new_tokens": 0}
    assert sampling.items() >= {"top_p": 1.0, "top_k": -1, "min_p": 0.0, **penalties}.items()
    assert body == {"rid": "r", "input_ids": [1, 2], "return_logprob": True, "extra_key": "3-me"}
    assert "extra_key" not in generate_body("r", np.array([1], np.int32), Sampling(), (), None)


def test_the_likeliest_tokens_are_asked_for_only_where_they_are_wanted_and_come_only_whole() -> None:
    wanted = Sampling(1.0, 3, alternatives=2)
    assert generate_body("r", np.array([1], np.int32), wanted, (), None)["top_logprobs_num"] == 2
    pair = [[-0.1, 7, None], [-2.5, 9, None]]
    for given, whole in (([pair, pair], True), ([pair, None], False), ([pair], False), (None, False)):
        segment = read_segment(answer([7, 9], {"type": "length"}, output_top_logprobs=given), wanted, ())
        assert (segment.alternatives is not None) is whole
        if segment.alternatives is not None:
            assert segment.alternatives.tokens.tolist() == [[7, 9]] * 2
            np.testing.assert_allclose(segment.alternatives.logprobs, [[-0.1, -2.5]] * 2, rtol=1e-6)


def test_spans_tell_which_weights_sampled_which_token() -> None:
    versions = [{"version": "2-me", "start": 0, "end": 2}, {"version": "3-me", "start": 2, "end": 3}]
    segment = read_segment(answer([7, 8, 9], {"type": "length"}, weight_versions=versions), Sampling(1.0, 3), ())
    assert segment.tokens.tolist() == [7, 8, 9]
    assert segment.logprobs.tolist() == [-0.5, -1.5, -2.5]
    assert segment.spans == (Span("2-me", 0, 2), Span("3-me", 2, 3))


def test_without_spans_one_label_is_that_of_all() -> None:
    assert read_segment(answer([7, 8], {"type": "length"}), Sampling(1.0, 2), ()).spans == (Span("3-me", 0, 2),)


@pytest.mark.parametrize(
    ("tokens", "finish", "limit", "expected"),
    [
        ([7, 5], {"type": "stop", "matched": 5}, 9, "stop"),
        ([7, 6], {"type": "stop", "matched": 6}, 9, "cut"),
        ([7, 6], {"type": "length", "length": 2}, 2, "length"),
        ([7, 6], {"type": "length", "length": 2}, 9, "length"),
        ([7, 6], {"type": "abort", "message": "Aborted"}, 9, "cut"),
        ([7, 5], {"type": "abort", "message": "Aborted"}, 9, "stop"),
        ([7, 6], {"type": "abort", "message": "Aborted"}, 2, "length"),
        ([], {"type": "abort", "message": "Abort in waiting queue"}, 2, "cut"),
    ],
)
def test_how_a_segment_ends(tokens: list[int], finish: dict[str, Any], limit: int, expected: str) -> None:
    segment = read_segment(answer(tokens, finish), Sampling(1.0, limit), (5,))
    assert segment.finish == expected
    assert segment.tokens.dtype == np.int32
    assert segment.logprobs.dtype == np.float32


def test_a_server_that_makes_other_tokens_of_images_is_a_fault() -> None:
    given = answer([7], {"type": "length"}, prompt_tokens=9)
    for right in (9, None):
        assert read_segment(given, Sampling(1.0, 1), (), shown=right).tokens.tolist() == [7]
    with pytest.raises(ServerFaultError, match="made 9 tokens of a prompt with images that has 5"):
        read_segment(given, Sampling(1.0, 1), (), shown=5)
    aborted = answer([], {"type": "abort"}, prompt_tokens=0)
    assert read_segment(aborted, Sampling(1.0, 1), (), shown=5).finish == "cut"


@pytest.mark.parametrize(
    "broken",
    [
        b"just text",
        b'{"output_ids": [1]}',
        b'{"more": ' + b"[" * 10**5,
        answer([1], {"type": "length"}, output_token_logprobs=[[None, 1, None]]),
        answer([1], {"type": "stop", "matched": "NaN happened"}),
        answer([-1], {"type": "length"}),
        answer([1 << 31], {"type": "length"}),
    ],
)
def test_an_answer_that_lacks_what_a_trajectory_needs_is_a_fault(broken: bytes) -> None:
    with pytest.raises(ServerFaultError):
        read_segment(broken, Sampling(1.0, 9), ())


@pytest.mark.parametrize("kind", ["json_schema", "regex", "ebnf"])
def test_a_grammar_goes_under_its_kind(kind: str) -> None:
    sampling = Sampling(1.0, 9, Grammar(kind, "text"))
    assert generate_body("r", np.array([1], np.int32), sampling, (), None)["sampling_params"][kind] == "text"


def test_under_a_grammar_the_servers_own_end_of_turn_ends_it() -> None:
    sampling = Sampling(1.0, 9, Grammar("regex", "a"))
    assert read_segment(answer([7, 6], {"type": "stop", "matched": 6}), sampling, (5,)).finish == "stop"
    assert read_segment(answer([7, 6], {"type": "abort"}), sampling, (5,)).finish == "cut"
    assert read_segment(answer([7, 6], {"type": "length"}), sampling, (5,)).finish == "length"


def test_logprobs_may_be_of_the_last_tokens_only() -> None:
    tokens = [4, 5, 6, 7]
    assert logprob_body(tokens, None, start=2)["logprob_start_len"] == 1
    for given in ([[None, 5], [-0.5, 6], [-1.5, 7]], [[-0.5, 6], [-1.5, 7]]):
        told = json.dumps({"meta_info": {"input_token_logprobs": given}}).encode()
        assert read_logprobs(told, tokens, start=2).tolist() == [-0.5, -1.5]
    with pytest.raises(ServerFaultError, match="other tokens"):
        read_logprobs(told, [4, 5, 5, 7], start=2)


def test_the_logprobs_of_no_tokens_are_none() -> None:
    for given in ([], [[-0.5, 5]]):
        told = json.dumps({"meta_info": {"input_token_logprobs": given}}).encode()
        assert read_logprobs(told, [4, 5], start=2).tolist() == []


SHAPE = RoutingShape((1, 2), 3, 8, 2)
PROMPT, SAMPLED, START = 5, 3, 4


def told(numbers: Any) -> dict[str, str]:
    return {"routed_experts": base64.b64encode(np.asarray(numbers, "<i4").tobytes()).decode()}


def with_routing(**meta: Any) -> Segment:
    request = RoutingRequest(SHAPE, START, PROMPT)
    return read_segment(answer([7] * SAMPLED, {"type": "length"}, **meta), Sampling(1.0, SAMPLED), (), request)


def test_a_request_for_experts_says_from_which_token_on() -> None:
    body = generate_body("r", np.array([1, 2], np.int32), Sampling(), (), None, 1)
    assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, 1)
    assert "return_routed_experts" not in generate_body("r", np.array([1, 2], np.int32), Sampling(), (), None)


def test_experts_are_those_of_layers_with_routers_of_all_tokens_but_the_last() -> None:
    numbers = np.random.default_rng(0).random((3, 3, 8)).argsort(-1)[..., :2]
    numbers[:, 0] = 77
    segment = with_routing(**told(numbers))
    assert segment.routing is not None
    assert (segment.routing.start, segment.routing.end) == (START, PROMPT + SAMPLED - 1)
    np.testing.assert_array_equal(SHAPE.unpack(segment.routing.rows), numbers[:, 1:])
    assert with_routing().routing is None


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (told(np.zeros((3, 3, 2))), "twice"),
        (told([[[0, 1]] * 3] * 2), "12 numbers came for 3 tokens in 3 layers"),
        (told([[[0, 1]] * 3] * 4), "24 numbers came"),
        (told([[[0, 8]] * 3] * 3), "to 8; the model has 8"),
        (told([[[0, -1]] * 3] * 3), "from -1"),
        ({"routed_experts": "AAA"}, "padding"),
        ({"routed_experts": "AAAA"}, "multiple"),
        ({"routed_experts": "?"}, "."),
        ({"routed_experts": "\u00e9"}, "."),
    ],
)
def test_experts_that_are_none_of_the_models_are_left_out_with_a_reason_and_tokens_stay(
    told: dict[str, str], reason: str
) -> None:
    segment = with_routing(**told)
    assert segment.tokens.tolist() == [7] * SAMPLED
    assert segment.routing is None
    assert re.search(reason, segment.routing_fault)
