"""Seconds of secure aggregation at a client and at the coordinator, beside a cipher's speed and Flower's SecAgg+.

Whole sessions run in one process and one thread, without a network; in rows that say so the coordinator removes masks
with all cores. Clients that drop out have shared their secrets and send no masked message. In sessions of 32 clients at
most all are timed, and the sum is checked. In larger ones three are timed. The others trust all signatures and add no
masks: the sum means nothing, the coordinator's work is the same.

The limit is the time in which this machine makes as many keystreams of AES-256 as there are masks and adds them to a
vector, 128 KiB at a time, in memory that stays in the cache. It is measured before and after each session.

Flower's clients, and the last stage of its server, run in a process of their own on messages that are made here. Its
masking includes its quantisation. Where its server would take over three minutes, its parts are timed once each and
multiplied. Without options, and with --many alone, the tables go into docs/benchmarks.md.

    python benchmarks/secure.py --quick
"""

import argparse
import contextlib
import gc
import importlib.util
import json
import math
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from comparison import HERE, PEERS
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR, GCM
from machine import machine
from processes import ONE_THREAD, CommandFailed, run
from report import conclude
from rich.console import Console
from secure_report import MANY_CLIENTS, OF_MASKS, SECURE, STAGES, markdown, shortfalls, size_cells, tables
from torch import Tensor

import fed.secure_aggregation.client
import fed.secure_aggregation.coordinator
from fed.errors import RunFailed
from fed.processes.machine import keep_freed_memory, usable_cores
from fed.secure_aggregation.client import SessionClient
from fed.secure_aggregation.coordinator import SessionCoordinator
from fed.secure_aggregation.fixed_point import FixedPoint, SecureSum
from fed.secure_aggregation.masks import keystream_mode
from fed.secure_aggregation.settings import SecureAggregation
from fed.secure_aggregation.terms import Identities, Terms

CLIENTS = (10, 32, 100, 1000)
NUMBERS = (100_000, 1_000_000)
LARGE = 10_000_000
DROPPED = (0.0, 0.1)
MAX_DROP_OUT = 0.1
DEFAULT_MAX_DROP_OUT = 0.2
MANY = (10_000, 100_000, 0.1)
ALL_ARE_TIMED = 32
TIMED = 3
PIECE_BYTES = 128 << 10
PIECES = 50
BATCHES = 20
WIDTH = 160
WITHOUT_MASKS = fed.secure_aggregation.client, "add_masks", lambda lanes, masks: None


@dataclass(frozen=True)
class Setting:
    """Size of a session.

    Args:
        clients: n.
        numbers: number of the model's parameters.
        dropped: share of the clients that send no masked message.
        max_drop_out: share of drop-outs that the session's graph is made for.
        cores: the number with which the coordinator removes masks.
    """

    clients: int
    numbers: int
    dropped: float
    max_drop_out: float = MAX_DROP_OUT
    cores: int = 1

    @property
    def staying(self) -> int:
        """Clients that send a masked message."""
        return self.clients - math.floor(self.dropped * self.clients)

    @property
    def terms(self) -> Terms:
        """Terms of the session."""
        section = SecureAggregation(corrupt=0.1, max_drop_out=self.max_drop_out)
        fixed = FixedPoint(32, (self.numbers,), (8.0,), most_clients=self.clients)
        return Terms(section, fixed, "benchmark", 1, 0, b"plan", b"task", b"identities")


class TrustingIdentities(Identities):
    """Identities that believe every signature, for clients that are not timed."""

    def is_signed(self, name: str, signed: bytes, signature: bytes) -> bool:
        """Tell that it is signed.

        Args:
            name: name of the client.
            signed: the digest.
            signature: bytes that nobody checks.
        """
        return True


class MeasuredSession(NamedTuple):
    """Finished session.

    Args:
        spent_s: seconds by stage, of the coordinator and of each timed client.
        masks: the number that a client adds, and the number that the coordinator removes.
        total: the sum.
        plain: the sum of the messages before they were masked; None where not all clients were timed.
    """

    spent_s: Mapping[str, Sequence[Mapping[str, float]]]
    masks: Mapping[str, int]
    total: SecureSum
    plain: SecureSum | None


