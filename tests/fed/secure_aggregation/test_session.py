import hashlib
import math
import os
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fed.errors import InvalidPayload, SessionFailed
from fed.protocol.protocol_pb2 import SessionKeys
from fed.secure_aggregation.client import SessionClient
from fed.secure_aggregation.fixed_point import FixedPoint, SecureSum
from fed.secure_aggregation.graph import complete_degree, harary_degree
from fed.secure_aggregation.key_agreement import sign
from fed.secure_aggregation.lane_noise import LaneNoise
from fed.secure_aggregation.masks import Mask, add_masks
from fed.secure_aggregation.settings import SecureAggregation
from fed.secure_aggregation.terms import Session, Terms, keys_digest
from tests.fed.secure_aggregation.sessions import (
    Parties,
    lanes_of,
    mask,
    masked,
    names_of,
    parties,
    plain_sum,
    share_secrets,
    signer_of,
    terms_of,
    unmask,
    unmasked,
)

_PHASES = ("keys", "shares", "masked", "consent", "unmasking")


def _sum_of(made: Parties, lost: dict[str, list[str]]) -> tuple[SecureSum, SecureSum]:
    """The session's sum and the plain sum, with clients lost at each phase."""
    messages = {name: lanes_of(made.terms, number) for number, name in enumerate(made.clients)}
    deliveries = share_secrets(made, without_keys=lost["keys"], without_shares=lost["shares"])
    staying = {name: message for name, message in messages.items() if name in deliveries and name not in lost["masked"]}
    masked(made, deliveries, staying)
    total = unmasked(made, without_consent=lost["consent"], without_unmasking=lost["unmasking"])
    return total, plain_sum(made.terms, [*staying.values()])


