"""A few thousand damaged messages; `make fuzz MESSAGES=1000000` sends more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.security.endpoint_fuzz import fuzz_endpoint
from tests.security.fuzz import fuzz_publisher, fuzz_replay
from tests.security.mutator import REPLAY_REQUESTS, WEIGHT_REQUESTS, Mutator

pytestmark = pytest.mark.slow


def test_a_replay_survives_damaged_messages_and_serves_the_honest(tmp_path: Path) -> None:
    result = fuzz_replay(tmp_path, messages=6000, seed=1)
    assert result["refused"] > 4000


def test_a_publisher_survives_damaged_messages_and_serves_the_honest(tmp_path: Path) -> None:
    result = fuzz_publisher(tmp_path, messages=3000, seed=1)
    assert result["refused"] > 2000


def test_the_endpoint_of_agents_survives_hostile_requests_and_serves_the_honest() -> None:
    result = fuzz_endpoint(requests=1000, seed=1)
    answers = result["answers"]
    assert answers["400"] > 500
    assert answers["200"] > 50
    assert result["counts"]["refused"] == answers["400"]
    assert result["honest_turns"] > 0


def test_the_same_seed_damages_the_same_messages_in_the_same_way() -> None:
    for requests in (REPLAY_REQUESTS, WEIGHT_REQUESTS):
        one, same, other = Mutator(requests, 5), Mutator(requests, 5), Mutator(requests, 6)
        messages = [one.message() for _ in range(500)]
        assert messages == [same.message() for _ in range(500)]
        assert messages != [other.message() for _ in range(500)]
