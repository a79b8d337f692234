"""Time of a client's step of DP-SGD, beside a plain step and beside Opacus, for the built-in MLP and CNN.

Images are of 28 × 28 numbers, as MNIST's. Each measurement has a process of its own with one thread, as fed's workers
have; sides take turns, and the median counts. A second is one of a core's time. Opacus computes gradients of samples by
its hooks, or clips by their norms alone ("ghost"): the faster of both is the one that counts. Without options the table
goes into docs/benchmarks.md.

    python benchmarks/dp_sgd.py --turns 1 --models mlp
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
from comparison import PEERS
from machine import machine
from processes import ONE_THREAD, run
from report import Table, conclude
from rich.console import Console

from fed.aggregators.base import Phase
from fed.clients.models import cnn, mlp
from fed.clients.scoring.losses import cross_entropy
from fed.clients.training.private_trainer import ClientDraws, PrivateTrainer
from fed.clients.training.trainer import Trainer
from fed.config.experiment import Local
from fed.privacy.dp_sgd import SamplePrivacy
from fed.processes.machine import keep_freed_memory

sys.path.append(str(Path(__file__).resolve().parent / "sides"))
from private_problem import read_problem

HERE = Path(__file__).resolve().parent
MODELS = {"mlp": mlp, "cnn": cnn}
BATCHES = {"mlp": (64, 256), "cnn": (64,)}
AT_MOST = {"mlp": 2.0, "cnn": 3.0}
"""Times of a plain step that a step of DP-SGD may take at the larger batch."""
STEPS = {"mlp": 60, "cnn": 12}
SAMPLES = 4000
SHAPE = (1, 28, 28)
CLASSES = 10
SIDES = {
    "plain": "fed, plain step",
    "ours": "fed, DP-SGD",
    "hooks": "Opacus, hooks",
    "ghost": "Opacus, ghost clipping",
}
_CPU = torch.device("cpu")


def write_problem(path: Path, model: str, batch: int) -> None:
    """Write model, samples and size of a batch, the same for all sides."""
    torch.manual_seed(0)
    problem = {
        "module": MODELS[model](SHAPE, CLASSES),
        "inputs": torch.randn(SAMPLES, *SHAPE),
        "targets": torch.randint(CLASSES, (SAMPLES,)),
        "batch": batch,
    }
    torch.save(problem, path)


def step_s(path: str, side: str, steps: int) -> float:
    """Seconds of a step of ours or of a plain one, after as many steps that are not timed."""
    keep_freed_memory()
    problem = read_problem(path)
    samples = problem["inputs"], problem["targets"]
    local = Local(batch_size=problem["batch"], steps=steps, lr=0.1)
    parts = {"loss": cross_entropy, "local": local, "phase": Phase(), "device": _CPU, "may_ignore": False}
    seconds = []
    if side == "plain":
        trainer = Trainer(problem["module"], **parts)
        trainer.record_at_once()
    else:
        private = PrivateTrainer(problem["module"], **parts, privacy=SamplePrivacy(clip=1.0, noise_multiplier=1.0))
        trainer = private
    state = trainer.layout.pack(problem["module"])
    # The same draws again: what is timed has no shape that was not seen before.
    for _ in range(2):
        order = np.random.default_rng(0)
        began_s = process_time()
        if side == "plain":
            trainer.train(*state, samples, order=order, seed=0)
        else:
            private.train(*state, [samples], [ClientDraws(order, np.random.default_rng(1))])
        seconds.append((process_time() - began_s) / steps)
    return seconds[-1]


def measured(path: Path, side: str, steps: int) -> dict[str, Any]:
    """Seconds of a step, as the process of a side prints them."""
    if side in ("hooks", "ghost"):
        fewer = max(steps // 4, 3) if side == "hooks" else steps  # it takes up to a hundred times as long
        command = [str(PEERS), str(HERE / "sides" / "opacus_steps.py"), str(path), side, str(fewer)]
    else:
        command = [sys.executable, str(HERE / "dp_sgd.py"), "--child", str(path), side, str(steps)]
    found: dict[str, Any] = json.loads(run(command, ONE_THREAD).stdout.splitlines()[-1])
    return found


def measure(models: Sequence[str], turns: int, console: Console) -> dict[str, Any]:
    """Medians of all sides, for each model and batch."""
    rows = []
    versions: dict[str, str] = {}
    for model in models:
        for batch in BATCHES[model]:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "problem.pt"
                write_problem(path, model, batch)
                seconds: dict[str, list[float]] = {side: [] for side in SIDES}
                for _ in range(turns):
                    for side in SIDES:
                        found = measured(path, side, STEPS[model])
                        seconds[side].append(found["step_s"])
                        if "version" in found:
                            versions["opacus"] = found["version"]
            medians = {side: statistics.median(values) for side, values in seconds.items()}
            console.print(f"{model}, batch {batch}: {medians}", style="dim")
            rows.append({"model": model, "batch": batch, "median_s": medians, "seconds": seconds})
    return {"machine": machine(), "versions": versions, "turns": turns, "rows": rows}


def tables(report: dict[str, Any]) -> list[Table]:
    """The table of the report."""
    head = ["model, batch", *(f"{title}, ms" for title in SIDES.values()), "of a plain step", "of Opacus"]
    cells = []
    for row in report["rows"]:
        medians = row["median_s"]
        ours = medians["ours"]
        opacus = min(medians["hooks"], medians["ghost"])
        times = [f"{1e3 * medians[side]:.2f}" for side in SIDES]
        name = f"{row['model']}, {row['batch']}"
        cells.append([name, *times, f"{ours / medians['plain']:.2f} ×", f"{ours / opacus:.2f} ×"])
    return [Table("A client's step of DP-SGD", head, cells)]


def shortfalls(report: dict[str, Any]) -> list[str]:
    """Sentences on goals that are missed."""
    found = []
    for row in report["rows"]:
        medians = row["median_s"]
        ratio = medians["ours"] / medians["plain"]
        most = AT_MOST[row["model"]]
        if row["batch"] == max(BATCHES[row["model"]]) and ratio > most:
            found.append(f"{row['model']}: a private step takes {ratio:.2f} times a plain one, and may take {most}")
        if medians["ours"] >= min(medians["hooks"], medians["ghost"]):
            found.append(f"{row['model']}, batch {row['batch']}: Opacus's step takes less time")
    return found


def main() -> int:
    """Measure, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--child", nargs=3, metavar=("FILE", "SIDE", "STEPS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        path, side, steps = options.child
        print(json.dumps({"step_s": step_s(path, side, int(steps))}))
        return 0
    is_whole = len(sys.argv) == 1
    console = Console()
    report = measure(options.models, options.turns, console)
    output = HERE / "dp_sgd.json" if is_whole else options.output
    markers = ("<!-- dp-sgd: begin -->", "<!-- dp-sgd: end -->") if is_whole else None
    return conclude(console, report, tables(report), output, markers, failures=shortfalls(report))


if __name__ == "__main__":
    sys.exit(main())
