"""verl hooks in by name: no room knows `compat`, and a run without verl's words imports nothing of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import asyncrl
from asyncrl.config.extensions import EXTENSIONS
from tests.chaos.world import World
from tests.end_to_end.support import Run

PACKAGE = Path(asyncrl.__file__).parent
TABLES = {"config/commands.py", "config/extensions.py"}
"""The tables of dotted paths, which import nothing that they name."""
LOADED = {"asyncrl.replay.store.store", "asyncrl.actor.worker", "asyncrl.scoring.worker", "asyncrl.learner.loop"}
"""A module of each role."""


@pytest.mark.slow
def test_no_source_outside_of_compat_and_the_tables_names_it() -> None:
    sources = (path for path in PACKAGE.rglob("*.py") if "compat" not in path.relative_to(PACKAGE).parts)
    # tensorboard has a package of that name.
    named = {path for path in sources if re.search(r"(?<!tensorboard\.)\bcompat\b", path.read_text())}
    assert {str(path.relative_to(PACKAGE)) for path in named} == TABLES


@pytest.mark.parametrize("path", EXTENSIONS.values(), ids=EXTENSIONS.keys())
def test_each_extension_is_there(path: str) -> None:
    module, _, attribute = path.rpartition(".")
    found = import_module(module)
    assert hasattr(found, attribute) or import_module(path)


@pytest.mark.long
def test_a_run_without_verls_words_imports_nothing_of_compat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World.make(tmp_path)
    # Every process of the run reports its imports on stderr, which is in the logs.
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    with Run("train", tmp_path, *world.overrides(1), "learner.steps=1") as run:
        run.finish()
        imported = set(_imported(run.logs() + run.output))
    assert imported >= LOADED
    assert [name for name in imported if name.startswith("asyncrl.compat")] == []


def _imported(report: str) -> Iterator[str]:
    """The modules in a report of `-X importtime`."""
    return (found[1] for found in re.finditer(r"import time:\s+\d+ \|\s+\d+ \|\s*(\S+)$", report, re.MULTILINE))