@given(st.data())
def test_sum_is_exact_for_any_drop_outs_within_the_threshold(data: st.DataObject) -> None:
    count = data.draw(st.integers(3, 14))
    threshold = data.draw(st.integers(complete_degree(count, 0).threshold if count > 9 else count // 2 + 1, count))
    bits = data.draw(st.sampled_from([16, 32, 64]))
    lost: dict[str, list[str]] = {phase: [] for phase in _PHASES}
    for name in data.draw(st.permutations(names_of(count)))[: data.draw(st.integers(0, count - threshold))]:
        lost[data.draw(st.sampled_from(_PHASES))].append(name)
    listed = count - len(lost["keys"])
    if listed // 2 + 1 > threshold or threshold > listed:
        return
    made = parties(count, terms_of(count, bits=bits, threshold=threshold))
    total, plain = _sum_of(made, lost)
    assert total.clients == plain.clients == count - sum(len(lost[phase]) for phase in _PHASES[:3])
    assert np.array_equal(total.lanes, plain.lanes)


@pytest.mark.parametrize("phase", _PHASES)
def test_one_too_many_drop_outs_end_the_session(phase: str) -> None:
    count, threshold = 7, 5
    lost: dict[str, list[str]] = {name: [] for name in _PHASES}
    lost[phase] = names_of(count)[1:4]
    with pytest.raises(SessionFailed, match=r"needed|must"):
        _sum_of(parties(count, terms_of(count, threshold=threshold)), lost)
    lost[phase] = names_of(count)[1:3]
    if phase != "keys":  # of five keys another session is made, whose threshold of five holds
        total, plain = _sum_of(parties(count, terms_of(count, threshold=threshold)), lost)
        assert np.array_equal(total.lanes, plain.lanes)


def test_sparse_graph_gives_the_exact_sum_with_drop_outs() -> None:
    count = 120
    terms = terms_of(count, corrupt=0.05, max_drop_out=0.1)
    made = parties(count, terms)
    degree = harary_degree(count, math.ceil(0.05 * count), 0.1)
    assert degree.neighbours < count - 1
    names = names_of(count)
    lost = {"keys": [], "shares": names[:2], "masked": names[5:9], "consent": names[20:22], "unmasking": names[30:33]}
    total, plain = _sum_of(made, lost)
    assert total.clients == count - 6
    assert np.array_equal(total.lanes, plain.lanes)


def test_messages_on_their_way_are_uniform() -> None:
    made = parties(3, terms_of(3, 4000))
    deliveries = share_secrets(made)
    constant = torch.full((made.terms.fixed.lanes,), 5, dtype=torch.int32)
    sent = mask(made.clients["client-000"], deliveries["client-000"], constant).numpy().view(np.uint8)
    counts = np.bincount(sent, minlength=256)
    chi_square = ((counts - len(sent) / 256) ** 2).sum() * 256 / len(sent)
    assert 130 < chi_square < 420  # 255 degrees of freedom: mean 255, standard deviation 22.6; 5.5 and 7.3 of them


def test_masks_of_two_attempts_differ() -> None:
    found = []
    for attempt in range(2):
        made = parties(3, terms_of(3, attempt=attempt))  # even with the same secret keys
        deliveries = share_secrets(made)
        zeros = torch.zeros(made.terms.fixed.lanes, dtype=torch.int32)
        sealed = {name: delivery.boxes[0].sealed for name, delivery in deliveries.items()}
        found.append((mask(made.clients["client-000"], deliveries["client-000"], zeros).tolist(), sealed))
    assert found[0][0] != found[1][0]
    assert found[0][1] != found[1][1]


def test_every_term_is_in_the_session_and_its_signatures() -> None:
    terms = terms_of(4)
    names, keys = names_of(4), [bytes([place]) * 32 for place in range(4)]
    changed = [
        replace(terms, run="other"),
        replace(terms, round=2),
        replace(terms, attempt=1),
        replace(terms, plan_sha256=b"other"),
        replace(terms, task_sha256=b"other"),
        replace(terms, identities_sha256=b"other"),
        replace(terms, settings=replace(terms.settings, minimum_cohort=3)),
        replace(terms, settings=replace(terms.settings, threshold=4)),
        replace(terms, fixed=replace(terms.fixed, clips=(4.0,))),
        replace(terms, fixed=replace(terms.fixed, most_clients=5)),
    ]
    sessions = [Session(one, names, keys) for one in (terms, *changed)]
    sessions += [Session(terms, names, [*keys[:3], keys[0]]), Session(terms, [*names[:3], "other"], keys)]
    assert len({session.id for session in sessions}) == len(sessions)
    assert len({one.keys_to_sign(b"a", b"b") for one in (terms, *changed)}) == 1 + len(changed)
    assert len({session.survivors_to_sign(b"\1") for session in sessions}) == len(sessions)
    assert len({session.seed_commitment("a", b"") for session in sessions}) == len(sessions)
    assert sessions[0].survivors_to_sign(b"\1") != sessions[0].survivors_to_sign(b"\2")
    mode = replace(terms.settings, mode="real")
    assert Session(replace(terms, settings=mode), names, keys).id == sessions[0].id  # of simulations alone


def test_digests_are_those_that_the_protocol_describes() -> None:
    """The table in docs/protocol.md, by hand."""

    def hashed(purpose: str, *parts: bytes) -> bytes:
        whole = (f"fed secure aggregation: {purpose}".encode(), *parts)
        return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in whole)).digest()

    def numbers(*found: int) -> bytes:
        return b"".join(number.to_bytes(8, "big") for number in found)

    terms, names, keys = terms_of(3, number=7, attempt=1), names_of(3), [bytes([place]) * 32 for place in range(3)]
    session = Session(terms, names, keys)
    settings = (
        b'{"bits":32,"clip":8.0,"corrupt":0.0,"graph":"auto","max_drop_out":0.0,"max_weight":"auto",'
        b'"minimum_cohort":2,"randomness":"seed","threshold":"auto"}'
    )
    fixed = b'{"bits":32,"clips":[8.0],"max_weight":1,"most_clients":3,"parts":[3]}'
    counts = numbers(7, 1, terms.fixed.lanes)
    agreed = hashed("terms", b"run", counts, b"plan", b"task", b"roster", settings, fixed)
    listed = [part for name, key in zip(names, keys, strict=True) for part in (name.encode(), key)]
    id_ = hashed("session", agreed, numbers(2, 3, 1), *listed)  # all three must stay: ⌊2·3/3⌋ + 1
    assert terms.keys_to_sign(b"sealing", b"masking") == hashed("keys", agreed, b"sealing", b"masking")
    told = replace(terms, ledger=b"head")
    agreed = hashed("terms", b"run", counts, b"plan", b"task", b"roster", settings, fixed, b"head")
    assert told.keys_to_sign(b"sealing", b"masking") == hashed("keys", agreed, b"sealing", b"masking")
    assert session.id == id_
    assert session.seed_commitment("a", b"seed") == hashed("seed", id_, b"a", b"seed")
    assert session.survivors_to_sign(b"\3") == hashed("survivors", id_, b"\3")
    own = SessionKeys(sealing=b"1", masking=b"2", signature=b"3")
    assert keys_digest("a", own) == hashed("listed keys", b"a", b"1", b"2", b"3")


