"""Flower messages: a serialized header as one field of settings, and the bytes of its payload as one flat array.

Many arrays in one message take many times as long, and an array is read as plain numbers, never unpickled.
"""

from collections.abc import Mapping
from types import ModuleType
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from fed.errors import InvalidInput, InvalidPayload
from fed.protocol.protocol_pb2 import Request, Response
from fed.wire.engines import FLOWER

__all__ = ["array_of", "fixed_part_in", "flower", "packed", "unpacked"]

# Names of records and of their only keys.
_ARRAYS = "arrays"
_FLAT = "flat"
_FIXED_PART = "fixed_part"
_SETTINGS = "config"
_HEADER = "header"
_Header = TypeVar("_Header", Request, Response)


def flower(name: str) -> ModuleType:
    """One of Flower's public modules.

    Args:
        name: name of the module: app, serverapp or clientapp.

    Raises:
        InvalidInput: if Flower is not installed.
    """
    # Flower is an optional extra: fed itself must load without it.
    import importlib

    try:
        return importlib.import_module(f"flwr.{name}")
    except ModuleNotFoundError as error:
        raise InvalidInput(f'Flower is not installed ({error.name} is missing): pip install "{FLOWER}"') from None


def array_of(data: bytes) -> Any:
    """One of Flower's arrays, which several messages may hold."""
    return flower("app").Array(dtype="uint8", shape=(len(data),), stype="bytes", data=data)


def packed(header: Request | Response, array: Any = None, fixed_part: Any = None) -> Any:
    """A message's content.

    Args:
        header: fields of the message beside its tensors.
        array: tensors that the header's payload describes, from :func:`array_of`; None for none.
        fixed_part: fixed part of the model, from :func:`array_of`; None where the node has it.
    """
    app = flower("app")
    content = app.RecordDict({_SETTINGS: app.ConfigRecord({_HEADER: header.SerializeToString()})})
    arrays = {name: part for name, part in ((_FLAT, array), (_FIXED_PART, fixed_part)) if part is not None}
    if arrays:
        content[_ARRAYS] = app.ArrayRecord(arrays)
    return content


def fixed_part_in(content: Mapping[str, Any]) -> bytes | None:
    """The bytes of the model's fixed part that an untrusted message brings; None where it brings none."""
    arrays = content.get(_ARRAYS, {})
    data = getattr(arrays.get(_FIXED_PART), "data", None) if isinstance(arrays, Mapping) else None
    return data if isinstance(data, bytes) else None


def unpacked(content: Mapping[str, Any], kind: type[_Header]) -> tuple[_Header, bytes]:
    """The header and the payload's bytes of an untrusted message's content.

    Args:
        content: records of the message, from Flower.
        kind: type of the header.

    Raises:
        InvalidPayload: if it has another form.
    """
    settings = content.get(_SETTINGS)
    arrays = content.get(_ARRAYS, {})
    header = settings.get(_HEADER) if isinstance(settings, Mapping) else None
    if not isinstance(header, bytes):
        raise InvalidPayload(f"a message must have a record {_SETTINGS!r} with the bytes of a {_HEADER!r}")
    data = getattr(arrays.get(_FLAT), "data", b"") if isinstance(arrays, Mapping) else None
    if not isinstance(data, bytes):
        raise InvalidPayload(f"a message's tensors must be one array {_FLAT!r} of a record {_ARRAYS!r}")
    try:
        return kind.FromString(header), data
    except DecodeError:
        raise InvalidPayload("its header is no message") from None
