"""``fed topology``: the list of graphs of peers, and one of them drawn, with its facts."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fed.cli.documents import changes
from fed.cli.kinds import WHAT, cited, section_of, show_all, show_facts
from fed.cli.tables import console
from fed.config.docstrings import summary
from fed.errors import FedError, InvalidInput, os_errors_as

if TYPE_CHECKING:
    from fed.config.sections import TopologySection
    from fed.topology import Facts, Topology

__all__ = ["topology"]

_LISTED = 16
_DRAWN = 40  # peers, two columns each
_ROUNDS = 9  # a digit each
_PICTURES = (".svg", ".png", ".pdf")


def topology(
    kind: Annotated[str | None, typer.Argument(help="The kind to draw; without it all kinds are listed.")] = None,
    peers: Annotated[int | None, typer.Argument(help="Number of peers.", min=1)] = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="A key of the section topology, such as weights=uniform, or the experiment's seed. Repeatable.",
        ),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw it into this file as well, as SVG, PNG or PDF.", metavar="FILE")
    ] = None,
) -> None:
    """List the graphs of peers, or draw one, with degree, diameter, spectral gap and rounds to consensus."""
    if kind is None:
        return _list()
    if peers is None:
        raise typer.BadParameter(f"must be given, as in fed topology {kind} 16", param_hint="PEERS")
    if picture is not None and picture.suffix.lower() not in _PICTURES:
        raise InvalidInput(f"--picture {picture} must end in .svg, .png or .pdf: give another name")
    section, made = _made(kind, peers, settings or [])
    if picture is not None:
        _draw(made, picture)  # first: the reader of what is printed may leave before its end, as head does
    out = console()
    out.print(f"{kind}: {cited(summary(section.target))[0]}", markup=False)
    if peers <= _DRAWN:
        out.print()
        for line in _sketch(made, peers):
            out.print(line, markup=False, no_wrap=True, overflow="ignore", crop=False)
    out.print()
    show_facts(_told(_facts_of(made), made))
    return None


def _draw(made: "Topology", picture: Path) -> None:
    from fed.reports.graphs import write

    with os_errors_as(InvalidInput, f"--picture {picture} cannot be written", "give another file"):
        write(made.graph(1), picture)


def _list() -> None:
    from fed.config.registry import TOPOLOGIES

    def cells(kind: str, what: str, paper: str) -> list[str]:
        try:
            figures = _figures(_facts_of(_made(kind, _LISTED, [])[1]))
        except InvalidInput:  # it needs keys
            figures = ["–"] * 4
        return [*figures, what]

    notes = (
        f"degree to rounds: of {_LISTED} peers, at the defaults",
        "rounds: until the disagreement is a thousandth of what it was",
        "fed topology KIND PEERS draws one of them",
    )
    show_all(TOPOLOGIES, ("degree", "diameter", "ρ", "rounds", WHAT), cells, notes)


def _made(kind: str, peers: int, settings: list[str]) -> "tuple[TopologySection, Topology]":
    """The section and the graphs of a kind.

    Raises:
        InvalidInput: if there is no such kind, a key is wrong, or it makes no graph for these peers.
    """
    from fed.config.registry import TOPOLOGIES
    from fed.topology import Topology
    from fed.vectors.randomness import Streams

    keys = changes(settings, "KEY=VALUE")
    seed = keys.pop("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise InvalidInput(f"seed must be a whole number from 0, got {seed!r}")
    section = section_of(TOPOLOGIES, {**keys, "kind": kind})
    try:
        made = Topology(
            make=section.make,
            kind=section.target,
            peers=peers,
            streams=Streams(seed),
            weights=section.weights,
            lazy=section.lazy,
        )
    # It is a sentence for the user already.
    except FedError:
        raise
    except Exception as error:  # whatever a user's function raises
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise InvalidInput(f"{kind} must make a graph of {peers} peers, got {problem}: correct it") from error
    return section, made


def _sketch(made: "Topology", peers: int) -> Iterator[str]:
    """Adjacency: a row for each sender, and where graphs change the first round of each pair."""
    firsts: dict[tuple[int, int], int] = {}
    # From the last round back, so that the first one stays.
    for number in range(_ROUNDS if made.changes else 1, 0, -1):
        graph = made.graph(number)
        pairs = [*graph.edges()] if graph.is_directed() else [*graph.edges(), *((j, i) for i, j in graph.edges())]
        firsts |= dict.fromkeys(pairs, number)
    tens = "".join(f"{peer // 10 or '':>2}" if peer % 10 == 0 else "  " for peer in range(peers))
    if peers > 10:
        yield "   " + tens
    yield "   " + "".join(f" {peer % 10}" for peer in range(peers))
    for row in range(peers):
        marks = [_mark(firsts.get((row, peer)), made.changes) if peer != row else "" for peer in range(peers)]
        yield f"{row:>3}" + "".join(f"{mark:>2}" for mark in marks)
    if made.changes:
        yield f"the first of {_ROUNDS} rounds in which a row's peer sends to a column's"


def _mark(first: int | None, changes: bool) -> str:
    if first is None:
        return "·"
    return str(first) if changes else "●"


def _facts_of(made: "Topology") -> "Facts":
    from fed.topology import facts

    return facts(made.graph, made.matrix, changes=made.changes)


def _figures(found: "Facts") -> list[str]:
    least = found.least_degree
    most = found.most_degree
    rounds = found.rounds_to_consensus
    return [
        str(least) if least == most else f"{least} to {most}",
        "–" if found.diameter is None else str(found.diameter),
        f"{found.contraction:.4g}",
        "never" if rounds == float("inf") else f"{rounds:.0f}",
    ]


def _told(found: "Facts", made: "Topology") -> Iterator[tuple[str, str]]:
    """Names and texts of the facts."""
    degree, diameter, rho, rounds = _figures(found)
    from fed.topology.facts import ROUNDS_MEASURED

    changing = f", over {ROUNDS_MEASURED} rounds" if made.changes else ""
    yield "degree", f"{degree}{' receivers' if made.is_directed else ' neighbours'}{changing}"
    yield "diameter", f"{diameter} hops" if found.diameter is not None else "– (no single round connects all)"
    yield "ρ", f"{rho}, by which a round of mixing shrinks the disagreement{changing}"
    yield "spectral gap", f"{found.gap:.4g}"
    exact = found.exact_after is not None
    yield "rounds to consensus", f"{rounds}, exactly" if exact else f"{rounds}, to a thousandth of the disagreement"
    is_kept = "keep the peers' mean" if made.keeps_mean else "do not keep the peers' mean: algorithm sgp corrects it"
    yield "weights", is_kept
