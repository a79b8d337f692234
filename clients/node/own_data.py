"""A node's own data, and the description of them with which it joins."""

import hashlib
import inspect
from itertools import accumulate

from fed.clients.apps.app import App
from fed.clients.apps.app_trainer import stand_in
from fed.clients.data import ClientId, FederatedData, Held, Names, SamplesOnDemand, load
from fed.clients.data.forms import form_of
from fed.clients.data.samples import pattern_of
from fed.clients.data.sheets import Sheet
from fed.clients.data.sources.files import files_of
from fed.config.node_data import NodeData
from fed.config.table import TableSection
from fed.errors import InvalidData
from fed.protocol import protocol_pb2 as pb
from fed.protocol.limits import PROTOCOL
from fed.vectors.randomness import Streams
from fed.vectors.tensors import Tensor
from fed.version import __version__

__all__ = [
    "check_collate",
    "described",
    "described_without_schema",
    "samples_of",
    "signature_of",
    "signature_of_an_app",
    "signature_of_data",
]

_MOST_BYTES = 1 << 15  # for the names in a signature, so that a joining fits into a message


def samples_of(description: NodeData, client: ClientId, schema: TableSection | None = None) -> FederatedData:
    """Read the node's own samples, to train on and, where its source brings some, to test on.

    Args:
        description: description of the node's data.
        client: id of the node's client.
        schema: ``table`` of the experiment, to which a table is held; None: it has none.

    Returns:
        Data of this one client. Where the source brings test sets of clients' own, but none of this client's,
        ``client_tests`` is empty: then the client holds nothing out.

    Raises:
        InvalidData: if the source has no such client, or brings a collate of its own.
        InvalidExperiment: if the node's app cannot be imported.
    """
    if description.data is None:
        # Imported now: a node whose code cannot be says so before it joins, and not once a task.
        _ = App(description.app).callable
        return stand_in([client])
    streams = Streams(description.seed)
    if description.client is None:
        # The whole source is this node's, whatever clients it names, and the node itself holds out what it scores on.
        alone = {"clients": 1, "partition": {"kind": "iid"}, "test_fraction": 0.0}
        section = description.data
        data = load(type(section).model_validate(section.model_dump(exclude_unset=True) | alone), streams, schema)
        check_collate(data)
        data = data.with_test_set()  # a fold is held out of each client, here of the only one
        tests = None if data.test is None else {client: data.test}
        held = data.read(data.clients[0])
        return FederatedData(
            {client: held},
            # Of samples that are read as they are needed nobody counts the classes; names list them, as a schema does.
            classes=data.classes if isinstance(held, SamplesOnDemand) or data.names.labels else None,
            names=data.names,
            client_tests=tests,
            is_from_arrays=data.is_from_arrays,
        )
    data = load(description.data, streams, schema)
    check_collate(data)
    if description.client not in data.clients:
        some = ", ".join(map(repr, list(data.clients)[:3]))
        raise InvalidData(f"client must be one of the source's, such as {some}, got {description.client!r}")
    return data.only(description.client, client)


def check_collate(data: FederatedData) -> None:
    """Check that data bring no collate: all nodes of a run must make their batches alike.

    Raises:
        InvalidData: if they do.
    """
    if data.collate is not None:
        raise InvalidData(
            "data of a deployment must bring no collate, since all nodes make batches alike, got one: name it in the "
            "server's experiment, as collate: python:module:function"
        )


def described(data: FederatedData) -> pb.Joining:
    """Make the message with which a node joins, without its name."""
    client = data.clients[0]
    signature = signature_of_data(data, data.number_of_classes() or 0)
    samples = data.size_of(client)
    return pb.Joining(protocol=PROTOCOL, software=f"fed {__version__}", samples=samples, signature=signature)


def signature_of_data(data: FederatedData, classes: int) -> pb.Signature:
    """Describe one sample of the first client, as a model is made for it.

    Args:
        data: data of a node, or of the server's experiment.
        classes: number of classes; 0 where targets are no labels.
    """
    signature = signature_of(pattern_of(data.read(data.clients[0])), classes, data.names)
    if data.is_from_arrays and signature.input_dtype == "float64":
        signature.input_dtype = "float32"  # float64 is merely what arrays and frames have
    return signature


def signature_of_an_app() -> pb.Signature:
    """Make the signature of data that an app keeps to itself, by which a server knows its node."""
    return signature_of_data(stand_in([0]), 0)


def described_without_schema(description: NodeData, client: ClientId) -> tuple[pb.Joining, str]:
    """Make the message with which a node joins before it knows the run's schema.

    A table says that it is one. Where it can be read by a schema alone, the message says nothing else of it.

    Args:
        description: description of the node's data.
        client: id of the node's client.

    Returns:
        The message, and the reason why the table cannot be read without a schema; empty where it can.

    Raises:
        InvalidData: if the data cannot be read by any schema.
    """
    if description.data is None:
        return described(samples_of(description, client)), ""
    is_table = "schema" in inspect.signature(description.data.target).parameters
    try:
        joining = described(samples_of(description, client))
    except InvalidData as error:
        path = getattr(description.data, "path", None)
        if not is_table or path is None:
            raise
        Sheet.read(files_of(path, f".{description.data.kind}"))  # what is wrong under every schema is said now
        return pb.Joining(protocol=PROTOCOL, software=f"fed {__version__}", table_sha256=b""), str(error)
    if is_table:
        joining.table_sha256 = b""
    return joining, ""


def signature_of(held: Held, classes: int, names: Names) -> pb.Signature:
    """Describe one sample. Where the names are too long for a message, those beyond it are told by their hash alone.

    Args:
        held: samples of that shape and type.
        classes: number of classes; 0 where targets are no labels.
        names: names of features and classes.
    """
    signature = pb.Signature(form=form_of(held), classes=classes)
    if not signature.form:
        inputs, targets = pattern_of(held)
        signature.input_shape.extend(inputs.shape[1:])
        signature.input_dtype = _dtype(inputs)
        signature.target_shape.extend(targets.shape[1:])
        signature.target_dtype = _dtype(targets)
    encoded = [name.encode() for part in names for name in (*part, "")]  # an empty name parts columns from classes
    ends = [*accumulate(len(name) + 3 for name in encoded)]  # Protobuf adds a tag, and a length of up to two bytes
    # The first names as they are, since errors show those that differ; the hash covers the rest.
    fitting = sum(end <= _MOST_BYTES for end in ends)
    signature.columns.extend(names.columns[:fitting])
    signature.labels.extend(names.labels[: max(0, fitting - len(names.columns) - 1)])
    if fitting < len(encoded):
        signature.names_sha256 = hashlib.sha256(b"\0".join(encoded)).hexdigest()
    return signature


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
