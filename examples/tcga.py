"""The comparison of examples/tcga.yaml from the initial weights of FLamby's own benchmark, which its seeds decide.

python -m examples.tcga runs/tcga      # prints the C-indices on the pooled test set; leaves a folder for each seed
"""

import sys
from pathlib import Path

import torch
from torch import nn

import fed
from fed.errors import FedError

__all__ = ["linear", "main"]

COMPARISON = Path(__file__).with_suffix(".yaml")


def linear(input_shape: tuple[int, ...], seed: int) -> nn.Module:
    """Cox's model with FLamby's initial weights.

    Args:
        input_shape: (39,), of a patient.
        seed: of PyTorch's generator, from which FLamby draws the weights.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(input_shape[0], 1)


def main() -> int:
    """Run every variant with every seed, each seed in a folder of its own."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/tcga")
    whole = fed.Comparison.load(COMPARISON)
    try:
        for seed in whole.seeds:
            model = {"kind": "python:examples.tcga:linear", "seed": seed}
            comparison = whole.model_copy(update={"base": {**whole.base, "model": model}, "seeds": [seed]})
            comparison = fed.Comparison(**comparison.dump())
            result = fed.compare(comparison, output=folder / f"seed-{seed}", overwrite=True, jobs=2)
            print(
                seed, *(f"{row['name']} {row['final_test_c_index']:.3f}" for row in result.rows), sep="  ", flush=True
            )
    except FedError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
