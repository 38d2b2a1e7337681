"""Converts batches to TensorDicts and back. Only these functions need the package tensordict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from asyncrl.compat.verl.batches.fields import Array, require
from asyncrl.compat.verl.batches.tensors import TensorBatch
from asyncrl.errors import ConfigError

NEEDED = "tensordict>=0.10"
"""The releases that verl's own `to_tensordict` takes."""


def _package() -> Any:
    """The module `tensordict`. Raises ConfigError: it is not installed."""
    try:
        import tensordict
    except ImportError as error:
        raise ConfigError(
            f"a TensorDict needs the package tensordict, which is not installed: pip install '{NEEDED}', as verl does; "
            "no extra of asyncrl has it"
        ) from error
    return tensordict


def to_tensordict(batch: TensorBatch | None, arrays: Mapping[str, Array], about: Mapping[str, Any], rows: int) -> Any:
    """A TensorDict with the parts of a batch of `rows` rows. An array becomes a NonTensorStack of its elements, and a
    value of `about` becomes a NonTensorData.

    Raises DataProtoError: two parts have a field of the same name. Raises ConfigError: tensordict is not installed.
    """
    package = _package()
    data, stack = package.NonTensorData, package.NonTensorStack
    fields: dict[str, Any] = {} if batch is None else batch.to_dict()
    for part in (arrays, about):
        taken = sorted(map(str, fields.keys() & part.keys()))
        require(not taken, f"a TensorDict has one field of each name, but two parts of the batch have {taken}")
        fields |= {
            name: stack.from_list([data(each) for each in value]) if part is arrays else data(value)
            for name, value in part.items()
        }
    return package.TensorDict(source=fields, batch_size=[rows] if batch is not None or arrays else [])


def from_tensordict(given: Any) -> tuple[dict[str, Tensor], dict[str, Array], dict[str, Any]]:
    """The tensors, arrays and `meta_info` of a TensorDict. Fields of other types are left out, as in verl.

    Raises ConfigError: tensordict is not installed.
    """
    package = _package()
    tensors: dict[str, Tensor] = {}
    arrays: dict[str, Array] = {}
    about: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, Tensor):
            tensors[name] = value
        elif isinstance(value, package.NonTensorStack):
            arrays[name] = np.array([each.data for each in value], dtype=object)
        elif isinstance(value, package.NonTensorData):
            about[name] = value.data
    return tensors, arrays, about
