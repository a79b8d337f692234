"""Malicious servers: whatever they send, clients end the session, and no client's two secrets are both revealed."""

import contextlib
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fed.errors import InvalidPayload, SessionFailed
from fed.protocol.protocol_pb2 import (
    ClientList,
    Consent,
    Consents,
    Delivery,
    KeyList,
    PlacedConsent,
    RevealedShare,
    SealedShares,
    SessionKeys,
    Survivors,
    Unmasking,
)
from fed.secure_aggregation.client import ClientPhase, SessionClient
from fed.secure_aggregation.coordinator import SessionCoordinator
from fed.secure_aggregation.graph import complete_degree
from fed.secure_aggregation.key_agreement import seal, sign
from fed.secure_aggregation.revealed_rounds import RevealedRounds
from fed.secure_aggregation.shamir import SHARE_BYTES, recover
from tests.fed.secure_aggregation.sessions import (
    Parties,
    entropy_of,
    lanes_of,
    mask,
    masked,
    names_of,
    parties,
    share_secrets,
    signer_of,
    terms_of,
    unmask,
)

_FIRST = "client-000"


def _lists(made: Parties) -> dict[str, KeyList]:
    for name, client in made.clients.items():
        made.coordinator.take_keys(name, client.open())
    return dict(made.coordinator.close_keys())


@contextlib.contextmanager
def _listed(keys: KeyList) -> Iterator[Any]:
    """The list of clients, to be changed."""
    clients = ClientList.FromString(keys.clients)
    yield clients.clients
    keys.clients = clients.SerializeToString()


def _masked(count: int = 5, lost: int = 0, threshold: int = 4) -> Parties:
    made = parties(count, terms_of(count, threshold=threshold))
    deliveries = share_secrets(made)
    staying = names_of(count)[: count - lost]
    masked(made, deliveries, {name: lanes_of(made.terms, number) for number, name in enumerate(staying)})
    return made


def _places(*places: int) -> bytes:
    return bytes([sum(1 << place for place in places)])


def _refuses(client: SessionClient, act: Callable[[], object], match: str) -> None:
    """The client refuses, and reveals nothing afterwards."""
    with pytest.raises(SessionFailed, match=match):
        act()
    assert client.phase is ClientPhase.OVER
    with pytest.raises(SessionFailed, match="phase"):
        unmask(client, Consents())


def test_second_unmasking_is_refused() -> None:
    made = _masked()
    survivors, names = made.coordinator.close_masked()
    for name in names:
        made.coordinator.take_consent(name, made.clients[name].consent(survivors))
    consents = made.coordinator.close_consents()[_FIRST]
    client = made.clients[_FIRST]
    unmask(client, consents)
    _refuses(client, lambda: unmask(client, consents), "phase")


def test_two_lists_of_survivors_are_refused() -> None:
    client = _masked().clients[_FIRST]
    client.consent(Survivors(places=_places(0, 1, 2, 3)))
    _refuses(client, lambda: client.consent(Survivors(places=_places(0, 1, 2, 4))), "phase")


def test_consents_under_other_survivors_are_refused() -> None:
    made = _masked()
    views = {name: _places(0, 1, 2, 3) if name == _FIRST else _places(0, 1, 2, 3, 4) for name in names_of(5)}
    signed = {name: made.clients[name].consent(Survivors(places=views[name])).signature for name in names_of(5)}
    consents = [PlacedConsent(place=place + 1, signature=signed[f"client-{place:03}"]) for place in (1, 2, 3)]
    client = made.clients[_FIRST]
    _refuses(client, lambda: unmask(client, Consents(consents=consents)), "has not consented")


@pytest.mark.parametrize("wrong", ["few", "repeated", "own", "not a survivor", "forged"])
def test_consents_that_are_not_enough_are_refused(wrong: str) -> None:
    made = _masked(lost=1)
    survivors, names = made.coordinator.close_masked()
    signed = [made.clients[name].consent(survivors).signature for name in names]
    consents = [PlacedConsent(place=place + 1, signature=signed[place]) for place in (1, 2, 3)]
    match wrong:
        case "few":
            consents.pop()
        case "repeated":
            consents[2] = consents[1]
        case "own":
            consents[2] = PlacedConsent(place=1, signature=signed[0])
        case "not a survivor":
            session = made.clients[_FIRST]._of_session()
            forged = sign(signer_of("client-004"), session.survivors_to_sign(survivors.places))
            consents[2] = PlacedConsent(place=5, signature=forged)
        case "forged":
            consents[2] = PlacedConsent(place=4, signature=sign(signer_of(_FIRST), b"0" * 32))
    client = made.clients[_FIRST]
    _refuses(client, lambda: unmask(client, Consents(consents=consents)), "consent")


