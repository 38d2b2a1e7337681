"""verl's DataProto: the named tensors and arrays of one batch, and information about the whole batch.

Names, parameters, results and error classes are verl's (checked with 0.9.1), so that programs written for verl work
unchanged. docs/verl.md lists the differences.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from asyncrl.compat.verl.fields import Array, check_rows, description, memory, require, shared_size
from asyncrl.compat.verl.merging import equal, merged_meta_info, transposed, united
from asyncrl.compat.verl.storage import read_batch, write_batch
from asyncrl.compat.verl.tensors import TensorBatch

logger = logging.getLogger(__name__)

Keys = Iterable[str]
Proto = TypeVar("Proto", bound="DataProto")


AUTO_PADDING = "_verl_auto_padding"
"""The key of `meta_info` that lets `chunk` return chunks of different sizes."""


@dataclass
class DataProtoItem:
    """One row of a DataProto: tensors without the batch dimension, and one element of each array."""

    batch: TensorBatch | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataProto:
    """B rows: `batch` has tensors [B, ...], `non_tensor_batch` arrays [B, ...], and `meta_info` values for all rows.

    `batch` may be given as a mapping of tensors or as a TensorDict. As in verl, parts of a batch share the batch's
    memory and `meta_info`.

    Raises DataProtoError, which is an AssertionError as well: lengths differ, or a field is not an array.
    """

    batch: Any = None
    non_tensor_batch: dict[str, Array] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.batch = TensorBatch.of(self.batch)
        self.check_consistency()

    def check_consistency(self) -> None:
        """Raises DataProtoError: lengths differ, or a field is not an array."""
        check_rows(self.batch, self.non_tensor_batch or {})

    @classmethod
    def from_single_dict(
        cls: type[Proto],
        data: Mapping[str, Tensor | Array],
        meta_info: dict[str, Any] | None = None,
        auto_padding: bool = False,
    ) -> Proto:
        """The batch of named tensors and arrays. Raises ValueError: a value is neither."""
        for name, value in data.items():
            if not isinstance(value, Tensor | np.ndarray):
                raise ValueError(f"{name!r} is a {type(value).__name__}; it must be a tensor or an array")
        tensors = {name: value for name, value in data.items() if isinstance(value, Tensor)}
        arrays = {name: value for name, value in data.items() if isinstance(value, np.ndarray)}
        return cls.from_dict(tensors, arrays, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_dict(
        cls: type[Proto],
        tensors: Mapping[str, Tensor] | TensorBatch | None = None,
        non_tensors: dict[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Proto:
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
    def load_from_disk(cls: type[Proto], filepath: str | Path) -> Proto:
        """The batch that `save_to_disk` wrote.

        Raises DataError: the file is damaged, or not of `save_to_disk`. verl's own files are pickles, which are never
        read.
        """
        return cls(*read_batch(Path(filepath)))

    def save_to_disk(self, filepath: str | Path) -> None:
        """Write one safetensors file, atomically.

        Raises DataProtoError: a value cannot be saved. Raises OSError: the file cannot be written.
        """
        write_batch(Path(filepath), self.batch, self.non_tensor_batch, self.meta_info)

    def __len__(self) -> int:
        if self.batch is not None:
            return len(self.batch)
        return len(next(iter(self.non_tensor_batch.values()))) if self.non_tensor_batch else 0

    def __getitem__(self, item: Any) -> Any:
        """An int gives a `DataProtoItem`. A slice gives a batch, as does a list, array or tensor of ints or bools.

        Raises TypeError: another kind of index. Raises IndexError: a row does not exist.
        """
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, list | np.ndarray | Tensor):
            return self.select_idxs(item)
        if isinstance(item, int | np.integer):
            row = None if self.batch is None else self.batch[item]
            return DataProtoItem(
                row, {name: each[item] for name, each in self.non_tensor_batch.items()}, self.meta_info
            )
        raise TypeError(f"a batch cannot be indexed with a {type(item).__name__}")

    def slice(self: Proto, start: int | None = None, end: int | None = None, step: int | None = None) -> Proto:
        rows = slice(start, end, step)
        return self._with(
            None if self.batch is None else self.batch[rows],
            {name: array[rows] for name, array in self.non_tensor_batch.items()},
        )

    def select_idxs(self: Proto, idxs: Sequence[int] | Sequence[bool] | Array | Tensor) -> Proto:
        """The rows with these indices, or the rows where a mask is true. Raises IndexError: a row does not exist."""
        rows = idxs.detach().cpu().numpy() if isinstance(idxs, Tensor) else np.asarray(idxs)
        if rows.dtype != np.bool_:
            rows = rows.astype(np.int64)
        return self._rows(rows)

    def _rows(self: Proto, rows: Array) -> Proto:
        batch = None
        if self.batch is not None:
            index = torch.from_numpy(rows)
            batch = TensorBatch(
                {name: tensor[index.to(tensor.device)] for name, tensor in self.batch.items()},
                int(rows.sum()) if rows.dtype == np.bool_ else len(rows),
                self.batch.device,
            )
        return self._with(batch, {name: array[rows] for name, array in self.non_tensor_batch.items()})

    def _with(self: Proto, batch: TensorBatch | None, arrays: dict[str, Array]) -> Proto:
        return type(self)(batch, arrays, self.meta_info)

    def to(self: Proto, device: str | int | torch.device) -> Proto:
        """Move the tensors to a device, in place."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    def select(
        self: Proto,
        batch_keys: Keys | None = None,
        non_tensor_batch_keys: Keys | None = None,
        meta_info_keys: Keys | None = None,
        deepcopy: bool = False,
    ) -> Proto:
        """The batch with only the named fields; None keeps all fields of that part.

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

    def rename(self: Proto, old_keys: str | list[str], new_keys: str | list[str]) -> Proto:
        """Rename tensors, in place.

        Raises TypeError: the names are neither text nor a list. Raises ValueError: the lists differ in length. Raises
        KeyError: an old name is missing.
        """
        for keys in (old_keys, new_keys):
            if not isinstance(keys, str | list):
                raise TypeError(f"keys must be a text or a list, not a {type(keys).__name__}")
        olds, news = ([keys] if isinstance(keys, str) else keys for keys in (old_keys, new_keys))
        if len(olds) != len(news):
            raise ValueError(f"{len(olds)} old keys cannot take {len(news)} new ones")
        self._tensors().rename_key_(olds, news)
        return self

    def union(self: Proto, other: DataProto) -> Proto:
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
            require(name not in ours or torch.equal(ours[name], tensor), f"batch[{name!r}] differs in the two batches")
        arrays = united(self.non_tensor_batch, other.non_tensor_batch, "non_tensor_batch", equal)
        DataProto(theirs if self.batch is None and other.batch is not None else self.batch, arrays)
        about = united(self.meta_info, other.meta_info, "meta_info", lambda left, right: bool(left == right))
        if self.batch is None:
            self.batch = other.batch
        else:
            self.batch.update({name: tensor for name, tensor in theirs.items() if name not in ours})
        self.non_tensor_batch.update(arrays)
        self.meta_info.update(about)
        return self

    def make_iterator(
        self: Proto,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Proto]:
        """All mini-batches, `epochs` times. As in verl, their arrays have dtype object.

        `dataloader_kwargs`, such as `shuffle`, are passed to torch's DataLoader. Raises DataProtoError:
        `mini_batch_size` does not divide the batch.
        """
        require(
            len(self) % mini_batch_size == 0, f"{len(self)} rows do not divide into mini-batches of {mini_batch_size}"
        )
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        loader: DataLoader[Any] = DataLoader(
            range(len(self)),  # type: ignore[arg-type]
            batch_size=mini_batch_size,
            collate_fn=self._mini_batch,
            generator=generator,
            **(dataloader_kwargs or {}),
        )
        return (each for _ in range(epochs) for each in loader)

    def _mini_batch(self: Proto, rows: Sequence[int]) -> Proto:
        found = self.select_idxs(rows)
        found.non_tensor_batch = {name: array.astype(object) for name, array in found.non_tensor_batch.items()}
        return found

    def is_padding_enabled(self) -> bool:
        """True if `chunk` may return chunks of different sizes."""
        return bool(self.meta_info.get(AUTO_PADDING, False))

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Append the last row `padding_size` times, in place; with `padding_candidate="first"`, the first row."""
        if padding_size:
            row = self.select_idxs([0 if padding_candidate == "first" else len(self) - 1])
            padded = self.concat([self, row.repeat(padding_size)])
            self.batch, self.non_tensor_batch = padded.batch, padded.non_tensor_batch

    def chunk(self: Proto, chunks: int) -> list[Proto]:
        """Equal parts, in order. With padding enabled, the last part may have fewer rows.

        Raises DataProtoError: `chunks` does not divide the batch.
        """
        require(chunks > 0, f"a batch cannot be divided into {chunks} chunks")
        require(
            self.is_padding_enabled() or len(self) % chunks == 0,
            f"{len(self)} rows do not divide into {chunks} equal chunks; pad them by pad_dataproto_to_divisor or "
            "auto_padding=True",
        )
        if self.batch is not None:
            sizes = [len(each) for each in torch.arange(len(self)).chunk(chunks)]
        else:
            sizes = [len(each) for each in np.array_split(np.arange(len(self)), chunks)]
        require(len(sizes) == chunks, f"{len(self)} rows make {len(sizes)} chunks of equal size, not {chunks}")
        ends = list(accumulate(sizes))
        return [self[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def split(self: Proto, split_size: int) -> list[Proto]:
        """Parts of `split_size` rows; the last part may have fewer."""
        return [self[start : start + split_size] for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: Sequence[Proto]) -> Proto:
        """The rows of all batches, in order. Entries of `meta_info` must be equal; only `metrics` become lists.

        Raises DataProtoError: the names of fields or the values of `meta_info` differ.
        """
        if not data:
            raise IndexError("there are no batches to be joined")
        without = [row for row, each in enumerate(data) if each.batch is None]
        require(
            len(without) in (0, len(data)),
            f"batches to be joined have different tensors: the batches {without} have none",
        )
        batch = None if data[0].batch is None else TensorBatch.cat([each.batch for each in data])
        arrays = transposed([each.non_tensor_batch for each in data], "arrays")
        joined = {name: np.concatenate(each, axis=0) for name, each in arrays.items()}
        return type(data[0])(batch, joined, merged_meta_info([each.meta_info for each in data]))

    def reorder(self, indices: Tensor) -> None:
        """Reorder the rows by `indices`, in place."""
        ordered = self.select_idxs(indices)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def repeat(self: Proto, repeat_times: int = 2, interleave: bool = True) -> Proto:
        """Repeat each row `repeat_times` times. Copies of a row are adjacent; `interleave=False` repeats the whole
        batch."""
        rows = np.arange(len(self))
        return self._rows(np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times))

    def sample_level_repeat(self: Proto, repeat_times: Sequence[int] | Array | Tensor) -> Proto:
        """Repeat row i `repeat_times[i]` times. The copies of a row are adjacent."""
        require(isinstance(repeat_times, list | tuple | np.ndarray | Tensor), "repeat_times must be a list of numbers")
        times = np.asarray(repeat_times, dtype=np.int64)
        require(times.shape == (len(self),), f"repeat_times has shape {list(times.shape)}; it must be [{len(self)}]")
        return self._rows(np.repeat(np.arange(len(self)), times))

    def unfold_column_chunks(self: Proto, n_split: int, split_keys: Sequence[str] | None = None) -> Proto:
        """Divide each row into `n_split` rows.

        A field in `split_keys` of shape [B, n_split * M, ...] becomes [B * n_split, M, ...]. Other fields are repeated.
        """
        names = set(split_keys or ())
        repeated = self.repeat(n_split)

        def unfolded(shape: Sequence[int]) -> tuple[int, ...]:
            return (shape[0] * n_split, shape[1] // n_split, *shape[2:])

        for name in names & set(() if self.batch is None else self.batch.keys()):
            repeated.batch[name] = self.batch[name].reshape(unfolded(self.batch[name].shape))
        for name in names & set(self.non_tensor_batch):
            array = self.non_tensor_batch[name]
            repeated.non_tensor_batch[name] = array.reshape(unfolded(array.shape))
        return repeated

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
