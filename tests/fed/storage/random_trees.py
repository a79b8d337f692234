"""Random trees, and when two are the same to the bit."""

import struct
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from fed.storage.serialization import bytes_of

DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    torch.float8_e4m3fn,
)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Of any type and shape, scalars and empty ones included; of any bits; some of them views."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = torch.Size(shape).numel()
    if dtype is torch.bool:
        content = torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=dtype)
    else:
        size = count * dtype.itemsize
        content = torch.tensor(list(draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8).view(dtype)
    tensor = content.view(shape)
    how = draw(st.sampled_from(["plain", "transposed", "part", "expanded"]))
    if how == "transposed":
        return tensor.permute(tuple(reversed(range(tensor.ndim))))
    if how == "part" and tensor.ndim:
        return tensor[1:]  # shares the memory of what it was cut from
    return tensor.expand(2, *shape) if how == "expanded" else tensor


floats = st.binary(min_size=8, max_size=8).map(lambda content: struct.unpack("<d", content)[0])
strings = st.text(st.characters(), max_size=4)  # lone surrogates too
integers = st.integers() | st.integers(2**60, 2**70) | st.integers(-(2**70), -(2**60))
scalars = st.none() | st.booleans() | integers | floats | st.floats() | strings
keys = integers | strings | st.integers(0, 9).flatmap(lambda digit: st.sampled_from([digit, str(digit)]))
trees = st.recursive(
    scalars | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


def same(left: Any, right: Any) -> bool:
    """Whether two trees agree to the bit: types, order of keys, signs of zeros, what a NaN carries."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return (left.dtype, left.shape) == (right.dtype, right.shape) and bytes_of(left) == bytes_of(right)
    if isinstance(left, dict):
        return same(list(left), list(right)) and all(same(part, right[key]) for key, part in left.items())
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return struct.pack("<d", left) == struct.pack("<d", right) if isinstance(left, float) else bool(left == right)
