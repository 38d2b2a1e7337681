"""Every file that a page, a docstring, a comment or a message names exists, under the name that is given."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted(ROOT.glob("docs/*.md"))]
SOURCES = sorted((ROOT / "asyncrl").rglob("*.py"))
FILE = re.compile(r"(?<![\w{}<>*/.$-])((?:[\w.-]+/)*[\w-]+\.(?:py|md))\b")
HEADING = re.compile(r"\b(docs/\w+\.md)#([\w-]+)")
PLACEHOLDER = re.compile(r"(?:^|/)[A-Z_]+(?:[/.]|_route\.py)")
"""Words such as NAME, which stand for any name."""
ELSEWHERE = re.compile(r"^(?:my_\w+|make_(?:data|model)|notes|verl_rewards|a/b)\.py$")
"""Files that a user writes in the examples of the pages."""


@cache
def names() -> frozenset[str]:
    """Every end of the path of a file of the repository, from its last part to the whole."""
    folders = ("asyncrl", "tests", "docs", "benchmarks", "configs", "examples", "launchers")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.*")] + list(ROOT.glob("*.*"))
    parts = [file.relative_to(ROOT).parts for file in files if file.is_file()]
    return frozenset("/".join(each[start:]) for each in parts for start in range(len(each)))


def missing(text: str) -> Iterator[str]:
    for name in FILE.findall(text):
        if not PLACEHOLDER.search(name) and not ELSEWHERE.match(name) and name not in names():
            yield name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    assert [name for code in re.findall(r"`([^`\n]+)`", prose) for name in missing(code)] == []


@pytest.mark.slow
def test_every_file_that_a_docstring_or_a_comment_names_exists() -> None:
    # Taking a file apart takes long: only those that name such a file anywhere, perhaps in their code, are.
    suspects = [source for source in SOURCES if any(missing(source.read_text()))]
    found = [f"{source.relative_to(ROOT)}: {name}" for source in suspects for name in missing(words(source))]
    assert found == []


@pytest.mark.slow
def test_every_heading_that_a_message_names_exists() -> None:
    for source in SOURCES:
        for page, heading in HEADING.findall(source.read_text()):
            titles = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), re.M)
            anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in anchors, f"{source.relative_to(ROOT)}: {page}#{heading}"


FEW_MODULES, FEW_NAMED = 3, 2


@pytest.mark.parametrize(
    "package",
    [folder for folder in sorted((ROOT / "asyncrl").rglob("*/")) if len(list(folder.glob("*.py"))) > FEW_MODULES],
    ids=lambda package: str(package.relative_to(ROOT)),
)
def test_a_package_whose_docstring_names_files_names_all_of_them(package: Path) -> None:
    text = docstring(package)
    if len(set(re.findall(r"[\w/]+\.py\b", text))) >= FEW_NAMED:
        named = f"{text}\n{docstring(package.parent)}"
        modules = {file.stem for file in package.glob("*.py")} - {"__init__", "__main__"}
        assert [each for each in sorted(modules) if not re.search(rf"\b{each}\.py\b|`{each}`", named)] == []


def docstring(package: Path) -> str:
    """The docstring of a package; empty if the folder is none."""
    file = package / "__init__.py"
    return ast.get_docstring(ast.parse(file.read_text())) or "" if file.exists() else ""


def words(source: Path) -> str:
    """The comments of a file, and its strings that hold spaces: docstrings and messages."""
    with io.StringIO(source.read_text()) as text:
        tokens = list(tokenize.generate_tokens(text.readline))
    kinds = (tokenize.COMMENT, tokenize.STRING)
    return "\n".join(token.string for token in tokens if token.type in kinds and " " in token.string)
