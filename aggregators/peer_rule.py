"""Contract of algorithms over ``mix``: a rule of peers, its local steps, and its exchanges with neighbours.

Shapes: see :mod:`fed.vectors.layout`.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, overload

from fed.aggregators.base import Algorithm
from fed.compression.feedback import error_unknown
from fed.config.compatibility import Feature, Sections, Term
from fed.errors import InvalidExperiment
from fed.vectors.tensors import Tensor

if TYPE_CHECKING:
    import networkx as nx

    from fed.topology import Topology

__all__ = ["Descend", "Mix", "PeerRule", "Received"]


class Descend(Protocol):
    """Local steps of one real peer, or of all simulated peers at once."""

    @property
    def lr(self) -> float | Tensor:
        """The sum of the step sizes over the local steps; [N, 1] where peers take different numbers of steps."""
        ...

    def __call__(self, x_NP: Tensor) -> Tensor:
        """The models after local steps from ``x_NP``, [N, P].

        (x − descend(x)) / lr is the mean gradient over the local steps of plain SGD: for one step the gradient itself.
        """
        ...


class Received(NamedTuple):
    """Vector of one neighbour of each of K rows.

    Args:
        rows_K: places of the rows that have this neighbour.
        weights_K1: W_ij, the weight that row i gives its neighbour j.
        vectors_KM: x_j, the vector as the neighbour sent it.
    """

    rows_K: Tensor
    weights_K1: Tensor
    vectors_KM: Tensor


class Mix(Protocol):
    """One exchange with this round's neighbours for each call: every vector is a row [N, ·], of any length."""

    @overload
    def __call__(self, x_NM: Tensor, /) -> Tensor: ...
    @overload
    def __call__(self, x_NM: Tensor, /, *more: Tensor) -> tuple[Tensor, ...]: ...
    def __call__(self, x_NM: Tensor, /, *more: Tensor) -> Tensor | tuple[Tensor, ...]:
        """W x, the weighted average with one's neighbours. Several vectors share one message; each is averaged.

        Single numbers [N, 1] travel in float64, so that their sums stay exact; vectors travel in the model's type.
        """
        ...

    def neighbours(self, x_NM: Tensor, /) -> Iterator[Received]:
        r"""Vectors of single neighbours, for rules that do not take their weighted average as it is.

        .. math:: (W x)_i = x_i + \sum_{j \ne i} W_{ij} (x_j - x_i)

        Yields:
            The first neighbour of every row, then the second of those rows that have one, and so on. A rule adds
            ``weights_K1 * (vectors_KM - x_NM[rows_K])``, changed as it needs, to the rows.
        """
        ...

    def encoded(self, v_NP: Tensor, /) -> tuple[Tensor, Tensor]:
        """C(v) and W C(v): each row is encoded by the experiment's ``uplink``, travels so, and is decoded.

        A rule that calls this or :meth:`differences` says so by :attr:`PeerRule.compresses`, and does so once a round.
        """
        ...

    def differences(self, x_NP: Tensor, hat_NP: Tensor, /) -> tuple[Tensor, Tensor]:
        """x̂' = x̂ + C(x − x̂) and W x̂': the encoded difference alone travels.

        Neighbours keep copies of x̂ and move them by the decoded differences, so a rule passes the x̂' of its last round.
        In the first round x̂ is the same at all peers. The graph must stay: see :attr:`PeerRule.needs_fixed_graph`.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class PeerRule(Algorithm):
    """Algorithm over ``mix``: a peer's round, made of its local steps and exchanges with its neighbours.

    A subclass is a frozen dataclass of hyper-parameters. Its state is a named tuple of tensors with a row for each
    peer, in float64 unless the rule itself keeps a tensor in another type; its field ``model_NP`` is the model that
    users evaluate. In simulation a rule sees the rows of all peers that take part in a round, at a real peer one row.
    The result for a row must therefore depend only on that row, and on the results of ``descend`` and ``mix``.

    Vectors travel in the model's own type, or encoded. Float buffers travel with a round's first exchange and are mixed
    as the parameters are; a rule does not see them.
    """

    primitive: ClassVar[Literal["mix"] | None] = "mix"
    needs_gradient: ClassVar[bool] = False
    """True if the rule takes (x − descend(x)) / lr for the gradient, which under momentum or Adam it is not."""

    topology: ClassVar[str] = "ring"
    """Kind of topology where the experiment names none."""
    corrects_weights: ClassVar[bool] = False
    """True if the rule finds the peers' mean under weights that do not keep it, such as those of a directed graph."""
    compresses: ClassVar[bool] = False
    """True if the experiment's ``uplink`` encodes the peers' messages: the rule calls ``mix.encoded`` or
    ``mix.differences``."""
    needs_fixed_graph: ClassVar[bool] = False
    """True if a peer's neighbours must stay the same, both ways: the rule calls ``mix.differences``."""
    conserves_sum: ClassVar[bool] = False
    """True if the rule relies on a sum over the members' states. A member that goes takes its share of the sum along;
    such a rule therefore has :meth:`renewed`."""

    def needs(self) -> Sequence[Term]:
        """Peers that stay the same from the first round to the last."""
        why = "because a simulated peer keeps its place in the graph from the first round to the last"
        return (Term(Feature.FIXED_MEMBERS, "choose an algorithm over mean such as fedavg", why),)

    def lacks(self) -> Sequence[Term]:
        """Features of a coordinator; without a primitive those of neighbours and messages too."""
        why = "whose clients exchange models with neighbours" if self.primitive else "whose clients learn alone"
        way_out = "choose an algorithm over mean such as fedavg"
        terms = [Term(feature, way_out, why) for feature in (Feature.COORDINATOR, Feature.REPORTS)]
        if self.primitive is None:
            terms += [Term(feature, way_out, why) for feature in (Feature.MESSAGES, Feature.ENCODED)]
            terms.append(Term(Feature.NEIGHBOURS, "choose an algorithm over mix such as dpsgd", why))
        # A codec's error would stay in the models for ever: nothing sends later what a message lacks.
        elif not self.compresses:
            way_out = "choose an algorithm over mix that sends later what codecs leave out, such as choco"
            terms.append(Term(Feature.ENCODED, way_out, "whose vectors travel as they are"))
        if self.partners() is not None:
            why = "whose peers choose their own partners in each round"
            terms.append(Term(Feature.GIVEN_NEIGHBOURS, "choose an algorithm over mix such as dpsgd", why))
        return [*super().lacks(), *terms]

    def partners(self) -> "Callable[..., nx.Graph[int]] | None":
        """The function of (peers, number, streams) that gives each round's graph, where a rule chooses partners itself.

        Such a rule takes no ``topology``. None: the experiment's topology gives the graph.
        """
        return None

    @abstractmethod
    def init(self, params_NP: Tensor) -> Any:
        """The state before the first round: a named tuple with ``model_NP``, from equal rows."""

    @abstractmethod
    def step(self, state: Any, descend: Descend, mix: Mix) -> Any:
        """The state after a round.

        Args:
            state: the state after the last round in which these peers took part.
            descend: the local steps.
            mix: the exchanges with neighbours.
        """

    def joined(self, state: Any) -> Any:
        """The state of a peer that joins a running experiment: a copy of another's, unless a rule says otherwise.

        Args:
            state: state of the other peer after its last round.
        """
        return state

    def renewed(self, state: Any) -> Any:
        """The state of members that begin anew once others have come or gone for good: the same, unless a rule says so.

        A rule that :attr:`conserves_sum` makes a state whose sum holds over whichever members begin anew, from each
        member's own state alone, and keeps its ``model_NP``. Those that have begun anew mix with each other, and with
        no member that has not: the weight of such a neighbour stays with the peer itself. So the sum holds over all
        that have begun anew together, until one of them goes. Until the others know of it, which takes real peers the
        deadline of an exchange, their sum lacks its share.

        Args:
            state: the state after the last round in which these peers took part.
        """
        return state

    def check_topology(self, topology: "Topology") -> None:
        """Refuse a topology that changes with the round or is directed, where neighbours must stay the same.

        Raises:
            InvalidExperiment: if the topology is one of these, with the reason and the way out.
        """
        # A new neighbour has no copy, and a one-way one no answer.
        if self.needs_fixed_graph and (topology.changes or topology.is_directed):
            got = "one that changes with the round" if topology.changes else "a directed one"
            raise InvalidExperiment(
                f"{type(self).__name__} needs a fixed graph whose messages go both ways, because neighbours keep "
                f"copies of what they have sent each other, got {got}: choose a topology such as ring, or an algorithm "
                "such as deepsqueeze, which keeps none"
            )

    def check_experiment(self, experiment: Sections) -> None:
        """Refuse codecs that cannot be used, and other local steps than plain SGD's where a rule needs the gradient."""
        super().check_experiment(experiment)
        for section in experiment.uplink if self.compresses else ():
            if reason := error_unknown(section.make()):
                raise InvalidExperiment(
                    f"algorithm {experiment.algorithm.kind} cannot send through uplink {section.kind}, {reason}: "
                    "choose another codec such as topk"
                )
        local = experiment.local
        kind = experiment.algorithm.kind
        if self.needs_gradient and (local.optimizer != "sgd" or local.momentum):
            raise InvalidExperiment(
                f"{kind} needs local.optimizer sgd without momentum, for it takes a peer's change, divided by its step "
                f"sizes, for the gradient, got {local.optimizer} with momentum {local.momentum:g}: choose sgd and "
                "momentum 0, or an algorithm over mix such as dpsgd"
            )
