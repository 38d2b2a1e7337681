"""An option says what it may be, and accepts nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from asyncrl.config.option import Option, option, options


@dataclass
class Section:
    share: float = option(0.5, "a share", "(0, 1]")
    count: int | None = option(None, "a count", "[1, inf)")
    kind: str = option("a", "a kind", choices=("a", "b"))
    kinds: dict[str, list[str]] = option({}, "kinds by name", choices=("a", "b"))
    rates: list[float] = option([], "rates", "[0, 1]")


def named(name: str) -> Option:
    return next(each for each in options(Section) if each.name == name)


@pytest.mark.parametrize(
    ("name", "allowed", "good", "bad"),
    [
        ("share", "a number in (0, 1]", [1, 0.1], [0, 1.5, "x", None, True, float("nan")]),
        ("count", "a whole number in [1, inf) or null", [None, 3], [0, 1.5, False]),
        ("kind", "one of a, b", ["a"], ["c", 1]),
        ("kinds", "a mapping to lists of a, b", [{}, {"x": ["a", "b"]}], [{"x": ["c"]}, {"x": "a"}, ["a"]]),
        ("rates", "a list of numbers in [0, 1]", [[], [0, 1.0]], [[2], 1, {"x": 1}]),
    ],
)
def test_an_option_takes_what_it_says(name: str, allowed: str, good: list[object], bad: list[object]) -> None:
    assert named(name).allowed == allowed
    assert [each for each in good if not named(name).allows(each)] == []
    assert [each for each in bad if named(name).allows(each)] == []


def test_instances_share_no_mutable_default() -> None:
    Section().rates.append(1.0)
    assert Section().rates == []
