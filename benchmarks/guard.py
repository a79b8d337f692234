"""Cost of a change: rounds a second of this checkout beside another one's, in alternating runs.

Both train the same workloads with the interpreter that runs this program, and so with the same packages.

    git worktree add ../before main
    python benchmarks/guard.py ../before
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from comparison import HERE, SIDES
from processes import ONE_THREAD, ROOT, CommandFailed, run
from ratios import Ratio
from report import Table
from rich.console import Console
from simulation import available, some_of
from workloads import WORKLOADS

ROOMS = ("aggregators", "clients", "server", "simulations")
WARM_UP = 0.25  # of the rounds


def packages_of(checkout: Path, folder: Path) -> Path:
    """Folder whose package ``fed`` is a checkout's, for PYTHONPATH.

    Args:
        checkout: folder of a checkout, with the folders of its packages.
        folder: empty; links are made here.

    Raises:
        CommandFailed: if that is no checkout of this project.
    """
    if missing := [name for name in ("fed", *ROOMS) if not (checkout / name / "__init__.py").exists()]:
        raise CommandFailed(f"{checkout} must be a checkout of this project, and has no {missing[0]}")
    package = folder / "fed"
    package.mkdir(parents=True)
    for part in (*(checkout / "fed").iterdir(), *(checkout / room for room in ROOMS)):
        if part.name != "__pycache__":
            (package / part.name).symlink_to(part.resolve())
    return folder


def round_s(packages: Path, problem: Path, side: str, rounds: int) -> float:
    """Seconds of a round, without the first quarter of them."""
    program = [sys.executable, str(HERE / "sides" / SIDES[side].program), str(problem), "--rounds", str(rounds)]
    said = run([*program, *SIDES[side].options], {**ONE_THREAD, "PYTHONPATH": str(packages)}).stdout
    ends_s = json.loads(said.splitlines()[-1])["ends_s"]
    first = int(WARM_UP * rounds)
    return float((ends_s[-1] - ends_s[first]) / (rounds - 1 - first))


def compare(problem: Path, side: str, packages: list[Path], repetitions: int, seconds: float) -> Ratio:
    """Ratio of this checkout's rounds a second to the other's.

    Args:
        problem: file that a workload has written.
        side: one of ours.
        packages: folders for PYTHONPATH, of this checkout and of the other.
        repetitions: number of runs of each checkout.
        seconds: approximate time that a run trains.
    """
    rounds = max(8, round(seconds / round_s(packages[0], problem, side, 8)))
    found: list[list[float]] = [[], []]
    for turn in range(repetitions):
        for which in (0, 1) if turn % 2 else (1, 0):  # each goes first as often as the other
            found[which].append(round_s(packages[which], problem, side, rounds))
    return Ratio.of(found[1], found[0])


def arguments() -> argparse.Namespace:
    """Arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ours = [name for name in SIDES if name.startswith("ours")]
    parser.add_argument("other", type=Path, help="another checkout of this project")
    parser.add_argument("--workloads", **some_of(WORKLOADS), help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--sides", **{**some_of(ours), "default": ["ours-0"]}, help=f"of {', '.join(ours)}")
    parser.add_argument("--repetitions", type=int, default=8, help="runs of each checkout, two or more")
    parser.add_argument("--seconds", type=float, default=4.0, help="about how long a run trains")
    return parser.parse_args()


def main() -> int:
    """Measure and print; 1 where this checkout is slower for certain."""
    given = arguments()
    console = Console(highlight=False)
    workloads, sides = available(given.workloads, given.sides)
    rows: list[Any] = []
    with tempfile.TemporaryDirectory() as name:
        packages = [packages_of(path, Path(name, place)) for place, path in (("this", ROOT), ("other", given.other))]
        problem = Path(name, "problem.npz")
        is_slower = False
        for workload in workloads:
            WORKLOADS[workload].write(problem)
            for side in sides:
                ratio = compare(problem, side, packages, given.repetitions, given.seconds)
                rows.append([WORKLOADS[workload].title, SIDES[side].title, str(ratio)])
                is_slower |= ratio.high < 1
    title = "Rounds a second of this checkout to the other's, with the interval that holds 95 of 100"
    console.print(Table(title, ["", "", "this : other"], rows).for_terminal())
    return int(is_slower)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CommandFailed as error:
        sys.exit(f"error: {error}")
