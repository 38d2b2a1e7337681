"""Draws plots as SVG for a page without scripts. The page's style has the colours, so that they fit a light page, a
dark page and paper."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from markupsafe import Markup, escape

COLOURS = 8
"""The number of colours in the page's style, which has a dash pattern for each."""
MOST_POINTS = 300
LARGEST = 1e305
"""Larger values are not drawn: the difference of two may overflow."""
WIDTH, HEIGHT = 420, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 36


@dataclass(frozen=True, slots=True)
class Series:
    """A curve: its points by ascending x. Points that are not finite or are too large to draw are left out. With
    `has_dots`, each point is marked with a dot."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    has_dots: bool = False

    def points(self) -> list[tuple[float, float]]:
        pairs = zip(self.xs, self.ys, strict=True)
        return [(x, y) for x, y in pairs if y is not None and abs(x) <= LARGEST and abs(y) <= LARGEST]


@dataclass(frozen=True, slots=True)
class Plot:
    """Curves over the same x axis. With `is_stacked` the curves are areas, each on top of the one before. With
    `is_share` the y axis is from 0 to 1. `marks` are vertical lines: the x and the text of each."""

    title: str
    x_label: str
    series: Sequence[Series]
    unit: str = ""
    is_share: bool = False
    is_stacked: bool = False
    note: str = ""
    marks: Sequence[tuple[float, str]] = ()


@dataclass(frozen=True, slots=True)
class DrawnPlot:
    """A plot ready for a page.

    - `legend`: for each curve its number, its label and its last value. The number decides the colour;
    - `bin_size`: a point is the mean of at most this number of rows.
    """

    title: str
    unit: str
    note: str
    svg: Markup
    legend: Sequence[tuple[int, str, str]]
    bin_size: int


def draw(plot: Plot) -> DrawnPlot | None:
    """Draw the plot; `None` if no curve has a point."""
    found = [(series, series.points()) for series in plot.series]
    found = [(series, points) for series, points in found if points]
    if not found:
        return None
    curves = [points for _, points in found]
    if plot.is_stacked:
        curves = _stacked(curves)
    bin_size = max(-(-len(points) // MOST_POINTS) for points in curves)
    curves = [binned(points, bin_size if len(points) > MOST_POINTS else 1) for points in curves]
    frame = _Frame.around(curves, plot.is_share, plot.is_stacked)
    body = Markup("").join(
        _area(frame, points, curves[at - 1] if at else None, at)
        if plot.is_stacked
        else _curve(frame, points, at, series.has_dots)
        for at, ((series, _), points) in enumerate(zip(found, curves, strict=True))
    )
    described = f"{plot.title} by {plot.x_label}: {', '.join(series.label for series, _ in found)}"
    svg = Markup('<svg viewBox="0 0 {width} {height}" role="img" aria-label="{described}">{axes}{body}</svg>').format(
        width=WIDTH,
        height=HEIGHT,
        described=described,
        axes=_axes(frame, plot.x_label) + _marks(frame, plot.marks),
        body=body,
    )
    legend = [(at % COLOURS, series.label, short(points[-1][1])) for at, (series, points) in enumerate(found)]
    return DrawnPlot(plot.title, plot.unit, plot.note, svg, legend, bin_size)


def binned(points: Sequence[tuple[float, float]], size: int) -> list[tuple[float, float]]:
    """The mean of every `size` successive points."""
    parts = (points[at : at + size] for at in range(0, len(points), size))
    return [(fmean(x for x, _ in part), fmean(y for _, y in part)) for part in parts]


def short(value: float) -> str:
    """A number in a few characters."""
    # A number is rounded before its unit is chosen: 999,600 is 1M.
    value = float(f"{value:.3g}") if abs(value) >= 1e4 else value
    size = abs(value)
    if size >= 1e12:
        return f"{value:.3g}".replace("e+", "e")
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / {'G': 1e9, 'M': 1e6, 'k': 1e3}[suffix]:.3g}{suffix}"
    return f"{value:.0f}" if size >= 999.5 else f"{value or 0.0:.3g}"


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Choose round numbers within [low, high], about `most` of them or fewer."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


@dataclass(frozen=True, slots=True)
class _Frame:
    left: float
    right: float
    low: float
    high: float

    @classmethod
    def around(cls, curves: Sequence[Sequence[tuple[float, float]]], is_share: bool, from_zero: bool) -> _Frame:
        xs = [x for points in curves for x, _ in points]
        ys = [y for points in curves for _, y in points]
        low, high = min(ys), max(ys)
        if is_share and low >= 0 and high <= 1:
            low, high = 0.0, 1.0
        elif low >= 0 and (from_zero or low < 0.5 * high):
            low = 0.0
        if low == high == 0:
            high = 1.0
        elif high - low <= 1e-9 * max(abs(high), abs(low), 1e-30):
            low, high = low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5)
        left, right = min(xs), max(xs)
        return cls(left, right if right > left else left + 1, low, high)

    def x(self, value: float) -> float:
        return LEFT + (value - self.left) / (self.right - self.left) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.low) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)

    def path(self, points: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)


def _axes(frame: _Frame, label: str) -> Markup:
    def lines() -> Iterator[Markup]:
        for value in ticks(frame.low, frame.high):
            y = f"{frame.y(value):.1f}"
            yield Markup('<line class="grid" x1="{0}" x2="{1}" y1="{2}" y2="{2}"/>').format(LEFT, WIDTH - RIGHT, y)
            yield Markup('<text class="y" x="{0}" y="{1}">{2}</text>').format(LEFT - 6, y, short(value))
        for value in ticks(frame.left, frame.right):
            x = f"{frame.x(value):.1f}"
            yield Markup('<text class="x" x="{0}" y="{1}">{2}</text>').format(x, HEIGHT - BOTTOM + 15, short(value))
        middle = (LEFT + WIDTH - RIGHT) / 2
        yield Markup('<text class="x" x="{0}" y="{1}">{2}</text>').format(middle, HEIGHT - 4, label)

    return Markup("").join(lines())


def _marks(frame: _Frame, marks: Sequence[tuple[float, str]]) -> Markup:
    lines = (
        Markup('<line class="mark" x1="{0}" x2="{0}" y1="{1}" y2="{2}"><title>{3}</title></line>').format(
            f"{frame.x(x):.1f}", TOP, HEIGHT - BOTTOM, text
        )
        for x, text in marks
        if frame.left <= x <= frame.right
    )
    return Markup("").join(lines)


def _curve(frame: _Frame, points: Sequence[tuple[float, float]], number: int, has_dots: bool) -> Markup:
    colour = number % COLOURS
    line = Markup('<polyline class="line s{0}" points="{1}"/>').format(colour, frame.path(points))
    if not has_dots and len(points) > 1:
        return line
    dots = (f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in points)
    circles = Markup("").join(
        Markup('<circle class="s{0}" cx="{1}" cy="{2}" r="3"/>').format(colour, *dot.split()) for dot in dots
    )
    return line + circles


def _stacked(curves: Sequence[list[tuple[float, float]]]) -> list[list[tuple[float, float]]]:
    """Stack each curve on the curves before it. A curve that lacks an x is 0 there."""
    xs = sorted({x for points in curves for x, _ in points})
    heights, stacked = dict.fromkeys(xs, 0.0), []
    for points in curves:
        for x, y in points:
            heights[x] += y
        stacked.append([(x, heights[x]) for x in xs])
    return stacked


def _area(
    frame: _Frame, points: Sequence[tuple[float, float]], below: Sequence[tuple[float, float]] | None, number: int
) -> Markup:
    floor = below if below is not None else [(points[0][0], 0.0), (points[-1][0], 0.0)]
    outline = frame.path([*points, *reversed(floor)])
    return Markup('<polygon class="area s{0}" points="{1}"/>').format(number % COLOURS, escape(outline))
