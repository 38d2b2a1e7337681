"""Reads the `key=value` words of a shell script, such as verl's examples. The script is never run.

`NAME=VALUE` and `NAME+=VALUE` set variables; `$NAME`, `${NAME}`, `${NAME:-DEFAULT}`, `${NAME:?TEXT}` and `$((SUM))` are
expanded. Every word with a dotted key is read, also in an array, and in a quoted command or `$(...)` that starts verl.
Other words are skipped, and loops and conditions have no effect.

The output of `$(...)` is unknown, also if the brackets extend over several lines. A variable without a value is
unknown, too.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from asyncrl.compat.verl.configuration.script_commands import (
    DOLLAR,
    LITERAL,
    SHOWN,
    SPACE,
    STARTS_VERL,
    UNEXPANDED,
    commands_of,
)

KEY_WORD = re.compile(r"\+{0,2}[A-Za-z_]\w*(\.\w+)+=|~[A-Za-z_]\w*(\.\w+)+$")
OPEN_KEY = re.compile(r"\+{0,2}[A-Za-z_]\w*(\.\w+)+=")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
BEFORE_ASSIGNMENT = ("export", "declare", "local", "readonly", "typeset", "then", "do", "else")
ARRAY = re.compile(r"(?<!\w)(?:(?:export|declare|local|readonly|typeset)\s+(?:-\w+\s+)*)?[A-Za-z_]\w*\+?=\(")
VARIABLE = re.compile(r"\$\{(\w+)(?:(:?)(?:[-=]([^{}]*)|\?[^{}]*))?\}|\$([A-Za-z_]\w*)")
PLAIN_VARIABLE = re.compile(r"\$[A-Za-z_]")
SUM = re.compile(r"\$\(\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)\)")
WORKING_FOLDER = re.compile(r"\$\(\s*pwd\s*\)|`\s*pwd\s*`")
"""The only command whose output is known: a script is read as if it were started in the working folder."""
OUTPUT = re.compile(r"\$\((.*)\)", re.DOTALL)
OPTIONS = {"--config-name": "name", "-cn": "name", "--config-path": "folder", "-cp": "folder"}
"""Hydra's options that name the file of a configuration."""
LONGEST = 1 << 16
"""The maximum number of characters to which the variables of one command may expand. A longer result is a mistake or an
attack."""
UNKNOWN = re.compile(rf"[${UNEXPANDED}][\w({{@*#?!-]")
"""The beginning of a part of a word that was not expanded."""


class ScriptWord(NamedTuple):
    """A word that sets a key. `is_known` is false if only the running script knows its value."""

    text: str
    is_known: bool


@dataclass(frozen=True)
class NamedConfig:
    """The file of a configuration as Hydra's options name it: `name`, in the folder `folder`."""

    name: str | None = None
    folder: str | None = None


NOT_NAMED = NamedConfig()


class ScriptConfiguration(NamedTuple):
    """The configuration in a script.

    - `words`: the words that set keys
    - `named`: the file that its options name
    - `remarks`: a line for each command that may have been read wrongly
    """

    words: list[ScriptWord]
    named: NamedConfig
    remarks: list[str]


def script_words(text: str, environment: Mapping[str, str]) -> list[ScriptWord]:
    """The words of a script that set keys. Parts that only the running script knows stay unexpanded."""
    return script_configuration(text, environment).words


def script_configuration(text: str, environment: Mapping[str, str]) -> ScriptConfiguration:
    """The words of a script that set keys (see `script_words`), the file that its options name, and remarks."""
    variables = {name: value.replace("$", DOLLAR) for name, value in environment.items()}
    words, unread, named, remarks = list[ScriptWord](), list[ScriptWord](), NOT_NAMED, list[str]()
    text = WORKING_FOLDER.sub("${PWD}", text)
    for command in commands_of(text.replace("\r\n", "\n").splitlines(), remarks):
        expanded = _expanded(ARRAY.sub("", command, count=1), variables)
        try:
            parts = shlex.split(expanded)
        except ValueError:
            # This is a quoted text over several lines, which sets no key in most scripts. If a word in it looks as if
            # it sets a key, all other words with this key win.
            unread += [ScriptWord(part.translate(SHOWN), False) for part in command.split() if OPEN_KEY.match(part)]
            continue
        for inner in filter(None, map(_inner_command, parts)):
            # Only a shorter text is read again: the recursion must end.
            if len(inner) < len(expanded):
                found = script_configuration(inner, {})
                words, remarks = [*words, *found.words], [*remarks, *found.remarks]
                named = named if found.named == NOT_NAMED else found.named
        own = list(_without_assignments(parts, variables))
        words += [ScriptWord(word.translate(SHOWN), not UNKNOWN.search(word)) for word in own if KEY_WORD.match(word)]
        named = _with_options([word.translate(SHOWN) for word in own], named)
    return ScriptConfiguration([*unread, *words], named, remarks)


def expanded_word(word: str, environment: Mapping[str, str]) -> ScriptWord:
    """A word that no shell has expanded, with the variables of `environment`. References to keys (`${data.seed}`) stay
    as they are."""
    expanded = _expanded(word, {name: value.replace("$", DOLLAR) for name, value in environment.items()})
    return ScriptWord(expanded.translate(SHOWN), not PLAIN_VARIABLE.search(expanded))


def _inner_command(part: str) -> str | None:
    """The command that starts verl within one word, such as `"COMMAND"` after `bash -c`, or `NAME=$(COMMAND)`. None:
    the word contains no such command."""
    text = part.translate(SHOWN)
    if KEY_WORD.match(part) or len(text.split()) < 2 or not STARTS_VERL.search(text):
        return None
    if (output := OUTPUT.search(text)) and STARTS_VERL.search(output[1]):
        return output[1]
    assigned = ASSIGNMENT.fullmatch(text)
    return assigned[3] if assigned else text


def _with_options(words: Sequence[str], named: NamedConfig) -> NamedConfig:
    for word, following in zip(words, [*words, ""][1:], strict=True):
        option, sign, value = word.partition("=")
        if option in OPTIONS and (value := value if sign else following):
            named = replace(named, **{OPTIONS[option]: value})
    return named


def _without_assignments(parts: list[str], variables: dict[str, str]) -> Iterator[str]:
    """The words of a command. Assignments before the command are added to `variables`."""
    begins = True
    for part in parts:
        if begins and (assigned := ASSIGNMENT.fullmatch(part)):
            name, added, value = assigned.groups()
            variables[name] = variables.get(name, f"${{{name}}}") + value if added else value
        elif not begins or (part not in BEFORE_ASSIGNMENT and not part.startswith("-")):
            begins = False
            yield part


def _expanded(text: str, variables: dict[str, str]) -> str:
    room = LONGEST

    def value(match: re.Match[str]) -> str:
        nonlocal room
        default, found = match[3], variables.get(match[1] or match[4])
        if default is not None and (found is None or (match[2] and not found)):
            text = default.strip("\"'")
        else:
            text = match[0] if found is None else found.translate(LITERAL)
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


def _quotient(left: int, right: int) -> int:
    """The quotient as in bash, which rounds towards zero."""
    size = abs(left) // abs(right)
    return size if (left < 0) == (right < 0) else -size


def _remainder(left: int, right: int) -> int:
    """The remainder as in bash, with the sign of `left`."""
    return left - right * _quotient(left, right)


BINARY: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: _remainder,
}


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
