"""Seconds of secure aggregation at a client and at the coordinator, beside a cipher's speed and Flower's SecAgg+.

Whole sessions run in one process and one thread, without a network. Clients that drop out have shared their secrets and
send no masked message. In sessions of more than 32 clients three are timed. The others trust all signatures and add no
masks, so that their sum means nothing, but takes the coordinator as long; in smaller sessions the sum is checked.

The limit is the time in which this machine makes as many keystreams of AES-256 as there are masks and adds them to a
vector, 128 KiB at a time, in memory that stays in the cache. It is measured before and after each session.

Flower's clients, and the last stage of its server, run in a process of their own on messages that are made here. Its
masking includes its quantisation. Where its server would take over three minutes, its parts are timed once each and
multiplied. Without options the tables go into docs/benchmarks.md.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from time import perf_counter
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from comparison import PEERS
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR, GCM
from processes import ONE_THREAD, CommandFailed, run
from report import PAGE, measured_on, put_into
from rich.console import Console
from rich.table import Table
from simulation import machine
from torch import Tensor

import fed
import fed.secure_aggregation.client
import fed.secure_aggregation.coordinator
from fed.errors import RunFailed
from fed.machine import keep_freed_memory
from fed.secure_aggregation.client import SessionClient
from fed.secure_aggregation.coordinator import SessionCoordinator
from fed.secure_aggregation.fixed_point import FixedPoint, SecureSum
from fed.secure_aggregation.masks import keystream_mode
from fed.secure_aggregation.settings import SecureAggregation
from fed.secure_aggregation.terms import KnownIdentities, Terms

SECURE = "<!-- secure: begin -->", "<!-- secure: end -->"
CLIENTS, NUMBERS, LARGE, DROPPED = (10, 32, 100, 1000), (100_000, 1_000_000), 10_000_000, (0.0, 0.1)
ALL_ARE_TIMED, TIMED = 32, 3
PIECE_BYTES, PIECES, BATCHES = 128 << 10, 50, 20
MOST_S = 180.0
STAGES = {
    "clients": {"sharing": "keys and shares", "masking": "masking", "unmasking": "consent, shares"},
    "coordinator": {
        "sharing": "keys and shares",
        "adding": "sum",
        "revealing": "consents, shares",
        "unmasking": "unmasking",
    },
}
WIDTH, BUSY = 160, 1.0
SIZE = ["clients", "numbers", "dropped"]
FLOWER_CONFIGS = "secaggplus_configs"
WITHOUT_MASKS = fed.secure_aggregation.client, "add_masks", lambda lanes, masks: None
OF_MASKS = {"clients": "masking", "coordinator": "unmasking"}


@dataclass(frozen=True)
class Setting:
    """Size of a session.

    Args:
        clients: n.
        numbers: of the model.
        dropped: share of the clients that send no masked message.
    """

    clients: int
    numbers: int
    dropped: float

    @property
    def staying(self) -> int:
        """Clients that send a masked message."""
        return self.clients - math.floor(self.dropped * self.clients)

    @property
    def terms(self) -> Terms:
        """Terms of the session."""
        section = SecureAggregation(corrupt=0.1, max_drop_out=0.1)
        fixed = FixedPoint(32, (self.numbers,), (8.0,), most_clients=self.clients)
        return Terms(section, fixed, "benchmark", 1, 0, b"plan", b"task", b"identities")


class Target(NamedTuple):
    """Most that a figure may be.

    Args:
        side: clients or coordinator.
        figure: of a row.
        most: seconds, or times the limit.
        text: the same for readers.
    """

    side: str
    figure: str
    most: float
    text: str


TARGETS = {
    Setting(100, 1_000_000, 0.1): (
        Target("clients", "times_limit", 2.2, "masking : limit ≤ 2.2"),
        Target("coordinator", "times_limit", 1.9, "unmasking : limit ≤ 1.9"),
    ),
    Setting(1000, 100_000, 0.1): (
        Target("clients", "total_s", 0.06, "together ≤ 60 ms"),
        Target("coordinator", "total_s", 5.0, "together ≤ 5,000 ms"),
    ),
}


class Trusting(KnownIdentities):
    """Identities that believe every signature, for clients that are not timed."""

    def is_signed(self, name: str, signed: bytes, signature: bytes) -> bool:
        """Tell that it is signed.

        Args:
            name: of the client.
            signed: the digest.
            signature: from anyone.
        """
        return True


class Driven(NamedTuple):
    """Session that has come to its end.

    Args:
        spent_s: seconds by stage, of the coordinator and of each timed client.
        masks: that a client adds, and that the coordinator removes.
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
        setting: its size.
        timed: how many clients are timed; the last ones drop out.
    """

    def __init__(self, setting: Setting, timed: int) -> None:
        self._setting, self._terms = setting, setting.terms
        self._names = [f"client-{place:04}" for place in range(setting.clients)]
        self._timed = self._names[:timed]
        self._spent_s: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        signers = {name: ec.generate_private_key(ec.SECP256R1()) for name in self._names}
        known = KnownIdentities({name: signer.public_key() for name, signer in signers.items()}, b"identities")
        self._coordinator = SessionCoordinator(self._terms, known)
        self._clients = {}
        for name, signer in signers.items():
            identities = known if name in self._timed else Trusting(known.keys, known.sha256)
            with self._watch(name, "sharing"):
                client = SessionClient(name, signer, identities, replace(self._terms), os.urandom)
            self._clients[name] = client

    def drive(self) -> Driven:
        """Run it from the first keys to the sum."""
        coordinator, names = self._coordinator, self._names
        keys = self._ask("sharing", SessionClient.open, dict.fromkeys(names, ()))
        lists = self._take("sharing", coordinator.take_keys, keys, coordinator.close_keys)
        shares = self._ask("sharing", SessionClient.share, {name: (lists[name],) for name in names})
        deliveries = self._take("sharing", coordinator.take_shares, shares, coordinator.close_shares)
        staying, common = names[: self._setting.staying], self._lanes()
        messages = {name: self._lanes() if name in self._timed else common for name in staying}
        plain = SecureSum(self._terms.fixed.bits, self._terms.fixed.lanes)
        for message in messages.values():
            plain.add(message)
        given = {name: (deliveries[name], message) for name, message in messages.items()}
        masked = self._ask("masking", SessionClient.mask, given)
        survivors, _ = self._take("adding", coordinator.take_masked, masked, coordinator.close_masked)
        consents = self._ask("unmasking", SessionClient.consent, dict.fromkeys(staying, (survivors,)))
        relayed = self._take("revealing", coordinator.take_consent, consents, coordinator.close_consents)
        said = {name: (consents,) for name, consents in relayed.items()}
        unmaskings = self._ask("unmasking", SessionClient.unmask, said)
        self._take("revealing", coordinator.take_unmasking, unmaskings, lambda: None)
        with replaced(fed.secure_aggregation.coordinator, "usable_cores", lambda: 1), self._watch("", "unmasking"):
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
        return Driven(spent_s, masks, total, plain if len(self._timed) == len(names) else None)

    @contextlib.contextmanager
    def _watch(self, side: str, stage: str) -> Iterator[None]:
        began_s = perf_counter()
        yield
        self._spent_s[side][stage] += perf_counter() - began_s

    def _ask(self, stage: str, method: Callable[..., Any], said: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        answers = {}
        for name, arguments in said.items():
            masks = contextlib.nullcontext() if name in self._timed else replaced(*WITHOUT_MASKS)
            with masks, self._watch(name, stage):
                answers[name] = method(self._clients[name], *arguments)
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
def replaced(module: ModuleType, name: str, value: object) -> Iterator[None]:
    """Have a module use something else under a name.

    Args:
        module: which has imported it.
        name: of a function.
        value: in its place.
    """
    names = vars(module)
    kept = names[name]
    names[name] = value
    try:
        yield
    finally:
        names[name] = kept


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
    """Seconds for a byte of a keystream, made and added, the median."""
    mode = GCM(bytes(12)) if keystream_mode() is GCM else CTR(bytes(16))
    context, zeros = Cipher(AES(bytes(32)), mode).encryptor(), bytes(PIECE_BYTES)
    keystream = np.empty(PIECE_BYTES // 4 + 4, np.uint32)  # a block more
    piece, written, found = np.zeros(PIECE_BYTES // 4, np.uint32), keystream.data.cast("B"), []
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
    driven: list[Driven] = []
    speeds, began_s = [keystream_s_per_byte()], perf_counter()
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


class FlowerClients(NamedTuple):
    """Clients of Flower's SecAgg+ after their masked messages.

    Args:
        spent_s: seconds of one of them, by stage.
        public: keys of all.
        vector: what the timed one has masked.
    """

    spent_s: Mapping[str, float]
    public: Mapping[int, list[bytes]]
    vector: list[np.ndarray]


def flower_clients(setting: Setting, threshold: int) -> FlowerClients:
    """All stages of a client of Flower's, every client being every other's neighbour."""
    from flwr.app import ConfigRecord, Context, Message, RecordDict
    from flwr.client.mod import secaggplus_mod
    from flwr.common import Code, FitRes, Status, bytes_to_ndarray, ndarrays_to_parameters
    from flwr.common.secure_aggregation.crypto.shamir import create_shares
    from flwr.common.secure_aggregation.crypto.symmetric_encryption import encrypt, generate_shared_key
    from flwr.common.secure_aggregation.secaggplus_utils import share_keys_plaintext_concat
    from flwr.compat.common.recorddict_compat import fitres_to_recorddict
    from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key

    nodes = range(1, setting.clients + 1)
    contexts = {node: Context(1, node, {}, RecordDict(), {}) for node in nodes}
    spent_s: dict[str, float] = defaultdict(float)
    values = np.random.default_rng(0).normal(0, 0.1, setting.numbers).astype(np.float32)
    trained = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([values]), 1, {})

    def ask(stage: str, node: int, said: Mapping[str, Any]) -> Any:
        record = RecordDict({FLOWER_CONFIGS: ConfigRecord(dict(said))})
        asked = Message(record, dst_node_id=node, message_type="train", group_id="1")
        fitted = Message(fitres_to_recorddict(trained, keep_input=True), reply_to=asked)
        began_s = perf_counter()
        replied = secaggplus_mod(asked, contexts[node], lambda *_: fitted)
        if node == nodes[0]:
            spent_s[stage] += perf_counter() - began_s
        return replied.content.config_records[FLOWER_CONFIGS]

    ranges = {"clipping_range": 8.0, "target_range": 1 << 22, "mod_range": 1 << 32, "max_weight": 1000.0}
    setup = {"stage": "setup", "sample_num": len(nodes), "share_num": len(nodes), "threshold": threshold, **ranges}
    replies = {node: ask("sharing", node, setup) for node in nodes}
    public = {node: [reply["pk1"], reply["pk2"]] for node, reply in replies.items()}
    listed = {str(node): keys for node, keys in public.items()}
    ask("sharing", nodes[0], {**listed, "stage": "share_keys"})
    part, own = create_shares(bytes(32), 2, 2)[0], bytes_to_public_key(public[nodes[0]][1])
    boxes = []
    for node in nodes[1:]:
        private = bytes_to_private_key(contexts[node].state.config_records["secaggplus_state"]["sk2"])
        content = share_keys_plaintext_concat(node, nodes[0], part, part)
        boxes.append(encrypt(generate_shared_key(private, own), content))
    delivery = {"stage": "collect_masked_vectors", "ctxts": boxes, "srcs": list(nodes[1:])}
    masked = ask("masking", nodes[0], delivery)["masked_params"]
    staying, dropped = nodes[: setting.staying], nodes[setting.staying :]
    ask("unmasking", nodes[0], {"stage": "unmask", "active_nids": list(staying), "dead_nids": list(dropped)})
    return FlowerClients(spent_s, public, [bytes_to_ndarray(one) for one in masked])


@cache
def flower_shares(clients: int, staying: int, threshold: int) -> tuple[list[list[bytes]], list[float]]:
    """Shares of a seed and of a private key that the survivors hold, and the seconds to recover each.

    Args:
        clients: n, and so many shares.
        staying: survivors.
        threshold: shares that recover a secret.
    """
    from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
    from flwr.supercore.primitives.asymmetric import generate_key_pairs, private_key_to_bytes

    secrets = os.urandom(32), private_key_to_bytes(generate_key_pairs()[0])
    shares = [create_shares(secret, threshold, clients)[:staying] for secret in secrets]
    return shares, [seconds(partial(combine_shares, held)) for held in shares]


def flower_server(setting: Setting, threshold: int, clients: FlowerClients) -> tuple[float, bool]:
    """Seconds of the last stage of Flower's server, and whether it was run.

    Args:
        setting: size of the round.
        threshold: shares that recover a secret.
        clients: after their masked messages.
    """
    from flwr.app import ConfigRecord, Context, Message, RecordDict
    from flwr.common.secure_aggregation.ndarrays_arithmetic import parameters_subtraction
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
    from flwr.server.compat.legacy_context import LegacyContext
    from flwr.server.workflow.secure_aggregation.secaggplus_workflow import SecAggPlusWorkflow, WorkflowState

    nodes = list(range(1, setting.clients + 1))
    staying, lost = set(nodes[: setting.staying]), setting.clients - setting.staying
    shares, recovery_s = flower_shares(setting.clients, setting.staying, threshold)
    shapes = [array.shape for array in clients.vector]
    mask_s = seconds(lambda: parameters_subtraction(clients.vector, pseudo_rand_gen(bytes(32), 1 << 32, shapes)))
    masks = setting.staying + lost * (setting.clients - 1)
    estimate_s = setting.staying * recovery_s[0] + lost * recovery_s[1] + masks * mask_s
    if estimate_s > MOST_S:
        return estimate_s, False
    state = WorkflowState(
        sampled_node_ids=set(nodes),
        active_node_ids=staying,
        num_shares=setting.clients,
        threshold=threshold,
        clipping_range=8.0,
        quantization_range=1 << 22,
        mod_range=1 << 32,
        nid_to_neighbours={node: set(nodes) for node in nodes},
        nid_to_publickeys=dict(clients.public),
        aggregate_ndarrays=clients.vector,
    )

    def replies(messages: Sequence[Any], timeout: float | None) -> list[Any]:
        answers = []
        for place, asked in enumerate(messages):
            held = [shares[node not in staying][place] for node in nodes]
            record = RecordDict({FLOWER_CONFIGS: ConfigRecord({"nids": nodes, "shares": held})})
            answers.append(Message(record, reply_to=asked))
        return answers

    context = LegacyContext(Context(1, 0, {}, RecordDict({"config": ConfigRecord({"current_round": 1})}), {}))
    workflow = SecAggPlusWorkflow(1.0, threshold)
    return seconds(lambda: workflow.unmask_stage(SimpleNamespace(send_and_receive=replies), context, state)), True


def flower(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Flower's times at the sizes of our rows, of a process of its own; or why they are absent."""
    python = sys.executable if importlib.util.find_spec("flwr") else str(PEERS)
    if not Path(python).exists():
        return {"absent": "Flower is not installed; make benchmark installs it"}
    settings = [
        setting
        for row in rows
        if (setting := Setting(**row["size"])).dropped and setting.clients <= 100 and setting.numbers < LARGE
    ]
    sizes = [
        [*vars(setting).values(), setting.terms.settings.degree(setting.clients).threshold] for setting in settings
    ]
    paths = [str(Path(fed.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**ONE_THREAD, "FLWR_TELEMETRY_ENABLED": "0", "PYTHONPATH": os.pathsep.join(paths)}
    try:
        said = run([python, __file__, "--flower", json.dumps(sizes)], environment).stdout
    except CommandFailed as error:
        return {"absent": str(error).splitlines()[-1]}
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def flower_side(sizes: Sequence[Sequence[Any]]) -> None:
    """Measure Flower and print the times, in a process of its own."""
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
    rows = []
    for *size, threshold in sizes:
        setting = Setting(*size)
        clients = flower_clients(setting, threshold)
        spent_s, was_run = flower_server(setting, threshold, clients)
        row = {"size": vars(setting), "clients": {f"{stage}_s": spent for stage, spent in clients.spent_s.items()}}
        rows.append({**row, "coordinator": {"unmasking_s": spent_s}, "was_run": was_run})
    print(json.dumps({"version": version("flwr"), "rows": rows}))


def seconds(action: Callable[[], object]) -> float:
    """Seconds of one call."""
    began_s = perf_counter()
    action()
    return perf_counter() - began_s


def shortfalls(report: Mapping[str, Any]) -> list[str]:
    """Sentences on what misses its target."""
    return [
        f"{', '.join(size_cells(row))}: {target.side} must keep {target.text}, got "
        f"{row[target.side][target.figure]:.3g} {'s' if target.figure.endswith('_s') else 'times'}"
        for row in report["rows"]
        for target in targets(row)
        if row[target.side][target.figure] > target.most
    ]


def tables(report: Mapping[str, Any]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Titles, heads and rows of the tables."""
    titles = {"clients": "Milliseconds of a client", "coordinator": "Milliseconds of the coordinator"}
    for side, stages in STAGES.items():
        limit = f"{stages[OF_MASKS[side]]} : limit"
        rows = []
        for row in report["rows"]:
            spent = [digits(1000 * row[side][f"{stage}_s"]) for stage in (*stages, "total")]
            wanted = [target.text for target in targets(row) if target.side == side]
            of_masks = f"{row[side]['masks']:,}", f"{row[side]['times_limit']:.2f}"
            rows.append([*size_cells(row), *spent, *of_masks, ", ".join(wanted) or "–"])
        yield titles[side], [*SIZE, *stages.values(), "together", "masks", limit, "target"], rows
    if report["flower"]:
        yield of_flower(report)


def of_flower(report: Mapping[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    """Table of Flower's times beside ours."""
    title = "Milliseconds of fed / of Flower's SecAgg+, how many times as long"
    if "absent" in report["flower"]:
        return title, ["", ""], [["Flower's SecAgg+", f"absent: {report['flower']['absent']}"]]
    ours = {Setting(**row["size"]): row for row in report["rows"]}
    rows = []
    for theirs in report["flower"]["rows"]:
        row = ours[Setting(**theirs["size"])]
        figures = [("clients", stage) for stage in STAGES["clients"]] + [("coordinator", "unmasking")]
        pairs = [(row[side][f"{stage}_s"], theirs[side][f"{stage}_s"]) for side, stage in figures]
        cells = [f"{digits(1000 * a)} / {digits(1000 * b)}, {digits(b / a)} ×" for a, b in pairs]
        if not theirs["was_run"]:
            cells[-1] += ", estimated"
        rows.append([*size_cells(theirs), *cells])
    heads = [f"client: {text}" for text in STAGES["clients"].values()]
    return title, [*SIZE, *heads, "coordinator: unmasking"], rows


def targets(row: Mapping[str, Any]) -> Sequence[Target]:
    """Targets of a row."""
    return TARGETS.get(Setting(**row["size"]), ())


def size_cells(row: Mapping[str, Any]) -> list[str]:
    """Cells of a row that say what was measured."""
    return [f"{row['size']['clients']:,}", f"{row['size']['numbers']:,}", f"{row['size']['dropped']:.0%}"]


def digits(number: float) -> str:
    """Three significant digits."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def terminal_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Table that rich prints.

    Args:
        title: above it.
        head: of the columns.
        rows: of cells.
    """
    table = Table(title=title, title_justify="left")
    for cell in head:
        table.add_column(cell, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def markdown(report: Mapping[str, Any]) -> str:
    """Markdown of the machine and the tables."""
    where = measured_on(report).removesuffix(".")
    speed = statistics.median(row["keystream_gb_s"] for row in report["rows"])
    parts = [f"{where}; load when it began: {report['load']:.1f}; limit: {speed:.1f} GB of masks a second."]
    if report["load"] > BUSY:
        parts[0] += " Other work kept the machine busy."
    for title, head, rows in tables(report):
        lines = [head, ["---:"] * len(head), *rows]
        parts.append(f"{title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(parts)


def arguments() -> argparse.Namespace:
    """Arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="10 and 32 clients, 100,000 numbers: seconds")
    parser.add_argument("--large", action="store_true", help=f"{LARGE:,} numbers, too")
    parser.add_argument("--repetitions", type=int, default=5, help="sessions of a size at most; medians count")
    parser.add_argument("--seconds", type=float, default=30.0, help="that the sessions of a size take at most")
    parser.add_argument("--without-flower", action="store_true", help="measure fed alone")
    parser.add_argument("--output", type=Path, help="where to write the results as JSON")
    parser.add_argument("--flower", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Measure, print and write; 1 where something misses its target."""
    given, console = arguments(), Console(highlight=False, width=WIDTH)
    if given.flower:
        flower_side(given.flower)
        return 0
    keep_freed_memory()  # as processes do that take part in rounds
    torch.set_num_threads(1)
    clients, numbers = (CLIENTS[:2], NUMBERS[:1]) if given.quick else (CLIENTS, NUMBERS)
    numbers = (*numbers, LARGE) if given.large else numbers
    versions = {name: version(name) for name in ("torch", "numpy", "cryptography")}
    report: dict[str, Any] = {"machine": machine(), "load": os.getloadavg()[0], "versions": versions, "rows": []}
    for setting in (Setting(*size) for size in product(clients, numbers, DROPPED)):
        report["rows"].append(row := measure(setting, given.repetitions, given.seconds))
        console.print(
            f"{', '.join(size_cells(row))}: client {row['clients']['total_s']:.3g} s, coordinator "
            f"{row['coordinator']['total_s']:.3g} s",
            style="dim",
        )
    report["flower"] = {} if given.without_flower else flower(report["rows"])
    if "version" in report["flower"]:
        versions["flwr"] = report["flower"]["version"]
    for table in tables(report):
        console.print(terminal_table(*table))
    if given.output:
        given.output.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        console.print(f"written: {os.path.relpath(given.output)}")
    is_all = not (given.quick or given.large or given.without_flower)
    if is_all and not put_into(PAGE, markdown(report), SECURE):
        console.print(f"docs/benchmarks.md has no table: the lines {' and '.join(SECURE)} are missing")
    failures = shortfalls(report)
    for failure in failures:
        console.print(f"error: {failure}", style="red")
    return 1 if failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RunFailed as error:
        sys.exit(f"error: {error}")
