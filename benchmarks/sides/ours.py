"""``fed.simulate``, with so many worker processes, and with or without clients in batches."""

from typing import Any

from side import Problem, Trained, main

import fed


def train(
    problem: Problem, rounds: int, workers: str, batching: str, device: str, deterministic: str, precision: str
) -> Trained:
    """Train so many rounds."""
    local = {"lr": problem.lr, "batch_size": problem.batch_size, "epochs": problem.epochs}
    how: dict[str, Any] = {"workers": workers if workers == "auto" else int(workers), "batching": batching}
    if device != "auto":  # options that an earlier checkout, as guard.py measures, does not know
        local["precision"] = precision
        how |= {"device": device, "deterministic": deterministic == "on"}
    experiment = fed.Experiment(local=local, rounds={"count": rounds, "cohort": problem.cohort}, simulation=how)
    data = fed.FederatedData(dict(enumerate(problem.clients)))  # no test set: nothing is evaluated between rounds
    run = fed.simulate(experiment, data=data, model=problem.module())
    return Trained([line["wall_s"] for line in run.metrics], run.model)


if __name__ == "__main__":
    main(train, workers="auto", batching="auto", device="auto", deterministic="on", precision="float32")
