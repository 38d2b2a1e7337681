"""`asyncrl export`: any kept checkpoint of a run becomes the folder that a finished run writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from asyncrl.commands.export import export_run, main
from asyncrl.config.locations import CARD_FILES
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.learner.checkpoint.files import COMPLETE
from asyncrl.learner.ranks.ranks import Ranks
from tests.learner.ranks.test_ranks import contents
from tests.learner.support import Run, make_config, write_model
from tests.one_rank import one_rank

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with one_rank() as ranks:
        yield ranks


@pytest.fixture
def run(ranks: Ranks, tmp_path: Path) -> Path:
    """A finished run of six steps, with its last two checkpoints: after four steps and after six."""
    config = make_config(write_model(tmp_path / "policy"), tmp_path, steps=6)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(asdict(config)))
    Run(config).train(ranks)
    return folder


def test_any_checkpoint_becomes_a_folder_and_the_newest_is_what_the_run_wrote(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(run)])
    newest = run / "exports" / "step-000006"
    assert capsys.readouterr().out == f"{newest}\n"
    card = {name: (newest / name).read_bytes() for name in CARD_FILES}
    assert contents(newest) == contents(run / "model") | card
    earlier = contents(export_run(str(run), 4, run / "four"))
    assert earlier.keys() == contents(newest).keys()
    assert earlier["model.safetensors"] != contents(newest)["model.safetensors"]
    with pytest.raises(ConfigError, match="exists already"):
        export_run(str(run))


def test_what_cannot_be_exported_is_refused_with_what_there_is(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run"):
        export_run(str(tmp_path / "other"))
    with pytest.raises(CheckpointError, match="no checkpoint after 5 steps: use --step with one of 4, 6"):
        export_run(str(run), 5)
    weights = run / "checkpoints" / "step-000006" / "rank-00000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"rank-00000.safetensors has changed since it was written.*--step 4"):
        export_run(str(run))
    assert (weights.parent / COMPLETE).exists(), "the run's own checkpoint stays as it is"
    for mark in run.glob(f"checkpoints/*/{COMPLETE}"):
        mark.unlink()
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        export_run(str(run))


def test_a_checkpoint_of_another_model_is_refused(run: Path) -> None:
    write_model(run.parent / "policy", layers=1)
    with pytest.raises(CheckpointError, match="another model"):
        export_run(str(run))
    assert not (run / "exports").exists()
