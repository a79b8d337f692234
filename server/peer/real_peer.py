"""Run of an experiment at a real peer: the part that all kinds of peers share."""

import hashlib
import json
import logging
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fed.clients.data import ClientId, Held
from fed.clients.setup import Preparation
from fed.clients.training.executor import InProcess
from fed.clients.training.worker import Work
from fed.config.experiment import Experiment
from fed.errors import FedError, RunFailed, os_errors_as
from fed.identity.credentials import PeerCredentials
from fed.processes.clock import SYSTEM_CLOCK, Clock
from fed.server.assembly import assembled
from fed.server.evaluation import ScoringByClients, ScoringByCoordinator, scores_of_both
from fed.server.federation import Federation
from fed.server.peer.members.end_file import EndFile
from fed.server.peer.members.member import Member
from fed.server.peer.members.member_service import MemberService
from fed.server.peer.members.membership import Timing
from fed.server.peer.members.service_thread import ServiceThread
from fed.server.resume import run_fingerprint
from fed.server.rounds.synchronous import Synchronous
from fed.server.telling import Observers
from fed.server.training_loop import Scores, Scoring, TrainingLoop
from fed.storage.checkpoints import Tree
from fed.storage.run_folder import RunFolder
from fed.vectors.tensors import Tensor, torch
from fed.wire.messages import client_id_of, client_order
from fed.wire.payloads import described
from fed.wire.rate_limits import Refusals

if TYPE_CHECKING:
    import networkx as nx


__all__ = ["PeerParts", "PeerSetup", "RealPeer", "messages_folder"]

_log = logging.getLogger(__name__)
_Service = TypeVar("_Service", bound=MemberService)
_DEADLINE_S = 60.0  # deadline of rounds whose section has none
_LOOKS_EVERY_S = 0.05
_SAID_AFTER_S = 2.0  # a shorter wait is not worth a line of the log

# Sections of the experiment that peers must have in common.
_AGREED = (
    *("seed", "data_seed", "model", "local", "algorithm", "topology", "rounds"),
    *("uplink", "error_feedback", "checkpoints"),
)


@dataclass(frozen=True, kw_only=True)
class PeerSetup:
    """Setup of a peer among others.

    Args:
        name: the name in the peer's certificate, or any node's name where there is no certificate.
        listen: HOST:PORT to listen on; port 0 takes a free one; None: the peer only dials.
        join: addresses of other peers, HOST:PORT each.
        credentials: certificate and key of the peer; None: no encryption, on loopback alone.
        advertise: HOST:PORT at which others reach the peer; None: the address that it listens on.
        min_peers: the number of peers to wait for before the first round, this one among them.
        patience_s: seconds to wait for others without whom this peer cannot go on, > 0.
        serves_end_s: seconds for which a peer that has ended its rounds stays there for members that have not, >= 0.
        clock: clock of all waits.
    """

    name: str
    listen: str | None
    join: Sequence[str] = ()
    credentials: PeerCredentials | None = None
    advertise: str | None = None
    min_peers: int = 2
    patience_s: float = 3600.0
    serves_end_s: float = 60.0
    clock: Clock = SYSTEM_CLOCK


@dataclass(frozen=True, kw_only=True)
class PeerParts:
    """Parts of a peer's run, whatever its kind.

    Args:
        experiment: the experiment to run.
        prepared: algorithm and first model of the experiment, and this peer's samples.
        setup: addresses, credentials and waits of this peer.
        output: the run's folder.
        is_resumed: True if the run goes on from a checkpoint, or its end is served again.
        observers: listeners to the run's events.
        device: device that computes.
    """

    experiment: Experiment
    prepared: Preparation
    setup: PeerSetup
    output: Path
    is_resumed: bool
    observers: Observers
    device: "torch.device"


