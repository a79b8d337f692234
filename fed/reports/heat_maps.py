"""Heat maps as SVG: each client's samples by class, and the confusion matrix of a classification.

Shapes: see :mod:`fed.layout`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fed.reports.plot_style import INK, WIDTH_INCH, blank, see_through, svg_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["confusion", "partition"]

_MOST_NUMBERS = 20
"""The most classes whose counts are written into the cells of a confusion matrix."""


def partition(ids: Sequence[object], counts_KC: NDArray[np.int64]) -> str:
    """Samples of each client: above in total, and below by class where there is more than one.

    Args:
        ids: the clients', K of them.
        counts_KC: how many samples of each class each client holds.
    """
    clients, classes = counts_KC.shape
    height = min(4.0, max(1.2, 0.22 * classes)) if classes > 1 else 0.0
    with blank(WIDTH_INCH, 1.8 + height) as figure:
        panels = figure.subplots(
            1 + (classes > 1), 1, sharex=True, squeeze=False, height_ratios=(1, height)[: 1 + (classes > 1)]
        )
        totals, last = panels[0, 0], panels[-1, 0]
        # one outline, however many
        totals.stairs(counts_KC.sum(axis=1), np.arange(clients + 1) - 0.5, fill=True, color=INK, alpha=0.5)
        totals.set_ylabel("samples")
        totals.set_ylim(bottom=0)
        if classes > 1:
            _cells(figure, last, counts_KC)
        last.set_xlabel("client")
        last.set_xlim(-0.5, clients - 0.5)
        _ticks(last.xaxis, ids, 25)
        return svg_of(figure, dpi=200)


def _cells(figure: "Figure", axes: "Axes", counts_KC: NDArray[np.int64]) -> None:
    from matplotlib.ticker import MaxNLocator

    client_edges, class_edges = (np.arange(length + 1) - 0.5 for length in counts_KC.shape)
    # Beyond a thousand cells or so a picture within the picture is the smaller one.
    colours = {"cmap": see_through(), "vmin": 0, "rasterized": counts_KC.size > 1500}
    axes.grid(visible=False)
    mesh = axes.pcolormesh(client_edges, class_edges, counts_KC.T, **colours)
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


def confusion(counts_CC: NDArray[np.int64], names: Sequence[object]) -> str:
    """Test samples by true class (a row) and predicted class (a column), shaded by the share of the true class.

    Args:
        counts_CC: the samples of each true class that the model takes for each class.
        names: the classes'.
    """
    classes = len(counts_CC)
    shares_CC = counts_CC / np.maximum(counts_CC.sum(axis=1, keepdims=True), 1)
    edges = np.arange(classes + 1) - 0.5
    size_inch = min(6.4, max(2.4, 0.34 * classes))
    with blank(size_inch + 1.8, size_inch + 0.5) as figure:
        axes = figure.subplots()
        axes.grid(visible=False)
        colours = {"cmap": see_through(), "vmin": 0, "vmax": 1, "rasterized": counts_CC.size > 1500}
        mesh = axes.pcolormesh(edges, edges, shares_CC, **colours)
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
        scale = figure.colorbar(mesh, ax=axes, pad=0.02, aspect=30)
        scale.set_label("share of the true class")
        scale.outline.set_visible(False)
        return svg_of(figure, dpi=200)
