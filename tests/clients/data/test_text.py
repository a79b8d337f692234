"""A play, cut into its speakers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fed.clients.data import FederatedData
from fed.clients.data.sources.text import speeches, text
from fed.errors import InvalidData

PLAY = """The Play of the Test

First Citizen:
Before we proceed any further,
hear me speak.

ALL:
Speak, speak.
HAMLET: To be,
or not to be:
that is the question.

First Citizen:
You are all resolved.
"""


def written(folder: Path, content: str = PLAY, name: str = "play.txt") -> str:
    (folder / name).write_text(content, encoding="utf-8")
    return str(folder / name)


def test_who_says_what() -> None:
    assert list(speeches(PLAY.splitlines())) == [
        ("First Citizen", "Before we proceed any further,\nhear me speak.\n"),
        ("ALL", "Speak, speak.\n"),
        ("HAMLET", "To be,\nor not to be:\nthat is the question.\n"),
        ("First Citizen", "You are all resolved.\n"),
    ]


@pytest.mark.parametrize("cue", ["ROMEO:", "Romeo:", "LADY CAPULET:", "Citizen 2:", "KING HENRY VI:", "Élise:"])
def test_what_is_a_speaker(cue: str) -> None:
    assert list(speeches(["verse", cue, "words"])) == [(cue[:-1], "words\n")]


@pytest.mark.parametrize("line", ["and then he said:", "O Romeo: come", "12:", ":", "he:", "no colon"])
def test_what_is_no_speaker(line: str) -> None:
    assert list(speeches(["A:", "word", line, "more"])) == [("A", f"word\n{line.strip()}\nmore\n")]


def test_targets_are_the_next_characters(tmp_path: Path, loaded: Callable[..., FederatedData]) -> None:
    data = loaded(kind="text", path=written(tmp_path), sequence_length=7, test_fraction=0.0)
    assert list(data.train) == ["ALL", "First Citizen", "HAMLET"]
    said = "".join(words for _, words in speeches(PLAY.splitlines()))
    characters = sorted(set(said))
    assert data.number_of_classes() == len(characters)
    x, y = data.train["First Citizen"]
    assert (x.dtype, y.dtype, x.shape, y.shape) == (torch.int64, torch.int64, (9, 7), (9, 7))
    words = "Before we proceed any further,\nhear me speak.\nYou are all resolved.\n"
    assert "".join(characters[code] for code in x.flatten().tolist()) == words[:63]
    assert "".join(characters[code] for code in y.flatten().tolist()) == words[1:64]


def test_speakers_who_say_too_little_are_left_out(tmp_path: Path, loaded: Callable[..., FederatedData]) -> None:
    path = written(tmp_path)
    assert list(loaded(kind="text", path=path, sequence_length=20).train) == ["First Citizen", "HAMLET"]
    assert list(loaded(kind="text", path=path, sequence_length=20, min_samples=3).train) == ["First Citizen"]
    # A character needs a next one: 14 characters make one sequence of 13, none of 14.
    assert "ALL" in loaded(kind="text", path=path, sequence_length=13).train
    assert "ALL" not in loaded(kind="text", path=path, sequence_length=14).train


def test_a_folder_of_plays_is_one_corpus(tmp_path: Path, loaded: Callable[..., FederatedData]) -> None:
    written(tmp_path, name="a.txt")
    written(tmp_path, "HAMLET:\nWords, words, words.\n", name="b.txt")
    assert list(loaded(kind="text", path=str(tmp_path), sequence_length=7).train) == ["ALL", "First Citizen", "HAMLET"]
    by_file = loaded(kind="text", path=str(tmp_path), sequence_length=7, partition={"kind": "file"}, test_fraction=0.0)
    assert by_file.sizes == {"a": len(text(str(tmp_path / "a.txt"), sequence_length=7)), "b": 2}


def test_what_is_no_play_is_refused_in_a_line(tmp_path: Path) -> None:
    def refused(path: str, **keys: int) -> str:
        with pytest.raises(InvalidData) as caught:
            text(path, **keys)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "data.path must be a file or a folder that exists" in refused(str(tmp_path / "none.txt"))
    assert "files that end in .txt" in refused(str(tmp_path))
    assert "must hold lines such as ROMEO:" in refused(written(tmp_path, "only prose\n"))
    assert "the most is 68: lower data.sequence_length" in refused(written(tmp_path), sequence_length=80)
    (tmp_path / "latin.txt").write_bytes("RÖMER:\nja\n".encode("latin-1"))
    assert "must be text in UTF-8, which byte 1 is not" in refused(str(tmp_path / "latin.txt"))
