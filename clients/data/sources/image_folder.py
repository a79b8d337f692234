"""Source ``image_folder``: images in files, a folder a class.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field, PositiveInt

from fed.clients.data.held import Pair
from fed.clients.data.samples import Names, Samples
from fed.config.validation import nearest
from fed.errors import InvalidData
from fed.vectors.tensors import Tensor, torch

__all__ = ["image_folder"]

_ENDINGS = {".bmp", ".gif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
_PARTS = ("train", "test")

_Size = PositiveInt | Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False)]


def image_folder(
    path: str, size: _Size | None = None, grayscale: bool = False, classes: list[str] | None = None
) -> Samples:
    """A folder of images: ``path/cat/1.png``, ``path/dog/1.png``, a folder a class; files of other kinds are left out.

    Images become values in [0, 1] of shape [3, height, width], or [1, height, width] in shades of gray, in float32. A
    folder ``train`` and a folder ``test``, each with a folder a class, are what is trained on and the test set. A JPEG
    may have other bits where another version of the library decodes it; a PNG never has.

    Args:
        path: the folder, relative to the working directory.
        size: height and width in pixels that images are resized to, one number for both, or [height, width]; unless
            given, all images must have one size.
        grayscale: True to read images in shades of gray.
        classes: names of the classes' folders, in the order of their numbers; sorted unless given. A folder may be
            missing, as at a node that has no image of a class; one that is not named is refused.

    Raises:
        InvalidData: if a file is damaged, of another size or of another class; the message names it.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        raise InvalidData(f"data.path must be a folder with a folder of images a class, got {path}: correct the path")
    within = sorted(_folders(root))
    parts = within if within and set(within) <= set(_PARTS) else [""]
    found = {part: _files(root / part, classes) for part in parts}
    names = classes or sorted({name for files in found.values() for name, _ in files})
    how = _How(size, grayscale=grayscale)
    pairs = {part: _pair(files, names, how) for part, files in found.items()}
    inputs, targets = pairs.get("train") or pairs[parts[0]]
    test = pairs["test"] if len(pairs) == 2 else None
    return Samples(inputs, targets, test=test, classes=len(names), names=Names(labels=tuple(names)))


class _How(NamedTuple):
    """Size in pixels that images are read in, None for their own, and whether in shades of gray."""

    size: int | tuple[int, int] | None
    grayscale: bool


def _folders(place: Path) -> list[str]:
    return [entry.name for entry in place.iterdir() if entry.is_dir() and not entry.name.startswith(".")]


def _files(place: Path, classes: list[str] | None) -> list[tuple[str, Path]]:
    """Name of the class and path of every image, in the order of both."""
    folders = sorted(_folders(place))
    known = folders if classes is None else classes
    for name in folders:
        if name not in known:
            raise InvalidData(
                f"{place}: a folder must be named like one of data.classes, got {name!r}{nearest(name, known)}: "
                "rename or move it, or add the class"
            )
    files = [(name, file) for name in folders for file in _images(place / name)]
    if not files:
        endings = ", ".join(sorted(_ENDINGS))
        raise InvalidData(
            f"{place} must hold a folder of images for each class, such as {place / 'cat' / '1.png'}, got no image in "
            f"{len(folders)} folders: files must end in one of {endings}"
        )
    return files


def _images(folder: Path) -> Iterator[Path]:
    # By the parts of the path, so that the order is that of names on every system.
    for file in sorted(folder.rglob("*"), key=lambda file: file.relative_to(folder).parts):
        if file.suffix.lower() in _ENDINGS and file.is_file() and not file.name.startswith("."):
            yield file


def _pair(files: list[tuple[str, Path]], names: list[str], how: _How) -> Pair:
    first = _pixels(files[0][1], how)
    # One image at a time into its place: no more than one is held twice.
    inputs = torch.empty((len(files), *first.shape))
    for place, (_, file) in enumerate(files):
        image = first if place == 0 else _pixels(file, how)
        if image.shape != first.shape:
            raise InvalidData(
                f"{file}: images must have one size, got {_said(image)} beside {_said(first)} of {files[0][1]}: give "
                "data.size, to which all are resized"
            )
        inputs[place] = image
    numbers = {name: number for number, name in enumerate(names)}
    return inputs, torch.tensor([numbers[name] for name, _ in files])


def _pixels(file: Path, how: _How) -> Tensor:
    """Pixels of an image, [channels, height, width] in [0, 1]."""
    from PIL import Image

    try:
        with Image.open(file) as image:
            if image.mode.startswith(("I", "F")):
                raise InvalidData(
                    f"{file}: images must have 8 bits a channel, got the mode {image.mode}: convert it, or read the "
                    "images with a source of your own"
                )
            read = image.convert("L" if how.grayscale else "RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, InvalidData):
            raise
        raise InvalidData(f"{file}: cannot be read as an image ({error}): remove it, or save it anew") from None
    if how.size is not None:
        height, width = (how.size, how.size) if isinstance(how.size, int) else how.size
        read = read.resize((width, height), Image.Resampling.BILINEAR)
    channels_last = torch.from_numpy(np.asarray(read).astype(np.float32)).div_(255).reshape(read.height, read.width, -1)
    return channels_last.movedim(2, 0)


def _said(image: Tensor) -> str:
    return f"{image.shape[1]}×{image.shape[2]} pixels"
