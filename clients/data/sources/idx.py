"""Source ``idx``: images and labels in MNIST's IDX format (LeCun, Cortes & Burges), plain or gzipped.

A file is a header, bytes 0 0 8 d and d sizes as big-endian 32-bit integers, then that many unsigned bytes.
"""

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fed.clients.data import held_out
from fed.clients.data.held import Pair
from fed.clients.data.samples import Samples
from fed.errors import InvalidData
from fed.vectors.tensors import torch

__all__ = ["idx", "read_idx"]

_UNSIGNED_BYTE = 8
_REMEDY = "fetch the file again"


def idx(path: str, test_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2) -> Samples:
    """A folder of MNIST's files: ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``, ``t10k-…``, plain or .gz.

    Images become values in [0, 1] of shape [1, height, width]. ``train-*`` is trained on and ``t10k-*`` is the test
    set; where the folder holds one pair only, the last ``test_fraction`` of its samples, in their order, is.

    Args:
        path: the folder, relative to the working directory.
        test_fraction: the share of samples to test on, where there is only one pair of files.

    Raises:
        InvalidData: if a file is missing, damaged, or of another format; the message names it.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise InvalidData(f"data.path must be a folder of IDX files, got {path}: there is no such folder")
    pairs = {part: _read_pair(folder, part) for part in ("train", "t10k") if _find(folder, part, "images")}
    if not pairs:
        raise InvalidData(
            f"{path} must hold train-images-idx3-ubyte or t10k-images-idx3-ubyte, plain or .gz, got neither: "
            "name the folder that does with data.path"
        )
    if len(pairs) == 2:
        return Samples(*pairs["train"], test=pairs["t10k"])
    ((inputs, targets),) = pairs.values()
    # The last ones, undrawn: this source asks for no random stream.
    test = held_out.share(len(targets), test_fraction)
    train = len(targets) - test
    return Samples(inputs[:train], targets[:train], (inputs[train:], targets[train:]) if test else None)


def read_idx(file: Path) -> NDArray[np.uint8]:
    """The array of unsigned bytes that an IDX file holds.

    Raises:
        InvalidData: if the file cannot be read, is of another format, or has more or fewer bytes than its header says.
    """
    content = _content(file)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != _UNSIGNED_BYTE or not content[3]:
        raise InvalidData(
            f"{file}: an IDX file of unsigned bytes must begin with bytes 00 00 08 and its number of dimensions, "
            f"got {content[:4].hex(' ') or 'an empty file'}: {_REMEDY}, or choose another data.kind"
        )
    header_bytes = 4 + 4 * content[3]
    shape = struct.unpack(f">{content[3]}I", content[4:header_bytes]) if len(content) >= header_bytes else ()
    expected = header_bytes + math.prod(shape)  # Python's integers do not overflow, whatever a damaged header says
    if not shape or len(content) != expected:
        raise InvalidData(
            f"{file}: must hold {expected} bytes, as many as its header says, got {len(content)}: "
            f"the file is {'truncated' if len(content) < expected else 'too long'}; {_REMEDY}"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header_bytes).reshape(shape)


def _content(file: Path) -> bytes:
    try:
        return gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:  # EOFError: the end of a compressed file is missing
        raise InvalidData(f"{file}: cannot be read ({error}): {_REMEDY}") from None


def _read_pair(folder: Path, part: str) -> Pair:
    images_file = _find(folder, part, "images")
    labels_file = _find(folder, part, "labels")
    if images_file is None or labels_file is None:
        raise InvalidData(f"{folder} must hold {part}-labels-idx1-ubyte beside {images_file}, got none: {_REMEDY}")
    images = read_idx(images_file)
    labels = read_idx(labels_file)
    if images.ndim < 2 or labels.ndim != 1 or len(images) != len(labels) or not len(labels):
        raise InvalidData(
            f"{labels_file} must hold one label for each image of {images_file}, got labels of shape {labels.shape} "
            f"and images of shape {images.shape}: {_REMEDY}"
        )
    inputs = torch.from_numpy(images.astype(np.float32)).div_(255)
    return inputs.unsqueeze(1) if inputs.ndim == 3 else inputs, torch.from_numpy(labels.astype(np.int64))


def _find(folder: Path, part: str, content: str) -> Path | None:
    # Both ways of writing the name are in circulation; where a plain and a .gz file stand side by side, the plain one.
    found = [file for dot in "-." for file in folder.glob(f"{part}-{content}{dot}idx[1-9]-ubyte*")]
    files = [file for file in found if file.name.endswith(("-ubyte", "-ubyte.gz"))]
    return min(files, key=lambda file: (file.suffix == ".gz", file.name), default=None)
