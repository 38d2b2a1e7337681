"""The real SGLang repeats a canary, and fails one of other weights."""

from __future__ import annotations

import pytest

from asyncrl.engine.base import Generation
from tests.engine.real import assert_no_bad_version, policy, push_good_and_bad, run
from tests.sglang.support import fleet_of


@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_healthy_versions_are_served_under_load_and_bad_ones_are_not(server, mode):
    """The bad ones are what their checksums say: the canary is of the weights that the learner has."""
    models = {version: policy(version) for version in range(5)}

    async def scenario() -> list[Generation]:
        await server.ready()
        async with fleet_of([server.url], mode) as fleet:
            return await push_good_and_bad(fleet, models)

    assert_no_bad_version(run(scenario), models)
