"""Checkpoint files: safetensors with a seal, the SHA-256 of all other bytes.

The seal reveals any change of a file, its length included. It is checked without PyTorch, so that listing runs is
fast. A file holds two arrays of bytes, ``structure`` and ``tensors`` (:mod:`fed.storage.serialization`). An entry for
each tensor would need a larger header than the 100 MB that safetensors reads, where a million clients have a state.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from fed.storage.atomic_files import unfinished

__all__ = ["file_name", "flaw_of", "newest_whole", "numbers_in", "remove_all", "remove_unfinished", "write_sealed"]

_NAME = re.compile(r"round-([0-9]{6,})\.safetensors")
_SEAL = "format 1, round {number}, sha256 {digest}"
# Found without parsing JSON that may be damaged.
_SEALED = re.compile(rb'"checkpoint":"format ([0-9]+), round ([0-9]+), sha256 ([0-9a-f]{64})"')
_UNSEALED = "0" * 64  # is hashed in the digest's place, as no digest can cover itself
_HEADER_BYTES = 4096
"""Upper bound of a header's length."""
_PIECE_BYTES = 1 << 20


def file_name(number: int) -> str:
    """The name of a round's checkpoint.

    Example:
        >>> file_name(12), file_name(12_345_678)
        ('round-000012.safetensors', 'round-12345678.safetensors')
    """
    return f"round-{number:06d}.safetensors"


def numbers_in(folder: Path) -> list[int]:
    """The rounds of a folder's checkpoints, whole or damaged, in ascending order; none where there is no folder.

    Raises:
        OSError: if the folder cannot be read.
    """
    if not folder.exists():
        return []
    found = [_NAME.fullmatch(path.name) for path in folder.iterdir()]
    return sorted(number for match in found if match and file_name(number := int(match[1])) == match[0])


def newest_whole(folder: Path, rounds: int | None = None) -> tuple[int | None, list[str]]:
    """The round of the newest checkpoint that a run can resume from, and the flaws of all newer ones.

    Args:
        folder: folder of the checkpoints; it need not exist.
        rounds: the number of rounds with metrics: no later checkpoint fits. None: all fit.

    Returns:
        The round, or None; for each newer checkpoint its path and what is wrong with it.

    Raises:
        OSError: if the folder cannot be read.
    """
    flaws: list[str] = []
    for number in reversed(numbers_in(folder)):
        path = folder / file_name(number)
        # Rounds behind the last line of the metrics would be missing from them for ever.
        if rounds is not None and number > rounds:
            flaw: str | None = f"is newer than metrics.jsonl, which ends with round {rounds}"
        else:
            flaw = flaw_of(path, number)
        if flaw is None:
            return number, flaws
        flaws.append(f"{path} {flaw}")
    return None, flaws


def remove_unfinished(folder: Path) -> None:
    """Remove the unfinished files of a process that was killed while it wrote.

    Raises:
        OSError: if it cannot be removed.
    """
    for path in unfinished(folder, ["round-*.safetensors"]):
        path.unlink(missing_ok=True)


def remove_all(folder: Path) -> None:
    """Remove a folder's checkpoints, and the folder unless it holds anything else.

    Raises:
        OSError: if they cannot be removed.
    """
    if not folder.is_dir():
        return
    for number in numbers_in(folder):
        (folder / file_name(number)).unlink(missing_ok=True)
    remove_unfinished(folder)
    if not any(folder.iterdir()):
        folder.rmdir()


def write_sealed(file: BinaryIO, number: int, structure: bytes, tensors: Iterable[memoryview], size_bytes: int) -> None:
    """Write a checkpoint.

    Args:
        file: new, empty and seekable.
        number: number of the round.
        structure: the tree without its tensors' numbers.
        tensors: the bytes of its tensors. Each is asked for after the one before has been written.
        size_bytes: the total length of the tensors.

    Raises:
        OSError: if there is no room.
    """
    header = _header(number, len(structure), size_bytes)
    # The digest is taken while the file is written: a second pass would read gigabytes again.
    digest = hashlib.sha256(header)
    file.write(header)
    parts: Iterator[bytes | memoryview] = chain([structure], tensors)
    for part in parts:
        digest.update(part)
        file.write(part)
    file.seek(header.index(_UNSEALED.encode()))  # the digest is known only now that all tensors have been written
    file.write(digest.hexdigest().encode())


def _header(number: int, structure_bytes: int, tensors_bytes: int) -> bytes:
    end = structure_bytes + tensors_bytes
    content = {
        "__metadata__": {"checkpoint": _SEAL.format(number=number, digest=_UNSEALED)},
        "structure": {"dtype": "U8", "shape": [structure_bytes], "data_offsets": [0, structure_bytes]},
        "tensors": {"dtype": "U8", "shape": [tensors_bytes], "data_offsets": [structure_bytes, end]},
    }
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # safetensors aligns what follows the header to 8 bytes
    return len(text).to_bytes(8, "little") + text


def flaw_of(path: Path, number: int) -> str | None:
    """The end of a sentence that says what is wrong with a round's checkpoint; None if it is whole."""
    try:
        with path.open("rb") as file:
            return _flaw(file, number)
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _flaw(file: BinaryIO, number: int) -> str | None:
    piece = file.read(_HEADER_BYTES)
    seal = _SEALED.search(piece)
    if seal is None:
        return "is empty" if not piece else "does not begin as a checkpoint does"
    start, end = seal.span(3)
    digest = hashlib.sha256(piece[:start] + _UNSEALED.encode() + piece[end:])
    while piece := file.read(_PIECE_BYTES):
        digest.update(piece)
    if digest.hexdigest().encode() != seal[3]:
        return "is damaged: its content does not have the checksum that it names"
    # After the checksum: a damaged file may claim any format.
    if seal[1] != b"1":
        return f"is of format {seal[1].decode()}, which this version of fed cannot read"
    return None if int(seal[2]) == number else f"is the checkpoint of round {int(seal[2])} under another name"
