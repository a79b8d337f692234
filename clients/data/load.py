"""Load data by client from a section of an experiment: make the source, hold out a test set, deal.

Shapes: see :mod:`fed.vectors.layout`.
"""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fed.clients.data import held_out
from fed.clients.data.brought import matched
from fed.clients.data.datasets import DatasetSamples, is_dataset, samples_of_dataset, targets_of_dataset
from fed.clients.data.federated import FederatedData
from fed.clients.data.folds import holding_out
from fed.clients.data.frames import is_frame, parted_by_name
from fed.clients.data.held import Held, SamplesOnDemand, joined, size_of, whole
from fed.clients.data.holdings import Holdings, by_holder, largest, replicated
from fed.clients.data.samples import Samples
from fed.config.registry import PARTITIONS, DataSection
from fed.config.sections import PartitionSection
from fed.config.table import TableSection
from fed.errors import InvalidData, users_errors_as
from fed.vectors.randomness import Streams, seeded_torch
from fed.vectors.tensors import torch

__all__ = ["deal", "load", "samples_of"]

_CLIENTS = 100


def load(
    section: DataSection, streams: Streams, schema: TableSection | None = None, *, is_for_server: bool = False
) -> FederatedData:
    """Make the source that a section names, hold out a test set where it brings none, and deal the rest to clients.

    Clients that the source names (partitions ``natural`` and ``file``) keep their names, in order, and each gives the
    same share of its samples to the test set. Otherwise they are 0 … n − 1, and the test set is drawn from all samples
    before anything is dealt, so that it does not depend on the partition. Samples that the source marks for testing are
    the test set, and those of a client that it names are that client's own test set as well. Data on demand are read
    client by client where each client keeps its own; to be dealt anew, all of them are read at once.

    With a ``fold`` each client holds that fold of its samples out, in place of any other test set.

    Args:
        section: ``data`` of an experiment.
        streams: the experiment's random streams.
        schema: ``table`` of the experiment, to which a table is held; None: it has none.
        is_for_server: True if nothing is trained on: a source may then have a test set alone, which stands for the one
            client.

    Raises:
        InvalidData: if the source cannot be read, or its samples cannot be dealt so that every client has one.

    Example:
        >>> from fed.config.registry import DATA
        >>> data = load(DATA.make("digits", clients=10), Streams(0))
        >>> len(data.train), len(data.test[1])
        (10, 359)
    """
    # Cut from the data as they are dealt without folds: all folds share one partition.
    if section.fold is not None:
        return holding_out(load(section.model_copy(update={"fold": None}), streams, schema), section.fold, streams)
    if schema is not None and "schema" not in inspect.signature(section.target).parameters:
        raise InvalidData(
            f"the experiment's section table is of data by columns, such as csv and parquet, got {section.kind}: "
            "remove table, or choose another source"
        )
    # A user's own source may draw, and raise.
    with seeded_torch(streams.torch_seed("data"), torch.device("cpu")), users_errors_as(InvalidData, section.kind):
        source = section.make(streams=streams, schema=schema)
    if isinstance(source, FederatedData) and _keeps_its_clients(source, section):
        if source.test is not None or source.client_tests is not None or section.test_fraction == 0:
            return source
        # To hold out of clients on demand at once would read all of them.
        if source.is_on_demand:
            return held_out.of_each_on_demand(source, section.test_fraction, streams)
        if any(isinstance(held, SamplesOnDemand) for held in source.train.values()):
            return held_out.of_each_holder(source, section.test_fraction, streams)
    samples = _samples(source, section.kind)
    if samples.test is not None and not len(samples):
        return _test_alone(samples, samples.test, is_for_server=is_for_server)
    return deal(samples, section, streams)


def _test_alone(samples: Samples, test: Held, *, is_for_server: bool) -> FederatedData:
    """Data of a server that tests and does not train."""
    if not is_for_server:
        raise InvalidData(
            "data.path must name samples to train on, got data.test alone, which is enough for a server and no one "
            "else: give a path"
        )
    return FederatedData({0: test}, test, classes=samples.classes, names=samples.names)


