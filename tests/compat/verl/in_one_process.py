"""Parts of verl that need its packages (tensordict, a process group, decorated workers), carried out with ours or with
verl's. Run as `python FILE LIBRARY CALL RANK STORE` in a Python that has verl; the answer is a line of JSON."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

if __name__ == "__main__":
    # The folder of this file comes first, where the file was run as a program.
    sys.path[0] = str(Path(__file__).parents[3])

from tests.compat.verl.operations import as_json, described

RANKS = 2
PROTOCOLS = {"ours": "asyncrl.compat.verl", "verl": "verl.protocol"}


def _batch(proto: Any, rank: int = 0) -> Any:
    tensors = {
        "ids": torch.arange(6).reshape(3, 2) + 10 * rank,
        "mask": torch.tensor([True, False, True]),
    }
    matrix = np.arange(6).reshape(3, 2)
    objects = np.array([{"row": rank}, [1, 2], None], dtype=object)
    arrays = {"matrix": matrix, "objects": objects, "texts": np.array(["a", "b", "c"], dtype=object)}
    return proto.from_dict(tensors, arrays, {"t": 0.5, "names": ["x", "y"], "of": {"rank": rank}})


def through_tensordict(library: Any) -> Any:
    """A batch as a TensorDict, and back."""
    from tensordict import NonTensorData, NonTensorStack, TensorDict

    data = _batch(library.DataProto)
    rows = [torch.arange(2), torch.arange(3), torch.arange(0)]
    data.batch["nested"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    found = data.to_tensordict()
    kinds = {name: type(value).__name__ for name, value in found.items()}
    answers = [[kinds, list(found.batch_size)], described(library.DataProto.from_tensordict(found))]
    given = TensorDict({"x": torch.arange(4).reshape(2, 2), "n": NonTensorData(3)}, batch_size=[2])
    given["stack"] = NonTensorStack.from_list([NonTensorData([1, 2]), NonTensorData([3, 4])])
    answers.append(described(library.DataProto.from_tensordict(given, {"step": 1})))
    # A TensorDict may be the batch itself.
    whole = library.DataProto(batch=TensorDict({"x": torch.arange(4)}, batch_size=[4]))
    answers += [described(whole[1:3]), [described(each) for each in whole.chunk(2)]]
    return answers


def gathered(library: Any, rank: int, store: str) -> Any:
    """A batch of each process, gathered."""
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    data = _batch(library.DataProto, rank)
    if not torch.cuda.is_available():
        library.get_device_id = lambda: "cpu"  # verl asks for a GPU.
    library.all_gather_data_proto(data, dist.group.WORLD)
    dist.destroy_process_group()
    found = described(data)
    return {**found, "batch": dict(sorted(found["batch"].items()))}


def colocated(name: str) -> Any:
    """The methods of colocated workers, and what they return."""
    base = {"ours": "asyncrl.compat.verl.controller", "verl": "verl.single_controller.base"}[name]
    decorator = {"ours": base, "verl": f"{base}.decorator"}[name]
    ray_base = {"ours": base, "verl": "verl.single_controller.ray.base"}[name]
    controller, modes, on_ray = map(importlib.import_module, (base, decorator, ray_base))

    class Teller(controller.Worker):  # type: ignore[name-defined, misc]
        def __init__(self, word: str, times: int = 1) -> None:
            super().__init__()
            self.word = word * times

        @modes.register(dispatch_mode=modes.Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
        def tell(self, more: str = "") -> str:
            return f"{self.word}{more} {self.rank}/{self.world_size}"

        def private(self) -> None: ...

    import ray

    os.environ |= {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    roles = {
        role: on_ray.RayClassWithInitArgs(ray.remote(Teller), role, times=times)
        for role, times in {"actor_rollout": 1, "critic": 2}.items()
    }
    made = on_ray.create_colocated_worker_cls(roles).cls
    worker_class = getattr(made, "__ray_actor_class__", made)
    worker = worker_class()
    return [
        sorted(each for each in dir(worker_class) if each.endswith("tell")),
        hasattr(worker_class, "critic_private"),
        [worker.actor_rollout_tell("!"), worker.critic_tell(more="?"), worker.rank, sorted(worker.worker_dict)],
    ]


CALLS: Mapping[str, Callable[..., Any]] = {
    "through_tensordict": lambda name, *_: through_tensordict(importlib.import_module(PROTOCOLS[name])),
    "gathered": lambda name, rank, store: gathered(importlib.import_module(PROTOCOLS[name]), int(rank), store),
    "colocated": lambda name, *_: colocated(name),
}

if __name__ == "__main__":
    library, call, *given = sys.argv[1:]
    sys.stdout.write("\n" + as_json(CALLS[call](library, *given)) + "\n")
