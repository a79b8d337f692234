"""Real nodes for a hostile coordinator: processes ``fed client --secure`` over mutual TLS, with samples of a test."""

import contextlib
import os
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fed.clients.data import Pair
from fed.config import yaml
from tests.programs import started
from tests.server.deployed import Program
from tests.server.hostile.coordinator import HostileCoordinator

__all__ = ["CLASSES", "COHORT", "FEATURES", "GUEST", "Field", "samples_of"]

FEATURES = 4
CLASSES = 3
COHORT = ("0", "1", "2")
"""Names of the nodes of a session: as few as a sum may be of."""
GUEST = "3"
"""Name of a node that a test starts, and ends, itself."""


def samples_of(client: int, count: int = 8) -> Pair:
    """A client's samples: inputs [E, FEATURES] and labels below CLASSES, of which each occurs."""
    generator = np.random.default_rng([17, client])
    inputs = generator.normal(size=(count, FEATURES)).astype(np.float32)
    labels = generator.permutation(np.arange(count) % CLASSES)
    return torch.from_numpy(inputs), torch.from_numpy(labels)


@dataclass
class Field:
    """A hostile coordinator, and the processes of nodes that dial it.

    Args:
        folder: the folder of all files.
        names: the nodes' names.
    """

    folder: Path
    names: Sequence[str] = (*COHORT, GUEST)
    programs: list[Program] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.coordinator = HostileCoordinator(self.folder, self.names)

    def start(
        self,
        name: str,
        pair: Pair | None = None,
        *,
        state: str = "",
        begins_record: bool = True,
        dies_at: str = "",
        port: int | None = None,
    ) -> Program:
        """A node that runs, whether it has joined already or not.

        Args:
            name: its own.
            pair: its samples; None: those of :func:`samples_of`.
            state: name of its folder, and of a copy of its credentials; its own name unless given.
            begins_record: True if it may begin a record of revealed rounds.
            dies_at: phase of a session in which it kills itself.
            port: the port to dial; the coordinator's unless given.
        """
        number = len(self.programs)
        inputs, labels = samples_of(int(name)) if pair is None else pair
        data = self.folder / f"{number}.npz"
        np.savez(data, x=_array(inputs), label=_array(labels))
        description = self.folder / f"{number}.yaml"
        description.write_text(yaml.dump({"data": {"kind": "npz", "path": str(data)}}))
        arguments = [
            *("client", "--secure", "--minimum-cohort", str(len(COHORT))),
            *("--server", f"127.0.0.1:{port or self.coordinator.port}", "--data", str(description)),
            *("--credentials", str(self.credentials(name, state)), "--state", str(self.state(state or name))),
            *(["--new-record"] if begins_record else []),
        ]
        log = self.folder / f"{number}.log"
        settings = {"dies_at": dies_at} if dies_at else {}
        self.programs.append(Program(started(arguments, log, settings), log))
        return self.programs[-1]

    def start_all(self, names: Sequence[str] = COHORT) -> list[Program]:
        """Nodes of these names, once they have joined."""
        started = [self.start(name) for name in names]
        self.coordinator.wait_to_join(names)
        return started

    def state(self, name: str) -> Path:
        """Folder that a node keeps its state in."""
        return self.folder / f"state-{name}"

    def credentials(self, name: str, state: str = "") -> Path:
        """Folder of a node's credentials, for its folder of state."""
        copied = self.folder / f"credentials-{state or name}"
        if not copied.exists():
            shutil.copytree(self.coordinator.keys / "nodes" / name, copied)
        return copied

    def close(self) -> None:
        """Leave no process behind."""
        for program in self.programs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.process.pid, signal.SIGKILL)
            program.process.wait()
        self.coordinator.close()


def _array(part: torch.Tensor) -> NDArray[np.generic]:
    return part.numpy()
