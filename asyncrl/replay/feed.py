"""The feed: which task comes next. Shuffled epochs by seed; its position is a number that the store keeps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncrl.errors import DataError
from asyncrl.types import Task


class Feed:
    """An endless sequence of rows over `tasks`: position p is row `p % len` of epoch `p // len`.

    The same seed gives the same order, wherever one starts. Raises DataError: there are no tasks.
    """

    def __init__(self, tasks: Sequence[Task], seed: int, shuffle: bool) -> None:
        if not len(tasks):
            raise DataError("the training file has no rows; every run needs at least one task")
        self.tasks = tasks
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._order = np.arange(len(tasks))

    def row(self, position: int) -> int:
        """The row at `position`."""
        epoch, offset = divmod(position, len(self.tasks))
        if self._shuffle and epoch != self._epoch:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(len(self.tasks))
            self._epoch = epoch
        return int(self._order[offset])
