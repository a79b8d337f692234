"""Source ``text``: a play, whose speakers are clients that predict the next character.

McMahan et al., "Communication-efficient learning of deep networks from decentralized data", 2017, 1602.05629: a role of
Shakespeare's is a client.

Shapes: see :mod:`fed.vectors.layout`.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from fed.clients.data.samples import Names, Samples
from fed.clients.data.sources.files import files_of
from fed.errors import InvalidData
from fed.vectors.tensors import torch

__all__ = ["speeches", "text"]

# At most 40 letters: a sentence with a colon in it names no speaker.
_CUE = re.compile(r"\s*(?P<speaker>[^\W\d_][^:]{0,39}):(?P<words>.*)")


def text(path: str, sequence_length: PositiveInt = 80, min_samples: PositiveInt = 1) -> Samples:
    """Play, whose speakers are the clients: each learns to predict the next character of its own speeches.

    All speeches of a speaker are joined and cut into sequences; inputs and targets are numbers of characters,
    [E, T] int64, the targets one character further on. The classes are the characters of all speeches, in their order.

    Args:
        path: a play in UTF-8, in which a line such as ROMEO: stands before what the speaker says, or a folder of such
            with names in .txt; relative to the working directory.
        sequence_length: T, characters of a sequence.
        min_samples: the fewest sequences that a speaker must have to be a client; others are left out.

    Raises:
        InvalidData: if the text cannot be read, has no speakers, or none of them says enough.
    """
    spoken = _spoken(files_of(path, ".txt"))
    if not spoken:
        raise InvalidData(f"{path}: must hold lines such as ROMEO: before what is said, got none: check the text")
    # Sorted, for the order of a set changes from run to run.
    characters = sorted({character for words in spoken.values() for character in words})
    number = {character: index for index, character in enumerate(characters)}
    codes = {place: np.array([number[character] for character in words]) for place, words in spoken.items()}
    cuts = zip(*(_cut(code, sequence_length) for code in codes.values()), strict=True)
    inputs, targets = (torch.from_numpy(np.concatenate(parts)) for parts in cuts)
    counts = [(len(code) - 1) // sequence_length for code in codes.values()]
    files, speakers = zip(*codes, strict=True)
    columns = {"file": np.repeat(files, counts), "client": np.repeat(speakers, counts)}
    _, speaker_E, sequences = np.unique(columns["client"], return_inverse=True, return_counts=True)
    kept_E = sequences[speaker_E] >= min_samples
    if not kept_E.any():
        raise InvalidData(
            f"{path}: some speaker must say at least {min_samples} × {sequence_length} + 1 characters, the most is "
            f"{max(map(len, spoken.values()))}: lower data.sequence_length or data.min_samples"
        )
    names = Names(labels=tuple(characters))
    samples = Samples(inputs, targets, columns=columns, classes=len(characters), names=names)
    return samples.take(np.flatnonzero(kept_E))


def _spoken(files: list[Path]) -> dict[tuple[str, str], str]:
    """Speeches of each speaker, joined, by file and speaker."""
    spoken: dict[tuple[str, str], list[str]] = {}
    for file in files:
        for speaker, words in speeches(_lines(file)):
            spoken.setdefault((file.stem, speaker), []).append(words)
    return {place: "".join(words) for place, words in spoken.items()}


def _cut(code: NDArray[np.int64], length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    end = (len(code) - 1) // length * length  # the last character is a target alone
    return code[:end].reshape(-1, length), code[1 : end + 1].reshape(-1, length)


def speeches(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    r"""Speakers and their lines, in the play's order; text before the first speaker is dropped.

    A speaker is a line of its own that ends in a colon and is written like a name, Each Word So, or follows an empty
    line. Words may follow on the same line if the name is in CAPITALS.

    Example:
        >>> list(speeches(["A PLAY", "", "First Citizen:", "Speak,", "he said: speak.", "", "ALL: Aye!"]))
        [('First Citizen', 'Speak,\nhe said: speak.\n'), ('ALL', 'Aye!\n')]
    """
    speaker: str | None = None
    said: list[str] = []
    after_empty = True
    for line in lines:
        cue = _CUE.fullmatch(line.rstrip())
        if cue and _is_cue(cue["speaker"], cue["words"], after_empty):
            if speaker and said:
                yield speaker, "".join(said)
            speaker = cue["speaker"].strip()
            said = []
            line = cue["words"]
        after_empty = not line.strip()
        if not after_empty:
            said.append(line.strip() + "\n")
    if speaker and said:
        yield speaker, "".join(said)


def _is_cue(speaker: str, words: str, after_empty: bool) -> bool:
    if words.strip():
        return speaker.isupper()
    is_name = all(word[0].isupper() or word[0].isdigit() for word in speaker.split())
    return after_empty or is_name


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8-sig").splitlines()  # a byte order mark would be part of the first name
    except OSError as error:
        raise InvalidData(f"{file}: cannot be read ({error.strerror}): correct the path or its permissions") from None
    except UnicodeDecodeError as error:
        raise InvalidData(f"{file}: must be text in UTF-8, which byte {error.start} is not: convert it") from None
