from __future__ import annotations

import inspect
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from asyncrl.algorithms import (
    Ages,
    Candidates,
    Episodes,
    PolicyTokens,
    Rollouts,
    Segments,
    Totals,
    Updates,
    registry,
)
from asyncrl.algorithms.docs import main, page, table
from asyncrl.algorithms.parts import card
from asyncrl.algorithms.presets import preset_rows
from tests.algorithms import my_parts

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()


def test_the_page_is_current_and_has_every_kind_and_the_example_that_is_tested():
    assert page(PAGE) == PAGE
    assert all(f"<!-- parts of {kind} -->" in PAGE for kind in registry.HOMES)
    assert inspect.getsource(my_parts).partition('"""\n\n')[2] in PAGE


def test_the_readme_counts_the_parts():
    count = sum(len(registry.parts(kind)) for kind in registry.HOMES)
    assert f"The {count} parts of algorithms" in (Path(__file__).parents[2] / "README.md").read_text()


def test_a_presets_row_says_what_it_is_made_of():
    rows = {row[0]: "; ".join(row) for row in preset_rows()}
    assert "has a critic" in rows["`ppo`"]
    assert "vtrace" in rows["`impala`"]
    assert "implicit.train" in rows["`prime`"]


@pytest.mark.parametrize("kind", registry.HOMES)
def test_every_part_has_its_card_and_every_parameter_a_meaning(kind):
    for part in registry.parts(kind).values():
        assert {"summary", "formula", "use", "source"} <= card(part).keys(), part
        assert re.search(r"(19|20)\d\d|no paper", card(part)["source"]), part
    assert all(parameter["meaning"] for entry in table([kind]) for parameter in entry["parameters"])


def test_the_list_names_every_part_with_its_formula_and_parameters(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    for entry in table():
        assert f"  {entry['name']}" in text
        assert entry["formula"] in text
    assert "cap=2.0: largest weight; a number in (0, inf]" in text
    assert "norm (must be given): the constant" in text


def test_the_list_as_json_is_the_table(capsys):
    assert main(["--json", "loss", "loss"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert entries == table(["loss"])
    ppo = next(entry for entry in entries if entry["name"] == "ppo")
    assert ppo["parameters"][0] == {
        "name": "clip_low",
        "default": 0.2,
        "allowed": "a number in [0, 1]",
        "meaning": "the ratio is clipped to at least 1 - clip_low",
    }


def test_json_has_no_infinities(capsys):
    main(["--json"])
    json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def test_an_unknown_kind_is_refused_with_the_kinds(capsys):
    with pytest.raises(SystemExit):
        main(["losses"])
    assert "there is no kind 'losses'; use advantage, loss" in capsys.readouterr().err


@pytest.mark.parametrize(
    "kind",
    [Ages, Candidates, Episodes, PolicyTokens, Rollouts, Segments, Totals, Updates],
    ids=lambda kind: kind.__name__,
)
def test_the_page_names_every_field_of_what_a_part_gets(kind: type[Any]) -> None:
    row = re.search(rf"^\| .* \| `{kind.__name__}` \| (.*) \|$", PAGE, re.M)
    assert row
    assert {each.name for each in fields(kind)} <= set(re.findall(r"`(\w+)", row[1]))
