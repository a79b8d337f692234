"""What a node keeps between tasks: as long as it may be asked for, and no longer."""

import os
from pathlib import Path

import torch
from torch import Tensor

from fed.clients.node.training import NodeTask, NodeTraining, forget_before
from fed.clients.training.work_items import Train
from fed.config.experiment import Experiment
from fed.wire.payloads import written
from fed.wire.protocol_pb2 import Plan, Signature

PLAN = Plan(signature=Signature(input_shape=[4], input_dtype="float32", classes=3))


class Client:
    """A node's training, with a folder for what it keeps."""

    def __init__(self, folder: Path) -> None:
        pair = torch.arange(80.0).reshape(20, 4), torch.arange(20) % 3
        experiment = Experiment(model={"kind": "logistic"}, local={"lr": 0.001}, algorithm="scaffold")
        self.kept, self._file = folder / "kept", folder / "file"
        self._training = NodeTraining(0, pair, experiment, PLAN, self.kept)
        self._tensors = [torch.zeros(numbers, dtype=getattr(torch, dtype)) for dtype, numbers in self._training.spec()]

    def train(
        self, number: int, *, kept_after: str | None = None, kept_discount: float = 1.0, steps: int | None = None
    ) -> bytes:
        """A task of that number; what it answers."""
        payload = written(self._file, self._tensors).SerializeToString()
        train = Train((0,), number, "payload", 0.001, (steps,), 1, 1, (), ((number,),))
        done = self._training.train(NodeTask(f"1-{number}", train, payload, self._file, kept_after, kept_discount))
        assert not done.problem
        return self._file.read_bytes()

    def names(self) -> list[str]:
        return sorted(path.name for path in self.kept.iterdir())


def test_task_continues_from_the_state_of_the_task_it_names(tmp_path: Path) -> None:
    client = Client(tmp_path)
    first = client.train(1)
    after_first = client.train(2, kept_after="1-1")
    assert client.train(2) != after_first
    assert client.train(2, kept_after="1-1") == after_first
    assert client.train(1) == first


def test_task_continues_from_the_part_of_the_way_that_counted(tmp_path: Path) -> None:
    """One step of SCAFFOLD is linear in what the client keeps: at s, the update is s of the way between two others."""
    client = Client(tmp_path)
    client.train(1)

    def update(kept_after: str | None = "1-1", discount: float = 1.0) -> Tensor:
        content = client.train(2, kept_after=kept_after, kept_discount=discount, steps=1)
        return torch.frombuffer(bytearray(content), dtype=torch.float32).double()

    without_M, with_M = update(None), update()
    assert float((with_M - without_M).abs().max()) > 0.1 * float(with_M.abs().max())
    for discount in (0.25, 0.5, 0.75):
        expected_M = torch.lerp(without_M, with_M, discount)
        difference_M = update(discount=discount) - expected_M
        assert float(difference_M.abs().max()) < 1e-5 * float(with_M.abs().max()), "rounding of a few float32"


def test_client_states_follow_task_order_not_the_clock(tmp_path: Path) -> None:
    """The clock of a small machine begins at 1970, or is set back."""
    client = Client(tmp_path)
    client.train(1)
    client.train(2, kept_after="1-1")
    ahead_ns = 2**62
    os.utime(client.kept / "1-2", ns=(ahead_ns, ahead_ns))
    client.train(3, kept_after="1-2")
    client.train(4, kept_after="1-3")
    assert client.names() == ["1-1", "1-2", "1-3", "1-4"]
    forget_before(client.kept, "9-9")
    assert client.names() == ["1-1", "1-2", "1-3", "1-4"]
    forget_before(client.kept, "1-3")
    assert client.names() == ["1-3", "1-4"]
