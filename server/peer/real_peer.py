"""Run of an experiment at a real peer, of whichever kind."""

import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fed.clients.data import ClientId, Pair
from fed.clients.measures import directions
from fed.clients.setup import Preparation
from fed.clients.training.executor import InProcess
from fed.clients.training.worker import Work
from fed.config.experiment import Experiment
from fed.identity.credentials import PeerCredentials
from fed.reports.population import described
from fed.server.confusion import confusion_of
from fed.server.evaluation import ScoringByClients, ScoringByCoordinator, scores_of_both
from fed.server.federation import Federation, State
from fed.server.peer.link import StreamPatience
from fed.server.peer.member_service import MemberService
from fed.server.peer.membership import Member, Timing
from fed.server.peer.service_thread import ServiceThread
from fed.server.resume import run_fingerprint
from fed.server.rounds.synchronous import Synchronous
from fed.server.training_loop import Scores, Scoring, TrainingLoop
from fed.storage.checkpoints import Tree
from fed.storage.run_folder import RunFolder
from fed.wire.rate_limits import Refusals

if TYPE_CHECKING:
    import networkx as nx

    from fed.tensors import nn

__all__ = ["PeerSetup", "RealPeer", "messages_folder"]

_Service = TypeVar("_Service", bound=MemberService)
_DEADLINE_S = 60.0  # where rounds have none
# sections of the experiment that peers must have in common
_AGREED = (
    *("seed", "data_seed", "model", "local", "algorithm", "topology", "rounds"),
    *("uplink", "error_feedback", "checkpoints"),
)


@dataclass(frozen=True, kw_only=True)
class PeerSetup:
    """Setup of a peer among others.

    Args:
        name: of its certificate, or where there is none what it is to be called.
        listen: HOST:PORT; port 0 takes a free one; None: it only dials.
        join: addresses of other peers.
        credentials: of the peer; None: no encryption, for loopback alone.
        advertise: HOST:PORT at which others reach it; as it listens unless given.
        min_peers: the number of peers to wait for before the first round.
    """

    name: str
    listen: str | None
    join: Sequence[str] = ()
    credentials: PeerCredentials | None = None
    advertise: str | None = None
    min_peers: int = 2


class RealPeer(ABC, Generic[_Service]):
    """Peer's part in a run.

    Attributes:
        thread: runs its service; a subclass makes both.

    Args:
        experiment: to run.
        prepared: its algorithm, first model and this peer's samples.
        client: that this peer is.
        setup: how it meets the others.
        output: the run's folder.
        is_resumed: the run goes on.
    """

    thread: ServiceThread[_Service]

    def __init__(
        self,
        experiment: Experiment,
        prepared: Preparation,
        client: ClientId,
        setup: PeerSetup,
        output: Path,
        *,
        is_resumed: bool,
    ) -> None:
        self.experiment, self.prepared, self.client, self.setup = experiment, prepared, client, setup
        self._output, self._is_resumed = output, is_resumed
        self.policy = experiment.rounds.make()
        if isinstance(self.policy, Synchronous):
            self.policy.check_peers(setup.min_peers)
        given_s = self.policy.deadline_s if isinstance(self.policy, Synchronous) else None
        self.deadline_s = given_s or _DEADLINE_S
        self.size = prepared.data.size_of(client)
        self.executor = InProcess(partial(Work, prepared.recipe))

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
        """Take up what is on disk, before the service listens.

        Args:
            kept: the newest checkpoint, with its round; None: the run begins.
        """

    def listen(self) -> int | None:
        """Begin to speak with others; returns the port.

        Raises:
            InvalidInput: if nothing can listen there.
        """
        return self.thread.listen(self.setup.listen, self.setup.advertise)

    @abstractmethod
    def meet(self) -> int:
        """Wait for the others; returns how many there are with this one."""

    def close(self, reason: str, *, lingers: bool) -> None:
        """Leave the others.

        Args:
            reason: to tell them.
            lingers: once they need this peer no more, or after a deadline.
        """
        if lingers:
            self.thread.call(self.service.begin, self.service.round + 1, self.service.round)
        self.thread.close(reason, self.deadline_s if lingers else 0.0)

    def service_arguments(self, *, is_ready: bool, gone_after_s: float) -> dict[str, Any]:
        """Arguments of any :class:`fed.server.peer.member_service.MemberService`.

        Args:
            is_ready: the peer takes part in rounds from the beginning.
            gone_after_s: seconds of silence after which another is gone.
        """
        return {
            "own": Member(self.setup.name, "", time.time_ns(), samples=self.size, is_ready=is_ready),
            "experiment": _hash(run_fingerprint(self.experiment, self.prepared.layout, None)),
            "introducers": tuple(self.setup.join),
            "folder": messages_folder(self._output),
            "credentials": self.setup.credentials,
            "timing": Timing(suspect_after_s=min(2.5, gone_after_s), gone_after_s=gone_after_s),
            "patience": StreamPatience(silence_s=max(2.5, min(10.0, self.deadline_s / 2))),
            "refusals": Refusals(),
            "rounds": self.policy.count,
        }

    def loop(
        self,
        fingerprint: Mapping[str, Any],
        folder: RunFolder,
        after_round: Callable[[Mapping[str, Any]], None] | None,
    ) -> TrainingLoop:
        """The training loop of this peer.

        Args:
            fingerprint: that its checkpoints belong to.
            folder: of the run.
            after_round: called after each round with its line of the metrics.
        """
        prepared, held_out = self.prepared, self.prepared.held_out

        def by_clients(held_out: Mapping[ClientId, Pair]) -> Scoring:
            return ScoringByClients(held_out, prepared.metrics, self.federation, self.executor).scores

        def begin_scoring(is_last: bool) -> Scoring:
            if self.is_behind:
                return lambda: Scores({f"test_{name}": None for name in ("accuracy", "loss", *prepared.metrics)})
            if held_out and prepared.recipe.test is None:
                return by_clients(held_out)
            on_test = ScoringByCoordinator(prepared.recipe, self.federation, self.executor, only_own=True).scores
            if not held_out:
                return on_test
            on_own = by_clients(held_out)
            return lambda: scores_of_both(on_test(), on_own())

        def load_module(state: State) -> "nn.Module":
            prepared.layout.unpack(*state, prepared.module)
            return prepared.module.eval()

        return TrainingLoop(
            self.experiment,
            self.federation,
            begin_scoring=begin_scoring,
            has_scores=bool(held_out) or prepared.recipe.test is not None,
            scores_meanwhile=False,
            keeps_metrics=False,
            load_module=load_module,
            metrics=directions(prepared.metrics),
            facts=lambda: {
                "peer": self.service.own.name,
                "clients": len(self.service.standing().present),
                "parameters": prepared.layout.parameters,
                "refused": self.service.refusals.count,
            },
            confusion=lambda state: confusion_of(prepared.recipe, state, self.executor, prepared.data.names.labels),
            population=lambda confusion: described(None, self.graph(), confusion),
            fingerprint=fingerprint,
            folder=folder,
            after_round=after_round,
        )


def messages_folder(output: Path) -> Path:
    """Folder of what a peer must not lose between rounds, beside that of its run."""
    return output.with_name(f".{output.name}.messages")


def _hash(fingerprint: Mapping[str, Any]) -> str:
    """Hash of what peers must agree on."""
    keys = fingerprint["experiment"]
    agreed = {**{key: keys[key] for key in _AGREED}, "shapes": fingerprint["shapes"]}
    return hashlib.sha256(json.dumps(agreed, sort_keys=True).encode()).hexdigest()
