"""Reading of a comparison's folder: its results, and where each run is. It does not load PyTorch."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fed.errors import InvalidInput
from fed.storage.run_reader import json_of

__all__ = ["contents_of", "run_folders", "slugs"]


def contents_of(folder: Path) -> dict[str, Any]:
    """The results in a comparison's folder.

    Args:
        folder: folder of the comparison.

    Raises:
        InvalidInput: if there are none, or they cannot be read.
    """
    file = folder / "comparison.json"
    contents = json_of(file)
    if contents is None:
        raise InvalidInput(f"{folder} must hold a comparison that has ended, got no {file.name}: fed compare writes it")
    if not isinstance(contents.get("runs"), dict):
        raise InvalidInput(f"{file} must hold the runs by variant and seed, got something else: restore the file")
    return contents


def run_folders(folder: Path, contents: Mapping[str, Any]) -> Iterator[tuple[str, str, Path]]:
    """The name of the variant, the repetition as text, and the folder of each run of a comparison.

    Args:
        folder: folder of the comparison.
        contents: content of its ``comparison.json``.
    """
    slug_of = slugs(contents["runs"])
    elsewhere = contents.get("folders", {})  # of runs that existed before they were compared
    for name, by_repetition in contents["runs"].items():
        for repetition in by_repetition:
            own = folder / "runs" / slug_of[name] / f"seed-{repetition}"
            yield name, repetition, Path(elsewhere.get(name, {}).get(repetition, own))


def slugs(names: Iterable[str]) -> dict[str, str]:
    """A folder's name for each variant's: lower case, short, without what separates or hides folders, and distinct.

    Example:
        >>> slugs(["D-PSGD, ring", "d-psgd ring", "../é"])
        {'D-PSGD, ring': 'd-psgd-ring', 'd-psgd ring': 'd-psgd-ring-2', '../é': 'variant'}
    """
    chosen: dict[str, str] = {}
    for name in names:
        # 60 letters: file systems limit names to 255 bytes, and some systems whole paths to 260.
        plain = re.sub(r"[^a-z0-9.=]+", "-", name.lower()).strip("-.=")[:60] or "variant"
        number = 1
        # Two names may differ in letters that a folder's name cannot have.
        while (slug := plain if number == 1 else f"{plain}-{number}") in chosen.values():
            number += 1
        chosen[name] = slug
    return chosen