class Driver:
    """A session in one process.

    Args:
        setting: size of the session.
        timed: number of clients that are timed, the first ones; the last ones drop out.
    """

    def __init__(self, setting: Setting, timed: int) -> None:
        self._setting = setting
        self._terms = setting.terms
        self._names = [f"client-{place:04}" for place in range(setting.clients)]
        self._timed = self._names[:timed]
        self._spent_s: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        signers = {name: ec.generate_private_key(ec.SECP256R1()) for name in self._names}
        known = Identities({name: signer.public_key() for name, signer in signers.items()}, b"identities")
        self._coordinator = SessionCoordinator(self._terms, known)
        self._session = None
        self._survivors = ()
        self._clients = {}
        for name, signer in signers.items():
            identities = known if name in self._timed else TrustingIdentities(known.keys, known.sha256)
            with self._watch(name, "sharing"):
                client = SessionClient(name, signer, identities, replace(self._terms), os.urandom)
            self._clients[name] = client

    def drive(self) -> MeasuredSession:
        """Run it from the first keys to the sum."""
        coordinator = self._coordinator
        names = self._names
        keys = self._ask("sharing", SessionClient.open, ((name,) for name in names))
        lists = self._take("sharing", coordinator.take_keys, keys, coordinator.close_keys)
        shares = self._ask("sharing", SessionClient.share, self._listed(lists))
        deliveries = self._take("sharing", coordinator.take_shares, shares, coordinator.close_shares)
        staying = names[: self._setting.staying]
        common = self._lanes()
        messages = {name: self._lanes() if name in self._timed else common for name in staying}
        plain = SecureSum(self._terms.fixed.bits, self._terms.fixed.lanes)
        for message in messages.values():
            plain.add(message)
        self._ask("masking", SessionClient.take_boxes, ((name, deliveries[name]) for name in staying))
        masked = self._ask("masking", SessionClient.mask, messages.items())
        survivors, _ = self._take("adding", coordinator.take_masked, masked, coordinator.close_masked)
        consents = self._ask("unmasking", SessionClient.consent, ((name, survivors) for name in staying))
        relayed = self._take("revealing", coordinator.take_consent, consents, coordinator.close_consents)
        self._ask("unmasking", SessionClient.take_consents, relayed.items())
        unmaskings = self._ask("unmasking", SessionClient.unmask, ((name,) for name in relayed))
        self._take("revealing", coordinator.take_unmasking, unmaskings, lambda: None)
        cores = patch.object(fed.secure_aggregation.coordinator, "usable_cores", lambda: self._setting.cores)
        with cores, self._watch("", "unmasking"):
            total = coordinator.finish()
        spent_s = {
            "clients": [self._spent_s[name] for name in staying if name in self._timed],
            "coordinator": [self._spent_s[""]],
        }
        of_dropped = [box.place for name in names[len(staying) :] for box in deliveries[name].boxes]
        masks = {
            "clients": 1 + len(deliveries[names[0]].boxes),
            "coordinator": len(staying) + sum(place <= len(staying) for place in of_dropped),
        }
        return MeasuredSession(spent_s, masks, total, plain if len(self._timed) == len(names) else None)

    @contextlib.contextmanager
    def _watch(self, side: str, stage: str) -> Iterator[None]:
        began_s = perf_counter()
        yield
        self._spent_s[side][stage] += perf_counter() - began_s

    def _listed(self, lists: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """The lists, each made when its client takes it, in the coordinator's time."""
        while True:
            with self._watch("", "sharing"):
                one = next(lists, None)
            if one is None:
                return
            yield one

    def _ask(self, stage: str, method: Callable[..., Any], said: Iterable[tuple[Any, ...]]) -> dict[str, Any]:
        """Answers of clients to what each is told."""
        answers = {}
        for name, *arguments in said:
            client = self._clients[name]
            masks = contextlib.nullcontext() if name in self._timed else patch.object(*WITHOUT_MASKS)
            with masks, self._watch(name, stage):
                answers[name] = method(client, *arguments)
            if name not in self._timed:  # lists of 10,000 clients, kept by each of them, fill 20 GB
                client._session = self._session = self._session or client._session
                client._survivors = self._survivors = self._survivors or client._survivors
        return answers

    def _take(
        self, stage: str, take: Callable[[str, Any], None], answers: Mapping[str, Any], close: Callable[[], Any]
    ) -> Any:
        with self._watch("", stage):
            for name, answer in answers.items():
                take(name, answer)
            return close()

    def _lanes(self) -> Tensor:
        """Random lanes over all of their range, so that sums wrap."""
        return torch.from_numpy(np.frombuffer(bytearray(os.urandom(4 * self._terms.fixed.lanes)), np.int32))


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Hold back the garbage collector, which would pass over the objects of all clients while one is timed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def keystream_s_per_byte() -> float:
    """Median of the seconds in which a byte of a keystream is made and added."""
    mode = GCM(bytes(12)) if keystream_mode() is GCM else CTR(bytes(16))
    context = Cipher(AES(bytes(32)), mode).encryptor()
    zeros = bytes(PIECE_BYTES)
    keystream = np.empty(PIECE_BYTES // 4 + 4, np.uint32)  # a block more
    piece = np.zeros(PIECE_BYTES // 4, np.uint32)
    written = keystream.data.cast("B")
    found = []
    for _ in range(BATCHES):
        began_s = perf_counter()
        for _ in range(PIECES):
            context.update_into(zeros, written)
            np.add(piece, keystream[: len(piece)], out=piece)
        found.append((perf_counter() - began_s) / (PIECES * PIECE_BYTES))
    return statistics.median(found)


def measure(setting: Setting, repetitions: int, most_s: float) -> dict[str, Any]:
    """Medians of sessions of one size.

    Args:
        setting: the size.
        repetitions: sessions at most, and one at least.
        most_s: seconds that they may take together.
    """
    timed = setting.clients if setting.clients <= ALL_ARE_TIMED else TIMED
    driven: list[MeasuredSession] = []
    speeds = [keystream_s_per_byte()]
    began_s = perf_counter()
    while not driven or (len(driven) < repetitions and (perf_counter() - began_s) * (1 + 1 / len(driven)) < most_s):
        with without_collection():
            one = Driver(setting, timed).drive()
        speeds.append(keystream_s_per_byte())
        if one.plain and not np.array_equal(one.total.lanes, one.plain.lanes):
            raise RunFailed(f"the sum of {setting.clients} clients is not that of their messages")
        driven.append(one._replace(total=SecureSum(32, 0), plain=None))
    found: dict[str, Any] = {
        "size": vars(setting),
        "sessions": len(driven),
        "keystream_gb_s": 1e-9 / statistics.median(speeds),
    }
    for side, stages in STAGES.items():
        spent = [each for one in driven for each in one.spent_s[side]]
        found[side] = row = {f"{stage}_s": statistics.median(each[stage] for each in spent) for stage in stages}
        row["total_s"] = statistics.median(sum(each.values()) for each in spent)
        row["masks"] = driven[0].masks[side]
        row["limit_s"] = row["masks"] * 4 * setting.terms.fixed.lanes * statistics.median(speeds)
        row["times_limit"] = row[f"{OF_MASKS[side]}_s"] / row["limit_s"]
    return found


def flower(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Flower's times at the sizes of our rows, of a process of its own; or why they are absent."""
    python = sys.executable if importlib.util.find_spec("flwr") else str(PEERS)
    if not Path(python).exists():
        return {"absent": "Flower is not installed; make benchmark installs it"}
    settings = [Setting(**row["size"]) for row in rows]
    settings = [one for one in settings if one.dropped and one.clients <= 100 and one.numbers < LARGE]
    sizes = [
        (one.clients, one.numbers, one.staying, one.terms.settings.degree(one.clients).threshold) for one in settings
    ]
    command = [python, str(HERE / "sides" / "secagg_plus.py"), json.dumps(sizes)]
    try:
        said = run(command, {**ONE_THREAD, "FLWR_TELEMETRY_ENABLED": "0"}).stdout
    except CommandFailed as error:
        return {"absent": str(error).splitlines()[-1]}
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    found["rows"] = [{"size": vars(one), **row} for one, row in zip(settings, found["rows"], strict=True)]
    return found


def arguments() -> argparse.Namespace:
    """Arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="10 and 32 clients, 100,000 numbers: seconds")
    parser.add_argument("--large", action="store_true", help=f"{LARGE:,} numbers, too")
    parser.add_argument("--many", action="store_true", help=f"{MANY[0]:,} clients instead: half an hour")
    parser.add_argument("--repetitions", type=int, default=5, help="sessions of a size at most; medians count")
    parser.add_argument("--seconds", type=float, default=30.0, help="that the sessions of a size take at most")
    parser.add_argument("--without-flower", action="store_true", help="measure fed alone")
    parser.add_argument("--output", type=Path, help="where to write the results as JSON")
    return parser.parse_args()


def main() -> int:
    """Measure, print and write; 1 where something misses its target."""
    given = arguments()
    console = Console(highlight=False, width=WIDTH)
    keep_freed_memory()  # as processes do that take part in rounds
    torch.set_num_threads(1)
    clients, numbers = (CLIENTS[:2], NUMBERS[:1]) if given.quick else (CLIENTS, NUMBERS)
    numbers = (*numbers, LARGE) if given.large else numbers
    versions = {name: version(name) for name in ("torch", "numpy", "cryptography")}
    report: dict[str, Any] = {"machine": machine(), "load": os.getloadavg()[0], "versions": versions, "rows": []}
    settings = [Setting(*size) for size in product(clients, numbers, DROPPED)]
    if not given.quick:
        largest = Setting(CLIENTS[-1], NUMBERS[-1], DROPPED[-1])
        settings += [replace(largest, cores=usable_cores()), replace(largest, max_drop_out=DEFAULT_MAX_DROP_OUT)]
    if given.many:
        settings = [Setting(*MANY, share, usable_cores()) for share in (MAX_DROP_OUT, DEFAULT_MAX_DROP_OUT)]
    for setting in settings:
        report["rows"].append(row := measure(setting, given.repetitions, given.seconds))
        console.print(
            f"{', '.join(size_cells(row))}: client {row['clients']['total_s']:.3g} s, coordinator "
            f"{row['coordinator']['total_s']:.3g} s",
            style="dim",
        )
    report["flower"] = {} if given.without_flower or given.many else flower(report["rows"])
    if "version" in report["flower"]:
        versions["flwr"] = report["flower"]["version"]
    markers = MANY_CLIENTS if given.many else SECURE
    if given.quick or given.large or given.without_flower:
        markers = None
    return conclude(console, report, tables(report), given.output, markers, markdown(report), shortfalls(report))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RunFailed as error:
        sys.exit(f"error: {error}")
