"""A simulated client's task while it is under way: when its answer arrives, or why none does."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from fed.randomness import Streams
from fed.simulations.devices import Devices
from fed.simulations.groups import Groups
from fed.storage.checkpoints import Tree, plain
from fed.wire.messages import Task

__all__ = ["Answer", "Departures", "Flight"]

_KEPT_DEVICES = 2**16


class Answer(NamedTuple):
    """What local training has made of a task."""

    message_M: Tensor
    weight: float
    integers_I: Tensor
    samples: int
    train_loss: float
    kept: tuple[Tensor, ...]


@dataclass
class Flight:
    """One task under way.

    Args:
        task: as it was sent.
        samples: how many the client holds.
        arrives_s: the clock at which the answer, or the news that there is none, is there.
        seen: how many samples are trained on.
        steps: optimizer steps, where they are fewer than the task's.
        problem: why there is no answer.
        is_cancelled: whether nobody waits for it.
        answer: what was made of it, once it has been trained.
    """

    task: Task
    samples: int
    arrives_s: float
    seen: int
    steps: int | None = None
    problem: str | None = None
    is_cancelled: bool = False
    answer: Answer | None = None

    def state(self) -> Tree:
        """All of it, for a checkpoint."""
        return {**vars(self), "task": plain(self.task), "answer": plain(self.answer)}

    @classmethod
    def restored(cls, state: Tree) -> "Flight":
        """The flight of which :meth:`state` said this."""
        answer = Answer(**state["answer"]) if state["answer"] else None
        return cls(**{**state, "task": Task(**state["task"]), "answer": answer})

    @property
    def counts(self) -> bool:
        """Whether it will be answered, and somebody waits for that."""
        return self.problem is None and not self.is_cancelled


class Departures:
    """Sends clients on their way: what becomes of a task is known when it is sent, but for its numbers.

    Args:
        devices: what clients run on.
        groups: how many samples a task sees.
        streams: the run's; what befalls a task is named by its id.
        answer_bytes: of a client's message with its integers.
    """

    def __init__(self, devices: Devices, groups: Groups, streams: Streams, answer_bytes: int) -> None:
        self._devices = devices
        self._device_of = lru_cache(_KEPT_DEVICES)(lambda client: devices.device(client, streams))
        self._groups = groups
        self._streams = streams
        self._answer_bytes = answer_bytes
        self._risky = devices.failure > 0 or devices.interruption > 0

    def depart(self, task: Task, now_s: float, task_bytes: int, samples: int, there_until_s: float) -> Flight:
        """A client sets out.

        Args:
            task: is sent.
            now_s: the clock.
            task_bytes: of the task.
            samples: how many the client holds.
            there_until_s: when the client goes away.
        """
        device = self._device_of(task.client)
        moved = {"bytes_down": task_bytes, "bytes_up": self._answer_bytes}
        steps, problem, part = None, None, 1.0
        if self._risky:
            fails, at, is_cut, after = self._streams.uniforms("fate", task.id)
            if is_cut < self._devices.interruption:
                steps = self._groups.steps_until_cut(after, samples, task.steps)
                problem = "it was cut off before it had finished" if steps and not task.takes_parts else None
            if fails < self._devices.failure:
                problem, part = "it broke down", at
        seen = self._seen(samples, task, steps)
        takes_s = device.exchange_s(samples=seen, **moved)
        if task.deadline_s is not None and takes_s > task.deadline_s and task.takes_parts and problem is None:
            in_time = self._groups.steps_within(device.samples_in(task.deadline_s, **moved), samples, task.steps)
            steps = in_time or steps
            seen = self._seen(samples, task, steps)
            takes_s = device.exchange_s(samples=seen, **moved)
        arrives_s = now_s + part * takes_s
        if arrives_s > there_until_s:
            arrives_s, problem = there_until_s, "it went away"
        return Flight(task, samples, arrives_s, seen, steps, problem)

    def _seen(self, samples: int, task: Task, steps: int | None) -> int:
        return self._groups.seen(samples, task.steps if steps is None else steps)
