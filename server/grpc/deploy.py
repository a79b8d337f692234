"""Server of an experiment over nodes that dial in, with the results that a simulation of it writes."""

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from fed.clients.node.plans import code_of_nodes, schema_text
from fed.config.experiment import Experiment
from fed.processes.clock import SYSTEM_CLOCK, Clock
from fed.protocol.protocol_pb2 import Joining
from fed.server.grpc.deployment import Deployment
from fed.server.grpc.fleet import NodeFleet
from fed.server.grpc.service import Patience
from fed.server.observer import Essential, Observer
from fed.server.telling import Observers
from fed.server.tracking import tracked
from fed.storage.run import Run
from fed.storage.run_folder import RunFolder
from fed.storage.run_reader import summary_of
from fed.wire.dialling import DialPatience

if TYPE_CHECKING:
    from fed.identity.credentials import ServerCredentials

__all__ = ["dismiss_nodes", "serve"]

_OVER = "the run is over"
_DIALLED_WITHIN_S = 1.6 * DialPatience().most_backoff_s  # a node's longest pause is 1.5 times that


def serve(
    experiment: Experiment,
    *,
    listen: str,
    output: str | Path,
    credentials: "ServerCredentials | None" = None,
    min_nodes: int = 1,
    overwrite: bool = False,
    resume: bool = False,
    patience: Patience | None = None,
    clock: Clock = SYSTEM_CLOCK,
    device: str = "auto",
    on_listen: Callable[[int], None] | None = None,
    observers: Iterable[Observer | Essential] = (),
) -> Run:
    """Coordinate an experiment over nodes that dial in.

    Args:
        experiment: experiment to run. Its data give the test set and the model's inputs. Where they are null, the first
            node to join gives the inputs, and only clients can score models.
        listen: address, HOST:PORT; port 0 takes a free one.
        output: folder of the run.
        credentials: credentials of the server; None: no encryption, on loopback only.
        min_nodes: number of nodes to wait for before the first round, and after a resumption.
        overwrite: True to replace a run that the folder holds.
        resume: True to continue the run that the folder holds, from its newest whole checkpoint.
        patience: time limits; None: the usual ones.
        clock: time, by which it waits.
        device: name of the server's device, which scores models: auto, cpu, cuda, a GPU such as cuda:1, or mps.
        on_listen: function that is called with the port once the server listens.
        observers: listeners to the run's events (:mod:`fed.server.observer`), each in a thread of its own, so that a
            slow or failing one costs nothing; one that is wrapped as ``Essential`` is called in line.

    Returns:
        The run.

    Raises:
        InvalidInput: if the experiment cannot be deployed, or nothing can listen there.
        RunFailed: if the run cannot go on.
    """
    output = Path(output)
    folder = RunFolder.existing(output) if resume else RunFolder(output, overwrite=overwrite)
    deployment = Deployment(experiment, credentials.identities if credentials else None, device=device)
    told = Observers(tracked(observers, experiment, output), clock)
    authority_pem = credentials.authority_pem if credentials else None
    with folder.held(), deployment.keeping_ledger(folder, authority_pem, resume=resume):
        fleet = NodeFleet(
            listen,
            folder.spool,
            credentials=credentials,
            accepts=deployment.accepts,
            schema=schema_text(experiment),
            code=code_of_nodes(experiment),
            clock=clock,
            patience=patience,
        )
        try:
            if on_listen is not None:
                on_listen(fleet.port)
            run = deployment.run(fleet, min_nodes, folder, resume=resume, observers=told)
        except BaseException:  # Ctrl-C too: nodes are told to dial again
            fleet.close("the server stops for now", is_final=False)
            raise
        fleet.close(_OVER, is_final=True)
    return run


def dismiss_nodes(output: Path, *, listen: str, credentials: "ServerCredentials | None" = None) -> None:
    """Tell nodes that dial that a finished run is over, until all of its nodes have heard it, or for 24 s.

    For a run whose server was killed before it had told them: they dial again and again, with 22.5 s between two
    attempts at most.

    Args:
        output: folder of the run.
        listen: address, HOST:PORT.
        credentials: credentials of the server; None: no encryption, on loopback only.

    Raises:
        InvalidInput: if nothing can listen there.
    """
    folder = RunFolder.existing(output)
    nodes = (summary_of(output) or {}).get("clients", 0)
    told: list[str] = []
    are_told = threading.Event()

    def refuse(joining: Joining) -> str:
        told.append(joining.name)
        # Calls are counted, not names: a node that was told does not dial again.
        if len(told) >= nodes:
            are_told.set()
        return _OVER

    with folder.held():
        fleet = NodeFleet(
            listen, folder.spool, credentials=credentials, accepts=refuse, clock=SYSTEM_CLOCK, is_over=True
        )
        try:
            SYSTEM_CLOCK.wait(_DIALLED_WITHIN_S, are_told)
        finally:
            fleet.close(_OVER, is_final=True)
