"""Noise for the ε that a run may cost, and the other keys of ``privacy`` that follow from its clients."""

from fed.config.experiment import Experiment
from fed.errors import InvalidExperiment
from fed.privacy.kinds import privacy_of

__all__ = ["with_noise"]


def with_noise(experiment: Experiment, population: int) -> Experiment:
    """The experiment with the keys of ``privacy`` that follow from its clients, and the noise for its ``epsilon``.

    Under ``unit: sample`` its ``epsilon`` stays: each client finds its own noise, by its own number of samples.

    Args:
        experiment: experiment of a run.
        population: number of clients, at least as many as take part.

    Raises:
        InvalidExperiment: if no noise does, if its rounds are too small for it, or if the package dp-accounting is
            missing.
    """
    settings = privacy_of(experiment)
    if settings is None:
        return experiment
    rounds = experiment.rounds.make()
    if found_keys := settings.fitted(rounds, population):
        # The separation is part of the experiment, as nodes and a resumed run see it.
        return with_noise(experiment.override(dict(found_keys)), population)
    if settings.epsilon is None:
        settings.check_rounds(rounds, population)
        return experiment
    if settings.unit == "sample":
        return experiment
    from fed.privacy.accounting import noise_multiplier_for

    try:
        found = noise_multiplier_for(settings.plan(rounds, population), settings.epsilon)
    except ValueError as error:
        raise InvalidExperiment(f"privacy.epsilon cannot be reached: {error}") from None
    noise = found * settings.key_multiplier
    resolved = experiment.override({"privacy.epsilon": None, "privacy.noise_multiplier": noise})
    return with_noise(resolved, population)  # for its checks
