"""Models put their program at many places of an answer. Each test finds the program of every row, and runs it."""

import textwrap

from asyncrl.scoring.rules.program import program
from tests.scoring.rules.tables.judging import LEAST

ADD = "def add(a, b):\n    return a + b"
SUB = "def add(a, b):\n    return a - b"
IMPORT = "import operator"
USES = "def add(a, b):\n    return operator.add(a, b)"
HELPER = "def helper(a, b):\n    return a + b"
CALLS = "def add(a, b):\n    return helper(a, b)"


def fenced(body, language="python", fence="```"):
    return f"{fence}{language}\n{body}\n{fence}"


def indented(text, by="   "):
    return textwrap.indent(text, by)


RIGHT = [
    ADD,
    f"{ADD}\n",
    fenced(ADD),
    fenced(ADD, ""),
    fenced(ADD, "py"),
    fenced(ADD, "python3"),
    fenced(ADD, "Python"),
    fenced(ADD, " python"),
    fenced(ADD, "python "),
    fenced(ADD, "{.python}"),
    fenced(ADD, 'python title="add.py"'),
    fenced(ADD, fence="~~~"),
    fenced(ADD, "", "~~~"),
    fenced(ADD, fence="````"),
    fenced(f"{ADD}\n# ```"),
    f"Here it is:\n\n{fenced(ADD)}\n\nIt adds both.",
    f"1. Solution:\n\n{indented(fenced(ADD))}",
    f"- Solution:\n{indented(fenced(ADD), chr(9))}",
    indented(fenced(ADD), "    "),
    f"{fenced(ADD)}\n\nOutput:\n\n{fenced('3', '')}",
    f"{fenced(ADD)}\n\nOutput:\n\n{fenced('3', 'text')}",
    f"{fenced(ADD)}\n\nOutput:\n\n{fenced('add(1, 2) = 3', 'output')}",
    f"{fenced(ADD, '')}\n\nOutput:\n\n{fenced('3', '')}",
    f"{fenced(ADD, '')}\n\nOutput:\n\n{fenced('Output: 3', '')}",
    f"{fenced(ADD, '')}\n\nOutput:\n\n{fenced('1 2 3', '')}",
    f"{fenced(ADD, '')}\n\nOutput:\n\n{fenced('[1, 2]', '')}",
    f"Input:\n{fenced('1 2', '')}\n{fenced(ADD, '')}\nOutput:\n{fenced('3', '')}",
    f"{fenced('pip install nothing', 'bash')}\n{fenced(ADD)}\n{fenced('python add.py', 'bash')}",
    f"{fenced(ADD)}\n\nComplexity:\n{fenced('{}', 'json')}",
    f"A first try:\n{fenced(SUB)}\nThat is wrong:\n{fenced(ADD)}",
    f"{fenced(SUB, '')}\nBetter:\n{fenced(ADD, '')}",
    f"{fenced('some pseudocode here', '')}\n{fenced(ADD)}",
    f"{fenced(ADD)}\n\nExample:\n{fenced('add(1, 2)')}",
    f"{fenced(ADD)}\n\nExample:\n{fenced('result = add(1, 2)')}",
    f"{fenced(IMPORT)}\nand then\n{fenced(USES)}",
    f"{fenced(HELPER)}\nand with it\n{fenced(CALLS)}",
    f"{fenced(IMPORT)}\n{fenced(HELPER.replace('a + b', 'operator.add(a, b)'))}\n{fenced(CALLS)}",
    f"{fenced(ADD)}\nA variant that does not work:\n{fenced('def add(a, b) return a')}",
    f"{fenced(ADD)}\nOne more:\n```python\ndef more(",
    f"```python\n{ADD}",
    f"```python\n{ADD}\n",
    f"~~~py\n{ADD}",
    fenced(ADD).replace("\n", "\r\n"),
    f"{fenced(ADD)}\n{fenced('>>> add(1, 2)', 'pycon')}",
]
WRONG = [
    "",
    "I cannot.",
    "add = ?",
    SUB,
    fenced(SUB),
    fenced(SUB, ""),
    fenced(""),
    fenced("", ""),
    fenced("pass"),
    fenced("3", ""),
    fenced("3", "text"),
    fenced("def add(a, b:"),
    fenced("def add(a, b):"),
    fenced("return a + b"),
    fenced("def sum(a, b):\n    return a + b"),
    fenced("add(1, 2)"),
    fenced("print(3)"),
    fenced(SUB, fence="~~~"),
    fenced(USES),
    fenced(CALLS),
    fenced(USES, ""),
    indented(fenced(SUB)),
    f"{fenced(ADD)}\nNo, better:\n{fenced(SUB)}",
    f"{fenced(ADD, '')}\nNo, better:\n{fenced(SUB, '')}",
    f"{fenced(ADD, 'text')}\n{fenced(SUB)}",
    f"{fenced(ADD, '')}\n{fenced(SUB)}",
    f"{fenced(SUB)}\n{fenced('3', '')}",
    f"{fenced(SUB)}\n{fenced(ADD, '')}",
    f"{fenced(IMPORT)}\n{fenced(CALLS)}",
    f"{fenced(CALLS)}\n{fenced('1 + 1')}",
    f"Sure, {ADD}",
    f"Here is the program:\n\n{ADD}",
    "```python\ndef add(a, b):\n    return a +",
    "```python\ndef add(a",
    "```",
    "```python",
    "~~~",
    "``` ```",
    fenced("int add(int a, int b) { return a + b; }", "cpp"),
    fenced("const add = (a, b) => a + b;", "js"),
    fenced("function add(a, b) { return a + b }", ""),
    "\x00",
]


def adds(answer):
    names = {}
    try:
        exec(program(answer), names)
        return names["add"](1, 2) == 3 and names["add"](5, -5) == 0
    except Exception:  # noqa: BLE001
        return False


def test_the_program_is_found_where_models_put_it():
    assert len(RIGHT) >= LEAST <= len(WRONG)
    assert [answer for answer in RIGHT if not adds(answer)] == []
    assert [answer for answer in WRONG if adds(answer)] == []


def test_a_fence_inside_of_a_program_does_not_end_it():
    body = 'text = """\n~~~\n"""\ndef add(a, b):\n    return a + b'
    assert program(fenced(body)) == body
    inner = 'text = """\n```python\n```\n"""'
    assert program(fenced(inner, fence="````")) == inner
