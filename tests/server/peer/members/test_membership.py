"""Membership over a simulated network: one group after any faults, no member gone without a cause, all by seeds."""

import random
from collections.abc import Sequence

import pytest

from fed.errors import InvalidPayload, ValueRange
from fed.server.peer.members.member import MOST_MEMBERS, Member
from fed.server.peer.members.membership import MembershipList, Target, Timing
from tests.server.peer.members.member_network import TIMING, Network
from tests.thinned import thinned

EIGHT = [str(number) for number in range(8)]
STARTS = ("all know all", "one introduces", "the last introduces", "chain", "tree")
LOST = 0.3
# A beat of a living member is at most this late, and records reach all members in as many beats.
SPREAD_S = 10 * TIMING.beat_s


def address(name: str) -> str:
    return f"{name}.example:1"


def introducers(kind: str, order: Sequence[str], draws: random.Random) -> dict[str, list[str]]:
    """The addresses that each of eight peers is given."""
    first = {"one introduces": "0", "the last introduces": order[-1]}.get(kind)
    if first is not None:
        return {name: [address(first)] * (name != first) for name in order}
    if kind == "all know all":
        return {name: [address(other) for other in sorted(order)] for name in order}
    before = {name: int(name) - 1 if kind == "chain" else draws.randrange(int(name) or 1) for name in order}
    return {name: [address(str(before[name]))] * (name != "0") for name in order}


def seconds_to_one_group(kind: str, seed: int, loss: float, timing: Timing) -> float:
    """Time from the last start of eight in random order, over five seconds, until all see all."""
    draws = random.Random(seed)
    order = draws.sample(EIGHT, 8)
    network, known = Network(seed, loss=loss, timing=timing), introducers(kind, order, draws)
    starts_s = sorted(draws.uniform(0, 5) for _ in order)
    for name, start_s in zip(order, starts_s, strict=True):
        network.at(start_s, lambda name=name: network.start(name, known[name]))  # type: ignore[misc]
    network.run(starts_s[-1])
    return network.run(starts_s[-1] + 20, lambda: network.agrees(*EIGHT)) - starts_s[-1]


def group(seed: int, names: Sequence[str] = EIGHT, loss: float = 0.0) -> Network:
    """Peers that have found each other."""
    network = Network(seed, loss=loss)
    for name in names:
        network.start(name, [address(names[0])])
    network.run(20, network.is_one_group)
    assert network.agrees(*names)
    return network


def names_of(members: Sequence[Member]) -> set[str]:
    return {member.name for member in members}


def gone(network: Network, name: str) -> set[str]:
    members = network.peers[name].list
    assert members is not None
    return names_of(members.gone(network.now_s))


@pytest.mark.parametrize("kind", thinned(STARTS, quick=3))
def test_eight_starts_in_any_order_become_one_group(kind: str) -> None:
    assert max(seconds_to_one_group(kind, seed, 0.0, TIMING) for seed in range(25)) < 2


@pytest.mark.parametrize("kind", thinned(STARTS, quick=2))
def test_a_third_of_messages_lost_does_not_split_starts(kind: str) -> None:
    timing = Timing(beat_s=0.1)
    assert max(seconds_to_one_group(kind, seed, LOST, timing) for seed in range(15)) < 2


@pytest.mark.long
@pytest.mark.parametrize("kind", STARTS)
def test_five_hundred_starts_become_one_group_each(kind: str) -> None:
    assert max(seconds_to_one_group(kind, seed, 0.0, TIMING) for seed in range(500)) < 2


@pytest.mark.parametrize("count", [2, 8])
def test_no_living_member_is_ever_suspected(count: int) -> None:
    network = group(count, EIGHT[:count], LOST)
    for _ in range(300):
        network.run(network.now_s + TIMING.beat_s)
        for peer in network.running:
            assert peer.list is not None
            assert peer.list.suspected(network.now_s) == ()
            assert len(peer.list.present(network.now_s)) == count


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_member_is_suspected_then_gone(seed: int) -> None:
    network = group(seed, loss=LOST)
    network.kill("3")
    killed_s = network.now_s
    network.run(killed_s + TIMING.suspect_after_s + SPREAD_S)
    for name in (name for name in EIGHT if name != "3"):
        members = network.peers[name].list
        assert members is not None
        assert names_of(members.suspected(network.now_s)) == {"3"}
        assert gone(network, name) == set()
    network.run(killed_s + TIMING.gone_after_s + SPREAD_S)
    assert network.is_one_group()
    assert all(gone(network, peer.name) == {"3"} for peer in network.running)


