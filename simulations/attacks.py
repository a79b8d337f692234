"""Attacks: clients that send other updates than they have trained, or train on poisoned data.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import PositiveFloat

from fed.clients.checks import made_by
from fed.clients.data import ClientId, ClientsOnDemand, FederatedData, Held
from fed.clients.data.held import labels_of, whole
from fed.clients.data.samples import pattern_of
from fed.config.compatibility import Feature, Term
from fed.config.hyperparameters import Hyperparameters
from fed.config.sections import AdversariesSection
from fed.errors import InvalidData
from fed.vectors import trees
from fed.vectors.randomness import Streams
from fed.vectors.tensors import Tensor, torch

if TYPE_CHECKING:
    from fed.wire.format import Format
    from fed.wire.messages import Answer

__all__ = ["ALIE", "IPM", "Attack", "Attackers", "Gaussian", "Knowledge", "LabelFlip", "Mimic", "SignFlip"]


@dataclass(frozen=True)
class Knowledge:
    """Knowledge of a round's attackers, shared by all of them, in the order of tasks.

    Args:
        own_AP: updates of the attackers, trained as honest clients train, in float64.
        honest_HP: updates of the round's honest clients. H may be 0, and is 0 where the attack does not look at others.
        mimicked: row of the honest client to copy. All honest clients have a fixed order for the whole run; this one is
            the first of those that take part.
        generators: random stream of each attacker.
    """

    own_AP: Tensor
    honest_HP: Tensor
    mimicked: int
    generators: tuple[np.random.Generator, ...]


@dataclass(frozen=True, kw_only=True)
class Attack(Hyperparameters):
    """Base of all attacks, which override :meth:`poison` or :meth:`forge`. One that overrides neither does no harm."""

    poisons: ClassVar[bool] = False
    """True if attackers train on changed labels; set where the class overrides :meth:`poison`."""
    forges: ClassVar[bool] = False
    """True if attackers send changed updates; set where the class overrides :meth:`forge`."""
    looks_at_others: ClassVar[bool] = True
    """True if attackers' updates depend on those of honest clients; a class may set it to False."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.poisons = cls.poison is not Attack.poison
        cls.forges = cls.forge is not Attack.forge

    def needs(self) -> Sequence[Term]:
        """Clients that send something, in a simulation, and legible messages where attackers look at them."""
        terms = [Term(feature, "set adversaries to null") for feature in (Feature.MESSAGES, Feature.SIMULATION)]
        if self.forges and self.looks_at_others:
            way_out = "choose adversaries that do not, such as sign_flip"
            terms.append(Term(Feature.LEGIBLE_MESSAGES, way_out, "because they look at the others' updates"))
        return terms

    def poison(self, targets: Tensor, classes: int) -> Tensor:
        """Labels that an attacker learns in place of its own.

        Args:
            targets: labels [n, ...] of the attacker's samples, from 0 to ``classes`` − 1.
            classes: number of classes of the federation.
        """
        return targets

    def forge(self, known: Knowledge) -> Tensor:
        """Updates that attackers send in place of their own: [A, P]."""
        return known.own_AP


@dataclass(frozen=True, kw_only=True)
class LabelFlip(Attack):
    r"""Attackers train as they should, on wrong labels: :math:`y ← C - 1 - y`, of C classes.

    Labels below 0, which a loss may leave out, stay as they are.
    """

    def poison(self, targets: Tensor, classes: int) -> Tensor:
        """Each label's opposite."""
        # Small unsigned labels would wrap around below 0.
        labels = targets.long()
        return torch.where(labels < 0, labels, classes - 1 - labels).to(targets.dtype)


@dataclass(frozen=True, kw_only=True)
class SignFlip(Attack):
    r"""Attackers send their update backwards, and longer: :math:`Δ_i ← -s Δ_i`.

    Args:
        scale: s > 0, the factor of the reversed update. With 4, a fifth of the clients bring the mean of alike updates
            to a standstill.
    """

    looks_at_others: ClassVar[bool] = False

    scale: PositiveFloat = 4.0

    def forge(self, known: Knowledge) -> Tensor:
        """The update reversed and scaled."""
        return -self.scale * known.own_AP


@dataclass(frozen=True, kw_only=True)
class Gaussian(Attack):
    r"""Attackers send noise, each its own: :math:`Δ_i ← σ z, z ∼ N(0, I)` (Blanchard et al. 2017, 1703.02757).

    Args:
        deviation: σ > 0, the standard deviation of each coordinate. An honest update's coordinates are more like 0.01.
    """

    looks_at_others: ClassVar[bool] = False

    deviation: PositiveFloat = 1.0

    def forge(self, known: Knowledge) -> Tensor:
        """Noise, drawn from each attacker's own stream."""
        size = known.own_AP.shape[1]
        return torch.from_numpy(self.deviation * np.stack([draw.normal(size=size) for draw in known.generators]))


