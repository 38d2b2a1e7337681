"""Worker groups on a Ray cluster: one process per worker, on the nodes of a resource pool."""

from __future__ import annotations

import logging
import shutil
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from asyncrl.compat.verl.batches.protocol import DataProto
from asyncrl.compat.verl.controller.group import ClassWithInitArgs, ResourcePool, WorkerGroup
from asyncrl.compat.verl.controller.local import rank_variables
from asyncrl.compat.verl.controller.references import fetched, ray_module
from asyncrl.compat.verl.controller.remote import WorkerHost, compact
from asyncrl.compat.verl.controller.worker import RENDEZVOUS
from asyncrl.errors import DispatchError

PLACED_S = 300.0
"""The maximum number of seconds for which a pool waits until the cluster has free resources."""
CLOSED_S = 10.0
"""The number of seconds after which a worker that is still closing is killed."""

logger = logging.getLogger(__name__)


class RayResourcePool(ResourcePool):
    """CPUs and GPUs for processes on nodes of the cluster, reserved at the first use.

    Each process reserves one CPU and, with `use_gpu`, one GPU. Up to `max_colocate_count` worker groups share the pool,
    and a worker counts as 1 / `max_colocate_count` of a CPU and a GPU.

    `close` releases the resources, and so does the end of a `with` block.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int] | None = None,
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        wait_s: float = PLACED_S,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count)
        self.use_gpu = use_gpu
        self.name_prefix = name_prefix or uuid.uuid4().hex[:6]
        self._wait_s = wait_s
        self._placement_groups: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def get_placement_groups(self, strategy: str = "STRICT_PACK") -> list[Any]:
        """A Ray placement group for each node.

        Raises ConfigError: Ray is not installed. Raises DispatchError: the cluster lacks free resources.
        """
        ray = ray_module()
        if not self._placement_groups:
            bundle = {"CPU": 1.0, **({"GPU": 1.0} if self.use_gpu else {})}
            self._placement_groups = [
                ray.util.placement_group([bundle] * count, strategy, name=f"{self.name_prefix}_{node}")
                for node, count in enumerate(self.store)
            ]
            for node, group in enumerate(self._placement_groups):
                if not group.wait(self._wait_s):
                    self.close()
                    has = {name: amount for name, amount in ray.cluster_resources().items() if name in ("CPU", "GPU")}
                    raise DispatchError(
                        f"the Ray cluster had no node with room for {self.store[node]} processes with {bundle} each "
                        f"within {self._wait_s:g} s; its total is {has}: use fewer processes, or set use_gpu=False"
                    )
        return self._placement_groups

    def close(self) -> None:
        """Release the resources, and end workers that still run."""
        ray = ray_module()
        for group in self._placement_groups:
            ray.util.remove_placement_group(group)
        self._placement_groups = []


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class, plain or decorated with `ray.remote`, with the arguments of its constructor."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        metadata = getattr(cls, "__ray_metadata__", None)
        super().__init__(cls if metadata is None else metadata.modified_class, *args, **kwargs)
        self.options: dict[str, Any] = {}

    def update_options(self, options: Mapping[str, Any]) -> None:
        """Add options for the workers' Ray actors."""
        self.options.update(options)


class RayWorkerGroup(WorkerGroup):
    """A worker of `ray_cls_with_init` in each process of `resource_pool`.

    With `bin_pack`, each node of the pool must fit on one node of the cluster. `worker_env` has more environment
    variables for the workers.

    Raises ConfigError: Ray is not installed. Raises DispatchError: the cluster lacks free resources. Raises
    WorkerError: a worker's constructor failed.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: RayClassWithInitArgs,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        worker_env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(ray_cls_with_init.cls)
        self._ray = ray_module()
        self._pool = resource_pool
        self._stored: dict[int, Any] | None = None
        self._folder: str | None = None
        self.name_prefix = name_prefix or uuid.uuid4().hex[:6]
        groups = resource_pool.get_placement_groups("STRICT_PACK" if bin_pack else "PACK")
        places = [(group, index) for group in groups for index in range(group.bundle_count)]
        if not places:
            raise DispatchError(
                "the resource pool has no process: give the number of processes on each node, such as [1]"
            )
        self._workers = [
            self._host(group, index, rank, ray_cls_with_init) for rank, (group, index) in enumerate(places)
        ]
        try:
            self._start(ray_cls_with_init, worker_env or {})
        except BaseException:
            self.close()
            raise

    @property
    def world_size(self) -> int:
        return len(self._workers)

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        # Batches are stored for this call only: later, another batch may have the same id(), or this batch may have
        # other rows.
        self._stored = {}
        try:
            return super().execute_all(method_name, *args, **kwargs)
        finally:
            self._stored = None

    def submit(self, rank: int, method_name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        own = [self._sent(each) for each in args]
        named = {name: self._sent(each) for name, each in kwargs.items()}
        return self._workers[rank].call.remote(method_name, *own, **named)

    def _end(self) -> None:
        """Close the workers, wait for them up to CLOSED_S seconds, and end their processes. The pool stays reserved."""
        closing = {worker.close.remote(): rank for rank, worker in enumerate(self._workers)}
        done, _ = self._ray.wait(list(closing), num_returns=len(closing), timeout=CLOSED_S)
        for reference in done:
            try:
                self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                logger.warning("rank %d of %d was not closed: %s", closing[reference], self.world_size, error)
        for worker in self._workers:
            self._ray.kill(worker)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _sent(self, value: Any) -> Any:
        """A batch as a reference into Ray's store, which holds one copy for all workers."""
        if not isinstance(value, DataProto):
            return value
        stored = {} if self._stored is None else self._stored
        if id(value) not in stored:
            stored[id(value)] = self._ray.put(compact(value))
        return stored[id(value)]

    def _host(self, group: Any, index: int, rank: int, ray_cls_with_init: RayClassWithInitArgs) -> Any:
        share = 1 / self._pool.max_colocate_count
        strategies = self._ray.util.scheduling_strategies
        options = {
            "num_cpus": share,
            "num_gpus": share if self._pool.use_gpu else 0,
            "name": f"{self.name_prefix}{ray_cls_with_init.cls.__name__}_{rank}",
            "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(group, index),
            **ray_cls_with_init.options,
        }
        return self._ray.remote(WorkerHost).options(**options).remote()

    def _start(self, ray_cls_with_init: RayClassWithInitArgs, worker_env: Mapping[str, str]) -> None:
        hosts = fetched([worker.address.remote() for worker in self._workers], "rank")
        _, address, port = hosts[0]
        common = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        if len({node for node, *_ in hosts}) == 1:
            self._folder = tempfile.mkdtemp(prefix="asyncrl-workers-")
            common[RENDEZVOUS] = str(Path(self._folder) / "rendezvous")
        if reserved := sorted(worker_env.keys() & {*common, *rank_variables(0, 0, 0, 0)}):
            raise DispatchError(f"worker_env sets {', '.join(reserved)}, which tell a worker its rank")
        places = zip(self._pool.local_rank_list(), self._pool.local_world_size_list(), strict=True)
        started = [
            worker.start.remote(
                ray_cls_with_init.cls,
                ray_cls_with_init.args,
                ray_cls_with_init.kwargs,
                {**common, **rank_variables(rank, self.world_size, local_rank, local_size), **worker_env},
            )
            for rank, (worker, (local_rank, local_size)) in enumerate(zip(self._workers, places, strict=True))
        ]
        fetched(started, "rank")
