"""`asyncrl merge` finds out what a folder is, and refuses what it cannot merge with what to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from asyncrl.commands.merge.merge import main, merge
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.learner.ranks.ranks import Ranks
from tests.commands.merge.support import load, logits, save_states, save_template
from tests.families import family_model
from tests.helpers import status_of
from tests.learner.support import Run, make_config, write_model
from tests.one_rank import one_rank

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with one_rank() as ranks:
        yield ranks


@pytest.mark.heavy
def test_a_run_of_ours_or_one_of_its_checkpoints_becomes_the_model_that_it_wrote(ranks: Ranks, tmp_path: Path) -> None:
    config = make_config(write_model(tmp_path / "policy"), tmp_path, steps=6)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump(asdict(config)))
    Run(config).train(ranks)
    merge(run, tmp_path / "newest")
    merge(run / "checkpoints" / "step-000006", tmp_path / "sixth")
    merge(run / "checkpoints" / "step-000004", tmp_path / "fourth")
    expected = logits(AutoModelForCausalLM.from_pretrained(run / "model"))
    assert torch.equal(logits(load(tmp_path / "newest")), expected)
    assert torch.equal(logits(load(tmp_path / "sixth")), expected)
    assert not torch.equal(logits(load(tmp_path / "fourth")), expected)
    with pytest.raises(ConfigError, match="are not for runs of asyncrl"):
        merge(run, tmp_path / "rounded", dtype="bfloat16")
    (run / "checkpoints" / "step-000006").rename(tmp_path / "alone")
    with pytest.raises(CheckpointError, match="outside of its run"):
        merge(tmp_path / "alone", tmp_path / "merged")


def test_the_command_line_prints_the_new_folder_and_errors_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = family_model("qwen3", 1)
    source = save_states([model.state_dict()], tmp_path / "actor")
    save_template(model, source / "huggingface")
    arguments = ["--from", str(source), "--to", str(tmp_path / "merged"), "--dtype", "bfloat16"]
    main(arguments)
    assert capsys.readouterr().out == f"{tmp_path / 'merged'}\n"
    assert status_of("merge", *arguments) == 2
    assert "asyncrl merge: " in (error := capsys.readouterr().err)
    assert "exists already" in error


def test_other_folders_are_refused_with_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        merge(tmp_path / "nothing", tmp_path / "merged")
    (tmp_path / "global_step_1" / "actor" / "model" / "huggingface").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"name the folder of one model, such as .*/actor"):
        merge(tmp_path / "global_step_1", tmp_path / "merged")
    (tmp_path / "global_step_1/actor/model/huggingface/model.safetensors").touch()
    with pytest.raises(CheckpointError, match="it needs no merging"):
        merge(tmp_path / "global_step_1" / "actor", tmp_path / "merged")
