"""A server and a peer that have run for long hold no more than those that have just begun."""

import gc
import json
import tracemalloc
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fed.config.experiment import Experiment
from fed.server.deploy import Deployment
from fed.server.real_fleet import RealFleet
from fed.storage.run import Run
from fed.storage.run_folder import RunFolder
from fed.wire import protocol_pb2 as pb
from fed.wire.format import Format
from fed.wire.messages import Answer, Task

SAMPLES = 10
EXPERIMENT: dict[str, Any] = {
    "data": {"kind": "digits", "clients": 2},
    "model": {"kind": "logistic"},
    "local": {"lr": 0.1},
    "simulation": {"batching": "off"},
}
# A round's line of the metrics took 700 bytes and more; what a garbage collector has yet to find varies by far less.
MOST_BYTES_A_ROUND = 100.0


class AtOnce(RealFleet):
    """A fleet of two nodes in this thread, that answer at once."""

    def __init__(self) -> None:
        super().__init__()
        self._answers: deque[Answer] = deque()
        for client in (0, 1):
            self._members.come(client, SAMPLES)

    def dispatch(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            self._open[task.id] = task
            self._assignment(task, self.registered(), pb.Payload())
            header = pb.Answer(samples=SAMPLES, weight=SAMPLES, train_loss=1.0)
            tensors = [task.model.params_V * 0.9, task.model.integers_I]
            self._answers.append(self._received(task, header, tensors))

    def cancel(self, tasks: Iterable[int]) -> None:
        for task in tasks:
            self._miss(task)

    def _examine(self, model: tuple[torch.Tensor, torch.Tensor], limit_s: float) -> None:
        raise AssertionError("the coordinator scores the model itself")

    def _make_known(self, plan: pb.Plan, message: Format) -> None:
        pass

    def _attending(self) -> Collection[int | str]:
        return self._members

    _free = _attending

    def _poll(self) -> None:
        pass

    def _has_answer(self) -> bool:
        return bool(self._answers)

    def _next_answer(self) -> Answer:
        return self._answers.popleft()

    def _pass_time(self, until: float) -> None:
        raise AssertionError("nodes that answer at once are waited for")


def served(
    folder: Path, rounds: int, after_round: Callable[[Mapping[str, Any]], None] | None = None, **changed: Any
) -> Run:
    keys = {**EXPERIMENT, "rounds": {"count": rounds}, **changed}
    where = RunFolder(folder)
    return Deployment(Experiment(**keys)).run(AtOnce(), 2, where, resume=False, after_round=after_round)


class Held:
    """Bytes that Python's objects take after some rounds."""

    def __init__(self, *rounds: int) -> None:
        self._rounds = rounds
        self.bytes: list[int] = []

    def __call__(self, line: Mapping[str, Any]) -> None:
        if line["round"] in self._rounds:
            gc.collect()
            self.bytes.append(tracemalloc.get_traced_memory()[0])


@pytest.mark.parametrize("every", [None, 20])
def test_a_servers_memory_is_flat_in_rounds(tmp_path: Path, every: int | None) -> None:
    first, last = 200, 800
    held = Held(first, last)
    tracemalloc.start()
    try:
        served(tmp_path / "run", last, held, checkpoints={"every": every, "keep": 1})
    finally:
        tracemalloc.stop()
    before, after = held.bytes
    assert (after - before) / (last - first) < MOST_BYTES_A_ROUND


def test_a_served_run_reads_its_metrics_from_its_folder(tmp_path: Path) -> None:
    lines: list[Mapping[str, Any]] = []
    run = served(tmp_path / "run", 5, lambda line: lines.append({**line}))
    assert run.metrics == lines == fed_lines(tmp_path / "run")
    assert run.summary["rounds"] == 5
    assert run.summary["bytes_up"] == sum(line["bytes_up"] for line in lines)


def fed_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
