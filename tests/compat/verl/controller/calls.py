"""Calls of worker groups, carried out with ours, or with verl's in a process of its own, as which this file is run.

A call is a mapping: `mode`, `world` (workers), `arguments` (each a list, or a number of rows), `padding` (of batches)
and `ranks` (the data-parallel rank of each worker, and whether it collects). Workers double what they get.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Call = Mapping[str, Any]
MESH = "mesh"


def as_told(proto: Any, call: Call, perform: Callable[[Callable[..., Any], Sequence[Any]], Any]) -> Any:
    """Return the arguments that the workers got and the result of the call, or the classes and message of its error.

    `perform` makes the call of a group whose workers run the function that it is given.
    """
    given: list[Any] = []

    def double(value: Any) -> Any:
        given.append(_described(proto, value))
        if not isinstance(value, proto):
            return [value, value]
        if call["mode"] == "DP_COMPUTE_METRIC":
            return len(value)
        return proto.from_dict({"x": 2 * value.batch["x"]})

    def argument(given: Any) -> Any:
        if not isinstance(given, int):
            return given
        return proto.from_dict({"x": torch.arange(given)}, auto_padding=call["padding"])

    try:
        result = perform(double, [argument(each) for each in call["arguments"]])
    except Exception as error:  # noqa: BLE001
        return {"error": [each.__name__ for each in type(error).__mro__], "message": str(error)}
    return {"given": given, "result": _described(proto, result)}


def _described(proto: Any, value: Any) -> Any:
    if isinstance(value, proto):
        return {"x": value.batch["x"].tolist()}
    return [_described(proto, each) for each in value] if isinstance(value, list | tuple) else value


def _serve() -> None:
    """Carry out the calls on standard input with verl, one a line."""
    from verl import DataProto
    from verl.single_controller.base.decorator import (
        Dispatch,
        get_predefined_dispatch_fn,
        make_nd_compute_dataproto_dispatch_fn,
    )
    from verl.single_controller.ray.base import RayWorkerGroup, func_generator
    from verl.utils import ray_utils

    # It would put what it divides into Ray's store.
    ray_utils.parallel_put = lambda values, **_: values

    class Group(RayWorkerGroup):
        def __init__(self, call: Call, method: Callable[..., Any]) -> None:
            self._workers = [None] * call["world"]
            self._world_size = call["world"]
            ranks = call["ranks"]
            self._dispatch_info = {MESH: [rank for rank, _ in ranks]}
            self._collect_info = {MESH: [collects for _, collects in ranks]}
            self._method = method

        def _execute_remote_single_worker(self, worker: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
            return self._method(*args, **kwargs)

    def perform(call: Call, method: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        group, mode = Group(call, method), call["mode"]
        steps = (
            make_nd_compute_dataproto_dispatch_fn(MESH)
            if mode == MESH
            else get_predefined_dispatch_fn(getattr(Dispatch, mode))
        )
        # Without waiting, the values themselves stand for the references to them.
        return func_generator(group, "method", **steps, execute_fn=group.execute_all, blocking=False)(*arguments)

    for line in sys.stdin:
        call = json.loads(line)
        answer = as_told(DataProto, call, lambda method, arguments, call=call: perform(call, method, arguments))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
