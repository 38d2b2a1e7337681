from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from asyncrl.errors import ConfigError
from asyncrl.modelling.freezing import frozen_names
from asyncrl.modelling.vision import VisionShape, vision_shape
from tests.vision import IMAGE_TOKEN, MERGE, VISION_FAMILIES, vision_model

pytestmark = pytest.mark.slow

grids = st.tuples(st.just(1), st.integers(1, 5).map(MERGE.__mul__), st.integers(1, 5).map(MERGE.__mul__))


@pytest.fixture(scope="module")
def models() -> dict[str, object]:
    return {family: vision_model(family) for family in VISION_FAMILIES}


@pytest.mark.parametrize("family", VISION_FAMILIES)
@settings(max_examples=25, deadline=None)
@given(parts=st.lists(st.tuples(st.integers(1, 4), grids), max_size=4), tail=st.integers(1, 5))
def test_rotary_positions_are_those_that_transformers_gives(family: str, models: dict, parts: list, tail: int):
    model, shape = models[family].model, vision_shape(models[family].config)
    ids, spans = [], []
    for text, grid in parts:
        ids += [5] * text
        spans.append((len(ids), len(ids) + shape.features(grid)))
        ids += [IMAGE_TOKEN] * shape.features(grid)
    ids += [5] * tail
    tokens, own = torch.tensor([ids]), [grid for _, grid in parts]
    kinds = (tokens == IMAGE_TOKEN).int()
    expected, _ = model.get_rope_index(tokens, mm_token_type_ids=kinds, image_grid_thw=torch.tensor(own))
    assert shape.places(len(ids), spans, own).tolist() == expected[:, 0].tolist()


def test_an_image_takes_a_token_for_each_square_of_patches():
    assert VisionShape(7, 2, 96).features((1, 4, 6)) == 6


def test_a_text_model_reads_no_images_and_a_family_that_is_not_known_is_refused():
    assert vision_shape(AutoConfig.for_model("qwen3")) is None
    with pytest.raises(ConfigError, match=r"images of a llava model .* qwen2_vl, qwen2_5_vl, qwen3_vl"):
        vision_shape(AutoConfig.for_model("llava"))


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_the_rule_vision_freezes_the_whole_tower_and_nothing_else(family: str, models: dict):
    model = models[family]
    tower = {f"model.visual.{name}" for name, _ in model.model.visual.named_parameters()}
    assert set(frozen_names(model, ["vision"], "model.freeze")) == tower
