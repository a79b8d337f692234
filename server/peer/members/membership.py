"""Membership of peers: heartbeats, passed on by gossip, say which members are present, suspected or gone.

Each member counts its own heartbeats and exchanges its whole table with a few others (van Renesse, Minsky & Hayden, "A
gossip-style failure detection service", Middleware 1998). A larger count is a sign of life, whichever member passes it
on. As in SWIM (Das, Gupta & Motivala 2002) a silent member is suspected first, and a living one refutes what others say
of it.

- The first sight of a name in another member's table is no sign of life: its count may be old. The next, larger count
  is one, and so is the member's own table. Members that are gone are not passed on. Old tables therefore bring no
  member back.
- Time counts only while this process is awake: one that was frozen has heard nothing, and suspects no other for it
  (Lifeguard, Dadgar, Phillips & Currey 2018).
- Members that are gone are tried again now and then, and so are introducers, so that the sides of a partition merge.
- A member refutes what others say of it by a larger beat or a later start. Starts in the upper half of their range are
  believed only from the member itself, which therefore tells all members, some at each beat. Others pass on the
  heartbeats of such a life, which are believed up to two days ahead of the member's own word. No hearsay, however large
  its numbers, leaves a member without an answer.

Trust: malformed names and addresses, and counts beyond bounds, are refused. A hostile member, which has a certificate
of the run, can keep a dead member's count rising, or say that a living one has left, which that one refutes within some
beats, or invent members, up to the bound. That costs others deadlines in a round, and changes none of their sums:
replicas take as members only those that have shown a certificate over a stream.
"""

import math
import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from fed.clients.data.holdings import in_order
from fed.errors import InvalidPayload, ValueRange
from fed.server.peer.members.member import MOST_BEAT, MOST_MEMBERS, MOST_START, Member, refusal_of_table

__all__ = ["MembershipList", "Target", "Timing"]

_T = TypeVar("_T")
_MOST_START_BY_HEARSAY = MOST_START // 2  # in nanoseconds since 1970: the year 2043
_MOST_LEAD = 2**20  # beats by which hearsay may lead the member's own word, where that alone is believed: two days
_MOST_BEATS_ASLEEP = 3  # a longer pause between two beats counts as this many
_TOLD_AT_A_BEAT = 16  # members told at a beat, where hearsay of this peer's start is not believed
_FORGET_AFTER_S = 86_400.0  # seconds of silence, so long that a machine may be away for a day
_FAN_OUT = 2  # members that a beat sends the table to: news reach all in about as many beats as their number has bits
_RETURNS = 0.5  # the probability that a beat tries a member that is gone


