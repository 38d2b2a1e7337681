"""The real SGLang repeats a canary, and fails one of other weights."""

from __future__ import annotations

import asyncio

import pytest
import torch

from asyncrl.actor.engine.base import Generation
from asyncrl.types import Sampling
from tests.actor.engine.real import policy, prompts, run
from tests.actor.engine.support import assert_exact, canary_check, parameters, swapped_layers
from tests.helpers import async_until
from tests.sglang.support import fleet_of


def one_shuffled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = "model.layers.1.self_attn.o_proj.weight"
    order = torch.randperm(tensors[name].numel(), generator=torch.Generator().manual_seed(0))
    return {**tensors, name: tensors[name].flatten()[order].view(tensors[name].shape)}


@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_healthy_versions_are_served_under_load_and_bad_ones_are_not(server, mode):
    """The bad ones are what their checksums say: the canary is of the weights that the learner has."""
    bad = {2: one_shuffled(parameters(policy(2))), 3: swapped_layers(parameters(policy(3)))}

    async def scenario() -> list[Generation]:
        await server.ready()
        async with fleet_of([server.url], mode) as fleet:
            counters = lambda: fleet.stats().counters  # noqa: E731
            await fleet.update_weights(0, parameters(policy(0)), canary_check(policy(0), 0))
            working = [
                asyncio.create_task(fleet.generate(start, Sampling(1.0, 100), (), f"s{i}"))
                for i, start in enumerate(prompts(4))
            ]
            await fleet.update_weights(1, parameters(policy(1)), canary_check(policy(1), 1))
            assert counters()["canary_failures"] == 0
            assert counters()["canary_difference"] < 1e-4
            for version, tensors in bad.items():
                failed = counters()["canary_failures"]
                updating = asyncio.create_task(
                    fleet.update_weights(version, tensors, canary_check(policy(version), version))
                )
                await async_until(lambda failed=failed: counters()["canary_failures"] > failed)
                assert fleet.version == 1
                updating.cancel()
            await fleet.update_weights(4, parameters(policy(4)), canary_check(policy(4), 4))
            working.append(asyncio.create_task(fleet.generate(prompts(1)[0], Sampling(1.0, 20), (), "last")))
            return await asyncio.gather(*working)

    *under_load, last = run(scenario)
    models = {version: policy(version) for version in (0, 1, 4)}
    for start, got in zip(prompts(4), under_load, strict=True):
        assert set(got.versions) <= set(models)
        assert_exact(models, start, got, 1.0)
    assert set(last.versions) == {4}
