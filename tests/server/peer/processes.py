"""Real peers, each a process of its own that can be killed, frozen and started again."""

import ctypes
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from fed.config.experiment import Experiment
from fed.config.node_data import NodeData
from fed.errors import FedError
from fed.identity.credentials import PeerCredentials
from fed.server.peer.deploy import PeerSetup, serve_end, take_part
from fed.storage.run_reader import metrics_lines
from tests.programs import FORKS
from tests.server.deployed import free_port

__all__ = ["PATIENCE_S", "Home", "Processes", "processes"]

PATIENCE_S = 120.0


class Home(NamedTuple):
    """Where a peer lives: its address, its network namespace and its keys, if it has some."""

    host: str = "127.0.0.1"
    namespace: str = ""
    keys: Path | None = None


class Processes:
    """Peers of one experiment, named by the clients of its data."""

    def __init__(
        self, folder: Path, keys: Mapping[str, Any], homes: Sequence[Home], min_peers: int | None, **setup: Any
    ) -> None:
        self.setup = {"serves_end_s": 2.0, **setup}
        self.folder, self.keys, self.min_peers = folder, dict(keys), min_peers or len(homes)
        self.homes = homes
        self.addresses = [f"{home.host}:{free_port()}" for home in homes]
        self.running: dict[int, Any] = {}

    def start(self, *peers: int, resume: bool = False, listens: bool = True, overwrite: bool = False) -> None:
        for peer in peers:
            setup = {
                "name": str(peer),
                "listen": self.addresses[peer] if listens else None,
                "join": self.addresses,
                "min_peers": self.min_peers,
                **self.setup,
            }
            arguments = self.folder, self.keys, peer, self.homes[peer], setup, resume, overwrite
            self.running[peer] = FORKS.Process(target=_take_part, args=arguments, daemon=True)
            self.running[peer].start()

    def serve_end(self, peer: int) -> None:
        setup = {"name": str(peer), "listen": self.addresses[peer], "join": self.addresses, **self.setup}
        arguments = self.folder, self.keys, peer, self.homes[peer], setup
        self.running[peer] = FORKS.Process(target=_serve_end, args=arguments, daemon=True)
        self.running[peer].start()

    def await_failure(self, peer: int) -> None:
        """Wait until a peer has ended with an error, which its log has, and forget its process."""
        self.await_that(lambda: self.running[peer].exitcode is not None)
        assert self.running.pop(peer).exitcode == 1, self.said()

    def has_ended(self, peer: int) -> bool:
        return (self.output(peer) / "summary.json").exists()

    def summary(self, peer: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.output(peer) / "summary.json").read_text())
        return found

    def kill(self, *peers: int) -> None:
        for peer in peers:
            self.running[peer].kill()
        for peer in peers:
            self.running.pop(peer).join()

    def signal(self, peer: int, number: signal.Signals) -> None:
        os.kill(self.running[peer].pid, number)

    def lines(self, peer: int) -> list[dict[str, Any]]:
        return [line for line, _ in metrics_lines(self.output(peer))]

    def await_round(self, number: int, *peers: int) -> None:
        self.await_that(lambda: all(len(self.lines(peer)) >= number for peer in peers or self.running))

    def await_that(self, condition: Callable[[], bool], limit_s: float = PATIENCE_S) -> None:
        until_s = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < until_s, self.said()
            time.sleep(0.02)

    def await_end(self) -> None:
        running = self.running.values()
        self.await_that(lambda: any(one.exitcode for one in running) or all(one.exitcode == 0 for one in running))
        assert {peer: process.exitcode for peer, process in self.running.items()} == dict.fromkeys(self.running, 0), (
            self.said()
        )

    def log(self, peer: int) -> str:
        return (self.folder / f"log-{peer}").read_text()

    def said(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()}" for path in sorted(self.folder.glob("log-*")))

    def models(self) -> dict[int, dict[str, Tensor]]:
        return {peer: load_file(self.output(peer) / "model.safetensors") for peer in self.running}

    def assert_equal_models(self) -> None:
        first, *others = self.models().values()
        for other in others:
            assert all(torch.equal(first[name], other[name]) for name in first), self.said()

    def longest_round_s(self, peer: int) -> float:
        ends_s = [line["wall_s"] for line in self.lines(peer)]
        return float(max(later - earlier for earlier, later in pairwise(ends_s)))

    def output(self, peer: int) -> Path:
        return self.folder / f"peer-{peer}"


@contextmanager
def processes(
    folder: Path,
    keys: Mapping[str, Any],
    peers: int | Sequence[Home],
    min_peers: int | None = None,
    **setup: Any,
) -> Iterator[Processes]:
    """Peers that are killed at the end, whatever happens."""
    homes = [Home()] * peers if isinstance(peers, int) else peers
    made = Processes(folder, keys, homes, min_peers, **setup)
    try:
        yield made
    finally:
        made.kill(*made.running)


def _take_part(
    folder: Path,
    keys: Mapping[str, Any],
    peer: int,
    home: Home,
    setup: Mapping[str, Any],
    resume: bool,
    overwrite: bool,
) -> None:
    experiment, own, place, say = _begun(folder, keys, peer, home, setup)
    output = folder / f"peer-{peer}"
    try:
        take_part(
            experiment,
            own,
            place,
            output=output,
            overwrite=overwrite,
            resume=resume,
            on_listen=lambda port: say.info("listening"),
        )
    except FedError:
        say.exception("this peer has failed")
        raise


def _serve_end(folder: Path, keys: Mapping[str, Any], peer: int, home: Home, setup: Mapping[str, Any]) -> None:
    experiment, own, place, _ = _begun(folder, keys, peer, home, setup)
    serve_end(experiment, own, place, output=folder / f"peer-{peer}")


def _begun(
    folder: Path, keys: Mapping[str, Any], peer: int, home: Home, setup: Mapping[str, Any]
) -> tuple[Experiment, NodeData, PeerSetup, logging.Logger]:
    logging.basicConfig(filename=folder / f"log-{peer}", level=logging.INFO, format="%(created)f %(message)s")
    logging.getLogger("fed").setLevel(logging.DEBUG)
    torch.set_num_threads(1)
    if home.namespace:
        with Path(f"/var/run/netns/{home.namespace}").open() as file:
            assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) == 0
    experiment = Experiment(**keys)
    assert experiment.data is not None
    own = NodeData.model_validate({"data": experiment.data.model_dump(exclude_unset=True), "client": peer})
    credentials = PeerCredentials.load(home.keys / "nodes" / str(peer)) if home.keys else None
    return experiment, own, PeerSetup(**setup, credentials=credentials), logging.getLogger(__name__)
