"""Every role finds the files of a model that a URL or a revision names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from asyncrl.config.refusals import refusals
from asyncrl.config.schema import CriticConfig, EngineConfig, ImplicitConfig, ModelConfig, ScoringConfig, TrainConfig
from asyncrl.engine.embedded import EmbeddedEngine
from asyncrl.engine.sglang.launch import server_command
from asyncrl.launch.preflight.models import check_existence
from asyncrl.learner.model.loading import open_model, read_model
from asyncrl.modelling.opening import beside, open_config
from asyncrl.modelling.shapes import model_shapes
from asyncrl.modelling.source import source_of
from asyncrl.modelling.tokenizer import open_tokenizer
from asyncrl.replay.from_config import vocabulary
from tests.learner.support import VOCABULARY, write_model

pytestmark = pytest.mark.slow

URL = "memory://bucket/policy"


@pytest.fixture
def model(tmp_path: Path) -> Iterator[ModelConfig]:
    """A policy in a remote store."""
    folder = write_model(tmp_path / "policy")
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.put(str(folder), "/bucket/policy", recursive=True)
    yield ModelConfig(URL, copies=str(tmp_path / "copies"))
    system.store.clear()


def test_every_role_opens_the_one_copy_of_a_url(model: ModelConfig, tmp_path: Path) -> None:
    config = TrainConfig(model=model)
    check_existence(model, CriticConfig(), ImplicitConfig(), ScoringConfig())
    [copy] = [each for each in next((tmp_path / "copies").iterdir()).iterdir() if each.is_dir()]
    assert source_of(model).path == str(copy)
    assert open_config(model).vocab_size == vocabulary(URL) == model_shapes(model).vocabulary == VOCABULARY
    assert open_tokenizer(model).eos_token is not None
    assert open_tokenizer(model, local_only=True).eos_token is not None
    stored = read_model(model).state_dict()
    local = read_model(ModelConfig(str(tmp_path / "policy"))).state_dict()
    assert all(torch.equal(stored[name], local[name]) for name in local)
    assert open_model(model).weights is not None
    engine = EmbeddedEngine.load(model, EngineConfig(slots=1, max_length=64), device="cpu")
    assert engine.expected == model_shapes(model).tensors
    assert str(copy) in server_command(config.engine, model, 1, 0)


def test_a_url_without_a_model_is_refused_before_the_start() -> None:
    fsspec.filesystem("memory").pipe_file("/bucket/other/readme.txt", b"no model")
    with pytest.raises(Exception, match=r"model.path=memory://bucket/other: the folder has no config.json"):
        check_existence(ModelConfig("memory://bucket/other"), CriticConfig(), ImplicitConfig(), ScoringConfig())


def test_a_revision_reaches_the_hub_and_servers_and_is_the_policys_alone() -> None:
    model = ModelConfig("owner/name", revision="v2")
    assert source_of(model).options == {"revision": "v2", "trust_remote_code": False}
    command = server_command(EngineConfig(), model, 1, 0)
    assert command[command.index("--revision") + 1] == "v2"
    assert beside(model, None).revision == "v2"
    assert beside(model, "owner/other").revision is None


def test_the_revision_is_that_which_transformers_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def noting(path: str, **options: Any) -> Any:
        asked.append((path, options["revision"]))
        raise OSError("offline")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", noting)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", noting)
    for opening in (open_config, open_tokenizer):
        with pytest.raises(Exception, match="offline"):
            opening(ModelConfig("owner/name", revision="v2"))
    assert asked == [("owner/name", "v2")] * 2


def test_what_has_no_revisions_and_what_lists_no_files_is_refused(tmp_path: Path) -> None:
    def lines(model: ModelConfig) -> str:
        return "\n".join(line for line in refusals(TrainConfig(model=model)) if line.startswith("model."))

    assert "only models on the hub have revisions" in lines(ModelConfig(URL, revision="v2"))
    assert "only models on the hub have revisions" in lines(ModelConfig(str(tmp_path), revision="v2"))
    assert "a web server lists no files" in lines(ModelConfig("https://huggingface.co/owner/name"))
    assert lines(ModelConfig("owner/name", revision="v2")) == ""
