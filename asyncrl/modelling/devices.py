"""Describes a device for the logs, and makes it the current one."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current device of this thread. Without a GPU, nothing changes."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def described(device: torch.device | str) -> str:
    """Describe the device. A GPU is described by its index on this machine, its name and its free memory.

    The index does not depend on CUDA_VISIBLE_DEVICES.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return f"the CPU, with {torch.get_num_threads()} threads"
    number = torch.cuda.current_device() if device.index is None else device.index
    visible = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    free, total = torch.cuda.mem_get_info(number)
    shown = visible[number] if number < len(visible) else number
    return f"GPU {shown} ({torch.cuda.get_device_name(number)}), {free / 1e9:.0f} of {total / 1e9:.0f} GB free"
