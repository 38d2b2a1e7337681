"""The loader inside a server, with small models that load weights as SGLang's models do."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.nn import Module, Parameter

from asyncrl.engine.sglang.inside import FOLDER, LOADER
from asyncrl.engine.sglang.inside.asyncrl_loader import KEPT, Layout, load
from asyncrl.weights.buckets import Bucket, fill
from asyncrl.weights.manifest import specs_of

Weights = dict[str, Tensor]
NOTHING = torch.empty(0)
ROWS = 3
"""The rows of `embed` in a push. The server's tensor has more, which are 0."""


def weights(seed: int) -> Weights:
    made = torch.Generator().manual_seed(seed)
    sizes = {"q": (2, 4), "k": (1, 4), "v": (1, 4), "embed": (ROWS, 4), "bias": (4,)}
    return {name: torch.randn(size, generator=made).bfloat16() for name, size in sizes.items()}


class Served(Module):
    """A model that stacks q, k and v in one tensor, pads its embeddings, and has a bias in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = Parameter(torch.zeros(4, 4, dtype=torch.bfloat16), requires_grad=False)
        self.embed = Parameter(torch.zeros(8, 4, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("bias", torch.zeros(4))
        self.loads = 0

    def load_weights(self, given: Iterable[tuple[str, Tensor]]) -> None:
        self.loads += 1
        starts = {"q": 0, "k": 2, "v": 3}
        for name, tensor in given:
            if name in starts:
                self.qkv.data.narrow(0, starts[name], len(tensor)).copy_(tensor)
            elif name == "embed":
                self.embed[: len(tensor)].data.copy_(tensor)
                self.embed[len(tensor) :].data.fill_(0)
            elif name == "bias":
                self.load_bias(tensor)

    def load_bias(self, tensor: Tensor) -> None:
        self.bias.copy_(tensor)


def assert_serves(model: Served, expected: Weights) -> None:
    assert torch.equal(model.qkv.data, torch.cat([expected["q"], expected["k"], expected["v"]]))
    assert torch.equal(model.embed.data[:ROWS], expected["embed"])
    assert not model.embed.data[ROWS:].any()
    assert torch.equal(model.bias, expected["bias"].float())


class Pushes:
    """An actor's pushes into `model`."""

    def __init__(self, model: Served) -> None:
        self.model = model
        self.bucket = Bucket(specs_of(weights(0)))
        self.flat = torch.zeros(self.bucket.nbytes, dtype=torch.uint8)

    def first(self, version: int, key: str = "one") -> None:
        layout: Layout = [(each.name, each.dtype, list(each.shape), start) for each, start in self.bucket.placed()]
        fill(self.flat, self.bucket, weights(version))
        load(self.model, [(json.dumps({"key": key, "tensors": layout}), self.flat)])
        assert_serves(self.model, weights(version))

    def later(self, version: int, key: str = "one") -> None:
        fill(self.flat, self.bucket, weights(version))
        load(self.model, [(json.dumps({"key": key}), NOTHING)])
        assert_serves(self.model, weights(version))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_the_model_finds_tensors_by_name_once_and_later_pushes_only_copy(mode: Callable[[], torch.no_grad]):
    """SGLang's scheduler runs in inference mode."""
    pushes = Pushes(Served())
    with mode():
        pushes.first(1)
        pushes.later(2)
        pushes.later(3)
    assert pushes.model.loads == 1
    assert getattr(pushes.model, KEPT).reason == ""


def test_tied_embeddings_are_copied_once(caplog: pytest.LogCaptureFixture):
    class Tied(Served):
        def load_weights(self, given: Iterable[tuple[str, Tensor]]) -> None:
            super().load_weights([(name, each) for pair in given for name, each in [pair] * (1 + (pair[0] == "embed"))])

    caplog.set_level(logging.INFO)
    pushes = Pushes(Tied())
    pushes.first(1)
    pushes.later(2)
    assert pushes.model.loads == 1
    assert "asyncrl loads the weights of Tied by copies at once" in caplog.text


class Scaled(Served):
    def load_bias(self, tensor: Tensor) -> None:
        self.bias.copy_(tensor * 1.0)


