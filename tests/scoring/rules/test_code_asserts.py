"""Programs against tests with asserts: what honest ones may do, and which tests cannot judge."""

import pytest

from asyncrl.errors import AsyncrlError, ScoringError
from tests.scoring.rules.test_code import ASSERTS, judge

pytestmark = pytest.mark.slow

STACK = """
import math
import numpy as np
from collections import Counter

class Empty(LookupError):
    pass

class Stack:
    def __init__(self, items=()):
        self.items = list(items)
    def push(self, item):
        self.items.append(item)
        return self
    def pop(self):
        if not self.items:
            raise Empty("nothing is left")
        return self.items.pop()
    def __len__(self):
        return len(self.items)
    def __iter__(self):
        return iter(self.items)
    def __getitem__(self, index):
        return self.items[index]
    def __eq__(self, other):
        return self.items == other.items

LIMIT = 3

def sort(items):
    items.sort()

def count(text):
    return Counter(text)

def numbers():
    number = 0
    while True:
        yield number
        number += 1

def named(what=0, self=1, function=2):
    return what + self + function

def area(radius):
    return math.pi * radius**2
"""


@pytest.mark.parametrize(
    "tests",
    [
        "def check(found):\n    assert found(1) == math.pi\n    assert abs(found(2) - 12.566) < 1e-2\ncheck(area)",
        "stack = Stack([1])\nstack.push(2).push((3, 4))\nassert len(stack) == 3 and stack.pop() == (3, 4)",
        "assert list(Stack([1, 2])) == [1, 2] and 2 in Stack([1, 2]) and Stack([5])[0] == 5",
        "assert Stack([1]) == Stack([1]) and Stack([1]) != Stack([2]) and isinstance(Stack(), Stack)",
        "items = [3, 1, 2]\nsort(items)\nassert items == [1, 2, 3]",
        "assert count('aab') == {'a': 2, 'b': 1} and LIMIT == 3",
        "assert named(what=1, self=1, function=1) == 3",
        "assert np.array([1]).tolist() == [1] and np.isclose(area(1), 3.1416)",
        "from itertools import islice\nassert list(islice(numbers(), 3)) == [0, 1, 2]",
        "try:\n    Stack().pop()\nexcept Empty as error:\n    assert 'nothing' in str(error)\nelse:\n    assert False",
        "try:\n    Stack().pop()\nexcept LookupError:\n    pass\nelse:\n    assert False",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(LIMIT, 3)\n"
        "assert unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T)).wasSuccessful()",
    ],
)
def test_tests_use_what_the_program_defines(tests):
    assert judge(STACK, tests)["score"] == 1.0
    assert judge(STACK, tests + "\nassert False")["score"] == 0.0


FINDER = """
import gc, sys
def add(a, b):
    secret, frame, found = int("98765" + "4321"), sys._getframe(1), gc.get_objects()
    while frame:
        found += [*frame.f_code.co_consts, *frame.f_locals.values(), *frame.f_globals.values()]
        frame = frame.f_back
    texts = (each for each in found if isinstance(each, str))
    return secret if secret in found or any(str(secret) in each for each in texts) else None
"""


def test_a_program_does_not_find_what_is_expected_of_it():
    assert judge(FINDER, "assert add(1, 2) == 987654321")["score"] == 0.0
    assert judge(FINDER, "assert add(1, 2) is None")["score"] == 1.0


def test_tests_that_hand_the_program_a_function_are_a_failure_and_not_a_zero():
    with pytest.raises(ScoringError, match="cannot be judged by its asserts, for they hand the program <function"):
        judge("def apply(f, x): return f(x)", "assert apply(lambda x: x + 1, 2) == 3")


@pytest.mark.parametrize(
    "program",
    [
        "class Answer:\n    def sort(self, key): pass\ndef f(x): return Answer()",
        "class Answer: pass\ndef f(x):\n    found = Answer()\n    found.sort = f\n    return found",
        "class Answer: pass\ndef f(x):\n    x = Answer()\n    x.sort = [f][0].__call__\n    return x",
    ],
)
@pytest.mark.parametrize(
    "tests", ["f(2)\nr = f(3)\nr.sort(key=len)\nassert r == ['a']", "f(3)['a'] = len\nassert f(3)"]
)
def test_a_program_does_not_escape_its_verdict_by_answering_with_an_object_of_its_own(program, tests):
    verdict = judge(program, tests)
    assert (verdict["score"], verdict["unclear"]) == (0.0, 1.0)


def test_a_class_whose_methods_take_functions_is_worth_nothing_and_counted_as_unclear():
    program = "class Bus:\n    def on(self, f): self.f = f\n    def fire(self): return self.f()"
    verdict = judge(program, "bus = Bus()\nbus.on(lambda: 3)\nassert bus.fire() == 3")
    assert (verdict["score"], verdict["unclear"]) == (0.0, 1.0)
    assert judge(STACK, "assert Stack([1]).pop() == 1")["unclear"] == 0.0


