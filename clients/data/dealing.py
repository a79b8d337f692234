"""``fed.partition``: samples that a program holds, dealt to clients as an experiment's ``data.partition`` does."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike
from pydantic import NonNegativeInt

from fed.clients.data.arrays import tensor_of
from fed.clients.data.federated import FederatedData
from fed.clients.data.frames import categories_of, is_frame, names_of, parted_by_name
from fed.clients.data.held import Pair
from fed.clients.data.load import deal
from fed.clients.data.samples import Names, Samples
from fed.config.document import Document
from fed.config.registry import DataSection
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
    test: Pair | None = None,
    columns: Mapping[str, ArrayLike] | None = None,
    classes: int | None = None,
    **keys: Any,
) -> FederatedData:
    """Deal samples to clients, and hold some out as a test set: the same bits as from an experiment's ``data`` section.

    Args:
        inputs: tensor or NumPy array [E, ...], a list of numbers, or a pandas, polars or Arrow frame of E rows.
        targets: the same, one value a sample; or, of a frame, the name of its column of targets, or a list of several:
            all other columns are inputs. A column of categories gives the codes as labels, and names to the classes.
        kind: kind of partition, such as ``iid``, ``dirichlet``, ``shards`` or ``natural``; all are in the reference.
        clients: number of clients, 100 unless given; for ``natural`` those with the most samples, all unless given.
        seed: seed of all draws, as an experiment's ``seed``.
        test_fraction: share of samples that is held out to test on, in [0, 1), unless ``test`` is given.
        test: (inputs, targets) to test on.
        columns: further values of each sample, [E] each, by name: ``client`` names its holder for ``natural``, any
            other serves ``hash``, ``range`` and ``rank`` as their ``by``.
        classes: number of classes; one more than the largest label unless given.
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
        samples = _samples(inputs, targets, test=test, columns=columns or {}, classes=classes)
        return deal(samples, asked.data, Streams(asked.seed))
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


def _samples(
    inputs: Any, targets: Any, *, test: Pair | None, columns: Mapping[str, ArrayLike], classes: int | None
) -> Samples:
    if is_frame(inputs) and isinstance(targets, str | list):
        inputs, targets = parted_by_name(inputs, targets, "the data")
    labels = categories_of(targets)
    return Samples(
        tensor_of(inputs, "inputs"),
        tensor_of(targets, "targets", are_targets=True),
        test=test,
        columns={name: np.asarray(column) for name, column in columns.items()},
        classes=len(labels) or None if classes is None else classes,
        names=Names((*names_of(inputs), *names_of(targets)), labels) if is_frame(inputs) else Names(),
    )
