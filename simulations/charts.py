"""Pictures of runs and data as SVG: accuracy against rounds, bytes and time, and which client holds what.

Drawn with matplotlib's figures alone, never pyplot, which keeps global state. Shapes: K clients, C classes; T evaluated
rounds.
"""

import io
import re
import unicodedata
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fed.quantities import bytes_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

__all__ = [
    "INK",
    "Curve",
    "Style",
    "against_time",
    "by_round",
    "curve_of",
    "curves",
    "for_file",
    "for_page",
    "partition",
    "short_labels",
    "styles",
]

INK = "#0b0c0d"
"""The colour of text and axes; inside a page it becomes the page's own, for light and for dark."""
# Okabe & Ito's palette (2008), which the colour-blind can tell apart, without its yellow, too pale for a thin line.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
_DASHES = ((), (5, 1.6), (1.4, 1.4), (7, 1.6, 1.4, 1.6), (9, 2, 2.5, 2))
_WIDTH_INCH = 9.6
_EM = 9
"""Points: the size of the letters."""
_LABEL_WIDTH = 32
_UNITS_OF_TIME = ((86_400.0, "days"), (3_600.0, "h"), (60.0, "min"))
_BASELINES = {"centralized": (6, 2), "local": (1.5, 2)}


@dataclass(frozen=True)
class Style:
    """How a variant is drawn: a colour, and a dash pattern in points (none: solid), which tells it apart in print."""

    colour: str
    dashes: tuple[float, ...]


def styles(algorithms: Mapping[str, str]) -> dict[str, Style]:
    """A style for each variant: ink for the first of each baseline, and no two of the first 35 others alike.

    Args:
        algorithms: name of the variant → kind of its algorithm.
    """
    chosen: dict[str, Style] = {}
    free = dict(_BASELINES)
    others = (Style(_COLOURS[index % 7], _DASHES[index % 5]) for index in range(len(algorithms)))
    for name, kind in algorithms.items():
        chosen[name] = Style(INK, free.pop(kind)) if kind in free else next(others)
    return chosen


@dataclass(frozen=True)
class Curve:
    """A measure by evaluated round, and its spread over seeds.

    Args:
        rounds: [T], those that every run measured.
        size_bytes: [T], sent through that round, both ways; the mean over runs.
        virtual_s: [T], simulated time at its end; the mean over runs.
        mean: [T], of the measure over runs.
        deviation: [T], the sample standard deviation; 0 for a single run.
    """

    rounds: NDArray[np.float64]
    size_bytes: NDArray[np.float64]
    virtual_s: NDArray[np.float64]
    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]


def curve_of(
    metrics_of_runs: Sequence[Sequence[Mapping[str, Any]]], measure: str, within: str | None = None
) -> Curve | None:
    """The curve of one variant's runs.

    Args:
        metrics_of_runs: of each run a line a round.
        measure: the key to draw.
        within: a key that holds a deviation within a run; the curve has its mean over runs in place of that over seeds.

    Returns:
        None where no round was measured by all runs.
    """
    measured = [{line["round"]: line for line in run if line.get(measure) is not None} for run in metrics_of_runs]
    rounds = sorted(set.intersection(*map(set, measured))) if measured else []
    if not rounds:
        return None
    values = np.array([[run[number][measure] for number in rounds] for run in measured], np.float64)
    sent = np.array([[_sent_through(number, run) for number in rounds] for run in metrics_of_runs], np.float64)
    deviation = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(len(rounds))
    if within is not None:
        deviation = np.mean([[run[number][within] or 0.0 for number in rounds] for run in measured], axis=0)
    time_s = np.array([[run[number]["virtual_s"] for number in rounds] for run in measured], np.float64)
    return Curve(np.array(rounds, np.float64), sent.mean(axis=0), time_s.mean(axis=0), values.mean(axis=0), deviation)


def _sent_through(number: int, run: Sequence[Mapping[str, Any]]) -> int:
    return sum(line["bytes_up"] + line["bytes_down"] for line in run if line["round"] <= number)


