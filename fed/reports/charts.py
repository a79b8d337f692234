"""Charts of runs as SVG: a metric against rounds, bytes and time, and its distribution over clients.

Shapes: see :mod:`fed.vectors.layout`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len, chop_cells

from fed.quantities import bytes_text
from fed.reports.plot_style import EM_INCH, INK, NARROW_INCH, WIDTH_INCH, Style, blank, styles, svg_of
from fed.reports.summary import sent_through

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

__all__ = [
    "Curve",
    "against_time",
    "by_round",
    "curve_of",
    "curves",
    "differ_by_way",
    "distribution",
    "short_labels",
]

_LABEL_WIDTH = 32
_NARROW_PANEL_INCH = 2.7
# An axis is logarithmic where the longest line ends at more than so many times the end of the shortest.
_LOGARITHMIC_TIME = 8
_LOGARITHMIC_BYTES = 1.2
_MOST_STEPS = 400
_LABELLED = ((1.5, math.log10(2), (1, 2, 5)), (3.0, math.log10(3), (1, 3)))
"""Decades of a logarithmic axis below which more than powers of ten are labelled, the labels' least gap, and which."""
_SIZE_EM = 5.5
_NUMBER_EM = 3.0
"""Widths of a label, such as ``12.5 MB`` or ``0.05``, with the space to the next."""
_UNITS_OF_TIME = ((86_400.0, "days"), (3_600.0, "h"), (60.0, "min"))


@dataclass(frozen=True)
class Curve:
    """Values of a measure at the evaluated rounds, and their spread over seeds.

    Args:
        rounds: numbers of the evaluated rounds, those that every run measured.
        bytes_up: bytes that clients have sent through each round; the mean over runs.
        bytes_down: bytes that were sent to clients through each round; the mean over runs.
        virtual_s: simulated time at each round's end, in seconds; the mean over runs.
        mean: mean of the measure over runs, for each round.
        deviation: sample standard deviation over runs for each round; 0 for a single run.
    """

    rounds: NDArray[np.float64]
    bytes_up: NDArray[np.float64]
    bytes_down: NDArray[np.float64]
    virtual_s: NDArray[np.float64]
    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]

    @property
    def size_bytes(self) -> NDArray[np.float64]:
        """Bytes through each round that all clients sent and received; a message between peers counts at both ends."""
        return self.bytes_up + self.bytes_down


def curve_of(metrics_of_runs: Sequence[Sequence[Mapping[str, Any]]], measure: str) -> Curve | None:
    """The curve of one variant's runs.

    Args:
        metrics_of_runs: lines of each run, one a round.
        measure: key to draw. Where lines hold the deviation of ``X_mean`` as ``X_std``, the curve has its mean over
            runs in place of the deviation over runs.

    Returns:
        None where no round was measured by all runs.
    """
    measured = [{line["round"]: line for line in run if line.get(measure) is not None} for run in metrics_of_runs]
    # A mean over other runs in each round would jump where a run is missing.
    rounds = sorted(set.intersection(*map(set, measured))) if measured else []
    if not rounds:
        return None
    values = np.array([[run[number][measure] for number in rounds] for run in measured], np.float64)
    sent = np.array(
        [
            [[sent_through(number, run, [way]) for number in rounds] for run in metrics_of_runs]
            for way in ("up", "down")
        ],
        np.float64,
    )
    deviation = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(len(rounds))
    within = f"{measure.removesuffix('_mean')}_std"
    if any(within in line for run in measured for line in run.values()):
        # The spread over clients is what such a curve is about, not that of its mean over seeds.
        deviation = np.mean([[run[number].get(within) or 0.0 for number in rounds] for run in measured], axis=0)
    time_s = np.array([[run[number]["virtual_s"] for number in rounds] for run in measured], np.float64)
    up, down = sent.mean(axis=1)
    return Curve(
        rounds=np.array(rounds, np.float64),
        bytes_up=up,
        bytes_down=down,
        virtual_s=time_s.mean(axis=0),
        mean=values.mean(axis=0),
        deviation=deviation,
    )