class Target(NamedTuple):
    """Receiver of a table: a member, or an introducer whose name is not known.

    Args:
        address: HOST:PORT to dial.
        name: the member's name; empty: any peer that listens there.
    """

    address: str
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Time limits of a membership.

    Signs of life of a living member travel for up to about 3 beats, and 7 where 30 % of all messages are lost:
    ``suspect_after_s`` should be ten beats or more.

    Args:
        beat_s: seconds between two heartbeats, > 0.
        suspect_after_s: seconds without a sign of life after which a member is suspected, at least ``beat_s``.
        gone_after_s: seconds without a sign of life after which a member is gone, at least ``suspect_after_s``.

    Raises:
        ValueRange: if they contradict each other.
    """

    beat_s: float = 0.2
    suspect_after_s: float = 2.5
    gone_after_s: float = 5.0

    def __post_init__(self) -> None:
        if not 0 < self.beat_s <= self.suspect_after_s <= self.gone_after_s <= _FORGET_AFTER_S:
            raise ValueRange(
                f"membership needs 0 < beat_s <= suspect_after_s <= gone_after_s <= {_FORGET_AFTER_S:g}, got "
                f"{self.beat_s:g}, {self.suspect_after_s:g} and {self.gone_after_s:g}: lengthen the later one"
            )


@dataclass
class _Record:
    """Knowledge of another member.

    Args:
        member: the latest record.
        since_s: time at which its start or its leaving became known, in seconds that this process was awake.
        alive_s: time of the last sign of life, in the same seconds; minus infinity: none yet.
        said: start and beat of the latest record that the member itself has sent; others may raise the beat.
    """

    member: Member
    since_s: float
    alive_s: float = -math.inf
    said: tuple[int, int] = (0, 0)


class MembershipList:
    """Members that one peer knows of; it makes no calls and reads no clock.

    The transport calls :meth:`beat` every ``beat_s``, sends :meth:`table` to the targets, and merges what it receives.
    A receiver of a table answers with its own. A member that only dials is no target: it dials in, and is answered. All
    times are of one monotonic clock.

    Attributes:
        own: current record of this peer.
        contested: number of times that another member had a later record of this peer than its own, or that another
            process greeted with its name. Once: a clock that was set back between two starts. More: a second process
            under this name, or a hostile member.

    Args:
        own: first record of this peer.
        introducers: addresses that are tried until a present member listens there; this peer's own may be among them.
        timing: time limits of beats and suspicion.
        draws: random numbers that choose targets.
    """

    def __init__(self, own: Member, introducers: Sequence[str], timing: Timing, draws: random.Random) -> None:
        self.own = own
        self.contested = 0
        self._timing = timing
        self._draws = draws
        self._records: dict[str, _Record] = {}
        self._introducers = dict.fromkeys(introducers, "")
        self._untold: list[str] = []
        self._awake_s = 0.0
        self._last_beat_s = math.inf

    def beat(self, now_s: float) -> tuple[Target, ...]:
        """Count the own heartbeat up; returns the members to send the table to."""
        self._awake_s = self._time_s(now_s)
        self._last_beat_s = now_s
        if not self.own.left:
            self.own = self.own.next_beat()
        self._forget()
        return self._targets()

    def table(self, receiver: str = "") -> tuple[Member, ...]:
        """Records to send: all present members, those that left lately, and the receiver as it is known here."""
        # A receiver whose clock was set back between two starts must learn of its earlier life.
        records = self._records.items()
        told = [one.member for name, one in records if name == receiver or self._is_told(one)]
        return self.own, *told[: MOST_MEMBERS - 1]

    def merge(self, table: Sequence[Member], now_s: float, sender: str = "") -> bool:
        """Take the later records of another member's table; true if the view has changed.

        Args:
            table: records as they were received.
            now_s: seconds on the monotonic clock.
            sender: the name in the sender's certificate, whose own record is a sign of life; empty: unknown.

        Raises:
            InvalidPayload: if it is not a table that a member may send; then none of it is taken.
        """
        if reason := refusal_of_table(table):
            raise InvalidPayload(reason)
        time_s = self._time_s(now_s)
        # A list, for any() alone would stop at the first change and leave the rest untaken.
        changes = [self._take(member, time_s, is_direct=member.name == sender) for member in table]
        return any(changes)

    def heard(self, name: str, start: int, now_s: float, address: str = "") -> None:
        """Take note of a direct sign of life.

        Args:
            name: the name in the certificate of the other side.
            start: start of its process, in nanoseconds since 1970, by its own word.
            now_s: seconds on the monotonic clock.
            address: HOST:PORT at which it listens, by its own word or since it was dialled there; empty: none.
        """
        if address in self._introducers:
            self._introducers[address] = name
        if name == self.own.name:
            self.contested += start != self.own.start
        elif (known := self._records.get(name)) is None:
            return
        elif start > known.member.start:
            life = known.member._replace(start=start, beat=0, left=False, has_ended=False)
            self._take(life, self._time_s(now_s), is_direct=True)
        elif start == known.member.start and not known.member.left:
            known.alive_s = self._time_s(now_s)

    def make_ready(self) -> None:
        """Take part in rounds: from now on the table says so."""
        self._say(self.own._replace(is_ready=True))

    def end(self) -> None:
        """Have ended all rounds: from now on the table says so."""
        self._say(self.own._replace(is_ready=True, has_ended=True))

    def leave(self) -> None:
        """Leave: from now on the table says so."""
        self._say(self.own._replace(left=True))

    def present(self, now_s: float) -> tuple[Member, ...]:
        """Members that are there, suspected ones and this peer among them, in the order of their clients."""
        time_s = self._time_s(now_s)
        own = () if self.own.left else (self.own,)
        return _sorted((*own, *[one.member for one in self._records.values() if self._is_present(one, time_s)]))

    def took_part(self, now_s: float) -> frozenset[str]:
        """Names of the members that are ready, or were and have left: a short run may be over for them."""
        left = [one.member for one in self._records.values() if one.member.left]
        return frozenset(member.name for member in (*self.present(now_s), *left) if member.is_ready)

    def ended(self) -> tuple[Member, ...]:
        """The others that have ended all their rounds, those that have left afterwards among them."""
        return _sorted([one.member for one in self._records.values() if one.member.has_ended])

    def remember(self, ended: Iterable[Member]) -> None:
        """Take up the result of :meth:`ended` at a restart: members that have left since."""
        for member in ended:
            self._records[member.name] = _Record(member._replace(left=True), self._awake_s, self._awake_s)

    def unended(self) -> frozenset[str]:
        """Names of the others that were seen alive and ready, and have neither ended their rounds nor said farewell."""
        alive = [one.member for one in self._records.values() if one.alive_s > -math.inf]
        return frozenset(
            member.name for member in alive if member.is_ready and not member.has_ended and not member.left
        )

    def names(self) -> frozenset[str]:
        """Names of all others that are known."""
        return frozenset(self._records)

    def drop(self, names: Collection[str]) -> frozenset[str]:
        """Forget members at once, whatever others say; returns those that were present until now."""
        dropped = [self._records.pop(name) for name in sorted(names) if name in self._records]
        return frozenset(one.member.name for one in dropped if self._is_present(one, self._awake_s))

    def suspected(self, now_s: float) -> tuple[Member, ...]:
        """Present members that are silent for ``suspect_after_s``."""
        time_s = self._time_s(now_s)
        silent = [one for one in self._records.values() if time_s - one.alive_s > self._timing.suspect_after_s]
        return _sorted([one.member for one in silent if self._is_present(one, time_s)])

    def gone(self, now_s: float) -> tuple[Member, ...]:
        """Members that were there and are silent for ``gone_after_s``: dead, frozen or on another side of a cut."""
        time_s = self._time_s(now_s)
        away = [one for one in self._records.values() if not one.member.left and not self._is_present(one, time_s)]
        return _sorted([one.member for one in away if one.alive_s > -math.inf])

    def is_unheard(self, name: str) -> bool:
        """True if this process has had no sign of life of that name, and has not heard that it left."""
        known = self._records.get(name)
        return known is None or (known.alive_s == -math.inf and not known.member.left)

    def _time_s(self, now_s: float) -> float:
        """Seconds that this process has been awake: its beats are late while it is frozen."""
        return self._awake_s + min(max(now_s - self._last_beat_s, 0.0), _MOST_BEATS_ASLEEP * self._timing.beat_s)

    def _is_present(self, record: _Record, time_s: float) -> bool:
        return not record.member.left and time_s - record.alive_s <= self._timing.gone_after_s

    def _is_told(self, record: _Record) -> bool:
        if record.member.left:
            is_late_news = self._awake_s - record.since_s > self._timing.gone_after_s
            # A late member must learn that the run has ended. What is known by hearsay alone is not passed on: it would
            # go round for ever.
            return record.alive_s > -math.inf and (record.member.has_ended or not is_late_news)
        return self._is_present(record, self._awake_s)

    def _take(self, member: Member, time_s: float, *, is_direct: bool) -> bool:
        """Take a record if it is later than the known one; true if it changes the view."""
        if member.name == self.own.name:
            return self._refute(member)
        known = self._records.get(member.name)
        if not is_direct and _is_beyond_hearsay(member, known):
            return False
        if known is None:
            # A member that has stopped is of no use to a peer that never knew it.
            is_stopped = member.left and not member.has_ended
            if is_stopped or len(self._records) >= MOST_MEMBERS - 1:
                return False
            known = self._records[member.name] = _Record(member, time_s)
            if is_direct:
                known.alive_s = time_s
                known.said = (member.start, member.beat)
            return is_direct
        before = known.member
        was_present = self._is_present(known, time_s)
        said = (member.start, member.beat)
        # Others may have raised the beat of such a life: only the member's own earlier word outweighs its word.
        is_own_word = is_direct and member.start > _MOST_START_BY_HEARSAY
        is_later = said >= known.said if is_own_word else member.age > before.age
        if is_later:
            known.member = member
            if is_direct:
                known.said = said
            if member.start == before.start or is_direct:
                known.alive_s = time_s
            if (member.start, member.left) != (before.start, before.left):
                known.since_s = time_s
        elif is_direct and member.start == before.start and not before.left:
            known.alive_s = time_s
        is_same = known.member._replace(beat=0) == before._replace(beat=0)
        return was_present != self._is_present(known, time_s) or (was_present and not is_same)

    def _refute(self, said: Member) -> bool:
        """Make the own record later than another's record of this peer, if that is not so already."""
        if said.age <= self.own.age or self.own.left:
            return False
        self.contested += 1
        own_beat = self.own.beat if self.own.start == said.start else 0
        # At the latest start only a larger beat refutes, and none is larger than the largest, which nobody believes.
        is_last = said.start == MOST_START and said.beat > max(MOST_BEAT // 2, own_beat + _MOST_LEAD)
        self._say(self.own._replace(start=said.start, beat=own_beat if is_last else said.beat))
        return True

    def _say(self, own: Member) -> None:
        """Take over a changed own record, a beat further; all members are told it if they believe no hearsay of it."""
        self.own = own.next_beat()
        if self.own.start > _MOST_START_BY_HEARSAY:
            self._untold = list(self._records)

    def _targets(self) -> tuple[Target, ...]:
        members = [one for one in self._records.values() if one.member.address]
        present = [one.member for one in members if self._is_present(one, self._awake_s)]
        away = [one.member for one in members if not one.member.left and not self._is_present(one, self._awake_s)]
        chosen = self._some(present)
        if away and self._draws.random() < _RETURNS:
            chosen.append(self._draws.choice(away))
        told = self._untold[:_TOLD_AT_A_BEAT]
        self._untold = self._untold[_TOLD_AT_A_BEAT:]
        chosen += [one.member for one in members if one.member.name in told]
        targets = {member.address: Target(member.address, member.name) for member in chosen}
        for address in self._some(self._unmet({self.own.address, *[member.address for member in present]})):
            targets.setdefault(address, Target(address))
        return tuple(targets.values())

    def _unmet(self, met: set[str]) -> list[str]:
        """Introducers' addresses at which no present member is known."""
        there = {self.own.name} | {name for name, one in self._records.items() if self._is_present(one, self._awake_s)}
        return [address for address, name in self._introducers.items() if address not in met and name not in there]

    def _some(self, of: list[_T]) -> list[_T]:
        return self._draws.sample(of, min(_FAN_OUT, len(of)))

    def _forget(self) -> None:
        timing = self._timing
        is_full = len(self._records) >= MOST_MEMBERS - 1
        for name, one in list(self._records.items()):
            is_hearsay = one.alive_s == -math.inf
            # Hearsay is cheap to invent, and must not crowd out members that were heard.
            limit_s = timing.gone_after_s if is_hearsay or is_full else _FORGET_AFTER_S
            if self._awake_s - max(one.since_s, one.alive_s) > limit_s:
                del self._records[name]


def _is_beyond_hearsay(said: Member, known: _Record | None) -> bool:
    """True if this record is believed only when the member itself has sent it."""
    if said.start <= _MOST_START_BY_HEARSAY:
        return False
    if known is None or said != known.member._replace(beat=said.beat):
        return True
    return said.beat > known.said[1] + _MOST_LEAD


def _sorted(members: Iterable[Member]) -> tuple[Member, ...]:
    by_client = {member.client: member for member in members}
    return tuple([by_client[client] for client in in_order(by_client)])
