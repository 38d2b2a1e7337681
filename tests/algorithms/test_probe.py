"""A mistake in a part of an algorithm is reported before the run starts."""

from __future__ import annotations

import re

import pytest

from asyncrl.algorithms.probe import probe_parts
from asyncrl.errors import ConfigError
from tests.algorithms.support import make_config

FILE = r"bad_parts\.py, line \d+"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"advantage": "Scalar"}, rf"`scores` has shape \[\], not \[4\] \(.*{FILE}\); .*`scores` .* float\[S\]"),
        ({"advantage": "Misspelt"}, rf"AttributeError: .*'rewrad' \(.*{FILE}\); `__call__` must return an Estimate"),
        ({"loss": "Summed"}, rf"`losses` of its TokenLosses has shape \[\], not \[8\] \(.*{FILE}\); .*float\[M\]"),
        (
            {"lr_scale": "Unprefixed"},
            r"the sum 'moved' does not begin with lr_scale/.*whose names begin with lr_scale/",
        ),
        ({"correction": "Floats"}, rf"`keep` is torch.float32, not torch.bool \(.*{FILE}\); .*`keep` bool\[M\]"),
    ],
)
def test_a_mistake_in_an_own_part_is_named_with_its_place_and_what_is_expected(changes, reason):
    ((kind, name),) = changes.items()
    path = f"tests.algorithms.bad_parts.{name}"
    with pytest.raises(ConfigError, match=rf"^algorithm\.{kind}={re.escape(path)} does not work .*{reason}"):
        probe_parts(make_config(**{kind: [path] if kind == "correction" else path}), group_size=2)


@pytest.mark.parametrize("group_size", [1, 2])
def test_sound_parts_of_every_kind_pass(group_size):
    own = {
        "advantage": "Centred",
        "loss": "Squared",
        "kl": "Quartic",
        "aggregation": "HalfMean",
        "value": "Absolute",
        "lr_scale": "Cautious",
    }
    paths = {kind: f"tests.algorithms.my_parts.{name}" for kind, name in own.items()}
    lists = {"correction": ["tests.algorithms.my_parts.Near"], "reward": ["tests.algorithms.my_parts.Short"]}
    probe_parts(make_config(**paths, **lists), group_size)


def test_a_score_that_only_the_rules_of_a_run_give_is_no_mistake():
    probe_parts(make_config(advantage="tests.algorithms.bad_parts.Asks"), group_size=2)


@pytest.mark.parametrize("name", ["Undeclared", "UndeclaredKey"])
def test_a_part_that_reads_a_score_without_naming_it_in_its_reads_is_refused(name):
    with pytest.raises(ConfigError, match=r"style.*`reads`"):
        probe_parts(make_config(advantage=f"tests.algorithms.bad_parts.{name}"), group_size=2)