OTHERS: dict[type, dict[str, Any]] = {
    Terms: {
        "run": "other",
        "round": 2,
        "attempt": 1,
        "plan_sha256": b"other",
        "task_sha256": b"other",
        "identities_sha256": b"other",
        "ledger": b"other",
    },
    SecureAggregation: {
        "threshold": 3,
        "clip": 7.0,
        "bits": 64,
        "max_weight": 2,
        "minimum_cohort": 3,
        "max_drop_out": 0.1,
        "corrupt": 0.2,
        "graph": "harary",
        "randomness": "system",
    },
    FixedPoint: {"bits": 64, "parts": (4,), "clips": (7.0,), "most_clients": 4, "max_weight": 2, "noise": None},
    LaneNoise: {"clip": 2.0, "noise_multiplier": 2.0, "least_honest": 3, "bit_weight": 0.5},
}
"""Other values of all fields of the terms and of their parts, but for those that are parts and ``mode``."""


def test_each_field_of_the_terms_is_in_their_digest() -> None:
    noise = LaneNoise(1.0, 1.0, 2)
    terms = terms_of(3)
    terms = replace(terms, fixed=replace(terms.fixed, noise=noise))
    parts: dict[type, Any] = {
        Terms: lambda other: replace(terms, **other),
        SecureAggregation: lambda other: replace(terms, settings=replace(terms.settings, **other)),
        FixedPoint: lambda other: replace(terms, fixed=replace(terms.fixed, **other)),
        LaneNoise: lambda other: replace(terms, fixed=replace(terms.fixed, noise=replace(noise, **other))),
    }
    for kind, others in OTHERS.items():
        assert {field.name for field in fields(kind)} - {"settings", "fixed", "mode"} == others.keys()
        for name, value in others.items():
            assert parts[kind]({name: value}).digest != terms.digest, f"{kind.__name__}.{name}"


def test_clients_whose_tasks_differ_refuse_each_others_keys() -> None:
    """As where the server sends the others a step size of zero, to see one update alone."""
    made, other = parties(4), parties(4, replace(terms_of(4), task_sha256=b"another step size"))
    with pytest.raises(InvalidPayload, match="not signed"):
        made.coordinator.take_keys("client-001", other.clients["client-001"].open())


def test_message_without_its_pairs_masks_is_still_uniform() -> None:
    """The mask of the client's own seed hides a message that comes after the others' keys were revealed."""
    made = parties(3, terms_of(3, 4000))
    deliveries = share_secrets(made)
    client = made.clients["client-000"]
    sent = mask(client, deliveries["client-000"], torch.full((made.terms.fixed.lanes,), 5, dtype=torch.int32)).numpy()
    lanes = sent.view(np.uint32).copy()
    session = client._of_session()
    for name in ("client-001", "client-002"):
        key = client._masking.agree(made.clients[name]._masking.public, session.id, "mask")
        add_masks(lanes, [Mask(key, is_added=False)])  # the first client has added those of the others
    counts = np.bincount(lanes.view(np.uint8), minlength=256)
    assert 130 < ((counts - 4 * len(lanes) / 256) ** 2).sum() * 256 / (4 * len(lanes)) < 420
    add_masks(lanes, [Mask(client._seed, is_added=False)])
    assert (lanes == 5).all()


def test_secrets_of_each_session_are_fresh_and_apart() -> None:
    terms = terms_of(3)
    identities = parties(3).identities
    made = [SessionClient("client-000", signer_of("client-000"), identities, terms, os.urandom) for _ in range(2)]
    secrets = [secret for one in made for secret in (one._sealing.private, one._masking.private, one._seed)]
    assert len({*secrets}) == 6
    session = parties(3)
    share_secrets(session)
    first, second = session.clients["client-000"], session.clients["client-001"]
    assert first._sealing_key(0, 1) == second._sealing_key(0, 1)
    assert first._sealing_key(0, 1) != first._sealing_key(1, 0)


