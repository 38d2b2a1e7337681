"""Splits the lines of a shell script into commands.

Follows quotation marks, comments, `$(...)`, `${...}` and backticks. Some characters are replaced, so that
`shlex` can split a command into its words: see SPACE, DOLLAR and MASK.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

OPEN_VALUE = re.compile(
    r"(?:^|\s)(?:\+{0,2}[A-Za-z_][\w.]*\+?=[^\s\"']*(?:\"[^\"]*|'[^']*)"
    r"|(?P<mark>[\"'])\+{0,2}[A-Za-z_]\w*(?:\.\w+)+=(?:(?!(?P=mark)).)*)$"
)
"""A key or a variable at the end of a command, whose value has an open quotation mark. The mark may also come before
the key."""
STARTS_VERL = re.compile(r"\bmain_\w|-m\s+verl\.")
"""The name of a program of verl, such as verl.trainer.main_ppo."""
MOST_LINES = 50
"""The maximum number of lines of one command. A line and the lines that continue it after a backslash count as one."""
SPACE, DOLLAR, UNEXPANDED = "\x1f", "\x1e", "\x1d"
"""Characters that replace other characters while words are split and variables expanded. SPACE replaces a space within
brackets, DOLLAR a dollar sign that is quoted or escaped, and UNEXPANDED a dollar sign that is left in the value of a
variable."""
MASK = str.maketrans({"'": "\x1c", '"': "\x1b", "\\": "\x1a"})
"""Replaces quotation marks and backslashes within `$(...)`: they must not change how the command around it is split."""
LITERAL = MASK | str.maketrans({"$": UNEXPANDED})
"""Replaces characters that the shell takes literally if they come from the value of a variable."""
SHOWN = str.maketrans({SPACE: " ", DOLLAR: "$", UNEXPANDED: "$", "\x1c": "'", "\x1b": '"', "\x1a": "\\"})
"""Puts the replaced characters back."""


def commands_of(lines: Sequence[str], remarks: list[str]) -> Iterator[str]:
    """The commands of a script's lines, without comments. A command goes on over the next line while a bracket or its
    quoted value is open.

    If the command is still open after MOST_LINES lines or at the end of the script, it ends with its first line
    instead. The same holds if a line within its brackets starts verl. In both cases `remarks` gets a line that says so.
    """
    start = 0
    while start < len(lines):
        found = _Splitter()
        end = _add_line(found, lines, start)
        count, starts_verl = 1, False
        while found.is_open and not starts_verl and count < MOST_LINES and end < len(lines):
            before, in_brackets = end, found.in_brackets
            end = _add_line(found, lines, end)
            count += 1
            starts_verl = in_brackets and any(STARTS_VERL.search(line) for line in lines[before:end])
        if found.is_open or starts_verl:
            found = _Splitter()
            end = _add_line(found, lines, start)
            found.close()
            remarks.append(
                f"Check the script: {lines[start].strip():.80}: this line opens a bracket or quotation mark that is "
                "not closed. It is read as if it were closed at the end of the line"
            )
        yield from found.commands
        start = end


def _add_line(found: _Splitter, lines: Sequence[str], start: int) -> int:
    """Add a line, and the lines that continue it after a backslash. Returns the number of the next line."""
    found.add(lines[start])
    start += 1
    while found.continues and start < len(lines):
        found.add(lines[start])
        start += 1
    return start


class _Level(NamedTuple):
    """A quotation mark or a bracket that is open.

    - `closer`: the character that closes it
    - `in_brackets`: it is, or is within, `$(...)`, `${...}` or backticks
    - `in_command`: it is, or is within, `$(...)` or backticks
    - `quoted`: it is a double quotation mark, or a `${...}` within one, so that apostrophes in it have no effect
    """

    closer: str
    in_brackets: bool
    in_command: bool
    quoted: bool


_PLAIN = _Level("", False, False, False)


class _Splitter:
    """Splits text into commands. A command in backticks becomes `$(COMMAND)`."""

    def __init__(self) -> None:
        self._whole: list[str] = []
        self._letters: list[str] = []
        self._levels = [_PLAIN]
        self._escaped, self._ticked, self._begun = False, False, False
        self.continues = False
        """True if the last line ends with a backslash that continues it."""

    @property
    def commands(self) -> list[str]:
        """All commands so far. The last one may be incomplete."""
        return [*self._whole, "".join(self._letters)]

    @property
    def in_brackets(self) -> bool:
        """True if the text ends within `$(...)`, `${...}` or backticks."""
        return self._levels[-1].in_brackets

    @property
    def is_open(self) -> bool:
        """True if the text ends in brackets, or in the quoted value of a key or variable."""
        return self.in_brackets or (len(self._levels) > 1 and OPEN_VALUE.search("".join(self._letters)) is not None)

    def close(self) -> None:
        """Close the open brackets. A quotation mark stays open, so that the words after it can still be found."""
        closers = [level.closer for level in reversed(self._levels) if level.closer in (")", "}", "`")]
        self._letters += [")" if closer == "`" else closer for closer in closers]

    def add(self, line: str) -> None:
        """Split one more line of the script, up to its comment."""
        line = f" {line}" if self._begun else line
        self._begun = True
        for place, letter in enumerate(line):
            before, closer = line[place - 1 : place], self._levels[-1].closer
            if self._escaped and letter == "$":
                self._letters[-1] = DOLLAR
            elif closer == "'" and letter == "$":
                self._letters.append(DOLLAR)
            elif self._escaped:
                self._append(letter)
            elif closer == "'":
                self._append(letter)
                if letter == "'":
                    self._levels.pop()
            elif letter == "#" and closer in ("", ")") and (not before or before.isspace()):
                break
            elif letter in ";&|" and not closer:
                self._whole.append("".join(self._letters))
                self._letters.clear()
            elif letter == "`":
                self._add_tick()
            else:
                self._add_plain(letter, before)
                continue
            self._escaped = False
        self.continues = self._escaped
        if self._escaped:
            self._letters.pop()
            self._escaped = False

    def _add_tick(self) -> None:
        self._letters.append(")" if self._ticked else "$(")
        if not self._ticked:
            self._open("`")
        while self._ticked and self._levels.pop().closer != "`":
            pass  # Brackets and quotations that begin within backticks end with them.
        self._ticked = not self._ticked

    def _add_plain(self, letter: str, before: str) -> None:
        level = self._levels[-1]
        after_dollar = self._letters[-1:] == ["$"]
        self._escaped = letter == "\\"
        self._append(letter)
        if letter == level.closer:
            self._levels.pop()
        elif letter == '"' or (letter == "'" and not level.quoted):
            self._open(letter)
        elif letter == "{" and after_dollar:
            self._open("}")
        elif letter == "(" and (after_dollar or level.closer in (")", "`")):
            self._open(")")
        elif not level.closer and (letter == ")" or (letter == "(" and not before.strip())):
            # The bracket of an array or of a group of commands is not part of a word.
            self._letters[-1] = " "

    def _open(self, closer: str) -> None:
        level = self._levels[-1]
        self._levels.append(
            _Level(
                closer,
                in_brackets=level.in_brackets or closer in ")}`",
                in_command=level.in_command or closer in ")`",
                quoted=closer == '"' or (closer == "}" and level.quoted),
            )
        )

    def _append(self, letter: str) -> None:
        level = self._levels[-1]
        if level.in_brackets and letter.isspace():
            letter = SPACE
        elif level.in_command:
            letter = letter.translate(MASK)
        self._letters.append(letter)
