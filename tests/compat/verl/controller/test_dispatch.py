"""Worker groups in this process: what each dispatch mode gives to which worker, and what comes back."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.compat.verl import DataProto
from asyncrl.compat.verl.batches.fields import objects
from asyncrl.compat.verl.controller import (
    ClassWithInitArgs,
    DataProtoFuture,
    Dispatch,
    Execute,
    LocalWorkerGroup,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    ResourcePool,
    Worker,
    register,
)
from asyncrl.errors import ConfigError, DataProtoError, DispatchError, WorkerError
from tests.compat.verl.controller.workers import Reporter, numbers, rows, seen_by


@pytest.fixture
def group() -> Iterator[Callable[..., Any]]:
    """Makes groups of so many reporters, with arguments of their constructor."""
    with ExitStack() as stack:
        yield lambda size, **mesh: stack.enter_context(
            LocalWorkerGroup(ClassWithInitArgs(Reporter, **mesh), ResourcePool([size]))
        )


def test_rank_zero_alone_gets_a_call_to_it(group: Any) -> None:
    assert group(3).rank_zero("a") == (0, "a")


def test_one_to_all_gives_the_same_to_every_worker(group: Any) -> None:
    assert group(2).one_to_all([1, 2], other="b") == [(0, [1, 2], "b"), (1, [1, 2], "b")]


def test_all_to_all_gives_each_worker_its_element_of_lists_as_long_as_the_group(group: Any) -> None:
    assert group(2).all_to_all(["a", "b"]) == [(0, "a"), (1, "b")]
    assert group(2).all_to_all(["a", "b", "c"]) == [(0, ["a", "b", "c"]), (1, ["a", "b", "c"])]


@pytest.mark.parametrize("values", [["a", "b"], ("a", "b")])
def test_dp_compute_gives_each_worker_its_element(group: Any, values: Any) -> None:
    assert group(2).dp_compute(values) == [(0, "a"), (1, "b")]


@pytest.mark.parametrize("values", [["a"], "ab", {"a": 1, "b": 2}])
def test_dp_compute_refuses_what_is_no_list_with_an_element_a_worker(group: Any, values: Any) -> None:
    with pytest.raises(DispatchError, match="element for each of the 2 workers"):
        group(2).dp_compute(values)


def test_dp_compute_proto_divides_a_batch_and_joins_what_comes_back(group: Any) -> None:
    two = group(2)
    assert numbers(two.dp_compute_proto(rows(1, 2, 3, 4))) == [2, 4, 6, 8]
    assert seen_by(two) == [[[1, 2]], [[3, 4]]]


def test_a_batch_that_cannot_be_divided_is_refused_unless_padding_is_enabled(group: Any) -> None:
    with pytest.raises(DataProtoError, match="3 rows do not divide into 2 equal chunks"):
        group(2).dp_compute_proto(rows(1, 2, 3))


def test_uneven_batches_are_padded_and_the_padding_is_taken_off_again(group: Any) -> None:
    four, data = group(4), rows(1, 2, 3, 4, 5, auto_padding=True)
    assert numbers(four.dp_compute_proto(data)) == [2, 4, 6, 8, 10]
    assert seen_by(four) == [[[1, 2]], [[3, 4]], [[5, 5]], [[5, 5]]]
    assert numbers(data) == [1, 2, 3, 4, 5], "the caller's batch was changed"


def test_batches_of_different_lengths_cannot_be_padded_alike(group: Any) -> None:
    two = group(2)
    with pytest.raises(DispatchError, match=r"batches of \[1, 3\] rows"):
        two.execute_with_func_generator(lambda *_: None, *(rows(*range(n), auto_padding=True) for n in (1, 3)))


def test_only_batches_are_divided_and_joined(group: Any) -> None:
    with pytest.raises(DispatchError, match="argument 0 is a list; only a DataProto"):
        group(2).dp_compute_proto([1, 2])
    with pytest.raises(DispatchError, match="some returned int"):
        group(2).no_batch(rows(1, 2))


def test_the_metrics_of_every_worker_come_back_also_of_a_padded_batch(group: Any) -> None:
    found = group(2).dp_compute_metric(rows(1, 2, 3, auto_padding=True))
    assert found == [{"rank": 0, "rows": [1, 2]}, {"rank": 1, "rows": [3, 3]}]


def test_workers_of_one_data_parallel_rank_get_the_same_and_the_last_stage_answers(group: Any) -> None:
    eight = group(8, tp_size=2, pp_size=2)
    # Tensor-parallel pairs, then the data-parallel ranks of a stage: 4 and 6 are the first of their pair in the last.
    assert eight.megatron_compute(["a", "b"]) == [(4, "a"), (6, "b")]
    assert numbers(eight.megatron_compute_proto(rows(1, 2, 3, auto_padding=True))) == [2, 4, 6]
    assert seen_by(eight) == [[[1, 2]], [[1, 2]], [[3, 3]], [[3, 3]]] * 2


def test_ranks_of_a_mesh_count_up_as_those_of_megatron_do(group: Any) -> None:
    infos = group(8, tp_size=2, pp_size=2, cp_size=2).execute_all_sync("get_megatron_rank_info")
    assert [(each.tp_rank, each.cp_rank, each.dp_rank, each.pp_rank) for each in infos] == [
        (0, 0, 0, 0),
        (1, 0, 0, 0),
        (0, 1, 0, 0),
        (1, 1, 0, 0),
        (0, 0, 0, 1),
        (1, 0, 0, 1),
        (0, 1, 0, 1),
        (1, 1, 0, 1),
    ]


MESHES = st.tuples(*[st.integers(1, 3)] * 4, st.integers(1, 9))


@pytest.mark.slow
@given(MESHES)
def test_every_mesh_returns_each_row_once_and_in_order(mesh: tuple[int, int, int, int, int]) -> None:
    tensor, context, data, pipeline, count = mesh
    sizes = {"tp_size": tensor, "cp_size": context, "pp_size": pipeline}
    pool = ResourcePool([tensor * context * data * pipeline])
    with LocalWorkerGroup(ClassWithInitArgs(Reporter, **sizes), pool) as workers:
        found: Any = workers
        batch = rows(*range(count), auto_padding=True)
        assert numbers(found.megatron_compute_proto(batch)) == [2 * row for row in range(count)]
        assert len({str(each) for each in seen_by(found)}) <= data


def test_a_mesh_whose_sizes_do_not_divide_the_workers_is_refused(group: Any) -> None:
    with pytest.raises(DispatchError, match="multiple of 2 workers; there are 3"):
        group(3, tp_size=2)


def test_rows_come_back_in_their_order_from_a_mesh_of_another_order(group: Any) -> None:
    two = group(2)
    assert numbers(two.swapped(rows(1, 2, 3, 4))) == [2, 4, 6, 8]
    assert seen_by(two) == [[[3, 4]], [[1, 2]]]


def test_a_mesh_that_nobody_registered_is_refused(group: Any) -> None:
    with pytest.raises(WorkerError, match="has not registered the mesh 'unknown'; it has megatron, swapped"):
        group(2).on_unknown_mesh(rows(1, 2))


def test_a_call_that_does_not_wait_returns_a_future_that_other_calls_take(group: Any) -> None:
    two, four = group(2), group(4)
    future = two.later(rows(1, 2, 3, 4))
    assert isinstance(future, DataProtoFuture)
    assert numbers(four.dp_compute_proto(future)) == [4, 8, 12, 16]
    assert numbers(future.get()) == [2, 4, 6, 8]
    assert [each.result() for each in two.rank_later()] == [0, 1]


def test_a_future_of_a_padded_batch_has_no_padding_either(group: Any) -> None:
    assert numbers(group(2).later(rows(1, 2, 3, auto_padding=True)).get()) == [2, 4, 6]


def test_coroutines_run_to_their_end(group: Any) -> None:
    assert group(2).waited_for() == [0, 1]


def test_functions_run_on_workers(group: Any) -> None:
    two = group(2)
    found = two.execute_with_func_generator(lambda worker, data: rows(*[worker.rank] * len(data)), rows(5, 6))
    assert numbers(found) == [0, 1]
    assert two.execute_func_rank_zero(lambda value: value + 1, 1) == 2
    with pytest.raises(DispatchError, match="first argument must be a function"):
        two.execute_with_func_generator(rows(1, 2))


def test_an_error_of_a_worker_reaches_the_caller_with_its_rank(group: Any) -> None:
    with pytest.raises(WorkerError, match=r"rank 1 of 2: Reporter\.fail_on failed: ValueError: 13 is unlucky") as error:
        group(2).fail_on(rows(1, 13))
    assert isinstance(error.value.cause, ValueError)
    again = pickle.loads(pickle.dumps(error.value))  # noqa: S301
    assert (str(again), type(again.cause)) == (str(error.value), ValueError)


def test_a_failure_is_told_while_another_worker_still_waits() -> None:
    over = threading.Event()

    class Waiting(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def meet(self) -> None:
            if self.rank == 0:
                over.wait()
            else:
                raise ValueError("I cannot come")

    with LocalWorkerGroup(ClassWithInitArgs(Waiting), ResourcePool([2])) as workers:
        try:
            with pytest.raises(WorkerError, match="rank 1 of 2"):
                workers.meet()  # type: ignore[attr-defined]
        finally:
            over.set()


def test_a_worker_that_adds_a_field_does_not_change_the_batch_of_the_caller(group: Any) -> None:
    data = rows(1, 2)
    assert group(2).add_field(data) == [["x", "y"]] * 2
    assert list(data.batch.keys()) == ["x"]
    assert data.meta_info == {}


@pytest.mark.parametrize("mode", ["DP_COMPUTE_PROTO", None, 3, {"dispatch_fn": print}])
def test_a_wrong_dispatch_mode_is_refused_where_it_is_written(mode: Any) -> None:
    with pytest.raises(DispatchError, match="dispatch"):
        register(dispatch_mode=mode)


def test_a_wrong_execute_mode_is_refused() -> None:
    with pytest.raises(DispatchError, match="execute_mode is 'ALL'"):
        register(execute_mode="ALL")  # type: ignore[arg-type]
    with pytest.raises(DispatchError, match="runs only rank 0"):
        register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, execute_mode=Execute.RANK_ZERO)


class Changing(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def change(self, data: DataProto) -> DataProto:
        data.batch["x"].add_(100)
        data.non_tensor_batch["lists"][0].append(self.rank)
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def extend(self, values: list[Any]) -> list[Any]:
        values.append(self.rank)
        values[0][0] = self.rank
        self.kept = values
        return values

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def show(self) -> list[Any]:
        return self.kept

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def shorten(self, data: DataProto) -> DataProto:
        return data[:1] if self.rank == 1 else data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def shorten_later(self, data: DataProto) -> DataProto:
        return data[:1] if self.rank == 1 else data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def measure(self, data: DataProto) -> DataProto:
        return DataProto(meta_info={"metrics": {"rank": self.rank}})


@pytest.fixture
def changing() -> Iterator[Any]:
    with LocalWorkerGroup(ClassWithInitArgs(Changing), ResourcePool([2])) as group:
        yield group


def test_a_worker_that_changes_its_arguments_changes_them_for_nobody_else(changing: Any) -> None:
    data = DataProto.from_dict({"x": torch.arange(2)}, {"lists": objects([[], []])})
    changed = changing.change(data)
    assert (changed.batch["x"].tolist(), changed.non_tensor_batch["lists"].tolist()) == ([100, 101], [[0], [1]])
    assert (data.batch["x"].tolist(), data.non_tensor_batch["lists"].tolist()) == ([0, 1], [[], []])
    values = [torch.tensor([9]), "text"]
    first, second = changing.extend(values)
    assert (first, second) == ([torch.tensor([0]), "text", 0], [torch.tensor([1]), "text", 1])
    assert values == [torch.tensor([9]), "text"]
    first.append("more")
    assert changing.show() == [torch.tensor([0]), "text", 0]


def test_a_worker_that_returns_fewer_rows_than_it_got_is_named(changing: Any) -> None:
    data = rows(1, 2, 3, 4)
    with pytest.raises(DispatchError, match="rank 1 returned 1 rows for the 2 rows that it got"):
        changing.shorten(data)
    later = changing.shorten_later(data)
    with pytest.raises(DispatchError, match="rank 1 returned 1 rows for the 2 rows that it got"):
        later.get()
    assert changing.measure(data).meta_info == {"metrics": {"rank": [0, 1]}}


class TimedOut(BaseException):
    """Like the timeouts of func_timeout, no Exception."""


@pytest.mark.parametrize("error", [TimedOut("late"), KeyboardInterrupt(), GeneratorExit()])
def test_a_worker_that_raises_what_is_no_exception_is_named(error: BaseException) -> None:
    class Escaping(Worker):
        def __init__(self, at_start: bool) -> None:
            super().__init__()
            if at_start and not isinstance(error, KeyboardInterrupt):
                raise error

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def escape(self) -> None:
            raise error

    with LocalWorkerGroup(ClassWithInitArgs(Escaping, False)) as workers:
        group: Any = workers
        with pytest.raises(WorkerError, match=f"rank 0 of 1: Escaping.escape failed: {type(error).__name__}"):
            group.escape()
    if not isinstance(error, KeyboardInterrupt):
        with pytest.raises(WorkerError, match=f"rank 0 of 1: Escaping failed to start: {type(error).__name__}"):
            LocalWorkerGroup(ClassWithInitArgs(Escaping, True))


def test_a_worker_that_ends_the_program_fails_its_call_only() -> None:
    class Quitting(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def quit(self) -> None:
            if self.rank == 1:
                sys.exit(3)

        @register(dispatch_mode=Dispatch.RANK_ZERO)
        def number(self) -> int:
            return self.rank

    with LocalWorkerGroup(ClassWithInitArgs(Quitting), ResourcePool([2])) as quitting:
        group: Any = quitting
        with pytest.raises(WorkerError, match=r"rank 1 of 2: Quitting\.quit failed: SystemExit: 3"):
            group.quit()
        assert group.number() == 0


def test_a_group_is_closed_once_and_takes_no_calls_after_that() -> None:
    class Closed(Worker):
        closed = 0

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def number(self) -> int:
            return self.rank

        def close(self) -> None:
            Closed.closed += 1

    with LocalWorkerGroup(ClassWithInitArgs(Closed), ResourcePool([2])) as workers:
        group: Any = workers
        group.close()
    assert Closed.closed == 2
    with pytest.raises(DispatchError, match="number: the worker group is closed"):
        group.number()


def test_workers_that_were_made_are_closed_when_another_cannot_be_made() -> None:
    closed: list[int] = []

    class Failing(Worker):
        def __init__(self) -> None:
            super().__init__()
            if self.rank == 1:
                raise ValueError("no memory")

        def close(self) -> None:
            closed.append(self.rank)

    with pytest.raises(ValueError, match="no memory"):
        LocalWorkerGroup(ClassWithInitArgs(Failing), ResourcePool([3]))
    assert closed == [0]


def test_a_registered_method_cannot_hide_one_of_the_group() -> None:
    class Closing(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def execute_all(self) -> None: ...

    with pytest.raises(DispatchError, match="worker groups have a method execute_all"):
        LocalWorkerGroup(ClassWithInitArgs(Closing))


def test_a_worker_needs_a_group_and_a_group_needs_workers() -> None:
    with pytest.raises(DispatchError, match="'RANK' is not in the environment"):
        Worker()
    with pytest.raises(DispatchError, match="no process"):
        LocalWorkerGroup(ClassWithInitArgs(Worker), ResourcePool([]))


def test_a_pool_of_several_nodes_numbers_the_processes_of_each() -> None:
    pool = ResourcePool([2])
    pool.add_node(1)
    assert (pool.world_size, pool.local_rank_list(), pool.local_world_size_list()) == (3, [0, 1, 0], [2, 2, 1])


def test_without_ray_its_worker_groups_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'asyncrl\[ray\]'"):
        RayWorkerGroup(RayResourcePool([1], use_gpu=False), RayClassWithInitArgs(Reporter))


WRITTEN_FOR_VERL = """
from asyncrl.compat.verl import provide_verl

assert provide_verl()

import torch
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup


class Adder(Worker):
    def __init__(self, amount):
        super().__init__()
        self.amount = amount

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add(self, data):
        return DataProto.from_dict({"x": data.batch["x"] + self.amount})


from asyncrl.compat.verl.controller import ClassWithInitArgs, LocalWorkerGroup, ResourcePool

with LocalWorkerGroup(ClassWithInitArgs(Adder, amount=2), ResourcePool([2])) as group:
    assert group.add(DataProto.from_dict({"x": torch.arange(4)})).batch["x"].tolist() == [2, 3, 4, 5]
"""


@pytest.mark.slow
def test_a_worker_that_was_written_for_verl_runs_where_verl_is_not_installed() -> None:
    subprocess.run([sys.executable, "-c", WRITTEN_FOR_VERL], check=True)


def test_a_class_that_is_none_of_workers_is_refused() -> None:
    with pytest.raises(DispatchError, match="dict is not a class of workers: derive it from Worker"):
        LocalWorkerGroup(ClassWithInitArgs(dict))
