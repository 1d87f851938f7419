"""Small charts as inline SVG: axes, lines, stacked bars, values on hover. No script: CSS shows what lies under the
pointer, so a page can forbid scripts altogether. Colours are CSS variables --series-1.. of the page.
"""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

WIDTH, WIDE, HEIGHT = 380, 640, 200
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 26, 24
MAX_POINTS = 240

Series = Sequence[tuple[float, float | None]]
"""(x, y) in order of x; a y of None breaks the line."""


class Scale(NamedTuple):
    """A linear map from data to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Returns round numbers (1, 2 or 5 times a power of ten apart) that enclose low..high."""
    span = high - low or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next(factor * power for factor in (1, 2, 5, 10) if span / (factor * power) <= count)
    first = math.floor(low / step + 1e-9)
    last = max(first + 1, math.ceil(high / step - 1e-9))
    return [step * index for index in range(first, last + 1)]


def number(value: float) -> str:
    """Returns a number short enough for an axis."""
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e5):
        return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e").replace(".0e", "e")
    return f"{value:.4g}"


def thin(series: Series) -> Series:
    """Returns at most MAX_POINTS points, each the mean of its neighbours; a None among them is left out."""
    size = math.ceil(len(series) / MAX_POINTS)
    if size <= 1:
        return series
    thinned: list[tuple[float, float | None]] = []
    for start in range(0, len(series), size):
        part = series[start : start + size]
        values = [y for _, y in part if y is not None]
        thinned.append((part[-1][0], math.fsum(values) / len(values) if values else None))
    return thinned


def line_chart(lines: Mapping[str, Series], *, bounds: tuple[float, float] | None = None) -> str:
    """Returns an SVG of one or more named lines over steps.

    Args:
        bounds: fixed ends of the y axis; by default it spans the data, and zero where nothing is negative.
    """
    lines = {name: thin(series) for name, series in lines.items()}
    xs = [x for series in lines.values() for x, _ in series]
    ys = [y for series in lines.values() for _, y in series if y is not None]
    low, high = bounds or (min(0.0, *ys), max(0.0, *ys))
    y_ticks = ticks(low, high)
    x = Scale(min(xs), max(max(xs), min(xs) + 1), LEFT, WIDTH - RIGHT)
    y = Scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    drawn = [_path(series, x, y, index) for index, series in enumerate(lines.values(), 1)]
    return _svg([_axes(x, y, y_ticks), *drawn, *_hover(lines, x, y)], ", ".join(lines))


def stacked_bars(layers: Mapping[str, Series]) -> str:
    """Returns an SVG of bars, one per step, whose layers lie on each other; all layers have the same steps."""
    layers = {name: thin(series) for name, series in layers.items()}
    steps = [step for step, _ in next(iter(layers.values()))]
    values = {name: [y or 0.0 for _, y in series] for name, series in layers.items()}
    totals = [math.fsum(column) for column in zip(*values.values(), strict=True)]
    y_ticks = ticks(0.0, max(totals))
    half = (steps[-1] - steps[0]) / max(len(steps) - 1, 1) / 2 or 0.5
    x = Scale(steps[0] - half, steps[-1] + half, LEFT, WIDE - RIGHT)
    y = Scale(0.0, y_ticks[-1], HEIGHT - BOTTOM, TOP)
    width = max((x.end - x.start) / len(steps) * 0.8, 0.6)
    bars, base = [], [0.0] * len(steps)
    for index, column in enumerate(values.values(), 1):
        for position, value in enumerate(column):
            top, bottom = y(base[position] + value), y(base[position])
            left = x(steps[position]) - width / 2
            bars.append(f'<rect class="s{index}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" '
                        f'height="{bottom - top:.1f}"/>')  # fmt: skip
            base[position] += value
    return _svg([_axes(x, y, y_ticks), *bars, *_hover(layers, x, y, dots=False)], ", ".join(layers), WIDE)


def legend(names: Iterable[str]) -> str:
    """Returns a legend in the order of the series."""
    keys = "".join(f'<span><i class="s{index}"></i>{html.escape(name)}</span>' for index, name in enumerate(names, 1))
    return f'<div class="legend">{keys}</div>'


def _svg(parts: Iterable[str], label: str, width: int = WIDTH) -> str:
    body = "\n".join(parts)
    return f'<svg viewBox="0 0 {width} {HEIGHT}" role="img" aria-label="{html.escape(label)}">\n{body}\n</svg>'


def _axes(x: Scale, y: Scale, y_ticks: Sequence[float]) -> str:
    rows = [
        f'<line class="grid" x1="{LEFT}" x2="{x.end}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        f'<text x="{LEFT - 6}" y="{y(tick) + 3.5:.1f}" text-anchor="end">{number(tick)}</text>'
        for tick in y_ticks
    ]
    inside = [tick for tick in ticks(x.low, x.high, 5) if x.low <= tick <= x.high and tick == int(tick)]
    columns = [
        f'<text x="{x(tick):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{number(tick)}</text>' for tick in inside
    ]
    return "".join([*rows, *columns])


def _path(series: Series, x: Scale, y: Scale, index: int) -> str:
    commands, pen_down = [], False
    for step, value in series:
        if value is not None:
            commands.append(f"{'L' if pen_down else 'M'}{x(step):.1f},{y(value):.1f}")
        pen_down = value is not None
    dots = ""
    if len(series) <= 12:  # few points, such as evaluations, are measurements to be seen one by one
        dots = "".join(f'<circle class="s{index}" cx="{x(step):.1f}" cy="{y(value):.1f}" r="3"/>'
                       for step, value in series if value is not None)  # fmt: skip
    return f'<path class="s{index}" d="{" ".join(commands)}"/>{dots}'


def _hover(lines: Mapping[str, Series], x: Scale, y: Scale, *, dots: bool = True) -> Iterable[str]:
    """Yields one invisible column per step, which shows the values there while the pointer is on it."""
    columns: dict[float, list[tuple[int, str, float]]] = {}
    for index, (name, series) in enumerate(lines.items(), 1):
        for step, value in series:
            if value is not None:
                columns.setdefault(step, []).append((index, name, value))
    steps = sorted(columns)
    for position, step in enumerate(steps):
        left = (x(steps[position - 1]) + x(step)) / 2 if position else LEFT
        right = (x(step) + x(steps[position + 1])) / 2 if position + 1 < len(steps) else x.end
        values = columns[step]
        named = " · ".join(f"{name} {number(v)}" if len(lines) > 1 else number(v) for _, name, v in values)
        marks = "".join(f'<circle class="s{i}" cx="{x(step):.1f}" cy="{y(v):.1f}" r="4"/>' for i, _, v in values)
        yield (
            f'<g class="hover"><rect x="{left:.1f}" y="{TOP}" width="{max(right - left, 0.5):.1f}" '
            f'height="{HEIGHT - TOP - BOTTOM}"/>'
            f'<line x1="{x(step):.1f}" x2="{x(step):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>{marks if dots else ""}'
            f'<text x="{x.end}" y="14" text-anchor="end">step {step:g}: {html.escape(named)}</text></g>'
        )
