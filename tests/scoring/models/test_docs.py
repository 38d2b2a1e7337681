"""docs/scoring.md names every family with its parameters, and its example runs."""

import importlib
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import asyncrl
from asyncrl.config.schema import ScoringModelConfig
from asyncrl.scoring.models import registry
from asyncrl.scoring.transcript import Passage

PAGE = (Path(asyncrl.__file__).parents[1] / "docs" / "scoring.md").read_text()


@pytest.mark.parametrize("family", sorted({*registry.PRM_FAMILIES, *registry.OUTCOME_FAMILIES}))
def test_the_page_has_every_family_with_its_parameters(family):
    assert f"| `{family}` |" in PAGE
    modules = {
        families[family] for families in (registry.PRM_FAMILIES, registry.OUTCOME_FAMILIES) if family in families
    }
    for module in modules:
        for each in fields(importlib.import_module(f"asyncrl.scoring.models.{module}").Params):
            assert re.search(rf"`(params\.)?{each.name}`", PAGE), each.name


def test_the_pages_own_model_scores():
    source = next(code for code in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "class MyPRM" in code)
    names = {}
    exec(source, names)
    model = names["MyPRM"](ScoringModelConfig(params={"version": 2}))
    (scores,) = model.score([[Passage("q", False), Passage("abc", True)]])
    assert model.name == "lengths@2"
    np.testing.assert_allclose(scores.probability, [0.25])
