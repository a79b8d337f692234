"""Costs of a client's tasks where its samples are private: each of its local steps is a release."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fed.aggregators.base import Phase
from fed.clients.training.batches import Batches
from fed.config.experiment import Experiment, Local
from fed.errors import InvalidExperiment
from fed.privacy.dp_sgd import SamplePrivacy, sampling_rate, task_releases
from fed.privacy.kinds import Policy, privacy_of
from fed.privacy.local import LocalPrivacy
from fed.privacy.releases import Release
from fed.processes.clock import SYSTEM_CLOCK

if TYPE_CHECKING:
    from fed.privacy.plan import PrivacyPlan

__all__ = [
    "ClientPlans",
    "NoiseBySize",
    "noise_by_size",
    "plans_of_clients",
    "releases_of_task",
    "sample_privacy_of",
    "steps_of_task",
]


_log = logging.getLogger(__name__)
_LONG_S = 1.0  # after which a user wonders what is done


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


@dataclass(frozen=True, kw_only=True)
class ClientPlans:
    """Plans of clients whose samples are private, each by its number of samples.

    Args:
        settings: settings of privacy, of unit sample.
        rounds: policy of the rounds.
        local: the experiment's section of that name.
        phases: phases of local training.
    """

    settings: LocalPrivacy
    rounds: Policy
    local: Local
    phases: tuple[Phase, ...]

    def of(self, samples: int, noise_multiplier: float = 1.0, population: int | None = None) -> "PrivacyPlan":
        """Plan of a client.

        Args:
            samples: number of its samples, at least 1.
            noise_multiplier: z > 0; 1 where another is sought.
            population: number of all clients; None at a client, which does not know it.
        """
        return self.settings.plan_of_samples(
            self.rounds,
            population,
            sampling=sampling_rate(samples, self.local.batch_size * self.local.accumulate),
            steps=steps_of_task(samples, self.local, self.phases),
            noise_multiplier=noise_multiplier,
        )


@dataclass(frozen=True, kw_only=True)
class NoiseBySize:
    """Noise with which each client's samples lose the same ε in a run, by its number of samples.

    Client, coordinator and simulation find the same, each for the numbers of samples that it meets.

    Args:
        plans: plans of the clients.
        epsilon: ε > 0 of a run, for each client that takes part in as many rounds as one can.
    """

    plans: ClientPlans
    epsilon: float
    _found: dict[int, float] = field(default_factory=dict, init=False, compare=False)

    def __call__(self, samples: int) -> float:
        """Noise multiplier z of a client.

        Args:
            samples: number of its samples, at least 1.

        Raises:
            InvalidExperiment: if no noise does, or if the package dp-accounting is missing.
        """
        if samples not in self._found:
            from fed.privacy.accounting import noise_multiplier_for

            try:
                self._found[samples] = noise_multiplier_for(self.plans.of(samples), self.epsilon)
            except ValueError as error:
                raise InvalidExperiment(f"privacy.epsilon cannot be reached: {error}") from None
        return self._found[samples]


def sample_privacy_of(experiment: Experiment, phases: Sequence[Phase]) -> SamplePrivacy | None:
    """Clip and noise of each local step; None where whole messages are protected, or nothing is.

    Args:
        experiment: experiment of a run, or the part of it that a node is told.
        phases: phases of local training.
    """
    plans = _client_plans(experiment, phases)
    if plans is None:
        return None
    settings = plans.settings
    noise: float | NoiseBySize = settings.noise_multiplier or 0.0
    if settings.epsilon is not None:
        noise = NoiseBySize(plans=plans, epsilon=settings.epsilon)
    return SamplePrivacy(clip=settings.sent_clip, noise_multiplier=noise)


def plans_of_clients(experiment: Experiment, sizes: Iterable[int]) -> "dict[int, PrivacyPlan]":
    """Number of samples → plan of a client with so many, with its noise.

    Args:
        experiment: experiment of a run with privacy of unit sample.
        sizes: numbers of samples of clients, each at least 1.
    """
    phases = experiment.algorithm.make().phases()
    plans = _client_plans(experiment, phases)
    privacy = sample_privacy_of(experiment, phases)
    assert plans is not None
    assert privacy is not None
    return {size: plans.of(size, noise) for size, noise in noise_by_size(privacy, sizes).items()}


def noise_by_size(privacy: SamplePrivacy, sizes: Iterable[int]) -> dict[int, float]:
    """Number of samples → noise multiplier; one line is logged where finding them takes long.

    Args:
        privacy: clip and noise of the steps.
        sizes: numbers of samples of clients, each at least 1.
    """
    left = sorted(set(sizes))
    began_s = SYSTEM_CLOCK.monotonic_s()
    is_said = False
    found: dict[int, float] = {}
    for size in left:
        if not is_said and SYSTEM_CLOCK.monotonic_s() - began_s > _LONG_S:
            is_said = True
            _log.info("finding the noise for privacy.epsilon, for each of %d numbers of samples", len(left))
        found[size] = privacy.noise_of(size)
    return found


def _client_plans(experiment: Experiment, phases: Sequence[Phase]) -> ClientPlans | None:
    settings = privacy_of(experiment)
    if not isinstance(settings, LocalPrivacy) or settings.unit != "sample":
        return None
    rounds = experiment.rounds.make()
    return ClientPlans(settings=settings, rounds=rounds, local=experiment.local, phases=tuple(phases))
