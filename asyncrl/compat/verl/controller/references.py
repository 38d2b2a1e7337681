"""Imports Ray, and fetches the results of workers on Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.errors import ConfigError, WorkerError


def ray_module() -> Any:
    """The module `ray`. Raises ConfigError: Ray cannot be imported."""
    try:
        import ray
        import ray.exceptions
        import ray.util
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError(f"worker groups on Ray need the extra: pip install 'asyncrl[ray]' ({error})") from error
    return ray


def fetched(references: Sequence[Any], what: str) -> list[Any]:
    """The results of references, in order. Error messages name a reference by `what` and its number, such as "rank 0".

    Raises WorkerError at the first failure.
    """
    ray = ray_module()
    pending = list(dict.fromkeys(references))
    while pending:
        ready, pending = ray.wait(pending, num_returns=1)
        for each in ready:
            _fetch(ray, each, f"{what} {references.index(each)} of {len(references)}")
    return list(ray.get(list(references)))


def _fetch(ray: Any, reference: Any, name: str) -> None:
    try:
        ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, WorkerError):
            raise error.cause from error.cause.cause
        raise WorkerError(f"{name} failed: {error}", error) from error
    except ray.exceptions.RayActorError as error:
        raise WorkerError(f"{name} died: {error}", error) from error
    except ray.exceptions.RayError as error:
        # For example, the result was lost with its node, or this process cannot unpickle it.
        raise WorkerError(f"the result of {name} cannot be fetched: {error}", error) from error
