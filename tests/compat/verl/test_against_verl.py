"""Our DataProto compared with verl's own, if ASYNCRL_VERL_PYTHON names a Python that has verl: the same random programs
of operations have the same outcomes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.compat import verl as ours_of_verl
from asyncrl.compat.verl import DataProto, compute_position_id_with_mask, provide_verl
from asyncrl.compat.verl.rewards.reward_loop import get_reward_manager_cls
from asyncrl.compat.verl.rewards.reward_managers import MANAGERS
from tests.compat.verl import operations

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "ASYNCRL_VERL_PYTHON" not in os.environ, reason="needs verl: set ASYNCRL_VERL_PYTHON to a Python that has it"
    ),
]

OURS = operations.Library(ours_of_verl, compute_position_id_with_mask)
ACCIDENTS = ("AttributeError", "ZeroDivisionError")
ACCIDENTAL = ("NoneType", "isnan", "tuple index out of range")
"""The errors of verl, and words of others, where it checks nothing: ours may then raise another error, or work."""
LACKING = ("RuntimeError", "NotImplementedError")
"""The errors of verl where torch lacks an operation for nested tensors."""
STRICTER = ("repeat_times has shape", "batches to be joined have different")
"""The beginnings of errors that only ours raises, on purpose. verl takes some calls with one number of repetitions for
all rows. It also joins some batches of different fields, and may then lose rows."""
Verl = Callable[[Any], Any]


@pytest.fixture(scope="module")
def verl() -> Iterator[Verl]:
    """Carries out a program with verl, in a process of its own."""
    command = [os.environ["ASYNCRL_VERL_PYTHON"], str(Path(operations.__file__))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(program: Any) -> Any:
            process.stdin.write(json.dumps(program) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()


NESTED = "nested"
NAMES = ["a", "b", "c"]
TENSORS = st.dictionaries(
    st.sampled_from(NAMES),
    st.tuples(
        st.sampled_from(["float32", "int64", "bool", "float64"]),
        st.sampled_from([[], [1], [4], [2, 3]]),
        st.integers(0, 3),
    )
    | st.tuples(st.just(NESTED), st.sampled_from([[], [2]]), st.integers(0, 3)),
    max_size=3,
)
ARRAYS = st.dictionaries(
    st.sampled_from(["x", "y", "z"]),
    st.tuples(st.sampled_from(["object", "matrix", "str", "float64", "int64"]), st.integers(0, 3)),
    max_size=2,
)
META = st.dictionaries(st.sampled_from(["t", "u", "metrics"]), st.sampled_from([1, 2]), max_size=2).map(
    lambda about: {name: {"loss": value} if name == "metrics" else value for name, value in about.items()}
)
BATCHES = st.fixed_dictionaries({"rows": st.integers(1, 6), "tensors": TENSORS, "arrays": ARRAYS, "meta_info": META})
SMALL = st.integers(-1, 7)
KEYS = st.none() | st.lists(st.sampled_from([*NAMES, "x", "t"]), max_size=2)


def _operation(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.tuples(st.just(name), st.integers(0, 11), st.tuples(*arguments))


ROWS = st.lists(SMALL, max_size=6)
MASK = st.lists(st.integers(0, 1), min_size=1, max_size=6)
OPERATION = st.one_of(
    _operation("index", st.just("int"), SMALL),
    _operation("index", st.just("slice"), st.tuples(*[st.none() | SMALL] * 2, st.none() | st.integers(-1, 3))),
    _operation("index", st.sampled_from(["list", "array", "tensor"]), ROWS),
    _operation("index", st.sampled_from(["mask", "tensor_mask", "bool_list"]), MASK),
    _operation("index", st.just("text"), st.just("a")),
    _operation("pad", st.integers(1, 9)),
    _operation("set", st.sampled_from(NAMES), st.integers(1, 6)),
    _operation("changed_part", st.sampled_from(NAMES)),
    _operation("select", KEYS, KEYS, KEYS),
    _operation("deep_select"),
    _operation("pop", KEYS, KEYS, KEYS),
    _operation(
        "rename", *[st.sampled_from([*NAMES, "d"]) | st.lists(st.sampled_from(NAMES), min_size=1, max_size=1)] * 2
    ),
    _operation("chunk", st.integers(0, 4)),
    _operation("split", st.integers(0, 4)),
    _operation("repeat", st.integers(0, 3), st.booleans()),
    _operation("sample_level_repeat", st.lists(st.integers(0, 2), max_size=6)),
    _operation("unfold", st.sampled_from([1, 2, 4]), st.lists(st.sampled_from(["a", "b"]), max_size=2)),
    _operation("reorder", ROWS),
    _operation("padding", st.integers(0, 3), st.sampled_from(["first", "last"])),
    _operation("iterate", st.integers(1, 3), st.integers(0, 2), st.integers(0, 3), st.booleans()),
    _operation("to"),
    _operation("fold", st.integers(1, 3), st.integers(1, 3)),
    _operation("chunk_with_padding", st.integers(1, 4)),
    _operation("union_tensors", st.sampled_from(NAMES), st.sampled_from([*NAMES, "d"])),
    _operation("collate", st.lists(st.integers(0, 2), min_size=1, max_size=3)),
    _operation("pickle"),
    _operation("union", st.integers(0, 11)),
    _operation("concat", st.integers(0, 11), st.integers(0, 11)),
)
PROGRAMS = st.fixed_dictionaries(
    {"batches": st.lists(BATCHES, min_size=1, max_size=2), "operations": st.lists(OPERATION, min_size=1, max_size=5)}
)


@given(PROGRAMS)
@settings(max_examples=400)
def test_random_programs_have_the_outcomes_that_verl_gives(verl: Verl, program: Any) -> None:
    program = json.loads(json.dumps(program))
    theirs, ours = verl(program), json.loads(operations.as_json(operations.run(OURS, program)))
    nested = any(each[0] == NESTED for batch in program["batches"] for each in batch["tensors"].values())
    for number, expected in enumerate(theirs):
        if isinstance(expected, dict) and (_is_accident(expected) or (nested and expected["error"][0] in LACKING)):
            return
        if nested and program["operations"][number][0] == "iterate":
            return  # verl makes a tensor of rows that happen to have one length.
        found = ours[number]
        if isinstance(found, dict) and found["message"].startswith(STRICTER):
            return
        if isinstance(expected, dict):
            assert isinstance(found, dict), (program["operations"][number], expected)
            assert expected["error"][0] in found["error"], (program["operations"][number], expected, found)
        else:
            assert found == expected, program["operations"][number]


def _is_accident(outcome: Any) -> bool:
    return outcome["error"][0] in ACCIDENTS or any(word in outcome["message"] for word in ACCIDENTAL)


ROW = st.tuples(
    st.text("pq", min_size=1, max_size=4),
    st.text("xyz", max_size=8),
    st.text("xyz", min_size=1, max_size=2),
    st.sampled_from("ab"),
    st.sampled_from([0.5, 1.0]),
)
MANAGERS_ASKED = st.one_of(
    st.tuples(st.just("naive"), st.sampled_from(["number", "mapping"]), st.just({})),
    st.tuples(st.just("batch"), st.just("all"), st.fixed_dictionaries({"scale": st.sampled_from([1.0, 0.5])})),
    st.tuples(
        st.just("dapo"),
        st.sampled_from(["number", "mapping"]),
        st.fixed_dictionaries(
            {
                "max_resp_len": st.integers(4, 12),
                "overlong_buffer_cfg": st.fixed_dictionaries(
                    {
                        "enable": st.booleans(),
                        "len": st.integers(1, 4),
                        "penalty_factor": st.sampled_from([1.0, 0.5]),
                        "log": st.booleans(),
                    }
                ),
            }
        ),
    ),
)


def _assert_judged_alike(verl: Verl, program: Any) -> None:
    theirs = verl(program)
    ours = operations.judged(DataProto, MANAGERS[program["manager"]](**operations.parameters(program)), program)
    if program["manager"] != "naive":
        # Ours tells all managers' functions how many turns there were, and verl those of this one.
        for result in (ours, theirs):
            result["extra"].pop("turns", None)
    assert ours["rewards"] == [pytest.approx(each) for each in theirs["rewards"]]
    assert ours["acc"] == theirs["acc"]
    assert {name: pytest.approx(values) for name, values in theirs["extra"].items()} == ours["extra"]


@given(MANAGERS_ASKED, st.lists(ROW, min_size=1, max_size=5))
@settings(max_examples=200)
def test_reward_managers_give_the_rewards_of_verls(verl: Verl, asked: Any, rows: Any) -> None:
    name, score, params = asked
    program = {"manager": name, "score": score, "params": params, "rows": rows}
    _assert_judged_alike(verl, json.loads(json.dumps(program)))


def test_prime_gives_the_rewards_of_verls(verl: Verl) -> None:
    rows = [["p", "xy", "x", "a", 1.0], ["pq", "", "x", "b", 1.0], ["p", "zzz", "z", "b", 0.5]]
    _assert_judged_alike(verl, {"manager": "prime", "score": "number", "params": {}, "rows": rows})


OVERLONG = MANAGERS_ASKED.filter(lambda asked: asked[0] == "dapo").map(lambda asked: asked[2])
LIMITS = st.fixed_dictionaries({}, optional={"max_rpm": st.just(1e6), "max_tpm": st.just(1e9), "timeout": st.just(60)})
SCORED = st.sampled_from(["number", "mapping"])
LOOP_MANAGERS_ASKED = st.one_of(
    st.tuples(st.sampled_from(["naive", "gdpo"]), SCORED, st.just({})),
    st.tuples(st.just("dapo"), SCORED, OVERLONG),
    st.tuples(st.just("rate_limited"), SCORED, LIMITS),
)


@given(LOOP_MANAGERS_ASKED, st.lists(ROW, min_size=1, max_size=4))
@settings(max_examples=200)
def test_reward_managers_for_single_rows_give_what_verls_give(verl: Verl, asked: Any, rows: Any) -> None:
    name, score, params = asked
    if score == "mapping" and name != "naive":
        # verl's other managers do not pass the tools' rewards, which this function reads.
        score = "number"
    config = {"trainer": {"experiment_name": "e"}}
    program = {"loop_manager": name, "score": score, "params": params, "config": config, "rows": rows}
    program = json.loads(json.dumps(program))
    theirs = verl(program)
    ours = json.loads(operations.as_json(operations.judged_singly(DataProto, get_reward_manager_cls, program)))
    assert ours["scores"] == pytest.approx(theirs["scores"])
    assert ours["rewards"] == [pytest.approx(each) for each in theirs["rewards"]]
    assert ours["extra"] == [
        {key: pytest.approx(value) if isinstance(value, float) else value for key, value in each.items()}
        for each in theirs["extra"]
    ]


def test_a_class_written_for_verl_gives_the_same_in_both(verl: Verl) -> None:
    file = Path(operations.__file__).parents[2] / "data" / "verl" / "loop_manager.py"
    asked = {"loop_manager": f"{file}:BriefRewardManager", "score": "number", "params": {"points": 2.5}, "config": {}}
    program = {**asked, "rows": [["p", "xy", "x", "a", 1.0], ["pq", "zzz", "z", "b", 0.5]]}
    theirs = verl(program)
    provide_verl()
    find = partial(operations.in_file_or, get_reward_manager_cls)
    assert json.loads(operations.as_json(operations.judged_singly(DataProto, find, program))) == theirs


@given(st.integers(1, 6).flatmap(lambda n: st.lists(st.lists(st.integers(0, 1), min_size=n, max_size=n), min_size=1)))
@settings(max_examples=50)
def test_positions_are_those_of_verl(verl: Verl, mask: list[list[int]]) -> None:
    assert operations.positions(OURS, mask) == verl({"mask": mask})
