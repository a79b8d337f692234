"""Flower's simulation: its FedAvg strategy, and Ray actors of one core each that run ``flower_client``."""

import os
import time

os.environ |= {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}

import flower_client
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from side import Problem, Trained, main


def train(problem: Problem, rounds: int, actors: int) -> Trained:
    """Train so many rounds with so many actors."""
    module = problem.module()
    ends_s = []
    population = len(problem.clients)
    server = ServerApp()

    def note_end(number: int, arrays: ArrayRecord) -> None:
        if number:
            ends_s.append(time.perf_counter())

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        while len(list(grid.get_node_ids())) < population:
            time.sleep(0.05)
        strategy = FedAvg(
            fraction_train=problem.cohort / population, fraction_evaluate=0.0, min_available_nodes=population
        )
        result = strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(module.state_dict()),
            train_config=ConfigRecord({"problem": problem.path}),
            num_rounds=rounds,
            evaluate_fn=note_end,
        )
        module.load_state_dict(result.arrays.to_torch_state_dict())

    run_simulation(
        server_app=server,
        client_app=flower_client.app,
        num_supernodes=population,
        backend_config={"client_resources": {"num_cpus": 1.0, "num_gpus": 0.0}, "init_args": {"num_cpus": actors}},
    )
    return Trained(ends_s, module)


if __name__ == "__main__":
    main(train, packages=("flwr", "ray"), actors=2)
