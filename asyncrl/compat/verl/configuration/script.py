"""The `key=value` words of a shell script, such as verl's examples are. The script is read, never run.

Lines `NAME=VALUE` set variables; `$NAME`, `${NAME}`, `${NAME:-DEFAULT}` and `$((SUM))` stand for values. Every word
with a dotted key counts, also within an array. Other commands, loops and conditions are passed over.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Mapping

KEY_WORD = re.compile(r"\+{0,2}[A-Za-z_]\w*(\.\w+)+=|~[A-Za-z_]\w*(\.\w+)+$")
ASSIGNMENT = re.compile(r"\s*(?:export\s+)?([A-Za-z_]\w*)=(?!\()(.*)")
VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^{}]*))?\}|\$([A-Za-z_]\w*)")
SUM = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def script_words(text: str, environment: Mapping[str, str]) -> list[str]:
    """The words of a script that set keys. A variable that nothing sets stays as it is written."""
    variables = dict(environment)
    words: list[str] = []
    for line in text.replace("\\\n", " ").splitlines():
        assigned = ASSIGNMENT.fullmatch(line)
        expanded = _expanded(assigned[2] if assigned else line, variables)
        try:
            parts = shlex.split(expanded, comments=True)
        except ValueError:  # A quotation over several lines, which sets no key.
            continue
        if assigned and len(parts) <= 1:
            variables[assigned[1]] = parts[0] if parts else ""
        else:
            words += [part for part in parts if KEY_WORD.match(part)]
    return words


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        default = (match[2] or "").strip("\"'") if match[2] is not None else match[0]
        return variables.get(match[1] or match[3]) or default

    # A value may hold other variables, at most as deep as scripts are written.
    for _ in range(8):
        text = VARIABLE.sub(value, text)
    return SUM.sub(lambda match: _sum(match, variables), text)


def _sum(match: re.Match[str], variables: Mapping[str, str]) -> str:
    try:
        return str(_value(ast.parse(match[1].strip(), mode="eval").body, variables))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return match[0]


def _value(node: ast.expr, variables: Mapping[str, str]) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return int(variables.get(name, ""))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left, variables), _value(right, variables))
    raise ValueError(f"{ast.unparse(node)}: a sum may hold whole numbers, names and + - * / %")
