"""Description of each client's samples: numbers, and a picture for the terminal.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fed.clients.data.federated import FederatedData
from fed.clients.data.held import SamplesOnDemand, labels_of, size_of
from fed.clients.data.samples import ClientId
from fed.reports.population import Partition
from fed.vectors.tensors import Tensor
from fed.vectors.trees import Tree

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["class_counts", "heat_map", "looked_at", "partition_of"]

_MOST_CLASSES = 10_000
# To read a client on demand may take a file, or a drawing of its samples.
_MOST_READ = 200
_MOST_ROWS = 30  # of the picture, and its columns of classes: a terminal shows both without scrolling
_MOST_COLUMNS = 10
_MOST_LETTERS = 52  # of all names of classes, beside the columns of clients and of samples
_SHADES = ("dim", "white on grey23", "white on grey39", "black on grey58", "black on grey85")


def looked_at(data: FederatedData) -> list[ClientId]:
    """Clients that a description covers: all, but of data on demand at most 200, evenly spaced.

    Example:
        >>> import torch
        >>> from fed.clients.data import ClientsOnDemand
        >>> pair = (torch.zeros(1, 2), torch.zeros(1))
        >>> clients = looked_at(FederatedData(ClientsOnDemand(range(1_000_000), lambda client: pair)))
        >>> len(clients), clients[:2], clients[-1]
        (200, [0, 5025], 999999)
    """
    return [data.clients[at] for at in _spaced(len(data.clients), _MOST_READ if data.is_on_demand else None)]


def class_counts(data: FederatedData) -> tuple[list[ClientId], NDArray[np.int64]]:
    """Number of samples by class of every client that is :func:`looked_at`.

    Returns:
        Client ids, and counts [K, C]. Where targets are not one label a sample, or there are more than 10,000 classes,
        counts are [K, 1]: each client's number of samples.

    Example:
        >>> import torch
        >>> x = torch.zeros(3, 2)
        >>> data = FederatedData({"a": (x, torch.tensor([0, 1, 1])), "b": (x, torch.tensor([2, 2, 2]))})
        >>> class_counts(data)
        (['a', 'b'], array([[1, 2, 0],
               [0, 0, 3]]))
    """
    clients = looked_at(data)
    held = [data.read(client) for client in clients]
    # To count labels would read every sample on demand.
    labels = [None if isinstance(samples, SamplesOnDemand) else _one_label_each(samples[1]) for samples in held]
    known = [values for values in labels if values is not None]
    classes = _classes(data, known) if len(known) == len(held) else None
    if classes is None:
        return clients, np.array([[size_of(samples)] for samples in held], dtype=np.int64)
    counts = [np.bincount(values.long().cpu().numpy(), minlength=classes) for values in known]
    return clients, np.stack(counts).astype(np.int64)


def partition_of(data: FederatedData) -> Partition | None:
    """Partition as reports draw it; None where clients on demand cannot be read."""
    try:
        clients, counts_KC = class_counts(data)
    except Exception:
        if not data.is_on_demand:
            raise
        return None  # the round that trains such a client reports the problem
    return Partition(clients, counts_KC, len(data.clients))


def heat_map(data: FederatedData) -> "Group":
    """Table of clients by classes, the more samples the brighter, of bounded size whatever the data.

    Of more clients some are shown, evenly spaced; of more classes neighbours share a column. The lines beneath say so,
    and add figures of all clients that are :func:`looked_at`.

    Args:
        data: clients with their samples.

    Returns:
        The table and its lines for rich to print, legible in 80 columns and without colours.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    clients, counts_KC = class_counts(data)
    rows = _spaced(len(clients), _MOST_ROWS)
    per_column = -(-counts_KC.shape[1] // _MOST_COLUMNS)
    columns = list(range(0, counts_KC.shape[1], per_column))
    cells_KC = np.add.reduceat(counts_KC, columns, axis=1)
    names = _names_that_fit(data.names.labels, counts_KC.shape[1])
    table = Table(box=None)
    table.add_column("client", no_wrap=True, max_width=16)
    for first in columns if counts_KC.shape[1] > 1 else []:
        heading = Text(names[first] if names else str(first))  # a name may look like markup
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("samples", justify="right", no_wrap=True)
    brightest = int(cells_KC[rows].max())
    for row in rows:
        counts = cells_KC[row].tolist() if counts_KC.shape[1] > 1 else []
        shaded = [Text(_short(count) if count else "·", style=_shade(count, brightest)) for count in counts]
        table.add_row(Text(str(clients[row])), *shaded, _short(int(counts_KC[row].sum())))
    facts = [*_facts(counts_KC, len(data.clients), len(rows), per_column), *_facts_of_tests(data)]
    return Group(table, *(Text(fact, style="dim") for fact in facts))


def _names_that_fit(names: Sequence[str], classes: int) -> Sequence[str]:
    """Names of the classes as headings; none where numbers have to do, in 80 columns."""
    has_all = len(names) == classes <= _MOST_COLUMNS
    width = sum(len(name) + 2 for name in names)
    return names if has_all and width <= _MOST_LETTERS and all(name.isprintable() for name in names) else ()


def _spaced(length: int, most: int | None) -> list[int]:
    """Places of a sequence, at most ``most`` of them, evenly spaced from the first to the last."""
    # Rounding may meet one place twice.
    places: list[int] = np.unique(np.linspace(0, length - 1, min(most or length, length)).astype(int)).tolist()
    return places


def _one_label_each(targets: Tree) -> Tensor | None:
    return labels_of(targets) if isinstance(targets, Tensor) else None


def _classes(data: FederatedData, held: list[Tensor]) -> int | None:
    # With a loss of the user's own, integers need not be labels.
    if held[0].ndim != 1 or any(int(labels.long().min()) < 0 for labels in held):
        return None
    # With the test sets, which may have a class that nobody trains on.
    tests = [labels_of(pair[1]) for _, pair in data.tests() if not isinstance(pair, SamplesOnDemand)]
    labels = [*held, *(values for values in tests if values is not None and values.numel())]
    classes = data.classes if data.classes is not None else 1 + max(int(values.long().max()) for values in labels)
    return classes if classes <= _MOST_CLASSES else None


def _facts(counts_KC: NDArray[np.int64], population: int, rows: int, per_column: int) -> list[str]:
    clients, classes = counts_KC.shape
    facts = [f"looked at: {clients} of {population} clients, evenly spaced"] if clients < population else []
    facts.append(_spread(f"samples of each of {clients} clients", counts_KC.sum(axis=1)))
    if classes > 1:
        facts.append(_spread(f"classes of each, of {classes}", (counts_KC > 0).sum(axis=1)))
    if rows < clients:
        facts.append(f"shown: {rows} of {clients} clients, evenly spaced")
    if per_column > 1:
        facts.append(f"shown: {per_column} classes in a column, which is named by the first")
    return facts


def _facts_of_tests(data: FederatedData) -> list[str]:
    if not isinstance(data.client_tests, dict) or not data.client_tests:
        return []
    sizes_K = np.array([size_of(samples) for samples in data.client_tests.values()])
    return [_spread(f"samples of the own test sets of {len(sizes_K)} of {len(data.clients)} clients", sizes_K)]


def _spread(what: str, values_K: NDArray[np.int64]) -> str:
    return f"{what}: {values_K.min()} to {values_K.max()}, median {np.median(values_K):g}"


def _shade(count: int, brightest: int) -> str:
    return _SHADES[-(-count * (len(_SHADES) - 1) // brightest)]  # rounded up, so that a single sample is seen


def _short(count: int) -> str:
    """A number in at most four characters.

    Example:
        >>> _short(9999), _short(12345), _short(9999999)
        ('9999', '12k', '9M')
    """
    if count >= 10**6:
        return f"{count // 10**6}M"
    return f"{count // 1000}k" if count >= 10**4 else str(count)
