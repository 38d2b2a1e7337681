"""The results of Ray's workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from asyncrl.errors import WorkerError


def fetched(references: Sequence[Any]) -> list[Any]:
    """The results of references, in order. Raises WorkerError as soon as one has failed."""
    pending = list(dict.fromkeys(references))
    while pending:
        ready, pending = ray.wait(pending, num_returns=1)
        _fetch(ready)
    return _fetch(references)


def _fetch(references: Sequence[Any]) -> list[Any]:
    try:
        return list(ray.get(list(references)))
    except RayTaskError as error:
        if isinstance(error.cause, WorkerError):
            raise error.cause from error.cause.cause
        raise WorkerError(f"a worker failed: {error}", error) from error
    except RayActorError as error:
        raise WorkerError(f"a worker died: {error}", error) from error
