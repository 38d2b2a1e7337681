"""Reads the `key=value` words of a shell script, such as verl's examples. The script is never run.

`NAME=VALUE` sets variables; `$NAME`, `${NAME}`, `${NAME:-DEFAULT}`, `${NAME:?TEXT}` and `$((SUM))` are expanded. Every
word with a dotted key counts, also within an array. Other words are skipped, and loops and conditions have no effect.
The output of a command, which may extend over several lines, and a variable without a value are unknown.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

KEY_WORD = re.compile(r"\+{0,2}[A-Za-z_]\w*(\.\w+)+=|~[A-Za-z_]\w*(\.\w+)+$")
OPEN_KEY = re.compile(r"\+{0,2}[A-Za-z_]\w*(\.\w+)+=")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
BEFORE_ASSIGNMENT = ("export", "declare", "local", "readonly", "typeset", "then", "do", "else")
ARRAY = re.compile(r"(?<!\w)(?:(?:export|declare|local|readonly|typeset)\s+(?:-\w+\s+)*)?[A-Za-z_]\w*\+?=\(")
OPEN_VALUE = re.compile(r"(?:^|\s)\+{0,2}[A-Za-z_][\w.]*=[^\s\"']*(?:\"[^\"]*|'[^']*)$")
"""A key or a variable at the end of a command, whose value has an open quotation mark."""
VARIABLE = re.compile(r"\$\{(\w+)(?:(:?)(?:[-=]([^{}]*)|\?[^{}]*))?\}|\$([A-Za-z_]\w*)")
SUM = re.compile(r"\$\(\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)\)")
WORKING_FOLDER = re.compile(r"\$\(\s*pwd\s*\)|`\s*pwd\s*`")
"""The one command whose output is known: a script is read as if it were started in this folder."""
OPTIONS = {"--config-name": "name", "-cn": "name", "--config-path": "folder", "-cp": "folder"}
"""Hydra's options that name the file of a configuration."""
MOST_LINES = 50
"""The maximum number of lines of one command."""
LONGEST = 1 << 16
"""The maximum number of characters to which the variables of one command may expand. A longer result is a mistake or an
attack."""
SPACE, DOLLAR, UNEXPANDED = "\x1f", "\x1e", "\x1d"
"""Characters that replace a quoted space, a quoted dollar sign, and a dollar sign in the value of a variable that could
not be expanded. They are used while words are split and variables expanded."""
LITERAL = str.maketrans({"$": UNEXPANDED, "'": "\x1c", '"': "\x1b", "\\": "\x1a"})
"""Replaces characters that have no effect in the value of a variable."""
SHOWN = str.maketrans({SPACE: " ", DOLLAR: "$", UNEXPANDED: "$", "\x1c": "'", "\x1b": '"', "\x1a": "\\"})
"""Puts the replaced characters back."""
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


@dataclass(frozen=True)
class NamedConfig:
    """The file of a configuration as Hydra's options name it: `name`, in the folder `folder`."""

    name: str | None = None
    folder: str | None = None


NOT_NAMED = NamedConfig()


def script_words(text: str, environment: Mapping[str, str]) -> list[ScriptWord]:
    """The words of a script that set keys. Parts that only the running script knows stay unexpanded."""
    return script_configuration(text, environment)[0]


def script_configuration(text: str, environment: Mapping[str, str]) -> tuple[list[ScriptWord], NamedConfig]:
    """The words of a script that set keys (see `script_words`), and the file that its options name."""
    variables = {name: value.replace("$", DOLLAR) for name, value in environment.items()}
    words, unread, named = list[ScriptWord](), list[ScriptWord](), NOT_NAMED
    text = WORKING_FOLDER.sub("${PWD}", text)
    for command in _commands(text.replace("\r\n", "\n").replace("\\\n", " ").splitlines()):
        try:
            parts = shlex.split(_expanded(ARRAY.sub("", command, count=1), variables))
        except ValueError:
            # A quotation over several lines. It sets no key in most scripts, so any other word with a key wins.
            unread += [ScriptWord(part.translate(SHOWN), False) for part in command.split() if OPEN_KEY.match(part)]
            continue
        own = list(_without_assignments(parts, variables))
        words += [ScriptWord(word.translate(SHOWN), not UNKNOWN.search(word)) for word in own if KEY_WORD.match(word)]
        named = _with_options([word.translate(SHOWN) for word in own], named)
    return [*unread, *words], named


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
            variables[assigned[1]] = assigned[2]
        elif not begins or (part not in BEFORE_ASSIGNMENT and not part.startswith("-")):
            begins = False
            yield part


def _commands(lines: Sequence[str]) -> Iterator[str]:
    """The commands of a script's lines, without comments. A command goes on while its `$(...)` or its quoted value is
    open, for at most MOST_LINES lines. If it is open for longer, its first line is a command of its own."""
    start = 0
    while start < len(lines):
        found, end = _Splitter(), start
        while end == start or (found.is_open and end < min(start + MOST_LINES, len(lines))):
            found.add(lines[end] if end == start else f" {lines[end]}")
            end += 1
        if found.is_open:
            found, end = _Splitter(), start + 1
            found.add(lines[start])
        yield from found.commands
        start = end


class _Splitter:
    """Splits text into commands. Quoted spaces and dollar signs become SPACE and DOLLAR. A command in backticks becomes
    `$(COMMAND)`."""

    def __init__(self) -> None:
        self._whole: list[str] = []
        self._letters: list[str] = []
        self._quote, self._depth = "", 0
        self._escaped, self._ticked = False, False

    @property
    def commands(self) -> list[str]:
        """All commands so far. The last one may be open."""
        return [_balanced(each) for each in (*self._whole, "".join(self._letters))]

    @property
    def is_open(self) -> bool:
        """True if the text ends within `$(...)`, `${...}` or backticks, or in the quoted value of a key or variable."""
        return self._depth > 0 or (self._quote != "" and OPEN_VALUE.search("".join(self._letters)) is not None)

    def add(self, line: str) -> None:
        """Split one more line of the script, up to its comment."""
        letters = self._letters
        for place, letter in enumerate(line):
            before = line[place - 1 : place]
            if self._escaped:
                self._escaped = False
                if letter == "$":
                    letters[-1] = DOLLAR
                else:
                    letters.append(letter)
            elif self._quote == "'":
                self._quote = "" if letter == "'" else self._quote
                letters.append(DOLLAR if letter == "$" else letter)
            elif letter == "#" and not self._quote and not self._depth and (not before or before.isspace()):
                break
            elif letter in ";&|" and not self._quote and not self._depth:
                self._whole.append("".join(letters))
                letters.clear()
            elif letter == "`":
                self._ticked = not self._ticked
                self._depth = self._depth + 1 if self._ticked else max(self._depth - 1, 0)
                letters.append("$(" if self._ticked else ")")
            else:
                self._add_plain(letter, before)

    def _add_plain(self, letter: str, before: str) -> None:
        self._escaped = letter == "\\"
        if letter in "'\"" and self._quote in ("", letter) and not (letter == "'" and self._depth):
            self._quote = "" if self._quote else letter
        self._depth += letter in "({" and (before == "$" or self._depth > 0)
        self._depth -= letter in ")}" and self._depth > 0
        self._letters.append(SPACE if self._depth and letter.isspace() else letter)


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
