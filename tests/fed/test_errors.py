"""Errors keep their place in the tree when they are told where they belong, a user's own kinds too."""

import re
import sys
from typing import Any, cast

import pytest
import torch

from fed.errors import (
    InvalidData,
    OutputExists,
    RunFailed,
    error_with_line,
    in_one_sentence,
    located,
    users_errors_as,
)


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


def test_only_the_error_meant_is_printed_without_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.excepthook", sys.__excepthook__)
    meant = in_one_sentence(RunFailed("it could not start"))
    for error in (meant, RunFailed("another")):
        try:
            raise error
        except RunFailed:
            sys.excepthook(*cast(Any, sys.exc_info()))
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r".*test_errors\.py:\d+: it could not start", first)
    assert second == "Traceback (most recent call last):"


def test_users_errors_become_one_sentence_with_their_place() -> None:
    def broken() -> None:
        raise ValueError("no such\nthing")

    with (
        pytest.raises(InvalidData, match=r"^my source raised ValueError: no such, at .*errors\.py:\d+: correct it$"),
        users_errors_as(InvalidData, "my source"),
    ):
        broken()
    with pytest.raises(OutputExists, match="as it is"), users_errors_as(InvalidData, "my source"):
        raise OutputExists("as it is")


def test_a_failed_download_is_to_be_tried_again() -> None:
    with (
        pytest.raises(
            InvalidData, match=r"raised ConnectionError: no route, at .*: see that the file or the network is"
        ),
        users_errors_as(InvalidData, "python:mine:load"),
    ):
        raise ConnectionError("no route")


def test_the_place_of_an_error_is_the_users_own_line() -> None:
    with (
        pytest.raises(InvalidData, match=r"my source raised \w+: .*, at .*test_errors\.py:\d+: correct it"),
        users_errors_as(InvalidData, "my source"),
    ):
        torch.nn.functional.mse_loss(torch.zeros(2), torch.zeros(2).tolist())  # type: ignore[arg-type]  # the mistake


def test_an_error_is_told_with_the_users_line() -> None:
    forward = compile("raise RuntimeError('shapes differ')", "my_model.py", "exec")
    with pytest.raises(RuntimeError) as caught:
        exec(forward, {"__name__": "my_model"})
    assert error_with_line(caught.value) == "RuntimeError: shapes differ, at my_model.py:1"
