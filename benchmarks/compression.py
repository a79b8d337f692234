"""Speed, bytes and accuracy of codecs, and the bandwidth below which each pays.

One core encodes and decodes vectors of Gaussian values in float32, in turn with a copy of the same bytes into memory
that is kept. The median of the repetitions counts. With error feedback a client's encoding includes its decoding and
its residual. A codec pays where the bytes that it saves take longer than it does:

    bandwidth < (4 P − bytes of a message) / (seconds to encode + seconds to decode)

Where MNIST's files are found, ten clients that hold them IID train an MLP for 30 rounds with each codec, and what a
codec loses is told in percentage points. Without options it writes ``compression.json`` beside this file and the tables
in docs/benchmarks.md.

    python benchmarks/compression.py --chains int8,sign --numbers 1000000 --repetitions 3
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from compression_report import COMPRESSION, tables
from machine import machine
from report import conclude
from rich.console import Console
from simulation import some_of
from workloads import MNIST

import fed
from fed.compression.chain import CodecChain
from fed.compression.codec import Draw, Values
from fed.compression.feedback import Encoder
from fed.errors import InvalidData
from fed.processes.machine import keep_freed_memory
from fed.vectors.randomness import Streams

HERE = Path(__file__).resolve().parent
NUMBERS = 100_000, 1_000_000, 10_000_000
SEEDS = 3
STEPS = 30
BYTES = 4
SPREAD = 0.01  # standard deviation of the values
AFTER_WARM_UP = 1 << 20  # a round
SPARSE = ({"kind": "topk", "fraction": 1 / 64}, {"kind": "two_level"})


@dataclass(frozen=True)
class Chain:
    """Codecs of an experiment, and what is expected of them.

    Args:
        uplink: sections of the experiment.
        error_feedback: kind of error feedback, by its name in an experiment.
        encode_gb_s: floor at 10 million numbers; what is decoded must not be slower.
        algorithm: the algorithm that the chain is for; its own baseline trains without codecs.
        times_fewer: floor of how many times fewer bytes MNIST's clients send, than each round's model, or for DiLoCo
            than a gradient each step.
        points: the most percentage points that MNIST may lose.
    """

    uplink: Sequence[dict[str, Any]] = ()
    error_feedback: str = "none"
    encode_gb_s: float | None = None
    algorithm: str = "fedavg"
    times_fewer: float | None = None
    points: float | None = None


CHAINS = {
    "float16": Chain([{"kind": "float16"}], encode_gb_s=1),
    "bfloat16": Chain([{"kind": "bfloat16"}]),
    "int8": Chain([{"kind": "int8"}], encode_gb_s=1, times_fewer=3.9, points=0.3),
    "int8 + zstd": Chain([{"kind": "int8"}, {"kind": "zstd"}]),
    "natural": Chain([{"kind": "natural"}]),
    "fp4": Chain([{"kind": "fp4"}]),
    "qsgd": Chain([{"kind": "qsgd"}], encode_gb_s=0.4),
    "qsgd (2 bits)": Chain([{"kind": "qsgd", "bits": 2}], encode_gb_s=0.4),
    "two_level": Chain([{"kind": "two_level"}]),
    "terngrad": Chain([{"kind": "terngrad"}]),
    "eden": Chain([{"kind": "eden"}]),
    "eden (4 bits)": Chain([{"kind": "eden", "bits": 4}]),
    "sign": Chain([{"kind": "sign"}], encode_gb_s=1),
    "sign + ef": Chain([{"kind": "sign"}], "ef", times_fewer=30, points=1.5),
    "topk": Chain([{"kind": "topk"}], encode_gb_s=0.3),
    "topk + ef": Chain([{"kind": "topk"}], "ef"),
    "topk + two_level": Chain(SPARSE, encode_gb_s=0.2),
    "topk + two_level + ef": Chain(SPARSE, "ef", times_fewer=200, points=0.5),
    "stc + ef": Chain([{"kind": "stc"}], "ef"),
    "threshold + ef": Chain([{"kind": "threshold"}], "ef"),
    "randomk + ef": Chain([{"kind": "randomk"}], "ef"),
    "dgc": Chain([{"kind": "dgc"}]),
    "powersgd + ef": Chain([{"kind": "powersgd"}], "ef"),
    "sketch": Chain([{"kind": "sketch"}]),
    "zstd": Chain([{"kind": "zstd"}]),
}
DILOCO = {"DiLoCo + topk + two_level + ef": Chain(SPARSE, "ef", algorithm="diloco", times_fewer=6000, points=1)}
BASELINES = {"no codec": Chain(), "DiLoCo": Chain(algorithm="diloco")}


def encoder(chain: Chain, numbers: int) -> Encoder:
    """The chain for a model that is a square matrix and a vector."""
    experiment = fed.Experiment(uplink=chain.uplink, error_feedback=chain.error_feedback)
    side = int((numbers - 1) ** 0.5)
    values = Values(numbers, torch.float32, (torch.Size([side, side]), torch.Size([numbers - side * side])))
    codecs = tuple(section.make() for section in experiment.uplink)
    return Encoder(CodecChain(codecs, values), experiment.error_feedback.make())


def speed(chain: Chain, numbers: int, repetitions: int) -> dict[str, float]:
    """Times of a chain, of a copy, and the bytes of a message."""
    of = encoder(chain, numbers)
    draw = Draw(Streams(0), [AFTER_WARM_UP], [0])
    row_1M = torch.randn(1, numbers, generator=torch.Generator().manual_seed(0)) * SPREAD
    state = {name: part[None] for name, part in of.init().items()}
    encode = partial((of if chain.error_feedback != "none" else of.chain).encode, row_1M, state, draw)
    messages = of.encode(row_1M, state, draw).messages
    kept_1M = row_1M.clone()

    def decode() -> None:
        of.chain.read(of.decode(messages, draw), draw)

    encode_s, decode_s, copy_s = medians([encode, decode, lambda: kept_1M.copy_(row_1M)], repetitions)
    return {
        "numbers": numbers,
        "bytes": len(messages[0]),
        "encode_s": encode_s,
        "decode_s": decode_s,
        "copy_s": copy_s,
        **rates(numbers, len(messages[0]), encode_s, decode_s, copy_s),
    }


def rates(numbers: int, size_bytes: int, encode_s: float, decode_s: float, copy_s: float) -> dict[str, float]:
    """Gigabytes of float32 a second, bits, and the bandwidth below which the codec pays.

    Args:
        numbers: P, of the vector.
        size_bytes: bytes of the vector's message.
        encode_s: time to encode.
        decode_s: time to decode.
        copy_s: time to copy the vector.
    """
    raw_bytes = BYTES * numbers
    return {
        "encode_gb_s": raw_bytes / encode_s / 1e9,
        "decode_gb_s": raw_bytes / decode_s / 1e9,
        "copy_gb_s": raw_bytes / copy_s / 1e9,
        "bits": 8 * size_bytes / numbers,
        "ratio": raw_bytes / size_bytes,
        "pays_below_mbit_s": 8e-6 * (raw_bytes - size_bytes) / (encode_s + decode_s),
    }


def medians(actions: Sequence[Callable[[], object]], repetitions: int) -> list[float]:
    """Seconds of each action, in turn; short ones are repeated within a measurement."""
    for action in actions:
        action()
    counts = [max(1, int(0.01 / max(elapsed_s(action, 1), 1e-7))) for action in actions]
    taken_s = [
        [elapsed_s(action, count) for action, count in zip(actions, counts, strict=True)] for _ in range(repetitions)
    ]
    return [statistics.median(column) for column in zip(*taken_s, strict=True)]


def elapsed_s(action: Callable[[], object], count: int) -> float:
    """Seconds of one of so many calls."""
    began_s = perf_counter()
    for _ in range(count):
        action()
    return (perf_counter() - began_s) / count


def train(chain: Chain, folder: Path) -> dict[str, Any]:
    """MNIST's accuracy after 30 rounds, mean of three seeds, and the bytes that clients send."""
    is_diloco = chain.algorithm == "diloco"
    steps = {"steps": STEPS} if is_diloco else {"epochs": 1}
    runs = [
        fed.simulate(
            fed.Experiment(
                seed=seed,
                data={"kind": "idx", "path": str(folder), "clients": 10, "partition": {"kind": "iid"}},
                model={"kind": "mlp", "hidden": [200]},
                algorithm={"kind": chain.algorithm},
                local={"lr": 0.1, "batch_size": 20, **steps},
                rounds={"count": 30, "cohort": "all", "evaluate_every": 30},
                uplink=chain.uplink,
                error_feedback=chain.error_feedback,
                simulation={"workers": 0},
            )
        )
        for seed in range(SEEDS)
    ]
    found = [run.summary for run in runs]
    accuracies = [one["final_test_accuracy"] for one in found]
    raw_bytes = 10 * 30 * BYTES * found[0]["parameters"] * (STEPS if is_diloco else 1)
    return {
        "accuracy": statistics.mean(accuracies),
        "accuracies": accuracies,
        "bytes_up": statistics.mean(one["bytes_up"] for one in found),
        "times_fewer": raw_bytes / statistics.mean(one["bytes_up"] for one in found),
    }


