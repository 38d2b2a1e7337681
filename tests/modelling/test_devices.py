"""Devices in the logs of the roles."""

from __future__ import annotations

import pytest
import torch

from asyncrl.modelling.devices import described


@pytest.mark.parametrize(("visible", "number"), [("4,6", 6), ("", 1)])
def test_a_gpu_is_named_by_its_number_on_the_machine(
    monkeypatch: pytest.MonkeyPatch, visible: str, number: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(100e9), int(150e9)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    assert described("cuda:1") == f"GPU {number} (H200), 100 of 150 GB free"


def test_the_cpu_has_threads() -> None:
    assert described(torch.device("cpu")) == f"the CPU, with {torch.get_num_threads()} threads"
