"""Pictures as inline SVG in the page's own colours."""

from __future__ import annotations

import html
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ragorder.common.extras import needs
from ragorder.eval.report.words import policy_words

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


WIDTH, HEIGHT = 4.2, 3.1
_DPI = 100

# Close to Okabe and Ito's, which the colour-blind can tell apart: (on light, on dark). Marks and dashes differ, too.
COLOURS = {
    "retrieval": ("#4d4d4d", "#c8c8c8"),
    "earned": ("#0072b2", "#56b4e9"),
    "greedy": ("#b87700", "#e69f00"),
    "sorted": ("#c04a00", "#ee7733"),
    "prefix": ("#00805c", "#2fc79a"),
    "recency": ("#a8568a", "#dd9cc4"),
    "oracle": ("#000000", "#ffffff"),
    "none": ("#8a8a8a", "#8f8f8f"),
    "contextpilot": ("#7a6a00", "#f0e442"),
    "other": ("#6a51a3", "#b3a2e0"),
    "teal": ("#0e7c86", "#4fc3cf"),
    "crimson": ("#b3123f", "#ff7a9c"),
    "moss": ("#4c7a1d", "#9ccf5f"),
    "brown": ("#7a4a2b", "#c99a73"),
    "free": ("#3f5f86", "#93b1d8"),
}
# Of policies without a look of their own, in the order in which a picture names them.
_SPARE = ("teal", "crimson", "moss", "brown", "other")
_GIVEN: ContextVar[dict[str, str]] = ContextVar("_GIVEN")
# As page.html has them.
_PAGE = {
    "ink": ("#1c2126", "#e8e6e1"),
    "soft": ("#59626b", "#a3acb4"),
    "line": ("#e0ddd5", "#363d44"),
    "card": ("#ffffff", "#1d2125"),
}
_MARKERS = dict(zip(COLOURS, ("s", "o", "^", "v", "D", "P", "*", "x", "X", "h", "<", ">", "p", "d", "8"), strict=True))
_DASHES = dict(
    zip(COLOURS, ("--", "-", "-.", ":", "-", ":", "--", ":", "-.", "-", "-.", "--", ":", "-.", "-"), strict=True)
)
_ALIKE = {"random": "none"}

# What matplotlib draws in these colours gets the page's: a stylesheet cannot reach into presentation attributes.
_PLACEHOLDERS = {"ink": "#a1b2c0", "soft": "#a1b2c1", "line": "#a1b2c2", "card": "#a1b2c3"}
_PLACEHOLDERS |= {name: f"#a1b2{0xD0 + place:x}" for place, name in enumerate(COLOURS)}
INK, SOFT, LINE, CARD = (_PLACEHOLDERS[name] for name in ("ink", "soft", "line", "card"))


@dataclass(frozen=True, slots=True)
class Picture:
    """An SVG with its text alternative and caption."""

    title: str
    svg: str
    alt: str
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Style:
    colour: str
    marker: str
    dashes: str


def style(policy: str) -> Style:
    """The policy's own look, or in a picture the next of those that are to spare."""
    name = _ALIKE.get(policy, policy)
    if name not in COLOURS:
        given = _GIVEN.get({})
        name = given.setdefault(policy, _SPARE[len(given) % len(_SPARE)])
    return Style(_PLACEHOLDERS[name], _MARKERS[name], _DASHES[name])


def need_matplotlib(what: str = "a picture") -> Any:
    """Raises ImportError naming the extra."""
    with needs("eval", what):
        import matplotlib
    return matplotlib


