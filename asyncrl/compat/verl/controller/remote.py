"""Runs a worker in a process on a Ray cluster, and prepares batches for the transfer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from asyncrl.compat.verl.batches.nested import nested_of, parts
from asyncrl.compat.verl.batches.protocol import DataProto
from asyncrl.compat.verl.controller.group import run_method, worker_error
from asyncrl.compat.verl.controller.references import ray_module
from asyncrl.machine.ports import free_ports
from asyncrl.machine.process import is_ctrl_c


class WorkerHost:
    """A Ray actor with one worker. It adds the worker's rank to every error."""

    def __init__(self) -> None:
        self._worker: Any = None

    def address(self) -> tuple[str, str, int]:
        """The id and the address of this node, and a free port on it."""
        ray = ray_module()
        return str(ray.get_runtime_context().get_node_id()), str(ray.util.get_node_ip_address()), free_ports(1)

    def start(
        self, worker_class: type, args: Sequence[Any], kwargs: Mapping[str, Any], variables: dict[str, str]
    ) -> None:
        """Set environment variables, and make the worker. Raises WorkerError: its constructor failed."""
        os.environ.update(variables)
        try:
            self._worker = worker_class(*args, **kwargs)
        except BaseException as error:
            if is_ctrl_c(error):
                raise
            rank = f"rank {variables['RANK']} of {variables['WORLD_SIZE']}"
            raise worker_error(f"{rank}: {worker_class.__name__} failed to start", error) from error

    def call(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """The result of a method. Raises WorkerError: the method failed."""
        return compact(run_method(self._worker, method_name, args, kwargs))

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()


def compact(value: Any) -> Any:
    """A batch with its tensors on the CPU, and without views of larger tensors. Return other values unchanged."""
    # The pickle of a view would contain the whole larger tensor.
    if not isinstance(value, DataProto) or value.batch is None:
        return value
    tensors = {name: _alone(tensor) for name, tensor in value.batch.items()}
    return type(value)(type(value.batch)(tensors, value.batch.batch_size), value.non_tensor_batch, value.meta_info)


def _alone(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    if tensor.is_nested:
        return nested_of(*parts(tensor))
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
