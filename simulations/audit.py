"""Audit of a private run: what it tells of canaries, against the ε that it claims.

The canaries are clients (:mod:`fed.simulations.client_audit`), or where samples are private the samples of one client
(:mod:`fed.simulations.sample_audit`).
"""

from dataclasses import dataclass
from typing import Any

from fed.clients.data import FederatedData, load
from fed.config.experiment import Experiment
from fed.errors import InvalidExperiment
from fed.privacy.kinds import Privacy, privacy_of
from fed.privacy.local import LocalPrivacy
from fed.privacy.one_run_audit import Guesses, best_guesses
from fed.simulations.choice import leave_rerun
from fed.simulations.client_audit import run_with_canary_clients
from fed.simulations.sample_audit import run_with_canary_samples
from fed.vectors.torch_settings import one_thread

__all__ = ["Audit", "audit"]

_LEAST_CANARIES = 20
_CANARIES = {"client": 1000, "sample": 200}  # unless a number is given


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Outcome of an audit.

    Args:
        guesses: guesses on the canaries, and the bound that follows from them.
        included: number of canaries whose coin put them in.
        rounds: number of rounds of the run.
        claimed_epsilon: ε that the run claims, by its accountant.
        delta: δ of both.
        confidence: probability with which the bound is true.
    """

    guesses: Guesses
    included: int
    rounds: int
    claimed_epsilon: float
    delta: float
    confidence: float

    @property
    def passes_claim(self) -> bool:
        """True if the run tells more than it claims."""
        return self.guesses.epsilon > self.claimed_epsilon

    @property
    def verdict(self) -> str:
        """The outcome in one sentence."""
        chance = f"{1 - self.confidence:.3g}"
        if self.passes_claim:
            return (
                f"The run tells more than it claims: if its claim were true, so many right guesses would have a "
                f"probability below {chance}."
            )
        if self.guesses.largest_epsilon <= self.claimed_epsilon:
            return (
                f"No fault was found, and none could be: {self.guesses.canaries} canaries refute no claim of ε above "
                f"{self.guesses.largest_epsilon:.3g}, so give more canaries or claim less."
            )
        return "No fault was found: the bound does not pass the claim."


def audit(
    experiment: Experiment,
    data: FederatedData | None = None,
    model: Any = None,
    *,
    canaries: int | None = None,
    confidence: float = 0.95,
) -> Audit:
    """Run an experiment once with canaries among its clients, and bound its ε from below.

    Canaries are clients beside the experiment's own. A cohort grows with their number, so that everybody's chance of
    being in a round stays as it is, and so does the smallest cohort of secure aggregation. Under ``unit: sample`` they
    are the samples of one client more (:mod:`fed.simulations.sample_audit`). Adversaries are left out.

    Args:
        experiment: experiment with a section ``privacy``.
        data: training data by client, in place of the experiment's.
        model: factory of modules, or a module to copy, in place of the experiment's.
        canaries: m, number of canaries, from 20 to the number of the model's parameters, or half of it where samples
            are private; None: 1,000 clients, or 200 samples. More of them can refute a larger claim.
        confidence: probability with which the bound is true, in (0, 1).

    Raises:
        InvalidExperiment: if the experiment has no such privacy, or the model too few parameters.
    """
    privacy = _auditable(experiment)
    canaries = _CANARIES[privacy.unit] if canaries is None else canaries
    if canaries < _LEAST_CANARIES:
        raise InvalidExperiment(f"an audit needs at least {_LEAST_CANARIES} canaries, got {canaries}: give more")
    if data is None:
        assert experiment.data is not None
        data = load(experiment.data, experiment.data_streams, experiment.table)
    leave_rerun()  # without a main guard every worker runs this line
    with one_thread():
        if isinstance(privacy, LocalPrivacy) and privacy.unit == "sample":
            run = run_with_canary_samples(experiment, privacy, data, model, canaries)
        else:
            run = run_with_canary_clients(experiment, privacy, data, model, canaries)
    return Audit(
        guesses=best_guesses(run.scores_m, run.included_m, delta=privacy.delta, confidence=confidence),
        included=int(run.included_m.sum()),
        rounds=run.rounds,
        claimed_epsilon=run.claimed_epsilon,
        delta=privacy.delta,
        confidence=confidence,
    )


def _auditable(experiment: Experiment) -> Privacy:
    """Settings of an experiment's privacy.

    Raises:
        InvalidExperiment: if there is none, or canaries cannot be put in.
    """
    privacy = privacy_of(experiment)
    if privacy is None:
        raise InvalidExperiment("an audit needs the section privacy, got null: say how much the run may tell of whom")
    if experiment.app is not None:
        raise InvalidExperiment("an audit needs clients that fed trains, got the section app: leave it out")
    return privacy