def train_all(names: Sequence[str], folder: Path, console: Console) -> dict[str, dict[str, Any]]:
    """Each chain's training beside that of its algorithm without codecs."""
    chains = {name: chain for name, chain in {**CHAINS, **DILOCO}.items() if name in names}
    algorithms = {chain.algorithm for chain in chains.values()}
    found: dict[str, dict[str, Any]] = {}
    bases: dict[str, float] = {}
    for name, chain in {**{n: c for n, c in BASELINES.items() if c.algorithm in algorithms}, **chains}.items():
        found[name] = one = train(chain, folder)
        one["points_lost"] = 100 * (bases.setdefault(chain.algorithm, one["accuracy"]) - one["accuracy"])
        console.print(
            f"MNIST, {name}: {one['accuracy']:.4f}, {one['points_lost']:+.2f} points lost, "
            f"{one['times_fewer']:,.1f} times fewer bytes up",
            style="dim",
            soft_wrap=True,
        )
    return found


def shortfalls(report: dict[str, Any]) -> list[str]:
    """Sentences on what falls short of a floor."""
    found = [
        (chain.encode_gb_s, one[f"{way}_gb_s"], f"{name} must {way} at least {{}} GB/s of 10 million numbers")
        for name, chain in CHAINS.items()
        for one in report["speeds"].get(name, ())
        for way in ("encode", "decode")
        if one["numbers"] == NUMBERS[-1]
    ]
    for name, chain in {**CHAINS, **DILOCO}.items():
        if trained := report["mnist"].get(name):
            most = None if chain.points is None else -chain.points
            found.append((most, -trained["points_lost"], f"{name} must come within {{}} points of no codec"))
            found.append((chain.times_fewer, trained["times_fewer"], f"{name} must send {{}} times fewer bytes"))
    return [
        f"{sentence.format(f'{abs(floor):,}')}, got {abs(value):,.2f}"
        for floor, value, sentence in found
        if floor is not None and value < floor
    ]


