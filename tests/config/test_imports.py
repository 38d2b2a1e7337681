"""The errors for objects that cannot be imported."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.config.imports import files_in, imported
from asyncrl.errors import ConfigError


def test_a_package_that_a_users_file_needs_is_named_and_not_the_users_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_a_package.py").write_text("import package_that_is_not_there.part\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"rule=needs_a_package\.score .* module package_that_is_not_there, .* install .* move score into a file",
    ):
        imported("needs_a_package.score", "rule=needs_a_package.score")


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("own_rewards.lenght_bonus", "own_rewards.length_bonus"),
        ("own_rewrads.length_bonus", "own_rewards.length_bonus"),
        ("own_package.rewrds.score", "own_package.rewards.score"),
        ("own_package.package.score", "own_package.packages.score"),
    ],
)
def test_a_function_or_a_module_that_nearly_exists_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, near: str
) -> None:
    (tmp_path / "own_rewards.py").write_text("def length_bonus(): ...\n")
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").touch()
    (tmp_path / "own_package" / "rewards.py").touch()
    (tmp_path / "own_package" / "packages.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=rf"cannot be imported \(.*\); did you mean {near}\?"):
        imported(path, f"rule={path}")


def test_an_error_in_the_users_own_module_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_broken.py").write_text("import os\n\nx = 1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"ZeroDivisionError: division by zero \(\S*own_broken\.py, line 3\)"):
        imported("own_broken.score", "rule=own_broken.score")


@pytest.mark.parametrize("path", ["no_such_package.part.score", "asyncrl.no_such_part.score", "asyncrl.errors.nothing"])
def test_a_path_that_leads_nowhere_is_refused_with_its_form(path: str) -> None:
    with pytest.raises(ConfigError, match=r"give module\.function, with the module's folder on PYTHONPATH"):
        imported(path, f"rule={path}")


@pytest.fixture
def _busy_imports() -> Iterator[None]:
    """Whenever garbage is collected, which is all the time, another module is imported."""

    def one_more(phase: str, _: object) -> None:
        sys.modules[f"imported_meanwhile_{len(sys.modules)}"] = sys

    threshold = gc.get_threshold()
    gc.callbacks.append(one_more)
    gc.set_threshold(1)
    yield
    gc.set_threshold(*threshold)
    gc.callbacks.remove(one_more)
    for name in [each for each in sys.modules if each.startswith("imported_meanwhile_")]:
        del sys.modules[name]


@pytest.mark.usefixtures("_busy_imports")
def test_other_threads_may_import_while_the_files_of_a_pickle_are_found() -> None:
    assert files_in(b"") == []
