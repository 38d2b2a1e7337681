"""Every code block of the pages works: Python runs, YAML is a configuration, and commands, keys and options exist."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from asyncrl.config.commands import COMMANDS
from asyncrl.config.compose import composed
from asyncrl.config.files import GROUPS
from asyncrl.launch.plan import without_option
from tests.helpers import status_of

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("benchmarks/results/*.md")),
    *sorted(ROOT.glob("examples/*/README.md")),
]
BLOCK = re.compile(
    r"(?:<!-- not run here: (?P<why>.*?) -->\n)?^ *```(?P<language>\w*)\n(?P<text>.*?)^ *```", re.M | re.S
)
LANGUAGES = ("python", "sh", "text", "yaml")
CHOSEN_AS = re.compile(r"# asyncrl .* (\w+)=")
"""The first line of a file of a group, which shows its use."""


@dataclass(frozen=True)
class Block:
    """A code block of a page. `elsewhere`: another test runs it, or it needs what a test does not have."""

    page: str
    language: str
    text: str
    elsewhere: bool

    def __str__(self) -> str:
        return f"{self.page}: {self.text.splitlines()[0]}"


def blocks(language: str) -> list[Block]:
    found = [(page, match) for page in PAGES for match in BLOCK.finditer(page.read_text())]
    every = [Block(page.name, match["language"], match["text"], match["why"] is not None) for page, match in found]
    return [block for block in every if block.language == language]


def commands() -> list[tuple[str, list[str]]]:
    """Every command of a shell block by its page: its words, without comments, variables and omissions."""
    lines = [(block.page, line) for block in blocks("sh") for line in block.text.replace("\\\n", " ").splitlines()]
    parsed = [(page, [word for word in shlex.split(line, comments=True) if word[:1] != "$"]) for page, line in lines]
    return [(page, [word for word in words if "..." not in word]) for page, words in parsed if words]


def test_every_block_says_what_it_is() -> None:
    named = {match["language"] for page in PAGES for match in BLOCK.finditer(page.read_text())}
    assert named == set(LANGUAGES)


@pytest.mark.slow
@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    compile(block.text, block.page, "exec")
    (tmp_path / "block.py").write_text(block.text)
    if not block.elsewhere:
        runpy.run_path("block.py")


@pytest.mark.slow
@pytest.mark.parametrize("block", [each for each in blocks("yaml") if not each.elsewhere], ids=str)
def test_yaml_is_a_configuration(block: Block, tmp_path: Path) -> None:
    chosen = CHOSEN_AS.match(block.text)
    (tmp_path / "block.yaml").write_text(block.text)
    composed([f"{chosen[1] if chosen else 'experiment'}={tmp_path}/block.yaml"])


@pytest.mark.slow
@pytest.mark.parametrize(("page", "words"), commands(), ids=lambda value: value if isinstance(value, str) else None)
def test_commands_keys_and_options_exist(page: str, words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    match words:
        case ["asyncrl", name, *rest]:
            check_command(name, rest, capfd)
        case ["python", "-m", module, *rest] if module.startswith("asyncrl.") and module.count(".") == 1:
            check_command(module.removeprefix("asyncrl."), rest, capfd)
        case ["python", "-m", module, *_] if module.startswith(("asyncrl", "benchmarks", "tests")):
            assert importlib.util.find_spec(module)
        case [script, "--dry-run", *_] if script.startswith("launchers/"):
            variables = {**os.environ, "ASYNCRL_PYTHON": sys.executable}
            done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=variables)
            assert done.returncode == 0, done.stderr
        case ["make", target, *_]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)
        case [first, *_] if re.match(r"[a-z_]+(\.[a-z_]+)+=", first):
            composed(words)


def check_command(name: str, rest: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """The command's help has its options, and a role can compose its keys."""
    if name.startswith("-"):
        assert name == "--version"
        return
    command = COMMANDS[name]
    subcommand = [rest[0]] if command.subcommands and rest else []
    assert not subcommand or subcommand[0] in command.subcommands
    text = printed([name, *subcommand, "--help"], capfd)
    for option in (word.partition("=")[0] for word in rest if word.startswith("--")):
        assert option in text
    if command.is_role:
        composed(list(settings(rest)))
    if without_option(rest)[1] and not any("..." in word or word.startswith("cluster.hosts=") for word in rest):
        assert "learner" in printed([name, *rest], capfd)


def settings(words: list[str]) -> Iterator[str]:
    """The words of a role that set a key or choose a shipped file."""
    for word in words:
        key, sign, value = word.partition("=")
        if sign and not key.startswith("-") and not (key in GROUPS and (value == "mine" or "/" in value)):
            yield word


def printed(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    status_of(*arguments)
    return capfd.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for target, _, heading in re.findall(r"\]\((?!https?:)([^)#]*)(#([^)]*))?\)", page.read_text()):
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not heading or heading in headings(file), f"{target}#{heading}"


def test_each_of_the_nine_promises_names_its_code_and_the_test_that_attacks_it() -> None:
    page = (ROOT / "docs" / "concepts.md").read_text()
    promises = re.findall(r"^### \d\. .*?(?=^##)", page, re.M | re.S)
    assert len(promises) == 9
    for promise in promises:
        keepers, attackers = promise.partition("**Kept by**")[2].split("**Attacked by**")
        assert "](../asyncrl/" in keepers, promise
        tests = re.findall(r"\]\(\.\./(tests/[\w/]+\.py)\)", attackers)
        assert tests, promise
        assert all(re.search(r"\bdef test_|TestCase\b", (ROOT / test).read_text()) for test in tests), promise


def test_every_page_is_on_one_shelf_of_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    linked = set(re.findall(r"\]\((\w+\.md)", index))
    assert linked == {page.name for page in ROOT.glob("docs/*.md")} - {"README.md"}


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}
