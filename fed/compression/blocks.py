"""Blocks of values that share a scale, and numbers as the bytes of a message.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Callable, Iterator

from fed.compression.pieces import pieces
from fed.vectors.tensors import Tensor, torch

__all__ = ["as_bytes", "blocks_of", "by_block", "euclidean_norm", "from_bytes", "peak", "reduced_by_block"]


def as_bytes(tensor_KM: Tensor) -> Tensor:
    """The bytes of numbers, [K, ·], on the CPU."""
    if tensor_KM.stride(1) != 1 or not tensor_KM.is_contiguous():  # a single number counts as contiguous at any stride
        tensor_KM = tensor_KM.clone(memory_format=torch.contiguous_format)
    return tensor_KM.cpu().view(torch.uint8)


def from_bytes(content_KO: Tensor, dtype: "torch.dtype") -> Tensor:
    """Reverse :func:`as_bytes`."""
    numbers_KM = torch.empty(len(content_KO), content_KO.shape[1] // dtype.itemsize, dtype=dtype)
    numbers_KM.view(torch.uint8).copy_(content_KO)  # copied, since the content may begin at an odd byte
    return numbers_KM


def blocks_of(rows_KM: Tensor, size: int) -> Iterator[Tensor]:
    """Rows in blocks, [K, ·, size], and the remaining columns as one block, [K, 1, ·]."""
    whole = rows_KM.shape[1] // size * size
    if whole:
        yield rows_KM[:, :whole].view(len(rows_KM), -1, size)
    if whole < rows_KM.shape[1]:
        yield rows_KM[:, whole:].unsqueeze(1)


def by_block(piece_KM: Tensor, scales_KB: Tensor, size: int, columns: slice) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of a piece, [K, ·, ·], each with its scale, [K, ·, 1].

    Args:
        piece_KM: some columns of some rows.
        scales_KB: all scales of these rows.
        size: number of values in a block.
        columns: columns of the piece; a block begins at the first.
    """
    begin = columns.start // size
    for block in blocks_of(piece_KM, size):
        yield block, scales_KB[:, begin : begin + block.shape[1], None]
        begin += block.shape[1]


def reduced_by_block(rows_KM: Tensor, size: int, reduced: Callable[[Tensor], Tensor]) -> Tensor:
    """A number for each block, [K, ·].

    Args:
        rows_KM: values, [K, M].
        size: number of values in a block.
        reduced: function that reduces the last of three dimensions.
    """
    found_KB = torch.empty(len(rows_KM), -(-rows_KM.shape[1] // size), dtype=rows_KM.dtype)
    for rows, columns in pieces(rows_KM.shape, size):
        for block, found in by_block(rows_KM[rows, columns], found_KB[rows], size, columns):
            found[:, :, 0] = reduced(block)
    return found_KB


def peak(block: Tensor) -> Tensor:
    """The largest magnitude."""
    return block.abs().amax(2)


def euclidean_norm(block: Tensor) -> Tensor:
    """The Euclidean norm, at most the type's largest number."""
    # Squares of large or small numbers leave float32's range.
    norms: Tensor = torch.linalg.vector_norm(block, dim=2, dtype=torch.float64)
    # Infinity would decode to NaN at every zero.
    return norms.clamp_max_(torch.finfo(block.dtype).max)
