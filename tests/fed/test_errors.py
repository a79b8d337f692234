"""Errors keep their place in the tree when they are told where they belong, a user's own kinds too."""

import pytest

from fed.errors import InvalidData, OutputExists, located


class NoArchive(InvalidData):
    """A user's own kind, which is not made from a text alone."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path} is no archive:\n{reason}")


def test_every_line_begins_with_the_place() -> None:
    with pytest.raises(InvalidData, match=r"^a.yaml: x.zip is no archive:\na.yaml: it is empty$"), located("a.yaml"):
        raise NoArchive("x.zip", "it is empty")


def test_a_kind_of_ours_stays_that_kind() -> None:
    with pytest.raises(OutputExists, match=r"^--output: there is something$"), located("--output"):
        raise OutputExists("there is something")