def test_a_function_that_has_been_called_with_data_is_still_called_by_name():
    with pytest.raises(ScoringError, match="they hand the program <function"):
        judge("def apply(x, f=abs): return f(x)", "assert apply(-3) == 3\nassert apply(3, lambda x: x + 1) == 4")


HONEST = {
    "it adds": (
        "def add(a, b): return a + b",
        ASSERTS,
    ),
    "it is a class": (
        STACK,
        """
s = Stack()
assert s.push(1).push(2).pop() == 2 and len(s) == 1 and s.items == [1]
""",
    ),
    "it uses helpers": (
        """
def _square(x): return x * x
def total(xs): return sum(map(_square, xs))
""",
        "assert total([1, 2, 3]) == 14",
    ),
    "it yields": (
        """
def evens(n):
    yield from range(0, n, 2)
""",
        "assert list(evens(7)) == [0, 2, 4, 6] and sum(evens(5)) == 6 and next(evens(1)) == 0",
    ),
    "it remembers": (
        """
from functools import lru_cache
@lru_cache(None)
def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
""",
        "assert fib(90) == 2880067194370816120",
    ),
    "it raises what it should": (
        """
def root(x):
    if x < 0: raise ValueError('negative')
    return x ** 0.5
""",
        """
import unittest
class T(unittest.TestCase):
    def test(self):
        with self.assertRaises(ValueError):
            root(-1)
        self.assertAlmostEqual(root(2), 1.41421356)
if __name__ == '__main__': unittest.main()
""",
    ),
    "it changes a list in its argument": (
        "def swap(x): x[0], x[-1] = x[-1], x[0]",
        """
x = [1, 2, 3]
swap(x)
assert x == [3, 2, 1]
""",
    ),
    "it returns tuples, sets and dictionaries": (
        "def parts(x): return (x, {x}, frozenset([x]), {x: (x, None)}, range(x), b'x', 1j, True)",
        """
assert parts(2) == (2, {2}, frozenset([2]), {2: (2, None)}, range(2), b'x', 1j, True)
assert type(parts(1)[0]) is int and type(parts(1)[-1]) is bool
""",
    ),
    "it is exact with large numbers": (
        """
from fractions import Fraction
import math
def f(n): return math.factorial(n), Fraction(1, n)
""",
        """
import math
from fractions import Fraction
assert f(2000)[0] == math.factorial(2000) and f(3)[1] == Fraction(1, 3)
assert len(str(f(2000)[0])) == 5736
""",
    ),
    "it has operators of its own": (
        """
class V:
    def __init__(self, x, y): self.x, self.y = x, y
    def __add__(self, other): return V(self.x + other.x, self.y + other.y)
    def __eq__(self, other): return (self.x, self.y) == (other.x, other.y)
    def __lt__(self, other): return self.x < other.x
    def __repr__(self): return f'V({self.x}, {self.y})'
""",
        """
assert V(1, 2) + V(3, 4) == V(4, 6) and V(1, 2) != V(2, 1)
assert V(1, 1) < V(2, 0) and str(V(1, 2)) == 'V(1, 2)'
assert [each.x for each in sorted([V(3, 0), V(1, 0)])] == [1, 3]
""",
    ),
    "it is a data class with annotations": (
        """
from __future__ import annotations
from dataclasses import dataclass, field
@dataclass
class P:
    x: int
    tags: list[str] = field(default_factory=list)
""",
        """
p = P(3)
assert p == P(3, []) and p.x == 3 and p.tags == []
p.x = 4
assert p != P(3) and p.x == 4
""",
    ),
    "it takes keywords and defaults": (
        "def named(a, *rest, b=2, **more): return a + sum(rest) + b + sum(more.values())",
        "assert named(1) == 3 and named(1, 1, b=0, c=5) == 7",
    ),
    "it uses numpy": (
        """
import numpy as np
def mean(x): return np.mean(x)
def twice(x): return 2 * np.array(x)
""",
        """
assert mean([1, 2]) == 1.5 and twice([1, 2]).tolist() == [2, 4]
assert np.allclose(twice([1.0]), [2.0])
""",
    ),
    "it imports what the tests then use": (
        """
import math
from typing import List
def poly(xs: List[float], x: float):
    return sum(c * x**i for i, c in enumerate(xs))
""",
        """
def check(candidate):
    for x in range(3):
        assert math.fabs(candidate([1, x], 2) - poly([1, x], 2)) < 1e-9
        assert candidate([1, x], 2) == 1 + 2 * x
check(poly)
""",
    ),
    "it prints and reads on the side": (
        """
import sys
print('hello')
sys.stdin.read()
def f():
    print('x' * (2 << 20))
    return 1
""",
        "assert f() == 1",
    ),
    "it returns what the standard library has for data": (
        """
from collections import Counter, defaultdict, deque, namedtuple
from datetime import date, datetime, time, timedelta, timezone
from typing import NamedTuple
Point = namedtuple("Point", "x y")
class Named(NamedTuple):
    name: str
    size: int = 3
def last(items): return deque(items, 2)
def when(): return date(2024, 2, 29), datetime(2024, 2, 29, 12, tzinfo=timezone.utc), time(1, 2), timedelta(3, 4, 5)
def point(): return Point(1, [2])
def named(): return {"a": Named("b")}
def count(text): return Counter(text)
def groups():
    found = defaultdict(list)
    found["a"].append(1)
    return found
def turn(items): items.rotate(1)
def x_of(point): return point.x
""",
        """
from collections import Counter, deque, namedtuple
from datetime import date, datetime, time, timedelta, timezone
assert last([1, 2, 3]) == deque([2, 3]) and last([1, 2])[0] == 1 and last([1]).pop() == 1
assert when()[0] == date(2024, 2, 29) and when()[0].year == 2024 and when()[2] == time(1, 2)
assert when()[1] == datetime(2024, 2, 29, 12, tzinfo=timezone.utc) and when()[3] == timedelta(3, 4, 5)
assert point().x == 1 and point() == (1, [2]) and point()._asdict() == {"x": 1, "y": [2]}
assert named()["a"].size == 3 and type(point()) is type(point())
assert count("aab").most_common(1) == [("a", 2)] and count("a") == {"a": 1} and count("a")["z"] == 0
assert groups() == {"a": [1]}
items = deque([1, 2, 3])
turn(items)
assert items == deque([3, 1, 2]) and x_of(namedtuple("P", "x y")(5, 6)) == 5
""",
    ),
    "it keeps a state": (
        """
count = 0
def tick():
    global count
    count += 1
    return count
""",
        "assert [tick(), tick()] == [1, 2]",
    ),
    "it returns functions": (
        "def adder(n): return lambda x: x + n",
        "assert adder(2)(3) == 5 and callable(adder(1))",
    ),
    "it starts threads": (
        """
from concurrent.futures import ThreadPoolExecutor
def f(xs):
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(abs, xs))
""",
        "assert f([-1, 2]) == [1, 2]",
    ),
    "its tests start threads": (
        "def f(x): return 2 * x",
        """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    assert list(pool.map(f, range(20))) == [2 * x for x in range(20)]
""",
    ),
    "it has a function named as a module": (
        "def bisect(xs, x): return sum(y < x for y in xs)",
        "assert bisect([1, 2, 3], 3) == 2",
    ),
    "it recurses": (
        "def depth(x): return 1 + max(map(depth, x), default=0)",
        "assert depth([[[]], []]) == 3",
    ),
    "it answers with the same object": (
        "class Node: pass\nROOT = Node()\nROOT.parent = ROOT\ndef root(): return ROOT",
        "assert root() is root() and root().parent is root()",
    ),
    "its objects are sliced": (
        "class Row:\n    def __getitem__(self, key): return list(range(9))[key]\ndef f(): return Row()",
        "assert f()[:2] == [0, 1] and f()[1:8:3] == [1, 4, 7]",
    ),
    "it is asynchronous": (
        """
import asyncio
async def g(): return 5
def f(): return asyncio.run(g())
""",
        "assert f() == 5",
    ),
}


