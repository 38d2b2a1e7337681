"""Programs that try to pass asserts without a solution. Each scores 0, and none is a failure of the rule."""

import pytest

from asyncrl.sandbox import sandbox
from tests.scoring.rules.programs import sections
from tests.scoring.rules.test_code import judge

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(sandbox.why_no_namespaces()),
        reason="without namespaces these programs would harm the machine that runs the tests",
    ),
]

CHEATS = {title: program for title, (program,) in sections("cheats").items()}
STYLES = CHEATS.pop("the tests")
LIAR = CHEATS["its answer is an object that lies"]
for base in ("int", "float", "str", "list", "dict", "type"):
    lie = LIAR.replace("class Liar:", f"class Liar({base}):")
    # A class makes its instances from a name, bases and a namespace.
    CHEATS[f"its answer is of type {base} and lies"] = (
        lie if base != "type" else lie.replace("Liar()", "Liar('x', (), {})")
    )
CHEATS["its function is a class whose instances lie"] = LIAR + "class add(Liar):\n    def __init__(self, *_): 0"

SEEKERS = {title: program for title, (program,) in sections("seekers").items()}
FIND = SEEKERS.pop("the end")


@pytest.mark.parametrize("program", CHEATS.values(), ids=CHEATS)
def test_a_program_gains_nothing_if(program: str):
    assert judge(program, STYLES + "assert passed", cpu_s=1, memory_mb=512, wall_s=10)["score"] == 0.0


def test_a_right_program_passes_every_style():
    assert judge("def add(a, b): return a + b", STYLES + "assert passed == styles")["score"] == 1.0


@pytest.mark.parametrize("program", SEEKERS.values(), ids=SEEKERS)
def test_a_program_does_not_find_the_tests(program: str):
    program = f"import os\n{program}\n{FIND}"
    assert judge(program, "assert find() == 'ocelot' + '-57'")["score"] == 0.0
    assert judge(program, "assert find() == 'no'")["score"] == 1.0
