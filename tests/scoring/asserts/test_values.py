import json
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import date, datetime, time, timedelta

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.scoring.asserts.values import decode, encode

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
plain |= st.fractions() | st.complex_numbers(allow_nan=False) | st.decimals(allow_nan=False)
keys = plain | st.tuples(plain, plain) | st.frozensets(plain)
values = st.recursive(
    keys,
    lambda each: st.lists(each) | st.tuples(each) | st.dictionaries(keys, each, max_size=3) | st.sets(keys, max_size=3),
    max_leaves=5,
)


def passed(value):
    """`value` as it arrives on the other side, where objects are called by their type's name."""
    sent = json.loads(json.dumps(encode(value, lambda each: type(each).__name__)))
    return decode(sent, lambda name: f"<{name}>")


@pytest.mark.slow
@settings(max_examples=50)
@given(values)
def test_data_arrives_as_it_was(value):
    arrived = passed(value)
    assert arrived == value
    assert type(arrived) is type(value)


class Liar(int):
    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


@pytest.mark.parametrize(
    ("value", "arrives"),
    [
        (Counter("aab"), Counter("aab")),
        (defaultdict(int, a=1), {"a": 1}),
        (deque([1, [2]], 5), deque([1, [2]])),
        (datetime(2024, 2, 29, 1, 2, 3, 4), datetime(2024, 2, 29, 1, 2, 3, 4)),
        (date(2024, 2, 29), date(2024, 2, 29)),
        (time(1, 2, 3, 4), time(1, 2, 3, 4)),
        (timedelta(-1, 2, 3), timedelta(-1, 2, 3)),
        (OrderedDict(a=1), {"a": 1}),
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (Liar(3), 3),
    ],
)
def test_what_is_like_data_arrives_plain(value, arrives):
    assert passed(value) == arrives
    assert type(passed(value)) is type(arrives)


def test_a_named_tuple_arrives_with_its_names():
    one, two = (passed(namedtuple("Point", "x y")(number, [2])) for number in (1, 3))
    assert (one.x, one.y, two.x) == (1, [2], 3)
    assert type(one) is type(two)
    assert one == (1, [2])


@pytest.mark.parametrize(
    "forged",
    [
        ["namedtuple", ["Point", ["__eq__"], [1]]],
        ["namedtuple", ["Point", ["x=print(1)"], [1]]],
        ["namedtuple", ["Point(object)", ["x"], [1]]],
        ["namedtuple", ["Point", ["x", "y"], [1]]],
        ["datetime", "today"],
        ["timedelta", ["a"]],
        ["deque", 3],
    ],
)
def test_what_is_not_of_the_form_is_refused(forged):
    with pytest.raises((TypeError, ValueError)):
        decode(forged, str)


def test_another_object_is_only_named():
    assert passed([object(), int, len]) == ["<object>", "<type>", "<builtin_function_or_method>"]