def test_half_killed_at_once_leaves_the_others() -> None:
    network = group(1)
    for name in EIGHT[:4]:
        network.kill(name)
    network.run(network.now_s + TIMING.gone_after_s + SPREAD_S)
    assert network.agrees(*EIGHT[4:])


def test_a_member_that_leaves_counts_no_more_and_is_forgotten() -> None:
    network = group(2)
    members = network.peers["3"].list
    assert members is not None
    members.leave()
    network.run(network.now_s + 2 * TIMING.beat_s)
    network.kill("3")
    network.run(network.now_s + SPREAD_S)
    assert network.agrees(*[name for name in EIGHT if name != "3"])
    assert gone(network, "0") == set()
    network.run(network.now_s + 3 * TIMING.gone_after_s)
    assert all(peer.list is not None and "3" not in names_of(peer.list.table()) for peer in network.running)


@pytest.mark.parametrize("sides", [(EIGHT[:4], EIGHT[4:]), (EIGHT[:1], EIGHT[1:]), (EIGHT[:3], EIGHT[3:5], EIGHT[5:])])
def test_sides_of_a_cut_go_on_and_merge_once_healed(sides: tuple[list[str], ...]) -> None:
    network = group(5, loss=LOST)
    network.split(*sides)
    network.run(network.now_s + TIMING.gone_after_s + SPREAD_S)
    for side in sides:
        assert network.agrees(*side)
        assert all(gone(network, name) == set(EIGHT) - set(side) for name in side)
    network.run(network.now_s + 60)
    network.split()
    network.run(network.now_s + SPREAD_S)
    assert network.agrees(*EIGHT)


def test_a_frozen_member_is_gone_and_suspects_no_other() -> None:
    network = group(6)
    network.freeze("3")
    network.run(network.now_s + TIMING.gone_after_s + SPREAD_S)
    assert network.agrees(*[name for name in EIGHT if name != "3"])
    network.resume("3")
    for _ in range(100):
        assert gone(network, "3") == set()
        assert network.view("3") == set(EIGHT)
        network.run(network.now_s + TIMING.beat_s / 10)
    assert network.agrees(*EIGHT)


def test_a_machine_asleep_with_all_members_loses_none() -> None:
    network = group(7)
    for name in EIGHT:
        network.freeze(name)
    network.run(network.now_s + 3600)
    for name in EIGHT:
        network.resume(name)
        assert network.view(name) == set(EIGHT)
    for _ in range(100):
        network.run(network.now_s + TIMING.beat_s / 10)
        assert network.agrees(*EIGHT)


@pytest.mark.parametrize("away_s", [0.0, 1.0, 30.0])
def test_a_restarted_member_is_one_member(away_s: float) -> None:
    network = group(8)
    network.kill("0")  # which introduces the others
    network.run(network.now_s + away_s)
    network.start("0", samples=5)
    network.run(network.now_s + SPREAD_S)
    assert network.agrees(*EIGHT)
    for peer in network.running:
        assert peer.list is not None
        assert peer.list.present(network.now_s)[0].samples == 5
        assert peer.list.contested == 0


@pytest.mark.parametrize("away_s", [0.0, 30.0])
def test_a_start_before_the_last_one_is_made_later(away_s: float) -> None:
    network = group(9)
    network.kill("3")
    network.run(network.now_s + away_s)
    network.start("3")
    members = network.peers["3"].list
    assert members is not None
    members.own = members.own._replace(start=0)  # as of a clock that was set back
    network.run(network.now_s + SPREAD_S)
    assert network.agrees(*EIGHT)
    assert members.contested == 1


def test_members_that_only_dial_are_found_through_others() -> None:
    network = Network(10)
    for name in EIGHT:
        network.start(name, [address("0")], listens=name in "01")
    network.run(SPREAD_S, network.is_one_group)
    assert network.agrees(*EIGHT)
    network.kill("0")
    network.run(network.now_s + TIMING.gone_after_s + SPREAD_S)
    assert network.agrees(*EIGHT[1:])


@pytest.mark.parametrize("cut", ["one way", "both ways"])
def test_members_that_reach_each_other_through_others_stay(cut: str) -> None:
    network = group(11)
    network.blocked = lambda dialler, listener: (
        {dialler, listener} <= set("123") and (cut == "both ways" or dialler < listener)
    )
    for _ in range(200):
        network.run(network.now_s + TIMING.beat_s)
        assert network.agrees(*EIGHT)