def deal(samples: Samples, section: DataSection, streams: Streams) -> FederatedData:
    """Hold a test set out of samples where they bring none, and deal the rest to clients.

    Args:
        samples: all samples.
        section: ``data`` of an experiment, of which the clients, the partition and the share to test on count.
        streams: the experiment's random streams.

    Raises:
        InvalidData: if samples cannot be dealt so that every client has one.
    """
    partition = section.partition or PARTITIONS.make("natural" if "client" in samples.columns else "iid")
    # A partition that takes no number of clients finds the clients in the samples.
    takes_clients = "clients" in inspect.signature(partition.target).parameters
    hand_out = _deal_to_numbers if takes_clients else _deal_to_names
    dealt = hand_out(samples, section, partition, streams)
    holdings = dealt.holdings
    if partition.overlap:
        holdings = replicated(holdings, partition.overlap, streams.generator("overlap"))
    test = samples.test or (samples.held_at(dealt.test) if len(dealt.test) else None)
    train = {client: samples.held_at(held) for client, held in holdings.items()}
    tests = {client: samples.held_at(held) for client, held in dealt.tests.items()}
    return FederatedData(
        train,
        test,
        classes=samples.classes,
        names=samples.names,
        client_tests=tests or None,
        collate=samples.collate,
        is_from_arrays=samples.is_from_arrays,
    )


def samples_of(
    inputs: Any,
    targets: Any,
    *,
    test: Held | None = None,
    columns: Mapping[str, NDArray[np.generic]] | None = None,
    classes: int | None = None,
    table: TableSection | None = None,
) -> Samples:
    """Samples of what people have, not yet dealt: in memory, or of a data set that is read as it is needed.

    Args:
        inputs: tree of tensors, arrays, frames or lists; or a frame or a data set with its targets in it.
        targets: the same; or the name of the targets in the frame or in a sample of the data set, or a list of several;
            None where a sample of the data set is a pair, or the model finds its loss from inputs alone.
        test: (inputs, targets) to test on.
        columns: further values of each sample, [E] each, by name.
        classes: number of classes, where the labels at hand may not show it.
        table: schema by which a frame's columns are found, in place of ``targets``; None: every column is taken.

    Raises:
        InvalidData: if values are no numbers, or do not fit the schema.
    """
    if table is not None:
        return _by_schema(inputs, targets, test, columns or {}, table)
    are_names = isinstance(targets, str) or (
        isinstance(targets, list) and bool(targets) and all(isinstance(name, str) for name in targets)
    )
    if is_dataset(inputs):
        inputs, targets = _of_dataset(samples_of_dataset(inputs, "the data", targets))
    elif is_frame(inputs):
        if targets is None:
            raise InvalidData(
                "a frame needs its targets, got none: give the name of their column beside it, (frame, name), or a "
                "frame of inputs and a column of targets"
            )
        inputs, targets = parted_by_name(inputs, targets, "the data") if are_names else (inputs, targets)
    return Samples(inputs, targets, test=test, columns=columns or {}, classes=classes)


def _by_schema(
    frame: Any, targets: Any, test: Any, columns: Mapping[str, NDArray[np.generic]], table: TableSection
) -> Samples:
    """Samples of a frame, and of a frame to test on, whose columns a schema finds.

    Args:
        frame: frame of pandas or polars, or a table of Arrow's.
        targets: None, since the schema names them.
        test: frame to test on; None: a share is held out.
        columns: further values of each row, by name.
        table: schema of tables.
    """
    if targets is not None or not is_frame(frame) or not (test is None or is_frame(test)):
        raise InvalidData(
            "table is the schema of a frame with its targets in it, got other samples: give a frame alone, and to test "
            "on, test=frame"
        )
    found = matched(frame, "the data", table)
    held_out = None if test is None else matched(test, "the test set", table)
    return Samples(
        torch.from_numpy(found.inputs),
        torch.from_numpy(found.targets),
        test=None if held_out is None else (torch.from_numpy(held_out.inputs), torch.from_numpy(held_out.targets)),
        columns={**found.columns, **columns},
        classes=len(table.classes) if table.classes else None,
        names=found.names,
    )


def _of_dataset(held: Held) -> tuple[Any, Any]:
    """Inputs and targets; of samples that are read as they are needed, these and all their targets."""
    return (held, targets_of_dataset(held)) if isinstance(held, DatasetSamples) else held


class _Dealt(NamedTuple):
    """Indices of samples: those that each client trains on, those of the test set, and each client's own test set."""

    holdings: Holdings
    test: NDArray[np.int64]
    tests: Holdings


def _deal_to_numbers(samples: Samples, section: DataSection, partition: PartitionSection, streams: Streams) -> _Dealt:
    """Hold out of all samples, then deal the others to clients 0 … n − 1."""
    train, marked = _to_train_and_test(samples)
    # Before the partition draws, and from another stream: one test set serves all partitions of a comparison.
    train, test = held_out.parted(train, _fraction(samples, section), streams.generator("test set"))
    clients = section.clients or _CLIENTS
    if clients > len(train):
        raise InvalidData(
            f"data.clients must be at most the number of training samples, got clients={clients} and {len(train)} "
            f"training samples ({len(test) + len(marked)} more are held out to test): lower data.clients, or give more "
            "data"
        )
    holders_E = partition.make(samples=samples.take(train), clients=clients, generator=streams.generator("partition"))
    holdings = by_holder(_checked(holders_E, len(train), partition))
    _check_that_all_have_data(holdings, clients, partition)
    return _Dealt({client: train[held] for client, held in holdings.items()}, np.concatenate([test, marked]), {})


