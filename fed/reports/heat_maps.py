"""Heat maps as SVG: each client's samples by class, and the confusion matrix of a classification.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fed.reports.plot_style import INK, WIDTH_INCH, Cells, blank, see_through, svg_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["confusion", "partition"]

_MOST_NUMBERS = 20
"""Largest number of classes for which counts are written into the cells of a confusion matrix."""


def partition(ids: Sequence[object], counts_KC: NDArray[np.int64], width_inch: float = WIDTH_INCH) -> str:
    """Samples of each client: above in total, and below by class where there is more than one.

    Args:
        ids: ids of K clients.
        counts_KC: number of samples of each class that each client holds.
        width_inch: width of the picture.
    """
    from matplotlib.ticker import MaxNLocator

    clients, classes = counts_KC.shape
    height = min(4.0, max(1.2, 0.22 * classes)) if classes > 1 else 0.0
    with blank(width_inch, 1.8 + height) as figure:
        panels = figure.subplots(
            1 + (classes > 1), 1, sharex=True, squeeze=False, height_ratios=(1, height)[: 1 + (classes > 1)]
        )
        totals = panels[0, 0]
        last = panels[-1, 0]
        # One outline, however many.
        totals.stairs(counts_KC.sum(axis=1), np.arange(clients + 1) - 0.5, fill=True, color=INK, alpha=0.5)
        totals.set_ylabel("samples")
        totals.set_ylim(bottom=0)
        if classes > 1:
            ticks = MaxNLocator(6, integer=True)
            _shade(last, counts_KC.T, "samples of a class", ax=figure.axes, pad=0.01, ticks=ticks)
            last.set_ylabel("class")
            _ticks(last.yaxis, range(classes), 12)
        last.set_xlabel("client")
        last.set_xlim(-0.5, clients - 0.5)
        _ticks(last.xaxis, ids, int(2.6 * width_inch))
        cells = [Cells(totals, ["all"], ids, counts_KC.sum(axis=1)[None], ("client", "", "samples"))]
        if classes > 1:
            cells.append(Cells(last, range(classes), ids, counts_KC.T, ("client", "class", "samples")))
        return svg_of(figure, cells, dpi=200)


def _shade(axes: "Axes", values: NDArray[Any], label: str, *, highest: float | None = None, **scale_keys: Any) -> None:
    """Shade the cells of a matrix and draw the scale.

    Args:
        axes: axes to draw into; rows are along the vertical axis.
        values: value of each cell, ≥ 0.
        label: label of the scale.
        highest: value of the darkest shade; the largest of ``values`` unless given.
        scale_keys: further arguments of matplotlib's ``colorbar``.
    """
    edges = (np.arange(length + 1) - 0.5 for length in reversed(values.shape))
    # Beyond a thousand cells or so a picture within the picture is the smaller one.
    is_picture = values.size > 1500
    axes.grid(visible=False)
    mesh = axes.pcolormesh(*edges, values, cmap=see_through(), vmin=0, vmax=highest, rasterized=is_picture)
    scale = axes.figure.colorbar(mesh, aspect=30, **scale_keys)
    scale.set_label(label)
    scale.outline.set_visible(False)


def _ticks(axis: Any, names: Sequence[object], most: int) -> None:
    # Every so many-th name: more would overlap.
    step = -(-len(names) // most)
    places = range(0, len(names), step)
    axis.set_ticks(list(places), [str(names[place])[:12] for place in places])
    if any(len(str(names[place])) > 3 for place in places) and axis.axis_name == "x":
        axis.set_tick_params(rotation=60)


def confusion(counts_CC: NDArray[np.int64], names: Sequence[object], width_inch: float = WIDTH_INCH) -> str:
    """Test samples by true class (a row) and predicted class (a column), shaded by the share of the true class.

    Args:
        counts_CC: number of samples of each true class (a row) that the model takes for each class (a column).
        names: names of the classes.
        width_inch: largest width of the picture.
    """
    classes = len(counts_CC)
    # A class without test samples has a row of zeros, not of 0/0.
    shares_CC = counts_CC / np.maximum(counts_CC.sum(axis=1, keepdims=True), 1)
    size_inch = min(6.4, width_inch - 1.2, max(2.4, 0.34 * classes))
    with blank(min(size_inch + 1.8, width_inch), size_inch + 0.5) as figure:
        axes = figure.subplots()
        # Shares, so that rare classes are as dark as frequent ones; 1 at most, so that two runs compare.
        _shade(axes, shares_CC, "share of the true class", highest=1, ax=axes, pad=0.02)
        axes.set_aspect("equal")
        axes.invert_yaxis()
        axes.set_xlabel("predicted class")
        axes.set_ylabel("true class")
        for axis in (axes.xaxis, axes.yaxis):
            _ticks(axis, names, 25)
        if classes <= _MOST_NUMBERS:
            for (row, column), count in np.ndenumerate(counts_CC):
                if count:
                    axes.text(column, row, str(count), ha="center", va="center", fontsize=7)
        labels = ("predicted class", "true class", "test samples")
        return svg_of(figure, [Cells(axes, names, names, counts_CC, labels)], dpi=200)
