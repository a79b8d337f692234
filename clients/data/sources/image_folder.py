"""Source ``image_folder``: images in files, a folder a class.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field, PositiveInt

from fed.clients.data.datasets import DatasetSamples
from fed.clients.data.held import Held, Pair
from fed.clients.data.samples import Names, Samples
from fed.config.validation import nearest
from fed.errors import InvalidData
from fed.vectors.tensors import Tensor, torch

__all__ = ["image_folder"]

_ENDINGS = {".bmp", ".gif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
_PARTS = ("train", "test")

_Size = PositiveInt | Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False)]


def image_folder(
    path: str,
    size: _Size | None = None,
    grayscale: bool = False,
    classes: list[str] | None = None,
    as_needed: bool = False,
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
        as_needed: True to read an image whenever a batch needs it, for more images than memory holds; False to read all
            of them once. Results have the same bits.

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
    images = {part: _Images(files, names, how) for part, files in found.items()}
    train = images.get("train") or images[parts[0]]
    test = images["test"] if len(images) == 2 else None
    take: Callable[[_Images], Held] = partial(DatasetSamples, owner=path) if as_needed else _Images.all
    held = take(train)
    return Samples(
        held if isinstance(held, DatasetSamples) else held[0],
        torch.tensor(train.targets),
        test=None if test is None else take(test),
        classes=len(names),
        names=Names(labels=tuple(names)),
    )


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


class _Images:
    """Images and the numbers of their classes, each read when it is asked for.

    Args:
        files: name of the class and path of every image.
        names: names of the classes in the order of their numbers.
        how: form in which images are read.
    """

    def __init__(self, files: list[tuple[str, Path]], names: list[str], how: _How) -> None:
        numbers = {name: number for number, name in enumerate(names)}
        self.targets = [numbers[name] for name, _ in files]
        self._files = [file for _, file in files]
        self._how = how
        self._shape = _pixels(self._files[0], how).shape

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, place: int) -> Pair:
        file = self._files[place]
        image = _pixels(file, self._how)
        if image.shape != self._shape:
            raise InvalidData(
                f"{file}: images must have one size, got {_said(image.shape)} beside {_said(self._shape)} of "
                f"{self._files[0]}: give data.size, to which all are resized"
            )
        return image, torch.tensor(self.targets[place])

    def all(self) -> Pair:
        """All images in memory."""
        # One image at a time into its place: no more than one is held twice.
        inputs = torch.empty((len(self), *self._shape))
        for place in range(len(self)):
            inputs[place] = self[place][0]
        return inputs, torch.tensor(self.targets)


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


def _said(shape: Sequence[int]) -> str:
    return f"{shape[1]}×{shape[2]} pixels"
