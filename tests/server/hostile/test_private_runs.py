"""A coordinator of private runs that lies about clips, noise and ledgers, or has a message in more sums than one."""

import hashlib
import json
import stat
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from fed.protocol import protocol_pb2 as pb
from fed.secure_aggregation.coordinator import SessionCoordinator
from fed.secure_aggregation.reasons import Reason
from tests.server.hostile.coordinator import NodeRefuses
from tests.server.hostile.nodes import COHORT, GUEST, Field, samples_of
from tests.server.hostile.plans import KEYS, Run
from tests.server.hostile.test_other_models import again
from tests.server.hostile.test_taint import seen_of
from tests.server.hostile.test_terms import take_any_keys

TARGET, *OTHERS = COHORT
NAMES = (*COHORT[:2], GUEST)
PRIVACY: dict[str, Any] = {"kind": "distributed", "clip": 0.5, "noise_multiplier": 1.0}
PRIVATE = {"privacy": PRIVACY}
_counts = count(1)


def head() -> pb.LedgerHead:
    """Head of a ledger with one entry more than before: nodes remember what they were told last."""
    number = next(_counts)
    return pb.LedgerHead(count=number, sha256=hashlib.sha256(bytes([number])).digest())


@pytest.mark.parametrize(
    "of_target",
    [
        {"privacy": {**PRIVACY, "clip": 5.0}},
        {"privacy": {**PRIVACY, "noise_multiplier": 1e-6}},
        {"privacy": {**PRIVACY, "delta": 1e-3}},
        {"privacy": {**PRIVACY, "kind": "central"}},
        {"privacy": {**PRIVACY, "kind": "local"}},
        {"privacy": None},
        {"secure_aggregation": {**KEYS["secure_aggregation"], "corrupt": 0.3}},  # so that fewer honest ones survive
    ],
    ids=["clip", "noise", "delta", "central", "local", "none", "honest"],
)
def test_client_that_is_protected_otherwise_is_in_no_sum(
    of_target: dict[str, Any], field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SessionCoordinator, "take_keys", take_any_keys)
    run = Run(field.coordinator, f"protected {of_target}", PRIVATE)
    lying = Run(field.coordinator, run.name, {**PRIVATE, **of_target})
    run.tell(OTHERS)
    lying.tell([TARGET])
    refuses(run, dict.fromkeys(COHORT, run.task(run.model(50), ledger=head())))


@pytest.mark.parametrize("changed", ["most_clients", "clip", "ledger"])
def test_clients_agree_on_all_that_scales_the_noise(
    changed: str, field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SessionCoordinator, "take_keys", take_any_keys)
    run = Run(field.coordinator, f"agreed {changed}", PRIVATE)
    run.tell()
    task = run.task(run.model(51), ledger=head())
    tasks = dict.fromkeys(COHORT, task)
    if changed == "most_clients":
        Run(field.coordinator, run.name, PRIVATE, most_clients=1000).tell([TARGET])
    elif changed == "clip":
        tasks[TARGET] = again(task, task, clip=100.0)
    else:
        tasks[TARGET] = again(task, task, ledger=head())
    refuses(run, tasks)


@pytest.mark.parametrize(("kind", "entries", "messages"), [("distributed", 3, 2), ("central", 1, 1)])
def test_node_counts_each_attempt_in_which_noise_is_shared(
    kind: str, entries: int, messages: int, field: Field
) -> None:
    """Two sums with other clients have other noise around one message, and tell more of it than one.

    A third sum gets a message with fresh noise, for which the node trains again.
    """
    state = f"attempts of {kind}"
    program = field.start(GUEST, state=state)
    field.coordinator.wait_to_join([GUEST], field.coordinator.views[GUEST].connections + 1)
    view = field.coordinator.views[GUEST]
    before = len(view.wanted)
    run = Run(field.coordinator, state, {"privacy": {**PRIVACY, "kind": kind}})
    try:
        run.tell(NAMES)
        first = run.task(run.model(52), ledger=head())
        run.mask(dict.fromkeys(NAMES, first))
        run.mask(dict.fromkeys(NAMES, again(first, first, attempt=1)))
        run.sum_of(dict.fromkeys(NAMES, again(first, first, attempt=2)))
        assert view.wanted[before:].count(first.payload.sha256) == messages  # once for each training
    finally:
        program.kill()
    lines = (field.state(state) / "privacy" / "ledger.jsonl").read_text().splitlines()[1:]
    assert [json.loads(line)["round"] for line in lines] == [1] * entries
    hold_to_own_ledger(field.state(state))


def test_private_view_is_the_same_for_other_samples(field: Field) -> None:
    inputs, labels = samples_of(int(GUEST))
    pairs = {"usual": (inputs, labels), "others": (3.0 * inputs + 1.0, labels), "diverging": (inputs * 1e30, labels)}
    views = [
        seen_of(field, f"private {name}", pair, PRIVATE, ledger=pb.LedgerHead(count=100, sha256=bytes(32)))
        for name, pair in pairs.items()
    ]
    assert len(views[0].delivered) == 1
    for other in views[1:]:
        assert (other.said, other.delivered) == (views[0].said, views[0].delivered)


def refuses(run: Run, tasks: dict[str, pb.Assignment]) -> None:
    """Check that clients end a session whose terms are not theirs."""
    with pytest.raises(NodeRefuses, match=Reason.BROKEN_RULE):
        run.sum_of(tasks)


def hold_to_own_ledger(folder: Path) -> None:
    """Check that a node's files are for its owner alone after a kill, and that its ledger has nothing of its data."""
    for path in (folder, *folder.rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), f"{path} has {mode:o}"
    for line in (folder / "privacy" / "ledger.jsonl").read_text().splitlines()[1:]:
        entry = json.loads(line)
        assert entry.keys() <= {"run", "round", "attempt", "costs", "content", "told", "unit", "hash", "previous"}
        assert entry["content"] is None
        assert entry["told"].keys() == {"federation", "count", "sha256", "kind", "clip", "delta"}
