"""Users by name: what can be one, and what is refused before a run starts."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.tools import Interaction
from asyncrl.tools.interactions.registry import load_interactions

HERE = __name__


class Shopper(Interaction):
    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        return True, "Thanks.", 1.0, {}


class Picky(Shopper):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.budget = config["budget"]


def test_each_user_knows_its_name_and_its_config():
    users = load_interactions(
        {"shopper": f"{HERE}.Shopper", "picky": {"class_name": f"{HERE}.Picky", "config": {"budget": 3}}}
    )
    assert {name: dict(user.config) for name, user in users.items()} == {
        "shopper": {"name": "shopper"},
        "picky": {"name": "picky", "budget": 3},
    }
    assert users["picky"].name == "picky"


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (5, r"actor\.interactions: user is 5; it must be {class_name:"),
        ({"class_name": f"{HERE}.Shopper", "cofnig": {}}, "it must be {class_name:"),
        ({"class_name": f"{HERE}.Shopper", "config": [1]}, "config is .*; it must be a mapping"),
        ("nowhere.Shopper", "cannot be imported"),
        (
            "collections.OrderedDict",
            r"written for verl is named through asyncrl\.compat\.verl\.VerlInteraction",
        ),
        (f"{HERE}.Interaction", "cannot be made with its config: TypeError"),
        (f"{HERE}.Picky", "cannot be made with its config: KeyError: 'budget'"),
    ],
)
def test_what_is_no_user_is_refused_with_its_name(entry: Any, reason: str):
    with pytest.raises(ConfigError, match=reason):
        load_interactions({"user": entry})
