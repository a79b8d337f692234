"""Style of charts: colours, lines, fonts, legends, and their conversion to SVG.

Drawn with matplotlib's figures alone, never pyplot, which keeps global state.
"""

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len, chop_cells

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

__all__ = [
    "COLOURS",
    "INK",
    "WIDTH_INCH",
    "Style",
    "blank",
    "for_file",
    "for_page",
    "legend",
    "legend_columns",
    "see_through",
    "short_labels",
    "styles",
    "svg_of",
    "tidy",
]

INK = "#0b0c0d"
"""The colour of text and axes; inside a page it becomes the page's own, for light and for dark."""
# Okabe & Ito's palette (2008), which the colour-blind can tell apart, without its yellow, too pale for a thin line.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
_DASHES = ((), (5, 1.6), (1.4, 1.4), (7, 1.6, 1.4, 1.6), (9, 2, 2.5, 2))
WIDTH_INCH = 9.6
_EM = 9
"""Points: the size of the letters."""
_LABEL_WIDTH = 32
_BASELINES = {"centralized": (6, 2), "local": (1.5, 2)}
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
_SETTINGS = {
    "svg.fonttype": "none",  # text stays text: small, searchable, in the page's own font
    "svg.hashsalt": "fed",  # the same picture has the same bytes
    "text.parse_math": False,  # a name may hold dollar signs
    "font.size": _EM,
    "axes.facecolor": "none",
    **{f"{part}.color": INK for part in ("text", "xtick", "ytick")},
    **{f"axes.{part}": INK for part in ("edgecolor", "labelcolor")},
}


@dataclass(frozen=True)
class Style:
    """A variant's colour, and its dash pattern in points (none: solid), which tells it apart in print."""

    colour: str
    dashes: tuple[float, ...]


def styles(algorithms: Mapping[str, str]) -> dict[str, Style]:
    """A style for each variant: ink for the first of each baseline, and no two of the first 35 others alike.

    Args:
        algorithms: name of the variant → kind of its algorithm.
    """
    chosen: dict[str, Style] = {}
    free = dict(_BASELINES)
    others = (Style(COLOURS[index % 7], _DASHES[index % 5]) for index in range(len(algorithms)))
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


def svg_of(figure: "Figure", **options: Any) -> str:
    """The picture; to be called before :func:`blank` ends."""
    svg = io.StringIO()
    figure.savefig(svg, format="svg", metadata=_NO_METADATA, **options)
    text = svg.getvalue()
    return text[text.index("<svg") :]  # XML's declaration has no place within HTML


def tidy(axes: "Axes") -> None:
    """Remove axes and ticks that carry no information."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=INK, alpha=0.12, linewidth=0.6)
    axes.set_axisbelow(True)


def legend(figure: "Figure", labels: Sequence[str], handles: Sequence["Line2D"], columns: int) -> None:
    """Name lines beneath the panels.

    Args:
        figure: the figure to draw on.
        labels: the names.
        handles: the lines, in the same order.
        columns: the number of columns.
    """
    # Labels set as such would hide a name that begins with an underscore.
    names = figure.legend(
        handles,
        [str(index) for index in range(len(labels))],
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        handlelength=3.2,
        columnspacing=1.8,
    )
    for text, label in zip(names.get_texts(), labels, strict=True):
        text.set_text(label)


def legend_columns(labels: Sequence[str]) -> int:
    """Number of columns, at most 4, that fit the figure's width, given the widest label."""
    widest = max((cell_len(label) for label in labels), default=1)
    return max(1, min(4, int(WIDTH_INCH * 72 / (_EM * (0.62 * widest + 3.2 + 0.8 + 1.8)))))


def short_labels(names: Sequence[str]) -> list[str]:
    """Names of at most 32 cells, shortened by an ellipsis, no two alike.

    Names that differ only in their ends are shortened in the middle; those that then are still alike are numbered.

    Example:
        >>> short_labels(["FedAvg", "local.lr=0.1, local.batch_size=16, local.epochs=1"])
        ['FedAvg', 'local.lr=0.1, local.batch_size=…']
        >>> short_labels(["trial 1: " + "x" * 40 + "1", "trial 1: " + "x" * 40 + "2"])
        ['trial 1: xxxxxx…xxxxxxxxxxxxxxx1', 'trial 1: xxxxxx…xxxxxxxxxxxxxxx2']
    """
    labels = [_within(name, _LABEL_WIDTH) for name in names]
    if len(set(labels)) < len(labels):
        labels = [_without_middle(name, _LABEL_WIDTH) for name in names]
    if len(set(labels)) < len(labels):
        labels = [f"{number}: {_within(name, _LABEL_WIDTH - 5)}" for number, name in enumerate(names, 1)]
    return labels


def _within(name: str, most: int) -> str:
    return name if cell_len(name) <= most else chop_cells(name, most - 1)[0] + "…"


def _without_middle(name: str, most: int) -> str:
    end = chop_cells(name[::-1], most // 2)[0][::-1]
    return name if cell_len(name) <= most else f"{chop_cells(name, most - 1 - cell_len(end))[0]}…{end}"


def see_through(colour: str) -> Any:
    """Colour map from transparent to a colour, so that zero is the page itself, light or dark."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    return LinearSegmentedColormap.from_list("see-through", [(*to_rgb(colour), 0.0), (*to_rgb(colour), 1.0)])


def for_page(svg: str, prefix: str) -> str:
    """The picture as part of an HTML page: in the page's ink, and with identifiers that no other picture has."""
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    return svg.replace(INK, "currentColor")


def for_file(svg: str) -> str:
    """The picture as a file of its own, on white paper."""
    return '<?xml version="1.0" encoding="utf-8"?>\n' + svg.replace("<svg ", '<svg style="background: #ffffff" ', 1)
