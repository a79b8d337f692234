"""Streams with all other peers, dialled by either side: who is dialled, who is greeted, and which streams stand.

All of it runs in one event loop.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc

from fed.errors import InvalidInput
from fed.identity.certificates import PEER_HOST, peer_host
from fed.identity.credentials import PeerCredentials, hold_to_loopback, peer_of
from fed.processes.clock import Clock
from fed.protocol import protocol_pb2 as pb
from fed.protocol.limits import NODE_NAME, PROTOCOL
from fed.server.peer.members.link import Link, Listener, Read, StreamTerms, Write, next_message
from fed.server.peer.members.member import MOST_START
from fed.wire.calls import TurnedAway, converse, within
from fed.wire.dialling import WRONG_AUTHORITY, WRONG_NAME
from fed.wire.listening import STREAM_OPTIONS, Listening
from fed.wire.messages import one_line
from fed.wire.rate_limits import Allowance, Refusals, Unnamed

__all__ = ["Links", "written"]

_log = logging.getLogger(__name__)

_METHOD = "/fed.v1.Neighbours/Meet"
_MESSAGES_AT_ONCE = 2000
_MESSAGES_PER_S = 500
_MOST_LINKS = 10_000
_STALL_S = 30.0  # seconds that the other side may need to take a message, longer than silence: it may be a slow line
_PAUSE_S = 0.1  # seconds before the same peer is dialled again, doubled each time
_MOST_PAUSE_S = 2.0  # so short that a peer that is back misses no more than a round
_GRACE_S = 1.0  # seconds in which farewells and calls may end
_DIAL_OPTIONS = (
    *STREAM_OPTIONS,
    # A channel of its own for each attempt, so that no backoff of gRPC's delays the next one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


class Links:
    """Streams with all peers that this one speaks with.

    Args:
        greeting: first message to others, with this peer's name, start and address.
        listener: receiver of the others' messages and files.
        credentials: certificate and key of this peer; None: no encryption, and names are believed, on loopback alone.
        silence_s: seconds without a message after which a stream counts as lost, > 0.
        refusals: count and log of refused messages and peers.
        clock: clock of all waits.
    """

    def __init__(
        self,
        greeting: pb.Greeting,
        listener: Listener,
        credentials: PeerCredentials | None,
        silence_s: float,
        refusals: Refusals,
        clock: Clock,
    ) -> None:
        self._clock = clock
        self.greeting = greeting
        self._listener = listener
        self._credentials = credentials
        self._silence_s = silence_s
        self._refusals = refusals
        self._open: dict[str, list[Link]] = {}
        self._dialling: dict[str, asyncio.Task[None]] = {}
        self._pauses: dict[str, tuple[float, float]] = {}
        self._listening = Listening(clock)

    async def listen(self, address: str) -> int:
        """Listen for other peers; returns the port.

        Raises:
            InvalidInput: if nothing can listen there.
        """
        service, _, method = _METHOD[1:].partition("/")
        handlers: Any = {method: grpc.stream_stream_rpc_method_handler(self._meet)}
        handler = grpc.method_handlers_generic_handler(service, handlers)
        credentials_for = None if self._credentials is None else self._credentials.for_listening
        return await self._listening.begin(address, handler, credentials_for, who="this peer")

    def link(self, name: str) -> Link | None:
        """The newest stream with a peer."""
        links = [link for link in self._open.get(name, ()) if not link.is_introduction]
        return links[-1] if links else None

    def all(self) -> list[Link]:
        """The newest stream with each peer."""
        return [link for name in self._open if (link := self.link(name)) is not None]

    def dial(self, address: str, name: str | None = None) -> None:
        """Begin a stream, unless there is one, one is begun, or a pause is not over.

        Args:
            address: HOST:PORT.
            name: the name of the peer there; None: any peer, which is asked for the members that it knows.
        """
        key = name or address
        if key in self._dialling or (name is not None and self.link(name) is not None):
            return
        if self._clock.monotonic_s() < self._pauses.get(key, (0.0, 0.0))[0]:
            return
        # To dial a peer that is not admitted would only add lines to both logs.
        if name is not None and self._credentials is not None and self._credentials.refusals([name]):
            return
        self._dialling[key] = asyncio.create_task(self._dial(address, name, key))

    def end(self, name: str, reason: str) -> None:
        """End all streams with a peer.

        Args:
            name: the name of the peer.
            reason: the sentence for it.
        """
        for link in self._open.get(name, ()):
            link.end(reason)

    async def close(self, reason: str) -> None:
        """End all streams."""
        for links in self._open.values():
            for link in links:
                link.end(reason)
        dialled = list(self._dialling.values())
        if dialled:
            # Farewells are on their way.
            await asyncio.wait(dialled, timeout=_GRACE_S)
        for task in dialled:
            task.cancel()
        await asyncio.gather(*dialled, return_exceptions=True)
        await self._listening.end(_GRACE_S)

    async def _dial(self, address: str, name: str | None, key: str) -> None:
        began_s = self._clock.monotonic_s()
        try:
            await self._talk_to(address, name)
        except grpc.aio.AioRpcError as error:
            self._note_failure(address, error)
        except (TurnedAway, grpc.RpcError, InvalidInput) as error:
            self._refusals.note(name or Unnamed(address), str(error))
        finally:
            del self._dialling[key]
            now_s = self._clock.monotonic_s()
            # A stream that lasted was a success: pauses begin short again.
            lasted = now_s - began_s > self._silence_s
            pause_s = _PAUSE_S if lasted else self._pauses.get(key, (0.0, _PAUSE_S))[1]
            then_s = min(2 * pause_s, _MOST_PAUSE_S)
            # At random, so that peers do not dial each other in step.
            again_s = now_s + pause_s * (0.5 + random.random())
            self._pauses[key] = (again_s, then_s)

    async def _talk_to(self, address: str, name: str | None) -> None:
        if self._credentials is None:
            hold_to_loopback(address)
            channel = grpc.aio.insecure_channel(address, _DIAL_OPTIONS)
        else:
            host = ("grpc.ssl_target_name_override", PEER_HOST if name is None else peer_host(name))
            channel = grpc.aio.secure_channel(address, self._credentials.for_dialling(), (*_DIAL_OPTIONS, host))
        async with channel:
            call: Any = channel.stream_stream(_METHOD)()
            try:
                await self._converse(call.read, write=partial(written, call), name=name, address=address)
            finally:
                call.cancel()

    async def _meet(self, _: Any, context: Any) -> None:
        name: str | None = None
        certified: tuple[str, bytes] | None = None
        try:
            if self._credentials is not None:
                certified = peer_of(context)
                if certified is None:
                    raise TurnedAway(grpc.StatusCode.PERMISSION_DENIED, "a peer must show its certificate")
                name = certified[0]
                self._listening.newcomers.identify(context.peer())
            await self._converse(context.read, context.write, name, certified=certified)
        except TurnedAway as turned:
            self._refusals.note(name or Unnamed(context.peer()), turned.reason)
            await context.abort(turned.code, turned.reason)

    async def _converse(
        self,
        read: Read,
        write: Write,
        name: str | None,
        address: str = "",
        certified: tuple[str, bytes] | None = None,
    ) -> None:
        """One stream, from the greetings to its end.

        Args:
            read: function that gives the next message, as bytes.
            write: function that sends a message, as bytes.
            name: the name of the other side; None: not known yet.
            address: HOST:PORT that was dialled; empty: the other side has dialled.
            certified: name and certificate of the other side; None: it was dialled, or there are none.
        """
        is_introduction = bool(address) and name is None

        async def send(data: bytes) -> None:
            await within(_STALL_S, write(data))

        own = pb.Greeting(is_introduction=is_introduction)
        own.MergeFrom(self.greeting)
        await send(pb.PeerMessage(greeting=own).SerializeToString())
        first = await next_message(read, self._silence_s)
        if first is None or not first.HasField("greeting"):
            raise TurnedAway(grpc.StatusCode.INVALID_ARGUMENT, "a stream must begin with the peer's greeting")
        greeting = first.greeting
        if (greeting.name, greeting.start) == (own.name, own.start):
            # A list of introducers may be the same at all peers, and hold this one's address, too.
            self._listener.met_itself(address)
            return
        refusal = partial(self._refusal_now, greeting.name, certified)
        if (reason := refusal()) is not None:
            assert self._credentials is not None
            if content := self._credentials.revocations.latest().content:  # a revoked peer must hear of it
                await send(pb.PeerMessage(revocations=pb.Revocations(content=content)).SerializeToString())
            raise TurnedAway(grpc.StatusCode.PERMISSION_DENIED, reason)
        if (reason := self._refusal_of(greeting, name)) is not None:
            raise TurnedAway(grpc.StatusCode.PERMISSION_DENIED, reason)
        # a peer that was dialled by its address alone has proved no name: it is believed like hearsay
        is_hearsay = name is None and self._credentials is not None
        is_introduction = is_introduction or greeting.is_introduction
        link = Link(greeting, is_introduction=is_introduction, is_hearsay=is_hearsay)
        await self._attend(link, read, send, refusal)

    async def _attend(self, link: Link, read: Read, send: Write, refusal: Callable[[], str | None]) -> None:
        """Speak and listen on a stream until it ends.

        Args:
            link: the stream.
            read: function that gives the next message, as bytes.
            send: function that sends a message, as bytes.
            refusal: function that gives the reason why the other side is no longer admitted; None while it is.
        """
        terms = StreamTerms(
            silence_s=self._silence_s,
            allowance=Allowance(_MESSAGES_AT_ONCE, _MESSAGES_PER_S, self._clock),
            refusal=refusal,
            refusals=self._refusals,
        )
        # There may be several: both sides may dial at once, and neither knows which stream the other keeps.
        self._open.setdefault(link.name, []).append(link)
        self._listener.opened(link)
        try:
            problems = await converse(link.speak(send), link.listen(read, self._listener, terms))
        finally:
            self._open[link.name].remove(link)
            if not self._open[link.name]:
                del self._open[link.name]
            self._listener.closed(link)
        for problem in problems:
            if isinstance(problem, TurnedAway) and problem.code is grpc.StatusCode.DEADLINE_EXCEEDED:
                _log.debug("the stream with %r has ended: %s", link.name, problem.reason)
            elif isinstance(problem, TurnedAway):
                raise problem
            elif not isinstance(problem, grpc.RpcError):
                _log.warning("the stream with %r has failed: %s: %s", link.name, type(problem).__name__, problem)

    def _refusal_now(self, name: str, certified: tuple[str, bytes] | None) -> str | None:
        """The reason why the credentials refuse a peer; it may change while a stream stands."""
        if self._credentials is None:
            return None
        if certified is not None:
            certified_name, certificate_pem = certified
            reason = self._credentials.admits(certified_name, certificate_pem)
            if reason is not None:
                return reason
        return self._credentials.refusals([name]).get(name)

    def _refusal_of(self, greeting: pb.Greeting, name: str | None) -> str | None:
        if greeting.protocol != PROTOCOL:
            return f"peers must speak protocol {PROTOCOL}, got {greeting.protocol}: install the same version of fed"
        if not NODE_NAME.fullmatch(greeting.name):
            return "a peer's name must be up to 64 letters, digits, dots, hyphens and underscores"
        # others would refuse this peer's whole table for one later start in it
        if greeting.start > MOST_START:
            return f"a peer's start must be up to 2^62, got {greeting.start}"
        if name is not None and greeting.name != name:
            return f"it must be {name!r}, and says that it is {greeting.name!r}"
        if greeting.name == self.greeting.name:
            return "it has our own name: give each peer a name of its own"
        # Names are free without certificates, and each stream holds memory.
        if len(self._open) >= _MOST_LINKS:
            return f"this peer has streams with {_MOST_LINKS} others, and begins no more"
        return self._listener.refusal_of(greeting)

    def _note_failure(self, address: str, error: grpc.aio.AioRpcError) -> None:
        words = one_line(error.details() or "")
        if error.code() is grpc.StatusCode.PERMISSION_DENIED:
            self._refusals.note(Unnamed(address), f"it refuses this peer: {words}")
        elif any(part in words for part in (*WRONG_NAME, WRONG_AUTHORITY)):
            self._refusals.note(
                Unnamed(address), f"it is not the peer that was dialled, or of another authority: {words}"
            )
        else:
            # Peers come and go: a line for each attempt would fill the log.
            _log.debug("%s cannot be reached: %s", address, words)


async def written(call: Any, data: bytes) -> None:
    """Write to a call that this side has made.

    Raises:
        AioRpcError: if the call has failed, with the reason.
    """
    try:
        await call.write(data)
    except asyncio.InvalidStateError:  # gRPC's write does not tell why the call has ended, its read does
        await call.read()
