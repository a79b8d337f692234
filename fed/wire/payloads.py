"""Tensors on their way: a file of plain numbers, in chunks with a checksum each, and whole when its hash says so."""

import hashlib
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from fed.errors import DamagedPayload, InvalidPayload
from fed.protocol.protocol_pb2 import Chunk, Payload
from fed.protocol.protocol_pb2 import Tensor as TensorMessage
from fed.storage.serialization import bytes_of
from fed.vectors.tensors import Tensor, torch

__all__ = [
    "CHUNK_BYTES",
    "SHA256",
    "Incoming",
    "TensorSpec",
    "check_tensors",
    "chunks",
    "described",
    "hold_to_payload",
    "joined",
    "read",
    "size_of",
    "spec_of",
    "split",
    "type_name",
    "written",
]

CHUNK_BYTES = 1 << 20
_NAMES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8")
_MOST_TENSORS = 1000  # bounds what a hostile header costs
_LEAST_BYTES = 1 << 16  # of a chunk that is not the last: smaller ones cost more than they carry

SHA256 = re.compile("[0-9a-f]{64}")
"""Pattern of the hash by which a payload is named."""


class TensorSpec(NamedTuple):
    """Type and length of a tensor on the wire.

    Args:
        dtype: type of the numbers.
        numbers: length of the tensor.
        may_be_shorter: True if that is the largest length.
    """

    dtype: "torch.dtype"
    numbers: int
    may_be_shorter: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes of such a tensor."""
        return self.numbers * self.dtype.itemsize

    def fits(self, dtype: str, numbers: int) -> bool:
        """True if a tensor of this type and length is one."""
        return dtype == type_name(self.dtype) and (
            numbers == self.numbers or (self.may_be_shorter and numbers < self.numbers)
        )


def spec_of(part: TensorMessage) -> TensorSpec:
    """Type and length that a message says.

    Raises:
        InvalidPayload: if it has a type that does not travel.
    """
    size_of([part])
    return TensorSpec(_dtype(part), part.numbers)


def size_of(spec: Sequence[TensorMessage]) -> int:
    """Bytes of such tensors.

    Raises:
        InvalidPayload: if one has a type that does not travel.
    """
    if unknown := [part.dtype for part in spec if part.dtype not in _NAMES]:
        # A stranger's text is cut before it reaches a log.
        raise InvalidPayload(f"tensors travel as one of {', '.join(_NAMES)}, got {unknown[0][:20]!r}")
    return sum(part.numbers * _dtype(part).itemsize for part in spec)


def written(path: Path, tensors: Sequence[Tensor]) -> Payload:
    """Write tensors into a file that is sent in chunks, and describe it.

    Raises:
        InvalidPayload: if one has a type that does not travel.
        OSError: if the file cannot be written.
    """
    spec = _spec_of(tensors)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for tensor in tensors:
            content = bytes_of(tensor)
            digest.update(content)
            file.write(content)
    return Payload(sha256=digest.hexdigest(), size_bytes=size_of(spec), tensors=spec)


def described(tensors: Sequence[Tensor]) -> Payload:
    """Description of the file that :func:`written` would make of tensors.

    Raises:
        InvalidPayload: if one has a type that does not travel.
    """
    spec = _spec_of(tensors)
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(bytes_of(tensor))
    return Payload(sha256=digest.hexdigest(), size_bytes=size_of(spec), tensors=spec)


def joined(tensors: Sequence[Tensor]) -> tuple[Payload, bytes]:
    """Tensors in one piece, where an engine carries whole messages, with its description.

    Raises:
        InvalidPayload: if one has a type that does not travel.
    """
    spec = _spec_of(tensors)
    # One array, since many in a message take Flower many times as long.
    data = b"".join(bytes_of(tensor) for tensor in tensors)
    return Payload(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data), tensors=spec), data


def read(path: Path, payload: Payload) -> list[Tensor]:
    """Read the tensors of a file that has been checked, each one-dimensional, with memory of its own."""
    with path.open("rb") as file:
        return _filled(payload, file.readinto)


def split(data: bytes, payload: Payload) -> list[Tensor]:
    """Split one piece that has been checked into tensors, each one-dimensional, with memory of its own."""
    return _filled(payload, BytesIO(data).readinto)


def hold_to_payload(data: bytes, payload: Payload, spec: Sequence[TensorSpec] | None = None) -> None:
    """Check bytes against their sender's description, and the description against the tensors that were asked for.

    Args:
        data: bytes to check.
        payload: the sender's description of them.
        spec: types and lengths of the tensors that were asked for; None: any.

    Raises:
        InvalidPayload: if they are others.
    """
    _hold_to_spec(payload, spec)
    if len(data) != payload.size_bytes:
        raise InvalidPayload(f"the tensors take {payload.size_bytes} bytes, got {len(data)}")
    if hashlib.sha256(data).hexdigest() != payload.sha256:
        raise InvalidPayload("the bytes have another hash than their sender has announced")


def _hold_to_spec(payload: Payload, spec: Sequence[TensorSpec] | None) -> None:
    """Check a sender's description of a payload, before any of it is taken.

    Args:
        payload: the sender's description of it.
        spec: types and lengths of the tensors that were asked for; None: any.

    Raises:
        InvalidPayload: if the description contradicts itself, or is of other tensors.
    """
    # A hostile header is cut before it is looked at.
    said = [(part.dtype[:20], part.numbers) for part in payload.tensors[:_MOST_TENSORS]]
    if spec is not None:
        check_tensors(said, spec)
    if len(payload.tensors) > _MOST_TENSORS:
        raise InvalidPayload(f"there may be {_MOST_TENSORS} tensors at most, got {len(payload.tensors)}")
    if (size_bytes := size_of(payload.tensors)) != payload.size_bytes:
        raise InvalidPayload(f"the tensors take {size_bytes} bytes, got {payload.size_bytes}")
    if not SHA256.fullmatch(payload.sha256):
        raise InvalidPayload(f"sha256 must be 64 hexadecimal digits, got {payload.sha256[:70]!r}")


def check_tensors(said: Sequence[tuple[str, int]], spec: Sequence[TensorSpec]) -> None:
    """Hold tensors of these types and lengths to those that were asked for.

    Raises:
        InvalidPayload: if they are others.
    """
    if len(said) != len(spec) or not all(part.fits(*one) for part, one in zip(spec, said, strict=True)):
        asked = [(type_name(part.dtype), part.numbers) for part in spec]
        # The first of each, for there may be a thousand.
        raise InvalidPayload(f"the tensors must be {asked[:4]}, got {[*said[:4]]}")


def chunks(path: Path, offset: int = 0) -> Iterator[Chunk]:
    """The file's chunks from an offset on."""
    with path.open("rb") as file:
        file.seek(offset)
        while data := file.read(CHUNK_BYTES):
            yield Chunk(data=data, crc32=zlib.crc32(data))


