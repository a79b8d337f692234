"""Audit of a run whose clients are private: canaries among them, and a reader of what the run publishes.

Each canary sends one direction in every round that asks it, far longer than the clip, if its coin has put it in. Who
reads the models that the run publishes guesses the coins (Andrew et al. 2023, 2302.03098; Steinke, Nasr & Jagielski
2023, 2305.08846). Everything else is the run's own: training, clip, noise, codecs, sums, cohorts, the algorithm.

Names that end in _m have a number for each of m canaries. Shapes: see :mod:`fed.vectors.layout`.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from fed.clients.data import ClientId, FederatedData
from fed.clients.data.held import size_of, taken
from fed.clients.training.work_items import TrainedClients
from fed.clients.way_out import Rows, WayOut
from fed.compression.codec import CodecState
from fed.config.experiment import Experiment
from fed.errors import InvalidExperiment
from fed.privacy.correlated_sum import CorrelatedSum
from fed.privacy.kinds import Privacy
from fed.secure_aggregation.settings import settings_of
from fed.server.observer import Essential, Event, Kinds, TaskSent
from fed.server.rounds.coordinated import Coordinated
from fed.server.telling import Observers
from fed.simulations.audited_run import AuditedRun, names_beside, rounds_within_budget, with_canaries
from fed.simulations.choice import hired
from fed.simulations.simulation import Simulation
from fed.vectors.randomness import Streams
from fed.vectors.tensors import Tensor, torch
from fed.wire.format import Outgoing

__all__ = ["run_with_canary_clients"]

_LENGTH = 1e6  # of a canary's update: far above any clip, and finite in every type
_SAMPLES = 2  # that a canary trains on, in vain; batch normalisation needs two


def run_with_canary_clients(
    experiment: Experiment, privacy: Privacy, data: FederatedData, model: Any, canaries: int
) -> AuditedRun:
    """Run an experiment with canaries beside its clients.

    Args:
        experiment: experiment with privacy of unit client.
        privacy: settings of its privacy.
        data: training data by client.
        model: factory of modules, or a module to copy; None: the experiment's.
        canaries: m, number of canaries.

    Raises:
        InvalidExperiment: if the model has too few parameters.
    """
    first = data.read(data.clients[0])
    samples = taken(first, slice(0, min(_SAMPLES, size_of(first))))
    names = names_beside(data.clients, canaries, "canary")
    changed = _with_room(experiment, privacy, clients=len(data.clients), canaries=canaries)
    with contextlib.ExitStack() as stack:
        simulation = Simulation(changed, with_canaries(data, data.clients, names, samples), model)
        parameters = simulation.layout.shared.parameters
        if parameters < canaries:
            raise InvalidExperiment(
                "an audit needs a model of at least one parameter a canary, got "
                f"{parameters} parameters and {canaries} canaries: give fewer canaries"
            )
        sent = _Canaries.drawn(simulation.streams, names, parameters, absent=_absent(simulation, privacy))
        ear = _Ear(sent) if privacy.sees_single else None
        _send(simulation, sent, ear)
        reader = _Reader(sent, knows_cohorts=_knows_cohorts(simulation))
        executor = stack.enter_context(hired(simulation))
        federation = simulation.federation(executor, Observers([Essential(reader)]))
        assert isinstance(federation, Coordinated)
        account = federation.coordinator.account
        assert account is not None
        rounds = _run(federation, reader, changed.rounds.make().count)
    scores_m = reader.scores_m(_correlation(simulation, rounds)) if ear is None else ear.scores_m
    return AuditedRun(
        scores_m=scores_m.numpy(),
        included_m=sent.included_m,
        rounds=rounds,
        claimed_epsilon=account.epsilon(),
    )


def _with_room(experiment: Experiment, privacy: Privacy, *, clients: int, canaries: int) -> Experiment:
    """The experiment with cohorts that keep every client's chance, and without what an audit does not look at.

    Args:
        experiment: experiment as it is given.
        privacy: settings of its privacy.
        clients: number of its clients.
        canaries: number of clients beside them.
    """
    # What follows from the number of clients follows from that of the experiment's own.
    given: dict[str, Any] = {"adversaries": None, **privacy.fitted(experiment.rounds.make(), clients)}
    cohort: Any = getattr(experiment.rounds.make(), "cohort", "all")
    if cohort != "all":
        # Rounded down: a rule of participation leaves room for no more.
        given["rounds.cohort"] = cohort * (clients + canaries) // clients
    if (secure := settings_of(experiment)) is not None:  # the noise of a sum is made for the fewest clients in it
        given["secure_aggregation.minimum_cohort"] = secure.minimum_cohort * (clients + canaries) // clients
    if privacy.sees_single:  # in this process, where the messages can be heard
        given |= {"simulation.workers": 0, "simulation.executor": None}
    return experiment.override(given)


def _absent(simulation: Simulation, privacy: Privacy) -> float:
    """Factor of the direction of a canary that is out: 0, or -1 where neighbours differ in a client's data alone.

    A message of 0 is no message to the sum, but for its bit under an adaptive clip, which no reader looks at.
    """
    plan = privacy.plan(simulation.policy, simulation.population)
    return -1.0 if plan.neighbourhood == "replace-one" else 0.0


def _knows_cohorts(simulation: Simulation) -> bool:
    """True if the run claims nothing for secret cohorts, so that whoever guesses may know them."""
    privacy = simulation.prepared.privacy
    assert privacy is not None
    return privacy.amplified(simulation.policy, simulation.population) == 1


@dataclass(frozen=True, kw_only=True)
class _Canaries:
    """Canaries, each with a direction of coordinates of its own: none of them is noise to another.

    Args:
        names: ids of the canaries.
        number_of: number of each canary, from 0.
        included_m: True for canaries whose coin put them in.
        owner_P: number of the canary that each coordinate belongs to; m for coordinates that are nobody's.
        signs_P: value of each coordinate in its canary's direction, of norm 1.
        absent: factor of the direction of canaries that are out.
    """

    names: tuple[ClientId, ...]
    number_of: dict[ClientId, int]
    included_m: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
    owner_P: Tensor
    signs_P: Tensor
    absent: float

    @classmethod
    def drawn(cls, streams: Streams, names: Sequence[ClientId], parameters: int, absent: float) -> "_Canaries":
        """Canaries with drawn directions and fair coins.

        Args:
            streams: random streams of the run.
            names: ids of the canaries.
            parameters: P, at least as many as there are canaries.
            absent: factor of the direction of canaries that are out.
        """
        generator = streams.generator("canaries")
        count = len(names)
        width = parameters // count
        owners = np.full(parameters, count)
        owners[generator.permutation(parameters)[: count * width]] = np.repeat(np.arange(count), width)
        signs = (2 * generator.integers(0, 2, parameters) - 1) / np.sqrt(width)
        return cls(
            names=tuple(names),
            number_of={name: number for number, name in enumerate(names)},
            included_m=generator.integers(0, 2, count).astype(bool),
            owner_P=torch.from_numpy(owners),
            signs_P=torch.from_numpy(signs),
            absent=absent,
        )

    def update(self, number: int) -> Tensor:
        """Update that a canary sends, [P] in float64."""
        factor = 1.0 if self.included_m[number] else self.absent
        return torch.where(self.owner_P == number, self.signs_P * (factor * _LENGTH), 0.0)

    def scores(self, vector_P: Tensor) -> Tensor:
        """Inner product of a vector with each direction, [m] in float64."""
        products_P = vector_P.double() * self.signs_P
        return torch.zeros(len(self.names) + 1, dtype=torch.float64).index_add(0, self.owner_P, products_P)[:-1]


def _correlation(simulation: Simulation, rounds: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """First column of the matrix that makes the noise of the rounds independent [T].

    Args:
        simulation: the simulation.
        rounds: T, number of rounds that were run.
    """
    planned = simulation.policy.count
    noise = simulation.prepared.noisy_sum(planned)
    if isinstance(noise, CorrelatedSum):
        return noise.mechanism.column(planned)[:rounds]
    return np.eye(rounds, 1)[:, 0]


class _Reader:
    """Reader of the models that a run publishes, who guesses by their moves, and may know who was asked.

    Args:
        canaries: canaries of the run.
        knows_cohorts: True if it knows who is asked.
    """

    kinds: Kinds = (TaskSent,)

    def __init__(self, canaries: _Canaries, *, knows_cohorts: bool) -> None:
        self._canaries = canaries
        self._knows_cohorts = knows_cohorts
        self._asked_m = torch.zeros(len(canaries.names), dtype=torch.float64)
        self._expected: list[Tensor] = []  # of each round: 1 for canaries that may show
        self._seen: list[Tensor] = []  # of each round: score of each canary

    def observe(self, event: Event) -> None:
        """Note who is asked."""
        if isinstance(event, TaskSent) and (number := self._canaries.number_of.get(event.client)) is not None:
            self._asked_m[number] = 1

    def read(self, move_P: Tensor) -> None:
        """Score the move of a round."""
        self._seen.append(self._canaries.scores(move_P))
        self._expected.append(self._asked_m.clone() if self._knows_cohorts else torch.ones_like(self._asked_m))
        self._asked_m.zero_()

    def scores_m(self, column_T: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> Tensor:
        r"""Score of each canary over all rounds, the best that there is against Gaussian noise [m].

        .. math:: \sum_t (C p)_t (C s)_t

        s are a canary's scores by round, p is 1 in rounds in which it may show, and C makes the noise independent.

        Args:
            column_T: first column of C, a lower triangular Toeplitz matrix.
        """
        if not self._seen:
            return torch.zeros(len(self._canaries.names), dtype=torch.float64)
        lags_TT = np.subtract.outer(np.arange(len(column_T)), np.arange(len(column_T)))
        whitening_TT = torch.from_numpy(np.where(lags_TT >= 0, column_T[lags_TT], 0.0))
        expected_Tm = whitening_TT @ torch.stack(self._expected)
        seen_Tm = whitening_TT @ torch.stack(self._seen)
        return (expected_Tm * seen_Tm).sum(0)


class _Ear:
    """Hearer of each canary's message as it leaves, where the run claims that each is safe by itself.

    Attributes:
        scores_m: sum of each canary's scores so far.
    """

    def __init__(self, canaries: _Canaries) -> None:
        self.scores_m = torch.zeros(len(canaries.names), dtype=torch.float64)
        self._canaries = canaries

    def hear(self, number: int, update_M: Tensor) -> None:
        """Score a message of the canary with this number."""
        self.scores_m[number] += self._canaries.scores(update_M[: len(self._canaries.signs_P)])[number]


@dataclass(frozen=True, kw_only=True)
class _WayOut(WayOut):
    """Way out of clients among which there are canaries, whose reports are replaced.

    Args:
        canaries: canaries.
        ear: hearer of their messages; None where nobody sees single messages.
    """

    canaries: _Canaries
    ear: _Ear | None

    def report(self, trained: TrainedClients) -> tuple[Rows, Any]:
        """Messages as the algorithm reports them, and the canaries' own; their other parts are 0."""
        rows, client_state = super().report(trained)
        numbers = self._numbers(trained.task.clients)
        if not numbers:
            return rows, client_state
        update_KM = rows.update_KM.clone()
        for row, number in numbers.items():
            update_P = self.canaries.update(number)
            update_KM[row] = 0
            update_KM[row, : len(update_P)] = update_P
        return rows._replace(update_KM=update_KM, params_KV=None), client_state

    def leave(
        self,
        rows: Rows,
        kept: CodecState,
        rounds: Sequence[int],
        clients: Sequence[ClientId],
        repeats: Sequence[int] = (),
        clip: float | None = None,
    ) -> Outgoing:
        """Messages as they leave clients; the canaries' are heard."""
        outgoing = super().leave(rows, kept, rounds, clients=clients, repeats=repeats, clip=clip)
        if self.ear is not None:
            for row, number in self._numbers(clients).items():
                self.ear.hear(number, outgoing.update_KM[row])
        return outgoing

    def _numbers(self, clients: Sequence[ClientId]) -> dict[int, int]:
        """Row → number of the canary whose row it is."""
        number_of = self.canaries.number_of
        return {row: number_of[client] for row, client in enumerate(clients) if client in number_of}


def _send(simulation: Simulation, canaries: _Canaries, ear: _Ear | None) -> None:
    """Let canaries send their directions."""
    way_out = simulation.way_out
    assert way_out is not None
    given = {field.name: getattr(way_out, field.name) for field in fields(way_out)}
    # All steps one after another: a shortcut would make the mean without the canaries' reports.
    simulation.way_out = _WayOut(**{**given, "is_fused": False}, canaries=canaries, ear=ear)
    simulation.recipe = replace(simulation.recipe, way_out=simulation.way_out)


def _run(federation: Coordinated, reader: _Reader, count: int) -> int:
    """Run all rounds that the budget allows, and read each model that is published.

    Returns:
        The number of rounds.
    """
    parameters = federation.coordinator.layout.parameters
    before_P = federation.coordinator.model()[0][:parameters].clone()
    rounds = 0
    for number in rounds_within_budget(federation, count):
        after_P = federation.coordinator.model()[0][:parameters].clone()
        reader.read(after_P.double() - before_P.double())
        before_P = after_P
        rounds = number
    return rounds
