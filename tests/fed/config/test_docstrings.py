"""What is read from docstrings is what stands there."""

from fed.clients.data.sources.tables import csv, parquet
from fed.config.docstrings import arguments, summary


class Base:
    """A base.

    Args:
        lr: of the base.
        decay: of both.
    """


class Derived(Base):
    """A derived class.

    Args:
        lr: of the derived class (in
            two lines): with a colon.
        names (list): typed.

    Raises:
        ValueError: which is no argument.
    """


def test_a_class_has_its_own_arguments_and_its_bases() -> None:
    assert arguments(Derived) == {
        "decay": "of both.",
        "lr": "of the derived class (in two lines): with a colon.",
        "names": "typed.",
    }


def test_a_function_has_the_arguments_that_it_says_to_share() -> None:
    assert arguments(parquet) == arguments(csv) != {}


def test_without_a_docstring_there_is_nothing_to_say() -> None:
    def silent(lr: float) -> None: ...

    assert (summary(silent), arguments(silent)) == ("", {})


def test_the_summary_is_the_first_line() -> None:
    assert summary(Derived) == "A derived class."