@pytest.mark.parametrize("seed", range(5))
def test_old_tables_bring_no_dead_member_back(seed: int) -> None:
    network = group(seed)
    tables = []
    for _ in range(20):
        network.run(network.now_s + TIMING.beat_s)
        tables += [peer.list.table() for peer in network.running if peer.list is not None]
    network.kill("3")
    network.run(network.now_s + TIMING.gone_after_s + SPREAD_S)
    for table in network.draws.sample(tables, len(tables)):  # in any order
        for peer in network.running:
            assert peer.list is not None
            peer.list.merge(table, network.now_s, "0")
        network.run(network.now_s + TIMING.beat_s / 10)
        assert network.is_one_group()


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1])
def test_two_hundred_joins_and_leaves_end_in_one_view(seed: int) -> None:
    network = group(seed, loss=0.1)
    for number in range(8, 208):
        network.start(str(number), [address("0"), address("1")], listens=number % 5 > 0)
        network.run(network.now_s + network.draws.uniform(0, 1))
        leaver = network.draws.choice(network.running[2:])
        if number % 2 and leaver.list is not None:
            leaver.list.leave()
            network.run(network.now_s + TIMING.beat_s)
        network.kill(leaver.name)
    network.run(network.now_s + TIMING.gone_after_s + SPREAD_S)
    assert network.is_one_group()
    assert len(network.running) == 8


@pytest.mark.parametrize("seed", thinned(range(15), quick=4))
def test_any_faults_end_in_one_group(seed: int) -> None:
    network = Network(seed, loss=seed % 4 / 10)
    draws = network.draws
    for name in EIGHT:
        network.start(name, [address(other) for other in draws.sample(EIGHT, 2)] + [address("0")])
    for _ in range(30):
        network.run(network.now_s + draws.expovariate(0.5))
        name = draws.choice(EIGHT)
        match draws.choice(["kill", "start", "freeze", "resume", "split", "heal"]):
            case "kill":
                network.kill(name)
            case "start":
                network.start(name)
            case "freeze" if network.peers[name].list is not None:
                network.freeze(name)
            case "resume":
                network.resume(name)
            case "split":
                half = draws.sample(EIGHT, 4)
                network.split(half, [name for name in EIGHT if name not in half])
            case "heal":
                network.split()
    network.split()
    for name in EIGHT:
        network.resume(name)
    network.run(network.now_s + TIMING.gone_after_s + 2 * SPREAD_S)
    assert network.is_one_group()


# One list by itself, without a network.

OWN = Member("7", "own.example:1", 100, beat=5)


def members_of(*introducers: str) -> MembershipList:
    return MembershipList(OWN, introducers, TIMING, random.Random(0))


def test_members_are_in_the_order_of_their_clients() -> None:
    members = members_of()
    for name in ("ann", "10", "9", "007"):
        members.merge([Member(name, "", 1)], 0.0, name)
    assert [member.client for member in members.present(0.0)] == [7, 9, 10, "007", "ann"]


def test_a_second_count_brings_an_unknown_member_in() -> None:
    members = members_of()
    assert not members.merge([Member("8", "", 1, beat=3)], 0.0, "9")
    assert names_of(members.present(0.0)) == {"7"}
    assert not members.merge([Member("8", "", 1, beat=3)], 0.0, "9")
    assert members.merge([Member("8", "", 1, beat=4)], 0.0, "9")
    assert not members.merge([Member("8", "", 1, beat=5)], 0.0, "9")
    assert names_of(members.present(0.0)) == {"7", "8"}


def test_what_is_gone_is_not_passed_on() -> None:
    members = members_of()
    members.merge([Member("8", "", 1)], 0.0, "8")
    for beat in range(30):
        members.beat(beat * TIMING.beat_s)
    assert members.table() == (members.own,)
    assert names_of(members.gone(6.0)) == {"8"}
    members.merge([Member("8", "", 2, beat=7), Member("9", "", 1, left=True)], 6.0, "10")  # hearsay of a later life
    assert members.table() == (members.own,)
    members.merge([Member("8", "", 2, beat=8)], 6.0, "10")
    assert names_of(members.table()) == {"7", "8"}


