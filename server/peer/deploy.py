"""Run of one experiment at a real peer, among others that run the same, with the results that a simulation writes."""

import logging
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fed.aggregators.base import Aggregator
from fed.aggregators.peer_rule import PeerRule
from fed.clients.data import ClientId, FederatedData, load
from fed.clients.fingerprint import data_sha256
from fed.clients.node.own_data import samples_of
from fed.clients.setup import Preparation
from fed.clients.training.devices import device_of
from fed.clients.training.float32_products import note_without_tf32
from fed.config.experiment import Experiment
from fed.config.node_data import NodeData
from fed.errors import InvalidExperiment
from fed.server.evaluation import check_scored_by_both, say_without_scores
from fed.server.observer import Essential, Observer
from fed.server.peer.gossip_peer import GossipPeer
from fed.server.peer.real_peer import PeerParts, PeerSetup, RealPeer, messages_folder
from fed.server.peer.replica_peer import ReplicaPeer
from fed.server.resume import Parts, newest_checkpoint, run_fingerprint
from fed.server.telling import Observers
from fed.server.tracking import RunLabel, tracked
from fed.storage.run import Run
from fed.storage.run_folder import RunFolder
from fed.vectors.tensors import torch
from fed.wire.messages import client_id_of

__all__ = ["PeerSetup", "end_is_kept", "serve_end", "take_part"]

_log = logging.getLogger(__name__)


def take_part(
    experiment: Experiment,
    own: NodeData,
    setup: PeerSetup,
    *,
    output: str | Path,
    overwrite: bool = False,
    resume: bool = False,
    on_listen: Callable[[int | None], None] | None = None,
    observers: Iterable[Observer | Essential] = (),
) -> Run:
    """Run an experiment at one peer.

    Args:
        experiment: the experiment to run, the same at all peers.
        own: the data that this peer trains on.
        setup: addresses, credentials and waits of this peer.
        output: the run's folder.
        overwrite: True if a run that the folder holds is replaced.
        resume: True if the run that the folder holds continues, from its newest whole checkpoint.
        on_listen: function that is called with the port, or with None if this peer only dials.
        observers: listeners to the run's events (:mod:`fed.server.observer`), each in a thread of its own, so that a
            slow or failing one costs nothing; one that is wrapped as ``Essential`` is called in line.

    Returns:
        The run, with this peer's model.

    Raises:
        InvalidInput: if the experiment cannot run among peers, or nothing can listen there.
        RunFailed: if the run cannot go on.
    """
    output = Path(output)
    folder = RunFolder.existing(output) if resume else RunFolder(output, overwrite=overwrite)
    prepared = _prepared(experiment, own, client_id_of(setup.name))
    if prepared.casting:
        _log.info("%s", prepared.casting)
    if note := note_without_tf32(experiment.local, device_of(own.device)):
        _log.warning("local.precision %s: this client trains %s", experiment.local.precision, note)
    check_scored_by_both(experiment, has_test_set=prepared.recipe.test is not None)
    if prepared.held_out is None and prepared.recipe.test is None:
        say_without_scores()
    kind = _kind_of_peer(experiment, prepared)
    part = RunLabel(f"{experiment.name} {setup.name}", experiment.name, {"peer": setup.name})
    told = Observers(tracked(observers, experiment, output, part), setup.clock)
    fingerprint = run_fingerprint(experiment, prepared.layout, None)
    with folder.held():
        parts = Parts(prepared, data_sha256(prepared.data, prepared.held_out))
        kept = newest_checkpoint(fingerprint, folder, experiment.objects(), parts) if resume else None
        if not resume:
            # Messages and promises of an earlier run are not this one's.
            shutil.rmtree(messages_folder(output), ignore_errors=True)
        of_run = PeerParts(
            experiment=experiment,
            prepared=prepared,
            setup=setup,
            output=output,
            is_resumed=kept is not None,
            observers=told,
            device=device_of(own.device),
        )
        peer = kind(of_run)
        if kept is None:
            # Only now that the peer is made: its errors must not cost an earlier run in this folder.
            folder.begin(experiment, parts=parts.kept())
        # It resumes before it listens: others must find its promises and messages.
        peer.resume(kept)
        try:
            port = peer.listen()
            if on_listen is not None:
                on_listen(port)
            loop = peer.loop(fingerprint, folder)
            first = 1
            if kept is not None:
                last, state = kept
                loop.restore(last, state)
                first = last + 1
            count = peer.meet()
            there = "1 peer is" if count == 1 else f"{count} peers are"
            _log.info("%s there: round %d begins", there, first)
            run = loop.run()
        except BaseException:  # Ctrl-C too: the others must be told that this peer leaves
            peer.stop()
            raise
        peer.end()
    return run


