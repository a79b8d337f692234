"""Opacus's side of ``dp_sgd.py``: seconds of a step of DP-SGD on the model, the samples and the batches of a file.

Batches are drawn as by Opacus's own sampler, but taken from tensors: its loader would take most of the time.
"""

import json
import sys
from time import process_time

import opacus
import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from private_problem import read_problem

WARM_UP = 3


def main(path: str, mode: str, steps: int) -> None:
    """Print the seconds of a step, after some that are not timed."""
    problem = read_problem(path)
    module = problem["module"].train()
    inputs = problem["inputs"]
    targets = problem["targets"]
    batch = problem["batch"]
    plain = torch.optim.SGD(module.parameters(), lr=0.1)
    loss = torch.nn.CrossEntropyLoss()
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": batch}
    if mode == "ghost":
        module = GradSampleModuleFastGradientClipping(module, max_grad_norm=1.0, use_ghost_clipping=True)
        optimizer = DPOptimizerFastGradientClipping(plain, **options)
        loss = DPLossFastGradientClipping(module, optimizer, loss)
    else:
        module = GradSampleModule(module)
        optimizer = DPOptimizer(plain, **options)
    began_s = 0.0
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            began_s = process_time()
        places = (torch.rand(len(inputs)) < batch / len(inputs)).nonzero().squeeze(1)
        optimizer.zero_grad()
        loss(module(inputs[places]), targets[places]).backward()
        optimizer.step()
    print(json.dumps({"step_s": (process_time() - began_s) / steps, "version": opacus.__version__}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
