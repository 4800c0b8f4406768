"""Values in a picture, and where they stand: what its page shows under the pointer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

__all__ = ["points_of"]

_MOST = 150
"""Points of one line: of a longer one, evenly spaced ones."""
_BEYOND = 6
"""Pixels that a mark may stand outside of the axes."""
_SVG_DPI = 72
"""As matplotlib writes it."""


def points_of(axes: Any) -> list[tuple[float, float, str, str]]:
    """x, y in the SVG's units, the value in words and the colour, of lines and bars, once the picture is drawn."""
    values = [*_of_lines(axes), *_of_bars(axes)]
    if not values:
        return []
    scale, height = _SVG_DPI / axes.figure.dpi, axes.figure.bbox.height
    frame, names, found = axes.bbox.padded(_BEYOND), _names(axes), {}
    places = axes.transData.transform([(x, y) for _, x, y in values])
    for (colour, x, y), (across, up) in zip(values, places.tolist(), strict=True):
        if frame.x0 <= across <= frame.x1 and frame.y0 <= up <= frame.y1:
            said, name = f"{_value(axes.xaxis, x)}, {_value(axes.yaxis, y)}", names.get(colour, "")
            place = round(across * scale, 1), round((height - up) * scale, 1)
            found[place] = (f"{name}: {said}" if name and name not in said else said), colour
    return [(*place, *said) for place, said in found.items()]


def _of_lines(axes: Any) -> Iterator[tuple[str, float, float]]:
    from matplotlib.colors import to_hex

    for line in axes.lines:
        across, up = line.get_xdata(orig=False), line.get_ydata(orig=False)
        # Lines of the axes themselves, as axvline draws them, have no values.
        if line.get_transform() != axes.transData or not len(across):
            continue
        step = max(1, math.ceil(len(across) / _MOST))
        for x, y in zip(across[::step], up[::step], strict=True):
            yield to_hex(line.get_color()), float(x), float(y)


def _of_bars(axes: Any) -> Iterator[tuple[str, float, float]]:
    from matplotlib.colors import to_hex
    from matplotlib.container import BarContainer

    for bars in axes.containers:
        if not isinstance(bars, BarContainer):
            continue
        lying = bars.orientation == "horizontal"
        for bar in bars.patches[:: max(1, math.ceil(len(bars.patches) / _MOST))]:
            left, low = bar.get_xy()
            x = left + bar.get_width() / (1 if lying else 2)
            yield to_hex(bar.get_facecolor()), float(x), float(low + bar.get_height() / (2 if lying else 1))


def _names(axes: Any) -> dict[str, str]:
    """By colour, as a legend or the label at a line's end has them; of one that several share, nothing."""
    from matplotlib.colors import to_hex
    from matplotlib.container import BarContainer

    said: dict[str, set[str]] = {}
    for line in axes.lines:
        if not str(line.get_label()).startswith("_"):
            said.setdefault(to_hex(line.get_color()), set()).add(str(line.get_label()))
    for text in axes.texts:
        arrow = getattr(text, "arrow_patch", None)
        if arrow is not None and text.get_text():
            said.setdefault(to_hex(arrow.get_edgecolor()), set()).add(text.get_text())
    for bars in axes.containers:
        label = str(bars.get_label())
        if isinstance(bars, BarContainer) and bars.patches and not label.startswith("_"):
            said.setdefault(to_hex(bars.patches[0].get_facecolor()), set()).add(label)
    return {colour: names.pop() for colour, names in said.items() if len(names) == 1}


def _value(axis: Any, value: float) -> str:
    """The label of a tick where the axis has words, else the number."""
    from matplotlib.ticker import FixedFormatter

    if isinstance(axis.get_major_formatter(), FixedFormatter):
        ticks = dict(zip(axis.get_ticklocs(), axis.get_major_formatter().seq, strict=False))
        if value in ticks:
            return str(ticks[value])
    shown = f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    label = axis.get_label_text()
    return f"{shown} ({label})" if label else shown
