"""``fed algorithms`` and ``fed data``: what there is to choose from, and who holds what."""

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fed.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import Console

    from fed.clients.data import FederatedData
    from fed.comparison import Comparison
    from fed.experiment import Experiment

__all__ = ["algorithms", "console", "data"]

_WIDE = 160
"""Columns where standard output is no terminal: a line of a table stays a line."""


def console() -> "Console":
    """Standard output, for tables."""
    from rich.console import Console

    is_file = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, width=_WIDE if is_file else None)


def algorithms() -> None:
    """Print each built-in algorithm: its kind, the primitive it is an equation over, what it does, and its paper."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from fed.docstrings import summary
    from fed.families import ALGORITHMS

    table = Table("kind", "over", "what it does", "paper", box=box.SIMPLE_HEAD, pad_edge=False)
    for kind in ALGORITHMS.builtin:
        target = ALGORITHMS.section(kind).target
        what, paper = _cited(summary(target))
        table.add_row(*(Text(text) for text in (kind, getattr(target, "primitive", None) or "–", what, paper or "–")))
    console().print(table)


def _cited(line: str) -> tuple[str, str]:
    """A sentence, and the paper in parentheses at its end.

    Example:
        >>> _cited("The mean of models (McMahan et al. 2017, 1602.05629).")
        ('The mean of models.', 'McMahan et al. 2017, 1602.05629')
    """
    match = re.fullmatch(r"(?P<what>.*) \((?P<paper>[^()]*\d{4}[^()]*)\)\.", line)
    return (f"{match['what']}.", match["paper"]) if match else (line, "")


def data(document: "Experiment | Comparison", picture: Path | None) -> None:
    """Print and draw who holds what, class by client; of a comparison, what its base deals out."""
    from fed.clients.data import load
    from fed.clients.data.describe import heat_map
    from fed.experiment import Experiment
    from fed.randomness import Streams

    if picture is not None and picture.suffix.lower() != ".svg":
        raise InvalidInput(f"--picture {picture} must end in .svg: pictures are written as SVG alone")
    experiment = document if isinstance(document, Experiment) else Experiment(**document.base)
    if experiment.data is None:
        raise InvalidInput("data: null stands for data given in Python: there is nothing to draw")
    dealt = load(experiment.data, Streams(experiment.seed))
    if picture is not None:
        _draw(dealt, picture)
    console().print(_in_words(dealt), markup=False, soft_wrap=True)
    console().print(heat_map(dealt))


def _in_words(dealt: "FederatedData") -> str:
    from fed.clients.data.describe import looked_at

    clients = looked_at(dealt)
    is_whole = len(clients) == len(dealt.clients)
    trained_on = f"{sum(map(dealt.size_of, clients))} samples" if is_whole else "samples on demand"
    tested_on = len(dealt.test[1]) if dealt.test is not None else "none"
    return f"{len(dealt.clients)} clients, {trained_on} to train on, {tested_on} to test on"


def _draw(dealt: "FederatedData", picture: Path) -> None:
    from fed.clients.data.describe import class_counts
    from fed.simulations import charts

    try:
        picture.write_text(charts.for_file(charts.partition(*class_counts(dealt))), encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"--picture {picture} cannot be written ({error.strerror})") from None
