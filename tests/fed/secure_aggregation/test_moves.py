"""A coordinator that lies in every phase, and its colluders: what honest clients say gives them nothing more."""

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fed.errors import SessionFailed
from fed.protocol.protocol_pb2 import (
    Box,
    ClientList,
    Consents,
    Delivery,
    KeyList,
    PlacedConsent,
    PlacedKeys,
    Survivors,
    Unmasking,
)
from fed.secure_aggregation.client import SessionClient
from fed.secure_aggregation.key_agreement import sign
from fed.secure_aggregation.terms import Session, Terms, keys_digest
from tests.fed.secure_aggregation.sessions import (
    entropy_of,
    lanes_of,
    mask,
    names_of,
    parties,
    signer_of,
    terms_of,
    unmask,
)

_LEAST = 4  # the minimum cohort


class Coordinator:
    """A coordinator that tells each honest client what it likes, and uses all that is said.

    Args:
        data: draws its moves.
    """

    def __init__(self, data: st.DataObject) -> None:
        self._data = data
        count = data.draw(st.integers(_LEAST, 7))
        colluding = data.draw(st.integers(0, 2))
        self.names = names_of(count)
        self.colluders, self.honest = self.names[:colluding], self.names[colluding:]
        usual = terms_of(count, corrupt=(colluding + 0.01) / _LEAST, minimum_cohort=_LEAST)  # of the shortest list, too
        self._terms = usual, replace(usual, task_sha256=b"another model")
        identities = parties(count, usual).identities
        odd = {data.draw(st.sampled_from(self.honest))} if self._lies() else set()  # who is sent another model
        self.clients = {
            (name, terms): SessionClient(name, signer_of(name), identities, terms, entropy_of(97 * place + which))
            for place, name in enumerate(self.names)
            for which, terms in enumerate(self._terms)
            if name in self.colluders or (name in odd) == bool(which)
        }
        self.terms_of = {name: terms for name, terms in self.clients if name in self.honest}
        self._keys = {of: client.open() for of, client in self.clients.items()}
        self.sessions: dict[str, Session] = {}  # of honest clients, as they were told
        self.boxes: dict[tuple[bytes, str], list[Box]] = defaultdict(list)  # session and receiver
        self.views: dict[str, bytes] = {}
        self.signed: dict[tuple[bytes, bytes], dict[str, bytes]] = defaultdict(dict)  # session and survivors
        self.unmaskings: dict[str, list[Unmasking]] = defaultdict(list)

    def _lies(self) -> bool:
        """Seldom: a session that is told many lies ends in its first phase."""
        return self._data.draw(st.sampled_from([False] * 7 + [True]))

    def list_clients(self) -> None:
        """Tell each honest client one of two lists, with the keys of one model or the other."""
        drawn = st.sets(st.sampled_from(self.names), min_size=_LEAST)
        lists = [sorted(self._data.draw(drawn)) if self._lies() else self.names for _ in range(1 + self._lies())]
        made = [self._session(names, self._terms[self._lies()]) for names in lists]
        for session, keys in made:  # the colluders' boxes: they follow the protocol where that helps
            for name in {*self.colluders} & {*session.names}:
                with contextlib.suppress(SessionFailed):
                    self._share(self.clients[name, session.terms], name, session, keys)
        for name in self.honest:
            session, keys = self._data.draw(st.sampled_from(made))
            client = self.clients[name, self.terms_of[name]]
            with contextlib.suppress(SessionFailed):
                if name in session.names:
                    self._share(client, name, session, keys)
                    self.sessions[name] = session
                    others = {*session.names} & {*self.honest}
                    assert {self.terms_of[other] for other in others} == {self.terms_of[name]}  # one model for all

    def deliver(self) -> None:
        """Hold back some of the boxes, for each client others."""
        for name, session in self.sessions.items():
            boxes = self.boxes[session.id, name]
            delivery = Delivery(boxes=boxes[self._lies() :])
            with contextlib.suppress(SessionFailed):
                mask(self._client(name), delivery, lanes_of(session.terms, 0))

    def ask_consent(self) -> None:
        """Tell clients one of two lists of survivors, some clients both."""
        for session in {session.id: session for session in self.sessions.values()}.values():
            places = range(len(session.names))
            drawn = st.sets(st.sampled_from(places), min_size=len(places) - 2)
            views = [session.pack(sorted(self._data.draw(drawn)) if self._lies() else places) for _ in range(2)]
            for name in (name for name, one in self.sessions.items() if one.id == session.id):
                told = views if self._lies() else [views[self._lies()]]
                for view in told:
                    with contextlib.suppress(SessionFailed):
                        consent = self._client(name).consent(Survivors(places=view))
                        self.views[name] = view
                        self.signed[session.id, view][name] = consent.signature

    def ask_shares(self) -> None:
        """Ask twice for shares, with all consents that there are, and those that colluders sign."""
        for name, view in self.views.items():
            session = self.sessions[name]
            signed = {**self.signed[session.id, view]}
            for colluder in {*self.colluders} & {*session.names}:
                signed[colluder] = sign(signer_of(colluder), session.survivors_to_sign(view))
            places = session.unpack(view)
            consents = Consents(
                consents=[
                    PlacedConsent(place=place + 1, signature=signed[session.names[place]])
                    for place in places
                    if session.names[place] in signed and session.names[place] != name
                ]
            )
            for _ in range(2):
                with contextlib.suppress(SessionFailed):
                    self.unmaskings[name].append(unmask(self._client(name), consents))

    def known_shares(self, owner: str) -> tuple[int, int]:
        """Numbers of shares of an honest client's seed and of its masking key that were revealed, or are colluders'."""
        session = self.sessions[owner]
        seeds = keys = len({*self.colluders} & {*session.names})
        place = session.names.index(owner) + 1
        for holder, unmaskings in self.unmaskings.items():
            if self.sessions[holder].id == session.id:
                seeds += any(place == one.place for unmasking in unmaskings for one in unmasking.seeds)
                keys += any(place == one.place for unmasking in unmaskings for one in unmasking.keys)
        return seeds, keys

    def _client(self, name: str) -> SessionClient:
        return self.clients[name, self.terms_of[name]]

    def _session(self, names: Sequence[str], terms: Terms) -> tuple[Session, dict[str, PlacedKeys]]:
        """The session of a list, and each listed client's keys."""
        keys = [self._keys.get((name, terms)) or self._keys[name, self.terms_of[name]] for name in names]
        session = Session(terms, names, [keys_digest(name, one) for name, one in zip(names, keys, strict=True)])
        placed = [PlacedKeys(place=place, keys=one) for place, one in enumerate(keys, 1)]
        return session, dict(zip(names, placed, strict=True))

    def _share(self, client: SessionClient, name: str, session: Session, keys: dict[str, PlacedKeys]) -> None:
        listed = ClientList()
        for one, sha256 in zip(session.names, session.keys_sha256, strict=True):
            listed.clients.add(name=one, keys_sha256=sha256)
        others = [keys[one] for one in session.names if one != name]
        shares = client.share(KeyList(clients=listed.SerializeToString(), neighbours=others))
        for box in shares.boxes:
            sent = Box(place=session.names.index(name) + 1, sealed=box.sealed)
            self.boxes[session.id, session.names[box.place - 1]].append(sent)


@given(st.data())
def test_lies_in_every_phase_give_nothing_but_one_sum(data: st.DataObject) -> None:
    made = Coordinator(data)
    made.list_clients()
    made.deliver()
    made.ask_consent()
    made.ask_shares()
    for name, unmaskings in made.unmaskings.items():
        assert len(unmaskings) <= 1  # one answer to a session
        for unmasking in unmaskings:
            seeds, keys = ({one.place for one in part} for part in (unmasking.seeds, unmasking.keys))
            assert not seeds & keys  # never both of one client
            survivors = made.sessions[name].unpack(made.views[name])
            assert len(survivors) >= max(_LEAST, made.sessions[name].degree.threshold)
    for owner, session in made.sessions.items():
        assert min(made.known_shares(owner)) < session.degree.threshold  # never both secrets
    revealed = {(made.sessions[name].id, made.views[name]) for name, said in made.unmaskings.items() if said}
    assert len(revealed) == len({id_ for id_, _ in revealed})  # one sum for each list of clients
