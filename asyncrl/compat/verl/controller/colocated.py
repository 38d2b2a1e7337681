"""Workers of several roles in one process, such as an actor and a critic that share a GPU.

`create_colocated_worker_cls` makes one class from the classes of all roles. The method `spawn` of this class's worker
group returns a group for each role.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, ClassVar

from asyncrl.compat.verl.controller.group import ClassWithInitArgs, role_method
from asyncrl.compat.verl.controller.modes import ATTRIBUTE, Registration, registered
from asyncrl.compat.verl.controller.ray_group import RayClassWithInitArgs
from asyncrl.compat.verl.controller.worker import Worker
from asyncrl.errors import DispatchError


class ColocatedWorker(Worker):
    """Holds a worker of each role of `roles`, made in that order. Passes on errors of their constructors."""

    roles: ClassVar[Mapping[str, ClassWithInitArgs]]

    def __init__(self) -> None:
        super().__init__()
        self.worker_dict: dict[str, Any] = {}
        with ExitStack() as unless_all_are_made:
            unless_all_are_made.callback(self.close)
            for role, class_with_args in self.roles.items():
                self.worker_dict[role] = class_with_args()
            unless_all_are_made.pop_all()

    def close(self) -> None:
        """Close the workers of all roles, the last one first."""
        with ExitStack() as stack:
            for worker in self.worker_dict.values():
                stack.callback(worker.close)


def create_colocated_worker_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> RayClassWithInitArgs:
    """The class of workers that hold a worker of each role, for `RayWorkerGroup` or `LocalWorkerGroup`.

    `class_dict` maps the name of each role to its class with arguments. The method `m` of the role `r` is `r_m`.

    Raises DispatchError: there is no role, a class is not derived from Worker, or two methods get the same name.
    """
    if not class_dict:
        raise DispatchError("there is no role: give a class for each role")
    methods: dict[str, Any] = {}
    for role, class_with_args in class_dict.items():
        if not issubclass(class_with_args.cls, Worker):
            raise DispatchError(f"{role}: {class_with_args.cls.__name__} must derive from Worker")
        for name, registration in registered(class_with_args.cls).items():
            if role_method(role, name) in methods:
                raise DispatchError(f"{role_method(role, name)} would be a method of two roles: rename the role {role}")
            methods[role_method(role, name)] = _forwarding(role, name, registration)
    return RayClassWithInitArgs(type("WorkerDict", (ColocatedWorker,), {"roles": dict(class_dict), **methods}))


def _forwarding(role: str, name: str, registration: Registration) -> Callable[..., Any]:
    def forward(worker: ColocatedWorker, *args: Any, **kwargs: Any) -> Any:
        return getattr(worker.worker_dict[role], name)(*args, **kwargs)

    setattr(forward, ATTRIBUTE, registration)
    return forward
