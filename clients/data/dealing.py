"""``fed.partition``: samples that a program holds, dealt to clients as an experiment's ``data.partition`` does."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike
from pydantic import NonNegativeInt

from fed.clients.data.federated import FederatedData
from fed.clients.data.load import deal, samples_of
from fed.config.document import Document
from fed.config.registry import DataSection
from fed.config.table import TableSection
from fed.errors import InvalidData, InvalidExperiment
from fed.vectors.randomness import Streams

__all__ = ["partition"]


def partition(
    inputs: Any,
    targets: Any = None,
    *,
    kind: str = "iid",
    clients: int | None = None,
    seed: int = 0,
    test_fraction: float = 0.2,
    test: Any = None,
    columns: Mapping[str, ArrayLike] | None = None,
    classes: int | None = None,
    collate: Callable[..., Any] | None = None,
    table: TableSection | None = None,
    **keys: Any,
) -> FederatedData:
    """Deal samples to clients, and hold some out as a test set: the same bits as from an experiment's ``data`` section.

    Args:
        inputs: tensor or NumPy array [E, ...], a list of numbers, a pandas, polars or Arrow frame of E rows, a tree of
            them; or a map-style data set of PyTorch or Hugging Face, whose samples are read when they are needed.
        targets: the same, one value a sample; or, of a frame, the name of its column of targets, or a list of several:
            all other columns are inputs. A column of categories gives the codes as labels, and names to the classes.
            None for a data set whose samples are pairs; where they are dictionaries, the name of the target there.
        kind: kind of partition, such as ``iid``, ``dirichlet``, ``shards`` or ``natural``; all are in the reference.
        clients: number of clients, 100 unless given; for ``natural`` those with the most samples, all unless given.
        seed: seed of all draws, as an experiment's ``seed``.
        test_fraction: share of samples that is held out to test on, in [0, 1), unless ``test`` is given.
        test: samples to test on, a pair (inputs, targets) or a data set.
        columns: further values of each sample, [E] each, by name: ``client`` names its holder for ``natural``, any
            other serves ``hash``, ``range`` and ``rank`` as their ``by``.
        classes: number of classes; one more than the largest label unless given.
        collate: function that makes a batch of a list of samples, as of :class:`FederatedData`; None: that of the
            experiment, or samples of one shape are stacked.
        table: schema by which a frame's columns are found, as those of a file are: the experiment's section table. It
            names the targets; ``columns`` has one value for each row that it keeps.
        keys: keys of that kind, such as ``alpha`` and ``min_samples``, and ``overlap``.

    Returns:
        Training data of clients 0 … n − 1, or of those that the samples name, and the test set.

    Raises:
        InvalidData: if samples are no numbers, or cannot be dealt so that every client has one.
        InvalidExperiment: if there is no such kind, or a key of it is wrong.

    Example:
        >>> inputs = np.arange(40.0).reshape(20, 2)
        >>> data = partition(inputs, np.arange(20) % 2, kind="dirichlet", clients=3, alpha=1.0)
        >>> data.clients, sum(data.sizes.values()), len(data.test[1])
        ((0, 1, 2), 16, 4)
    """
    section = {"kind": "given", "clients": clients, "partition": {"kind": kind, **keys}, "test_fraction": test_fraction}
    sections: dict[str, Any] = {"data": section, "seed": seed}
    try:
        asked = _Asked(**sections)
        further = {name: np.asarray(column) for name, column in (columns or {}).items()}
        samples = samples_of(inputs, targets, test=test, columns=further, classes=classes, table=table)
        dealt = deal(replace(samples, collate=collate), asked.data, Streams(asked.seed))
        return dealt if table is None else replace(dealt, table=table)
    except (InvalidData, InvalidExperiment) as error:
        # Names of an experiment's keys become those of the arguments here.
        words = str(error).replace("data.partition.", "").replace("data.partition", "kind").replace("data.", "")
        raise type(error)(words) from None


class _Given(DataSection):
    """Section of samples that are there already."""

    target: ClassVar[Any] = staticmethod(lambda: None)


class _Asked(Document):
    """Arguments that are an experiment's keys."""

    data: _Given
    seed: NonNegativeInt
