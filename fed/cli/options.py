"""Options and arguments that several commands share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["File", "FileUnlessResumed", "Json", "Output", "Overwrite", "Report", "Resume", "RunOptions", "Settings"]

File = Annotated[Path, typer.Argument(metavar="FILE", help="A YAML file.")]
FileUnlessResumed = Annotated[Path | None, typer.Argument(metavar="FILE", help="A YAML file.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Another value for one key of the file, in YAML: rounds.count=5, or base.rounds.count=5 in a comparison. "
        "A mapping replaces the whole section. Repeatable.",
    ),
]
Output = Annotated[
    Path | None, typer.Option(help="The folder to write into; a new one in runs/ unless given.", metavar="DIR")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Take the place of an earlier run in that folder.")]
Resume = Annotated[
    Path | None, typer.Option(help="Resume the run in this folder, from its last checkpoint.", metavar="DIR")
]
Report = Annotated[bool, typer.Option("--report", help="Draw the run at its end, into report.html in its folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print the summary as JSON alone on standard output.")]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a command that runs one experiment: which one, where it writes, and how its outcome is told.

    Args:
        file: file of the experiment; None: that of the run to resume.
        settings: values in place of the file's.
        output: folder of the run; None: a new one below ``runs``.
        overwrite: True to replace a run that is there.
        resume: folder of a run to resume, or None; nothing else may be given then.
        report: True to draw the run at its end.
        json: True to print the summary as JSON.
    """

    file: Path | None = None
    settings: list[str] | None = None
    output: Path | None = None
    overwrite: bool = False
    resume: Path | None = None
    report: bool = False
    json: bool = False
