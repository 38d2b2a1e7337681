"""Silences loggers that warn while heavy libraries are imported. This must happen before the imports."""

from __future__ import annotations

import logging

OTHER_HARDWARE = ("torchao", "torch.utils._pytree")
"""Loggers that warn at every start about torchao's kernels for other hardware. asyncrl uses only torchao's
optimizer."""


def quiet_imports() -> None:
    """Let the import of torch and torchao write no warnings about other hardware."""
    for name in OTHER_HARDWARE:
        logging.getLogger(name).setLevel(logging.ERROR)
