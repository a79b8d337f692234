"""Pictures of graphs of peers."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import networkx as nx

from fed.reports.plot_style import INK, blank, for_file, svg_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["picture", "write"]

_SIDE_INCH = 4.8
_SPREAD = 100  # peers; more of them stand in a circle
_NAMED = 64
_DPI = 200


def picture(graph: "nx.Graph[Any]") -> str:
    """The graph of a round as SVG.

    Args:
        graph: graph of the nodes 0 … n − 1, or of names; a directed one is drawn with arrows from sender to receiver.
    """
    with blank(_SIDE_INCH, _SIDE_INCH) as figure:
        _draw(figure, graph)
        return svg_of(figure, dpi=_DPI)


def write(graph: "nx.Graph[Any]", path: Path) -> None:
    """Write the picture of a graph to a file, of the type that its name ends with.

    Raises:
        OSError: if it cannot be written.
    """
    if path.suffix.lower() == ".svg":
        path.write_text(for_file(picture(graph)), encoding="utf-8")
        return
    with blank(_SIDE_INCH, _SIDE_INCH) as figure:
        # An SVG is drawn on the page around it; other formats need a ground of their own.
        figure.patch.set(facecolor="white", alpha=1)
        _draw(figure, graph)
        figure.savefig(path, dpi=_DPI)


def _draw(figure: "Figure", graph: "nx.Graph[Any]") -> None:
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_aspect("equal")
    undirected = graph.to_undirected()
    # The layout by distances takes time cubic in the peers, and needs all of them connected.
    near_each_other = 2 < len(graph) <= _SPREAD and nx.is_connected(undirected)
    places = nx.kamada_kawai_layout(undirected, weight=None) if near_each_other else nx.circular_layout(undirected)
    is_named = len(graph) <= _NAMED
    size = 120 if is_named else 12
    nx.draw_networkx_edges(graph, places, ax=axes, node_size=size, edge_color=INK, alpha=0.45, width=0.7)
    nx.draw_networkx_nodes(graph, places, ax=axes, node_size=size, node_color="#0072b2", linewidths=0)
    if is_named:
        nx.draw_networkx_labels(graph, places, ax=axes, font_size=6, font_color="#ffffff")
