"""A real SGLang samples after images what the learner's policy would, and takes its weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.config.schema import ImagesConfig, ModelConfig
from asyncrl.engine.base import Generation, PlacedImage
from asyncrl.engine.fleet.fleet import Fleet
from asyncrl.engine.sglang.routes.opening import ServerRouteSettings
from asyncrl.engine.sglang.server import SglangServer
from asyncrl.learner.batch.local_batch import build_local_batch
from asyncrl.learner.checkpoint.gathering import gather_all
from asyncrl.learner.model.policy import Policy, load_policy
from asyncrl.learner.ranks.joining import joined
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.modelling.images import ImageReader, digest_of
from asyncrl.types import Grammar, Sampling
from tests.engine.real import fleet_over, run
from tests.sglang.support import RealServer
from tests.vision import END_TOKEN, START_TOKEN, encoded, save_wide_vision_model, shown

PROGRAM = ("-m", "tests.sglang.vision_server")
PATCH = 14
# Sizes that no processor changes: the learner's and SGLang's resize by other code.
FILES = [encoded((4 * PATCH, 6 * PATCH), 1), encoded((8 * PATCH, 4 * PATCH), 2, "JPEG")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_wide_vision_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    server = RealServer(folder, tmp_path_factory.mktemp("logs") / "server.log", program=PROGRAM)
    yield server
    server.kill()


@pytest.mark.parametrize("into_servers", ["auto", "gloo"])
def test_servers_take_all_weights_and_sample_behind_images_with_the_log_probs_of_the_learner(
    server: RealServer, folder: Path, into_servers: str
):
    """Each push changes every tensor, those of the tower too."""
    reader = ImageReader.of(ModelConfig(str(folder)), ImagesConfig())
    files = {digest_of(data): data for data in FILES}
    images = {name: reader.read(data) for name, data in files.items()}
    tall, wide = images
    prompts: list[list[Any]] = [
        [5, 6, 7],
        [5, START_TOKEN, tall, END_TOKEN, 9],
        [5, START_TOKEN, wide, END_TOKEN, 9, START_TOKEN, tall, END_TOKEN, 10, 11],
        [5, START_TOKEN, wide, END_TOKEN, 12, 13],
    ]

    async def sample(fleet: Fleet, version: int, grammar: Grammar | None = None) -> list[Generation]:
        found = []
        for index, prompt in enumerate(prompts):
            given = shown(images, prompt, [1])
            spans = zip(given.image_spans.tolist(), given.image_names, strict=True)
            placed = [PlacedImage(start, end, name, files[name]) for (start, end), name in spans]
            session, sampling = f"{version}/{index}", Sampling(max_new_tokens=12, grammar=grammar)
            found.append(await fleet.generate(given.tokens[:-1], sampling, [], session, placed))
        return found

    def logprobs(policy: Policy, sampled: Sequence[Generation]) -> list[np.ndarray]:
        found = []
        for prompt, each in zip(prompts, sampled, strict=True):
            trajectory = shown(images, prompt, each.tokens.tolist())
            batch = build_local_batch([0], [trajectory], torch.device("cpu"), vision=policy.vision, images=images)
            found.append(policy(batch.forward_pass([0]).packed)[0][trajectory.loss_mask].numpy())
        return found

    def open_server(url: str) -> SglangServer:
        return SglangServer(
            url, context=512, settings=ServerRouteSettings(into_servers, bucket_bytes=64 << 10), silence_s=60
        )

    async def push_and_compare(policy: Policy, ranks: Ranks) -> None:
        await server.ready()
        form, generator = policy.weight_format, torch.Generator().manual_seed(7)
        async with fleet_over([server.url], open_server, policy.model, expected=form.shapes) as fleet:
            for version in (1, 2):
                before = deepcopy(policy.state_dict())
                for parameter in policy.parameters():
                    own = parameter.to_local()
                    own.add_(torch.randn(own.shape, generator=generator) * 0.03)
                await fleet.update_weights(version, gather_all(policy.model, form, torch.float32, ranks))
                sampled = await sample(fleet, version)
                for each, ours in zip(sampled, logprobs(policy, sampled), strict=True):
                    assert (each.versions == version).all()
                    np.testing.assert_allclose(each.logprobs, ours, atol=1e-4)
                restricted = await sample(fleet, version, Grammar("regex", "[ab]{12}"))
                for each, ours in zip(restricted, logprobs(policy, restricted), strict=True):
                    assert each.grammar_mass.max() < 0.9
                    np.testing.assert_allclose(each.grammar_mass, np.exp(ours - each.logprobs), rtol=1e-3)
                after = deepcopy(policy.state_dict())
                policy.load_state_dict(before)
                for each, earlier in zip(sampled, logprobs(policy, sampled), strict=True):
                    assert np.abs(each.logprobs - earlier).max() > 0.05
                policy.load_state_dict(after)

    with joined() as ranks, torch.no_grad():
        policy = load_policy(ModelConfig(str(folder), compile=False), 1.0, ranks, 256)
        run(lambda: push_and_compare(policy, ranks))
