"""Commands of the command line, run in this process."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from fed.cli.main import main

__all__ = ["Result", "Run", "runner"]


class Result(NamedTuple):
    """The exit code, and what was written to standard output and to standard error."""

    code: int
    out: str
    err: str


Run = Callable[..., Result]


def runner(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *command: str) -> Run:
    """Run ``command`` and further arguments in a working folder."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("COLUMNS", raising=False)

    def run(*arguments: str) -> Result:
        return Result(main([*command, *arguments]), *capsys.readouterr())

    return run
