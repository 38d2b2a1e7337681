"""Programs against tests with asserts: what honest ones may do, and which tests cannot judge."""

import time

import pytest

from asyncrl.errors import ScoringError
from asyncrl.scoring.rules import code
from tests.scoring.rules.programs import sections
from tests.scoring.rules.test_code import ASSERTS, judge

pytestmark = pytest.mark.slow

HONEST = sections("honest")
STACK = HONEST["it is a class"][0]


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
    with pytest.raises(ScoringError, match="cannot be judged by its asserts: they hand the program <function"):
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
    with pytest.raises(ScoringError, match=r"memory_mb=1 of the rule code is too small .* use at least 32"):
        judge("def add(a, b): return a + b", ASSERTS, memory_mb=1)
    assert judge("def add(a, b): return a + b", ASSERTS, memory_mb=32)["score"] == 1.0


@pytest.mark.parametrize("slow", ["judge", "program"])
@pytest.mark.parametrize("after", ["time.sleep(600)", "os._exit(0)"])
def test_asserts_of_which_a_side_does_not_begin_are_a_failure_and_not_a_zero(slow, after, monkeypatch):
    script = code._script
    before = {slow: f"import os, time; {after}; "}
    monkeypatch.setattr(code, "_script", lambda side, *arguments: before.get(side, "") + script(side, *arguments))
    with pytest.raises(ScoringError, match=r"could not begin within 1 s and 1024 MB: raise wall_s"):
        judge("def add(a, b): return a + b", ASSERTS, wall_s=1)


def test_asserts_whose_time_has_passed_are_a_failure_and_not_a_zero(monkeypatch):
    monkeypatch.setattr(code, "_START_S", -1.0)
    with pytest.raises(ScoringError, match=r"scoring\.timeout_s"):
        judge("def add(a, b): return a + b", ASSERTS, deadline=time.monotonic())


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
