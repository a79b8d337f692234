"""What a node keeps between tasks: as long as it may be asked for, and no longer."""

import os
from pathlib import Path

import torch
from torch import Tensor

from fed.protocol.protocol_pb2 import TaskId
from tests.clients.node.test_training import Node


def test_task_continues_from_the_state_of_the_task_it_names(tmp_path: Path) -> None:
    node = Node(tmp_path, algorithm="scaffold")
    _, first = node.train(1, None)
    _, after_first = node.train(2, 1)
    assert node.train(2, None)[1] != after_first
    assert node.train(2, 1)[1] == after_first
    assert node.train(1, None)[1] == first


def test_task_continues_from_the_part_of_the_way_that_counted(tmp_path: Path) -> None:
    """One step of SCAFFOLD is linear in what the client keeps: at s, the update is s of the way between two others."""
    node = Node(tmp_path, algorithm="scaffold")
    node.train(1, None)

    def update(kept_after: int | None = 1, discount: float = 1.0) -> Tensor:
        _, update_M = node.train(2, kept_after, kept_discount=discount, steps=1, round=2)
        return torch.tensor(update_M, dtype=torch.float64)

    without_M, with_M = update(None), update()
    assert float((with_M - without_M).abs().max()) > 0.1 * float(with_M.abs().max())
    for discount in (0.25, 0.5, 0.75):
        expected_M = torch.lerp(without_M, with_M, discount)
        difference_M = update(discount=discount) - expected_M
        assert float(difference_M.abs().max()) < 1e-5 * float(with_M.abs().max()), "rounding of a few float32"


def test_client_states_follow_task_order_not_the_clock(tmp_path: Path) -> None:
    """The clock of a small machine begins at 1970, or is set back."""
    node = Node(tmp_path, algorithm="scaffold")

    def names() -> list[str]:
        return sorted(path.name for path in node.kept.iterdir())

    node.train(1, None)
    node.train(2, 1)
    ahead_ns = 2**62
    os.utime(node.kept / "1-2", ns=(ahead_ns, ahead_ns))
    node.train(3, 2)
    node.train(4, 3)
    assert names() == ["1-1", "1-2", "1-3", "1-4"]
    node.train(5, 4, durable_after=TaskId(start=9, number=9))
    assert names() == ["1-1", "1-2", "1-3", "1-4", "1-5"]
    node.train(6, 5, durable_after=TaskId(start=1, number=3))
    assert names() == ["1-3", "1-4", "1-5", "1-6"]
