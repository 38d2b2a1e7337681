"""The tiny models of `architectures.yaml`: learner and embedded engine repeat each one's own log-probs, or refuse it at
the start. Windows, chunks and changes of the rotary embeddings lie at SHORT tokens, and LENGTH are needed."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.config.schema import EngineConfig, ModelConfig
from asyncrl.engine.base import Generation
from asyncrl.engine.embedded import EmbeddedEngine
from asyncrl.errors import ConfigError
from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.learner.model.policy import load_policy
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.types import Sampling
from tests.engine.support import assert_exact, plain_logprobs, prompt
from tests.one_rank import one_rank

pytestmark = pytest.mark.slow

LENGTH, SHORT = 24, 12
TABLE = yaml.safe_load(Path(__file__).with_name("architectures.yaml").read_text())


@dataclass(frozen=True)
class Case:
    """A model of the table, why learner and engine refuse it at LENGTH tokens (None: they do not), and who takes it at
    SHORT."""

    name: str
    sizes: dict[str, Any]
    learner: str | None
    engine: str | None
    short: Collection[str]

    def __str__(self) -> str:
        return self.name


CASES = [
    Case(name, sizes, group.get("learner"), group.get("engine"), group.get("short", ("learner", "engine")))
    for group in TABLE["groups"]
    for name, sizes in group["models"].items()
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_short_case = pytest.mark.parametrize(
    "case", [case for case in CASES if case.short and (case.learner or case.engine)], ids=str
)


def test_the_page_has_the_numbers_of_models_and_families():
    families = {case.name.split()[0] for case in CASES}
    page = Path(__file__).parents[2] / "docs/models.md"
    assert f"runs {len(CASES)} tiny models of {len(families)} families" in page.read_text()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with one_rank() as ranks:
        yield ranks


def make(case: Case) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(case.name.split()[0], **(TABLE["sizes"] | case.sizes))
    ).eval()


def assert_learner_is_exact(case: Case, folder: Path, ranks: Ranks, length: int) -> None:
    model, rng = make(case), np.random.default_rng(0)
    model.save_pretrained(folder)
    sequences = [prompt(rng, each) for each in (length, 3, length - 1)]
    policy = load_policy(ModelConfig(str(folder)), 1.0, ranks, length)
    with torch.no_grad():
        ours, _ = policy(PackedSequences.of([torch.from_numpy(each).long() for each in sequences]))
    expected = np.concatenate([np.append(0, plain_logprobs(model, each, 1.0)) for each in sequences])
    np.testing.assert_allclose(ours.numpy(), expected, atol=1e-4)


def assert_engine_is_exact(case: Case, length: int) -> None:
    rng = np.random.default_rng(0)
    prompts = [prompt(rng, each) for each in (length // 2, 3, length - 4)]

    async def main() -> list[Generation]:
        engine = EmbeddedEngine(make(case), EngineConfig(slots=2, max_length=length), initial_version=0)
        calls = [engine.generate(each, Sampling(1.0, length), (), f"{i}") for i, each in enumerate(prompts)]
        try:
            return await asyncio.gather(*calls)
        finally:
            await engine.close()

    for start, got in zip(prompts, asyncio.run(main()), strict=True):
        assert len(start) + len(got.tokens) == length
        assert_exact({0: make(case)}, start, got, 1.0)


@every_case
def test_the_learner_gives_each_models_own_log_probs_packed_or_refuses_it(case: Case, tmp_path: Path, ranks: Ranks):
    if case.learner is None:
        assert_learner_is_exact(case, tmp_path, ranks, LENGTH)
        return
    make(case).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"cannot be trained packed.*{case.learner}"):
        load_policy(ModelConfig(str(tmp_path)), 1.0, ranks, LENGTH)


@every_case
def test_the_embedded_engine_gives_each_models_own_log_probs_or_refuses_it(case: Case):
    if case.engine is None:
        assert_engine_is_exact(case, LENGTH)
        return
    with pytest.raises(ConfigError, match=f"embedded engine cannot serve.*{case.engine}"):
        EmbeddedEngine(make(case), EngineConfig(slots=2, max_length=LENGTH))


@every_short_case
def test_a_model_that_is_refused_for_the_length_alone_is_exact_below_it(case: Case, tmp_path: Path, ranks: Ranks):
    if "learner" in case.short:
        assert_learner_is_exact(case, tmp_path, ranks, SHORT)
    if "engine" in case.short:
        assert_engine_is_exact(case, SHORT)
