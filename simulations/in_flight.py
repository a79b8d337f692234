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
    """One task under way.

    Args:
        task: as it was sent.
        samples: the number of samples that the client holds.
        arrives_s: the clock at which the answer, or the news that there is none, arrives.
        seen: the number of samples trained on.
        steps: optimizer steps, where they are fewer than the task's.
        problem: the reason why there will be no answer.
        has_diverged: that reason is that its numbers are not finite.
        is_cancelled: the coordinator does not wait for it any more.
        answer: the update, once the task has been trained.
        state: the client's state after the task.
        lost: what codecs keep of it if its message is lost.
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
        clients: who they are, and what they run on.
        task: is sent.
        now_s: the clock.
        there_until_s: when the client goes away.
        bytes_down: of the task.
        bytes_up: of the answer.
    """
    device, groups, samples = clients.device_of(task.client), clients.groups, clients.data.size_of(task.client)
    steps, breaks_at = clients.fate(samples, task.steps, task.id)
    problem = "it was cut off before it had finished" if steps and not task.takes_parts else None
    problem = problem if breaks_at is None else "it broke down"
    seen = groups.seen(samples, steps or task.steps)
    takes_s = device.task_s(samples=seen, bytes_down=bytes_down, bytes_up=bytes_up)
    if task.deadline_s is not None and takes_s > task.deadline_s and task.takes_parts and problem is None:
        in_time = device.samples_in(task.deadline_s, bytes_down=bytes_down, bytes_up=bytes_up)
        # where none fits the client takes all its steps, and is late
        steps = groups.steps_within(in_time, samples, task.steps) or steps
        seen = groups.seen(samples, steps or task.steps)
        takes_s = device.task_s(samples=seen, bytes_down=bytes_down, bytes_up=bytes_up)
    arrives_s = now_s + takes_s * (1.0 if breaks_at is None else breaks_at)
    if arrives_s > there_until_s:
        arrives_s, problem = there_until_s, "it went away"
    return Flight(task, samples, arrives_s, seen, steps, problem)


@dataclass
class Occupation:
    """Counts over the tasks of a run.

    Attributes:
        busy_s: of all clients together, from being asked to answering.
        asked: client → tasks that it was sent.
        late: client → tasks whose answers were not waited for.

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
        """A client gets a task."""
        self.busy_s += takes_s
        self.asked[client] = self.asked.get(client, 0) + 1

    def miss(self, client: ClientId) -> None:
        """Note that a client's answer is not waited for any more."""
        self.late[client] = self.late.get(client, 0) + 1

    def summary(self, *, clients: int, clock: float, to_come_s: float) -> dict[str, Any]:
        """Figures for a run's summary.

        Args:
            clients: how many there are.
            clock: simulated seconds since the run began.
            to_come_s: of the busy time, what comes after that.
        """
        if not clock:
            return {}
        # by str, since numbers and names do not compare
        most = sorted(self.late, key=lambda client: (-self.late[client], str(client)))[:_MOST_LATE]
        told = [{"client": client, "late": self.late[client], "tasks": self.asked[client]} for client in most]
        idle = max(0.0, 1 - (self.busy_s - to_come_s) / (clients * clock))  # where all are busy, the sum may round up
        return {"idle_share": idle, **({"most_late": told} if told else {})}
