"""Scores of each client in the last round that scored some, as ``clients.jsonl`` of a run's folder keeps them."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fed.errors import InvalidInput, os_errors_as

__all__ = ["ClientScores", "last_client_scores", "pooled"]

ClientScores: TypeAlias = Mapping[str, NDArray[np.float64]]
"""Name of a metric → its finite values, one for each client that has a value."""


def last_client_scores(folder: Path) -> ClientScores:
    """The scores of the last round in a run's folder; none where the folder has no ``clients.jsonl``.

    Raises:
        InvalidInput: if the file cannot be read.
    """
    file = folder / "clients.jsonl"
    lines: list[dict[str, Any]] = []
    if not file.exists():
        return {}
    with os_errors_as(InvalidInput, f"{file} cannot be read", "make it readable"), file.open(encoding="utf-8") as text:
        for line in text:
            if not line.endswith("\n"):
                break  # cut short, as a crash leaves it
            try:
                one = json.loads(line)
                # Only the last round's lines are held: a file may have millions.
                if lines and lines[0]["round"] != one["round"]:
                    lines.clear()
            except (ValueError, TypeError, KeyError):
                raise InvalidInput(
                    f"{file}: each line must be a client's scores, got {line[:40]!r}: restore the file"
                ) from None
            lines.append(one)
    names = dict.fromkeys(name for line in lines for name in line if name not in ("round", "client", "samples"))
    values = {name: [value for line in lines if _is_finite(value := line.get(name))] for name in names}
    return {name: np.array(of, np.float64) for name, of in values.items() if of}


def pooled(folders: Iterable[Path], name: str) -> NDArray[np.float64]:
    """Values of a metric of the clients of several runs.

    Args:
        folders: folders of the runs.
        name: name of the metric.
    """
    found = [scores[name] for scores in map(last_client_scores, folders) if name in scores]
    return np.concatenate(found) if found else np.array([])


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
