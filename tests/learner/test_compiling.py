from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from asyncrl.algorithms.algorithm import Algorithm
from asyncrl.config.schema import LearnerConfig, ModelConfig, TrainConfig
from asyncrl.learner import run
from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.learner.batch.prefixes import EVERY
from asyncrl.learner.compiling import CACHE_VARIABLE, compile_passes, keep_compiled
from asyncrl.learner.model.optimizer import Trainable
from asyncrl.learner.model.policy import load_policy
from asyncrl.learner.model.sharding import compiles
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.learner.trainer import Trainer
from tests.learner.support import Run, make_config, random_sequences

pytestmark = pytest.mark.slow


@pytest.fixture
def only_traced() -> Iterator[None]:
    """Let torch make graphs of layers, and write no kernels for them, which takes most of the time of compiling."""
    torch.compiler.reset()
    counters.clear()
    backend = torch.compiler.get_default_backend()
    torch.compiler.set_default_backend("eager")
    yield
    torch.compiler.set_default_backend(backend)
    torch.compiler.reset()


@pytest.mark.heavy
@pytest.mark.skipif(not hasattr(torch.compiler, "set_default_backend"), reason="torch 2.12 or older")
@pytest.mark.usefixtures("only_traced")
@pytest.mark.parametrize(("updates", "graphs"), [(1, 1), (2, 2)])
def test_all_layers_and_lengths_are_one_graph_and_with_a_proximal_pass_two(
    model: Path, ranks: Ranks, updates: int, graphs: int
):
    policy = load_policy(ModelConfig(str(model), compile=True, activations=0.4), 0.7, ranks, 96)
    algorithm = Algorithm.from_config(TrainConfig().algorithm, updates)
    assert algorithm.needs_proximal == (updates == 2)
    trainer = Trainer(ranks, algorithm, Trainable(policy, 1e-3, LearnerConfig()), None, None, threading.Event())
    compile_passes(trainer, share_prefixes=True, longest=96, largest=200)
    # Two functions follow the logits, forward and backward.
    assert counters["stats"]["unique_graphs"] == graphs + 2
    assert not counters["graph_break"]
    with torch.compiler.set_stance("fail_on_recompile"):
        for lengths in ([3, 40], [7, 7, 21], [2], [50, 50]):
            first, *others = random_sequences(33, *lengths)
            for sharing in (None, EVERY):
                packed = PackedSequences.of([torch.cat([first, each]) for each in others], sharing).padded()
                # Demonstrations are learned at a temperature of their own.
                policy(packed, temperature=1.0 if sharing else None)[0].sum().backward()
                # In a step, the entropies of some tokens are a metric.
                policy(replace(packed, measured=torch.tensor([0])), measures=True)[0].sum().backward()
                if updates > 1:
                    with torch.no_grad():
                        policy(packed)
    assert counters["stats"]["unique_graphs"] == graphs + 2


@pytest.mark.heavy
def test_learners_that_start_at_once_share_a_folder_and_a_later_one_compiles_nothing(model: Path, tmp_path: Path):
    environment = os.environ | {CACHE_VARIABLE: str(tmp_path / "cache")}
    files = [tmp_path / name for name in ("first", "second", "later")]

    def start(file: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.learner.compiled_once", str(model), str(file)]
        return subprocess.Popen(command, env=environment)

    at_once = [start(file) for file in files[:2]]
    assert [each.wait() for each in at_once] == [0, 0]
    assert start(files[2]).wait() == 0
    *first, later = (json.loads(file.read_text()) for file in files)
    # A layer's forward and backward pass, and two functions after the logits.
    assert [each["compiled"] + each["found"] for each in first] == [4, 4]
    assert later == {"compiled": 0, "found": 4}


def test_compiled_layers_are_kept_in_a_private_folder_of_the_user_unless_a_variable_names_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".cache/asyncrl/compiled"
    # Torch sets the variable to its own choice, which a child process inherits.
    for environment in ({}, {CACHE_VARIABLE: default_cache_dir()}):
        keep_compiled(environment)
        assert environment == {CACHE_VARIABLE: str(folder)}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    environment = {CACHE_VARIABLE: "/elsewhere"}
    keep_compiled(environment)
    assert environment == {CACHE_VARIABLE: "/elsewhere"}
    assert not caplog.records


@pytest.mark.parametrize(
    ("home", "reason"),
    [("a file", "Not a directory"), ("open to others", "others may write into"), ("none", "Could not determine home")],
)
def test_without_a_folder_that_only_this_user_may_change_torch_keeps_its_own_choice(
    home: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    if home == "a file":
        (tmp_path / "home").touch()
    elif home == "open to others":
        (tmp_path / "home/.cache/asyncrl/compiled").mkdir(parents=True)
        (tmp_path / "home/.cache/asyncrl/compiled").chmod(0o777)
    else:
        monkeypatch.delenv("HOME")
        monkeypatch.setattr("os.getuid", lambda: 2**31 - 2)  # A user whom the system does not list.
    environment = dict[str, str]()
    keep_compiled(environment)
    assert not environment
    assert reason in caplog.text
    assert f"{CACHE_VARIABLE} names another" in caplog.text


def test_on_gpus_large_models_are_compiled_and_small_ones_only_if_the_configuration_says_so():
    with torch.device("meta"):
        small, large = nn.Linear(10_000, 13_500), nn.Linear(10_000, 60_000)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert [compiles(ModelConfig("m"), gpu, each) for each in (small, large)] == [False, True]
    assert [compiles(ModelConfig("m"), cpu, each) for each in (small, large)] == [False, False]
    for choice in (True, False):
        config = ModelConfig("m", compile=choice)
        assert {compiles(config, device, each) for device in (gpu, cpu) for each in (small, large)} == {choice}


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_first_weights_are_published_before_the_layers_are_compiled(
    model: Path, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool
):
    config = make_config(model, tmp_path, steps=3)
    if interrupted:
        Run(config, stop_at=2).until_stopped(ranks)
    training = Run(config)
    seen: list[list[int]] = []
    monkeypatch.setattr(run, "fit_passes", lambda *_: seen.append(training.replay.called("published")))
    training.train(ranks)
    assert seen == [[2 if interrupted else 0]]
