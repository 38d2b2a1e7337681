"""The choice of routes by which weights travel."""

from __future__ import annotations

import pytest
import torch

from asyncrl.config.schema import TrainConfig
from asyncrl.weights.from_config import route_settings
from asyncrl.weights.routes import INTO_SERVERS, ServerFacts, choose, routes_to_engines

ON_GPU = ServerFacts(here=True, gpus=(0, 1), same_gpus=True, visible=4)


@pytest.mark.parametrize(
    ("changes", "device", "route"),
    [
        ({}, "cpu", "zmq"),
        ({}, "cuda", "distributed"),
        ({"network.host": "10.0.0.1"}, "cuda", "zmq"),
        ({"engine.kind": "sglang"}, "cuda", "zmq"),
        ({"engine.kind": "vllm"}, "cpu", "disk"),
        ({"engine.kind": "sglang", "weights.into_servers": "disk"}, "cpu", "disk"),
        ({"engine.kind": "vllm", "network.host": "10.0.0.1"}, "cpu", "zmq"),
        ({"weights.to_engines": "disk"}, "cuda", "disk"),
        ({"weights.to_engines": "distributed", "network.host": "10.0.0.1"}, "cpu", "distributed"),
    ],
)
def test_auto_takes_the_fastest_route_to_engines_by_which_no_side_can_hang(
    changes: dict[str, str], device: str, route: str
) -> None:
    config = TrainConfig()
    for key, new in changes.items():
        section, _, name = key.partition(".")
        setattr(getattr(config, section), name, new)
    chosen = routes_to_engines(route_settings(config), torch.device(device))
    assert chosen.routes[0].name == route
    assert chosen.routes[-1].name == "zmq", "the learner always serves it"


@pytest.mark.parametrize(
    ("facts", "names"),
    [
        (ON_GPU, ["ipc", "disk", "gloo"]),
        (ServerFacts(here=True, gpus=(0,), same_gpus=False, visible=4), ["disk", "gloo"]),
        (ServerFacts(here=True, gpus=(7,), same_gpus=True, visible=4), ["disk", "gloo"]),
        (ServerFacts(here=False, gpus=(0,), same_gpus=True, visible=4), ["disk"]),
        (ServerFacts(here=True), ["disk", "gloo"]),
        (ServerFacts(here=False), ["disk"]),
    ],
)
def test_auto_takes_the_fastest_route_into_a_server_that_is_possible_and_cannot_hang(
    facts: ServerFacts, names: list[str]
) -> None:
    chosen = choose(INTO_SERVERS, "auto", facts)
    assert [route.name for route in chosen.routes] == names
    left_out = {"ipc", "nccl", "disk", "gloo"} - set(names)
    assert all(f"not by {name}: " in chosen.left_out for name in left_out)


@pytest.mark.parametrize("name", ["ipc", "nccl", "disk", "gloo"])
def test_a_route_that_is_named_is_the_only_one(name: str) -> None:
    chosen = choose(INTO_SERVERS, name, ON_GPU)
    assert ([route.name for route in chosen.routes], chosen.left_out) == ([name], "")


@pytest.mark.parametrize(
    ("name", "facts", "reason"),
    [
        ("ipc", ServerFacts(here=True), "runs on the CPU"),
        ("ipc", ServerFacts(gpus=(0,), visible=1), "cannot see the server's process"),
        ("ipc", ServerFacts(here=True, gpus=(0,), visible=1), "do not see the same GPUs"),
        ("nccl", ServerFacts(here=True, visible=1), "runs on the CPU"),
        ("nccl", ServerFacts(here=True, gpus=(0, 1), visible=2), "has a server"),
    ],
)
def test_a_route_that_is_named_and_impossible_is_refused_with_the_reason(
    name: str, facts: ServerFacts, reason: str
) -> None:
    chosen = choose(INTO_SERVERS, name, facts)
    assert not chosen.routes
    assert reason in chosen.left_out


def test_nccl_sends_from_the_last_gpu_without_a_server() -> None:
    assert ON_GPU.spare_gpu == torch.device("cuda", 3)
    assert ServerFacts(here=True, gpus=(0,), visible=4, taken=(2, 3)).spare_gpu == torch.device("cuda", 1)
    assert ServerFacts(here=False, gpus=(0,), visible=1).spare_gpu == torch.device("cuda", 0)
