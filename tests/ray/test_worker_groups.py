"""Worker groups on Ray: two processes that get parts of batches, fail, and die."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from asyncrl.compat.verl import DataProto
from asyncrl.compat.verl.controller import (
    DataProtoFuture,
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    create_colocated_worker_cls,
    register,
)
from asyncrl.errors import DispatchError, WorkerError
from tests.compat.verl.controller.workers import Reporter, numbers, rows, seen_by


class Fragile(Worker):
    """Fails in various ways."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        if fails and self.rank == 1:
            raise ValueError("no memory")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def process(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die(self) -> None:
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def quit(self) -> None:
        if self.rank == 1:
            sys.exit(3)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def variables(self) -> dict[str, str]:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MINE")
        return {name: os.environ[name] for name in names}

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def same(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def stored_bytes(self, data: DataProto) -> DataProto:
        """Return the size of the memory that came along with a batch's tensor."""
        size = data.batch["x"].untyped_storage().nbytes()
        return DataProto.from_dict({"bytes": torch.full((len(data),), size)})


@pytest.fixture(scope="module")
def pool() -> Iterator[RayResourcePool]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        with RayResourcePool([2], use_gpu=False) as pool:
            yield pool
    finally:
        ray.shutdown()


@pytest.fixture(scope="module")
def group(pool: RayResourcePool) -> Iterator[Any]:
    with RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Reporter))) as group:
        yield group


def test_uneven_batches_are_padded_divided_and_joined_again(group: Any) -> None:
    assert numbers(group.dp_compute_proto(rows(1, 2, 3, auto_padding=True))) == [2, 4, 6]
    assert [calls[-1] for calls in seen_by(group)] == [[1, 2], [3, 3]]


def test_each_mode_gives_the_workers_what_it_gives_them_in_one_process(group: Any) -> None:
    assert group.rank_zero("a") == (0, "a")
    assert group.one_to_all("a", other="b") == [(0, "a", "b"), (1, "a", "b")]
    assert group.all_to_all(["a", "b"]) == group.dp_compute(["a", "b"]) == [(0, "a"), (1, "b")]
    assert group.megatron_compute(["a", "b"]) == [(0, "a"), (1, "b")]
    assert numbers(group.megatron_compute_proto(rows(1, 2, 3, auto_padding=True))) == [2, 4, 6]
    assert numbers(group.swapped(rows(1, 2, 3, 4))) == [2, 4, 6, 8]
    assert [each["rank"] for each in group.dp_compute_metric(rows(1, 2))] == [0, 1]
    assert group.waited_for() == [0, 1]


def test_a_call_that_does_not_wait_returns_a_future_that_another_call_takes(group: Any) -> None:
    future = group.later(rows(1, 2, 3, 4))
    assert isinstance(future, DataProtoFuture)
    assert numbers(group.dp_compute_proto(future)) == [4, 8, 12, 16]
    assert numbers(future.get()) == [2, 4, 6, 8]
    assert ray.get(group.rank_later()) == [0, 1]


def test_an_error_of_a_worker_reaches_the_caller_with_its_rank(group: Any) -> None:
    with pytest.raises(
        WorkerError, match=r"^rank 1 of 2: Reporter\.fail_on failed: ValueError: 13 is unlucky$"
    ) as error:
        group.fail_on(rows(1, 13))
    assert isinstance(error.value.cause, ValueError)
    assert numbers(group.dp_compute_proto(rows(1, 2))) == [2, 4], "the group does not go on"


def test_a_call_of_rank_zero_gets_the_batch_as_it_is_now(group: Any) -> None:
    """Not the one that an earlier call got, which was the same object or had the same place in memory."""
    data = rows(1, 2)
    assert numbers(group.rank_zero(data)[1]) == [1, 2]
    data.batch["x"] += 10
    data.non_tensor_batch["text"][:] = ["11", "12"]
    assert numbers(group.rank_zero(data)[1]) == [11, 12]
    assert [numbers(group.rank_zero(rows(each))[1]) for each in range(30)] == [[each] for each in range(30)]


def test_a_wrong_call_is_refused_before_any_worker_gets_it(group: Any) -> None:
    with pytest.raises(DispatchError, match="only a DataProto"):
        group.dp_compute_proto([1, 2])


