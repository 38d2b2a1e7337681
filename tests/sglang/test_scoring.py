"""Remote scorers over a real server: its scores are those of the same folder read here, and never made up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from asyncrl.config.schema import OutcomeModelConfig, ScoringModelConfig
from asyncrl.errors import UnavailableError
from asyncrl.scoring.models.registry import load_outcome_model, load_prm
from asyncrl.scoring.transcript import Passage
from tests.engine.real import run
from tests.helpers import until
from tests.scoring.models.support import LLAMA3, SHAPE, byte_tokenizer, save
from tests.sglang.support import RealServer

TOKENIZER = byte_tokenizer("<|start|>", "<|end|>", "<|eot|>", "ки", "<pad>", bos="<s>", add_bos=True, template=LLAMA3)
TOKENIZER.pad_token = "<pad>"
HEADS_OF_32: dict[str, Any] = {**SHAPE, "hidden_size": 64, "pad_token_id": 261}
START_S = 300.0
BATCH = [
    [Passage("what is 12 + 5?", False), Passage("12 + 5", True), Passage("17", False), Passage("so it is 17", True)],
    [Passage("what is 12 + 5?", False), *(Passage(f"{number} more", True) for number in range(12))],
    [Passage("é", False), Passage("<|eot|> ки +", True)],
    [Passage("no steps", False)],
]


def prm(**changes: Any) -> Any:
    return load_prm(ScoringModelConfig(**changes))


def outcome_model(**changes: Any) -> Any:
    return load_outcome_model(OutcomeModelConfig(**changes))


def served(folder: Path, *arguments: str) -> Iterator[tuple[Path, RealServer]]:
    """The folder and a server that has it, one after the other."""
    server = RealServer(folder, folder / "server.log", *arguments)
    try:
        run(server.ready)
        yield folder, server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def label_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, RealServer]]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("labels")
    yield from served(save(folder, LlamaForCausalLM(LlamaConfig(**HEADS_OF_32)).eval(), TOKENIZER))


@pytest.mark.parametrize("family", ["rlhflow", "math_shepherd"])
@pytest.mark.parametrize("contract", ["generate", "score"])
def test_a_label_model_behind_sglang_scores_as_it_does_here(
    label_model: tuple[Path, RealServer], family: str, contract: str
) -> None:
    folder, server = label_model
    params = {"contract": contract, "format": family, "tokenizer": str(folder), "timeout_s": 120.0}
    there = prm(family="remote", path=server.url, params=params).score(BATCH)
    here = prm(family=family, path=str(folder)).score(BATCH)
    spread = np.concatenate([each.probability for each in here])
    assert spread.max() - spread.min() > 0.1
    for one, other in zip(here, there, strict=True):
        np.testing.assert_allclose(other.probability, one.probability, atol=1e-4)
        np.testing.assert_allclose(other.logit, one.logit, atol=1e-3)


def test_a_server_that_is_killed_and_started_again_gives_no_scores_meanwhile_and_then_the_same(
    label_model: tuple[Path, RealServer],
) -> None:
    folder, server = label_model
    params = {"contract": "generate", "tokenizer": str(folder), "timeout_s": 30.0, "retries": 0}
    model = prm(family="remote", path=server.url, params=params)
    before = [each.logit.tolist() for each in model.score(BATCH)]
    server.kill()
    with pytest.raises(UnavailableError, match="gave no scores"):
        model.score(BATCH)
    server.restart()

    def scores() -> Any:
        try:
            return [each.logit.tolist() for each in model.score(BATCH)]
        except UnavailableError:
            return None

    for one, other in zip(before, until(scores, START_S), strict=True):
        np.testing.assert_allclose(other, one, atol=1e-3)


@pytest.mark.parametrize("labels", [1, 3] if "ASYNCRL_SGLANG_ALL" in os.environ else [3])
def test_a_classifier_behind_sglang_scores_as_it_does_here(tmp_path: Path, labels: int) -> None:
    torch.manual_seed(0)
    classifier = LlamaForSequenceClassification(LlamaConfig(**HEADS_OF_32, num_labels=labels)).eval()
    for folder, server in served(save(tmp_path, classifier, TOKENIZER), "--is-embedding"):
        params = {"contract": "classify", "tokenizer": str(folder), "timeout_s": 120.0}
        there = outcome_model(family="remote", path=server.url, params=params).score(BATCH)
        here = outcome_model(family="sequence_classifier", path=str(folder)).score(BATCH)
        assert max(here) - min(here) > 0.01
        np.testing.assert_allclose(there, here, atol=1e-4)
