"""Noise for the ε that a run may cost, and the other keys of ``privacy`` that follow from its clients."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fed.config.experiment import Experiment, Local
from fed.errors import InvalidExperiment
from fed.privacy.dp_sgd import sampling_rate
from fed.privacy.kinds import Policy, Privacy, most_rounds, privacy_of

if TYPE_CHECKING:
    from fed.privacy.plan import PrivacyPlan

__all__ = ["with_noise"]


def with_noise(experiment: Experiment, population: int, steps: Mapping[int, int] | None = None) -> Experiment:
    """The experiment with the keys of ``privacy`` that follow from its clients, and the noise for its ``epsilon``.

    Args:
        experiment: experiment of a run.
        population: number of clients, at least as many as take part.
        steps: number of samples of each client → number of local steps of its tasks, for ``unit: sample``; None: not
            known.

    Raises:
        InvalidExperiment: if no noise does, if its rounds are too small for it, or if the package dp-accounting is
            missing.
    """
    settings = privacy_of(experiment)
    if settings is None:
        return experiment
    if found_keys := settings.fitted(experiment.rounds.make(), population):
        # The separation is part of the experiment, as nodes and a resumed run see it.
        return with_noise(experiment.override(dict(found_keys)), population, steps)
    if settings.epsilon is None:
        settings.check_rounds(experiment.rounds.make(), population)
        return experiment
    from fed.privacy.accounting import noise_multiplier_for

    rounds = experiment.rounds.make()
    if settings.unit == "client":
        plans = [settings.plan(rounds, population)]
    else:
        plans = _plans_of_samples(settings, experiment.local, rounds=rounds, population=population, steps=steps)
    try:
        found = max(noise_multiplier_for(plan, settings.epsilon) for plan in plans)
    except ValueError as error:
        raise InvalidExperiment(f"privacy.epsilon cannot be reached: {error}") from None
    noise = found * settings.multiplier_of_plan
    resolved = experiment.override({"privacy.epsilon": None, "privacy.noise_multiplier": noise})
    return with_noise(resolved, population)  # for its checks


def _plans_of_samples(
    settings: Privacy, local: Local, *, rounds: Policy, population: int, steps: Mapping[int, int] | None
) -> "list[PrivacyPlan]":
    """Plan of the client of each number of samples."""
    from fed.privacy.plan import PrivacyPlan

    if steps is None:
        raise InvalidExperiment(
            "privacy.epsilon cannot be reached under unit: sample, for the clients' numbers of samples are not known "
            "before they join: give noise_multiplier"
        )
    return [
        PrivacyPlan(
            kind="local",
            mechanism="Gaussian noise, added to the sum of clipped gradients in each local step",
            noise_multiplier=1.0,
            rounds=rounds.count,
            delta=settings.delta,
            sampling=sampling_rate(samples, local.batch_size * local.accumulate),
            releases_a_round=steps_of_task,
            unit="sample",
            participations=most_rounds(rounds, population),
        )
        for samples, steps_of_task in steps.items()
    ]