def test_session_that_is_ended_keeps_no_share() -> None:
    made = parties(3)
    share_secrets(made)
    client = made.clients["client-000"]
    assert client._shares
    client.abort()
    assert not client._shares


def test_more_clients_than_fit_are_refused() -> None:
    terms = replace(terms_of(4), fixed=replace(terms_of(4).fixed, most_clients=3))
    made = parties(4, terms)
    for name, client in made.clients.items():
        made.coordinator.take_keys(name, client.open())
    with pytest.raises(SessionFailed, match="from 2 to 3 clients, got 4"):
        made.coordinator.close_keys()


@pytest.mark.parametrize("wrong", [bytes(32), b"", bytes(31), b"1" * 100_000])
@pytest.mark.parametrize("which", ["sealing", "masking"])
def test_keys_that_nobody_can_agree_with_cost_their_client_alone(which: str, wrong: bytes) -> None:
    made = parties(5, terms_of(5, threshold=3))
    for name, client in made.clients.items():
        keys = client.open()
        if name == "client-004":
            setattr(keys, which, wrong)
            keys.signature = sign(signer_of(name), made.terms.keys_to_sign(keys.sealing, keys.masking))
            with pytest.raises(InvalidPayload, match="X25519"):
                made.coordinator.take_keys(name, keys)
        else:
            made.coordinator.take_keys(name, keys)
    for name, listed in made.coordinator.close_keys():
        made.coordinator.take_shares(name, made.clients[name].share(listed))
    assert len(made.coordinator.close_shares()) == 4


def test_drop_outs_before_the_keys_are_not_counted_twice() -> None:
    """Of ten that are asked two may be lost: the eight that are left need not tolerate the loss of two more."""
    count = 10
    made = parties(count, terms_of(count, threshold=8, max_drop_out=0.2))
    lost = {"keys": names_of(count)[:2], "shares": [], "masked": [], "consent": [], "unmasking": []}
    total, plain = _sum_of(made, lost)
    assert np.array_equal(total.lanes, plain.lanes)


@pytest.mark.parametrize("threshold", [3, 4])
@pytest.mark.parametrize("place", range(5))
def test_one_changed_bit_of_a_share_is_found(place: int, threshold: int) -> None:
    """Where there is a share more than is needed, the sum is found without it, and the cheater is named."""
    made = parties(5, terms_of(5, threshold=threshold))
    deliveries = share_secrets(made)
    messages = {name: lanes_of(made.terms, number) for number, name in enumerate(names_of(5)[: 5 - (place == 4)])}
    masked(made, deliveries, messages)
    survivors, names = made.coordinator.close_masked()
    for name in names[:4]:
        made.coordinator.take_consent(name, made.clients[name].consent(survivors))
    for name, consents in made.coordinator.close_consents().items():
        unmasking = unmask(made.clients[name], consents)
        if name == "client-001":
            part = unmasking.keys[0] if place == 4 else unmasking.seeds[place]
            part.share = bytes([*part.share[:-1], part.share[-1] ^ 1])
        made.coordinator.take_unmasking(name, unmasking)
    if threshold == 4:
        with pytest.raises(SessionFailed, match="shares"):
            made.coordinator.finish()
        return
    total = made.coordinator.finish()
    assert np.array_equal(total.lanes, plain_sum(made.terms, [*messages.values()]).lanes)
    assert made.coordinator.cheaters == {"client-001"}


def test_refused_message_leaves_the_sum_as_it_was() -> None:
    made = parties(4, terms_of(4, threshold=3))
    deliveries = share_secrets(made)
    messages = {name: lanes_of(made.terms, number) for number, name in enumerate(names_of(3))}
    masked(made, deliveries, messages)
    lanes = made.terms.fixed.lanes
    for wrong in (*(torch.zeros(lanes, dtype=dtype) for dtype in (torch.int64, torch.float32)), torch.zeros(2).int()):
        with pytest.raises(InvalidPayload, match="integers of 32 bits"):
            made.coordinator.take_masked("client-003", wrong)
    total = unmasked(made)
    assert np.array_equal(total.lanes, plain_sum(made.terms, [*messages.values()]).lanes)
