"""Pads batches to a multiple of a number of workers, and computes token positions in padded rows."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.compat.verl.batches.fields import require
from asyncrl.compat.verl.batches.rows import Rows


def pad_dataproto_to_divisor(data: Rows, size_divisor: int) -> tuple[Rows, int]:
    """The batch with its first rows repeated until `size_divisor` divides its length, and the number of added rows.

    An empty batch is not padded.
    """
    require(size_divisor > 0, f"the divisor is {size_divisor}; it must be positive")
    added = -len(data) % size_divisor
    if not added:
        return data, 0
    # Whole batches are repeated, as in verl, so that metrics in `meta_info` get the same lists as in verl.
    missing = [min(len(data), added - start) for start in range(0, added, len(data))]
    return data.concat([data, *(data[:size] for size in missing)]), added


def unpad_dataproto(data: Rows, pad_size: int) -> Rows:
    """The batch without its last `pad_size` rows."""
    rows: Rows = data[:-pad_size] if pad_size else data
    return rows


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """The position of each token in its row, int64[B, T]; mask int64[B, T] is 0 on padding.

    Padding on the left has position 0. Padding on the right repeats the last position.
    """
    return torch.clip(mask.cumsum(dim=-1) - 1, min=0)
