"""Ray itself, and the results of its workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.errors import ConfigError, WorkerError


def ray_module() -> Any:
    """Ray itself. Raises ConfigError: it is not installed."""
    try:
        import ray
        import ray.exceptions
        import ray.util
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError(
            "worker groups on Ray need Ray, which is not installed: pip install 'asyncrl[ray]'"
        ) from error
    return ray


def fetched(references: Sequence[Any], what: str) -> list[Any]:
    """The results of references, in order. `what` names their owners in errors, such as worker 0.

    Raises WorkerError as soon as one has failed.
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
        # Such as a result that was lost with its node, or that this process cannot read.
        raise WorkerError(f"the result of {name} did not come: {error}", error) from error
