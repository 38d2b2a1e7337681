"""Reads frozen tensors from the weight files with which the run began, so that they need not travel.

A tensor of a file is first converted to its dtype in the version's manifest. The tensor is used only if its bytes then
have the checksum in the manifest. So files with other weights do no harm: they only cost the time to read them.
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
    """The tensors in safetensors `files`, by their names. Files that cannot be read are logged and skipped."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files

    def copy(self, wanted: dict[TensorSpec, torch.Tensor]) -> set[str]:
        """Copy tensors of the files into the `wanted` tensors, which are on the CPU. Returns the names of the tensors
        whose bytes now match their checksums. All other tensors may have any content.
        """
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
    # The tensor is copied, because the file may change while the weights are served.
    target.copy_(file.get_tensor(spec.name))
    return checksum(bytes_of(target)) == spec.checksum
