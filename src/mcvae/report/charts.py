"""Charts as plain geometry: where lines, points and ticks lie. The template draws them as SVG."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

__all__ = ["Chart", "Series", "chart", "ticks"]

WIDTH, HEIGHT = 380, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 12, 12, 44
_MOST_POINTS = 150
"""Most points of a line; longer lines are thinned."""
_MARKERS = 8
"""Most markers along a line: enough to tell lines apart without colour."""


@dataclass(frozen=True)
class Series:
    """Values of one line. Its style number decides colour, marker and dashes."""

    name: str
    style: int
    x: list[float]
    y: list[float]
    error: list[float] = field(default_factory=list)
    """Half lengths of the error bars; empty for none."""


@dataclass(frozen=True)
class Chart:
    """A finished chart in the coordinates of its picture."""

    title: str
    x_label: str
    y_label: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    lines: list[tuple[int, str]]
    """Style and SVG path."""
    bars: list[tuple[int, float, float, float]]
    """Style, x, top and bottom of error bars."""
    markers: list[tuple[int, float, float]]
    """Style, x and y."""
    points: list[list[tuple[float, float, str]]]
    """What hovering and arrow keys show, for every series: x, y and text."""
    legend: list[tuple[int, str]]
    """Style and name."""
    note: str = ""
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT
    right: int = WIDTH - _RIGHT
    top: int = _TOP
    bottom: int = HEIGHT - _BOTTOM


def chart(
    title: str,
    x_label: str,
    y_label: str,
    series: list[Series],
    *,
    kind: Literal["line", "points", "steps"] = "line",
    log_x: bool = False,
    cut_start: bool = False,
) -> Chart | None:
    """Lay out a chart; None if there is nothing to show.

    Args:
        title: what it shows.
        x_label, y_label: of the axes.
        series: the data; those without values are left out.
        kind: lines with some markers, points with error bars, or a histogram's outline.
        log_x: logarithmic x axis, for positive values.
        cut_start: let the y axis begin where the first tenth of a line ends: early training would flatten the rest.
    """
    series = [_thinned(s) for s in map(_finite, series) if s.x]
    if not series or (kind == "line" and all(len(s.x) < 2 for s in series)):
        return None
    low, high = _range(series, cut_start)
    left, right = min(min(s.x) for s in series), max(max(s.x) for s in series)
    if kind == "points" or (kind == "line" and max(len(s.x) for s in series) <= _MARKERS):  # whole markers
        left, right = _padded(left, right, log_x)
    elif kind == "steps":
        half = (series[0].x[1] - series[0].x[0]) / 2
        low, left, right = 0.0, left - half, right + half
    x_at = _scale(left, right, _LEFT, WIDTH - _RIGHT, log_x)
    y_ticks = ticks(low, high)
    step = y_ticks[1] - y_ticks[0] if len(y_ticks) > 1 else 1.0
    y_at = _scale(low, high, HEIGHT - _BOTTOM, _TOP)
    lines, bars, markers, points = [], [], [], []
    for s in series:
        at = [(x_at(x), y_at(y)) for x, y in zip(s.x, s.y, strict=True)]
        if kind != "points" and len(at) > 1:
            lines.append((s.style, _path(at, steps=kind == "steps")))
        bars += [(s.style, x_at(x), y_at(y + e), y_at(y - e)) for x, y, e in zip(s.x, s.y, s.error, strict=True) if e]
        markers += [(s.style, *place) for place in _marked(at, kind)]
        points.append([(*place, _words(s, i, x_label, y_label)) for i, place in enumerate(at)])
    return Chart(
        title,
        x_label,
        y_label,
        [(x_at(value), label(value, right - left)) for value in ticks(left, right, 5, log=log_x)],
        [(y_at(value), label(value, 5 * step)) for value in y_ticks],
        lines,
        bars,
        markers,
        points,
        [(s.style, s.name) for s in series],
        "The start of training, below the axis, is cut off." if low > min(min(s.y) for s in series) else "",
    )


def _finite(series: Series) -> Series:
    """Drop points that are not finite. An error that is not known or not finite becomes 0, and gets no bar."""
    errors = [e if math.isfinite(e) else 0.0 for e in series.error] or [0.0] * len(series.x)
    kept = [p for p in zip(series.x, series.y, errors, strict=True) if math.isfinite(p[0]) and math.isfinite(p[1])]
    x, y, error = ([point[i] for point in kept] for i in range(3))
    return replace(series, x=x, y=y, error=error)


def _thinned(series: Series) -> Series:
    stride = math.ceil(len(series.x) / _MOST_POINTS)
    if stride <= 1:
        return series
    keep = slice((len(series.x) - 1) % stride, None, stride)  # the last one stays
    return replace(series, x=series.x[keep], y=series.y[keep], error=series.error[keep])


def _range(series: list[Series], cut_start: bool) -> tuple[float, float]:
    """Range of the y axis, with a margin."""
    low = min(y - e for s in series for y, e in zip(s.y, s.error, strict=True))
    high = max(y + e for s in series for y, e in zip(s.y, s.error, strict=True))
    if cut_start:
        start = max(len(s.y) for s in series) // 10
        low = min(min(s.y[min(start, len(s.y) - 1) :]) for s in series)
    return _padded(low, high)


def _padded(low: float, high: float, log: bool = False) -> tuple[float, float]:
    if log:
        margin = (high / low) ** 0.08 if high > low else 1.5
        return low / margin, high * margin
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return low - margin, high + margin


def _scale(low: float, high: float, start: float, end: float, log: bool = False) -> Any:
    """The linear or logarithmic map of [low, high] to [start, end], rounded to a tenth."""
    if log:
        low, high = math.log(low), math.log(high)
    width = high - low or 1.0

    def place(value: float) -> float:
        value = math.log(value) if log else value
        return round(start + (value - low) / width * (end - start), 1)

    return place


def ticks(low: float, high: float, most: int = 6, *, log: bool = False) -> list[float]:
    """Round numbers between two values.

    >>> ticks(0.0, 61.0)
    [0.0, 20.0, 40.0, 60.0]
    >>> ticks(3.0, 700.0, log=True)
    [5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0]
    """
    if log and high / low > 4:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [m * 10.0**d for d in decades for m in (1, 2, 5) if low <= m * 10.0**d <= high]
        tens = [value for value in found if math.log10(value).is_integer()]
        return found if len(found) <= most + 2 or len(tens) < 2 else tens
    rough = (high - low) / most or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    return [round(i * step, 12) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def label(value: float, span: float) -> str:
    """A number with the digits that its axis needs, and a true minus.

    >>> label(-22.5, 3.0), label(0.02, 0.1), label(2000.0, 9000.0)
    ('−22.5', '0.02', '2000')
    """
    digits = max(0, min(6, 1 - math.floor(math.log10(span / 3 or 1.0))))
    text = f"{value:.{digits}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text in ("-0", "0") else text.replace("-", "−")


def _path(at: list[tuple[float, float]], *, steps: bool) -> str:
    """An SVG path through points; as steps, each point is the middle of a bin."""
    if not steps:
        return "M" + "L".join(f"{x:g},{y:g}" for x, y in at)
    half = (at[1][0] - at[0][0]) / 2
    corners = [corner for x, y in at for corner in ((x - half, y), (x + half, y))]
    return "M" + "L".join(f"{x:.1f},{y:g}" for x, y in corners)


def _marked(at: list[tuple[float, float]], kind: str) -> list[tuple[float, float]]:
    """Where markers go: a few along a line, at the peak of a histogram, on each of separate points."""
    if kind == "steps":
        return [min(at, key=lambda place: place[1])]
    stride = max(1, math.ceil(len(at) / _MARKERS)) if kind == "line" else 1
    return at[len(at) // 2 % stride :: stride]


def _words(series: Series, index: int, x_label: str, y_label: str) -> str:
    error = f" ± {series.error[index]:.3g}" if series.error[index] else ""
    x, y = (f"{value:.5g}".replace("-", "−") for value in (series.x[index], series.y[index]))
    return f"{series.name} · {x_label} {x} · {y_label} {y}{error}"