def serve_end(
    experiment: Experiment,
    own: NodeData,
    setup: PeerSetup,
    *,
    output: Path,
    on_listen: Callable[[int | None], None] | None = None,
) -> None:
    """Serve the end of a finished run to members that had not come to it when this peer left.

    Args:
        experiment: the experiment that was run.
        own: the data that this peer trained on.
        setup: addresses, credentials and waits of this peer.
        output: the run's folder.
        on_listen: function that is called with the port, or with None if this peer only dials.

    Raises:
        InvalidInput: if nothing can listen there, or what was kept cannot be read.
    """
    folder = RunFolder.existing(output)
    prepared = _prepared(experiment, own, client_id_of(setup.name))
    kind = _kind_of_peer(experiment, prepared)
    with folder.held():
        parts = PeerParts(
            experiment=experiment,
            prepared=prepared,
            setup=setup,
            output=output,
            is_resumed=True,
            observers=Observers(clock=setup.clock),
            device=torch.device("cpu"),  # nothing is computed any more
        )
        peer = kind(parts)
        peer.resume_end()
        port = peer.listen()
        if on_listen is not None:
            on_listen(port)
        peer.serve_end()


def end_is_kept(output: Path) -> bool:
    """Tell whether members had not come to the end of a finished run when its peer left.

    Args:
        output: the run's folder.
    """
    return messages_folder(output).is_dir()


def _kind_of_peer(experiment: Experiment, prepared: Preparation) -> type[RealPeer[Any]]:
    """Kind of peer that the experiment's algorithm needs.

    Raises:
        InvalidExperiment: if no real peer can run it.
    """
    rule = prepared.algorithm
    if experiment.adversaries is not None:
        raise InvalidExperiment(
            f"fed peer needs adversaries null, for attackers are simulated, got {experiment.adversaries.kind}: set it "
            "to null, or simulate the experiment"
        )
    if isinstance(rule, Aggregator) and rule.is_replicated:
        return ReplicaPeer
    if not isinstance(rule, PeerRule) or (experiment.topology is None and rule.partners() is None):
        raise InvalidExperiment(
            f"fed peer needs an algorithm over mix, or allreduce, got {experiment.algorithm.kind}: choose one such as "
            "dpsgd, or coordinate the clients with fed server"
        )
    return GossipPeer


def _prepared(experiment: Experiment, own: NodeData, client: ClientId) -> Preparation:
    """Preparation of this peer, whose file may be where the other peers have none."""
    of_peer = own.experiment_of_node(experiment)
    if own.fixed is None:
        of_peer = of_peer.model_copy(update={"fixed": experiment.fixed})
    return Preparation(of_peer, _data(experiment, own, client))


def _data(experiment: Experiment, own: NodeData, client: ClientId) -> FederatedData:
    """Samples of this peer, beside the experiment's test set."""
    alone = samples_of(own, client, experiment.table)
    if experiment.data is None:
        return alone
    data = load(experiment.data, experiment.data_streams, experiment.table, is_for_server=True).with_test_set()
    return replace(alone, test=data.test, classes=data.number_of_classes())
