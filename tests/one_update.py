"""The way of one update through the code, counted: files that it enters, containers that hold it, names it goes by.

A round is run under a profile function: of FedAvg with one client, or of D-PSGD with two peers, of which one is
followed. The way begins where a trainer has finished the client's local steps, and ends where the algorithm has
returned the new model.

A tensor is *the update* if it has a number for each parameter and, but for rounding, the values of the update, of the
trained model that it is the change to, or of a multiple by the client's weight. With one client the mean of updates is
the update, too. So are the bytes that hold it on the wire, in the model's type, and the path of a file of these bytes.

- *files*: files of the product with a function that has the update, alone or in a container: as an argument, ``self``
  included, as a local variable when it returns or hands the update on to the algorithm, or as its result. A
  container's properties do not count: to read one is to read a field.
- *containers*: named tuples, frozen dataclasses, and messages of the protocol that hold it, at any depth.
- *names*: names of the arguments, variables and fields that are the update, or a plain tuple or list with it, without
  the shape suffix, and in the singular. Names in fed/vectors do not count: its algebra is for any vector.

    python -m tests.one_update
"""

import dataclasses
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

import fed
from fed.config.node_data import NodeData
from fed.server.grpc.deploy import serve
from fed.server.peer.deploy import PeerSetup, take_part
from tests.server.deployed import free_port
from tests.server.grpc.threaded import ThreadedNode

__all__ = ["Way", "at_node", "at_peer", "in_simulation"]

_DEPTH = 5
_ROOMS = ("aggregators", "clients", "fed", "server", "simulations")
_SAMPLES = 3


