"""A worker of the single controller. It knows its rank among the W workers, and its position in each mesh, which is a
division of models among the workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from asyncrl.compat.verl.controller.dispatch import MEGATRON
from asyncrl.compat.verl.controller.modes import Dispatch, Execute, register
from asyncrl.errors import DispatchError

T = TypeVar("T")
RENDEZVOUS = "ASYNCRL_RENDEZVOUS"
"""The environment variable with the path of a file through which workers of one machine connect."""


@dataclass(frozen=True, slots=True)
class DistRankInfo:
    """A worker's rank in each dimension of its mesh: tensor, data, pipeline and context parallel."""

    tp_rank: int
    dp_rank: int
    pp_rank: int
    cp_rank: int


@dataclass(frozen=True, slots=True)
class DistGlobalInfo:
    """The size of each dimension of a mesh."""

    tp_size: int
    dp_size: int
    pp_size: int
    cp_size: int


class Worker:
    """verl's base class of workers.

    A worker group sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE in the environment while it makes a worker.
    By default workers are only data parallel; `init_mesh` changes that.

    Raises DispatchError: RANK or WORLD_SIZE is not set.
    """

    def __init__(self) -> None:
        try:
            self._rank, self._world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        except KeyError as missing:
            raise DispatchError(f"{missing} is not in the environment: make workers by a worker group") from None
        self._local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self._local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self._dp_ranks: dict[str, int] = {}
        self._collecting: dict[str, bool] = {}
        self.init_mesh()

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def local_rank(self) -> int:
        """The rank among the workers of this node."""
        return self._local_rank

    @property
    def local_world_size(self) -> int:
        return self._local_world_size

    @property
    def rank_info(self) -> DistRankInfo:
        """This worker's rank in each dimension of the mesh."""
        return self._rank_info

    @property
    def global_info(self) -> DistGlobalInfo:
        """The size of each dimension of the mesh."""
        return self._global_info

    def init_mesh(self, tp_size: int = 1, pp_size: int = 1, cp_size: int = 1) -> None:
        """Set how the W workers divide a model. Call it before the first call that uses the mesh.

        The data-parallel size is W / (tp_size * pp_size * cp_size). As in Megatron, consecutive ranks differ first in
        the tensor-parallel rank, then in the context, data and pipeline rank. The worker of the last pipeline stage
        with tensor and context rank 0 returns the result of its data-parallel rank.

        Raises DispatchError: the sizes do not divide W.
        """
        model = tp_size * pp_size * cp_size
        if model < 1 or self.world_size % model:
            raise DispatchError(
                f"tp_size={tp_size}, pp_size={pp_size} and cp_size={cp_size} need a multiple of {model} workers; there "
                f"are {self.world_size}"
            )
        rest, tp_rank = divmod(self.rank, tp_size)
        rest, cp_rank = divmod(rest, cp_size)
        pp_rank, dp_rank = divmod(rest, self.world_size // model)
        self._rank_info = DistRankInfo(tp_rank, dp_rank, pp_rank, cp_rank)
        self._global_info = DistGlobalInfo(tp_size, self.world_size // model, pp_size, cp_size)
        self._dp_ranks[MEGATRON] = dp_rank
        self._collecting[MEGATRON] = tp_rank == cp_rank == 0 and pp_rank == pp_size - 1

    @property
    def collects(self) -> bool:
        """True if this worker returns the result of its data-parallel rank."""
        return self._collecting[MEGATRON]

    def get_megatron_rank_info(self) -> DistRankInfo:
        """verl's older name for `rank_info`."""
        return self._rank_info

    def get_megatron_global_info(self) -> DistGlobalInfo:
        """verl's older name for `global_info`."""
        return self._global_info

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Register this worker's data-parallel rank in the mesh `mesh_name`.

        `is_collect` is true if this worker returns the result of its data-parallel rank. Raises ValueError: the mesh is
        registered already.
        """
        if mesh_name in self._dp_ranks:
            raise ValueError(f"mesh_name {mesh_name} has been registered")
        self._dp_ranks[mesh_name], self._collecting[mesh_name] = dp_rank, is_collect

    def get_dispatch_collect(self) -> dict[str, dict[str, Any]]:
        """This worker's data-parallel rank in each mesh, and for each mesh, whether it returns the rank's result."""
        return {"dispatch_dp_rank": self._dp_ranks, "collect_dp_rank": self._collecting}

    def set_dispatch_collect(
        self, mesh_name: str, dispatch_dp_rank: Mapping[str, int], collect_dp_rank: Mapping[str, bool]
    ) -> None:
        """Register a mesh in which this worker has the position of another worker of this process.

        The two mappings are those that the other worker's `get_dispatch_collect` returned. As in verl, the last mesh in
        them gives the position.

        Raises ValueError: the mesh is registered already.
        """
        *_, rank = dispatch_dp_rank.values()
        *_, collects = collect_dp_rank.values()
        self._register_dispatch_collect_info(mesh_name, rank, collects)

    def query_collect_info(self, mesh_name: str) -> bool:
        """True if this worker returns the result of its data-parallel rank in the mesh.

        Raises DispatchError: the mesh is not registered.
        """
        return _of_mesh(self, self._collecting, mesh_name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_dispatch_info(self, mesh_name: str) -> int:
        return _of_mesh(self, self._dp_ranks, mesh_name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_collect_info(self, mesh_name: str) -> bool:
        return self.query_collect_info(mesh_name)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of `func(worker, ...)` with this worker's part of each batch."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of `func(...)`, which runs on rank 0."""
        return func(*args, **kwargs)

    def close(self) -> None:
        """Do nothing. The worker group calls this once when it is closed; a worker with open resources overrides it."""


def _of_mesh(worker: Worker, known: Mapping[str, T], mesh_name: str) -> T:
    if mesh_name not in known:
        raise DispatchError(
            f"{type(worker).__name__} has not registered the mesh {mesh_name!r}; it has {', '.join(known)}"
        )
    return known[mesh_name]