class Read(Served):
    def load_bias(self, tensor: Tensor) -> None:
        self.bias.data.fill_(tensor[0].item())
        self.bias.copy_(tensor)


class Twice(Served):
    def load_bias(self, tensor: Tensor) -> None:
        self.bias[:2].copy_(tensor[2:])
        self.bias.copy_(tensor)


class Cleared(Served):
    """Sets a part of the embeddings to 0 after they were loaded, and loads them again by a computation."""

    def load_bias(self, tensor: Tensor) -> None:
        self.bias.copy_(tensor)
        self.bias[:1].zero_()
        self.bias[:1].copy_(tensor[:1].clone())


class Threaded(Served):
    """Copies in another thread, as SGLang's loaders of large mixtures of experts do."""

    def load_bias(self, tensor: Tensor) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(super().load_bias, tensor).result()


class Spread(Served):
    def load_bias(self, tensor: Tensor) -> None:
        self.bias.copy_(tensor[:1])
        self.bias.copy_(tensor)


class Taken(Served):
    """Takes a loaded tensor as its own."""

    def load_bias(self, tensor: Tensor) -> None:
        self.bias = tensor.float() if tensor.dtype != torch.bfloat16 else tensor


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Scaled, "it calls aten.mul.Tensor"),
        (Read, "it calls aten._local_scalar_dense.default"),
        (Twice, "it copies twice to the same memory"),
        (Cleared, "it sets loaded weights to a constant"),
        (Threaded, "it does not copy bias once and whole in its own thread"),
        (Spread, "it calls aten.copy_.default"),
        (Taken, "it uses loaded tensors without copying them"),
    ],
)
def test_a_model_that_does_more_than_copying_loads_each_push_by_name(
    kind: type[Served], reason: str, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    pushes = Pushes(kind())
    pushes.first(1)
    loads = pushes.model.loads
    pushes.later(2)
    pushes.later(3)
    assert pushes.model.loads == 3 * loads
    assert caplog.text.count(f"at each push by name, because of its loader: {reason}") == 1


def test_a_model_that_took_loaded_tensors_as_its_own_keeps_them_while_the_buffer_is_filled():
    pushes = Pushes(Taken())
    pushes.first(1)
    fill(pushes.flat, pushes.bucket, weights(2))
    assert_serves(pushes.model, weights(1))


def test_a_model_that_ignores_a_tensor_loads_each_push_by_name():
    class Deaf(Served):
        def load_weights(self, given: Iterable[tuple[str, Tensor]]) -> None:
            super().load_weights((name, each) for name, each in given if name != "k")

    pushes = Pushes(Deaf())
    for version in (1, 2):
        with pytest.raises(AssertionError):
            (pushes.first if version == 1 else pushes.later)(version)
    assert pushes.model.loads == 2
    assert getattr(pushes.model, KEPT).reason.startswith("it does not copy k once")


def test_tensors_that_moved_are_found_by_name_once_again():
    pushes = Pushes(Served())
    pushes.first(1)
    pushes.model.qkv.data = torch.zeros(4, 4, dtype=torch.bfloat16)
    pushes.later(2)
    pushes.later(3)
    assert pushes.model.loads == 2


def test_a_new_buffer_replaces_the_kept_one():
    first = Pushes(Served())
    first.first(1)
    second = Pushes(first.model)
    second.first(2, "two")
    second.later(3, "two")
    assert first.model.loads == 2


def test_a_server_that_does_not_keep_the_buffer_ends_instead_of_serving_older_weights():
    pushes = Pushes(Served())
    with pytest.raises(RuntimeError, match="does not keep the weights one"):
        pushes.later(1)
    pushes.first(1)
    with pytest.raises(RuntimeError, match="does not keep the weights two"):
        pushes.later(2, "two")


@pytest.mark.slow
def test_a_python_without_asyncrl_finds_the_loader_by_its_folder():
    module, _, function = LOADER.rpartition(".")
    code = f"import sys; sys.modules['asyncrl'] = None; from {module} import {function}"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(FOLDER)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
