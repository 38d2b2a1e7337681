"""A whole run over a real server: server, actor and learner are killed in mid-run, on the GPU where there is one."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.data.writing import write_tasks
from asyncrl.observe.sinks import metrics_file
from asyncrl.replay.stored import StoredRun
from asyncrl.runs.lines import read_lines
from asyncrl.types import Trajectory
from benchmarks.loop_workload import AGENT, RULE, Workload
from benchmarks.shapes import SHAPES, make_model, word_tokenizer
from tests.chaos.verdict import over_bound
from tests.end_to_end.support import Run
from tests.engine.support import plain_logprobs

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

MAX_LAG = 4
STEPS_BETWEEN = 3
START_S = 400.0
BACKENDS = ("--attention-backend", "fa3", "--sampling-backend", "pytorch", "--grammar-backend", "none")
"""The backends that an H200 without flashinfer takes."""
ON_GPU = (*BACKENDS, "--cuda-graph-max-bs-decode", "64", "--disable-prefill-cuda-graph")
"""A server starts in half of the time if it captures few graphs."""


def test_what_servers_actors_and_learners_lose_to_kills_is_nothing(tmp_path: Path) -> None:
    with started(tmp_path, "learner.steps=13") as run:
        for victim in ("server", "actor-0", "learner"):
            run.wait_for_step(run.newest_step() + STEPS_BETWEEN, START_S)
            kill(run, victim)
        run.finish(START_S)
        served = read_lines(metrics_file(run.dir, "actor-0"))
        assert served[-1]["canary_allowed"] > 0
        assert not any(row["canary_failures"] for row in served)
    with closing(StoredRun(run.dir / "replay")) as stored:
        audit, counters = stored.audit(uses=1), stored.counters()
        assert (audit["lost"], audit["trained_twice"]) == (0, 0), audit
        assert audit["planned"] == counters["trained"] == 13 * 16
        assert over_bound(stored, MAX_LAG) == 0


def test_log_probs_of_the_first_version_are_those_of_its_weights_in_float32(tmp_path: Path) -> None:
    with started(tmp_path, "learner.steps=2") as run:
        run.finish(START_S)
    with closing(StoredRun(run.dir / "replay")) as stored:
        trained = trained_in(stored)
    first = [each for each in trained if each is not None and set(each.versions[each.loss_mask].tolist()) == {0}]
    assert first
    device, allowed = ("cuda", 0.1) if torch.cuda.is_available() else ("cpu", 1e-3)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).to(device)
    assert farthest(model, first[:8]) < allowed


def started(folder: Path, *overrides: str) -> Run:
    """A run over a real server, with a model of random weights in `model`."""
    gpu = torch.cuda.is_available()
    size = "0.6B" if gpu else "tiny"
    initial = make_model(size, torch.bfloat16 if gpu else torch.float32, "cuda" if gpu else "cpu")
    initial.save_pretrained(folder / "model")
    word_tokenizer(SHAPES[size].vocabulary).save_pretrained(folder / "model")
    workload = Workload.named("heavy" if gpu else "heavy-tiny")
    if gpu:
        workload = replace(workload, turn_tokens={**workload.turn_tokens, "longest": 1000})
    write_tasks(folder / "tasks.parquet", workload.tasks(256))
    return Run("train", folder, *settings(folder, workload, gpu), *overrides)


def trained_in(stored: StoredRun) -> list[Trajectory | None]:
    """The trajectories of all plans."""
    plans = [stored.plan(step) for step in range(stored.steps())]
    return [stored.trajectory(name) for plan in plans if plan is not None for name in plan.ids]


def settings(folder: Path, workload: Workload, gpu: bool) -> list[str]:
    longest = workload.longest_episode
    server = [f"engine.server.arguments=[{','.join(ON_GPU)}]"] if gpu else []
    return [
        *(f"data.train={folder / 'tasks.parquet'}", f"model.path={folder / 'model'}"),
        *(f"model.dtype={'bfloat16' if gpu else 'float32'}", f"cluster.gpus={int(gpu)}", "cluster.actors=1"),
        *(f"engine={'sglang' if gpu else 'sglang_cpu'}", "engine.launch=true"),
        *(f"engine.python={os.environ['ASYNCRL_SGLANG_PYTHON']}", "engine.check_s=1", *server),
        *(f"actor.agent={AGENT}", f"actor.concurrency={64 if gpu else 16}", f"actor.max_turns={workload.turns[1]}"),
        *(f"actor.max_turn_tokens={int(workload.turn_tokens['longest'])}", f"actor.max_tokens={longest}"),
        *(f"actor.max_total_tokens={longest}", f"scoring.rule={RULE}", "scoring.shaping.environment_weight=1"),
        *(f"replay.max_lag={MAX_LAG}", "replay.retention=all", "replay.lease_s=10"),
        *("learner.batch_size=16", "learner.group_size=4", f"learner.micro_tokens={max(longest, 8192)}"),
        # To compile the layers takes a minute on a GPU at each start of the learner, and kills do not concern it.
        *("learner.checkpoint_every=2", "learner.export=false", "model.compile=false"),
    ]


def kill(run: Run, name: str) -> None:
    """SIGKILL for a role, or for all processes of the server that the actor has started."""
    if name != "server":
        run.kill(name)
        return
    for process in servers(run.processes()["actor-0"]):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


def servers(actor: int) -> list[psutil.Process]:
    found = []
    for each in psutil.Process(actor).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # Others may end meanwhile.
            if "sglang" in " ".join(each.cmdline()):
                found.append(each)
    assert found
    return found


def farthest(model: Any, trajectories: Sequence[Trajectory]) -> float:
    """The largest mean difference of a trajectory's log-probs from those that `model` gives in float32."""
    means = []
    for each in trajectories:
        sampled = np.flatnonzero(each.loss_mask)
        expected = plain_logprobs(model, each.tokens, 1.0)[sampled - 1]
        means.append(float(np.abs(expected - each.logprobs[sampled]).mean()))
    return max(means)