class Incoming:
    """A file that arrives in chunks, over several connections if it must.

    Attributes:
        received_bytes: number of bytes that have arrived.

    Args:
        path: path of the file.
        payload: the sender's description of it.
        spec: types and lengths of the tensors that were asked for; None: any.

    Raises:
        InvalidPayload: if the description contradicts itself, or is of other tensors.
    """

    def __init__(self, path: Path, payload: Payload, spec: Sequence[TensorSpec] | None = None) -> None:
        _hold_to_spec(payload, spec)
        self.path = path
        self.payload = payload
        self.received_bytes = 0
        # Counted as chunks come: to read a large file once more would take as long again.
        self._digest = hashlib.sha256()
        # add() writes at an offset, for which the file must be there.
        path.write_bytes(b"")

    def add(self, chunk: Chunk) -> None:
        """The next chunk.

        Raises:
            DamagedPayload: if its checksum is wrong; earlier chunks stay.
            InvalidPayload: if it is too small, or there is more than was said.
            OSError: if the disk is full.
        """
        data = chunk.data  # each look at it copies it
        if zlib.crc32(data) != chunk.crc32:
            raise DamagedPayload("a chunk was damaged on its way")
        left_bytes = self.payload.size_bytes - self.received_bytes
        # An empty chunk is refused, too: a stream of them would never end.
        if not min(_LEAST_BYTES, max(left_bytes, 1)) <= len(data) <= min(CHUNK_BYTES, left_bytes):
            raise InvalidPayload(
                f"a chunk must have {_LEAST_BYTES} to {CHUNK_BYTES} bytes or be the last, and all together "
                f"{self.payload.size_bytes}, got {len(data)} after {self.received_bytes}"
            )
        # Opened for each chunk: an open file for each of thousands of deliveries would be too many.
        with self.path.open("r+b") as file:
            file.seek(self.received_bytes)
            file.write(data)
        self._digest.update(data)
        self.received_bytes += len(data)

    @property
    def is_complete(self) -> bool:
        """True once all bytes are there."""
        return self.received_bytes == self.payload.size_bytes

    def check(self) -> None:
        """Hold the whole to its hash.

        Raises:
            DamagedPayload: if it is another; all of it has to be sent again.
        """
        if self._digest.hexdigest() != self.payload.sha256:
            raise DamagedPayload("the bytes have another hash than their sender has announced")

    def take(self) -> list[Tensor]:
        """Read the tensors of the file, which has been checked, and remove it."""
        tensors = read(self.path, self.payload)
        self.path.unlink(missing_ok=True)
        return tensors


def _filled(payload: Payload, take: Callable[[memoryview], object]) -> list[Tensor]:
    # The payload was checked: no header claims more memory than was sent.
    tensors = [torch.empty(part.numbers, dtype=_dtype(part)) for part in payload.tensors]
    for tensor in tensors:
        take(bytes_of(tensor))
    return tensors


def type_name(dtype: "torch.dtype") -> str:
    """The type as a payload says it."""
    return str(dtype).removeprefix("torch.")


def _spec_of(tensors: Sequence[Tensor]) -> list[TensorMessage]:
    spec = [TensorMessage(dtype=type_name(tensor.dtype), numbers=tensor.numel()) for tensor in tensors]
    size_of(spec)  # refuses types that do not travel before any byte is written
    return spec


def _dtype(part: TensorMessage) -> "torch.dtype":
    dtype: torch.dtype = getattr(torch, part.dtype)
    return dtype
