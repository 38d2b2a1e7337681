"""Reads the `key=value` words of a shell script, such as verl's examples. The script is never run.

`NAME=VALUE` sets variables; `$NAME`, `${NAME}`, `${NAME:-DEFAULT}`, `${NAME:?TEXT}` and `$((SUM))` are expanded. Every
word with a dotted key counts, also within an array. Other words are skipped, and loops and conditions have no effect.
The output of a command and a variable without a value are unknown.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

KEY_WORD = re.compile(r"\+{0,2}[A-Za-z_]\w*(\.\w+)+=|~[A-Za-z_]\w*(\.\w+)+$")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
BEFORE_ASSIGNMENT = ("export", "declare", "local", "readonly", "typeset", "then", "do", "else")
ARRAY = re.compile(r"\s*(?:(?:export|declare|local|readonly|typeset)\s+(?:-\w+\s+)*)?[A-Za-z_]\w*\+?=\(")
VARIABLE = re.compile(r"\$\{(\w+)(?:(:?)(?:[-=]([^{}]*)|\?[^{}]*))?\}|\$([A-Za-z_]\w*)")
SUM = re.compile(r"\$\(\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)\)")
CONFIG_NAME = re.compile(r"(?:^|\s)(?:--config-name|-cn)(?:=|\s+)[\"']?([^\s\"'\\]+)", re.MULTILINE)
OF_VERL = ("ppo_trainer", "ppo_megatron_trainer")
"""The configurations that verl ships for PPO."""
LONGEST = 1 << 16
"""The maximum number of characters to which the variables of one command may expand. A longer result is a mistake or an
attack."""
SPACE, DOLLAR, UNEXPANDED = "\x1f", "\x1e", "\x1d"
"""Characters that replace a quoted space, a quoted dollar sign, and a dollar sign in the value of a variable that could
not be expanded. They are used while words are split and variables expanded."""
UNKNOWN = re.compile(rf"[${UNEXPANDED}][\w({{@*#?!-]")
"""The beginning of a part of a word that was not expanded."""
BINARY: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


class ScriptWord(NamedTuple):
    """A word that sets a key. `is_known` is false if only the running script knows its value."""

    text: str
    is_known: bool


def script_words(text: str, environment: Mapping[str, str]) -> list[ScriptWord]:
    """The words of a script that set keys. Parts that only the running script knows stay unexpanded."""
    variables = {name: value.replace("$", DOLLAR) for name, value in environment.items()}
    words: list[ScriptWord] = []
    for line in text.replace("\r\n", "\n").replace("\\\n", " ").splitlines():
        for command in _commands(line):
            try:
                parts = shlex.split(_expanded(ARRAY.sub("", command, count=1), variables))
            except ValueError:  # A quotation over several lines, which sets no key.
                continue
            for word in _without_assignments(parts, variables):
                shown = word.replace(SPACE, " ").replace(DOLLAR, "$").replace(UNEXPANDED, "$")
                words.append(ScriptWord(shown, not UNKNOWN.search(word)))
    return words


def named_config(text: str) -> str | None:
    """The configuration file that a script names by `--config-name`; None if there is none, or if verl ships it."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    found = CONFIG_NAME.search("\n".join(lines))
    return found[1] if found and found[1].removesuffix(".yaml") not in OF_VERL else None


def _without_assignments(parts: list[str], variables: dict[str, str]) -> Iterator[str]:
    """The words of a command that set keys. Assignments before the command are added to `variables`."""
    begins = True
    for part in parts:
        if begins and (assigned := ASSIGNMENT.fullmatch(part)):
            variables[assigned[1]] = assigned[2]
        elif not begins or (part not in BEFORE_ASSIGNMENT and not part.startswith("-")):
            begins = False
            if KEY_WORD.match(part):
                yield part


def _commands(line: str) -> Iterator[str]:
    """The commands of a line, without its comment. Quoted spaces and dollar signs become SPACE and DOLLAR. A command in
    backticks becomes `$(COMMAND)`."""
    command, quote, depth, escaped, ticked = "", "", 0, False, False
    for place, letter in enumerate(line):
        before = line[place - 1 : place]
        if escaped:
            command, escaped = (command[:-1] + DOLLAR if letter == "$" else command + letter), False
        elif quote == "'":
            quote = "" if letter == "'" else quote
            command += DOLLAR if letter == "$" else letter
        elif letter == "#" and not quote and not depth and (not before or before.isspace()):
            break
        elif letter in ";&|" and not quote and not depth:
            yield _balanced(command)
            command = ""
        elif letter == "`":
            ticked = not ticked
            depth = depth + 1 if ticked else max(depth - 1, 0)
            command += "$(" if ticked else ")"
        else:
            escaped = letter == "\\"
            if letter in "'\"" and quote in ("", letter) and not (letter == "'" and depth):
                quote = "" if quote else letter
            depth += letter in "({" and (before == "$" or depth > 0)
            depth -= letter in ")}" and depth > 0
            command += SPACE if depth and letter.isspace() else letter
    yield _balanced(command)


def _balanced(command: str) -> str:
    """The command without a closing bracket that belongs to an array or to a group of commands."""
    ends = command.rstrip()
    return ends[:-1] if ends.endswith(")") and ends.count(")") > ARRAY.sub("", ends, count=1).count("(") else command


def _expanded(text: str, variables: dict[str, str]) -> str:
    room = LONGEST

    def value(match: re.Match[str]) -> str:
        nonlocal room
        default, found = match[3], variables.get(match[1] or match[4])
        if default is not None and (found is None or (match[2] and not found)):
            text = default.strip("\"'")
        else:
            text = match[0] if found is None else found.replace("$", UNEXPANDED)
        room -= len(text)
        return text if room > 0 else match[0]

    # A default may contain another variable. Scripts rarely nest deeper than 8.
    for _ in range(8):
        text = VARIABLE.sub(value, text)
    return SUM.sub(lambda match: _sum(match, variables), text)


def _sum(match: re.Match[str], variables: Mapping[str, str]) -> str:
    try:
        return str(_value(ast.parse(match[1].replace(SPACE, " ").strip(), mode="eval").body, variables))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return match[0]


def _value(node: ast.expr, variables: Mapping[str, str]) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return int(variables.get(name, ""))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, variables)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            return BINARY[type(op)](_value(left, variables), _value(right, variables))
    raise ValueError(f"{ast.unparse(node)}: a sum may contain only whole numbers, names and + - * / %")
