"""The clients of Flower's side, in a module of their own: each actor imports it once and reads the problem once."""

from functools import cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from plain import train_client
from side import Problem
from torch import nn

app = ClientApp()


@cache
def _problem(path: str) -> tuple[Problem, nn.Module]:
    torch.set_num_threads(1)
    problem = Problem.read(path)
    return problem, problem.module()


@app.train()
def train(message: Message, context: Context) -> Message:
    """One client's epochs."""
    problem, module = _problem(message.content["config"]["problem"])
    inputs, targets = problem.clients[int(context.node_config["partition-id"])]
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    train_client(module, nn.CrossEntropyLoss(), (inputs, targets), problem)
    content = {
        "arrays": ArrayRecord(module.state_dict()),
        "metrics": MetricRecord({"num-examples": len(targets)}),
    }
    return Message(content=RecordDict(content), reply_to=message)
