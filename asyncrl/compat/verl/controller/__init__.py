"""verl's single controller: a program calls the methods of W workers as if they were one worker. docs/verl.md explains
it."""

from asyncrl.compat.verl.controller.colocated import create_colocated_worker_cls
from asyncrl.compat.verl.controller.dispatch import make_nd_compute_dataproto_dispatch_fn
from asyncrl.compat.verl.controller.futures import DataProtoFuture
from asyncrl.compat.verl.controller.group import ClassWithInitArgs, ResourcePool, WorkerGroup
from asyncrl.compat.verl.controller.local import LocalWorkerGroup
from asyncrl.compat.verl.controller.modes import Dispatch, Execute, register
from asyncrl.compat.verl.controller.ray_group import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from asyncrl.compat.verl.controller.worker import DistGlobalInfo, DistRankInfo, Worker

__all__ = [
    "ClassWithInitArgs",
    "DataProtoFuture",
    "Dispatch",
    "DistGlobalInfo",
    "DistRankInfo",
    "Execute",
    "LocalWorkerGroup",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePool",
    "Worker",
    "WorkerGroup",
    "create_colocated_worker_cls",
    "make_nd_compute_dataproto_dispatch_fn",
    "register",
]