class Way:
    """The way of an update, as it was observed.

    Attributes:
        files: file of each function that had it → names of these functions.
        containers: classes that held it.
        names: its names → places where it has them.

    Args:
        models: number of models that the update moves.
    """

    def __init__(self, models: int = 1) -> None:
        self._known: list[Tensor] = []
        self._models = models
        self.files: dict[str, set[str]] = {}
        self.containers: set[str] = set()
        self.names: dict[str, set[str]] = {}

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Observe what this thread does, and threads that begin meanwhile."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def report(self) -> str:
        """Counts and findings."""
        lines = [f"{len(self.files)} files"]
        lines += [f"  {file}: {', '.join(sorted(functions))}" for file, functions in self.files.items()]
        lines += [f"{len(self.containers)} containers: {', '.join(sorted(self.containers))}"]
        lines += [f"{len(self.names)} names"]
        lines += [f"  {name}: {', '.join(sorted(places))}" for name, places in sorted(self.names.items())]
        return "\n".join(lines)

    def _profile(self, frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if not self._models or event not in ("call", "return") or (file := _file_of(code)) is None:
            return
        if self._known and _is_property(frame, code):
            return
        if not self._known:
            is_trained = event == "return" and result is not None and code.co_name == "train"
            if not (is_trained and file == "clients/training/trainer.py"):
                return
            update_P = result[0].double() - frame.f_locals["vector_V"].double()
            self._known = [result[0].double(), update_P, _SAMPLES * update_P]
        if event == "call":
            self._note(file, code, dict(_arguments(frame, code)))
            return
        if file.startswith("aggregators/") and code.co_name in ("apply", "step"):
            self._models -= 1
            self._note_callers(frame)
            return
        self._note(file, code, frame.f_locals)
        if self._found(result, "", file):
            self.files.setdefault(file, set()).add(code.co_name)

    def _note_callers(self, frame: FrameType) -> None:
        """Note the functions that have handed the update on, and wait for the model."""
        caller = frame.f_back
        while caller is not None:
            if (file := _file_of(caller.f_code)) is not None:
                self._note(file, caller.f_code, caller.f_locals)
            caller = caller.f_back

    def _note(self, file: str, code: CodeType, values: Mapping[str, Any]) -> None:
        place = f"{file}:{code.co_name}"
        # a list, for each of them has a name to be noted
        held = [self._found(value, name, place) for name, value in values.items()]
        if any(held):
            self.files.setdefault(file, set()).add(code.co_name)

    def _found(self, value: Any, name: str, place: str, depth: int = _DEPTH) -> bool:
        """True if a value holds the update; notes its containers and names."""
        if self._is_update(value):
            plain = re.sub(r"_[A-Z0-9]+$", "", name).removesuffix("s")
            if plain and not place.startswith("fed/vectors/"):
                self.names.setdefault(plain, set()).add(place)
            return True
        if depth == 0:
            return False
        kind = type(value)
        held = False
        for field, part in _parts(value):
            at = place if field is None else kind.__name__
            if self._found(part, name if field is None else field, at, depth - 1):
                held = True
        if held and kind.__module__.startswith("fed."):
            self.containers.add(kind.__name__)
        return held

    def _is_update(self, value: Any) -> bool:
        if isinstance(value, Path):
            try:
                value = value.read_bytes()
            except OSError:
                return False
        if isinstance(value, bytes):
            is_whole = len(value) == 4 * self._known[0].numel()
            return is_whole and self._is_update(torch.frombuffer(bytearray(value), dtype=torch.float32))
        is_vector = isinstance(value, Tensor) and value.numel() == self._known[0].numel()
        if not is_vector or not value.is_floating_point():
            return False
        vector_P = value.detach().reshape(-1).double()
        return any(torch.allclose(vector_P, known_P, rtol=1e-4, atol=0) for known_P in self._known)


def _parts(value: Any) -> Iterator[tuple[str | None, Any]]:
    """Parts of a value, with the names of fields; an object with an identity, such as a fleet, has none."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, list | tuple):
        yield from ((None, part) for part in value)
    elif isinstance(value, Mapping):
        yield from ((None, part) for part in value.values())
    elif hasattr(value, "ListFields") and not isinstance(value, type):  # a message of the protocol
        yield from ((field.name, part) for field, part in value.ListFields())
    elif dataclasses.is_dataclass(value) and _is_frozen(value):
        yield from ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))


def _is_property(frame: FrameType, code: CodeType) -> bool:
    """True if a frame computes a property of a container."""
    if code.co_argcount != 1:
        return False
    container = frame.f_locals.get(code.co_varnames[0])
    is_container = next(_parts(container), None) is not None
    return is_container and isinstance(getattr(type(container), code.co_name, None), property)


def _is_frozen(value: Any) -> bool:
    """True if a dataclass is a value; else it is an object with an identity, such as a fleet."""
    return bool(value.__dataclass_params__.frozen) and not isinstance(value, type)


def _arguments(frame: FrameType, code: CodeType) -> Iterator[tuple[str, Any]]:
    has_rest = bool(code.co_flags & 4) + bool(code.co_flags & 8)  # *args, **kwargs
    for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + has_rest]:
        yield name, frame.f_locals.get(name)


_FILES: dict[str, str | None] = {}


def _file_of(code: CodeType) -> str | None:
    """The file of the product that code is in, such as server/coordinator.py; None for all others."""
    if code.co_filename not in _FILES:
        parts = Path(code.co_filename).resolve().parts
        rooms = [place for place, part in enumerate(parts) if part in _ROOMS]
        is_product = rooms and not {"tests", "site-packages"} & {*parts}
        _FILES[code.co_filename] = "/".join(parts[rooms[0] :]) if is_product else None
    return _FILES[code.co_filename]


def _experiment(**sections: Any) -> fed.Experiment:
    keys = {"data": None, "model": "logistic", "local": {"lr": 0.05}, "rounds": {"count": 1}, "seed": 1}
    return fed.Experiment(**{**keys, **sections})


def _samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(_SAMPLES, 5, generator=generator), torch.tensor([0, 1, 1])


def in_simulation() -> Way:
    """The way of an update in a simulation."""
    way = Way()
    with way.observed():
        fed.simulate(_experiment(), data=fed.FederatedData({0: _samples()}))
    return way


def at_node(folder: Path) -> Way:
    """The way of an update from a real node to its server, in threads of this process.

    Args:
        folder: empty folder for the run and the node's files.
    """
    nodes: list[ThreadedNode] = []

    def begin(port: int) -> None:
        nodes.append(ThreadedNode(port, 0, _samples(), folder / "node"))

    way = Way()
    with way.observed():
        serve(_experiment(), listen="127.0.0.1:0", output=folder / "run", on_listen=begin)
        nodes[0].end()
    return way


def at_peer(folder: Path) -> Way:
    """The way of a real peer's update to its own model and to that of the other peer, in threads of this process.

    Args:
        folder: empty folder for the runs.
    """
    data = {"kind": "digits", "clients": 2, "partition": "iid"}
    experiment = _experiment(data=data, algorithm="dpsgd", topology="complete")
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]

    def run(peer: int) -> None:
        own = NodeData(data=experiment.dump()["data"], client=peer, seed=experiment.seed)
        setup = PeerSetup(name=str(peer), listen=addresses[peer], join=addresses, patience_s=60.0, serves_end_s=0.0)
        take_part(experiment, own, setup, output=folder / str(peer))

    way = Way(models=2)
    with way.observed():
        peers = [threading.Thread(target=run, args=(peer,), daemon=True) for peer in range(2)]
        for peer in peers:
            peer.start()
        for peer in peers:
            peer.join(60)
    return way


if __name__ == "__main__":
    print("in a simulation:", in_simulation().report())
    with TemporaryDirectory() as name:
        print("at a node:", at_node(Path(name)).report())
    with TemporaryDirectory() as name:
        print("at a peer:", at_peer(Path(name)).report())
