"""Flower's FedAvg over all nodes; writes when each round ended."""

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """All rounds."""
    config = context.run_config
    ends_s = []
    nodes = int(config["nodes"])

    def note_end(number: int, arrays: ArrayRecord) -> None:
        ends_s.append(time.perf_counter())

    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    model = ArrayRecord([np.zeros(int(config["numbers"]), dtype=np.float32)])
    strategy.start(grid=grid, initial_arrays=model, num_rounds=int(config["rounds"]), evaluate_fn=note_end)
    Path(str(config["output"])).write_text(json.dumps(ends_s))