@dataclass(frozen=True, kw_only=True)
class ALIE(Attack):
    r"""A little is enough: all attackers send an update just within the honest spread (Baruch et al. 2019, 1902.06156).

    .. math:: Δ_i ← μ - z σ, \qquad z = Φ^{-1}\left(\frac{n - f - s}{n - f}\right), \qquad s = ⌊n/2⌋ + 1 - f

    μ and σ are the mean and the standard deviation of each coordinate over the honest updates, n and f a round's
    replies and attackers; s is how many honest clients a majority lacks. Where the formula has z below 0, z is 0.

    Args:
        z: z > 0, the number of standard deviations from the mean; the paper's formula unless given.
    """

    z: PositiveFloat | None = None

    def forge(self, known: Knowledge) -> Tensor:
        """μ − z σ, the same for all attackers."""
        honest = len(known.honest_HP)
        attackers = len(known.own_AP)
        if not honest:
            return known.own_AP
        z = self.z_of(honest + attackers, attackers) if self.z is None else self.z
        # Correction 0: of a single client the deviation is 0, not NaN.
        forged_P = known.honest_HP.mean(0) - z * known.honest_HP.std(0, correction=0)
        return forged_P.expand_as(known.own_AP)

    @staticmethod
    def z_of(replies: int, attackers: int) -> float:
        """The paper's z for n replies, f of them from attackers.

        Example:
            >>> round(ALIE.z_of(50, 24), 3), ALIE.z_of(10, 2)
            (1.426, 0.0)
        """
        honest = replies - attackers
        supporters = max(replies // 2 + 1 - attackers, 1)  # a majority of attackers needs no support
        share = (honest - supporters) / honest  # below 1, where the inverse would be infinite
        return NormalDist().inv_cdf(share) if share > 0.5 else 0.0


@dataclass(frozen=True, kw_only=True)
class IPM(Attack):
    r"""Inner-product manipulation: all attackers send the honest mean reversed (Xie et al. 2019, 1903.03936).

    .. math:: Δ_i ← -ε μ

    Args:
        epsilon: ε > 0. Above (n − f)/f, 4 for a fifth of the clients, it turns the mean around; small ones hide among
            updates that differ anyway, where a rule may choose them.
    """

    epsilon: PositiveFloat = 0.5

    def forge(self, known: Knowledge) -> Tensor:
        """−ε μ, the same for all attackers."""
        if not len(known.honest_HP):
            return known.own_AP
        return (-self.epsilon * known.honest_HP.mean(0)).expand_as(known.own_AP)


@dataclass(frozen=True, kw_only=True)
class Mimic(Attack):
    r"""All attackers copy one honest client, always the same (Karimireddy et al. 2022, 2006.09365).

    .. math:: Δ_i ← Δ_j

    The copies cannot be detected, and yet a client whose data differ from the others' counts many times. If it does not
    take part in a round, another one, again always the same, stands in for it.
    """

    def forge(self, known: Knowledge) -> Tensor:
        """The honest client's update, the same for all attackers."""
        if not len(known.honest_HP):
            return known.own_AP
        return known.honest_HP[known.mimicked].expand_as(known.own_AP)


@dataclass(frozen=True)
class Attackers:
    """Clients that attack in every round: on their data, or on what they send.

    Attackers wait for the honest updates of their round, and know them as the coordinator receives them. The attack
    changes the update, the first part of a message; the other parts, float buffers, weight and loss are those of honest
    training. Among peers it changes the vectors that neighbours receive, and attackers know those that all honest peers
    send; single numbers, such as weights of push-sum, and buffers are honest ones, and so is what an attacker keeps.

    Args:
        attack: rule by which attackers change labels or updates.
        clients: identifiers of the attackers.
        streams: random streams of the run.
    """

    attack: Attack
    clients: frozenset[ClientId]
    streams: Streams

    @classmethod
    def recruited(cls, section: AdversariesSection, clients: Sequence[ClientId], streams: Streams) -> "Attackers":
        """The attack of an experiment, and its attackers, drawn from the stream "adversaries".

        Args:
            section: section ``adversaries`` of the experiment.
            clients: identifiers of all clients of the federation.
            streams: random streams of the run.

        Raises:
            InvalidExperiment: if none or all clients attack, or the kind makes no attack.
        """
        attack = made_by(section, "adversaries", Attack)
        count = section.attackers_among(len(clients))
        # From a stream of their own: the same clients attack whatever else the experiment draws.
        places = streams.generator("adversaries").choice(len(clients), size=count, replace=False)
        return cls(attack, frozenset(clients[place] for place in places.tolist()), streams)

    def poisoned(self, data: FederatedData) -> FederatedData:
        """The data as clients learn from them; the test set stays as it is.

        Raises:
            InvalidData: if labels should change and there are none.
        """
        if not self.attack.poisons:
            return data
        _, targets = pattern_of(data.read(data.clients[0]))
        if labels_of(targets) is not targets:
            got = targets.dtype if isinstance(targets, Tensor) else trees.outline(targets)
            raise InvalidData(
                f"{type(self.attack).__name__} needs integer labels to change, got targets of {got}: choose another "
                "kind of adversaries"
            )
        read = partial(self._read, data, data.number_of_classes())
        if not data.is_on_demand:
            return replace(data, train={client: read(client) for client in data.clients})
        size = data.train.size if isinstance(data.train, ClientsOnDemand) else None
        return replace(data, train=ClientsOnDemand(data.clients, read, size))

    def _read(self, data: FederatedData, classes: int | None, client: ClientId) -> Held:
        held = data.read(client)
        if client not in self.clients:
            return held
        inputs, targets = whole(held)
        assert classes is not None  # labels are integers
        return inputs, self.attack.poison(targets, classes)

    def attacked(
        self, answers: "Iterable[Answer]", message: "Format", encode: "Callable[[Answer], Answer]"
    ) -> "Iterator[Answer]":
        """Encode reported updates, the attackers' after the attack.

        Args:
            answers: replies of one client each, with the update that the algorithm reports.
            message: format of clients' messages.
            encode: function from a reported answer to the answer that the coordinator receives.

        Returns:
            Honest answers in the order given, then those of attackers in the order of their tasks.
        """
        honest: dict[int, list[Answer]] = {}
        own: dict[int, list[Answer]] = {}
        for answer in answers:
            if answer.clients[0] in self.clients:
                own.setdefault(answer.round, []).append(answer)
            else:
                answer = encode(answer)
                if self.attack.looks_at_others:
                    # Kept only where attackers look at them, since the updates of a cohort take much memory.
                    honest.setdefault(answer.round, []).append(answer)
                yield answer
        for number, replies in own.items():
            forged = self._forged(_in_order(replies), _in_order(honest.get(number, [])), message.parts[0])
            yield from map(encode, forged)

    def forged(self, sent_SM: Tensor, senders: Sequence[ClientId], *exchange: int) -> Tensor:
        """Vectors that peers send, the attackers' after the attack.

        Args:
            sent_SM: vectors that all peers would send if they were honest, a row for each sender.
            senders: identifiers of the peers, in the order of the rows.
            exchange: number of the round from 1, and number of the exchange within the round from 0.
        """
        own = [row for row, sender in enumerate(senders) if sender in self.clients]
        if not own:
            return sent_SM
        honest: list[int] = []
        if self.attack.looks_at_others:
            honest = [row for row, sender in enumerate(senders) if sender not in self.clients]
        known = Knowledge(
            own_AP=sent_SM[own].double(),
            honest_HP=sent_SM[honest].double(),
            mimicked=self._mimicked([senders[row] for row in honest]),
            generators=tuple(self.streams.generator("attack", senders[row], *exchange) for row in own),
        )
        # In float64 like the coordinator's sums, and rounded once to the type that travels.
        forged_AM = self.attack.forge(known)
        return sent_SM.index_copy(0, torch.tensor(own), forged_AM.to(sent_SM.dtype))

    def _mimicked(self, honest: Sequence[ClientId]) -> int:
        # A client's rank does not depend on who else takes part, so that the same one is copied in every round.
        ranks = [self.streams.torch_seed("mimic", client) for client in honest]
        return ranks.index(min(ranks)) if ranks else 0

    def _forged(self, own: "list[Answer]", honest: "list[Answer]", size: int) -> "Iterator[Answer]":
        own_AP = torch.stack([answer.update.update_M[:size] for answer in own])
        honest_HP = own_AP[:0]  # stack() takes no empty list
        if honest:
            honest_HP = torch.stack([answer.update.update_M[:size] for answer in honest])
        known = Knowledge(
            own_AP=own_AP,
            honest_HP=honest_HP,
            mimicked=self._mimicked([answer.clients[0] for answer in honest]),
            generators=tuple(self.streams.generator("attack", answer.clients[0], answer.round) for answer in own),
        )
        for answer, update_P in zip(own, self.attack.forge(known), strict=True):
            yield answer.with_update(torch.cat([update_P, answer.update.update_M[size:]]))


def _in_order(answers: "list[Answer]") -> "list[Answer]":
    return sorted(answers, key=lambda answer: answer.tasks)
