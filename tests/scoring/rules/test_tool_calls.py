import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ScoringError
from asyncrl.scoring.rules.tool_calls import tool_calls
from asyncrl.types import Role, ToolCall, Turn
from tests.scoring.fakes import episode
from tests.scoring.rules.tables.judging import LEAST


def call(name, **arguments):
    return {"name": name, "arguments": arguments}


def judge(expected, made, **options):
    """The verdict on an episode that makes each of the calls in a turn of its own."""
    turns = [("prompt", "?"), *([("assistant", "a")] * max(1, len(made)))]
    _, trajectory = episode(*turns)
    calls_left = iter(made)
    with_calls = [
        Turn(turn.start, turn.end, turn.role, "stop", [ToolCall(**each)] if (each := next(calls_left, None)) else ())
        if turn.role is Role.ASSISTANT
        else turn
        for turn in trajectory.turns
    ]
    task, trajectory = episode(*turns, truth=json.dumps(expected), turns=tuple(with_calls))
    return tool_calls(task=task, answer="", trajectory=trajectory, **options)


ADD, FIND = call("add", a=1, b=2.0), call("find", text="x", where={"in": ["p", "q"]})


@pytest.mark.parametrize(
    ("made", "options", "score"),
    [
        ([ADD, FIND], {}, 1.0),
        ([FIND, ADD], {}, 0.0),
        ([FIND, ADD], {"order": False}, 1.0),
        ([ADD], {}, 0.0),
        ([ADD], {"partial": True}, 0.5),
        ([ADD, ADD, FIND], {}, 0.0),
        ([ADD, ADD, FIND], {"extra_calls": True}, 1.0),
        ([ADD, ADD, FIND], {"partial": True}, 2 / 3),
        ([ADD, ADD, FIND], {"partial": True, "extra_calls": True}, 1.0),
        ([call("add", a=1.0, b=2), FIND], {}, 1.0),
        ([call("add", a=1.001, b=2), FIND], {}, 0.0),
        ([call("add", a=1.001, b=2), FIND], {"tolerance": 0.01}, 1.0),
        ([call("add", a="1", b=2), FIND], {}, 0.0),
        ([call("add", a=True, b=2), FIND], {}, 0.0),
        ([call("add", a=1, b=2, c=3), FIND], {}, 0.0),
        ([call("add", a=1, b=2, c=3), FIND], {"arguments": "subset"}, 1.0),
        ([call("add", a=1), FIND], {"arguments": "subset"}, 0.0),
        ([call("add"), call("find")], {"arguments": "ignore"}, 1.0),
        ([call("add"), call("seek")], {"arguments": "ignore"}, 0.0),
        ([ADD, call("find", text=" x ", where={"in": ["p", "q"]})], {}, 1.0),
        ([ADD, call("find", text="x", where={"in": ["q", "p"]})], {}, 0.0),
        ([], {}, 0.0),
    ],
)
def test_calls_are_compared_as_the_options_say(made, options, score):
    assert judge([ADD, FIND], made, **options)["score"] == pytest.approx(score)


def test_of_several_branches_the_last_ones_calls_count_or_all_as_the_option_says():
    turns = (
        ("prompt", "?"),
        ("assistant", "call a"),
        ("prompt", "so far"),
        ("assistant", "call b"),
        ("assistant", "done"),
    )
    task, trajectory = episode(*turns, truth=json.dumps([call("calculator")]))
    assert tool_calls(task=task, answer="", trajectory=trajectory)["score"] == 1.0
    task, trajectory = episode(*turns, truth=json.dumps([call("calculator")] * 2))
    assert tool_calls(task=task, answer="", trajectory=trajectory)["score"] == 0.0
    assert tool_calls(task=task, answer="", trajectory=trajectory, every_branch=True)["score"] == 1.0


def test_where_no_call_is_expected_making_none_is_right():
    assert judge([], [])["score"] == 1.0
    assert judge([], [ADD])["score"] == 0.0
    assert judge([], [ADD], extra_calls=True)["score"] == 1.0


def test_any_order_finds_the_owner_of_each_call():
    expected = [call("f"), call("f", a=1)]
    assert judge(expected, [call("f", a=1), call("f")], order=False, arguments="subset")["score"] == 1.0


@pytest.mark.slow
@given(st.lists(st.sampled_from([ADD, FIND, call("f"), call("f", a=1)]), max_size=6), st.randoms())
def test_the_expected_calls_in_another_order_match_in_any_order(calls, random):
    made = list(calls)
    random.shuffle(made)
    assert judge(calls, made, order=False) == {"score": 1.0, "matched": 1.0}
    assert judge(calls, calls) == {"score": 1.0, "matched": 1.0}


