"""Contracts of algorithms, and of those over ``mean``.

Shapes: see :mod:`fed.vectors.layout`.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np

from fed.aggregators.local_rule import Broadcast, LocalRule, Phase
from fed.aggregators.reports import ClientWork, Reduced, Report
from fed.config.compatibility import Feature, Sections, Term
from fed.config.experiment import Local
from fed.config.hyperparameters import Hyperparameters
from fed.errors import InvalidExperiment
from fed.vectors.layout import Layout
from fed.vectors.tensors import Tensor, nn, torch

__all__ = ["Aggregator", "Algorithm", "Broadcast", "ClientWork", "LocalRule", "Phase", "Reduced", "Report"]


@dataclass(frozen=True, kw_only=True)
class Algorithm(LocalRule, Hyperparameters, ABC):
    """Base of algorithms over either primitive: hyper-parameters, and the properties that others ask for."""

    primitive: ClassVar[Literal["mean", "mix"] | None]
    """Operation that the algorithm is an equation over; None: clients learn alone."""
    linear: ClassVar[bool] = True
    """True if only the mean of the messages is needed, so that groups of clients may be reduced where they train."""
    personal: ClassVar[bool] = False
    """True if the purpose is a model for each client, scored on that client's own data."""
    asks: ClassVar[frozenset[str]] = frozenset()
    """Quantities that a report needs beside the local steps: "loss" and "gradient" of x on the client's own data, the
    number of "steps", and the client's "place" among all."""
    told_to_apps: ClassVar[tuple[str, ...]] = ()
    """Hyper-parameters by which clients with code of their own change their steps as the algorithm does."""
    votes: ClassVar[bool] = False
    """True if clients send votes: only the signs of a message count, and each client counts alike."""
    uplink: ClassVar[tuple[str, ...]] = ()
    """Codecs of clients' updates, unless the experiment names others."""
    downlink: ClassVar[tuple[str, ...]] = ()
    """Codecs of the messages to clients, unless the experiment names others."""
    default_rounds: ClassVar[Mapping[str, Any]] = {}
    """Keys of the section ``rounds`` where an experiment has none."""
    pools_data: ClassVar[bool] = False
    """True if one client holds all clients' data, so that no client reports to a coordinator."""

    @property
    def needs_fixed_members(self) -> bool:
        """True if clients are numbered from the beginning of a run to its end."""
        return "place" in self.asks

    @property
    def local_rule(self) -> LocalRule | None:
        """The algorithm itself where it changes local steps."""
        return self if self.corrects or self.contrasts else None

    def check_local(self, local: Local) -> None:
        """Any local training.

        An algorithm whose equation does not hold for all local training says in this docstring's first line for which
        it holds. The check is made when an experiment is read.

        Raises:
            InvalidExperiment: for the others, with the reason and the way out.
        """

    def needs(self) -> Sequence[Term]:
        """Features that the flags say it needs."""
        if not self.needs_fixed_members:
            return ()
        return (Term(Feature.FIXED_MEMBERS, "choose an algorithm such as fedavg", "because it numbers them"),)

    def lacks(self) -> Sequence[Term]:
        """Features that the flags say it does not offer."""
        if not self.personal:
            return ()
        way_out = "choose an algorithm for a global model such as fedavg"
        return (Term(Feature.GLOBAL_MODEL, way_out, "whose clients use models of their own, each on its own data"),)

    def check_experiment(self, experiment: Sections) -> None:
        """Refuse local training for which its equation does not hold."""
        self.check_local(experiment.local)