@pytest.mark.parametrize(
    ("places", "match"),
    [
        (_places(0, 1, 2), "at least 4 clients, got 3"),
        (_places(1, 2, 3, 4), "a list without it"),
        (bytes([255]), "a bit for each"),
        (bytes([31, 0]), "a bit for each"),
        (b"", "a bit for each"),
    ],
)
def test_survivors_that_are_wrong_are_refused(places: bytes, match: str) -> None:
    client = _masked().clients[_FIRST]
    _refuses(client, lambda: client.consent(Survivors(places=places)), match)


def test_survivors_that_shared_no_secret_are_refused() -> None:
    made = parties(5, terms_of(5, threshold=3))
    deliveries = share_secrets(made, without_shares=["client-004"])
    masked(made, deliveries, {_FIRST: lanes_of(made.terms, 0)})
    client = made.clients[_FIRST]
    _refuses(client, lambda: client.consent(Survivors(places=_places(0, 1, 2, 4))), "shared no secrets")


def test_tiny_cohort_is_refused_by_clients() -> None:
    made = parties(4, terms_of(4, minimum_cohort=4, threshold=3))
    for name in names_of(3):
        made.coordinator.take_keys(name, made.clients[name].open())
    with pytest.raises(SessionFailed, match="from 4 to 4"):
        made.coordinator.close_keys()
    free = SessionCoordinator(terms_of(4, threshold=3), made.identities)  # a server that knows no minimum
    client = made.clients["client-003"]
    for name in names_of(4)[1:]:
        other = parties(4, terms_of(4, threshold=3)).clients[name]
        free.take_keys(name, other.open())
    client.open()
    _refuses(client, lambda: client.share(dict(free.close_keys())["client-003"]), "from 4 to 4")


_SWAPPED = {
    "signature": "differ from those in the list",
    "other key": "differ from those in the list",
    "list": "must have this one with its own keys",
    "missing": "of this client's mask partners",
    "repeated": "of this client's mask partners",
    "more": "of this client's mask partners",
    "stranger": "does not know its identity",
    "replayed": "must have this one with its own keys",
    "short digest": "must have 32 bytes",
    "two pairs": "differ from those in the list",
    "noise": "other bytes",
}


@pytest.mark.parametrize("wrong", _SWAPPED)
def test_swapped_keys_are_refused(wrong: str) -> None:
    made = parties(4)
    listed = _lists(made)[_FIRST]
    keys = listed.neighbours[0].keys
    match wrong:
        case "signature":
            keys.signature = bytes(64)
        case "other key":
            keys.masking = listed.neighbours[1].keys.masking
        case "list":
            with _listed(listed) as clients:
                clients[0].keys_sha256 = bytes(32)
        case "missing":
            del listed.neighbours[0]
        case "repeated":
            listed.neighbours[1].CopyFrom(listed.neighbours[0])
        case "more":
            listed.neighbours.add().CopyFrom(listed.neighbours[0])
        case "stranger":
            made.identities.keys.pop("client-001")  # type: ignore[attr-defined]  # a dict in tests
        case "short digest":
            with _listed(listed) as clients:
                clients[1].keys_sha256 = b"1"
        case "noise":
            listed.clients = b"\xff\xff"
        case "two pairs":
            other = SessionClient("client-001", signer_of("client-001"), made.identities, made.terms, entropy_of(99))
            listed.neighbours[0].keys.CopyFrom(other.open())
        case "replayed":
            earlier = parties(4, terms_of(4, number=2))
            old = _lists(earlier)
            listed.CopyFrom(old[_FIRST])
    client = made.clients[_FIRST]
    _refuses(client, lambda: client.share(listed), _SWAPPED[wrong])


def test_keys_of_another_session_are_refused_when_the_list_agrees() -> None:
    made, earlier = parties(4), parties(4, terms_of(4, number=2))
    replayed = earlier.clients["client-001"].open()
    free = SessionCoordinator(made.terms, made.identities)
    with pytest.raises(InvalidPayload, match="not signed"):
        free.take_keys("client-001", replayed)
    free._keys = {name: client.open() for name, client in made.clients.items()} | {"client-001": replayed}
    client = made.clients[_FIRST]
    _refuses(client, lambda: client.share(dict(free.close_keys())[_FIRST]), "not signed")


