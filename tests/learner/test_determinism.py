"""`learner.deterministic`: training repeats bit for bit on a GPU, and is the same as without it on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

TRAIN = """
import hashlib, sys, torch
from pathlib import Path
from asyncrl.learner.determinism import be_deterministic
from asyncrl.learner.ranks import joined
from tests.learner.support import Run, make_config
model, folder, deterministic = sys.argv[1:]
torch.set_num_threads(1)
if deterministic == "True":
    be_deterministic()
config = make_config(Path(model), Path(folder), minibatches=2)
config.model.dtype = "bfloat16" if torch.cuda.is_available() else "float32"
with joined() as ranks:
    final = Run(config).train(ranks).final
digest = hashlib.sha256()
for name in sorted(final):
    digest.update(final[name].contiguous().view(torch.uint8).numpy().tobytes())
print(digest.hexdigest())
"""


def trained(model: Path, folder: Path, deterministic: bool) -> str:
    """A digest of the weights after four steps in a process of their own: torch's settings hold for a process."""
    command = [sys.executable, "-c", TRAIN, str(model), str(folder), str(deterministic)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


def test_deterministic_training_is_the_same_as_any_on_the_cpu_and_as_itself_on_a_gpu(
    model: Path, tmp_path: Path
) -> None:
    first = trained(model, tmp_path / "first", deterministic=torch.cuda.is_available())
    assert trained(model, tmp_path / "second", deterministic=True) == first