class RealPeer(ABC, Generic[_Service]):
    """Peer's part in a run.

    Attributes:
        thread: event loop of the peer's service; a subclass makes both.

    Args:
        parts: the run, and this peer among others.
    """

    thread: ServiceThread[_Service]

    def __init__(self, parts: PeerParts) -> None:
        self.experiment = parts.experiment
        self.prepared = parts.prepared
        self.setup = parts.setup
        self.observers = parts.observers
        self._is_resumed = parts.is_resumed
        self._folder = messages_folder(parts.output)
        self._end_file = EndFile.read(self._folder)
        self.policy = parts.experiment.rounds.make()
        if isinstance(self.policy, Synchronous):
            self.policy.check_peers(parts.setup.min_peers)
        given_s = self.policy.deadline_s if isinstance(self.policy, Synchronous) else None
        # Without a deadline a neighbour that is cut off would hold its neighbours for ever.
        self.deadline_s = given_s or _DEADLINE_S
        self.size = parts.prepared.data.size_of(client_id_of(parts.setup.name))
        self.executor = InProcess(partial(Work, parts.prepared.recipe), [parts.device])

    @property
    def service(self) -> _Service:
        """Service of this peer."""
        return self.thread.service

    @property
    @abstractmethod
    def federation(self) -> Federation:
        """Federation, as this peer sees it."""

    @property
    @abstractmethod
    def is_behind(self) -> bool:
        """True while rounds pass in which this peer takes no part."""

    def graph(self) -> "nx.Graph[str] | None":
        """Graph of this peer's neighbours for the report; None: it has none."""
        return None

    @abstractmethod
    def resume(self, kept: tuple[int, Tree] | None) -> None:
        """Take up the peer's state on disk, before the service listens.

        Args:
            kept: the newest checkpoint, with its round; None: the run begins.
        """

    def listen(self) -> int | None:
        """Begin to speak with others; returns the port.

        Raises:
            InvalidInput: if nothing can listen there.
        """
        return self.thread.wait_for(self.service.start(self.setup.listen, self.setup.advertise))

    @abstractmethod
    def meet(self) -> int:
        """Wait for the others; returns how many there are with this one."""

    def keep_end(self) -> None:
        """Keep on disk the state that members need which come late to the end of the run.

        Raises:
            CheckpointFailed: if it cannot be written.
        """

    def stop(self) -> None:
        """Leave the others, before the run is over."""
        self.thread.close("this peer stops for now")

    def end(self) -> None:
        """Leave the others after the last round, once all members have ended it, or have not come for a while.

        If some have not come, the end is kept on disk, so that this peer can serve it again.
        """
        self.thread.call(self.service.end, self.policy.count)
        earlier = self.thread.call(self.service.earlier_members)
        if self.thread.call(self.service.awaited, earlier):
            self._keep(self.keep_end)
        self._serve_end(earlier)

    def serve_end(self) -> None:
        """Serve the end again, after :meth:`resume_end` and :meth:`listen`."""
        self._serve_end(self._end_file.awaited)

    @abstractmethod
    def resume_end(self) -> None:
        """Take up the end of a run that is over from disk, before the service listens.

        Raises:
            InvalidCheckpoint: if it is not there.
        """

    def _end_again(self) -> None:
        """Say from the beginning that this peer has ended, and who else has."""
        self.thread.call(self.service.members.remember, self._end_file.ended)
        self.thread.call(self.service.end, self.policy.count)

    def _serve_end(self, earlier: Collection[str]) -> None:
        """Stay there for members that have not ended the run.

        Args:
            earlier: the names of members from before this process began, which it may not have heard yet.
        """
        # Before the wait, too, in which this process may be killed.
        self._keep_names(earlier)
        missing = self._await_end(earlier)
        # Peers that have come meanwhile need not be waited for at the next start.
        if missing:
            self._keep_names(earlier)
        self.thread.close("the run is over")
        if missing:
            _log.warning(
                "%s did not come to the end of the run: fed peer --resume with this run's folder serves it once more",
                _listed(missing),
            )
        else:
            # All have come to the end: nobody will ask for these files again.
            shutil.rmtree(self.service.folder, ignore_errors=True)

    def _keep_names(self, earlier: Collection[str]) -> None:
        """Write down the names of members that have ended the run, and of those that have not."""
        awaited = self.thread.call(self.service.awaited, earlier)
        ended = self.thread.call(self.service.members.ended)
        self._keep(lambda: EndFile(sorted(awaited), ended).write(self.service.folder))

    def _keep(self, write: Callable[[], None]) -> None:
        """Write a file that late members need. Failure is only logged: the run's own results are safe already."""
        try:
            with os_errors_as(RunFailed, f"{self.service.folder} cannot be written to", "make room there"):
                write()
        except FedError as error:
            _log.warning("this peer cannot serve the end of the run to members that come late: %s", error)

    def _await_end(self, earlier: Collection[str]) -> frozenset[str]:
        """Wait until all members have ended; returns those that have not."""
        # Members are at most a deadline behind; 0 is the user's wish not to wait.
        limit_s = max(self.deadline_s, self.setup.serves_end_s) if self.setup.serves_end_s else 0.0
        began_s = self.setup.clock.monotonic_s()
        is_said = False
        try:
            while missing := self.thread.call(self.service.awaited, earlier):
                waited_s = self.setup.clock.monotonic_s() - began_s
                if waited_s >= limit_s:
                    return missing
                if waited_s > _SAID_AFTER_S and not is_said:
                    is_said = True
                    left_s = limit_s - waited_s
                    _log.info("the run is over; this peer stays for %s, for up to %.0f s", _listed(missing), left_s)
                self.setup.clock.wait(_LOOKS_EVERY_S)
        except KeyboardInterrupt:  # the results are written: only the wait is cut short
            return missing
        return frozenset()

    def service_arguments(self, *, is_ready: bool, gone_after_s: float) -> dict[str, Any]:
        """Arguments of any :class:`fed.server.peer.members.member_service.MemberService`.

        Args:
            is_ready: True if the peer takes part in rounds from the beginning.
            gone_after_s: seconds of silence after which another is gone, > 0.
        """
        own = Member(
            self.setup.name,
            address="",  # known once the service listens
            start=self.setup.clock.wall_ns(),
            samples=self.size,
            is_ready=is_ready,
        )
        return {
            "own": own,
            "experiment": _hash(
                run_fingerprint(self.experiment, self.prepared.layout, None), self.prepared.fixed_part()
            ),
            "introducers": tuple(self.setup.join),
            "folder": self._folder,
            "credentials": self.setup.credentials,
            # A peer that is silent for a whole deadline has missed a round anyway.
            "timing": Timing(suspect_after_s=min(2.5, gone_after_s), gone_after_s=gone_after_s),
            # A dead stream is found before the deadline, in time to dial again.
            "silence_s": max(2.5, min(10.0, self.deadline_s / 2)),
            "refusals": Refusals(self.setup.clock),
            "clock": self.setup.clock,
            "rounds": self.policy.count,
            "patience_s": self.setup.patience_s,
        }

    def loop(self, fingerprint: Mapping[str, Any], folder: RunFolder) -> TrainingLoop:
        """The training loop of this peer.

        Args:
            fingerprint: settings and shapes that the run's checkpoints must belong to.
            folder: the run's folder.
        """
        prepared = self.prepared
        held_out = prepared.held_out

        def by_clients(held_out: Mapping[ClientId, Held]) -> Scoring:
            return ScoringByClients(held_out, prepared.metrics, self.federation, self.executor).scores

        def begin_scoring(number: int, is_last: bool) -> Scoring:
            if self.is_behind:
                return lambda: Scores({f"test_{name}": None for name in ("accuracy", "loss", *prepared.metrics)})
            if held_out and prepared.recipe.test is None:
                return by_clients(held_out)
            # A peer that mixes has a model of its own alone: there is no global one to score.
            on_test = ScoringByCoordinator(prepared.recipe, self.federation, self.executor, only_own=True).scores
            if not held_out:
                return on_test
            on_own = by_clients(held_out)
            return lambda: scores_of_both(on_test(), on_own())

        return assembled(
            self.experiment,
            prepared,
            self.federation,
            self.executor,
            begin_scoring=begin_scoring,
            is_scored_by_clients=bool(held_out),
            facts=lambda: {
                "peer": self.service.own.name,
                "clients": len(self.service.standing().present),
                "parameters": prepared.layout.parameters,
                "refused": self.service.refusals.count,
            },
            fingerprint=fingerprint,
            clock=self.setup.clock,
            observers=self.observers,
            folder=folder,
            graph=self.graph,
        )


def messages_folder(output: Path) -> Path:
    """Folder of the files that a peer must not lose between rounds, beside the folder of its run."""
    return output.with_name(f".{output.name}.messages")


def _listed(names: Collection[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names, key=client_order))


def _hash(fingerprint: Mapping[str, Any], fixed_part: Sequence[Tensor]) -> str:
    """Hash of the settings, the shapes and the fixed part of the model that all peers must share."""
    keys = fingerprint["experiment"]
    agreed = {**{key: keys[key] for key in _AGREED}, "shapes": fingerprint["shapes"]}
    # a peer of an older version leaves out keys that it does not know: where they are unused, the hashes agree
    if keys["stages"] is not None:
        agreed["stages"] = keys["stages"]
    if keys["model"] is not None and keys["model"]["train"] is None:
        agreed["model"] = {key: value for key, value in keys["model"].items() if key != "train"}
    if fixed_part:
        agreed["fixed_part"] = described(fixed_part).sha256
    return hashlib.sha256(json.dumps(agreed, sort_keys=True).encode()).hexdigest()
