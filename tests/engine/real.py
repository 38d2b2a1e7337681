"""The base of tests over real servers of any kind: tiny policies, processes, a fleet, and a load of episodes on it."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from asyncrl.engine.base import Generation
from asyncrl.engine.fleet.discovery import Discovery, listed
from asyncrl.engine.fleet.fleet import Fleet
from asyncrl.engine.fleet.folders import Folders
from asyncrl.engine.fleet.http import Http
from asyncrl.engine.fleet.server import InferenceServer
from asyncrl.engine.fleet.settings import FleetSettings
from asyncrl.errors import EngineError
from asyncrl.machine.child import kill_group, last_lines, start_guarded
from asyncrl.machine.ports import free_ports
from asyncrl.types import Sampling
from asyncrl.weights.canary import CanaryError
from tests.engine.fleet.fakes import kept
from tests.engine.support import VOCABULARY, assert_exact, canary_check, parameters, swapped_layers, tiny_model
from tests.episode.fakes import make_tokenizer
from tests.helpers import OWN_RUN

logger = logging.getLogger(__name__)

CONTEXT = 2048
STOP_ID = 3
TURN_TOKENS = 150
TEMPERATURES = (0.0, 0.5, 1.0, 1.7)
LIMIT_S = 900
"""A server takes 15 s to 50 s to start on two quiet cores, and minutes on busy ones."""
Weights = dict[str, torch.Tensor]
Taken = tuple[NDArray[np.int32], Generation, int]
"""The continued tokens, the result, and the version that was served when its episode began."""


def policy(seed: int, **options: Any) -> Any:
    """The policy of version `seed`. Its vocabulary is that of the tokenizer, which the server reads as well."""
    sizes = {"max_position_embeddings": CONTEXT, "head_dim": 32, "hidden_size": 64, "initializer_range": 0.1}
    vocabulary = max(VOCABULARY, len(make_tokenizer()))
    return tiny_model(seed, vocab_size=vocabulary, eos_token_id=STOP_ID, **sizes, **options)


def save_policy(folder: Path, **options: Any) -> Path:
    """Save a policy as a Hugging Face folder. Its weights are of no version, so that a forgotten update shows."""
    policy(1000, **options).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def needs(program: str, variable: str) -> Sequence[pytest.MarkDecorator]:
    """The marks of tests that need a real server, and time."""
    reason = f"needs a real {program}: set {variable} to a Python that has it"
    return [pytest.mark.timeout(LIMIT_S), pytest.mark.skipif(variable not in os.environ, reason=reason)]


class ServerProcess:
    """A server that `command` starts, which can be killed and started again at the same address.

    It is ready once it answers at `path`.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], path: str, log: Path) -> None:
        port = free_ports(1)
        self._command = [*command, "--port", str(port)]
        self._environment = environment
        self._path = path
        self._log = log
        self.url = f"http://127.0.0.1:{port}"
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return start_guarded(self._command, self._log, self._environment)

    async def ready(self) -> None:
        http = Http(self.url)
        while True:
            assert self.process.poll() is None, last_lines(self._log, 30)
            try:
                await http.get(self._path, 60)
                break
            except EngineError:
                await asyncio.sleep(0.2)
        await http.close()

    def kill(self) -> None:
        kill_group(self.process)

    def restart(self) -> None:
        self.process = self._start()


def run(scenario: Callable[[], Awaitable[Any]], seconds: float = 600) -> Any:
    return asyncio.run(asyncio.wait_for(scenario(), seconds))


def prompts(count: int, seed: int = 0) -> list[NDArray[np.int32]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 200, int(length)).astype(np.int32) for length in rng.integers(5, 60, count)]


@asynccontextmanager
async def fleet_over(
    servers: Sequence[str] | Discovery,
    open_server: Callable[[str], InferenceServer],
    model: Any,
    mode: str = "retract",
    segment_tokens: int = 0,
    expected: Mapping[str, tuple[int, ...]] | None = None,
    **options: Any,
) -> AsyncIterator[Fleet]:
    """A fleet over `servers`, kept until the end, for policies of the shapes of `model`, or of those `expected`."""
    shapes = {name: tuple(tensor.shape) for name, tensor in parameters(model).items()} if expected is None else expected
    space = tempfile.TemporaryDirectory()
    fleet = Fleet(
        servers if callable(servers) else listed(servers),
        open_server,
        expected=shapes,
        vocabulary=model.config.get_text_config().vocab_size,
        settings=FleetSettings(check_s=0.5, wait_s=600, mode=mode, segment_tokens=segment_tokens),
        folders=Folders(Path(space.name), model.config.save_pretrained, OWN_RUN),
        **options,
    )
    with space:
        async with kept(fleet):
            yield fleet


async def sample_at_temperatures(fleet: Fleet) -> list[Generation]:
    """Turns of 4 prompts, each at every one of `TEMPERATURES`."""
    calls = [
        fleet.generate(start, Sampling(temperature, 40), (STOP_ID,), f"s{i}{temperature}")
        for i, start in enumerate(prompts(4))
        for temperature in TEMPERATURES
    ]
    return await asyncio.gather(*calls)


def assert_sampled_from(model: Any, version: int, sampled: Sequence[Generation]) -> None:
    """`sampled` at temperatures, by `model` under `version`."""
    cases = [(start, temperature) for start in prompts(4) for temperature in TEMPERATURES]
    for (start, temperature), got in zip(cases, sampled, strict=True):
        assert set(got.versions) == {version}
        assert_exact({version: model}, start, got, temperature)
        assert got.finish_reason == ("stop" if got.tokens[-1] == STOP_ID else "length")
        assert got.finish_reason == "stop" or len(got.tokens) == 40