def draw(paint: Callable[[Any], None], *, title: str, alt: str, caption: str = "", height: float = HEIGHT) -> Picture:
    """One panel, painted on matplotlib axes."""
    matplotlib = need_matplotlib()
    from matplotlib.figure import Figure

    settings = {
        "font.size": 9.5,
        "font.family": "DejaVu Sans",
        "svg.fonttype": "none",
        "svg.hashsalt": "ragorder",
        "text.parse_math": False,
        "axes.edgecolor": LINE,
        "axes.labelcolor": SOFT,
        "axes.labelsize": 9,
        "axes.formatter.use_mathtext": False,
        "text.color": INK,
        "xtick.color": LINE,
        "ytick.color": LINE,
        "xtick.labelcolor": SOFT,
        "ytick.labelcolor": SOFT,
        "grid.color": LINE,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "lines.linewidth": 1.8,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(WIDTH, height), dpi=_DPI, layout="constrained")
        axes = figure.subplots()
        outside = _GIVEN.set({})
        try:
            paint(axes)
        finally:
            _GIVEN.reset(outside)
        file = io.BytesIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    points = html.escape(_in_page_colours(json.dumps(points_of(axes), ensure_ascii=False, separators=(",", ":"))))
    svg = _inline(file.getvalue().decode(), f"{title}: {alt}")
    return Picture(title, svg.replace("<svg ", f'<svg data-points="{points}" ', 1), alt, caption)


def standalone(picture: Picture) -> str:
    """The picture as a file of its own, on light ground and on dark."""
    light, dark = (
        "".join(f"--{name}:{colours[place]};" for name, colours in (_PAGE | COLOURS).items()) for place in (0, 1)
    )
    rules = f"svg{{{light}}}@media (prefers-color-scheme:dark){{svg{{{dark}}}}}"
    opening, rest = picture.svg.split(">", 1)
    namespace = 'xmlns="http://www.w3.org/2000/svg" '
    return f"{opening.replace('<svg ', '<svg ' + namespace, 1)}><style>{rules}</style>{rest}\n"


def titled(title: str, label: str) -> str:
    return f"{title} ({label})" if label else title


def name_marks(axes: Any, policies: Sequence[str], *, lines: bool = False) -> None:
    """A legend below the picture."""
    for policy in policies:
        looks = style(policy)
        dashes = looks.dashes if lines else "none"
        axes.plot([], [], linestyle=dashes, marker=looks.marker, color=looks.colour, label=policy_words(policy))
    axes.figure.legend(
        loc="outside lower center", ncols=2, fontsize=8.5, frameon=False, labelcolor=INK, handlelength=2.4
    )


def label_ends(axes: Any, ends: Sequence[tuple[float, float, str, Style]]) -> None:
    """Name lines at their ends (x, y, name, style), moved apart where they would touch."""
    if not ends:
        return
    low, high = axes.get_ylim()
    gap = (high - low) * 0.068
    ordered = sorted(ends, key=lambda end: end[1])
    places = [end[1] for end in ordered]
    for _ in range(60):
        for here, (below, above) in enumerate(pairwise(places)):
            if above - below < gap:
                middle = (above + below) / 2
                places[here], places[here + 1] = middle - gap / 2, middle + gap / 2
    shift = max(0.0, places[-1] - high) - max(0.0, low - places[0])
    right = max(end[0] for end in ordered)
    for (x, y, name, looks), place in zip(ordered, places, strict=True):
        axes.annotate(
            name,
            xy=(x, y),
            xytext=(1.035, place - shift),
            textcoords=axes.get_yaxis_transform(),
            va="center",
            fontsize=8.5,
            color=INK,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": looks.colour,
                "linewidth": 0.9,
                "shrinkA": 1,
                "shrinkB": 0,
                "relpos": (0, 0.5),
            },
        )
    axes.set_xlim(right=max(axes.get_xlim()[1], right))


def _inline(svg: str, alt: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    head, rest = svg.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None
    svg = f'<svg {box[0]} role="img" aria-label="{html.escape(alt)}" xmlns:xlink="http://www.w3.org/1999/xlink">{rest}'
    own = _digest(svg)
    svg = re.sub(r'\bid="', f'id="{own}-', svg)
    svg = re.sub(r'href="#', f'href="#{own}-', svg)
    svg = svg.replace("url(#", f"url(#{own}-")
    return _in_page_colours(svg).replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")


def _in_page_colours(text: str) -> str:
    for name, colour in _PLACEHOLDERS.items():
        text = text.replace(colour, f"var(--{name})")
    return text


def _digest(svg: str) -> str:
    from hashlib import blake2b

    return f"p{blake2b(svg.encode(), digest_size=5).hexdigest()}"