def test_introducers_are_tried_until_they_are_present() -> None:
    members = members_of("a.example:1", "own.example:1")
    assert members.beat(0.0) == (Target("a.example:1"),)
    members.merge([Member("8", "elsewhere.example:1", 1)], 0.0, "8")
    assert set(members.beat(0.2)) == {Target("a.example:1"), Target("elsewhere.example:1", "8")}
    members.heard("8", 1, 0.2, "a.example:1")  # it has that address too
    assert members.beat(0.4) == (Target("elsewhere.example:1", "8"),)
    members.heard("7", 100, 0.4, "a.example:1")
    assert members.contested == 0


def test_direct_signs_of_life_keep_a_member() -> None:
    members = members_of()
    members.merge([Member("8", "", 1)], 0.0, "8")
    for beat in range(100):
        members.beat(beat * TIMING.beat_s)
        members.heard("8", 1, beat * TIMING.beat_s)
        assert len(members.present(beat * TIMING.beat_s)) == 2
    members.heard("8", 9, 20.0)
    assert members.present(20.0)[1].start == 9
    members.heard("8", 1, 20.0)  # of its earlier life
    assert members.present(20.0)[1].start == 9


@pytest.mark.parametrize(("start", "beat", "left"), [(100, 9, False), (100, 5, True), (200, 0, False), (200, 9, True)])
def test_what_others_say_of_this_peer_is_refuted(start: int, beat: int, left: bool) -> None:
    members = members_of()
    said = Member("7", "evil.example:1", start, beat, left)
    assert members.merge([said], 0.0, "9")
    assert members.own.age > said.age
    assert members.own.address == OWN.address
    assert members.contested == 1
    assert not members.merge([said], 0.0, "9")


def test_a_false_leaving_is_refuted_within_some_beats() -> None:
    network = group(3)
    for peer in network.running:
        if peer.name != "3" and peer.list is not None:
            said = next(member for member in peer.list.table() if member.name == "3")
            peer.list.merge([said._replace(beat=said.beat + 50, left=True)], network.now_s, "0")
    assert all(network.view(name) == set(EIGHT) - {"3"} for name in EIGHT if name != "3")
    network.run(network.now_s + SPREAD_S)
    assert network.agrees(*EIGHT)


class Liar:
    """A hostile member that says of another, to all and at each beat, that it has ended its run and left.

    The largest numbers are such that hearsay, or the member itself, may have no later ones.
    """

    def __init__(self, network: Network, of: str, seed: int) -> None:
        self.network, self.of = network, of
        self.draws = random.Random(seed)
        self.is_lying = True
        self.longest_s = 0.0
        self._away_since_s: dict[str, float] = {}

    def lie(self) -> None:
        network = self.network
        for peer in network.running:
            if self.is_lying and peer.list is not None and peer.name != "0":
                peer.list.merge([self._claim(peer.list.table(self.of))], network.now_s, "0")
                self._look(peer.name, peer.list)
        network.at(network.now_s + network.timing.beat_s, self.lie)

    def _claim(self, known: Sequence[Member]) -> Member:
        start = next((member.start for member in known if member.name == self.of), 0)
        starts = (start, start + 1, 2**61 - 1, 2**61, 2**61 + 1, 2**61 + 2, 2**62)
        start, beat = min(self.draws.choice(starts), 2**62), self.draws.choice((0, 1, 1000, 2**53 - 1, 2**53))
        is_over = self.draws.random() < 0.8
        return Member(self.of, "evil.example:1", start, beat, left=is_over, is_ready=True, has_ended=is_over)

    def _look(self, name: str, members: MembershipList) -> None:
        """Measure for how long a peer holds the member for one that has ended and left."""
        now_s = self.network.now_s
        if name == self.of or self.of not in names_of(members.ended()) or self.of in self.network.view(name):
            self._away_since_s.pop(name, None)
        else:
            self.longest_s = max(self.longest_s, now_s - self._away_since_s.setdefault(name, now_s))


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[] if seed < 1 else pytest.mark.long) for seed in range(10)])
def test_no_number_is_too_large_to_be_refuted(seed: int) -> None:
    network = group(seed)
    liar = Liar(network, "3", seed)
    liar.lie()
    network.run(network.now_s + 60)
    assert liar.longest_s < TIMING.gone_after_s  # from then on it would be believed
    network.kill("3")  # comes back with a start before those that were said of it
    network.run(network.now_s + 1)
    network.start("3", [address("1")])
    network.run(network.now_s + 60)
    assert liar.longest_s < TIMING.gone_after_s
    liar.is_lying = False
    network.run(network.now_s + SPREAD_S)
    assert network.agrees(*EIGHT)
    members = network.peers["3"].list
    assert members is not None
    members.end()
    members.leave()
    network.run(network.now_s + SPREAD_S)
    assert all("3" not in network.view(name) and "3" not in gone(network, name) for name in EIGHT if name != "3")


