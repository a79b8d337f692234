"""Federation of clients under a coordinator, whose rounds follow a policy.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any

from fed.aggregators.base import Aggregator
from fed.clients.setup import Preparation
from fed.clients.training.client_states import ClientStates
from fed.clients.training.private_costs import releases_of_task
from fed.config.experiment import Experiment, Local
from fed.privacy.ledger import Ledger
from fed.privacy.noise import SeededNoise
from fed.privacy.releases import Release
from fed.server.coordinator import Coordinator
from fed.server.federation import State
from fed.server.fleet import Fleet
from fed.server.privacy_account import PrivacyAccount
from fed.server.round_stats import RoundStats
from fed.server.rounds.synchronous import Rounds
from fed.server.sample_account import SampleAccount
from fed.server.telling import Observers
from fed.storage.checkpoints import Tree
from fed.wire.format import Format

__all__ = ["Coordinated", "step_sizes"]


@dataclass
class Coordinated:
    """The federation of an experiment's clients under a coordinator.

    Args:
        experiment: experiment, with the step size.
        prepared: algorithm, first model and random streams of the experiment.
        policy: policy of its rounds.
        fleet: fleet of the clients, simulated or real.
        message: format of the run's messages.
        states: states of the clients.
        moved_bytes: function that returns the bytes that have travelled up and down in the last round; None: the fleet
            counts them.
        occupation: function that returns the clients' use of their time, for the summary.
        observers: observers that are told of tasks; None: nobody is told.
        first_task: id of the first task, where the fleet has had others before.
    """

    experiment: InitVar[Experiment]
    prepared: InitVar[Preparation]
    policy: Rounds
    fleet: InitVar[Fleet]
    message: InitVar[Format]
    states: ClientStates
    _: KW_ONLY
    moved_bytes: Callable[[], tuple[int, int]] | None = None
    occupation: Callable[[], dict[str, Any]] = dict
    observers: InitVar[Observers | None] = None
    first_task: InitVar[int] = 0

    def __post_init__(
        self,
        experiment: Experiment,
        prepared: Preparation,
        fleet: Fleet,
        message: Format,
        observers: Observers | None,
        first_task: int,
    ) -> None:
        """Begin before the first round."""
        shared = prepared.layout.shared
        private = prepared.privacy
        algorithm = prepared.algorithm
        assert isinstance(algorithm, Aggregator)
        vector_V, integers_I = shared.pack(prepared.module)
        self.coordinator = Coordinator(
            aggregator=algorithm,
            fleet=fleet,
            layout=shared,
            message=message,
            vector_V=vector_V,
            integers_I=integers_I,
            streams=prepared.streams,
            lr_in=step_sizes(experiment, self.policy),
            drops_diverged=self.policy.drops_diverged or private is not None,
            stages=prepared.stages,
            noisy_sum=prepared.noisy_sum(self.policy.count),
            adaptive_clip=prepared.adaptive_clip(),
            cohort_streams=prepared.cohort_streams,
            account=_account(prepared, message, rounds=self.policy.count, local=experiment.local, fleet=fleet),
            participation=None if private is None else private.participation_rule(self.policy.count),
            observers=observers or Observers(),
            first_task=first_task,
        )
        self._policy_state = self.policy.init()

    @property
    def clock(self) -> float:
        """Seconds since the run began."""
        return self.coordinator.fleet.clock

    def round(self, number: int) -> RoundStats:
        """One round of the policy."""
        stats = self.policy.round(self.coordinator, number, self._policy_state)
        if self.moved_bytes is None:
            return stats
        # Real messages have headers, and some are sent again: the measured bytes replace the computed ones.
        up, down = self.moved_bytes()
        return stats._replace(bytes_up=up, bytes_down=down)

    def clients(self) -> Sequence[int | str]:
        """Clients that have registered by now."""
        return self.coordinator.fleet.registered()

    def measures(self) -> dict[str, float]:
        """The ε that the run has cost, where it promises privacy; and the next round's clip, where it moves."""
        account = self.coordinator.account
        clip = self.coordinator.clip
        measured = {} if account is None else {"epsilon": account.estimate()}
        return measured if clip is None else {**measured, "clip": clip}

    def state(self) -> Tree:
        """State of the coordinator, the fleet and the policy."""
        policy = None if self._policy_state is None else self._policy_state.state()
        return {"coordinator": self.coordinator.state(), "fleet": self.coordinator.fleet.state(), "policy": policy}

    def restore(self, state: Tree) -> None:
        """Resume from a state that :meth:`state` gave."""
        self.coordinator.restore(state["coordinator"])
        self.coordinator.fleet.restore(state["fleet"])
        # Policies without a state of their own write none.
        if state["policy"] is not None:
            self._policy_state = type(self._policy_state).restore(state["policy"])

    def model(self) -> State:
        """The coordinator's model, with the first model's private parts where there are any."""
        return self.states.whole(self.coordinator.model())

    def models(self) -> Mapping[int | str, State]:
        """Each client's own model, where clients have private parts of a model, or whole ones."""
        return self.states.models(self.coordinator.model())


def step_sizes(experiment: Experiment, policy: Rounds) -> Callable[[int, int], float]:
    """Function from (round, clients asked) to the step size of their local steps."""
    return lambda number, clients: experiment.local.lr_in(number, policy.count, clients)


def _account(
    prepared: Preparation, message: Format, *, rounds: int, local: Local, fleet: Fleet
) -> PrivacyAccount | None:
    """Account of a run's privacy, by the ledger that is kept, or else by one in memory."""
    if prepared.privacy is None:
        return None
    in_memory = Ledger.in_memory("this run", repeats_noise=isinstance(prepared.noise, SeededNoise))
    ledger = prepared.ledger or in_memory
    of_samples = prepared.recipe.sample_privacy
    if of_samples is None:
        return PrivacyAccount(prepared.privacy, ledger, rounds, message.fixed)

    def releases_of(samples: int) -> Mapping[Release, int]:
        return releases_of_task(samples, local, prepared.phases, of_samples)

    return SampleAccount(prepared.privacy, ledger, rounds, size_of=fleet.size_of, releases_of=releases_of)
