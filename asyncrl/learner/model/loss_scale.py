"""Loss scaling for float16, whose smallest numbers are larger than many gradients.

The rule is the same as in torch.amp.GradScaler: the loss is multiplied by a scale, and the gradient divided by it again
in float32. A gradient that is not finite has overflowed: its update is left out and the scale halved. After `INTERVAL`
updates without an overflow the scale doubles.

Scales are powers of two, so scaling rounds only numbers that underflow. All ranks have the same scale, since it depends
only on the norm of the whole gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FIRST = 2.0**16
LEAST = 1.0
"""The smallest scale. A gradient that overflows at this scale also overflows without scaling."""
INTERVAL = 2000


@dataclass(slots=True)
class LossScale:
    """The scale of one model's loss. `since` counts the updates since the last overflow or the last doubling."""

    scale: float = FIRST
    since: int = 0

    def follow(self, is_finite: bool) -> bool:
        """Adapt the scale to a gradient. Returns True if the gradient overflowed, and the scale was lowered. Returns
        False if the gradient is finite, or if it is not finite although the scale is already the smallest."""
        if is_finite:
            self.since += 1
            if self.since == INTERVAL:
                self.scale, self.since = 2 * self.scale, 0
            return False
        overflowed = self.scale > LEAST
        self.scale, self.since = max(LEAST, self.scale / 2), 0
        return overflowed

    def state(self) -> list[float]:
        """Return the state for a checkpoint."""
        return [self.scale, float(self.since)]

    def restore(self, state: Sequence[float]) -> None:
        """Continue from the `state` of another LossScale."""
        self.scale, self.since = state[0], int(state[1])
