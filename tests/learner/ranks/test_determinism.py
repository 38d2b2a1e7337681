"""`learner.deterministic`: training repeats bit for bit on a GPU, and is the same as without it on the CPU."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asyncrl.learner.ranks.ranks import Ranks
from tests.learner.support import Run, make_config

pytestmark = pytest.mark.slow

TRAIN = """
import sys, torch
from pathlib import Path
from asyncrl.learner.ranks.determinism import be_deterministic
from asyncrl.learner.ranks.joining import joined
from tests.learner.ranks.test_determinism import digest
model, folder, deterministic = sys.argv[1:]
torch.set_num_threads(1)
if deterministic == "True":
    be_deterministic()
with joined() as ranks:
    print(digest(Path(model), Path(folder), ranks))
"""


def digest(model: Path, folder: Path, ranks: Ranks) -> str:
    """Return a digest of the weights after four steps."""
    config = make_config(model, folder, minibatches=2)
    config.model.dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    final, found = Run(config).train(ranks).final, hashlib.sha256()
    for name in sorted(final):
        found.update(final[name].contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def trained(model: Path, folder: Path, deterministic: bool) -> str:
    """The same in a process of its own: torch's settings hold for a process."""
    command = [sys.executable, "-c", TRAIN, str(model), str(folder), str(deterministic)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


@pytest.mark.heavy
def test_deterministic_training_is_the_same_as_any_on_the_cpu_and_as_itself_on_a_gpu(
    model: Path, tmp_path: Path, ranks: Ranks
) -> None:
    if torch.cuda.is_available():
        first = trained(model, tmp_path / "first", deterministic=True)
    else:
        first = digest(model, tmp_path / "first", ranks)
    assert trained(model, tmp_path / "second", deterministic=True) == first
