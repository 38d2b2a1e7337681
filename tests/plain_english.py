"""The rules of plain English that a machine can hold: `python -m tests.plain_english [PATH...]` lists what breaks one.

CONTRIBUTING.md has the rules for people. `make check` runs this without a path, which reads all files of `CHECKED`.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
CHECKED = (
    *("asyncrl", "docs", "examples/*.py", "examples/*/*.md"),
    *("tests/**/*.py", "benchmarks/**/*.py", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"),
)
"""Patterns of the files and folders that are read without a path: Python files, and pages in Markdown."""
FIRST = re.compile(
    r"(what|whether|how|as|of|those|which|where|who|whose|when|if|in|for|with|from|to|by|on|at|that|its|their|it|they"
    r"|them|these|there|behind|beside|nothing)\b",
    re.IGNORECASE,
)
"""Words that begin no docstring: it begins with a verb, or with a noun and its article."""
IDIOM = re.compile(r"\b(behind|besides?|anew|whoever|whatever|nobody|gone|stands|stood)\b", re.IGNORECASE)
"""Words that were used here in meanings of their own."""
LONGEST = 30
"""Words of a sentence."""
MOST_SENTENCES = 4
"""Sentences of a paragraph in the docstring of a module."""

_BLOCK = re.compile(r"(?<=\n\n)(?: {4,}.*(?:\n|\Z))+")
"""A block of code in a docstring: a paragraph whose lines are all indented."""
_CODE = re.compile(r"``[^`]+``|`[^`]+`|https?://\S+|\[([^\]]*)\]\([^)]*\)|<[^>]*>")
_BREAK = re.compile(r"(?<=[.!?:;])[\"')]*\s+|\n\s*\n|\n\s*(?=[-*|]|\d+\. )")
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
_SECTION = re.compile(r"^(Formula|Source|Use|Shapes|Raises?):")


class Fault(NamedTuple):
    """A place that breaks a rule."""

    path: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


def faults_of_code(path: Path) -> Iterator[Fault]:
    """The faults of a Python file: its docstrings, comments and the texts that it shows. A test's texts are data."""
    source = path.read_text()
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        for text, line, is_module in _docstrings(node):
            docstrings.add(line)
            if first := FIRST.match(text):
                yield Fault(path, line, f"a docstring begins with {first.group()}")
            if is_module:
                yield from _long_paragraphs(path, line, text)
            yield from _faults(path, line, text)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from _faults(path, token.start[0], token.string.lstrip("#: "))
    if (ROOT / "tests").resolve() in path.resolve().parents:
        return
    shown = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.lineno not in docstrings)
    for node in shown:
        if isinstance(node.value, str) and node.value.count(" ") > 2:
            yield from _idioms(path, node.lineno, node.value)


def faults_of_page(path: Path) -> Iterator[Fault]:
    """The faults of a page in Markdown, outside of its blocks of code and its tables."""
    paragraph: list[str] = []
    start, in_code = 1, False
    for number, line in enumerate([*path.read_text().splitlines(), ""], 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        is_prose = not in_code and line.strip() and not line.lstrip().startswith(("```", "|", "#", "<"))
        if is_prose and not (paragraph and re.match(r"\s*([-*]|\d+\.) ", line)):
            start = start if paragraph else number
            paragraph.append(line)
            continue
        if paragraph:
            yield from _faults(path, start, "\n".join(paragraph))
        paragraph, start = ([line], number) if is_prose else ([], number)


def _docstrings(node: ast.AST) -> Iterator[tuple[str, int, bool]]:
    """The docstring of a module, a class or a function, and the texts below the fields of its body, without code."""
    body = getattr(node, "body", None)
    if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or not body:
        return
    for index, each in enumerate(body):
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) and isinstance(each.value.value, str):
            text = _BLOCK.sub("", inspect.cleandoc(each.value.value))
            yield text, each.value.lineno, index == 0 and isinstance(node, ast.Module)


def _long_paragraphs(path: Path, line: int, text: str) -> Iterator[Fault]:
    for paragraph in re.split(r"\n\s*\n", text):
        if re.search(r"^\s*[-*|]", paragraph, re.MULTILINE):
            continue
        count = len([each for each in re.split(r"(?<=[.!?])\s+", _CODE.sub("X", paragraph).strip()) if each])
        if count > MOST_SENTENCES:
            yield Fault(path, line, f"a paragraph of {count} sentences: {paragraph.strip()[:50]!r}")


def _faults(path: Path, line: int, text: str) -> Iterator[Fault]:
    yield from _idioms(path, line, text)
    for sentence in _BREAK.split(_CODE.sub(lambda found: found.group(1) or "X", text)):
        words = len(_WORD.findall(sentence))
        if words > LONGEST and not _SECTION.match(sentence.strip()):
            yield Fault(path, line, f"a sentence of {words} words: {' '.join(sentence.split())[:60]!r}")


def _idioms(path: Path, line: int, text: str) -> Iterator[Fault]:
    for word in IDIOM.finditer(_CODE.sub("X", text)):
        yield Fault(path, line, f"the word {word.group()!r}: say it in the field's words")


def faults_of(path: Path) -> list[Fault]:
    """The faults of a file, or of all files in a folder."""
    files = sorted(each for suffix in ("py", "md") for each in path.rglob(f"*.{suffix}")) if path.is_dir() else [path]
    return [fault for file in files for fault in (faults_of_page if file.suffix == ".md" else faults_of_code)(file)]


def main(arguments: list[str]) -> int:
    """List the faults of the named paths, by default of `CHECKED`; the status is 1 where there are any."""
    named = [Path(each) for each in arguments]
    paths = named or [path for pattern in CHECKED for path in sorted(ROOT.glob(pattern))]
    found = [fault for path in paths for fault in faults_of(path)]
    sys.stdout.write("".join(f"{fault}\n" for fault in found))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