def arguments() -> argparse.Namespace:
    """Arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chains", **some_of([*CHAINS, *DILOCO]))
    parser.add_argument("--numbers", type=int, nargs="*", default=NUMBERS, help="lengths of vectors; none: no speeds")
    parser.add_argument("--repetitions", type=int, default=7, help="measurements; their median counts")
    parser.add_argument("--data", type=Path, help=f"folder of MNIST's IDX files; {os.path.relpath(MNIST)} if there")
    parser.add_argument("--no-data", action="store_true", help="train nothing")
    parser.add_argument("--output", type=Path, help="where to write the results; all of them go beside this program")
    return parser.parse_args()


def main() -> int:
    """Measure, print and write; 1 where something falls short of its floor."""
    given = arguments()
    console = Console(highlight=False)
    is_all = list(given.chains) == [*CHAINS, *DILOCO] and given.numbers == NUMBERS and not given.no_data
    keep_freed_memory()  # as processes do that encode and decode
    torch.set_num_threads(1)
    report: dict[str, Any] = {
        "machine": machine(),
        "load": os.getloadavg()[0],
        "versions": {name: version(name) for name in ("torch", "numpy")},
        "repetitions": given.repetitions,
        "speeds": {},
        "mnist": {},
    }
    for name in given.chains if given.numbers else ():
        if name in CHAINS:
            report["speeds"][name] = [speed(CHAINS[name], numbers, given.repetitions) for numbers in given.numbers]
            last = report["speeds"][name][-1]
            console.print(f"{name}: {last['encode_gb_s']:.2f} and {last['decode_gb_s']:.2f} GB/s", style="dim")
    folder = given.data or (MNIST if MNIST.is_dir() else None)
    if given.no_data or folder is None:
        console.print("MNIST is left out: name a folder of its files with --data")
    else:
        report["mnist"] = train_all(given.chains, folder, console)
    output = given.output or (HERE / "compression.json" if is_all else None)
    markers = COMPRESSION if is_all else None
    return conclude(console, report, tables(report), output, markers, failures=shortfalls(report))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InvalidData as error:
        sys.exit(f"error: {error}")