@pytest.mark.parametrize("names", [("client-002", "client-002"), ("client-002", "client-001")])
def test_unsorted_or_repeated_names_are_refused(names: tuple[str, str]) -> None:
    made = parties(4)
    listed = _lists(made)[_FIRST]
    with _listed(listed) as clients:
        clients[1].name, clients[2].name = names
    client = made.clients[_FIRST]
    _refuses(client, lambda: client.share(listed), "once each")


@pytest.mark.parametrize("wrong", ["changed", "swapped", "stranger", "repeated", "few"])
def test_boxes_that_are_wrong_are_refused(wrong: str) -> None:
    made = parties(4)
    deliveries = share_secrets(made)
    mine = Delivery()
    mine.CopyFrom(deliveries[_FIRST])
    match wrong:
        case "changed":
            mine.boxes[0].sealed = mine.boxes[0].sealed[:-1] + bytes([mine.boxes[0].sealed[-1] ^ 1])
        case "swapped":  # to another receiver
            mine.boxes[0].sealed = deliveries["client-002"].boxes[1].sealed
        case "stranger":
            mine.boxes[0].place = 9
        case "repeated":
            mine.boxes[1].CopyFrom(mine.boxes[0])
        case "few":
            del mine.boxes[1:]
    client = made.clients[_FIRST]
    _refuses(client, lambda: mask(client, mine, lanes_of(made.terms, 0)), "box|boxes|mask partners")


@pytest.mark.parametrize(("fewer", "dtype"), [(1, torch.int32), (0, torch.int64), (0, torch.int16)])
def test_message_with_other_lanes_is_refused(fewer: int, dtype: torch.dtype) -> None:
    made = parties(4)
    deliveries = share_secrets(made)
    client, lanes = made.clients[_FIRST], torch.zeros(made.terms.fixed.lanes - fewer, dtype=dtype)
    _refuses(client, lambda: mask(client, deliveries[_FIRST], lanes), "lanes")


def test_fewer_shares_than_the_threshold_give_no_secret() -> None:
    made = _masked(threshold=4)
    owner = made.clients[_FIRST]
    shares = {point: client._shares[0] for point, client in enumerate(made.clients.values(), 1)}
    for part, secret in ((slice(SHARE_BYTES), owner._seed), (slice(SHARE_BYTES, None), owner._masking.private)):
        for size in (3, 4):
            for points in combinations(shares, size):
                found = None
                with contextlib.suppress(InvalidPayload):
                    found = recover({point: shares[point][part] for point in points}, 5)
                assert (found == secret) == (size == 4)


def test_sum_of_fewer_than_the_minimum_is_refused() -> None:
    """Also where fewer would be enough to recover all secrets."""
    made = parties(5, terms_of(5, threshold=3, minimum_cohort=5))
    deliveries = share_secrets(made)
    masked(made, deliveries, {name: lanes_of(made.terms, number) for number, name in enumerate(names_of(4))})
    client = made.clients[_FIRST]
    _refuses(client, lambda: client.consent(Survivors(places=_places(0, 1, 2, 3))), "at least 5 clients, got 4")
    with pytest.raises(SessionFailed, match="4 of 5 clients have sent their masked messages, and 5 are needed"):
        made.coordinator.close_masked()


def test_sparse_graph_needs_as_many_consents_as_shares() -> None:
    """Of neighbours alone: no client keeps a share of its own secrets."""
    terms = terms_of(101, corrupt=0.05, max_drop_out=0.1)
    made = parties(101, terms)
    deliveries = share_secrets(made)
    masked(made, deliveries, {name: lanes_of(terms, 0) for name in names_of(101)})
    survivors, names = made.coordinator.close_masked()
    for name in names:
        made.coordinator.take_consent(name, made.clients[name].consent(survivors))
    client, consents = made.clients[_FIRST], made.coordinator.close_consents()[_FIRST]
    threshold = client._of_session().degree.threshold
    assert len(consents.consents) == threshold
    del consents.consents[0]
    _refuses(client, lambda: unmask(client, consents), f"{threshold} other mask partners .* got {threshold - 1}")


