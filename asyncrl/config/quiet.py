"""Silences what heavy libraries write by themselves: warnings of their imports, and progress bars. Call `quiet_imports`
before the imports."""

from __future__ import annotations

import logging
import os

OTHER_HARDWARE = ("torchao", "torch.utils._pytree")
"""Loggers that warn at every start about torchao's kernels for other hardware. asyncrl uses only torchao's
optimizer."""
NO_BARS = "HF_HUB_DISABLE_PROGRESS_BARS"
"""The environment variable that turns off the progress bars of transformers and of the hub's client. In a log each bar
is a long line, and on a terminal it disturbs the progress bar of the run."""


def quiet_imports() -> None:
    """Let torch, torchao and transformers write no warnings about other hardware and no progress bars. A user who sets
    the variable `NO_BARS` to 0 sees the bars."""
    for name in OTHER_HARDWARE:
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault(NO_BARS, "1")