def curves(
    lines: Mapping[str, Curve],
    look: Mapping[str, Style],
    *,
    label: str,
    target: float | None = None,
    by_way: bool = False,
    width_inch: float = WIDTH_INCH,
) -> str:
    """Two panels, against rounds and against bytes; an algorithm that sends no bytes is a level line in the second.

    Args:
        lines: name → its curve. More than one are named beneath the panels.
        look: name → its style.
        label: label of the vertical axis.
        target: level to mark, or None.
        by_way: True for panels against the bytes that clients send, and against those that they are sent.
        width_inch: width of the picture; panels of a narrow one stand below each other.
    """

    def draw(figure: "Figure") -> list["Line2D"]:
        left, right = _two_panels(figure, width_inch)
        if by_way:
            handles = _bytes_axis(left, lines, look, "bytes_up", "bytes sent by all clients")
            _bytes_axis(right, lines, look, "bytes_down", "bytes received by all clients")
        else:
            handles = [_line(left, curve.rounds, curve, look[name], name, len(lines)) for name, curve in lines.items()]
            _rounds_axis(left)
            _bytes_axis(right, lines, look, "size_bytes", "bytes sent and received by all")
        left.set_ylabel(label)
        _mark_target(left, target)
        _mark_target(right, target, is_named=True)
        return handles

    return _with_names(list(lines), 3.9, draw, width_inch, panels=2)


def differ_by_way(lines: Iterable[Curve]) -> bool:
    """True if some variant sends much more in one direction, so that the sum of both hides the directions."""
    return any(_lie_apart([curve.bytes_up[-1], curve.bytes_down[-1]], 1.5) for curve in lines)


def against_time(
    lines: Mapping[str, Curve],
    look: Mapping[str, Style],
    *,
    label: str,
    target: float | None = None,
    width_inch: float = WIDTH_INCH,
) -> str:
    """One panel, against simulated time.

    Args:
        lines: name → its curve. More than one are named beneath the panel.
        look: name → its style.
        label: label of the vertical axis.
        target: level to mark, or None.
        width_inch: width of the picture; panels of a narrow one stand below each other.
    """
    ends_s = [float(curve.virtual_s[-1]) for curve in lines.values()]
    unit_s, unit = next(((size_s, name) for size_s, name in _UNITS_OF_TIME if max(ends_s) >= 2 * size_s), (1.0, "s"))

    def draw(figure: "Figure") -> list["Line2D"]:
        axes = figure.subplots()
        handles = [
            _line(axes, curve.virtual_s / unit_s, curve, look[name], name, len(lines)) for name, curve in lines.items()
        ]
        if _lie_apart(ends_s, _LOGARITHMIC_TIME):
            # A logarithmic axis has no place for a time of 0.
            first_s = min(float(curve.virtual_s[curve.virtual_s > 0][0]) for curve in lines.values())
            _logarithmic(axes, first_s / unit_s, max(ends_s) / unit_s, label_em=_NUMBER_EM)
            axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel(f"simulated time, {unit}")
        axes.set_ylabel(label)
        _mark_target(axes, target, is_named=True)
        return handles

    return _with_names(list(lines), 3.6, draw, width_inch)


def distribution(
    values: Mapping[str, NDArray[np.float64]],
    look: Mapping[str, Style],
    *,
    label: str,
    width_inch: float = WIDTH_INCH,
) -> str:
    """The share of clients whose value is at most x, as steps.

    Args:
        values: name → a finite value of each client. More than one name stand beneath the panel.
        look: name → its style.
        label: label of the horizontal axis.
        width_inch: width of the picture.
    """

    def draw(figure: "Figure") -> list["Line2D"]:
        axes = figure.subplots()
        handles = []
        for name, of_clients in values.items():
            x = np.sort(of_clients)
            if len(x) > _MOST_STEPS:  # a page with a step for each of a million clients would not open
                x = x[np.linspace(0, len(x) - 1, _MOST_STEPS).round().astype(int)]
            shares = np.arange(len(x) + 1) / len(x)
            style = look[name].line
            handles += axes.plot([x[0], *x], shares, drawstyle="steps-post", linewidth=1.7, label=name, **style)
        axes.set_xlabel(label)
        axes.set_ylabel("share of clients")
        axes.set_ylim(0, 1.02)
        return handles

    return _with_names(list(values), 3.6, draw, width_inch)


