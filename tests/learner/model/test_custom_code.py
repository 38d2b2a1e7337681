"""A model's own code goes with its checkpoints and its export, which loads in a folder by itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.config.schema import ModelConfig
from asyncrl.learner.checkpoint.export import export_checkpoint, save_code
from asyncrl.learner.model.loading import read_model
from asyncrl.learner.ranks.ranks import Ranks
from tests.learner.model.test_loading import REMOTE
from tests.learner.ranks.test_ranks import contents
from tests.learner.support import Run, make_config, write_model

pytestmark = pytest.mark.slow

HELPER = "\nfrom .helper import NAME\nOwnModel.helper = NAME\n"
LOADING = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
assert (type(model).__name__, model.helper) == ("OwnModel", "helped"), type(model)
model(torch.arange(8)[None])
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A policy whose code is two files in the folder of its weights."""
    folder = write_model(tmp_path / "policy")
    (folder / "own.py").write_text(REMOTE + HELPER)
    (folder / "helper.py").write_text('NAME = "helped"\n')
    config = (folder / "config.json").read_text().replace('"model_type": "qwen3"', '"model_type": "own"')
    names = '"auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},'
    (folder / "config.json").write_text(config.replace("{", "{" + names, 1))
    return folder


@pytest.mark.heavy
def test_export_and_checkpoints_have_the_code_and_the_export_needs_no_other_folder(
    own: Path, ranks: Ranks, tmp_path: Path
) -> None:
    config = make_config(own, tmp_path / "runs", steps=2)
    config.model.trust_remote_code = True
    Run(config).train(ranks)
    run = tmp_path / "runs" / "run"
    assert {"own.py", "helper.py", "config.json"} <= {each.name for each in (run / "checkpoints" / "code").iterdir()}
    export_checkpoint(config.model, run / "checkpoints" / "step-000002", tmp_path / "exported")
    (own / "own.py").unlink()
    assert contents(tmp_path / "exported") == contents(run / "model")
    # Another process, with a cache of its own: nothing that this one has loaded helps it.
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PATH": ""}
    subprocess.run([sys.executable, "-c", LOADING, str(run / "model")], check=True, env=environment)


def test_a_model_of_transformers_own_code_saves_none(model: Path, tmp_path: Path) -> None:
    save_code(read_model(ModelConfig(str(model), trust_remote_code=True)), tmp_path / "code")
    assert not (tmp_path / "code").exists()
