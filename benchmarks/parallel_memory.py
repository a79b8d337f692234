"""Memory of each device that trains a transformer of 100 million parameters together with others, beside one alone."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import memory_mb

from fed.aggregators.base import Phase
from fed.clients.models import char_transformer
from fed.clients.scoring.losses import cross_entropy
from fed.clients.training.local_context import LocalContext
from fed.clients.training.parallel.parallel_trainer import ParallelTrainers
from fed.clients.training.trainer import Trainer
from fed.config.experiment import Local

WAYS = ("alone", "ddp", "fsdp", "tensor", "pipeline")
CHARACTERS = 64
PLACES = 16
SAMPLES = 8
CPU = torch.device("cpu")


def main() -> None:
    """Measure each way in a process of its own, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=WAYS, help="measure this way alone, and print its figures as JSON")
    parser.add_argument("--layers", type=int, default=14, help="layers of the transformer, of 7.1 million parameters")
    parser.add_argument("--devices", type=int, default=2)
    given = parser.parse_args()
    if given.way is not None:
        print(json.dumps(measured(given.way, given.layers, given.devices)))
        return
    found = {way: _in_a_process(way, given.layers, given.devices) for way in WAYS}
    alone_mb = found["alone"]["device_mb"]
    print(f"{found['alone']['parameters'] / 1e6:.1f} million parameters, {given.devices} devices, float32, momentum")
    print("| way | most memory of a device, MB | of one device alone | of the parent, MB | train loss |")
    print("|---|---|---|---|---|")
    for way, line in found.items():
        share = line["device_mb"] / alone_mb
        print(f"| {way} | {line['device_mb']:.0f} | {share:.2f} | {line['parent_mb']:.0f} | {line['train_loss']:.6f} |")


def measured(way: str, layers: int, devices: int) -> dict[str, Any]:
    """Largest resident memory of a device in two tasks of two steps each, in megabytes.

    Args:
        way: one of ``WAYS``.
        layers: number of the transformer's layers.
        devices: number of devices, for all ways but "alone".
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    module = char_transformer((PLACES,), CHARACTERS, width=768, heads=12, layers=layers)
    parameters = sum(part.numel() for part in module.parameters())
    keys: dict[str, Any] = {"batch_size": SAMPLES // 2, "momentum": 0.9, "lr": 0.01}
    characters = torch.randint(CHARACTERS, (SAMPLES, PLACES + 1))
    samples = characters[:, :-1], characters[:, 1:]
    if way == "alone":
        trainer: Trainer | Any = Trainer(module, cross_entropy, Local(**keys), Phase(), CPU)
    else:
        section = Local(**keys, devices=devices, parallel=way)
        trainer = ParallelTrainers(module, section)(Phase(), cross_entropy, CPU)
    vector_V, integers_I = trainer.layout.pack(module)
    for _ in range(2):
        order = np.random.default_rng(0)
        result = trainer.train(vector_V, integers_I, samples, order=order, seed=0, context=LocalContext())
    own_mb = memory_mb("VmHWM")
    ranks_mb = [own_mb] if way == "alone" else [_memory_mb_of(pid) for pid in trainer.process_ids]
    return {
        "parameters": parameters,
        "device_mb": max(ranks_mb),
        "parent_mb": own_mb,
        "train_loss": result.train_loss,
    }


def _memory_mb_of(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


def _in_a_process(way: str, layers: int, devices: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--way", way, "--layers", str(layers), "--devices", str(devices)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    figures: dict[str, Any] = json.loads(said.splitlines()[-1])
    return figures


if __name__ == "__main__":
    main()
