"""Founding of a group of replicas: those that begin a run agree on the members of its first round.

The first of the present peers proposes all of them once they are enough. A peer that sees the same ones agrees. When
all have agreed the group is founded. A peer agrees to one proposal at a time, so that two groups of more than half of
all peers cannot both be founded: the smallest number of founders must be more than half of all that may come.
"""

from collections.abc import Collection, Mapping

from fed.protocol import protocol_pb2 as pb
from fed.protocol.limits import NODE_NAME
from fed.wire.messages import client_order

__all__ = ["Founding"]

_STABLE_S = 0.5  # seconds for which the same peers must be present: those that start together do not come at once
_RESEND_S = 0.3
_BELIEVED_S = 30.0  # seconds for which a peer is believed that claims to be in a round and names no group


class Founding:
    """One peer's part in a founding; it makes no calls and reads no clock.

    Attributes:
        members: names of the first round's members, in the order of clients; None until the group is founded.
        is_late: True if the others have begun without this peer, which then joins them.

    Args:
        own: name of this peer.
        min_peers: the smallest number of founders, more than half of all peers that may come.

    Example:
        >>> ann, bob = Founding("ann", 2), Founding("bob", 2)
        >>> for now_s in (0.0, 1.0):
        ...     (*sent,) = ann.tick(now_s, ["ann", "bob"], {}) + bob.tick(now_s, ["ann", "bob"], {})
        >>> ((_, proposal),) = sent
        >>> ((_, agreed),) = bob.receive("ann", proposal, 0)
        >>> ((_, founded),) = ann.receive("bob", agreed, 0)
        >>> bob.receive("ann", founded, 0)
        []
        >>> ann.members, bob.members
        (('ann', 'bob'), ('ann', 'bob'))
    """

    def __init__(self, own: str, min_peers: int) -> None:
        self.own = own
        self.members: tuple[str, ...] | None = None
        self.is_late = False
        self._min_peers = min_peers
        self._present: tuple[str, ...] = ()
        self._since_s = self._sent_s = 0.0
        self._agreed: set[str] = set()
        self._agreed_to: tuple[str, ...] = ()
        self._begun_s: dict[str, float] = {}

    def tick(
        self, now_s: float, present: Collection[str], rounds: Mapping[str, int], listening: Collection[str] = ()
    ) -> list[tuple[str, pb.Founding]]:
        """Let time pass; returns messages and their receivers.

        Args:
            now_s: seconds on a monotonic clock.
            present: the names of the peers that are there and ready, this one among them.
            rounds: the rounds that others are in, by name; 0: before the first.
            listening: the names of peers that listen; these propose before those that only dial.
        """
        names = tuple(sorted(present, key=client_order))
        # Who has agreed to other founders has not agreed to these.
        if names != self._present:
            self._present = names
            self._since_s = now_s
            self._agreed = set()
        if self.members is not None or self.is_late or now_s - self._sent_s < _RESEND_S:
            return []
        begun_s = {name: self._begun_s.setdefault(name, now_s) for name, number in rounds.items() if number}
        # A claim that is not backed by a group must not hold the others up for ever.
        if begun := [name for name, its_s in begun_s.items() if now_s - its_s < _BELIEVED_S]:
            self._sent_s = now_s
            return [(name, pb.Founding()) for name in begun]
        is_stable = now_s - self._since_s >= _STABLE_S
        if not is_stable or len(names) < self._min_peers:
            return []
        first = min(names, key=lambda name: name not in listening)
        if first != self.own:
            return []
        self._sent_s = now_s
        self._found_if_agreed()
        return self._to_others(pb.Founding(members=names, is_founded=self.members is not None))

    def receive(self, sender: str, message: pb.Founding, own_round: int) -> list[tuple[str, pb.Founding]]:
        """Take a message; returns messages and their receivers.

        Args:
            sender: the name in the sender's certificate.
            message: the message as it was received.
            own_round: the round that this peer is in; 0: before the first.
        """
        names = tuple(message.members)
        if names and not _is_group(names, sender):
            return []
        if self.is_late:
            is_asked = own_round > 1 and not message.is_founded
            return [(sender, pb.Founding(is_founded=True, round=own_round))] if is_asked else []
        if self.members is not None:
            return [] if message.is_founded else [(sender, self._founded(own_round))]
        if message.is_founded:
            # The group is without this peer, or past its first round: this peer joins with a copy.
            if self.own not in names or message.round > 1:
                self.is_late = True
            # This peer may see others by now: the group that it has agreed to counts all the same.
            elif names in (self._agreed_to, self._present):
                self.members = names
        elif message.is_agreed:
            if names == self._present:
                self._agreed.add(sender)
                if self._found_if_agreed():
                    return self._to_others(self._founded(1))
        elif len(names) >= self._min_peers and names == self._present:
            self._agreed_to = names
            return [(sender, pb.Founding(members=names, is_agreed=True))]
        return []

    def _founded(self, own_round: int) -> pb.Founding:
        return pb.Founding(members=self.members, is_founded=True, round=own_round)

    def _found_if_agreed(self) -> bool:
        if self._agreed | {self.own} >= {*self._present}:
            self.members = self._present
        return self.members is not None

    def _to_others(self, message: pb.Founding) -> list[tuple[str, pb.Founding]]:
        return [(name, message) for name in self._present if name != self.own]


def _is_group(names: tuple[str, ...], sender: str) -> bool:
    """Tell whether these names may be those of founders, the sender among them."""
    in_order = tuple(sorted({*names}, key=client_order))
    return sender in names and names == in_order and all(NODE_NAME.fullmatch(name) for name in names)