@pytest.mark.parametrize(("program", "tests"), HONEST.values(), ids=HONEST)
def test_an_honest_program_is_right_if(program, tests):
    assert judge(program, tests)["score"] == 1.0


def test_no_answer_makes_a_slice_a_failure_of_the_tests():
    assert judge("class Row: pass\ndef f(): return Row()", "assert f()[:2] == [0, 1]")["score"] == 0.0


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        ("import no_such_module\nassert add(1, 2) == 3", "the module no_such_module, which is not installed"),
        ("def check():\n    assert add(1, 2) == 3", "they use nothing of the program"),
        ("assert 1 + 2 == 3", "they use nothing of the program"),
    ],
)
@pytest.mark.parametrize("program", ["def add(a, b): return a + b", "def add(a, b): return 5"])
def test_tests_that_cannot_judge_are_a_failure_and_not_a_zero_whatever_the_program(program, tests, reason):
    with pytest.raises(ScoringError, match=reason):
        judge(program, tests)


def test_a_judge_that_cannot_run_is_a_failure_and_not_a_zero():
    with pytest.raises(AsyncrlError):
        judge("def add(a, b): return a + b", ASSERTS, memory_mb=1)


@pytest.mark.parametrize(
    "program",
    [
        "def add(a, b):\n    import time; time.sleep(10**6)",
        "def add(a, b): return range(10**18)",
        "while True: pass",
    ],
    ids=["asleep", "an endless answer", "endless before the tests"],
)
def test_a_program_that_takes_too_much_is_worth_nothing(program):
    assert judge(program, "assert list(add(1, 2)) == [3]", cpu_s=1, memory_mb=512, wall_s=2)["score"] == 0.0


def test_tests_that_import_the_missing_with_care_can_judge():
    tests = "try:\n    import no_such_module\nexcept ImportError:\n    no_such_module = None\nassert add(1, 2) == 3"
    assert judge("def add(a, b): return a + b", tests)["score"] == 1.0


def test_a_program_that_is_asked_for_what_it_lacks_is_wrong_even_if_the_tests_forgive():
    assert judge("", "try:\n    add(1, 2)\nexcept Exception:\n    pass")["score"] == 0.0
