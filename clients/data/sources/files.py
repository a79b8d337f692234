"""Files that a source reads, found in a folder."""

from pathlib import Path

from fed.errors import InvalidData

__all__ = ["files_of"]


def files_of(path: str, suffix: str) -> list[Path]:
    """Files of a source: one file, or, in order of their names, all files of a folder with an ending.

    Args:
        path: file or folder, relative to the working directory; ``~`` is one's home.
        suffix: ending of the names of a folder's files, such as ``.csv``.

    Raises:
        InvalidData: if there is no such file or folder, or the folder holds no such file.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise InvalidData(f"data.path must be a file or a folder that exists, got {path}: correct the path")
    files = sorted(file for file in place.iterdir() if file.suffix == suffix and file.is_file())
    if not files:
        raise InvalidData(f"data.path must hold files that end in {suffix}, got the folder {path} with none of them")
    return files