def _deal_to_names(samples: Samples, section: DataSection, partition: PartitionSection, streams: Streams) -> _Dealt:
    """Give clients their own samples, then hold out of each, unless samples are marked for testing."""
    # Of all samples, since those for testing belong to their holders, too.
    holders_E = partition.make(samples=samples, generator=streams.generator("partition"))
    train, marked = _to_train_and_test(samples)
    holders_E = _checked(holders_E, len(samples), partition)
    holdings = {client: train[held] for client, held in by_holder(holders_E[train]).items()}
    holdings = largest(holdings, section.clients)
    if samples.is_test is not None:
        tests = {client: marked[held] for client, held in by_holder(holders_E[marked]).items() if client in holdings}
        return _Dealt(holdings, marked, tests)
    return _Dealt(*held_out.of_each(holdings, _fraction(samples, section), streams), {})


def _to_train_and_test(samples: Samples) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of the samples that may be trained on, and of those that are marked for testing."""
    is_test_E = np.zeros(len(samples), dtype=bool) if samples.is_test is None else samples.is_test
    return np.flatnonzero(~is_test_E), np.flatnonzero(is_test_E)


def _fraction(samples: Samples, section: DataSection) -> float:
    return section.test_fraction if samples.test is None and samples.is_test is None else 0.0


def _checked(holders: object, samples: int, partition: PartitionSection) -> NDArray[np.generic]:
    holders_E = np.asarray(holders)
    if holders_E.shape != (samples,) or holders_E.dtype.kind not in "iuUO":
        raise InvalidData(
            f"partition {partition.kind} must return a client's number or name for each of {samples} samples, "
            f"got shape {holders_E.shape} of {holders_E.dtype}"
        )
    return holders_E


def _check_that_all_have_data(holdings: Holdings, clients: int, partition: PartitionSection) -> None:
    unknown = [client for client in holdings if client not in range(clients)]
    if unknown:
        raise InvalidData(
            f"partition {partition.kind} must return numbers in 0 … {clients - 1}, one less than data.clients, "
            f"got {unknown[0]!r}"
        )
    without = [client for client in range(clients) if client not in holdings]
    if without:
        named = ", ".join(map(str, without[:10])) + (f" and {len(without) - 10} more" if len(without) > 10 else "")
        raise InvalidData(
            f"every client must hold at least one sample, but partition {partition.kind} over {clients} clients leaves "
            f"{len(without)} without data: {named}; lower data.clients, or choose another data.partition"
        )


def _keeps_its_clients(data: FederatedData, section: DataSection) -> bool:
    """True where there is nothing to deal, so that no client need be read."""
    partition = section.partition
    is_natural = partition is None or (partition.kind == "natural" and not partition.overlap)
    return is_natural and section.clients in (None, len(data.clients))


def _samples(source: object, kind: str) -> Samples:
    if isinstance(source, Samples):
        return source
    if isinstance(source, FederatedData):
        tests = source.client_tests or {}
        pairs = [whole(held) for held in (*map(source.read, source.clients), *map(source.read_test, tests))]
        inputs, targets = joined(pairs)
        lengths = list(map(size_of, pairs))
        # Objects: NumPy would turn a mixture of numbers and names into texts.
        holders = np.repeat(np.array([*source.clients, *tests], dtype=object), lengths)
        is_test = np.arange(len(lengths)).repeat(lengths) >= len(source.clients) if tests else None
        return Samples(
            inputs=inputs,
            targets=targets,
            test=source.test,
            columns={"client": holders},
            classes=source.classes,
            names=source.names,
            is_test=is_test,
            collate=source.collate,
            is_from_arrays=source.is_from_arrays,
        )
    if isinstance(source, Mapping):
        return Samples(source, None)
    if isinstance(source, tuple | list) and len(source) == 2:
        return samples_of(*source)
    if is_frame(source) or is_dataset(source):
        return samples_of(source, None)
    raise InvalidData(
        f"{kind} must return fed.clients.data.Samples, fed.FederatedData or a pair (inputs, targets), "
        f"got {type(source).__name__}"
    )