def test_session_ended_while_a_client_answers_stays_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by another thread, for another attempt of the round."""
    made = parties(4)
    listed, client = _lists(made)[_FIRST], made.clients[_FIRST]

    def ended(*given: bytes) -> bytes:
        client.abort()
        return seal(*given)

    monkeypatch.setattr("fed.secure_aggregation.client.seal", ended)
    client.share(listed)
    assert client.phase is ClientPhase.OVER


def test_second_masked_message_of_a_session_is_refused() -> None:
    made = parties(4)
    deliveries = share_secrets(made)
    client = made.clients[_FIRST]
    mask(client, deliveries[_FIRST], lanes_of(made.terms, 0))
    _refuses(client, lambda: mask(client, deliveries[_FIRST], lanes_of(made.terms, 1)), "phase")


def test_no_client_is_asked_for_both_secrets_of_one() -> None:
    made = _masked(lost=1)
    survivors, names = made.coordinator.close_masked()
    for name in names:
        made.coordinator.take_consent(name, made.clients[name].consent(survivors))
    for name, consents in made.coordinator.close_consents().items():
        unmasking = unmask(made.clients[name], consents)
        seeds, keys = ({one.place for one in part} for part in (unmasking.seeds, unmasking.keys))
        assert seeds == {1, 2, 3, 4}
        assert keys == {5}


def _unmasking_of(made: Parties) -> tuple[str, Unmasking]:
    survivors, names = made.coordinator.close_masked()
    for name in names:
        made.coordinator.take_consent(name, made.clients[name].consent(survivors))
    consents = made.coordinator.close_consents()
    return _FIRST, unmask(made.clients[_FIRST], consents[_FIRST])


@pytest.mark.parametrize("wrong", ["both", "missing", "long", "repeated", "more", "other kind"])
def test_coordinator_refuses_shares_it_must_not_have(wrong: str) -> None:
    made = _masked(lost=1)
    name, unmasking = _unmasking_of(made)
    match wrong:
        case "both":
            unmasking.keys.append(RevealedShare(place=1, share=bytes(33)))
        case "missing":
            del unmasking.seeds[0]
        case "long":
            unmasking.seeds[0].share += b"0"
        case "repeated":
            unmasking.seeds[1].CopyFrom(unmasking.seeds[0])
        case "more":
            unmasking.seeds.append(unmasking.seeds[0])
        case "other kind":
            unmasking.keys.append(unmasking.seeds.pop())
    with pytest.raises(InvalidPayload, match="share"):
        made.coordinator.take_unmasking(name, unmasking)


def test_coordinator_refuses_messages_out_of_turn() -> None:
    made = _masked()
    coordinator, client = made.coordinator, made.clients[_FIRST]
    with pytest.raises(InvalidPayload, match="KEYS came in the phase MASKED"):
        coordinator.take_keys(_FIRST, SessionKeys())
    with pytest.raises(InvalidPayload, match="before"):
        coordinator.take_masked(_FIRST, lanes_of(made.terms, 0))
    survivors, _ = coordinator.close_masked()
    with pytest.raises(InvalidPayload, match="MASKED came"):
        coordinator.take_masked("client-001", lanes_of(made.terms, 0))
    with pytest.raises(InvalidPayload, match="not in this session"):
        coordinator.take_consent("client-009", Consent())
    with pytest.raises(InvalidPayload, match="not signed"):
        coordinator.take_consent(_FIRST, Consent(signature=bytes(64)))
    coordinator.take_consent(_FIRST, client.consent(survivors))
    with pytest.raises(InvalidPayload, match="before"):
        coordinator.take_consent(_FIRST, Consent())


def test_coordinator_refuses_clients_that_have_dropped_out() -> None:
    made = _masked(lost=1)
    survivors, _ = made.coordinator.close_masked()
    with pytest.raises(InvalidPayload, match="not among the survivors"):
        made.coordinator.take_consent("client-004", Consent())
    for name in names_of(4):
        made.coordinator.take_consent(name, made.clients[name].consent(survivors))
    made.coordinator.close_consents()
    with pytest.raises(InvalidPayload, match="has not consented"):
        made.coordinator.take_unmasking("client-004", Unmasking())


def test_masked_message_without_shared_secrets_is_refused() -> None:
    made = parties(5, terms_of(5, threshold=3))
    share_secrets(made, without_shares=["client-004"])
    with pytest.raises(InvalidPayload, match="shared no secrets"):
        made.coordinator.take_masked("client-004", lanes_of(made.terms, 0))


@pytest.mark.parametrize("wrong", ["missing", "repeated", "self", "short", "commitment"])
def test_coordinator_refuses_wrong_boxes(wrong: str) -> None:
    made = parties(4)
    shares = made.clients[_FIRST].share(_lists(made)[_FIRST])
    changed = SealedShares()
    changed.CopyFrom(shares)
    match wrong:
        case "missing":
            del changed.boxes[0]
        case "repeated":
            changed.boxes[1].CopyFrom(changed.boxes[0])
        case "self":
            changed.boxes[0].place = 1
        case "short":
            changed.boxes[0].sealed = changed.boxes[0].sealed[1:]
        case "commitment":
            changed.seed_sha256 = b""
    with pytest.raises(InvalidPayload, match="boxes"):
        made.coordinator.take_shares(_FIRST, changed)
    made.coordinator.take_shares(_FIRST, shares)


def test_stranger_is_not_taken_into_a_session() -> None:
    made = parties(4)
    stranger = SessionClient("client-007", signer_of(_FIRST), made.identities, made.terms, entropy_of(9))
    with pytest.raises(InvalidPayload, match="not signed by it"):
        made.coordinator.take_keys("client-007", stranger.open())


def test_revealed_rounds_are_known_by_every_name() -> None:
    rounds = RevealedRounds(b"salt")
    lanes = torch.arange(5, dtype=torch.int32)
    entries = [rounds.of_round("run", 2), rounds.of_task(b"plan", b"task"), rounds.of_message(2, lanes)]
    rounds.add(entries)
    again = RevealedRounds(b"salt", list(rounds))
    assert all(map(again.holds, entries))
    others = [again.of_round("run", 3), again.of_round("other", 2), again.of_task(b"other", b"task")]
    others += [again.of_task(b"plan", b"other"), again.of_message(2, lanes + 1), again.of_message(3, lanes)]
    others += [RevealedRounds(b"x").of_message(2, lanes)]
    assert not any(map(again.holds, others))


def test_oldest_revealed_rounds_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fed.secure_aggregation.revealed_rounds._MOST_ROUNDS", 2)
    rounds = RevealedRounds(b"salt")
    for number in range(7):
        rounds.add([bytes([number]) * 32])
    rounds.add([bytes([1]) * 32])  # again: it is a new one
    assert [entry[0] for entry in rounds] == [2, 3, 4, 5, 6, 1]


def test_clients_that_are_no_neighbours_must_be_known_too() -> None:
    made = parties(101, terms_of(101, corrupt=0.05, max_drop_out=0.1))
    lists = _lists(made)
    neighbours = {names_of(101)[keys.place - 1] for keys in lists[_FIRST].neighbours}
    stranger = next(name for name in names_of(101)[1:] if name not in neighbours)
    made.identities.keys.pop(stranger)  # type: ignore[attr-defined]  # a dict in tests
    client = made.clients[_FIRST]
    _refuses(client, lambda: client.share(lists[_FIRST]), "does not know its identity")


def test_consents_of_another_attempt_are_refused() -> None:
    earlier, again = _masked(), parties(5, terms_of(5, threshold=4, attempt=1))
    deliveries = share_secrets(again)
    masked(again, deliveries, {name: lanes_of(again.terms, number) for number, name in enumerate(names_of(5))})
    survivors, names = earlier.coordinator.close_masked()
    signed = [earlier.clients[name].consent(survivors).signature for name in names]
    again.coordinator.close_masked()
    client = again.clients[_FIRST]
    client.consent(survivors)
    consents = [PlacedConsent(place=place + 1, signature=signed[place]) for place in (1, 2, 3)]
    _refuses(client, lambda: unmask(client, Consents(consents=consents)), "has not consented")


@pytest.mark.parametrize("phase", ["shares", "masked", "consents", "unmasking"])
def test_session_ends_in_the_phase_that_lacks_clients(phase: str) -> None:
    made = parties(5, terms_of(5, threshold=4))
    if phase == "shares":
        with pytest.raises(SessionFailed, match="have shared their secrets, and 4 are needed"):
            share_secrets(made, without_shares=names_of(5)[:2])
        return
    deliveries = share_secrets(made)
    sent = names_of(5)[: 3 if phase == "masked" else 5]
    masked(made, deliveries, {name: lanes_of(made.terms, 0) for name in sent})
    if phase == "masked":
        with pytest.raises(SessionFailed, match="have sent their masked messages, and 4 are needed"):
            made.coordinator.close_masked()
        return
    survivors, names = made.coordinator.close_masked()
    for name in names[: 3 if phase == "consents" else 5]:
        made.coordinator.take_consent(name, made.clients[name].consent(survivors))
    if phase == "consents":
        with pytest.raises(SessionFailed, match="have consented to the survivors, and 4 are needed"):
            made.coordinator.close_consents()
        return
    for name, consents in [*made.coordinator.close_consents().items()][:3]:
        made.coordinator.take_unmasking(name, unmask(made.clients[name], consents))
    with pytest.raises(SessionFailed, match="have revealed shares, and 4 are needed"):
        made.coordinator.finish()


def test_box_of_another_length_is_refused_by_the_client() -> None:
    made = parties(3)
    deliveries = share_secrets(made)
    mine, client, other = deliveries[_FIRST], made.clients[_FIRST], made.clients["client-001"]
    mine.boxes[0].sealed = seal(other._sealing_key(1, 0), bytes(65))
    _refuses(client, lambda: mask(client, mine, lanes_of(made.terms, 0)), "two shares")


def test_phases_are_closed_in_their_order() -> None:
    coordinator = parties(3).coordinator
    for close in (
        coordinator.close_shares,
        coordinator.close_masked,
        coordinator.close_consents,
        coordinator.finish,
    ):
        with pytest.raises(SessionFailed, match="in the phase KEYS"):
            close()


@given(st.data())
def test_no_moves_give_both_secrets_of_a_client(data: st.DataObject) -> None:
    """The server tells clients different survivors, its colluders sign anything, and it uses all that is revealed."""
    count = data.draw(st.integers(4, 8))
    colluding = data.draw(st.integers(0, count // 3))
    corrupt = colluding / count
    made = parties(count, terms_of(count, corrupt=corrupt, max_drop_out=0.0))
    degree = complete_degree(count, colluding)
    deliveries = share_secrets(made)
    names = names_of(count)
    masked(made, deliveries, {name: lanes_of(made.terms, number) for number, name in enumerate(names)})
    colluders = names[:colluding]
    session = made.clients[_FIRST]._of_session()
    views = data.draw(st.lists(st.sets(st.integers(0, count - 1)), min_size=1, max_size=3))
    signed: dict[bytes, dict[int, bytes]] = {}
    told = {}
    for place, name in enumerate(names):
        places = session.pack(sorted(data.draw(st.sampled_from(views))))
        if name in colluders:
            continue
        told[name] = places
        with contextlib.suppress(SessionFailed):
            consent = made.clients[name].consent(Survivors(places=places))
            signed.setdefault(places, {})[place] = consent.signature
    seeds: dict[int, set[int]] = {}
    keys: dict[int, set[int]] = {}
    for place, name in enumerate(names):
        if name in colluders:  # it reveals both of its shares of every client
            for owner in range(count):
                seeds.setdefault(owner, set()).add(place)
                keys.setdefault(owner, set()).add(place)
            continue
        own = {**signed.get(told[name], {})}
        own |= {
            other: sign(signer_of(names[other]), session.survivors_to_sign(told[name])) for other in range(colluding)
        }
        own.pop(place, None)
        consents = [PlacedConsent(place=other + 1, signature=one) for other, one in own.items()]
        survivors = session.unpack(told[name])
        usable = [one for one in consents if one.place - 1 in survivors]
        with contextlib.suppress(SessionFailed):
            unmasking = unmask(made.clients[name], Consents(consents=usable))
            for one in unmasking.seeds:
                seeds.setdefault(one.place - 1, set()).add(place)
            for one in unmasking.keys:
                keys.setdefault(one.place - 1, set()).add(place)
    for owner in range(colluding, count):
        both = len(seeds.get(owner, ())) >= degree.threshold, len(keys.get(owner, ())) >= degree.threshold
        assert both != (True, True)
    revealed = {told[name] for name in told if any(names.index(name) in found for found in seeds.values())}
    assert len(revealed) <= 1  # no honest client reveals shares for a second list
    for places in revealed:
        assert len(session.unpack(places)) >= session.least_survivors