def _two_panels(figure: "Figure", width_inch: float) -> Sequence["Axes"]:
    """Two panels with one vertical axis: beside each other, or below each other in a narrow picture."""
    rows = 2 if width_inch <= NARROW_INCH else 1
    return cast("Sequence[Axes]", figure.subplots(rows, 2 // rows, sharey=True))


def _with_names(
    names: Sequence[str],
    height_inch: float,
    draw: "Callable[[Figure], list[Line2D]]",
    width_inch: float,
    panels: int = 1,
) -> str:
    """A picture of lines, named beneath it where there are more than one.

    Args:
        names: names of the lines.
        height_inch: height of the picture at full width, without the names.
        draw: function that draws the lines.
        width_inch: width of the picture.
        panels: number of panels, which stand below each other in a narrow picture.
    """
    labels = short_labels(names)
    # The widest label, beside its line and the space between columns.
    label_em = 0.62 * max(map(cell_len, labels)) + 3.2 + 0.8 + 1.8
    columns = max(1, min(4, len(names), int(width_inch / EM_INCH / label_em)))
    rows = -(-len(names) // columns) if len(names) > 1 else 0
    if width_inch <= NARROW_INCH:
        height_inch = _NARROW_PANEL_INCH * panels
    with blank(width_inch, height_inch + 0.2 * rows) as figure:
        handles = draw(figure)
        if rows:
            beneath: dict[str, Any] = {"loc": "outside lower center", "ncols": columns, "columnspacing": 1.8}
            figure.legend(handles, labels, frameon=False, handlelength=3.2, **beneath)
        return svg_of(figure)


def short_labels(names: Sequence[str]) -> list[str]:
    """Names of at most 32 cells, shortened by an ellipsis; those that then are alike are numbered.

    Example:
        >>> short_labels(["FedAvg", "local.lr=0.1, local.batch_size=16, local.epochs=1"])
        ['FedAvg', 'local.lr=0.1, local.batch_size=…']
        >>> short_labels(["local.lr=0.1, local.batch_size=16, " + end for end in ("a", "b")])
        ['1: local.lr=0.1, local.batch_si…', '2: local.lr=0.1, local.batch_si…']
    """
    labels = [_within(name, _LABEL_WIDTH) for name in names]
    # Two long names may be shortened to the same text.
    if len(set(labels)) < len(labels):
        labels = [_within(f"{number}: {name}", _LABEL_WIDTH) for number, name in enumerate(names, 1)]
    return labels


def _within(name: str, most: int) -> str:
    return name if cell_len(name) <= most else chop_cells(name, most - 1)[0] + "…"


def by_round(panels: Mapping[str, Mapping[str, Curve]], width_inch: float = WIDTH_INCH) -> str:
    """Charts of a single run, round by round.

    Args:
        panels: label of a panel's vertical axis → name of a line → its curve. All panels share their styles in order.
        width_inch: width of the picture; panels of a narrow one stand below each other.
    """
    is_narrow = width_inch <= NARROW_INCH
    height_inch = _NARROW_PANEL_INCH * len(panels) if is_narrow else 3.6
    with blank(width_inch, height_inch) as figure:
        rows = len(panels) if is_narrow else 1
        all_axes = figure.subplots(rows, len(panels) // rows, squeeze=False).flat
        for axes, (label, lines) in zip(all_axes, panels.items(), strict=True):
            look = styles(dict.fromkeys(lines, ""))
            handles = [_line(axes, curve.rounds, curve, look[name], name, len(lines)) for name, curve in lines.items()]
            axes.legend(handles, list(lines), frameon=False, handlelength=3.2)
            axes.set_ylabel(label)
            _rounds_axis(axes)
        return svg_of(figure)


def _rounds_axis(axes: "Axes") -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))


def _lie_apart(ends: Sequence[float], factor: float) -> bool:
    """True if lines end so far apart."""
    return max(ends) > factor * min(ends) > 0


def _room_em(axes: "Axes") -> float:
    """Width of a panel before its margins are known, in sizes of a letter."""
    figure_inch = cast("Figure", axes.figure).get_figwidth()
    return float(axes.get_position().width * figure_inch / EM_INCH)


def _logarithmic(axes: "Axes", low: float, high: float, *, label_em: float) -> None:
    """A logarithmic axis with labels at powers of ten, and between them where there are few and room is left.

    Args:
        axes: axes whose horizontal one becomes logarithmic.
        low: smallest value, > 0.
        high: largest value.
        label_em: width of a label.
    """
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log")
    axes.set_xlim(low * 0.9, high * 1.1)
    decades = math.log10(high / low)
    room_em = _room_em(axes)
    labelled: tuple[int, ...] = (1,)
    for most, gap, denser in reversed(_LABELLED):
        if decades < most and gap * room_em > label_em * decades:
            labelled = denser
    axes.xaxis.set_major_locator(LogLocator(subs=labelled))
    axes.xaxis.set_minor_formatter("")  # labels of all would overlap


def _mark_target(axes: "Axes", target: float | None, *, is_named: bool = False) -> None:
    if target is None:
        return
    axes.axhline(target, color=INK, linewidth=0.6, alpha=0.55)
    if is_named:  # beside the panel, where no line is
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "xytext": (4, 0), "textcoords": "offset points"}
        axes.annotate(f"target\n{target:g}", (1, target), fontsize=8, color=INK, va="center", **place)


def _line(axes: "Axes", x: NDArray[np.float64], curve: Curve, style: Style, name: str, among: int) -> "Line2D":
    # A single point makes no line: it is drawn as a dot.
    (line,) = axes.plot(x, curve.mean, linewidth=1.7, marker="o" if len(x) == 1 else "", label=name, **style.line)
    if curve.deviation.any():
        low = curve.mean - curve.deviation
        high = curve.mean + curve.deviation
        opacity = min(0.14, 0.6 / among)  # bands of many lines overlap
        axes.fill_between(x, low, high, color=style.colour, alpha=opacity, linewidth=0)
    return line


def _bytes_axis(
    axes: "Axes",
    lines: Mapping[str, Curve],
    look: Mapping[str, Style],
    which: Literal["size_bytes", "bytes_up", "bytes_down"],
    label: str,
) -> list["Line2D"]:
    """Lines against bytes, each with a dot at its end; those that send none are level."""
    from matplotlib.ticker import MaxNLocator

    handles = []
    sent = {name: getattr(curve, which) for name, curve in lines.items()}
    for name, curve in lines.items():
        if sent[name][-1] > 0:
            handles.append(_line(axes, sent[name], curve, look[name], name, len(lines)))
            axes.plot(sent[name][-1], curve.mean[-1], "o", markersize=4, color=look[name].colour)
        else:
            handles.append(axes.axhline(curve.mean[-1], linewidth=1.1, label=name, **look[name].line))
    totals = [float(of[-1]) for of in sent.values() if of[-1] > 0]
    if totals and _lie_apart(totals, _LOGARITHMIC_BYTES):
        first = min(float(of[of > 0][0]) for of in sent.values() if of[-1] > 0)
        _logarithmic(axes, first, max(totals), label_em=_SIZE_EM)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(int(_room_em(axes) / _SIZE_EM), steps=[1, 2, 2.5, 5, 10]))
    # The margin of an axis may reach below 0, where no size is.
    axes.xaxis.set_major_formatter(lambda size, _: bytes_text(size) if size >= 0 else "")
    axes.set_xlabel(label if totals else f"{label}: none")
    return handles
