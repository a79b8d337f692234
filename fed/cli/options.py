"""Options and arguments that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["File", "FileUnlessResumed", "Json", "Output", "Overwrite", "Report", "Resume", "Settings"]

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