# The expected arguments of one call of `f`, and arguments that models give.
SAME_ARGUMENTS = [
    ({}, [{}]),
    ({"a": 1}, [{"a": 1}, {"a": 1.0}]),
    ({"a": 1.5}, [{"a": 1.5}]),
    ({"a": 10**6}, [{"a": 1e6}, {"a": 1000000}]),
    ({"a": -0.0}, [{"a": 0}]),
    ({"a": "x"}, [{"a": "x"}, {"a": " x"}, {"a": "x\n"}]),
    ({"a": ""}, [{"a": ""}, {"a": " "}]),
    ({"a": "São Paulo"}, [{"a": "São Paulo"}]),
    ({"a": None}, [{"a": None}]),
    ({"a": True}, [{"a": True}]),
    ({"a": [1, 2]}, [{"a": [1, 2]}, {"a": [1.0, 2.0]}]),
    ({"a": []}, [{"a": []}]),
    ({"a": {"b": 1, "c": "x"}}, [{"a": {"c": "x", "b": 1.0}}, {"a": {"b": 1, "c": "x "}}]),
    ({"a": {}}, [{"a": {}}]),
    ({"a": [{"b": [1]}]}, [{"a": [{"b": [1]}]}]),
    ({"a": 1, "b": 2}, [{"a": 1, "b": 2}, {"b": 2, "a": 1}]),
    ({"unit": "celsius", "city": "Paris"}, [{"city": "Paris", "unit": "celsius"}]),
    ({"a": 10**400}, [{"a": 10**400}]),
]
OTHER_ARGUMENTS = [
    ({}, [{"a": 1}, {"a": None}]),
    ({"a": 1}, [{}, {"a": 2}, {"a": "1"}, {"a": True}, {"a": None}, {"a": [1]}, {"b": 1}, {"a": 1, "b": 2}, {"A": 1}]),
    ({"a": 1.5}, [{"a": 1.5000001}, {"a": "1.5"}, {"a": 1}]),
    ({"a": 1}, [{"a": 10**400}, {"a": -(10**400)}, {"a": float("nan")}, {"a": float("inf")}]),
    ({"a": 10**400}, [{"a": 1}, {"a": 1.5}, {"a": 10**400 + 1}]),
    ({"a": "x"}, [{"a": "X"}, {"a": "xx"}, {"a": ""}, {"a": None}, {"a": ["x"]}, {"a": "'x'"}]),
    ({"a": None}, [{}, {"a": "null"}, {"a": 0}, {"a": False}]),
    ({"a": True}, [{"a": 1}, {"a": "true"}, {"a": False}]),
    ({"a": [1, 2]}, [{"a": [2, 1]}, {"a": [1]}, {"a": "[1, 2]"}, {"a": [1, 2, 3]}, {"a": {"0": 1}}]),
    ({"a": {"b": 1}}, [{"a": {}}, {"a": {"b": 1, "c": 2}}, {"a": '{"b": 1}'}, {"a": 1}]),
    ({"unit": "celsius", "city": "Paris"}, [{"city": "celsius", "unit": "Paris"}, {"city": "Paris"}]),
]
F, G = call("f", a=1), call("g")
CALLS = [([F], [F]), ([F, G], [F, G]), ([F, F], [F, F]), ([], []), ([G, F, G], [G, F, G])]
OTHER_CALLS = [
    ([F], []),
    ([F], [G]),
    ([F], [F, F]),
    ([F], [F, G]),
    ([F, G], [G, F]),
    ([F, G], [F]),
    ([], [F]),
    ([F, F], [F]),
]


def test_calls_are_told_apart_as_a_tool_would_tell_them():
    right = [([call("f", **wanted)], [call("f", **given)]) for wanted, givens in SAME_ARGUMENTS for given in givens]
    right += [([F, *expected], [F, *made]) for expected, made in right] + CALLS
    wrong = [([call("f", **wanted)], [call("f", **given)]) for wanted, givens in OTHER_ARGUMENTS for given in givens]
    assert len(right) >= LEAST <= len(wrong)
    assert [row for row in right if judge(*row)["score"] != 1.0] == []
    assert [row for row in wrong + OTHER_CALLS if judge(*row)["score"] != 0.0] == []


def test_an_unknown_way_to_compare_is_a_failure():
    with pytest.raises(ScoringError, match="use one of exact, subset, ignore"):
        judge([], [], arguments="some")
