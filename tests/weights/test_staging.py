import pytest
import torch

from asyncrl.config.schema import WeightsConfig
from asyncrl.errors import ConfigError
from asyncrl.weights.staging import CPU, staged, staging_device
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
