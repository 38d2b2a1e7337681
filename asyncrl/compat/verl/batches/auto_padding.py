"""verl's automatic padding, a setting of one batch, or of all batches of the process.

Worker groups pad such a batch, so that they can divide it equally. `chunk` may divide it into parts of different sizes.
"""

from __future__ import annotations

import os
from typing import ClassVar

AUTO_PADDING = "_verl_auto_padding"
"""The key of `meta_info` that lets `chunk` return chunks of different sizes."""
VARIABLE = "VERL_AUTO_PADDING"
"""verl's environment variable. `true` or `1` enables the padding of all batches."""


class _OfProcess(type):
    _enabled: ClassVar[bool] = False

    @property
    def auto_padding(cls) -> bool:
        """True if all batches of this process are padded. Raises AssertionError on assignment: the value is not a
        bool."""
        return cls._enabled or os.environ.get(VARIABLE, "").lower() in ("true", "1")

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        assert isinstance(enabled, bool), f"auto_padding is {enabled!r}; it must be True or False"
        type.__setattr__(cls, "_enabled", enabled)


class DataProtoConfig(metaclass=_OfProcess):
    """verl's settings of all batches in this process: `DataProtoConfig.auto_padding = True` pads them."""

    auto_padding_key = AUTO_PADDING
