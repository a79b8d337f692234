"""Real peer that is a replica of the coordinator, with an equal share in its work."""

from dataclasses import replace
from functools import partial

from fed.aggregators.base import Aggregator
from fed.clients.training.executor import InProcess
from fed.clients.training.worker import Work
from fed.errors import InvalidCheckpoint, InvalidExperiment
from fed.server.peer.members.service_thread import ServiceThread
from fed.server.peer.real_peer import PeerParts, RealPeer
from fed.server.peer.replica.ballots import BallotTiming
from fed.server.peer.replica.replica import Replicated, ReplicatedFleet
from fed.server.peer.replica.replica_service import ReplicaService
from fed.storage.checkpoints import Tree
from fed.vectors.reduction import PACKED_BYTES

__all__ = ["ReplicaPeer"]

_SLOWEST_BYTES_PER_S = 1e5  # rate of the slowest link of a ring that still ends in time
_KEPT = 8  # least number of rounds whose sums stay on disk for members that are behind


class ReplicaPeer(RealPeer[ReplicaService]):
    """Peer of a rule over ``mean`` without a coordinator."""

    def __init__(self, parts: PeerParts) -> None:
        super().__init__(parts)
        experiment = parts.experiment
        prepared = parts.prepared
        assert isinstance(prepared.algorithm, Aggregator)
        if prepared.algorithm.needs_fixed_members:
            raise InvalidExperiment(
                "fed peer cannot run a rule that numbers its clients, for real peers come and go, got "
                f"{type(prepared.algorithm).__name__}: choose a rule such as fedavg, or simulate the experiment"
            )
        message = prepared.message_format(parts.setup.min_peers)
        recipe = replace(prepared.recipe, way_out=prepared.way_out(message))
        # In place of the base's: only now is the format known, and with it the way out.
        self.executor = InProcess(partial(Work, recipe), [parts.device])
        numbers = sum(message.summed_sizes)
        # Well within a deadline, so that a round outlives its proposer.
        takeover_s = min(1.0, self.deadline_s / 2)
        ballots = BallotTiming(
            resend_s=0.3 * takeover_s,
            takeover_s=takeover_s,
            ballot_s=max(self.deadline_s, 2 * PACKED_BYTES * numbers / _SLOWEST_BYTES_PER_S),
            deadline_s=self.deadline_s,
            # A peer that resumes needs the sums since its last checkpoint.
            kept=max(_KEPT, 1 + (experiment.checkpoints.every or 0)),
        )
        service = ReplicaService(
            **self.service_arguments(is_ready=True, gone_after_s=self.deadline_s),
            message=message,
            ballots=ballots,
            min_peers=parts.setup.min_peers,
            snapshot=lambda: self._replicated.snapshot,
        )
        self.thread = ServiceThread(service)
        states = prepared.client_states(message)
        fleet = ReplicatedFleet(
            self.thread,
            size=self.size,
            states=states,
            executor=self.executor,
            numbers=numbers,
            observers=self.observers,
        )
        self._replicated = Replicated(
            experiment, prepared, self.policy, fleet, message, states, observers=self.observers
        )

    @property
    def federation(self) -> Replicated:
        """The replica of the coordinator, and its clients."""
        return self._replicated

    @property
    def is_behind(self) -> bool:
        """True while rounds pass in which this peer takes no part."""
        return self._replicated.is_behind

    def resume(self, kept: tuple[int, Tree] | None) -> None:
        """Take up this replica's promises, and the sums that are on disk."""
        self.thread.call(self.service.restore, 0 if kept is None else kept[0])
        if kept is not None and not self.service.has_record:
            raise InvalidCheckpoint(
                f"{self.service.folder} must hold this peer's promises to the others, got none: bring the folder back, "
                "or let the peer join anew, under another name and with another --output"
            )

    def keep_end(self) -> None:
        """Keep this replica's state on disk.

        Raises:
            CheckpointFailed: if it cannot be written.
        """
        assert self._replicated.snapshot is not None
        self.service.keep_end(self._replicated.snapshot)

    def resume_end(self) -> None:
        """Take up this replica's record and its state after the last round.

        Raises:
            InvalidCheckpoint: if they are not there.
        """
        self.thread.call(self.service.restore, self.policy.count)
        copy = self.thread.call(self.service.kept_copy)
        if copy is None or copy.round != self.policy.count or not self.service.has_record:
            raise InvalidCheckpoint(
                f"{self.service.folder} must hold the end of the run, got none: let another member serve it"
            )
        self._replicated.snapshot = copy
        self._end_again()

    def meet(self) -> int:
        """Wait until there is a group, which this peer founds with others or joins."""
        self._replicated.begin_with(self.thread.wait_for(self.service.founded()))
        self._replicated.take_over_if_later(self.thread.call(self.service.kept_copy))
        return len(self.thread.call(self.service.standing).present)
