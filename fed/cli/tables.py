"""``fed data``: the clients' samples by class; and the console for tables."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fed.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import Console

    from fed.clients.data import FederatedData
    from fed.config.comparison import Comparison
    from fed.config.experiment import Experiment

__all__ = ["console", "data"]

_WIDE = 160
"""Columns where standard output is no terminal: a line of a table stays a line."""


def console() -> "Console":
    """Standard output, for tables."""
    from rich.console import Console

    is_file = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, width=_WIDE if is_file else None)


def data(document: "Experiment | Comparison", picture: Path | None) -> None:
    """Print and draw each client's samples by class; of a comparison, those of its base."""
    from fed.clients.data import load
    from fed.clients.data.describe import heat_map
    from fed.config.experiment import Experiment
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
    from fed.reports import charts

    try:
        picture.write_text(charts.for_file(charts.partition(*class_counts(dealt))), encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"--picture {picture} cannot be written ({error.strerror})") from None
