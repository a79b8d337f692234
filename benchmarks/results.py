"""Comparisons behind the tables of README.md and of pages in docs/, and the tables, written between their markers.

    python benchmarks/results.py                       # all that can be run here; seven minutes on two cores
    python benchmarks/results.py personal mnist        # these tables alone
    python benchmarks/results.py --from runs/results   # the tables again, of comparisons that have been run

A comparison is run by ``fed compare examples/NAME.yaml`` into runs/results/NAME. Tables whose data a user must bring,
and has not brought, stay as they are, and are named.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from compared import Compared
from report import put_into
from results_tables import RESULTS, ROOT, ResultTable
from rich.console import Console

import fed
from fed.errors import InvalidInput
from fed.quantities import duration_text

EXAMPLES = ROOT / "examples"
FED = Path(sys.executable).with_name("fed")


def main() -> int:
    """Run what the tables need, write them, and say what has not been written."""
    given = _arguments()
    console = Console(stderr=True)
    names = given.names or list(RESULTS)
    folder = given.read or given.output
    absent: dict[str, str] = {}
    for name in dict.fromkeys(of for table in names for of in RESULTS[table].comparisons):
        if given.read is None and (lacking := _lacking_data(name)):
            absent[name] = lacking
        elif given.read is None:
            _run(name, folder / name, console)
        elif not given.names and not (folder / name).is_dir():
            absent[name] = f"{folder / name} is not there"
    for name in names:
        if missing := [absent[of] for of in RESULTS[name].comparisons if of in absent]:
            console.print(f"{name} stays as it is: {missing[0]}")
            continue
        try:
            _write(name, RESULTS[name], folder, console)
        except InvalidInput as error:
            console.print(f"error: {error}", style="red")
            return 1
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"a table: {', '.join(RESULTS)}; all by default")
    parser.add_argument("--output", type=Path, default=Path("runs/results"), help="the folder of the comparisons")
    parser.add_argument("--from", dest="read", type=Path, metavar="FOLDER", help="run nothing; read what FOLDER holds")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in RESULTS]:
        parser.error(f"there is no table {', '.join(unknown)}: choose from {', '.join(RESULTS)}")
    return given


def _lacking_data(name: str) -> str:
    """Sentence on data that a comparison reads and that are not there; empty where all are."""
    comparison = fed.Comparison.load(EXAMPLES / f"{name}.yaml")
    for variant in comparison.variants().values():
        path = getattr(variant.data, "path", None)
        if path is not None and not Path(path).exists():
            return f"examples/{name}.yaml reads {path}, which is not there; it says how to bring it"
    return ""


def _run(name: str, folder: Path, console: Console) -> None:
    """Run a comparison by the command that the page names: by its own program, where it has one."""
    command = [str(FED), "compare", str(EXAMPLES / f"{name}.yaml"), "--output", str(folder), "--overwrite"]
    if (EXAMPLES / f"{name}.py").is_file():
        command = [sys.executable, "-m", f"examples.{name}", str(folder)]
    began = time.monotonic()
    subprocess.run(command, check=True)
    console.print(f"{shlex.join(command)}: {duration_text(time.monotonic() - began)}")


def _write(name: str, result: ResultTable, folder: Path, console: Console) -> None:
    found = [Compared.read(folder / of) for of in result.comparisons]
    markers = _markers(name)
    if not put_into(result.page, result.table(*found), markers):
        raise InvalidInput(f"{result.page.name} must have the lines {' and '.join(markers)}: add them")
    if result.picture and result.draw:
        result.picture.write_text(result.draw(*found), encoding="utf-8")
    elif result.picture:
        shutil.copyfile(found[0].folder / "comparison.svg", result.picture)
    spent = duration_text(sum(of.training_s for of in found))
    console.print(f"{name} is written to {os.path.relpath(result.page)}: {spent} of training")


def _markers(name: str) -> tuple[str, str]:
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


if __name__ == "__main__":
    sys.exit(main())
