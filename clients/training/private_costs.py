"""Costs of a client's tasks where its samples are private: each of its local steps is a release."""

from collections.abc import Iterable, Mapping

from fed.aggregators.base import Phase
from fed.clients.training.batches import Batches
from fed.config.experiment import Local
from fed.privacy.dp_sgd import SamplePrivacy, task_releases
from fed.privacy.releases import Release

__all__ = ["releases_of_task", "steps_of_task"]


def steps_of_task(samples: int, local: Local, phases: Iterable[Phase], steps: int | None = None) -> int:
    """Number of local steps of a task, in all phases.

    Args:
        samples: number of the client's samples, at least 1.
        local: the experiment's section of that name.
        phases: phases of local training.
        steps: the task's own number of steps; None: as many as the experiment says.

    Example:
        >>> steps_of_task(40, Local(batch_size=16, epochs=2), [Phase(), Phase(epochs=1)])
        9
    """
    return sum(Batches(phase.local(local), samples, steps=phase.steps(steps)).steps for phase in phases)


def releases_of_task(
    samples: int, local: Local, phases: Iterable[Phase], privacy: SamplePrivacy, *, steps: int | None = None
) -> Mapping[Release, int]:
    """Releases of one task of a client, with their counts; a task that is cut short makes fewer.

    Args:
        samples: number of the client's samples, at least 1.
        local: the experiment's section of that name.
        phases: phases of local training.
        privacy: clip and noise of the steps.
        steps: the task's own number of steps; None: as many as the experiment says.
    """
    total = steps_of_task(samples, local, phases, steps)
    return task_releases(samples, local.batch_size * local.accumulate, total, privacy)
