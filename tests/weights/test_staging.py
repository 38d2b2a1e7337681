import pytest
import torch

from asyncrl.config.schema import WeightsConfig
from asyncrl.errors import ConfigError
from asyncrl.weights import staging
from asyncrl.weights.staging import CPU, copy_through, staged, staging_device
from tests.weights.fakes import same_bits, some_tensors


@pytest.mark.parametrize(("staging", "index"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_gpu_is_named_by_its_index_where_the_machine_has_it(staging, index, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert staging_device(WeightsConfig(staging=staging)) == torch.device("cuda", index)


@pytest.mark.parametrize("staging", ["cuda", "cuda:2"])
def test_a_gpu_that_is_not_there_is_refused_at_the_door(staging, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2 if ":" in staging else 0)
    with pytest.raises(ConfigError, match=rf"weights\.staging={staging}.*name one of them, or cpu"):
        staging_device(WeightsConfig(staging=staging))


def test_tensors_that_are_there_already_are_not_copied():
    tensors = some_tensors()
    held = staged(tensors, CPU)
    assert same_bits(held, tensors)
    assert all(held[name].data_ptr() == tensors[name].data_ptr() for name in tensors)


def test_tensors_elsewhere_are_copied():
    assert {each.device.type for each in staged(some_tensors(), torch.device("meta")).values()} == {"meta"}


def test_tensors_of_any_kind_pass_through_buffers_that_are_smaller_than_they_are(monkeypatch):
    monkeypatch.setattr(staging, "BUFFER_BYTES", 24)
    tensors = some_tensors()
    copies = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in tensors.items()}
    buffers = []

    def new_buffer():
        buffers.append(torch.empty(24, dtype=torch.uint8))
        return buffers[-1]

    copy_through(new_buffer, list(tensors.values()), list(copies.values()))
    assert same_bits(copies, tensors)
    assert len(buffers) == staging.BUFFERS


def test_a_buffer_that_cannot_be_had_is_told():
    def new_buffer():
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        copy_through(new_buffer, [torch.ones(3)], [torch.empty(3)])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_is_staged_on_a_gpu_has_the_same_bits():
    tensors = some_tensors() | {"large": torch.randn(3, staging.BUFFER_BYTES // 4)}
    held = staged(tensors, torch.device("cuda", 0))
    assert {each.device for each in held.values()} == {torch.device("cuda", 0)}
    assert same_bits({name: each.cpu() for name, each in held.items()}, tensors)
    again = staged(held, torch.device("cuda", 0))
    assert all(again[name].data_ptr() == held[name].data_ptr() for name in held)
