"""The rows of a batch: chosen, ordered, repeated, divided into chunks and joined."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from asyncrl.compat.verl.batches.auto_padding import AUTO_PADDING, DataProtoConfig
from asyncrl.compat.verl.batches.fields import Array, check_rows, require
from asyncrl.compat.verl.batches.merging import merged_meta_info, transposed
from asyncrl.compat.verl.batches.nested import chosen
from asyncrl.compat.verl.batches.tensors import TensorBatch

Rows = TypeVar("Rows", bound="BatchRows")


@dataclass
class DataProtoItem:
    """One row of a DataProto: tensors without the batch dimension, and one element of each array."""

    batch: TensorBatch | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class BatchRows:
    """B rows, and the methods of `DataProto` that choose, order and join them.

    As in verl, a slice shares the batch's memory, and every part of a batch shares its `meta_info`.
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

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        rows = slice(start, end, step)
        return self._with(
            None if self.batch is None else self.batch[rows],
            {name: array[rows] for name, array in self.non_tensor_batch.items()},
        )

    def select_idxs(self, idxs: Sequence[int] | Sequence[bool] | Array | Tensor) -> Self:
        """The rows with these indices, or the rows where a mask is true. Raises IndexError: a row does not exist."""
        rows = idxs.detach().cpu().numpy() if isinstance(idxs, Tensor) else np.asarray(idxs)
        if rows.dtype != np.bool_:
            rows = rows.astype(np.int64)
        return self._rows(rows)

    def _rows(self, rows: Array) -> Self:
        batch = None
        if self.batch is not None:
            index = torch.from_numpy(np.ascontiguousarray(rows))
            batch = TensorBatch(
                {name: chosen(tensor, index) for name, tensor in self.batch.items()},
                int(rows.sum()) if rows.dtype == np.bool_ else len(rows),
                self.batch.device,
            )
        return self._with(batch, {name: array[rows] for name, array in self.non_tensor_batch.items()})

    def _with(self, batch: TensorBatch | None, arrays: dict[str, Array]) -> Self:
        return type(self)(batch, arrays, self.meta_info)

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Self]:
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

    def _mini_batch(self, rows: Sequence[int]) -> Self:
        found = self.select_idxs(rows)
        found.non_tensor_batch = {name: array.astype(object) for name, array in found.non_tensor_batch.items()}
        return found

    def is_padding_enabled(self) -> bool:
        """True if `chunk` may return chunks of different sizes."""
        return bool(self.meta_info.get(AUTO_PADDING, False)) or DataProtoConfig.auto_padding

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Append the last row `padding_size` times, in place; with `padding_candidate="first"`, the first row."""
        if padding_size:
            row = self.select_idxs([0 if padding_candidate == "first" else len(self) - 1])
            padded = self.concat([self, row.repeat(padding_size)])
            self.batch, self.non_tensor_batch = padded.batch, padded.non_tensor_batch

    def chunk(self, chunks: int) -> list[Self]:
        """Equal parts, in order. With padding enabled, their lengths may differ.

        Raises DataProtoError: `chunks` does not divide the batch, or with padding enabled, the rows make fewer parts.
        Raises ZeroDivisionError or ValueError, as verl does: `chunks` is not positive.
        """
        if chunks < 1:
            kind = ValueError if chunks or self.is_padding_enabled() else ZeroDivisionError
            raise kind(f"a batch cannot be divided into {chunks} chunks; give a positive number")
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

    def split(self, split_size: int) -> list[Self]:
        """Parts of `split_size` rows; the last part may have fewer."""
        return [self[start : start + split_size] for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: Sequence[Rows]) -> Rows:
        """The rows of all batches, in order. `metrics` in `meta_info` become lists; other entries must be equal.

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

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Repeat each row `repeat_times` times. Copies of a row are adjacent; `interleave=False` repeats the whole
        batch. Raises RuntimeError or ValueError, as verl does: the number is negative."""
        self._check_times(repeat_times)
        rows = np.arange(len(self))
        return self._rows(np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times))

    def sample_level_repeat(self, repeat_times: Sequence[int] | Array | Tensor) -> Self:
        """Repeat row i `repeat_times[i]` times. The copies of a row are adjacent."""
        require(isinstance(repeat_times, list | tuple | np.ndarray | Tensor), "repeat_times must be a list of numbers")
        times = np.asarray(repeat_times, dtype=np.int64)
        require(times.shape == (len(self),), f"repeat_times has shape {list(times.shape)}; it must be [{len(self)}]")
        self._check_times(int(times.min(initial=0)))
        return self._rows(np.repeat(np.arange(len(self)), times))

    def _check_times(self, times: int) -> None:
        if times < 0:
            # In verl, torch refuses the number if there are tensors, else NumPy does.
            kind = ValueError if self.batch is None else RuntimeError
            raise kind(f"a row cannot be repeated {times} times; give 0 or more")

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> Self:
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