def curves(lines: Mapping[str, Curve], look: Mapping[str, Style], *, label: str, target: float | None = None) -> str:
    """Two panels, against rounds and against bytes; what sends no bytes is a level line in the second.

    Args:
        lines: name → its curve. More than one are named beneath the panels.
        look: name → its style.
        label: of the vertical axis.
        target: a level to mark.
    """
    labels = short_labels(list(lines))
    columns = min(len(lines), _legend_columns(labels))
    legend_rows = -(-len(lines) // columns) if len(lines) > 1 else 0
    with _figure(_WIDTH_INCH, 3.9 + 0.2 * legend_rows) as (figure, svg):
        left, right = figure.subplots(1, 2, sharey=True)
        handles = [_line(left, curve.rounds, curve, look[name]) for name, curve in lines.items()]
        _rounds_axis(left)
        left.set_ylabel(label)
        _against_bytes(right, lines, look)
        for axes in (left, right):
            _tidy(axes)
            if target is not None:
                axes.axhline(target, color=INK, linewidth=0.6, alpha=0.55)
        if target is not None:
            _name_target(right, target)
        if legend_rows:
            _legend(figure, labels, handles, columns)
        figure.savefig(svg, format="svg", metadata=_NO_METADATA)
    return _text(svg)


def against_time(
    lines: Mapping[str, Curve], look: Mapping[str, Style], *, label: str, target: float | None = None
) -> str:
    """One panel, against simulated time.

    Args:
        lines: name → its curve. More than one are named beneath the panel.
        look: name → its style.
        label: of the vertical axis.
        target: a level to mark.
    """
    from matplotlib.ticker import FuncFormatter, NullFormatter

    labels = short_labels(list(lines))
    columns = min(len(lines), _legend_columns(labels))
    legend_rows = -(-len(lines) // columns) if len(lines) > 1 else 0
    ends_s = [float(curve.virtual_s[-1]) for curve in lines.values()]
    unit_s, unit = next(((size_s, name) for size_s, name in _UNITS_OF_TIME if max(ends_s) >= 2 * size_s), (1.0, "s"))
    with _figure(_WIDTH_INCH, 3.6 + 0.2 * legend_rows) as (figure, svg):
        axes = figure.subplots()
        handles = [_line(axes, curve.virtual_s / unit_s, curve, look[name]) for name, curve in lines.items()]
        if max(ends_s) > 8 * min(ends_s) > 0:
            axes.set_xscale("log")
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda time, _: f"{time:g}"))
        axes.set_xlabel(f"simulated time, {unit}")
        axes.set_ylabel(label)
        _tidy(axes)
        if target is not None:
            axes.axhline(target, color=INK, linewidth=0.6, alpha=0.55)
            _name_target(axes, target)
        if legend_rows:
            _legend(figure, labels, handles, columns)
        figure.savefig(svg, format="svg", metadata=_NO_METADATA)
    return _text(svg)


def by_round(panels: Mapping[str, Mapping[str, Curve]]) -> str:
    """What a single run measured, round by round.

    Args:
        panels: label of a panel's vertical axis → name of a line → its curve. All panels share their styles in order.
    """
    with _figure(_WIDTH_INCH, 3.6) as (figure, svg):
        for axes, (label, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
            look = styles(dict.fromkeys(lines, ""))
            handles = [_line(axes, curve.rounds, curve, look[name]) for name, curve in lines.items()]
            axes.legend(handles, list(lines), frameon=False, handlelength=3.2)
            axes.set_ylabel(label)
            _rounds_axis(axes)
            _tidy(axes)
        figure.savefig(svg, format="svg", metadata=_NO_METADATA)
    return _text(svg)


def _rounds_axis(axes: "Axes") -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))


def _name_target(axes: "Axes", target: float) -> None:
    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "xytext": (0, 2), "textcoords": "offset points"}
    axes.annotate(f"target {target:g}", (0.005, target), fontsize=8, color=INK, **place)


def _line(axes: "Axes", x: NDArray[np.float64], curve: Curve, style: Style) -> "Line2D":
    dashes = {"dashes": style.dashes} if style.dashes else {}
    marker = "o" if len(x) == 1 else ""
    (line,) = axes.plot(x, curve.mean, color=style.colour, linewidth=1.7, marker=marker, **dashes)  # type: ignore[arg-type]
    if curve.deviation.any():
        low, high = curve.mean - curve.deviation, curve.mean + curve.deviation
        axes.fill_between(x, low, high, color=style.colour, alpha=0.14, linewidth=0)
    return line


def _against_bytes(axes: "Axes", lines: Mapping[str, Curve], look: Mapping[str, Style]) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    sent = [size for curve in lines.values() for size in curve.size_bytes if size > 0]
    totals = [curve.size_bytes[-1] for curve in lines.values() if curve.size_bytes[-1] > 0]
    for name, curve in lines.items():
        if curve.size_bytes[-1] > 0:
            _line(axes, curve.size_bytes, curve, look[name])
        else:
            dashes: dict[str, Any] = {"dashes": look[name].dashes} if look[name].dashes else {}
            axes.axhline(curve.mean[-1], color=look[name].colour, linewidth=1.1, **dashes)
    if totals and max(totals) > 8 * min(totals):
        axes.set_xscale("log")
        axes.set_xlim(min(sent) * 0.9, max(sent) * 1.1)
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: bytes_text(size) if size >= 0 else ""))
    axes.set_xlabel("bytes sent, both ways" if sent else "bytes sent: none")


