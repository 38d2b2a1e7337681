"""Workers of several roles in one process, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from asyncrl.compat.verl.controller import (
    ClassWithInitArgs,
    Dispatch,
    DistGlobalInfo,
    DistRankInfo,
    LocalWorkerGroup,
    RayClassWithInitArgs,
    ResourcePool,
    Worker,
    WorkerGroup,
    create_colocated_worker_cls,
    register,
)
from asyncrl.errors import DispatchError, WorkerError
from tests.compat.verl.controller.workers import Reporter, numbers, rows, seen_by

closed: list[str] = []


class Closing(Worker):
    """Notes in `closed` that it was closed."""

    def __init__(self, name: str, fails: bool = False) -> None:
        super().__init__()
        self.name = name
        if fails:
            raise ValueError("no memory is left")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def tell(self) -> str:
        return self.name

    def close(self) -> None:
        closed.append(self.name)


@pytest.fixture
def whole() -> Iterator[WorkerGroup]:
    """Two processes, each with an actor that is data parallel, and a critic whose two ranks divide a model."""
    roles = {"actor": RayClassWithInitArgs(Reporter), "critic": RayClassWithInitArgs(Reporter, tp_size=2)}
    with LocalWorkerGroup(create_colocated_worker_cls(roles), ResourcePool([2])) as group:
        yield group


def test_each_role_has_a_group_with_the_methods_of_its_class(whole: Any) -> None:
    groups = whole.spawn({"actor", "critic"})
    assert sorted(groups) == ["actor", "critic"]
    actor, critic = groups["actor"], groups["critic"]
    assert actor.one_to_all("a") == [(0, "a", None), (1, "a", None)]
    assert numbers(actor.dp_compute_proto(rows(1, 2, 3, 4))) == [2, 4, 6, 8]
    assert (seen_by(actor), seen_by(critic)) == ([[[1, 2]], [[3, 4]]], [[], []])
    assert actor.rank_zero("a") == (0, "a")
    assert actor.waited_for() == [0, 1]
    assert [each.result() for each in actor.rank_later()] == [0, 1]


def test_each_role_has_its_own_mesh(whole: Any) -> None:
    groups = whole.spawn(["actor", "critic"])
    assert groups["actor"].megatron_compute(["a", "b"]) == [(0, "a"), (1, "b")]
    assert groups["critic"].megatron_compute(["a"]) == [(0, "a")]


def test_methods_of_a_role_have_its_name_in_front_in_the_whole_group(whole: Any) -> None:
    assert whole.actor_rank_zero("a") == (0, "a")
    with pytest.raises(WorkerError, match=r"rank 1 of 2: WorkerDict\.critic_fail_on failed: ValueError: 13 is unlucky"):
        whole.spawn(["critic"])["critic"].fail_on(rows(1, 13))


def test_roles_that_do_not_exist_are_refused(whole: Any) -> None:
    with pytest.raises(DispatchError, match="WorkerDict has no role ref; its roles are actor, critic"):
        whole.spawn(["actor", "ref"])
    with (
        LocalWorkerGroup(ClassWithInitArgs(Reporter)) as group,
        pytest.raises(DispatchError, match="its roles are none: make the class by create_colocated_worker_cls"),
    ):
        group.spawn(["actor"])


def test_the_whole_group_closes_the_workers_of_all_roles_and_a_role_none() -> None:
    closed.clear()
    roles = {"a": ClassWithInitArgs(Closing, "first"), "b": ClassWithInitArgs(Closing, "second")}
    with LocalWorkerGroup(create_colocated_worker_cls(roles)) as group:
        spawned: Any = group.spawn(["a", "b"])
        spawned["a"].close()
        assert closed == []
        assert spawned["b"].tell() == ["second"]
    assert closed == ["second", "first"]
    with pytest.raises(DispatchError, match="tell: the group of the colocated workers is closed"):
        spawned["b"].tell()


def test_if_a_role_fails_to_start_the_earlier_ones_are_closed() -> None:
    closed.clear()
    roles = {"a": ClassWithInitArgs(Closing, "first"), "b": ClassWithInitArgs(Closing, "second", fails=True)}
    with pytest.raises(ValueError, match="no memory is left"):
        LocalWorkerGroup(create_colocated_worker_cls(roles))
    assert closed == ["first"]


def test_roles_that_cannot_be_colocated_are_refused() -> None:
    with pytest.raises(DispatchError, match="there is no role"):
        create_colocated_worker_cls({})
    with pytest.raises(DispatchError, match="actor: dict must derive from Worker"):
        create_colocated_worker_cls({"actor": ClassWithInitArgs(dict)})

    class Named(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def late_tell(self) -> None: ...

    with pytest.raises(DispatchError, match="a_late_tell would be a method of two roles: rename the role a_late"):
        create_colocated_worker_cls({"a": ClassWithInitArgs(Named), "a_late": ClassWithInitArgs(Closing, "x")})


def test_a_worker_tells_its_place_in_its_mesh() -> None:
    class Placed(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def place(self) -> Any:
            self.init_mesh(tp_size=2)
            inner = self.get_dispatch_collect()
            self.set_dispatch_collect("actor", **inner)
            return self.rank_info, self.global_info, self.query_collect_info("actor")

    with LocalWorkerGroup(ClassWithInitArgs(Placed), ResourcePool([4])) as group:
        found: Any = group
        places = found.place()
    assert places[3] == (DistRankInfo(1, 1, 0, 0), DistGlobalInfo(2, 2, 1, 1), False)
    assert [collects for *_, collects in places] == [True, False, True, False]
