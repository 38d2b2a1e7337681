from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from asyncrl.config.schema import CriticConfig, LoraConfig, ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.batch.images import ImageError, batch_images
from asyncrl.learner.batch.local_batch import LocalBatch, build_local_batch
from asyncrl.learner.batch.prefixes import EVERY, Sharing
from asyncrl.learner.checkpoint.export import export
from asyncrl.learner.checkpoint.gathering import gather_all
from asyncrl.learner.model.critic import load_critic
from asyncrl.learner.model.policy import Policy, load_policy
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.modelling.vision import ImagePatches
from asyncrl.types import Trajectory
from tests.learner.model.test_other_models import prime
from tests.learner.model.test_policy import gradients, weights_for
from tests.learner.support import Run, make_config, with_critic
from tests.vision import (
    IMAGE_TOKEN,
    MERGE,
    VISION_FAMILIES,
    VOCABULARY,
    random_image,
    save_vision_model,
    shown,
    shown_in_turns,
)

pytestmark = pytest.mark.slow

WIDE, TALL, SMALL = (random_image(grid, seed) for seed, grid in enumerate([(1, 4, 8), (1, 8, 4), (1, 2, 2)]))
IMAGES = {bytes([number]) * 32: image for number, image in enumerate((WIDE, TALL, SMALL))}
NAMES = list(IMAGES)


class Expected(NamedTuple):
    """The results of plain forward passes of transformers."""

    logprobs: Tensor
    gradients: dict[str, Tensor]


@pytest.fixture(scope="module", params=VISION_FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("qwen"))


