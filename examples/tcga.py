"""The comparison of examples/tcga.yaml from the initial weights of FLamby's own benchmark, which its seeds decide.

python -m examples.tcga runs/tcga      # prints the C-indices on the pooled test set; leaves a folder for each seed
"""

import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fed
from fed.errors import FedError

__all__ = ["compare", "linear", "main"]

COMPARISON = Path(__file__).with_suffix(".yaml")


def linear(input_shape: tuple[int, ...], seed: int) -> nn.Module:
    """Cox's model with FLamby's initial weights.

    Args:
        input_shape: (39,), of a patient.
        seed: start of PyTorch's generator, from which FLamby draws the weights.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(input_shape[0], 1)


def compare(seed: int, folder: Path) -> list[dict[str, Any]]:
    """Run every variant with one seed, from its initial weights; the rows of the comparison."""
    torch.set_num_threads(1)
    keys = fed.Comparison.load(COMPARISON).dump()
    keys["base"]["model"] = {"kind": "python:examples.tcga:linear", "seed": seed}
    comparison = fed.Comparison(**{**keys, "seeds": [seed]})
    return fed.compare(comparison, output=folder / f"seed-{seed}", overwrite=True).rows


def main() -> int:
    """Run every variant with every seed, each seed in a folder of its own, two seeds at a time."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/tcga")
    seeds = fed.Comparison.load(COMPARISON).seeds
    try:
        with ProcessPoolExecutor(2, get_context("spawn")) as pool:
            for seed, rows in zip(seeds, pool.map(partial(compare, folder=folder), seeds), strict=True):
                found = (f"{row['name']} {row['final_test_c_index']:.3f}" for row in rows)
                print(seed, *found, sep="  ", flush=True)
    except FedError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