def test_workers_of_two_roles_share_processes(pool: RayResourcePool) -> None:
    roles = {
        role: RayClassWithInitArgs(ray.remote(kind)) for role, kind in {"actor": Reporter, "fragile": Fragile}.items()
    }
    with RayWorkerGroup(pool, create_colocated_worker_cls(roles)) as whole:
        groups: Any = whole.spawn(roles)
        both: Any = whole
        assert groups["fragile"].process() == both.fragile_process()
        assert len({os.getpid(), *groups["fragile"].process()}) == 3
        data = rows(1, 2, 3, auto_padding=True)
        assert numbers(groups["actor"].dp_compute_proto(data)) == [2, 4, 6]
        assert numbers(groups["actor"].dp_compute_proto(groups["actor"].later(rows(1, 2)))) == [4, 8]
        with pytest.raises(WorkerError, match="ValueError: 13 is unlucky"):
            groups["actor"].fail_on(rows(1, 13))


def test_nested_tensors_reach_workers(pool: RayResourcePool) -> None:
    with RayWorkerGroup(pool, RayClassWithInitArgs(Fragile)) as fragile:
        found: Any = fragile
        given = [torch.arange(length) for length in (1, 3, 2, 0)]
        data = DataProto.from_dict({"x": torch.nested.as_nested_tensor(given, layout=torch.jagged)})
        assert [each.tolist() for each in found.same(data).batch["x"].unbind()] == [each.tolist() for each in given]


def test_workers_are_processes_that_know_their_place(pool: RayResourcePool) -> None:
    with RayWorkerGroup(pool, RayClassWithInitArgs(Fragile), worker_env={"MINE": "yes"}) as fragile:
        found: Any = fragile
        assert len({os.getpid(), *found.process()}) == 3
        first, second = found.variables()
        assert (first["RANK"], second["RANK"], second["LOCAL_RANK"]) == ("0", "1", "1")
        assert first["WORLD_SIZE"] == first["LOCAL_WORLD_SIZE"] == "2"
        assert (first["MASTER_ADDR"], first["MASTER_PORT"]) == (second["MASTER_ADDR"], second["MASTER_PORT"])
        assert first["MINE"] == "yes"
        with pytest.raises(DispatchError, match="RANK"):
            RayWorkerGroup(pool, RayClassWithInitArgs(Fragile), worker_env={"RANK": "0"})


def test_a_worker_gets_its_part_of_a_batch_and_not_the_memory_of_the_whole(pool: RayResourcePool) -> None:
    with RayWorkerGroup(pool, RayClassWithInitArgs(Fragile)) as fragile:
        found: Any = fragile
        data = found.stored_bytes(DataProto.from_dict({"x": torch.zeros(4, 1000)}))
    assert data.batch["bytes"].tolist() == [2 * 1000 * 4] * 4


def test_a_worker_that_cannot_start_is_named_and_nothing_is_left_of_the_group(
    pool: RayResourcePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(WorkerError, match="rank 1 of 2: Fragile failed to start: ValueError: no memory"):
        RayWorkerGroup(pool, RayClassWithInitArgs(Fragile, fails=True), name_prefix="failing")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="look up actor"):
        ray.get_actor("failingFragile_0")


def test_a_worker_that_ends_the_program_fails_its_call_only(pool: RayResourcePool) -> None:
    with RayWorkerGroup(pool, RayClassWithInitArgs(Fragile)) as fragile:
        found: Any = fragile
        with pytest.raises(WorkerError, match=r"rank 1 of 2: Fragile\.quit failed: SystemExit: 3"):
            found.quit()
        assert len(found.process()) == 2


def test_a_worker_that_dies_is_named(pool: RayResourcePool) -> None:
    with RayWorkerGroup(pool, RayClassWithInitArgs(Fragile)) as fragile:
        found: Any = fragile
        with pytest.raises(WorkerError, match="rank 1 of 2 died"):
            found.die()


def test_a_pool_for_which_the_cluster_has_no_room_is_refused(pool: RayResourcePool) -> None:
    with pytest.raises(DispatchError, match="no node with room for 3 processes"):
        RayResourcePool([3], use_gpu=False, wait_s=1).get_placement_groups()
    with pytest.raises(DispatchError, match=r"'GPU': 1\.0"):
        RayResourcePool([1], wait_s=1).get_placement_groups()
