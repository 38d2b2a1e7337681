"""Keeps optimizer states in the memory of the host (learner.optimizer_on_host). An update copies one part of the states
after the other to the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from asyncrl.learner.ranks.ranks import local_size

PART = 1 << 26
"""The device has the states of at most this many parameter elements at once. With AdamW these states take 0.5 GB."""


@torch.no_grad()
def step_with_states_on_host(optimizer: torch.optim.Optimizer, part: int = PART) -> None:
    """Do the same as `optimizer.step()`, for optimizers that update each parameter by its own state.

    States are in host memory before and after the step. During the step the device holds the states of at most `part`
    elements of this rank, or of one larger parameter. Scalar states do not move.
    """
    groups = [(group, group["params"]) for group in optimizer.param_groups]
    try:
        for group, _ in groups:
            group["params"] = []
        for group, parameters in groups:
            for group["params"] in _parts([each for each in parameters if each.grad is not None], part):
                _step(optimizer, group["params"])
            group["params"] = []
    finally:
        for group, parameters in groups:
            group["params"] = parameters
    if torch.cuda.is_available():
        # Waits for the copies of states, since later readers of the states do not wait for them.
        torch.cuda.synchronize()


def _step(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    states = optimizer.state
    stored = {each: states[each] for each in parameters if each in states}
    for each, state in stored.items():
        states[each] = {key: _on_device(value, each.device) for key, value in state.items()}
    optimizer.step()
    for each in parameters:
        states[each] = _on_host(states[each], stored.get(each, {}))


def _parts(parameters: Sequence[nn.Parameter], part: int) -> Iterator[list[nn.Parameter]]:
    chosen: list[nn.Parameter] = []
    size = 0
    for each in parameters:
        if chosen and size + local_size(each) > part:
            yield chosen
            chosen, size = [], 0
        chosen.append(each)
        size += local_size(each)
    if chosen:
        yield chosen


def _on_device(value: Tensor, device: torch.device) -> Tensor:
    return value.to(device, non_blocking=True, copy=True) if value.dim() else value


def _on_host(state: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy the state to host memory, into the `stored` tensors if they exist."""
    return {
        key: (stored[key] if key in stored else _host_memory(value)).copy_(value, non_blocking=True)
        if value.dim()
        else value
        for key, value in state.items()
    }


def _host_memory(value: Tensor) -> Tensor:
    return torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
