"""Nodes that answer at once: the client's whole side of the wire, with no training behind it. One process, many nodes.

Each downloads its task, checks it, multiplies the model with a number close to 1, so that all of its bits travel and
are added up, and delivers that. An answer that was written before is sent again for the same model.
"""

import argparse
import os
import threading
from pathlib import Path
from typing import Any

import torch

from fed.clients.data import FederatedData
from fed.clients.node.edge_node import EdgeNode
from fed.clients.setup import Preparation
from fed.config.experiment import Experiment
from fed.identity.credentials import NodeCredentials
from fed.protocol.limits import PROTOCOL
from fed.protocol.protocol_pb2 import Answer, Assignment, Joining, Signature
from fed.wire.dialling import DialPatience
from fed.wire.format import TaskSpec
from fed.wire.messages import client_id_of
from fed.wire.payloads import TensorSpec, read, written

SAMPLES = 20
SHRINKS = 0.999


class AtOnce:
    """Stand-in for a training process.

    Args:
        inputs: numbers of a sample.
        classes: number of different labels.
    """

    def __init__(self, inputs: int, classes: int) -> None:
        signature = Signature(input_shape=[inputs], input_dtype="float32", classes=classes)
        self._described = Joining(protocol=PROTOCOL, samples=SAMPLES, signature=signature)

    def describe(self) -> Joining:
        """Description of the data that the model is made for."""
        return self._described

    def prepare(self, experiment: Experiment, _: Any) -> None:
        """Learn what a model is made of."""
        inputs = torch.zeros(2, *self._described.signature.input_shape), torch.zeros(2, dtype=torch.int64)
        data = FederatedData({0: inputs}, None, self._described.signature.classes)
        layout = Preparation(experiment, data).layout.shared
        self.spec = TaskSpec((TensorSpec(layout.dtype, layout.size), TensorSpec(torch.int64, layout.integer_count)))

    def train(self, assignment: Assignment, path: Path, _: float | None) -> Answer:
        """The model, a little smaller."""
        vector_V, integers_I, *_ = read(path, assignment.payload)
        payload = written(path, [vector_V.mul_(SHRINKS), integers_I])
        return Answer(task=assignment.task, payload=payload, weight=SAMPLES, samples=SAMPLES, train_loss=1.0)


def main() -> None:
    """Work until the server sends everybody home."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", required=True)
    parser.add_argument("--credentials", type=Path, required=True, help="the folder of the nodes' folders")
    parser.add_argument("--names", required=True, help="0,1,2")
    parser.add_argument("--inputs", type=int, required=True)
    parser.add_argument("--classes", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="for files on their way")
    given = parser.parse_args()
    torch.set_num_threads(1)
    nodes = []
    for name in given.names.split(","):
        channel = NodeCredentials.load(given.credentials / name).for_dialling()
        training: Any = AtOnce(given.inputs, given.classes)
        folder = given.folder / name
        nodes.append(
            EdgeNode(given.server, channel, name, client_id_of(name), training, folder, patience=DialPatience(120, 300))
        )
    threads = [threading.Thread(target=node.run) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(0)  # threads of gRPC's may hang on for seconds


if __name__ == "__main__":
    main()
