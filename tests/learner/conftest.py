from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from asyncrl.learner.ranks import Ranks, joined
from tests.learner.support import write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    torch.set_num_threads(1)
    with joined() as ranks:
        yield ranks
