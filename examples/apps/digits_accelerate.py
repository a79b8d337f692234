"""Digits by a loop of accelerate, on two processes for each client: pip install accelerate scikit-learn."""

import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PROCESSES = 2
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(PROCESSES)]
digits = cache(load_digits)  # read once in each process, for a client is made anew for each task


def network():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def loop(folder):
    """A loop as it was before: each process runs all of it."""
    given = np.load(folder / "given.npz")
    set_seed(int(given["seed"]))
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    assert accelerator.num_processes == PROCESSES
    model = network()
    model.load_state_dict({name: torch.tensor(given[name]) for name in model.state_dict()})
    samples = TensorDataset(torch.tensor(given["inputs"]), torch.tensor(given["targets"]))
    loader = DataLoader(samples, batch_size=int(given["batch_size"]) // accelerator.num_processes, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=float(given["lr"]))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(int(given["epochs"])):
        for inputs, targets in loader:
            accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    if accelerator.is_main_process:
        state = accelerator.unwrap_model(model).state_dict()
        np.savez(folder / "trained.npz", **{name: part.cpu().numpy() for name, part in state.items()})
    accelerator.wait_for_everyone()
    accelerator.end_training()


class Client:
    """Owner of every tenth digit, who has the loop launched for each task."""

    def __init__(self, client_id):
        self.inputs = digits().data[client_id::10].astype(np.float32) / 16
        self.targets = digits().target[client_id::10]

    def initial(self):
        torch.manual_seed(0)
        return {name: part.cpu().numpy() for name, part in network().state_dict().items()}

    def fit(self, arrays, config):
        names = list(network().state_dict())
        told = {key: config[key] for key in ("lr", "batch_size", "epochs", "seed")}
        with tempfile.TemporaryDirectory() as folder:
            arrays = dict(zip(names, arrays, strict=True))
            np.savez(Path(folder) / "given.npz", inputs=self.inputs, targets=self.targets, **told, **arrays)
            environment = {"OMP_NUM_THREADS": "1", **os.environ}  # without it the launcher prints a banner
            subprocess.run([*LAUNCH, __file__, folder], check=True, env=environment)
            trained = np.load(Path(folder) / "trained.npz")
            return [trained[name] for name in names], len(self.targets), {}

    def evaluate(self, arrays, config):
        model = network()
        model.load_state_dict({name: torch.tensor(part) for name, part in zip(model.state_dict(), arrays, strict=True)})
        with torch.no_grad():
            scores = model(torch.tensor(self.inputs))
        loss = nn.functional.cross_entropy(scores, torch.tensor(self.targets))
        accuracy = (scores.argmax(1).numpy() == self.targets).mean()
        return loss.item(), len(self.targets), {"accuracy": accuracy}


if __name__ == "__main__":
    loop(Path(sys.argv[1]))
