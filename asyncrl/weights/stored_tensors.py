"""Tensors of a version that this host has in weight files already: frozen ones, in the files that the run began with.

A receiver knows what it has by its contents: the manifest of a version has the checksum of each tensor, and what a
file gives is taken only if it has this checksum in the manifest's dtype. So a folder with other weights costs the time
to read them, and never harms.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from asyncrl.weights.manifest import TensorSpec, bytes_of, checksum

logger = logging.getLogger(__name__)


class StoredTensors:
    """The tensors in safetensors `files`, by their names. Files that cannot be read are logged, and have none."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files

    def copy(self, wanted: dict[TensorSpec, torch.Tensor]) -> set[str]:
        """Copy into tensors on the CPU what the files have of them; the names of those that now have the bytes that
        their checksum stands for. The others may have any content."""
        found: set[str] = set()
        try:
            with ExitStack() as stack:
                opened = [stack.enter_context(safe_open(file, "pt")) for file in self._files]
                owners: dict[str, Any] = {name: file for file in opened for name in file.keys()}  # noqa: SIM118
                for spec, target in wanted.items():
                    if spec.name in owners and _copied(owners[spec.name], spec, target):
                        found.add(spec.name)
        except (OSError, SafetensorError) as error:
            logger.warning("all tensors travel, since the weight files of model.path cannot be read: %s", error)
        return found


def _copied(file: Any, spec: TensorSpec, target: torch.Tensor) -> bool:
    if tuple(file.get_slice(spec.name).get_shape()) != spec.shape:
        return False
    # A copy: what the file system may change must not be served.
    target.copy_(file.get_tensor(spec.name))
    return checksum(bytes_of(target)) == spec.checksum
