"""Experts of tokens as rows of bytes: what is packed comes back, and what is none of the model's is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3Config

from asyncrl.errors import ConfigError
from asyncrl.modelling.routing import FAMILIES, RoutingError, RoutingShape, routing_shape
from tests.mixtures import FAMILIES as MIXTURES

SHAPES = st.builds(
    lambda layers, experts, share: RoutingShape(tuple(range(layers)), layers, experts, max(1, int(share * experts))),
    st.integers(1, 4),
    st.sampled_from([1, 2, 8, 254, 255, 256, 300]),
    st.floats(0, 0.05),
)


def random_experts(shape: RoutingShape, count: int, seed: int = 0) -> np.ndarray:
    """Experts [count, layers, top_k], all of a row different."""
    drawn = np.random.default_rng(seed).random((count, len(shape.layers), shape.experts))
    return drawn.argsort(-1)[..., : shape.top_k]


@given(SHAPES, st.integers(0, 20), st.integers(0, 100))
def test_packed_experts_come_back_and_tokens_without_any_stay_so(shape: RoutingShape, count: int, seed: int) -> None:
    experts = random_experts(shape, count, seed)
    rows = np.concatenate([shape.pack(experts), shape.missing(2)])
    assert rows.dtype == np.uint8
    assert rows.shape == (count + 2, shape.width)
    found = shape.unpack(rows)
    np.testing.assert_array_equal(found[:count], experts)
    assert (found[count:] == -1).all()


@pytest.mark.parametrize(
    ("family", "layers"), [("qwen3_moe", (0, 1)), ("mixtral", (0, 1)), ("olmoe", (0, 1)), ("glm4_moe", (1,))]
)
def test_the_shape_of_a_family_is_that_of_its_configuration(family: str, layers: tuple[int, ...]) -> None:
    assert routing_shape(MIXTURES[family]()) == RoutingShape(layers, 2, 4, 2)


def test_layers_without_experts_have_none() -> None:
    config = MIXTURES["qwen3_moe"](num_hidden_layers=6, mlp_only_layers=[3], decoder_sparse_step=2)
    assert routing_shape(config).layers == (1, 5)


@pytest.mark.parametrize("config", [Qwen3Config(), MIXTURES["deepseek_v3"]()])
def test_another_family_is_refused_by_name(config: Any) -> None:
    with pytest.raises(ConfigError, match=f"{config.model_type}.*{'.*'.join(sorted(FAMILIES))}"):
        routing_shape(config)


def test_a_mixture_all_of_whose_layers_are_dense_has_nothing_to_replay() -> None:
    with pytest.raises(ConfigError, match="no layer"):
        routing_shape(MIXTURES["glm4_moe"](first_k_dense_replace=2))


SHAPE = RoutingShape((0, 1), 2, 4, 2)
GOOD = np.array([[0, 1, 2, 3]], np.uint8)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (GOOD[:, :3], "3.* bytes a token"),
        (np.zeros((1, 8), np.uint8), "8.* bytes a token"),
        (GOOD[0], "bytes a token"),
        (np.array([[0, 1, 2, 4]], np.uint8), "to 4; the model has 4"),
        (np.array([[0, 1, 2, 255]], np.uint8), "to 255; the model has 4"),
        (np.array([[0, 1, 2, 2]], np.uint8), "twice"),
        (np.zeros((1, 4), np.uint8), "twice"),
    ],
)
def test_rows_that_are_none_of_the_models_are_refused(rows: np.ndarray, reason: str) -> None:
    assert SHAPE.unpack(GOOD).tolist() == [[[0, 1], [2, 3]]]
    with pytest.raises(RoutingError, match=reason):
        SHAPE.unpack(rows)