def episodes() -> list[Trajectory]:
    """A group with one image in the prompt; one that differs from it in nothing but the image; two images; none; and
    two that begin like the first, with images in results of later turns."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, 250, 4).tolist()
    wide, tall, small = NAMES
    return [
        shown(IMAGES, [*prompt, wide, 9], rng.integers(3, 250, 6).tolist()),
        shown(IMAGES, [*prompt, wide, 9], rng.integers(3, 250, 3).tolist()),
        shown(IMAGES, [*prompt, tall, 9], rng.integers(3, 250, 6).tolist()),
        shown(IMAGES, [small, 4, small, 5, tall], rng.integers(3, 250, 5).tolist()),
        shown(IMAGES, prompt, rng.integers(3, 250, 5).tolist()),
        shown_in_turns(
            IMAGES, [([*prompt, wide, 9], [7, 8, 2]), ([4, tall, 8, small, 5], [9, 2]), ([wide], [6, 6, 2])]
        ),
        shown_in_turns(IMAGES, [(prompt, [7, 8, 2]), ([4, tall, 5], [9, 2])]),
    ]


def one_by_one(folder: Path, batch: Sequence[Trajectory]) -> Expected:
    """Log-probs [N] of the sampled tokens, and the gradient of their weighted sum."""
    bare = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    logprobs = []
    for each in batch:
        ids = torch.from_numpy(each.tokens).long()
        images = [IMAGES[name] for name in each.image_names]
        inputs: dict[str, Any] = {}
        if images:
            inputs = {"pixel_values": torch.cat([image.patches for image in images])}
            inputs["image_grid_thw"] = torch.tensor([image.grid for image in images])
            inputs["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int()[None]
        rows = bare(input_ids=ids[None], **inputs).logits[0, :-1].log_softmax(-1)
        found = torch.cat([torch.zeros(1), rows.gather(1, ids[1:, None])[:, 0]])
        logprobs.append(torch.where(torch.from_numpy(each.loss_mask), found, 0.0))
    joined = torch.cat(logprobs)
    (weights_for(joined) * joined).sum().backward()
    return Expected(joined.detach(), {name: each.grad for name, each in bare.named_parameters()})


def packed(policy: Policy, batch: Sequence[Trajectory], sharing: Sharing | None = None) -> LocalBatch:
    return build_local_batch(
        range(len(batch)), batch, torch.device("cpu"), sharing, vision=policy.vision, images=IMAGES
    )


@pytest.mark.parametrize("sharing", [None, EVERY])
@pytest.mark.parametrize("activations", [0.0, 1.0])
def test_packed_log_probs_and_gradients_are_those_of_transformers_with_one_sequence_at_a_time(
    folder: Path, ranks: Ranks, activations: float, sharing: Sharing | None, caplog: pytest.LogCaptureFixture
):
    batch = episodes()
    expected = one_by_one(folder, batch)
    with caplog.at_level(logging.WARNING):
        policy = load_policy(ModelConfig(str(folder), activations=activations, compile=False), 1.0, ranks, 128)
    assert "loads the whole" not in caplog.text
    for padded in (False, True):
        policy.zero_grad()
        this = packed(policy, batch, sharing).forward_pass(range(len(batch)))
        ours, _ = policy((this.padded() if padded else this).packed)
        torch.testing.assert_close(ours, expected.logprobs, atol=1e-4, rtol=0)
        (weights_for(ours) * ours).sum().backward()
        for name, gradient in gradients(policy).items():
            wanted = expected.gradients[name]
            wanted = torch.zeros_like(gradient) if wanted is None else wanted
            torch.testing.assert_close(gradient, wanted, atol=1e-4, rtol=1e-3, msg=lambda m, n=name: n + m)
        assert any("visual" in name and gradient.abs().max() > 1e-3 for name, gradient in gradients(policy).items())


def test_a_pass_takes_the_images_of_its_own_episodes_only(qwen: Path, ranks: Ranks):
    batch = episodes()
    policy = load_policy(ModelConfig(str(qwen), compile=False), 1.0, ranks, 128)
    whole = packed(policy, batch)
    with torch.no_grad():
        together, _ = policy(whole.forward_pass(range(len(batch))).packed)
        for parts in ([[0, 3, 5], [1, 2, 4, 6]], [[4], [0, 6], [1, 2, 3, 5]]):
            for part in parts:
                each = whole.forward_pass(part)
                torch.testing.assert_close(policy(each.packed)[0], together[each.rows], atol=1e-5, rtol=0)
    assert whole.forward_pass([4]).packed.images is None
    assert whole.forward_pass([0, 1]).packed.images.grids.tolist() == [list(WIDE.grid)]


def test_the_same_placeholders_of_other_images_are_no_shared_prefix(qwen: Path, ranks: Ranks):
    policy = load_policy(ModelConfig(str(qwen), compile=False), 1.0, ranks, 128)
    prompt = [5, NAMES[0], 6]
    alike = {NAMES[0]: WIDE, NAMES[1]: ImagePatches(WIDE.patches + 1, WIDE.grid)}
    group = [shown(alike, prompt, [7, 8]), shown(alike, prompt, [7, 9]), shown(alike, [5, NAMES[1], 6], [7, 9])]
    first, second, third = (
        build_local_batch([0], [each], torch.device("cpu"), vision=policy.vision, images=alike) for each in group
    )
    batch = build_local_batch(range(3), group, torch.device("cpu"), EVERY, vision=policy.vision, images=alike)
    both = batch.forward_pass(range(3)).packed
    image = WIDE.grid[1] * WIDE.grid[2] // MERGE**2
    # The first and the last share the token before the image.
    assert len(both.ids) == len(group[0]) + 1 + len(group[2]) - 1
    assert len(both.images.rows) == 2 * image
    with torch.no_grad():
        alone = torch.cat([policy(each.forward_pass([0]).packed)[0] for each in (first, second, third)])
        torch.testing.assert_close(policy(both)[0], alone, atol=1e-5, rtol=0)


def test_a_pass_without_images_gives_the_tower_gradients_of_zero_so_that_ranks_agree(qwen: Path, ranks: Ranks):
    policy = load_policy(ModelConfig(str(qwen), compile=False), 1.0, ranks, 128)
    policy(packed(policy, episodes()[4:5]).forward_pass([0]).packed)[0].sum().backward()
    found = gradients(policy)
    assert len(found) == len(dict(policy.model.named_parameters()))
    assert all((gradient == 0).all() == ("visual" in name) for name, gradient in found.items())


def test_a_frozen_tower_gets_no_gradient_and_the_text_the_same_one(qwen: Path, ranks: Ranks):
    batch = episodes()
    expected = one_by_one(qwen, batch)
    policy = load_policy(ModelConfig(str(qwen), freeze=["vision"], compile=False), 1.0, ranks, 128)
    ours, _ = policy(packed(policy, batch).forward_pass(range(len(batch))).packed)
    (weights_for(ours) * ours).sum().backward()
    for name, parameter in policy.model.named_parameters():
        assert (parameter.grad is None) == ("visual" in name), name
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad.full_tensor(), expected.gradients[name], atol=1e-4, rtol=1e-3)


def test_all_tensors_are_pushed_as_save_pretrained_writes_them(folder: Path, ranks: Ranks):
    policy = load_policy(ModelConfig(str(folder), compile=False), 1.0, ranks, 128)
    bare = AutoModelForImageTextToText.from_pretrained(folder)
    expected = policy.weight_format.restore(gather_all(policy.model, policy.weight_format, torch.float32, ranks))
    assert expected.keys() == dict(bare.named_parameters()).keys()
    assert all(torch.equal(expected[name], each) for name, each in bare.named_parameters())


def test_an_export_loads_with_transformers_and_its_image_processor(qwen: Path, ranks: Ranks, tmp_path: Path):
    config = ModelConfig(str(qwen), compile=False)
    policy = load_policy(config, 1.0, ranks, 128)
    with torch.no_grad():
        policy.model.model.visual.patch_embed.proj.weight.mul_(1.5)
    export(policy, config, tmp_path / "model", ranks, threading.Event())
    batch = episodes()
    with torch.no_grad():
        ours, _ = policy(packed(policy, batch).forward_pass(range(len(batch))).packed)
    torch.testing.assert_close(ours, one_by_one(tmp_path / "model", batch).logprobs, atol=1e-4, rtol=0)
    assert not torch.allclose(ours, one_by_one(qwen, batch).logprobs, atol=1e-2)
    processors = [AutoImageProcessor.from_pretrained(each, backend="pil") for each in (qwen, tmp_path / "model")]
    assert processors[0].to_dict() == processors[1].to_dict()


def test_an_image_that_its_episode_has_other_tokens_for_is_an_error(qwen: Path, ranks: Ranks):
    policy = load_policy(ModelConfig(str(qwen), compile=False), 1.0, ranks, 128)
    [good] = (shown(IMAGES, [5, NAMES[0], 6], [7]),)
    with pytest.raises(ImageError, match=r"are not the 4 placeholders of its image"):
        batch_images([good], {NAMES[0]: random_image((1, 4, 4))}, policy.vision)


def test_images_that_were_taken_are_trained_where_a_resumed_run_would_take_none_of_their_size(
    ranks: Ranks, tmp_path: Path
):
    config = make_config(save_vision_model(tmp_path / "vision"), tmp_path, steps=1)
    config.data.images.max_pixels, config.data.images.max_mb = 1, 1e-6
    assert Run(config).train(ranks).metrics.rows


def test_what_is_not_there_for_images_is_refused_by_name(qwen: Path, ranks: Ranks):
    with pytest.raises(ConfigError, match="critic of its own would see none"):
        load_critic(CriticConfig(str(qwen)), ModelConfig(str(qwen)), ranks, 64)


def test_half_precision_computes_close_to_float32(qwen: Path, ranks: Ranks):
    batch = episodes()
    policy = load_policy(ModelConfig(str(qwen), dtype="bfloat16", compile=False), 1.0, ranks, 128)
    ours, _ = policy(packed(policy, batch).forward_pass(range(len(batch))).packed)
    assert 1e-5 < (ours - one_by_one(qwen, batch).logprobs).abs().max() < 0.5
    assert policy.vocabulary == VOCABULARY


def test_adapters_of_tower_and_text_are_published_merged_with_the_same_log_probs(
    qwen: Path, ranks: Ranks, tmp_path: Path
):
    batch = episodes()
    policy = load_policy(ModelConfig(str(qwen), lora=LoraConfig(rank=2), compile=False), 1.0, ranks, 128)
    trained = {name: each for name, each in policy.named_parameters() if each.requires_grad}
    assert any("visual" in name for name in trained)
    assert any("language_model" in name for name in trained)
    with torch.no_grad():
        for each in trained.values():
            each.to_local().add_(torch.randn(each.to_local().shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    ours, _ = policy(packed(policy, batch).forward_pass(range(len(batch))).packed)
    ours.sum().backward()
    assert all(each.grad.to_local().abs().sum() > 0 for each in trained.values())
    merged = AutoModelForImageTextToText.from_pretrained(qwen)
    published = gather_all(policy.model, policy.weight_format, torch.float32, ranks)
    merged.load_state_dict(policy.weight_format.restore(published))
    merged.save_pretrained(tmp_path)
    torch.testing.assert_close(ours.detach(), one_by_one(tmp_path, batch).logprobs, atol=1e-4, rtol=0)
    assert not torch.allclose(ours, one_by_one(qwen, batch).logprobs, atol=1e-2)


def test_models_beside_a_policy_that_reads_images_which_would_see_none_are_refused(
    qwen: Path, model: Path, ranks: Ranks, tmp_path: Path
):
    own = with_critic(make_config(qwen, tmp_path / "critic"))
    own.critic.path = str(model)
    with pytest.raises(ConfigError, match=r"a critic of its own would see none: use critic\.shared"):
        Run(own).train(ranks)
    other = prime(qwen, tmp_path / "implicit")
    other.implicit.path = str(model)
    with pytest.raises(ConfigError, match=r"the model of implicit\.path reads none"):
        Run(other).train(ranks)
