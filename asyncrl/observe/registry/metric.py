"""The description of a metric, which is known before any run writes it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

Kind = Literal["gauge", "counter", "text"]
"""A gauge goes up and down. A counter only grows, from 0 at the start of its process or of the run. Text is for
people."""

_VARIABLE = re.compile(r"[A-Z]+")


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric, or a family of metrics.

    - `writer`: the files that have the metric: `learner`, `evaluation`, `actor`, `scoring`, `replay`, or `any`;
    - `name`: its name. In the name of a family, words in capital letters stand for any text, so that `lag/LAG` is
      `lag/0`, `lag/1` and so on;
    - `unit`: its unit; empty if it has none.
    """

    writer: str
    kind: Kind
    name: str
    unit: str
    meaning: str
    _pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # A frozen dataclass allows no other way to set a field.
        object.__setattr__(self, "_pattern", re.compile(_VARIABLE.sub(".+", re.escape(self.name))))

    @property
    def is_family(self) -> bool:
        return _VARIABLE.search(self.name) is not None

    @property
    def fixed_characters(self) -> int:
        """The number of characters of the name that are not variable. If several families fit a name, the family with
        the most such characters is chosen."""
        return len(_VARIABLE.sub("", self.name))

    def fits(self, name: str) -> bool:
        """True if a role may write the metric under this name."""
        return self._pattern.fullmatch(name) is not None


Make = Callable[[str, str, str], Metric]
"""Makes a metric from its name, its unit and its meaning."""


def made_by(writer: str) -> tuple[Make, Make, Make]:
    """Functions that make the gauges, counters and texts of a writer."""
    return partial(Metric, writer, "gauge"), partial(Metric, writer, "counter"), partial(Metric, writer, "text")