async def episode(fleet: Fleet, name: str, start: NDArray[np.int32], turns: int = 3) -> list[Taken]:
    """Turns of one session, each of which continues all before it, with the fleet's version when it began."""
    taken = []
    tokens, began = start, fleet.version
    for _ in range(turns):
        got = await fleet.generate(tokens, Sampling(1.0, TURN_TOKENS), (), name)
        taken.append((tokens, got, began))
        tokens = np.concatenate([tokens, got.tokens, start[:3]])
    fleet.release(name)
    return taken


async def load(fleet: Fleet, stop: asyncio.Event, episodes: int) -> list[Taken]:
    """`episodes` at once until `stop`; every one that was begun is finished."""
    taken: list[Taken] = []

    async def work(index: int, start: NDArray[np.int32]) -> None:
        count = 0
        while not stop.is_set():
            taken.extend(await episode(fleet, f"e{index}.{count}", start))
            count += 1

    await asyncio.gather(*(work(index, start) for index, start in enumerate(prompts(episodes))))
    return taken


async def push_under_load(
    fleet: Fleet, models: Mapping[int, Any], episodes: int
) -> tuple[list[Taken], dict[str, float]]:
    """Push all of `models` while `episodes` go on; what was taken meanwhile, and what the fleet counted."""
    first, *later = models
    await fleet.update_weights(first, parameters(models[first]))
    stop = asyncio.Event()

    async def push() -> None:
        for version in later:
            await asyncio.sleep(0.4)
            await fleet.update_weights(version, parameters(models[version]))
        await asyncio.sleep(0.4)
        stop.set()

    begun = time.monotonic()
    pushing = asyncio.create_task(push())
    taken = await load(fleet, stop, episodes)
    await pushing
    logger.info("%d pushes under %d episodes in %.0f s", len(later), episodes, time.monotonic() - begun)
    return taken, dict(fleet.stats().counters)


def assert_nothing_lost(
    taken: Sequence[Taken], counters: Mapping[str, float], models: Mapping[int, Any], mode: str
) -> None:
    """Every turn is whole, and every log-prob is that of the version recorded for its token."""
    spanning = [case for case in taken if len(set(case[1].versions)) > 1]
    assert counters["server_updates"] == len(models)
    assert counters["server_faults"] == counters["lost_segments"] == 0
    assert {int(version) for _, got, _ in taken for version in got.versions} == set(models)
    assert_whole(taken)
    assert spanning or mode == "drain"
    sample, largest = [*some(spanning), *some(taken)], 0.0
    for start, got, began in sample:
        if mode == "in_place":
            got = up_to_the_first_push(got, began)
        largest = max(largest, assert_exact(dict(models), start, got, 1.0))
    logger.info(
        "%s: %d turns in %d requests, %d lost; log-probs of %d turns within %.1e",
        *(mode, len(taken), counters["segments"], counters["lost_segments"], len(sample), largest),
    )


async def push_good_and_bad(fleet: Fleet, models: Mapping[int, Any]) -> list[Generation]:
    """Push versions 0 to 4 with their canaries under four turns; return the turns, and one after them.

    Versions 2 and 3 have wrong weights, and must not be served. `models` are those of all versions.
    """

    async def push(version: int, change: Callable[[Weights], Weights] = lambda same: same) -> None:
        await fleet.update_weights(version, change(parameters(models[version])), canary_check(models[version], version))

    await push(0)
    turns = [
        asyncio.create_task(fleet.generate(start, Sampling(1.0, 100), (), f"s{index}"))
        for index, start in enumerate(prompts(4))
    ]
    await push(1)
    assert fleet.stats().counters["canary_failures"] == 0
    assert fleet.stats().counters["canary_difference"] < 1e-4
    for version, change in ((2, one_shuffled), (3, swapped_layers)):
        with pytest.raises(CanaryError):
            await push(version, change)
        assert fleet.version == 1
    await push(4)
    turns.append(asyncio.create_task(fleet.generate(prompts(1)[0], Sampling(1.0, 20), (), "last")))
    return await asyncio.gather(*turns)


def one_shuffled(tensors: Weights) -> Weights:
    name = "model.layers.1.self_attn.o_proj.weight"
    order = torch.randperm(tensors[name].numel(), generator=torch.Generator().manual_seed(0))
    return {**tensors, name: tensors[name].flatten()[order].view(tensors[name].shape)}


def assert_no_bad_version(turns: Sequence[Generation], models: Mapping[int, Any]) -> None:
    """`turns` are those of `push_good_and_bad`."""
    good = {version: models[version] for version in (0, 1, 4)}
    for start, got in zip(prompts(4), turns[:4], strict=True):
        assert set(got.versions) <= set(good)
        assert_exact(good, start, got, 1.0)
    assert set(turns[4].versions) == {4}


def some(taken: Sequence[Taken], count: int = 40) -> Sequence[Taken]:
    """About `count` of them, spread over all pushes."""
    return taken[:: max(1, len(taken) // count)]


def assert_whole(taken: Sequence[Taken]) -> None:
    assert all(got.finish_reason == "length" and len(got.tokens) == TURN_TOKENS for _, got, _ in taken)
    assert all((np.diff(got.versions) >= 0).all() for _, got, _ in taken)


def up_to_the_first_push(got: Generation, began: int) -> Generation:
    """The part of a turn before an update: after it, keys and values of older weights are there by intent."""
    first = got.versions == began
    return Generation(got.tokens[first], got.logprobs[first], got.versions[first], got.finish_reason)


async def servers_ready(fleet: Fleet, count: int) -> None:
    while fleet.stats().counters["servers_ready"] != count:
        await asyncio.sleep(0.001)
