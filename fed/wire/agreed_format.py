"""The format of a run's messages in its plan: as a server says it, and as a node accepts it."""

from dataclasses import replace

from fed.errors import InvalidPayload
from fed.protocol.protocol_pb2 import Format as FormatHeader
from fed.wire.format import Format

__all__ = ["MOST_CLIENTS", "agreed", "header_of"]

MOST_CLIENTS = 1 << 20
"""Largest number of clients of a run; a message may have a number for each."""


def header_of(message: Format) -> FormatHeader:
    """The format as a plan says it; nodes know the codecs from the experiment."""
    others = {name: getattr(message, name) for name in FormatHeader.DESCRIPTOR.fields_by_name if name != "dtype"}
    return FormatHeader(dtype=str(message.dtype).removeprefix("torch."), **others)


def agreed(header: FormatHeader, own: Format) -> Format:
    """The format that a plan says, held to the node's own model and algorithm.

    Args:
        header: untrusted format from a server.
        own: format that the node's own experiment has with one client.

    Raises:
        InvalidPayload: if the server's model or algorithm is another.
    """
    ours = str(own.dtype), own.parameters, own.buffers, own.integers
    theirs = f"torch.{header.dtype[:20]}", header.parameters, header.buffers, header.integers
    if ours != theirs:
        raise InvalidPayload(
            f"the server's model must have the type, parameters, buffers and integers {ours}, got {theirs}: do "
            "both run the same version of fed, and of the model's code?"
        )
    kept = own.sends_models, len(own.parts), len(own.broadcast)
    said = header.sends_models, len(header.parts), len(header.broadcast)
    lengths = zip([*header.parts, *header.broadcast], [*own.parts, *own.broadcast], strict=False)
    if kept != said or any(numbers != expected and numbers > MOST_CLIENTS for numbers, expected in lengths):
        lists = [*header.parts[:4]], [*header.broadcast[:4]]
        raise InvalidPayload(
            f"the server's messages must have parts of {own.parts} numbers beside {own.broadcast} broadcast, or as "
            f"many as there are clients, got {lists}: do both run the same version of fed?"
        )
    fixed = own.fixed
    if (fixed is None) != (not header.most_clients) or header.most_clients > MOST_CLIENTS:
        raise InvalidPayload(
            f"the server's sessions must have from 1 to {MOST_CLIENTS} clients under secure aggregation, and 0 "
            f"without, got {header.most_clients}: do both run the same experiment?"
        )
    if fixed is not None:
        fixed = replace(fixed, most_clients=header.most_clients)
    return replace(own, parts=tuple(header.parts), broadcast=tuple(header.broadcast), fixed=fixed)
