"""Programs against tests with asserts: what honest ones may do, and what dishonest ones gain nothing by."""

import pytest

from asyncrl.errors import ScoringError
from tests.scoring.rules.test_code import ASSERTS, judge

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


FRAMES = """
import os, sys
frame = sys._getframe(1)
while frame:
    print(frame.f_code.co_consts, frame.f_locals, frame.f_globals, flush=True)
    frame = frame.f_back
os._exit(0)
"""
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
PARENT = """
import os
for place in (f"/proc/{os.getppid()}/fd/0", f"/proc/{os.getppid()}/environ"):
    try:
        print(open(place).read(), file=open(f"/proc/{os.getppid()}/fd/1", "w"), flush=True)
    except OSError:
        pass
os._exit(0)
"""
LIAR = """
class Liar{base}:
    __eq__ = __lt__ = __le__ = __ge__ = __contains__ = __bool__ = lambda *_: True
    __hash__ = lambda self: 3
    __abs__ = __sub__ = __add__ = __round__ = __iter__ = lambda self, *_: self
    __len__ = lambda self: 3
    __class__ = property(lambda self: int)
def add(a, b):
    return {wrapped}
"""


@pytest.mark.parametrize(
    "program",
    [
        FRAMES,
        PARENT,
        LIAR.format(base="", wrapped="Liar()"),
        LIAR.format(base="(int)", wrapped="Liar()"),
        LIAR.format(base="(list)", wrapped="Liar()"),
        "import sys\ndef add(a, b): sys.exit(0)",
        "import builtins, os\nbuiltins.AssertionError = Exception\ndef add(a, b): os.kill(os.getppid(), 9)",
        "def add(a, b): return a - b\ndef abs(x): return 0\nset = list = tuple = print = abs",
        "add = 3\ndel add",
    ],
    ids=["frames", "parent", "liar", "int liar", "list liar", "exit", "kill", "built-ins", "none"],
)
def test_a_program_that_cheats_is_wrong(program):
    assert judge(program, ASSERTS)["score"] == 0.0
    assert judge(program, "assert abs(add(1, 2) - 3) < 0.01")["score"] == 0.0
    assert judge(program, "assert set([add(1, 2)]) == set([3])")["score"] == 0.0
    assert judge(program, "try:\n    assert [add(1, 2)] == [3]\nexcept ValueError:\n    pass")["score"] == 0.0


def test_a_program_cannot_end_the_loop_of_the_tests():
    program = "def add(a, b): raise StopIteration"
    assert judge(program, "assert all(map(lambda each: add(each, each) == 2 * each, [1, 2]))")["score"] == 0.0


def test_a_program_does_not_find_what_is_expected_of_it():
    assert judge(FINDER, "assert add(1, 2) == 987654321")["score"] == 0.0
    assert judge(FINDER, "assert add(1, 2) is None")["score"] == 1.0


def test_tests_that_hand_the_program_a_function_are_a_failure_and_not_a_zero():
    with pytest.raises(ScoringError, match="cannot be judged by its asserts, for they hand the program <function"):
        judge("def apply(f, x): return f(x)", "assert apply(lambda x: x + 1, 2) == 3")
