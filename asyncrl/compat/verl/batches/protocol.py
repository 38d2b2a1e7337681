"""verl's DataProto: the named tensors and arrays of one batch, and information about the whole batch.

Names, parameters, results and error classes are verl's (checked with 0.9.1), so that programs written for verl work
unchanged. docs/verl.md lists the differences.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from asyncrl.compat.verl.batches.auto_padding import AUTO_PADDING
from asyncrl.compat.verl.batches.fields import Array, description, memory, require, shared_size
from asyncrl.compat.verl.batches.merging import equal, united
from asyncrl.compat.verl.batches.nested import same
from asyncrl.compat.verl.batches.rows import BatchRows
from asyncrl.compat.verl.batches.storage import read_batch, write_batch
from asyncrl.compat.verl.batches.tensordicts import from_tensordict, to_tensordict
from asyncrl.compat.verl.batches.tensors import TensorBatch

logger = logging.getLogger(__name__)

Keys = Iterable[str]


class DataProto(BatchRows):
    """B rows: `batch` has tensors [B, ...], `non_tensor_batch` arrays [B, ...], and `meta_info` values for all rows.

    `batch` may be given as a mapping of tensors or as a TensorDict. The methods here make batches, and choose, rename
    and unite their fields. `BatchRows` has the methods over rows.

    Raises DataProtoError, which is an AssertionError as well: lengths differ, or a field is not an array.
    """

    @classmethod
    def from_single_dict(
        cls,
        data: Mapping[str, Tensor | Array],
        meta_info: dict[str, Any] | None = None,
        auto_padding: bool = False,
    ) -> Self:
        """The batch of named tensors and arrays. Raises ValueError: a value is neither."""
        for name, value in data.items():
            if not isinstance(value, Tensor | np.ndarray):
                raise ValueError(f"{name!r} is a {type(value).__name__}; it must be a tensor or an array")
        tensors = {name: value for name, value in data.items() if isinstance(value, Tensor)}
        arrays = {name: value for name, value in data.items() if isinstance(value, np.ndarray)}
        return cls.from_dict(tensors, arrays, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | TensorBatch | None = None,
        non_tensors: dict[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """The batch of these tensors and arrays; a list becomes an array of objects.

        Raises DataProtoError: lengths differ.
        """
        require(num_batch_dims > 0, f"num_batch_dims is {num_batch_dims}; it must be positive")
        require(num_batch_dims == 1 or non_tensors is None, "num_batch_dims must be 1 if there are non_tensors")
        # Not `tensors or ()`: a TensorBatch without rows is false, but has tensors.
        given = dict(() if tensors is None else tensors.items())
        batch = TensorBatch(given, shared_size(given, num_batch_dims)) if given else None
        arrays = {} if non_tensors is None else non_tensors
        require(isinstance(arrays, dict), f"non_tensors is a {type(arrays).__name__}; it must be a dict")
        arrays = {
            name: value if isinstance(value, np.ndarray) else np.array(value, dtype=object)
            for name, value in arrays.items()
        }
        about = {} if meta_info is None else meta_info
        if auto_padding:
            about[AUTO_PADDING] = True
        return cls(batch, arrays, about)

    @classmethod
    def from_tensordict(
        cls, tensor_dict: Any = None, meta_info: dict[str, Any] | None = None, num_batch_dims: int = 1
    ) -> Self:
        """The batch of a TensorDict: stacks of values become arrays of objects, and other values go to `meta_info`.

        Raises DataProtoError: lengths differ. Raises ConfigError: tensordict is not installed.
        """
        require(num_batch_dims > 0, f"num_batch_dims is {num_batch_dims}; it must be positive")
        tensors, arrays, about = from_tensordict(tensor_dict)
        require(num_batch_dims == 1 or not (arrays or about), "num_batch_dims must be 1 if values are not tensors")
        batch = TensorBatch(tensors, shared_size(tensors, num_batch_dims)) if tensors else None
        return cls(batch, arrays, {**(meta_info or {}), **about})

    def to_tensordict(self) -> Any:
        """The batch as a TensorDict, which also has the arrays and `meta_info`.

        Raises DataProtoError: two parts have a field of the same name. Raises ConfigError: tensordict is not installed.
        """
        return to_tensordict(self.batch, self.non_tensor_batch, self.meta_info, len(self))

    @classmethod
    def load_from_disk(cls, filepath: str | Path) -> Self:
        """The batch that `save_to_disk` wrote.

        Raises DataError: the file is damaged, or `save_to_disk` did not write it. verl's own files are pickles, which
        are never read.
        """
        return cls(*read_batch(Path(filepath)))

    def save_to_disk(self, filepath: str | Path) -> None:
        """Write one safetensors file, atomically.

        Raises DataProtoError: a value cannot be saved. Raises OSError: the file cannot be written.
        """
        write_batch(Path(filepath), self.batch, self.non_tensor_batch, self.meta_info)

    def to(self, device: str | int | torch.device) -> Self:
        """Move the tensors to a device, in place."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    def select(
        self,
        batch_keys: Keys | None = None,
        non_tensor_batch_keys: Keys | None = None,
        meta_info_keys: Keys | None = None,
        deepcopy: bool = False,
    ) -> Self:
        """The batch with only the named fields. A part, such as `meta_info`, keeps all fields if its names are None.

        As in verl, `deepcopy` does not copy tensors. Raises KeyError: a tensor is missing. Other missing names are
        ignored.
        """

        def named(part: dict[str, Any], keys: Keys | None) -> dict[str, Any]:
            chosen = part if keys is None else {name: part[name] for name in part if name in set(keys)}
            return copy.deepcopy(chosen) if deepcopy else chosen

        batch = self.batch if batch_keys is None else self._tensors().select(*batch_keys)
        arrays = named(self.non_tensor_batch, None if non_tensor_batch_keys is None else list(non_tensor_batch_keys))
        about = named(self.meta_info, None if meta_info_keys is None else list(meta_info_keys))
        return type(self)(batch, arrays, about)

    def pop(
        self,
        batch_keys: Keys | None = None,
        non_tensor_batch_keys: Keys | None = None,
        meta_info_keys: Keys | None = None,
    ) -> DataProto:
        """Remove the named fields, and return them as a batch.

        Raises DataProtoError, and removes nothing: a name is missing, or is given twice.
        """
        tensors: Any = {} if self.batch is None else self.batch
        chosen = [
            (tensors, list(batch_keys or ()), "batch"),
            (self.non_tensor_batch, list(non_tensor_batch_keys or ()), "non_tensor_batch"),
            (self.meta_info, list(meta_info_keys or ()), "meta_info"),
        ]
        for fields, keys, part in chosen:
            missing = [name for name in keys if name not in fields]
            require(not missing, f"{part} has no {missing}; it has {', '.join(map(str, fields.keys()))}")
            require(len(set(keys)) == len(keys), f"{part}: a name is given twice in {keys}")
        popped = [{name: fields.pop(name) for name in keys} for fields, keys, _ in chosen]
        return DataProto.from_dict(popped[0], popped[1], popped[2])

    def rename(self, old_keys: str | list[str], new_keys: str | list[str]) -> Self:
        """Rename tensors, in place.

        Raises TypeError: the names are neither text nor a list. Raises ValueError: the lists differ in length. Raises
        KeyError: an old name is missing.
        """
        for keys in (old_keys, new_keys):
            if not isinstance(keys, str | list):
                raise TypeError(f"keys must be a text or a list, not a {type(keys).__name__}")
        olds, news = ([keys] if isinstance(keys, str) else keys for keys in (old_keys, new_keys))
        if len(olds) != len(news):
            raise ValueError(f"each old name needs one new name: there are {len(olds)} old and {len(news)} new names")
        self._tensors().rename_key_(olds, news)
        return self

    def union(self, other: DataProto) -> Self:
        """Add the fields of `other`, in place. A field that is in both batches must be equal.

        Raises DataProtoError, and adds nothing: lengths or values differ.
        """
        require(
            self.batch is None or other.batch is None or self.batch.batch_size == other.batch.batch_size,
            f"batches of {len(self)} and {len(other)} rows cannot be united",
        )
        empty = TensorBatch(batch_size=len(self))
        ours, theirs = (empty if each.batch is None else each.batch for each in (self, other))
        for name, tensor in theirs.items():
            require(name not in ours or same(ours[name], tensor), f"batch[{name!r}] differs in the two batches")
        arrays = united(self.non_tensor_batch, other.non_tensor_batch, "non_tensor_batch", equal)
        DataProto(theirs if self.batch is None and other.batch is not None else self.batch, arrays)
        about = united(self.meta_info, other.meta_info, "meta_info", partial(equal, types=False))
        if self.batch is None:
            self.batch = other.batch
        else:
            self.batch.update({name: tensor for name, tensor in theirs.items() if name not in ours})
        self.non_tensor_batch.update(arrays)
        self.meta_info.update(about)
        return self

    def get_data_info(self) -> str:
        """The names, shapes and types of all fields, with a line for each field."""
        return description({} if self.batch is None else self.batch, self.non_tensor_batch, self.meta_info)

    def print_size(self, prefix: str = "") -> None:
        """Log the memory that the fields take."""
        sizes = memory({} if self.batch is None else self.batch, self.non_tensor_batch)
        logger.info("%s%s", f"{prefix}: " if prefix else "", sizes)

    def _tensors(self) -> TensorBatch:
        require(self.batch is not None, "the batch has no tensors")
        batch: TensorBatch = self.batch
        return batch
