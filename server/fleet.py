"""What a coordinator sees of the clients, wherever they are."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from fed.checkpoints import Tree
from fed.messages import EdgeReply, Failure, GroupReply, Reply, Task

if TYPE_CHECKING:  # simulations do without
    from fed.protocol_pb2 import Plan, Scores

__all__ = ["Fleet", "RealFleet"]


class Fleet(Protocol):
    """Clients that take tasks and answer them, in their own time."""

    @property
    def clock(self) -> float:
        """Seconds since the run began: simulated ones, or real ones."""
        ...

    def members(self) -> Sequence[int | str]:
        """The clients that take part, whether they are there now or not, in a fixed order."""
        ...

    def nodes(self) -> Sequence[int | str]:
        """The clients that can take a task now, in a fixed order."""
        ...

    def size_of(self, client: int | str) -> int:
        """How many samples a client holds."""
        ...

    def dispatch(self, tasks: Iterable[Task]) -> None:
        """Send tasks out; returns at once."""
        ...

    def collect(
        self, until: float = math.inf, enough: int | None = None
    ) -> Iterator[Reply | GroupReply | EdgeReply | Failure]:
        """Answers as they arrive; each counts for its own tasks.

        Args:
            until: the clock at which to stop.
            enough: the number of replies after which to stop; all of one instant are given. None: when no task is left.
        """
        ...

    def cancel(self, tasks: Iterable[int]) -> None:
        """Give no answers to these tasks, for which nobody waits any more, but those that are there already."""
        ...

    def state(self) -> Tree:
        """All that it will go on with after an interruption, for a checkpoint."""
        ...

    def restore(self, state: Tree) -> None:
        """Go on with what :meth:`state` said."""
        ...

    def wait(self, until: float = math.inf) -> bool:
        """Let time pass until a client comes or goes, or the clock is at ``until``.

        Returns:
            Whether one did; not where an answer is there before, which is to be collected, or where none ever will.
        """
        ...


class RealFleet(Fleet, Protocol):
    """Real nodes, which say themselves what they are and what they hold."""

    @property
    def refused(self) -> int:
        """How often something was refused."""
        ...

    def begin(
        self,
        plan: "Plan",
        answer: Sequence[Tensor],
        *,
        reports_models: bool,
        asks_place: bool = False,
        keeps_checkpoints: bool = True,
    ) -> None:
        """Tell nodes what they will work for.

        Args:
            plan: as they will get it.
            answer: tensors like those of an answer.
            reports_models: whether clients answer trained models, in the model's type, rather than messages.
            asks_place: whether clients are told their numbers.
            keeps_checkpoints: whether the run may go on from an earlier state.
        """
        ...

    def await_nodes(self, count: int) -> None:
        """Wait until so many attend."""
        ...

    def fix_members(self) -> None:
        """From now on nobody becomes one; who is none attends, and is asked nothing."""
        ...

    def scores(self, model: tuple[Tensor, Tensor], limit_s: float) -> list["Scores"]:
        """What nodes find of a model (vector [V], integers [I]), or of their own, on samples that they hold out."""
        ...
