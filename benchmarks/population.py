"""Rounds of 1,000 clients out of as many as the command line says, whose data are made on demand."""

import argparse
import json
from itertools import pairwise

import torch

import fed

FEATURES = 60
CLASSES = 10
SAMPLES = 20
COHORT = 1000
ROUNDS = 5
TRUTH = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(0))


def draw(client: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A client's samples, labelled by a linear model that is the same for all."""
    inputs = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(client))
    return inputs, (inputs @ TRUTH).argmax(1)


def size(client: int) -> int:
    """Number of samples of each client."""
    return SAMPLES


def main() -> None:
    """Print the seconds of every round but the first, and the final accuracy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("clients", type=int)
    clients = parser.parse_args().clients
    held_out = [draw(-client) for client in range(1, 51)]
    test = torch.cat([inputs for inputs, _ in held_out]), torch.cat([targets for _, targets in held_out])
    experiment = fed.Experiment(
        local={"lr": 1.0, "batch_size": SAMPLES}, rounds={"count": ROUNDS, "cohort": COHORT, "evaluate_every": ROUNDS}
    )
    data = fed.FederatedData(fed.ClientsOnDemand(range(clients), draw, size), test, CLASSES)
    run = fed.simulate(experiment, data=data, model=torch.nn.Linear(FEATURES, CLASSES))
    rounds_s = [later["wall_s"] - earlier["wall_s"] for earlier, later in pairwise(run.metrics)]
    print(json.dumps({"rounds_s": rounds_s, "accuracy": run.summary["final_test_accuracy"]}))


if __name__ == "__main__":
    main()
