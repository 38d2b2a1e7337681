"""`TensorBatch`: named tensors whose first dimension is the batch.

The class has the part of tensordict's interface that programs for verl use, such as `data.batch["x"]`,
`data.batch.keys()` and `data.batch.batch_size`. The package tensordict is avoided because each of its builds fits only
one version of torch.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor

from asyncrl.compat.verl.batches.nested import check_layout, chosen, joined
from asyncrl.errors import DataProtoError


class HasTensors(Protocol):
    """A mapping of tensors, or a TensorDict."""

    def items(self) -> Iterable[tuple[str, Tensor]]: ...


class TensorBatch:
    """Tensors [B, ...] by name. `batch_size` is [B], or [] for a single row.

    `device` is None until the batch is moved to a device; from then on, new tensors are moved to that device. As with a
    TensorDict, the length is B, and iteration gives rows.

    A tensor may be nested, with rows of different lengths (layout `torch.jagged`).

    Raises DataProtoError: a tensor has another batch size, or is nested but not jagged, or a value is not a tensor.
    """

    def __init__(
        self,
        source: HasTensors | None = None,
        batch_size: int | Sequence[int] | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        self._tensors: dict[str, Tensor] = {}
        self.device = None if device is None else torch.device(device)
        given = {} if source is None else dict(source.items())
        if batch_size is None:
            first = next(iter(given.values()), None)
            batch_size = () if first is None else first.shape[:1]
        self.batch_size = torch.Size([batch_size] if isinstance(batch_size, int) else batch_size)
        for name, tensor in given.items():
            self[name] = tensor

    @classmethod
    def of(cls, given: TensorBatch | HasTensors | None) -> TensorBatch | None:
        """`given` as a TensorBatch. A TensorDict also gives its batch size and its device. None gives None."""
        if given is None or isinstance(given, TensorBatch):
            return given
        return cls(given, getattr(given, "batch_size", None), getattr(given, "device", None))

    def __setitem__(self, name: str, value: Tensor | np.ndarray[Any, Any]) -> None:
        if not isinstance(name, str):
            raise DataProtoError(f"the name of a tensor must be text, not {name!r:.100}")
        tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) and value.dtype != object else value
        if not isinstance(tensor, Tensor):
            raise DataProtoError(f"{name!r} is a {type(value).__name__}; only tensors go into a batch")
        check_layout(name, tensor)
        dimensions = len(self.batch_size)
        if tensor.shape[:dimensions] != self.batch_size:
            raise DataProtoError(
                f"{name!r} has shape {list(tensor.shape)}, which does not begin with the batch size "
                f"{list(self.batch_size)}"
            )
        self._tensors[name] = tensor if self.device is None else tensor.to(self.device)

    def __getitem__(self, key: Any) -> Any:
        """A name gives a tensor, an int gives a row. A slice, list, array or mask gives a batch of rows.

        Raises KeyError: the tensor does not exist. Raises IndexError: the row does not exist.
        """
        if isinstance(key, str):
            try:
                return self._tensors[key]
            except KeyError:
                raise KeyError(f"no tensor is named {key!r}; the batch has {', '.join(self._tensors)}") from None
        if isinstance(key, int | np.integer):
            if not -len(self) <= key < len(self):
                raise IndexError(f"row {key} of a batch of {len(self)}")
            return self._map(lambda tensor: tensor[int(key)], ())
        # torch refuses an index on a GPU for a tensor on the CPU, but takes an index on the CPU for every tensor.
        key = key.cpu() if isinstance(key, Tensor) else key
        rows = torch.empty(self.batch_size)[key].shape[:1]
        return self._map(lambda tensor: chosen(tensor, key), rows)

    def __delitem__(self, name: str) -> None:
        self.pop(name)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __len__(self) -> int:
        return self.batch_size[0] if self.batch_size else 0

    def __iter__(self) -> Iterator[TensorBatch]:
        return (self[row] for row in range(len(self)))

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {list(tensor.shape)} {tensor.dtype}" for name, tensor in self.items())
        return f"TensorBatch({shapes}; batch_size={list(self.batch_size)}, device={self.device})"

    def keys(self) -> KeysView[str]:
        return self._tensors.keys()

    def values(self) -> ValuesView[Tensor]:
        return self._tensors.values()

    def items(self) -> ItemsView[str, Tensor]:
        return self._tensors.items()

    def get(self, name: str, default: Tensor | None = None) -> Tensor | None:
        return self._tensors.get(name, default)

    def set(self, name: str, value: Tensor) -> TensorBatch:
        self[name] = value
        return self

    def update(self, other: HasTensors) -> TensorBatch:
        for name, tensor in other.items():
            self[name] = tensor
        return self

    def pop(self, name: str) -> Tensor:
        """Remove a tensor, and return it. Raises KeyError: the tensor does not exist."""
        found: Tensor = self[name]
        del self._tensors[name]
        return found

    def select(self, *names: str) -> TensorBatch:
        """The batch with only these tensors, which are not copied. Raises KeyError: a tensor does not exist."""
        return TensorBatch({name: self[name] for name in names}, self.batch_size, self.device)

    def exclude(self, *names: str) -> TensorBatch:
        """The batch without these tensors. A missing name is ignored."""
        return self.select(*(name for name in self._tensors if name not in names))

    def rename_key_(self, old: str | Sequence[str], new: str | Sequence[str]) -> TensorBatch:
        """Rename tensors in place, all at once. A tensor that already has one of the new names is replaced. Raises
        KeyError, and renames nothing: an old name is missing."""
        olds, news = ([each] if isinstance(each, str) else list(each) for each in (old, new))
        if missing := [each for each in olds if each not in self._tensors]:
            raise KeyError(missing[0])
        renamed = [(after, self.pop(before)) for before, after in zip(olds, news, strict=True)]
        for after, tensor in renamed:
            self[after] = tensor
        return self

    def to(self, device: str | int | torch.device) -> TensorBatch:
        """The batch with its tensors on `device`. Tensors that are there already are not copied."""
        return TensorBatch(self, self.batch_size, torch.device(device))

    def cpu(self) -> TensorBatch:
        return self.to("cpu")

    def contiguous(self) -> TensorBatch:
        return self._map(Tensor.contiguous, self.batch_size)

    def clone(self) -> TensorBatch:
        return self._map(Tensor.clone, self.batch_size)

    def to_dict(self) -> dict[str, Tensor]:
        return dict(self._tensors)

    def split(self, size: int) -> list[TensorBatch]:
        """Batches of `size` rows, which share the memory of this batch. The last one may have fewer rows."""
        return [self[start : start + size] for start in range(0, len(self), size)]

    @classmethod
    def cat(cls, batches: Sequence[TensorBatch]) -> TensorBatch:
        """The rows of all batches, in order. Raises DataProtoError: the names of tensors differ."""
        first = batches[0]
        for other in batches[1:]:
            if other.keys() != first.keys():
                raise DataProtoError(
                    f"batches to be joined have different tensors: {', '.join(first.keys())} and "
                    f"{', '.join(other.keys())}"
                )
        tensors = {name: joined([each[name] for each in batches], name) for name in first.keys()}  # noqa: SIM118
        return cls(tensors, sum(len(each) for each in batches), first.device)

    @classmethod
    def stack(cls, rows: Sequence[TensorBatch]) -> TensorBatch:
        """A batch of single rows, which have batch size []."""
        tensors = {name: torch.stack([each[name] for each in rows]) for name in rows[0].keys()}  # noqa: SIM118
        return cls(tensors, len(rows), rows[0].device)

    def _map(self, change: Callable[[Tensor], Tensor], batch_size: Sequence[int]) -> TensorBatch:
        return TensorBatch({name: change(tensor) for name, tensor in self.items()}, batch_size, self.device)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Implement `torch.cat` and `torch.stack` along the batch dimension."""
        operations = {torch.cat: cls.cat, torch.stack: cls.stack}
        given, dimension = args[0], (*args[1:2], *(kwargs or {}).values())
        if function not in operations or not _all_batches(given) or dimension not in ((), (0,)):
            return NotImplemented
        return operations[function](given)


def _all_batches(given: Any) -> TypeGuard[Sequence[TensorBatch]]:
    return isinstance(given, list | tuple) and all(isinstance(each, TensorBatch) for each in given)
