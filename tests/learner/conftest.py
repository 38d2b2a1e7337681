from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.commands.demo.tokenizer import build_tokenizer
from asyncrl.learner.ranks.ranks import Ranks
from tests.learner.support import VOCABULARY, write_model
from tests.mixtures import save_mixture
from tests.one_rank import one_rank
from tests.vision import save_vision_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, and in its folder "vision" one that reads images."""
    folder = write_model(tmp_path_factory.mktemp("policy"))
    save_vision_model(folder / "vision")
    return folder


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts with a persistent buffer."""
    folder = save_mixture(tmp_path_factory.mktemp("mixture"), "glm4_moe", vocab_size=VOCABULARY)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with one_rank() as ranks:
        yield ranks