def partition(ids: Sequence[object], counts_KC: NDArray[np.int64]) -> str:
    """Samples of each client: above in total, and below by class where there is more than one.

    Args:
        ids: the clients', K of them.
        counts_KC: how many samples of each class each client holds.
    """
    clients, classes = counts_KC.shape
    height = min(4.0, max(1.2, 0.22 * classes)) if classes > 1 else 0.0
    with _figure(_WIDTH_INCH, 1.8 + height) as (figure, svg):
        panels = figure.subplots(
            1 + (classes > 1), 1, sharex=True, squeeze=False, height_ratios=(1, height)[: 1 + (classes > 1)]
        )
        for axes in panels[:, 0]:
            _tidy(axes)
        totals, last = panels[0, 0], panels[-1, 0]
        if clients <= 200:
            totals.bar(np.arange(clients), counts_KC.sum(axis=1), width=0.8, color=INK, alpha=0.5)
        else:  # one outline, however many
            totals.stairs(counts_KC.sum(axis=1), np.arange(clients + 1) - 0.5, fill=True, color=INK, alpha=0.5)
        totals.set_ylabel("samples")
        totals.set_ylim(bottom=0)
        if classes > 1:
            _cells(figure, last, counts_KC)
        last.set_xlabel("client")
        last.set_xlim(-0.5, clients - 0.5)
        _ticks(last.xaxis, ids, 25)
        figure.savefig(svg, format="svg", metadata=_NO_METADATA, dpi=200)
    return _text(svg)


def _cells(figure: "Figure", axes: "Axes", counts_KC: NDArray[np.int64]) -> None:
    from matplotlib.ticker import MaxNLocator

    client_edges, class_edges = (np.arange(length + 1) - 0.5 for length in counts_KC.shape)
    # Beyond a thousand cells or so a picture within the picture is the smaller one.
    colours = {"cmap": _see_through(_COLOURS[0]), "vmin": 0, "rasterized": counts_KC.size > 1500}
    mesh = axes.pcolormesh(client_edges, class_edges, counts_KC.T, **colours)
    axes.grid(visible=False)
    axes.set_ylabel("class")
    _ticks(axes.yaxis, range(counts_KC.shape[1]), 12)
    scale = figure.colorbar(mesh, ax=figure.axes, pad=0.01, aspect=30, ticks=MaxNLocator(6, integer=True))
    scale.set_label("samples of a class")
    scale.outline.set_visible(False)


def _ticks(axis: Any, names: Sequence[object], most: int) -> None:
    step = -(-len(names) // most)
    places = range(0, len(names), step)
    axis.set_ticks(list(places), [str(names[place])[:12] for place in places])
    if any(len(str(names[place])) > 3 for place in places) and axis.axis_name == "x":
        axis.set_tick_params(rotation=60)


def _see_through(colour: str) -> Any:
    """From nothing to a colour, so that zero is the page itself, light or dark."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    return LinearSegmentedColormap.from_list("see-through", [(*to_rgb(colour), 0.0), (*to_rgb(colour), 1.0)])


def _legend(figure: "Figure", labels: Sequence[str], handles: Sequence["Line2D"], columns: int) -> None:
    # Labels set as such would hide a name that begins with an underscore.
    legend = figure.legend(
        handles,
        [str(index) for index in range(len(labels))],
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        handlelength=3.2,
        columnspacing=1.8,
    )
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_text(label)


def _legend_columns(labels: Sequence[str]) -> int:
    """As many columns of the widest label, its line and the space about it as the figure's width holds; at most 4."""
    widest = max((_width_of(label) for label in labels), default=1)
    return max(1, min(4, int(_WIDTH_INCH * 72 / (_EM * (0.62 * widest + 3.2 + 0.8 + 1.8)))))


def short_labels(names: Sequence[str]) -> list[str]:
    """Names of at most 32 cells, which an ellipsis shortens and no two of which are alike.

    Where ends are cut off that alone told names apart, the middle is cut out instead; where that does not, they are
    numbered.

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
    return name if _width_of(name) <= most else _head(name, most - 1) + "…"


def _without_middle(name: str, most: int) -> str:
    end = _head(name[::-1], most // 2)[::-1]
    return name if _width_of(name) <= most else f"{_head(name, most - 1 - _width_of(end))}…{end}"


def _head(name: str, most: int) -> str:
    return next(name[:length] for length in range(min(len(name), most), -1, -1) if _width_of(name[:length]) <= most)


def _width_of(text: str) -> int:
    """As a terminal counts them: a Chinese character is twice as wide as a Latin one."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def _tidy(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=INK, alpha=0.12, linewidth=0.6)
    axes.set_axisbelow(True)


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


@contextmanager
def _figure(width_inch: float, height_inch: float) -> "Iterator[tuple[Figure, io.StringIO]]":
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_SETTINGS), warnings.catch_warnings():  # type: ignore[arg-type]
        # The page's font will have what matplotlib's own, which only measures, has not.
        warnings.filterwarnings("ignore", r"Glyph .* missing from font", UserWarning)
        figure = Figure(figsize=(width_inch, height_inch), layout="constrained")
        figure.patch.set_alpha(0)
        yield figure, io.StringIO()


def _text(svg: io.StringIO) -> str:
    text = svg.getvalue()
    return text[text.index("<svg") :]


def for_page(svg: str, prefix: str) -> str:
    """The picture as part of an HTML page: in the page's ink, and with identifiers that no other picture has."""
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    return svg.replace(INK, "currentColor")


def for_file(svg: str) -> str:
    """The picture as a file of its own, on white paper."""
    return '<?xml version="1.0" encoding="utf-8"?>\n' + svg.replace("<svg ", '<svg style="background: #ffffff" ', 1)
