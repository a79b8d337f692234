"""``fed.simulate``, with so many worker processes, and with or without clients in batches."""

from side import Problem, Trained, main

import fed


def train(problem: Problem, rounds: int, workers: str, batching: str) -> Trained:
    """Train so many rounds."""
    experiment = fed.Experiment(
        local={"lr": problem.lr, "batch_size": problem.batch_size, "epochs": problem.epochs},
        rounds={"count": rounds, "cohort": problem.cohort},
        simulation={"workers": workers if workers == "auto" else int(workers), "batching": batching},
    )
    data = fed.FederatedData(dict(enumerate(problem.clients)))  # no test set: nothing is evaluated between rounds
    run = fed.simulate(experiment, data=data, model=problem.module())
    return Trained([line["wall_s"] for line in run.metrics], run.model)


if __name__ == "__main__":
    main(train, workers="auto", batching="auto")
