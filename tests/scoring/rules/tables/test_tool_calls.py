"""The calls that models make for a request, as they are parsed, and near misses."""

import json

from asyncrl.config.schema import ScoringConfig
from asyncrl.scoring.rules.base import Case
from asyncrl.scoring.rules.registry import load_rules
from asyncrl.types import ToolCall, Turn
from tests.scoring.fakes import answered
from tests.scoring.rules.tables.judging import LEAST

# What is expected, as arguments of one call of `f`, and what models give for it.
SAME = [
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
OTHER = [
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


def score(expected, made):
    task, trajectory = answered("done", truth=json.dumps(expected))
    turns = list(trajectory.turns)
    calls = tuple(ToolCall(each["name"], each["arguments"]) for each in made)
    turns[1] = Turn(turns[1].start, turns[1].end, turns[1].role, "stop", calls)
    values = {name: getattr(trajectory, name) for name in trajectory.__slots__} | {"turns": tuple(turns)}
    book = load_rules(ScoringConfig(rule="tool_calls"))
    return book.judge(Case(task, type(trajectory)(**values), "done", "done")).outcome


def call(arguments, name="f"):
    return {"name": name, "arguments": arguments}


F, G = call({"a": 1}), call({}, "g")
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
    right = [([call(wanted)], [call(given)]) for wanted, givens in SAME for given in givens]
    right += [([F, *expected], [F, *made]) for expected, made in right] + CALLS
    wrong = [([call(wanted)], [call(given)]) for wanted, givens in OTHER for given in givens] + OTHER_CALLS
    assert len(right) >= LEAST <= len(wrong)
    assert [row for row in right if score(*row) != 1.0] == []
    assert [row for row in wrong if score(*row) != 0.0] == []
