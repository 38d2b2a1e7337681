"""This process as the only rank of a learner, for tests that train in it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from asyncrl.learner.ranks import joining
from asyncrl.learner.ranks.joining import joined
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.machine import process


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Leave the modules of all tests out of garbage collections, as conftest.py has it. A rank would freeze what it has
    when it begins to train, and unfreeze everything at its end: a collection that takes over a second, and that every
    later one in this process repeats. Within the block a rank only collects what tests have left."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(process, "freeze_heap", lambda: None)
        patched.setattr(joining, "gc", SimpleNamespace(unfreeze=lambda: None, collect=gc.collect))
        yield


@contextmanager
def one_rank() -> Iterator[Ranks]:
    """Join the ranks as the only one, with one thread."""
    torch.set_num_threads(1)
    with frozen_heap(), joined() as ranks:
        yield ranks
