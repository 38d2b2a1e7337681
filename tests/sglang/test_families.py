"""Models of every proven family pushed into a real server, which knows most of their tensors under names of its own:
SGLang passes over names that it does not know, and answers that the update succeeded."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.config.schema import ModelConfig
from asyncrl.engine.base import Generation
from asyncrl.engine.fleet.http import Http
from asyncrl.engine.sglang.families import PROVEN, UNPROVEN
from asyncrl.engine.sglang.routes.opening import ServerRouteSettings
from asyncrl.engine.sglang.server import SglangServer
from asyncrl.errors import EngineError
from asyncrl.learner.checkpoint.export import folder_writer
from asyncrl.machine.child import last_lines
from asyncrl.machine.ports import free_ports
from asyncrl.types import Sampling
from asyncrl.weights.folders import Weights, read_folder, write_folder
from tests.engine.real import fleet_over, prompts, run
from tests.engine.support import parameters, plain_logprobs
from tests.episode.fakes import make_tokenizer
from tests.families import FAMILIES, family_model
from tests.sglang.support import ARGUMENTS, ENVIRONMENT

WAYS = ["gloo", "the learner's folder", "disk"]
FOLDER, CLOSE, FAR = 1000, 1e-4, 1e-1
BUCKET_BYTES = 8 << 10
"""Most tensors travel alone, so that a loader shows which loads some of them only together."""

UNKNOWN = pytest.mark.xfail(strict=True, reason="see UNPROVEN")
"""The mark of an unproven family: if a later release of SGLang serves it, it may be added to the proven ones."""


OFTEN = {"qwen3", "qwen3_moe", "llama", "phi3"}
"""Families that stand for all others where there is little time: plain names, experts, and fused projections."""


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    family = name.split()[0]
    return [*([] if family in PROVEN else [UNKNOWN]), *([] if family in OFTEN else [pytest.mark.long])]


@dataclass(frozen=True)
class Fork:
    """One server: its url, its process and its log."""

    url: str
    process: int
    log: Path

    async def ready(self) -> None:
        http = Http(self.url)
        while True:
            try:
                await http.get("/get_model_info", 60)
                break
            except EngineError:
                await asyncio.sleep(0.1)
        await http.close()

    async def death(self) -> None:
        while (
            Path(f"/proc/{self.process}").exists() and "scheduler hit an exception" not in self.log.read_text().lower()
        ):
            await asyncio.sleep(0.1)


class Forks:
    """Starts servers without importing SGLang again for each, see forks.py."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [os.environ["ASYNCRL_SGLANG_PYTHON"], str(Path(__file__).with_name("forks.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | ENVIRONMENT,
        )
        while (line := self._read()) != "ready":
            assert line or self._process.poll() is None, "SGLang could not be imported"

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    @contextmanager
    def serving(self, model: Path, log: Path) -> Iterator[Fork]:
        """A server over a folder."""
        port = free_ports(1)
        assert self._process.stdin is not None
        log.touch()  # The fork tells its number before it opens its log.
        order = [["--model-path", str(model), *ARGUMENTS, "--port", str(port)], str(log)]
        print(json.dumps(order), file=self._process.stdin, flush=True)
        server = Fork(f"http://127.0.0.1:{port}", int(self._read()), log)
        try:
            yield server
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.process, signal.SIGKILL)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def served(server: Fork, folder: Path, model: Any, version: int, way: str, space: Path) -> Sequence[Generation]:
    """Publish `model` as `version`; what the server then generates for prompts(4)."""
    weights: Weights = parameters(model)
    into = way
    if way == "the learner's folder":
        into, write_config = "disk", folder_writer(ModelConfig(str(folder)))
        weights = read_folder(write_folder(space, version, weights, write_config), version)

    def open_server(url: str) -> SglangServer:
        return SglangServer(
            url, context=512, settings=ServerRouteSettings(into, bucket_bytes=BUCKET_BYTES), silence_s=300
        )

    async def scenario() -> Sequence[Generation]:
        await server.ready()
        async with fleet_over([server.url], open_server, model) as fleet:
            await fleet.update_weights(version, weights)
            return await asyncio.gather(
                *(fleet.generate(start, Sampling(1.0, 40), (), f"s{i}") for i, start in enumerate(prompts(4)))
            )

    async def while_it_lives() -> Sequence[Generation]:
        working, dead = asyncio.create_task(scenario()), asyncio.create_task(server.death())
        await asyncio.wait([working, dead], return_when=asyncio.FIRST_COMPLETED)
        assert not dead.done(), last_lines(server.log, 30)
        dead.cancel()
        return working.result()

    return run(while_it_lives, 300)  # type: ignore[no-any-return]


def difference(model: Any, sampled: Sequence[Generation]) -> np.floating[Any]:
    """The largest one between the log-probs of `sampled` and the model's own."""
    differences = []
    for start, got in zip(prompts(4), sampled, strict=True):
        own = plain_logprobs(model, np.concatenate([start, got.tokens]), 1.0)[len(start) - 1 :]
        differences.append(np.abs(own - got.logprobs).max())
    return np.max(differences)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    forks.close()


def test_all_families_are_tried() -> None:
    # test_images.py pushes the other one.
    assert {*(name.split()[0] for name in FAMILIES), "qwen2_5_vl"} == PROVEN | UNPROVEN.keys()


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in FAMILIES])
def test_every_tensor_of_a_push_is_served_log_prob_for_log_prob(forks: Forks, name: str, tmp_path: Path) -> None:
    folder, before = tmp_path / "model", family_model(name, FOLDER)
    before.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    with forks.serving(folder, tmp_path / "server.log") as server:
        for version, way in enumerate(WAYS):
            model = family_model(name, version)
            sampled = served(server, folder, model, version, way, tmp_path / "pushed")
            assert {version} == {int(each) for got in sampled for each in got.versions}
            assert difference(model, sampled) < CLOSE
            assert difference(before, sampled) > FAR
            before = model
