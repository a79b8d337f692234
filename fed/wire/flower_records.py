"""What a message holds on Flower's engine: all tensors as one flat array, and small fields in one record of settings.

Many arrays in one message take many times as long, and an array is read as plain numbers, never unpickled.
"""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from fed.errors import InvalidInput, InvalidPayload
from fed.storage.serialization import bytes_of
from fed.wire.engines import FLOWER
from fed.wire.payloads import size_of, spec_of
from fed.wire.protocol_pb2 import Tensor as TensorMessage

__all__ = ["array_of", "field", "flower", "packed", "unpacked"]

_ARRAYS, _FLAT, _FIELDS = "arrays", "flat", "config"
_Value = TypeVar("_Value")


def flower(name: str) -> ModuleType:
    """One of Flower's public modules.

    Args:
        name: app, serverapp or clientapp.

    Raises:
        InvalidInput: if Flower is not installed.
    """
    import importlib

    try:
        return importlib.import_module(f"flwr.{name}")
    except ModuleNotFoundError as error:
        raise InvalidInput(f'Flower is not installed ({error.name} is missing): pip install "{FLOWER}"') from None


def array_of(tensors: Sequence[Tensor]) -> Any:
    """Tensors as one of Flower's arrays, which several messages may hold.

    Raises:
        InvalidPayload: if one has a type that does not travel.
    """
    spec_of(tensors)
    data = b"".join(bytes_of(tensor) for tensor in tensors if tensor.numel())
    return flower("app").Array(dtype="uint8", shape=(len(data),), stype="bytes", data=data)


def packed(tensors: Sequence[Tensor], array: Any = None, **fields: object) -> Any:
    """A message's content.

    Args:
        tensors: all there are.
        array: what :func:`array_of` made of them, if that is known.
        fields: numbers, texts or lists of such; those that are None are left out.
    """
    app = flower("app")
    spec = spec_of(tensors)
    shapes = {"dtypes": [part.dtype for part in spec], "numbers": [part.numbers for part in spec]}
    given = {name: value for name, value in fields.items() if value is not None}
    content = app.RecordDict({_FIELDS: app.ConfigRecord({**given, **shapes})})
    if tensors:
        content[_ARRAYS] = app.ArrayRecord({_FLAT: array_of(tensors) if array is None else array})
    return content


def unpacked(content: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[Tensor]]:
    """The fields and tensors of a message's content, from whoever sent it.

    Raises:
        InvalidPayload: if it has another form.
    """
    fields = content.get(_FIELDS)
    if not isinstance(fields, Mapping):
        raise InvalidPayload(f"a message must have a record {_FIELDS!r}, got {[str(key)[:20] for key in content][:4]}")
    dtypes, numbers = fields.get("dtypes"), fields.get("numbers")
    if not isinstance(dtypes, list) or not isinstance(numbers, list) or len(dtypes) != len(numbers):
        raise InvalidPayload("a message must say the type and size of each of its tensors")
    if not all(isinstance(name, str) for name in dtypes):
        raise InvalidPayload("a tensor's type must be a text")
    if not all(type(count) is int and 0 <= count < 2**40 for count in numbers):
        raise InvalidPayload("a tensor's size must be a whole number, at least 0")
    spec = [TensorMessage(dtype=name, numbers=count) for name, count in zip(dtypes, numbers, strict=True)]
    data, size_bytes = _data(content) if spec else b"", size_of(spec)
    if len(data) != size_bytes:
        raise InvalidPayload(f"the tensors take {size_bytes} bytes, got {len(data)}")
    return fields, _split(data, spec)


def field(fields: Mapping[str, Any], name: str, kind: type[_Value]) -> _Value:
    """A field of a message, from whoever sent it.

    Raises:
        InvalidPayload: if it is missing or of another type.
    """
    value = fields.get(name)
    if type(value) is not kind:
        raise InvalidPayload(f"{name} must be of type {kind.__name__}, got {str(value)[:40]!r}")
    return value


def _data(content: Mapping[str, Any]) -> bytes:
    arrays = content.get(_ARRAYS)
    array = arrays.get(_FLAT) if isinstance(arrays, Mapping) else None
    data = getattr(array, "data", None)
    if not isinstance(data, bytes):
        raise InvalidPayload(f"a message's tensors must be one array {_FLAT!r} of a record {_ARRAYS!r}")
    return data


def _split(data: bytes, spec: Sequence[TensorMessage]) -> list[Tensor]:
    tensors, offset = [], 0
    for part in spec:
        tensor = torch.empty(part.numbers, dtype=getattr(torch, part.dtype))
        size_bytes = tensor.nbytes
        if size_bytes:
            bytes_of(tensor)[:] = memoryview(data)[offset : offset + size_bytes]
        tensors.append(tensor)
        offset += size_bytes
    return tensors
