"""The names that users import are listed in docs/imports.md and public in their packages; pages show no others."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/imports.md"
USER_FILES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("examples/**/*.py")),
    *sorted(ROOT.glob("configs/**/*.yaml")),
]
WHOLE = ("asyncrl.compat.verl", "asyncrl.compat.verl.controller", "asyncrl.compat.verl.controller.operators")
"""Packages all of whose public names are stable."""

LIGHT = ("asyncrl.types", "asyncrl.tools", "asyncrl.agents", "asyncrl.scoring.rules", "asyncrl.scoring.models")
HEAVY = ("torch", "transformers", "aiohttp", "hydra", "PIL")


def listed() -> Iterator[tuple[str, str]]:
    """Each place of the page with each of its names."""
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.M)[1:]:
        place = re.match(r"`(asyncrl[\w.]*)`", section)
        for cell in re.findall(r"^\| (`.*?) \|", section, re.M):
            assert place, f"{section.splitlines()[0]} names no package"
            yield from ((place[1], name) for name in re.findall(r"`(\w+)`", cell))


def exported(place: str) -> set[str]:
    return set(importlib.import_module(place).__all__)


STABLE = {*listed(), *((place, name) for place in WHOLE for name in exported(place))}


@pytest.mark.parametrize(("place", "name"), sorted(STABLE))
def test_a_listed_name_is_public_where_the_page_says(place: str, name: str) -> None:
    module = importlib.import_module(place)
    assert hasattr(module, name)
    if module.__spec__.submodule_search_locations:
        assert name in module.__all__
    else:
        assert getattr(module, name).__module__ == place


@pytest.mark.parametrize("place", sorted({place for place, _ in STABLE} - set(WHOLE)))
def test_the_page_lists_all_that_a_package_exports_to_users(place: str) -> None:
    names = set(getattr(importlib.import_module(place), "__all__", ()))
    assert names <= {name for at, name in STABLE if at == place}


@pytest.mark.parametrize("file", USER_FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_users_are_shown_only_names_that_are_listed(file: Path) -> None:
    text = file.read_text()
    assert [each for each in [*imported(text, file.suffix), *dotted(text)] if each not in STABLE] == []


def imported(text: str, suffix: str) -> Iterator[tuple[str, str]]:
    """The names of asyncrl that the Python code of a file imports."""
    code = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if suffix == ".md" else [text] * (suffix == ".py")
    for node in (node for block in code for node in ast.walk(ast.parse(block))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "asyncrl":
            yield from ((node.module, each.name) for each in node.names)


def dotted(text: str) -> Iterator[tuple[str, str]]:
    """The dotted paths in a text that lead to something within a module of asyncrl."""
    for path in re.findall(r"(?<![\w./])asyncrl(?:\.[A-Za-z_]\w*)+", text):
        place, _, name = path.rpartition(".")
        source = ROOT / path.replace(".", "/")
        if not (source.is_dir() or source.with_suffix(".py").exists()):
            yield place, name


@pytest.mark.slow
@pytest.mark.parametrize("place", LIGHT)
def test_what_a_tool_a_rule_or_an_agent_imports_is_light(place: str) -> None:
    code = f"import sys; before = set(sys.modules); import {place}; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert {name.split(".")[0] for name in done.stdout.split()}.isdisjoint(HEAVY)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["asyncrl.launch.preflight.trying", "asyncrl.commands.trial.__main__"])
def test_an_episode_under_a_script_does_not_wait_for_torch(place: str) -> None:
    code = f"import sys, {place}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
