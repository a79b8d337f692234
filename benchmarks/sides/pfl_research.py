"""pfl-research: its FederatedAveraging on its SimulatedBackend, as its own benchmarks set them up.

Users' data are kept as tensors in its ``Dataset``, which its documentation calls the fastest where all fit into memory,
and one ``Dataset`` a user is kept, so that its batches are cut once. More than one process is its native distributed
simulation: the same program in each, told by the environment.
"""

import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from side import Problem, Trained, main
from torch import Tensor, nn

RANK = "PFL_WORKER_RANK"
ADDRESSES = "PFL_WORKER_ADDRESSES"


class Model(nn.Module):
    """A module with the two methods that pfl asks for."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._loss = nn.CrossEntropyLoss()

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Loss that a user minimises."""
        return self._loss(self.module(inputs), targets)

    def metrics(self, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
        """Metrics that pfl evaluates users by, here in the first round alone."""
        from pfl.metrics import Weighted

        with torch.no_grad():
            return {"loss": Weighted(float(self.loss(inputs, targets)) * len(targets), len(targets))}


def train(problem: Problem, rounds: int, processes: int, device: str, precision: str) -> Trained:
    """Train so many rounds in so many processes, of which this is the first."""
    os.environ["PFL_PYTORCH_DEVICE"] = device
    # As fed has it, for PyTorch takes TF32 for convolutions unless it is told otherwise.
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    # pfl would copy each batch of each round.
    clients = [(inputs.to(device), targets.to(device)) for inputs, targets in problem.clients]
    problem = replace(problem, clients=clients)
    others = _start_others(processes) if processes > 1 and RANK not in os.environ else []
    trained = _train(problem, rounds)
    if RANK in os.environ and os.environ[RANK] != "0":
        raise SystemExit(0)
    for other in others:
        if other.wait():
            raise SystemExit("another process of pfl failed")
    return trained


def _train(problem: Problem, rounds: int) -> Trained:
    # Importing pfl connects the processes.
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    ends_s: list[float] = []

    class Clock(TrainingProcessCallback):
        """Notes when each round ended."""

        def after_central_iteration(self, *args: Any, **keys: Any) -> tuple[bool, Metrics]:
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                torch.cuda.synchronize()
            ends_s.append(time.perf_counter())
            return False, Metrics()

    np.random.seed(0)  # pfl draws users from the global generator, alike in all processes
    users = list(range(len(problem.clients)))
    datasets = [Dataset(samples, user_id=user) for user, samples in zip(users, problem.clients, strict=True)]
    data = FederatedDataset(datasets.__getitem__, get_user_sampler("minimize_reuse", users))
    module = Model(problem.module())
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds,  # that is, in the first round
            train_cohort_size=problem.cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()]),
        model=PyTorchModel(
            model=module,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
        ),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=problem.epochs, local_learning_rate=problem.lr, local_batch_size=problem.batch_size
        ),
        callbacks=[Clock()],
        send_metrics_to_platform=False,  # which would print them
    )
    return Trained(ends_s, module.module.cpu())


def _start_others(processes: int) -> list[subprocess.Popen[bytes]]:
    os.environ[ADDRESSES] = ",".join(f"127.0.0.1:{_free_port()}" for _ in range(processes))
    others = [
        subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, RANK: str(rank)}, stdout=subprocess.DEVNULL)
        for rank in range(1, processes)
    ]
    os.environ[RANK] = "0"
    return others


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    main(train, packages=("pfl",), processes=1, device="cpu", precision="float32")
