"""Simulated tasks in flight: when each answer arrives, why none does, and how busy clients are."""

from dataclasses import dataclass, field
from typing import Any

from fed.clients.data import ClientId
from fed.clients.training.client_states import ClientState
from fed.simulations.simulated_clients import SimulatedClients
from fed.storage.checkpoints import Tree, plain
from fed.wire.messages import Answer, Task, answer_of, task_of

__all__ = ["Flight", "Occupation", "depart"]

_MOST_LATE = 10  # clients that a summary names


@dataclass(slots=True)
class Flight:
    """One task in flight.

    Args:
        task: task that was sent.
        samples: number of samples that the client holds.
        arrives_s: time on the clock at which the answer, or the news of its failure, arrives.
        seen: number of samples trained on, each counted as often as it is seen.
        steps: number of optimizer steps, where they are fewer than the task's; None for all of them.
        problem: reason why there will be no update; None if there will be one.
        has_diverged: True if the task fails because its numbers are not finite.
        is_cancelled: True if the coordinator does not wait for it any more.
        answer: update of the client; None until the task has been trained.
        state: state of the client after the task.
        lost: state that codecs keep if the message is lost.
    """

    task: Task
    samples: int
    arrives_s: float
    seen: int
    steps: int | None = None
    problem: str | None = None
    has_diverged: bool = False
    is_cancelled: bool = False
    answer: Answer | None = None
    state: ClientState = field(default_factory=dict)
    lost: ClientState = field(default_factory=dict)

    def saved(self) -> Tree:
        """Whole flight, for a checkpoint."""
        return {
            **{name: getattr(self, name) for name in self.__slots__},
            "task": plain(self.task),
            "answer": self.answer.saved() if self.answer else None,
        }

    @classmethod
    def restored(cls, state: Tree) -> "Flight":
        """The flight that :meth:`saved` wrote down."""
        answer = answer_of(state["answer"]) if state["answer"] else None
        return cls(**{**state, "task": task_of(state["task"]), "answer": answer})

    @property
    def counts(self) -> bool:
        """True if an update will come of it that the coordinator waits for."""
        return self.problem is None and not self.is_cancelled


def depart(
    clients: SimulatedClients, task: Task, *, now_s: float, there_until_s: float, bytes_down: int, bytes_up: int
) -> Flight:
    """Start a client's task: its duration and its failure are decided now, its update is computed later.

    Args:
        clients: all clients of the federation, with their devices.
        task: task that the client gets.
        now_s: time of the dispatch on the simulated clock.
        there_until_s: time at which the client goes away; infinite if it does not.
        bytes_down: size of the task's message.
        bytes_up: size of the answer's message.
    """
    device = clients.device_of(task.client)
    groups = clients.groups
    samples = clients.data.size_of(task.client)
    steps, breaks_at = clients.fate(samples, task.steps, task.id)
    problem: str | None = None
    if breaks_at is not None:
        problem = "it broke down"
    elif steps and not task.takes_parts:
        problem = "it was cut off before it had finished"
    seen = groups.seen(samples, steps or task.steps)
    takes_s = device.task_s(samples=seen, bytes_down=bytes_down, bytes_up=bytes_up)
    if task.deadline_s is not None and takes_s > task.deadline_s and task.takes_parts and problem is None:
        # A client that may answer with a part of its steps takes as many as end in time.
        in_time = device.samples_in(task.deadline_s, bytes_down=bytes_down, bytes_up=bytes_up)
        # 0 means that not even one step fits: the client then takes all its steps, and is late.
        steps = groups.steps_within(in_time, samples, task.steps) or steps
        seen = groups.seen(samples, steps or task.steps)
        takes_s = device.task_s(samples=seen, bytes_down=bytes_down, bytes_up=bytes_up)
    arrives_s = now_s + takes_s * (1.0 if breaks_at is None else breaks_at)
    if arrives_s > there_until_s:
        arrives_s = there_until_s
        problem = "it went away"
    return Flight(task, samples, arrives_s=arrives_s, seen=seen, steps=steps, problem=problem)


@dataclass
class Occupation:
    """Counts over the tasks of a run.

    Attributes:
        busy_s: seconds from the dispatch to the answer, summed over all tasks.
        asked: client → number of tasks that it was sent.
        late: client → number of its tasks that were cancelled before they were answered.

    Example:
        >>> occupation = Occupation()
        >>> occupation.begin("a", 3.0), occupation.begin("b", 5.0), occupation.miss("b")
        (None, None, None)
        >>> occupation.summary(clients=2, clock=4.0, to_come_s=1.0)
        {'idle_share': 0.125, 'most_late': [{'client': 'b', 'late': 1, 'tasks': 1}]}
    """

    busy_s: float = 0.0
    asked: dict[ClientId, int] = field(default_factory=dict)
    late: dict[ClientId, int] = field(default_factory=dict)

    def begin(self, client: ClientId, takes_s: float) -> None:
        """Note that a client gets a task, which it answers after ``takes_s`` seconds."""
        self.busy_s += takes_s
        self.asked[client] = self.asked.get(client, 0) + 1

    def miss(self, client: ClientId) -> None:
        """Note that a client's answer is not waited for any more."""
        self.late[client] = self.late.get(client, 0) + 1

    def summary(self, *, clients: int, clock: float, to_come_s: float) -> dict[str, Any]:
        """Figures for a run's summary.

        Args:
            clients: number of clients.
            clock: simulated seconds since the run began.
            to_come_s: part of the busy time that lies after the clock, in seconds.
        """
        if not clock:
            return {}
        # By str, since numbers and names do not compare.
        most = sorted(self.late, key=lambda client: (-self.late[client], str(client)))[:_MOST_LATE]
        told = [{"client": client, "late": self.late[client], "tasks": self.asked[client]} for client in most]
        # Where all clients are always busy, rounding may take the sum above the whole.
        idle = max(0.0, 1 - (self.busy_s - to_come_s) / (clients * clock))
        figures: dict[str, Any] = {"idle_share": idle}
        if told:
            figures["most_late"] = told
        return figures
