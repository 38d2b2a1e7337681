"""The versions of other packages that the package accepts."""

from __future__ import annotations

import tomllib

from packaging.requirements import Requirement

from tests.end_to_end.support import ROOT


def test_safetensors_that_stop_all_threads_while_they_write_are_refused() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (accepted,) = (
        wanted.specifier for wanted in map(Requirement, project["dependencies"]) if wanted.name == "safetensors"
    )
    assert not accepted.contains("0.7.0")
    assert accepted.contains("0.8.0")
