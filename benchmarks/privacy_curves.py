"""Accuracy against ε by kind of privacy: a table and a picture."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from compared import Compared, markdown, mean_of
from matplotlib.ticker import NullFormatter

from fed.quantities import count_text
from fed.reports.plot_style import INK, WIDTH_INCH, blank, for_file, styles, svg_of
from fed.reports.summary import spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["privacy", "privacy_picture"]

DATA: Mapping[str, str] = {"privacy": "digits", "privacy_mnist": "MNIST"}
"""Name of a comparison → what it calls its data."""
WITHOUT = "without privacy"
ACCURACY = mean_of("final_test_accuracy")


class Point(NamedTuple):
    """Variant of a kind of privacy.

    Args:
        kind: kind of privacy.
        epsilon: ε of its runs.
        name: name of the variant.
    """

    kind: str
    epsilon: float
    name: str


def privacy(digits: Compared, mnist: Compared) -> str:
    """Accuracies by data and kind, a column for each ε."""
    found = dict(zip(DATA.values(), (digits, mnist), strict=True))
    epsilons = sorted({point.epsilon for of in found.values() for point in _points(of)})
    rows = []
    for data, compared in found.items():
        by_kind: dict[str, dict[float, str]] = {}
        for point in _points(compared):
            by_kind.setdefault(point.kind, {})[point.epsilon] = ACCURACY(compared.rows[point.name])
        for kind, texts in by_kind.items():
            rows.append([f"{data}, `{kind}`", *(texts.get(epsilon, "–") for epsilon in epsilons), "–"])
        rows.append([f"{data}, {WITHOUT}", *("–" for _ in epsilons), ACCURACY(compared.rows[WITHOUT])])
    return markdown(["test accuracy", *(f"ε = {count_text(epsilon)}" for epsilon in epsilons), "ε = ∞"], rows)


def privacy_picture(digits: Compared, mnist: Compared) -> str:
    """Accuracy against ε as SVG, a panel for each data set; bars are standard deviations over seeds."""
    with blank(WIDTH_INCH, 3.6) as figure:
        panels = figure.subplots(1, 2, sharey=True)
        for axes, data, found in zip(panels, DATA.values(), (digits, mnist), strict=True):
            _draw(axes, found)
            axes.set_title(data, fontsize="medium", color=INK)
        panels[0].set_ylabel("test accuracy")
        handles, labels = panels[0].get_legend_handles_labels()
        beneath = {"loc": "outside lower center", "ncols": len(labels)}
        figure.legend(handles, labels, frameon=False, handlelength=3.2, **beneath)
        return for_file(svg_of(figure))


def _draw(axes: "Axes", found: Compared) -> None:
    """Curves of the kinds, and a level line of the runs without privacy."""
    points = _points(found)
    looks = styles({point.kind: point.kind for point in points if point.kind != "local"} | {"local": ""})
    for kind, look in looks.items():
        of_kind = [point for point in points if point.kind == kind]
        accuracies = [spread(found.finals(point.name, "final_test_accuracy")) for point in of_kind]
        axes.errorbar(
            [point.epsilon for point in of_kind],
            [mean for mean, _ in accuracies],
            yerr=[deviation or 0.0 for _, deviation in accuracies],
            label=kind,
            marker="o",
            markersize=3,
            linewidth=1.5,
            elinewidth=0.8,
            **look.line,
        )
    best, _ = spread(found.finals(WITHOUT, "final_test_accuracy"))
    axes.axhline(best, color=INK, linewidth=1, linestyle=(0, (6, 2)), label=WITHOUT)
    axes.set_xscale("log")
    ticks = sorted({point.epsilon for point in points})
    axes.set_xticks(ticks, [count_text(tick) for tick in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("ε of the run")


def _points(found: Compared) -> list[Point]:
    """Variants with privacy, in their order."""
    matches = [(name, re.fullmatch(r"(\w+), ε = ([\d.]+)", name)) for name in found.rows]
    return [Point(named[1], float(named[2]), name) for name, named in matches if named]