@pytest.mark.long
def test_a_member_beyond_hearsay_tells_all_within_some_beats() -> None:
    names = [str(number) for number in range(100)]
    network = group(1, names)
    for peer in network.running:
        if peer.list is not None:
            peer.list.merge([Member("3", "", 2**61, 2**53, left=True)], network.now_s, "0")
    network.run(network.now_s + SPREAD_S)
    assert network.agrees(*names)


def test_largest_numbers_leave_a_member_the_last_word() -> None:
    members = members_of()
    members.merge([Member("8", "", 2**62, 5)], 0.0, "8")
    members.merge([Member("8", "", 2**62, 2**53)], 0.0, "9")
    assert members.present(0.0)[1].beat == 5, "or its next heartbeats would be no sign of life"
    members.merge([Member("8", "", 2**62, 7)], 0.0, "9")
    assert members.present(0.0)[1].beat == 7
    assert not members.merge([Member("8", "", 2**62, 2**53, left=True)], 0.0, "9")
    assert not members.merge([Member("8", "evil.example:1", 2**62, 2**53)], 0.0, "9")
    assert members.merge([Member("8", "", 2**62, 6, is_ready=True, has_ended=True)], 0.0, "8")
    assert names_of(members.ended()) == {"8"}
    assert not members.merge([Member("8", "", 2**62, 4)], 0.0, "8")  # delayed


def test_a_member_counts_on_after_the_largest_lie() -> None:
    """A beat that could not rise would be a sign of life to those alone that it tells itself."""
    members = members_of()
    for beat in (5, 2**53, 2**53 - 1, 2**53):
        members.merge([Member("7", "", 2**62, beat, left=True)], 0.0, "9")
        before = members.own
        members.beat(0.0)
        assert members.own.age > before.age
        assert members.own.start == 2**62
        assert members.own.beat < 2**52


@pytest.mark.parametrize(
    ("member", "must"),
    [
        (Member("", "", 1), "a node's name"),
        (Member("../8", "", 1), "a node's name"),
        (Member("8" * 65, "", 1), "a node's name"),
        (Member("8", "example", 1), "HOST:PORT"),
        (Member("8", "a\n.example:1", 1), "HOST:PORT"),
        (Member("8", "a.example:65536", 1), "HOST:PORT"),
        (Member("8", "", -1), "a start up to"),
        (Member("8", "", 2**63), "a start up to"),
        (Member("8", "", 1, 2**60), "a start up to"),
        (Member("8", "", 1, samples=2**60), "a start up to"),
    ],
)
def test_a_table_with_a_false_entry_is_refused_whole(member: Member, must: str) -> None:
    members = members_of()
    with pytest.raises(InvalidPayload, match=must):
        members.merge([Member("9", "[::1]:1", 1), member], 0.0, "9")
    assert members.table() == (OWN,)


def test_tables_are_bounded_either_way() -> None:
    members = members_of()
    crowd = [Member(f"n{number}", "", 1) for number in range(MOST_MEMBERS)]
    with pytest.raises(InvalidPayload, match="10000 members at most"):
        members.merge([*crowd, OWN], 0.0, "n0")
    for beat in range(2):  # present all, if they are believed
        members.merge([member._replace(beat=beat) for member in crowd], 0.0, "n0")
    assert not members.merge([Member("8", "", 1)], 0.0, "8")
    assert len(members.table()) == MOST_MEMBERS
    for beat in range(30):
        members.beat(beat * TIMING.beat_s)
    assert members.merge([Member("8", "", 1)], 6.0, "8")


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueRange, match="lengthen the later one"):
        Timing(suspect_after_s=9.0, gone_after_s=5.0)


def test_hearsay_is_no_sign_of_life() -> None:
    members = MembershipList(Member("a", "host:1", 1), (), Timing(), random.Random(0))
    assert members.is_unheard("b")
    members.merge([Member("b", "host:2", 1, beat=1)], 0.0, "c")
    assert members.is_unheard("b")
    members.merge([Member("b", "host:2", 1, beat=1, left=True)], 0.1, "c")
    assert not members.is_unheard("b")
    members.merge([Member("d", "host:3", 1, beat=1)], 0.2, "d")
    assert not members.is_unheard("d")
