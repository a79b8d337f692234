"""Style of charts: colours, lines, fonts, legends, and their conversion to SVG.

Drawn with matplotlib's figures alone, never pyplot, which keeps global state.
"""

import html
import io
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "EM_INCH",
    "INK",
    "NARROW_INCH",
    "WIDTH_INCH",
    "Cells",
    "Style",
    "blank",
    "for_file",
    "for_page",
    "see_through",
    "styles",
    "svg_of",
]

INK = "#0b0c0d"
"""Colour of text and axes; inside a page it becomes the page's own, for light and for dark."""
# Okabe & Ito's palette (2008), which the colour-blind can tell apart, without its yellow, too pale for a thin line.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
_DASHES = ((), (5, 1.6), (1.4, 1.4), (7, 1.6, 1.4, 1.6), (9, 2, 2.5, 2))
WIDTH_INCH = 9.6
_EM_POINTS = 9
NARROW_INCH = 3.6
"""Width of the same figure on a narrow page, drawn anew: scaled down its letters could not be read."""
EM_INCH = _EM_POINTS / 72
"""Size of a figure's letters."""
_BASELINES = {"centralized": (6, 2), "local": (1.5, 2)}
_MOST_CELLS = 5_000
"""Largest number of a heat map's cells whose values a page holds."""
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
_SETTINGS = {
    "svg.fonttype": "none",  # text stays text: small, searchable, in the page's own font
    "svg.hashsalt": "fed",  # the same picture has the same bytes
    "text.parse_math": False,  # a name may hold dollar signs
    "font.size": _EM_POINTS,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.12,
    "grid.linewidth": 0.6,
    **{f"{part}.color": INK for part in ("text", "xtick", "ytick", "grid")},
    **{f"axes.{part}": INK for part in ("edgecolor", "labelcolor")},
}


@dataclass(frozen=True)
class Style:
    """A variant's colour, and its dash pattern in points (none: solid), which tells it apart in print."""

    colour: str
    dashes: tuple[float, ...]

    @property
    def line(self) -> dict[str, Any]:
        """Colour and pattern as matplotlib's lines take them."""
        return {"color": self.colour, "linestyle": (0, self.dashes) if self.dashes else "solid"}


def styles(algorithms: Mapping[str, str]) -> dict[str, Style]:
    """A style for each variant: ink for the first of each baseline, and no two of the first 35 others alike.

    Args:
        algorithms: name of the variant → kind of its algorithm.
    """
    chosen: dict[str, Style] = {}
    free = dict(_BASELINES)
    # 7 and 5 have no common divisor: 35 variants pass before a pair of both returns.
    others = (Style(_COLOURS[index % 7], _DASHES[index % 5]) for index in range(len(algorithms)))
    for name, kind in algorithms.items():
        chosen[name] = Style(INK, free.pop(kind)) if kind in free else next(others)
    return chosen


@contextmanager
def blank(width_inch: float, height_inch: float) -> "Iterator[Figure]":
    """A figure to draw on."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_SETTINGS), warnings.catch_warnings():  # type: ignore[arg-type]
        # The page's font will have what matplotlib's own, which only measures, has not.
        warnings.filterwarnings("ignore", r"Glyph .* missing from font", UserWarning)
        figure = Figure(figsize=(width_inch, height_inch), layout="constrained")
        figure.patch.set_alpha(0)
        yield figure


@dataclass(frozen=True)
class Cells:
    """Values of a heat map's cells, for the page's script.

    Args:
        axes: axes that they are drawn in, each cell one unit wide and high, the first at 0.
        rows: names of the rows.
        columns: names of the columns.
        values: number in each cell, of shape (rows, columns).
        labels: names of what a column, a row and a number stand for.
    """

    axes: "Axes"
    rows: Sequence[object]
    columns: Sequence[object]
    values: NDArray[np.int64]
    labels: tuple[str, str, str]


def svg_of(figure: "Figure", cells: Sequence[Cells] = (), **options: Any) -> str:
    """The picture, with its values for the page's script; to be called before :func:`blank` ends.

    Args:
        figure: figure whose named lines have values.
        cells: values of its heat maps.
        options: further arguments of matplotlib's ``savefig``.
    """
    svg = io.StringIO()
    figure.savefig(svg, format="svg", metadata=_NO_METADATA, **options)
    text = svg.getvalue()
    text = text[text.index("<svg") :]  # XML's declaration has no place within HTML
    panels = [*_panels(figure), *(_panel_of(figure, one) for one in cells if one.values.size <= _MOST_CELLS)]
    if not panels:
        return text
    opened, closed, drawn = text.partition(">")
    return f"{opened}{closed}<metadata>{html.escape(json.dumps(panels, ensure_ascii=False))}</metadata>{drawn}"


def _panels(figure: "Figure") -> list[dict[str, Any]]:
    """Panels that have named lines: where each is in the picture, its axes, and the values of its lines.

    A line with one y and no x is level.
    """
    panels: list[dict[str, Any]] = []
    vertical = ""
    for axes in figure.axes:
        named = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_child")]
        if not named:
            continue
        vertical = axes.get_ylabel() or vertical  # panels that share an axis share its label
        lines = []
        for line in named:
            is_level = line.get_transform() != axes.transData
            x = [] if is_level else _rounded(line.get_xdata())
            y = _rounded(line.get_ydata())
            lines.append({"name": line.get_label(), "colour": line.get_color(), "x": x, "y": y[:1] if is_level else y})
        panels.append(
            {
                "box": _box(figure, axes),
                "x": [*map(float, axes.get_xlim())],
                "y": [*map(float, axes.get_ylim())],
                "log": axes.get_xscale() == "log",
                "labels": [axes.get_xlabel(), vertical],
                "lines": lines,
            }
        )
    return panels


def _panel_of(figure: "Figure", cells: Cells) -> dict[str, Any]:
    """A heat map's place in the picture, its axes, and its values, the row at the top first."""
    is_upright = cells.axes.yaxis_inverted()
    return {
        "box": _box(figure, cells.axes),
        "labels": cells.labels,
        "columns": [*map(str, cells.columns)],
        "rows": [*map(str, cells.rows)][:: 1 if is_upright else -1],
        "cells": cells.values[:: 1 if is_upright else -1].tolist(),
    }


def _box(figure: "Figure", axes: "Axes") -> list[float]:
    """Left, upper, right and lower edge of a panel, in units of the SVG."""
    place = axes.get_position()
    width, height = 72 * figure.get_size_inches()
    return _rounded([place.x0 * width, (1 - place.y1) * height, place.x1 * width, (1 - place.y0) * height])


def _rounded(values: Any) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def see_through() -> Any:
    """Colour map from transparent to the first colour, so that zero is the page itself, light or dark."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    return LinearSegmentedColormap.from_list("see-through", [(*to_rgb(_COLOURS[0]), opacity) for opacity in (0.0, 1.0)])


def for_page(svg: str, prefix: str) -> str:
    """The picture as part of an HTML page: in the page's ink, and with identifiers that no other picture has."""
    # matplotlib gives the same identifiers in each picture, and a page has several.
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    # An ink that occurs nowhere else is a place-holder, whatever matplotlib writes around it.
    return svg.replace(INK, "currentColor")


def for_file(svg: str) -> str:
    """The picture as a file of its own, on white paper."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, count=1, flags=re.DOTALL)  # which is for a page's script
    return '<?xml version="1.0" encoding="utf-8"?>\n' + svg.replace("<svg ", '<svg style="background: #ffffff" ', 1)