@dataclass(frozen=True, kw_only=True)
class Aggregator(Algorithm):
    """Algorithm over ``mean``: the clients' messages, and the movement of the model by their mean.

    A subclass is a frozen dataclass of hyper-parameters. Its state is a named tuple of float64 tensors whose field
    ``model_P`` is the global model. Only :meth:`init` and :meth:`apply` must be written; what a client does beyond
    plain training is :meth:`local_start`, :meth:`report`, :meth:`phases` and, in its local steps, :class:`LocalRule`.
    With a model that has private parts, all of these see the shared parameters alone.
    """

    primitive: ClassVar[Literal["mean"]] = "mean"
    is_replicated: ClassVar[bool] = False
    """True if peers compute the algorithm without a coordinator, each for itself from the same sum."""
    linear_client_state: ClassVar[bool] = False
    """True if the state that a client keeps moves linearly with its update.

    Then an update that counts at a discount s moves the client's state s of the way, as it moves the server's, and sums
    that server and clients keep of the same updates stay equal. A client's own model is no such state.
    """
    plain_report: ClassVar[bool] = True
    """True if clients report their updates, weighted by samples: the class does not override :meth:`report`."""
    update_alone: ClassVar[bool] = True
    """True if a report is the update alone, however weighted or shortened; a class with a report of its own says so."""
    plain_start: ClassVar[bool] = True
    """True if local steps begin at the model that is sent: the class does not override :meth:`local_start`."""
    keeps_client_state: ClassVar[bool] = False
    """True if clients keep a state from task to task: the class overrides :meth:`init_client`."""
    keeps_private: ClassVar[bool] = False
    """True if parts of the model never leave a client: the class overrides :meth:`private`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.plain_report = cls.report is Aggregator.report  # once a class, since a comparison for every task takes time
        # A report of its own may hold anything: only the class itself can say that it is the update alone.
        if "report" in vars(cls):
            cls.update_alone = vars(cls).get("update_alone", False)
        cls.plain_start = cls.local_start is Aggregator.local_start
        cls.keeps_client_state = cls.init_client is not Aggregator.init_client
        cls.keeps_private = cls.private is not Aggregator.private

    def needs(self) -> Sequence[Term]:
        """Single answers unless it is linear, and whole updates where client states cannot follow a discount."""
        terms = [*super().needs()]
        if not self.linear:
            way_out = "choose an algorithm that needs only their mean such as fedavg"
            terms.append(Term(Feature.SINGLE_ANSWERS, way_out))
        if why := self._change_of_local_training():
            terms.append(Term(Feature.OWN_TRAINING, "choose an algorithm such as fedavg", why))
        if self.keeps_client_state and not self.linear_client_state:
            way_out = "choose an algorithm whose clients keep nothing such as fedavg"
            why = "because what a client keeps does not move linearly with its update"
            terms.append(Term(Feature.WHOLE_UPDATES, way_out, why))
        return terms

    def lacks(self) -> Sequence[Term]:
        """Neighbours; and what the flags say."""
        terms = [*super().lacks(), Term(Feature.NEIGHBOURS, "choose an algorithm over mix such as dpsgd")]
        if self.pools_data:
            way_out = "choose a federated algorithm over mean such as fedavg"
            why = "whose one client holds all data"
            features = Feature.REPORTS, Feature.MESSAGES, Feature.ENCODED
            terms += [Term(feature, way_out, why) for feature in features]
        if self.needs_fixed_members:
            way_out = "choose an algorithm such as fedavg"
            why = "whose messages have a place for each client"
            terms.append(Term(Feature.ANONYMOUS_SUMS, way_out, why))
        if why := self._beside_updates():
            terms.append(Term(Feature.PLAIN_UPDATES, "choose an algorithm such as fedavg", why))
        return terms

    def _change_of_local_training(self) -> str:
        """Clause on the part of local training that is the algorithm's own; empty where there is none."""
        if (self.corrects or self.contrasts) and not self.told_to_apps:
            return "because it corrects each gradient" if self.corrects else "because it adds a term to the loss"
        if asked := sorted(self.asks & {"loss", "gradient", "steps"}):
            return f"because it asks each client for its {asked[0]}"
        kind = type(self)
        if kind.phases is not Aggregator.phases or kind.steps is not Aggregator.steps:
            return "because it says which steps clients take"
        if kind.fixes is not Aggregator.fixes or kind.moves is not Aggregator.moves:
            return "because it looks at the layers of a PyTorch model"
        return "because parts of the model stay with each client" if self.keeps_private else ""

    def _beside_updates(self) -> str:
        """Clause on what clients report or keep beside the update of the model that they were sent."""
        if not self.update_alone:
            return "whose clients report more than their update"
        if not self.plain_start:
            return "whose clients' steps begin elsewhere than at the model that they are sent"
        return "whose clients keep a state of the updates that they sent" if self.keeps_client_state else ""

    @abstractmethod
    def init(self, params_P: Tensor) -> Any:
        """The state before the first round."""

    def model_to_send(self, state: Any) -> Tensor:
        """The model that goes out to clients, x: [P]."""
        model_P: Tensor = state.model_P
        return model_P

    def broadcast(self, state: Any) -> Broadcast:
        """Tensors sent beside the model, [P] each where local steps use them."""
        return ()

    def steps(self, state: Any) -> int | None:
        """Number of optimizer steps of clients in the next round; None: as many as the experiment says."""
        return None

    def init_client(self, params_P: Tensor) -> Any:
        """State of a client before its first task: a named tuple of tensors of one dimension; None: no state."""
        return None

    def private(self, module: "nn.Module") -> Collection[str]:
        """The names of a model's parameters and buffers that never leave a client.

        Raises:
            InvalidModel: if the model has nothing of the kind.
        """
        return ()

    def fixes(self, module: "nn.Module") -> Collection[str]:
        """The names of trainable parameters that stay as they are: they join the model's fixed part.

        Raises:
            InvalidModel: if the model has nothing of the kind.
        """
        return ()

    def moves(self, module: "nn.Module") -> Collection[str]:
        """The names of parameters of the fixed part that the coordinator alone moves, by :meth:`moved`.

        They go out with each task, and never come back.

        Raises:
            InvalidModel: if the model has nothing of the kind.
        """
        return ()

    def for_model(self, module: "nn.Module", layout: Layout) -> Self:
        """The algorithm for a model; one that looks at the places of its tensors returns a copy that knows them.

        Args:
            module: the first model.
            layout: layout of the part of the model that leaves a client.
        """
        return self

    def moved(self, state: Any) -> Tensor:
        """The sum of all movements, since the run began, of the parameters of :meth:`moves`, [J]."""
        return torch.zeros(0, dtype=torch.float64)

    def factors(self, state: Any) -> Tensor | None:
        """Numbers from which :meth:`movement` finds the last movement of the parameters of :meth:`moves`.

        They may be fewer than the movement itself, and are then sent in its place. None: it has no such numbers.
        """
        return None

    def factor_count(self, messages: int) -> int:
        """Number of values of :meth:`factors` after a round with so many messages."""
        return 0

    def movement(self, factors: Tensor) -> Tensor:
        """Movement [J] that :meth:`factors` stand for, in float64: the same on server and clients.

        Raises:
            InvalidPayload: if they are no factors of this model.
        """
        return torch.zeros(0, dtype=torch.float64)

    def phases(self) -> tuple[Phase, ...]:
        """Phases of a client's local training."""
        return (Phase(rule=self.local_rule),)

    def local_start(self, anchor_P: Tensor, client_state: Any, places_K: Tensor | None = None) -> Tensor:
        """Start of a client's steps: x, or for K clients [K, P] a row each.

        Args:
            anchor_P: x, the model that came with the task, [P] or [K, P].
            client_state: state that each client keeps.
            places_K: each client's number from 0 to N − 1; given only where the algorithm asks for the "place".
        """
        return anchor_P

    def report(self, work: ClientWork) -> Report:
        """Message and kept state of clients: the update, weighted by samples, and the state that they had."""
        return Report((work.update_KP,), work.samples_K1, work.client_state)

    def check(self, replies: int) -> None:
        """Refuse rounds in which too few clients answer.

        Raises:
            InvalidExperiment: if the algorithm needs more replies.
        """

    def check_state(self, state: Any, parameters: int, method: str) -> None:
        """Refuse a state that does not hold the model.

        Args:
            state: value that the method returned.
            parameters: P, the number of the model's parameters.
            method: name of the method, for the error.

        Raises:
            InvalidExperiment: if the state is no named tuple with a model_P of shape [P].
        """
        model_P = getattr(state, "model_P", None)
        if not isinstance(model_P, Tensor) or model_P.shape != (parameters,):
            name = type(self).__name__
            got = f"model_P of shape {tuple(model_P.shape)}" if isinstance(model_P, Tensor) else type(state).__name__
            raise InvalidExperiment(
                f"{name}.{method} must return a named tuple whose model_P is the model, of shape ({parameters},), got "
                f"{got}: correct {name}.{method}; fed.aggregators.fedavg is an example"
            )

    def combine(
        self, state: Any, messages_SM: Tensor, weights_S: Tensor, generator: np.random.Generator
    ) -> tuple[Any, Tensor]:
        """Next state, and the vector [M] in place of the weighted mean; called where ``linear`` is False.

        Args:
            state: the present server state.
            messages_SM: each client's parts and float buffers in one row, in the order of their tasks.
            weights_S: each message's weight, > 0.
            generator: the round's own random stream.

        Raises:
            InvalidExperiment: if there are too few messages.
        """
        return state, weights_S @ messages_SM / weights_S.sum()

    def resized(self, state: Any, before: int, after: int) -> Any:
        """The state after clients registered for the first time; an algorithm that keeps a mean over all rescales it.

        Args:
            state: the present server state.
            before: number of clients that had ever registered before.
            after: number of clients that have ever registered now.
        """
        return state

    @abstractmethod
    def apply(self, state: Any, reduced: Reduced) -> Any:
        """The state after a round with these means of the clients' messages."""
