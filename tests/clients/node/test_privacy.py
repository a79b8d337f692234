"""A node's own account of privacy: budgets, coordinators that were put back, and its folder put back itself."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fed.clients.node.plans import as_experiment, part_of_nodes
from fed.clients.node.privacy import PrivateNode
from fed.config.experiment import Experiment
from fed.config.node_data import NodePrivacy
from fed.errors import InvalidExperiment, LedgerFailed
from fed.privacy.accounting import epsilon
from fed.privacy.dp_ftrl import FollowTheLeaderPrivacy
from fed.privacy.entries import Head
from fed.privacy.releases import Release
from fed.protocol import protocol_pb2 as pb
from fed.secure_aggregation.reasons import ClientRefusal, Reason

PLAN = pb.Plan(run="run")


@contextmanager
def node(folder: Path, *, is_private: bool = True, **given: Any) -> Iterator[PrivateNode]:
    """A node that has taken the plan of a run."""
    privacy: Any = {"kind": "central", "noise_multiplier": 2.0, "clip": 0.5} if is_private else None
    found = PrivateNode("ann", folder, **given)
    try:
        found.prepare(Experiment(data=None, privacy=privacy), PLAN)
        yield found
    finally:
        found.close()


def task(count: int | None, ledger: bytes = b"a", number: int = 1) -> pb.Assignment:
    """A task that tells a head of the coordinator's ledger."""
    found = pb.Assignment(round=number)
    if count is not None:
        found.ledger.count = count
        found.ledger.sha256 = ledger * 32
    return found


def test_budget_ends_tasks_over_runs_and_starts(tmp_path: Path) -> None:
    release = Release(noise_multiplier=2.0)
    budget = NodePrivacy(budget_epsilon=epsilon({release: 3}, 1e-6) + 1e-9, delta=1e-6)
    for count in range(1, 4):
        with node(tmp_path, limits=budget) as found:
            found.record(task(count))
    with (
        node(tmp_path, limits=budget) as found,
        pytest.raises(ClientRefusal, match="takes no part any more") as refused,
    ):
        found.check(task(4))
    assert refused.value.reason is Reason.BUDGET_SPENT


def test_budget_of_the_plan_ends_what_own_steps_cost(tmp_path: Path) -> None:
    """Of 64 samples, in batches of 16: four steps a task, with a sampling of a quarter each."""
    step = Release(noise_multiplier=2.0, sampling=0.25)
    budget = epsilon({step: 8}, 1e-5) * 1.001
    keys = {"kind": "local", "unit": "sample", "noise_multiplier": 2.0, "clip": 0.5, "budget_epsilon": budget}
    found = PrivateNode("ann", tmp_path)
    found.prepare(Experiment(data=None, privacy=keys, local={"batch_size": 16}), PLAN, samples=64)
    for count in (1, 2):
        found.record(task(count))
    with pytest.raises(ClientRefusal, match="the plan's privacy section allows") as refused:
        found.check(task(3))
    assert refused.value.reason is Reason.BUDGET_SPENT
    found.close()


def test_epsilon_of_the_plan_holds_however_often_a_server_asks(tmp_path: Path) -> None:
    """Noise is found for two rounds of a run, after which the next run has noise of its own."""
    keys = {"kind": "local", "unit": "sample", "epsilon": 1.0, "clip": 0.5}
    experiment = Experiment(data=None, privacy=keys, rounds={"count": 2}, local={"batch_size": 16})
    found = PrivateNode("ann", tmp_path)
    for run in ("first", "second"):
        found.prepare(experiment, pb.Plan(run=run), samples=64)
        for number in (1, 2):
            found.record(task(2, number=number))
        with pytest.raises(ClientRefusal, match="promises for the whole run 1: it takes no part any more"):
            found.record(task(2, number=3))
    found.close()


def test_plan_whose_epsilon_no_noise_spends_is_refused(tmp_path: Path) -> None:
    keys = {"kind": "local", "unit": "sample", "clip": 0.5, "epsilon": 1e9}
    found = PrivateNode("ann", tmp_path)
    with pytest.raises(InvalidExperiment, match=r"privacy\.epsilon cannot be reached: no noise multiplier"):
        found.prepare(Experiment(data=None, privacy=keys), PLAN, samples=64)
    found.close()


def test_node_with_a_budget_takes_part_in_private_runs_alone(tmp_path: Path) -> None:
    with (
        pytest.raises(ClientRefusal, match="no section privacy") as refused,
        node(tmp_path, is_private=False, limits=NodePrivacy(budget_epsilon=1.0)),
    ):
        pass
    assert refused.value.reason is Reason.NO_PRIVACY
    with node(tmp_path / "other", is_private=False) as found:
        found.record(task(None))
        assert found.seen is None
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("limits", "keys", "refusal"),
    [
        ({"kinds": ["central", "local"]}, {}, None),
        ({"kinds": ["local"]}, {}, "of kind local .privacy.kinds in its file., and the plan's is central"),
        ({"kinds": ["local", "distributed"]}, {}, "of kind local or distributed"),
        ({"least_noise_multiplier": 2.0}, {}, None),
        ({"least_noise_multiplier": 2.1}, {}, r"at least 2\.1 .privacy.least_noise_multiplier in its file., .* is 2"),
        ({"least_noise_multiplier": 1.0}, {"noise_multiplier": None, "epsilon": 1.0}, "the plan's is not said"),
        ({"least_noise_multiplier": 2.0}, {"kind": "local", "unit": "sample"}, None),
        ({"least_noise_multiplier": 2.1}, {"kind": "local", "unit": "sample"}, "the plan's is 2"),
        ({}, {}, None),
    ],
)
def test_plan_is_held_to_what_the_owner_accepts(
    limits: dict[str, Any], keys: dict[str, Any], refusal: str | None, tmp_path: Path
) -> None:
    found = PrivateNode("ann", tmp_path, limits=NodePrivacy(**limits))
    privacy = {"kind": "central", "noise_multiplier": 2.0, "clip": 0.5, **keys}
    plan = partial(found.prepare, Experiment(data=None, privacy=privacy), PLAN, samples=64)
    if refusal is None:
        plan()
        found.record(task(1))
    else:
        with pytest.raises(ClientRefusal, match=refusal) as refused:
            plan()
        assert refused.value.reason is Reason.HIDES_TOO_LITTLE
    found.close()


@pytest.mark.parametrize("later", [task(1), task(2, b"b"), task(None)], ids=["fewer entries", "others", "none at all"])
def test_coordinator_that_was_put_back_is_refused(later: pb.Assignment, tmp_path: Path) -> None:
    with node(tmp_path) as found:
        found.record(task(2))
    with node(tmp_path) as found:
        assert found.seen == Head(2, (b"a" * 32).hex())
        with pytest.raises(ClientRefusal, match=r"put the newest ledger back|does not say how much") as refused:
            found.record(later)
        assert refused.value.reason is Reason.OTHER_LEDGER
        found.record(task(2))  # the same round again
        found.record(task(9, b"c"))
        assert found.seen == Head(9, (b"c" * 32).hex())


@pytest.mark.parametrize(
    "head", [{"ledger": b"a" * 40_000}, {"ledger": b""}, {"count": 2**60}], ids=["long", "none", "count"]
)
def test_head_that_no_ledger_has_is_not_kept(head: dict[str, Any], tmp_path: Path) -> None:
    """It would be told to honest servers ever after, which refuse it, or a joining of that size."""
    with node(tmp_path) as found:
        with pytest.raises(ClientRefusal, match="must have a head of 32 bytes") as refused:
            found.record(task(**{"count": 1, **head}))
        assert refused.value.reason is Reason.OTHER_LEDGER
        assert found.seen is None


def test_run_with_an_endless_name_is_refused(tmp_path: Path) -> None:
    found = PrivateNode("ann", tmp_path)
    privacy: Any = {"kind": "central", "noise_multiplier": 2.0, "clip": 0.5}
    with pytest.raises(ClientRefusal, match="at most 200 letters, got 100000") as refused:
        found.prepare(Experiment(data=None, privacy=privacy), pb.Plan(run="r" * 100_000))
    assert refused.value.reason is Reason.CANNOT_FOLLOW
    found.close()


def test_each_federation_has_a_ledger_of_its_own(tmp_path: Path) -> None:
    with node(tmp_path, authority_pem=b"one") as found:
        found.record(task(7))
    with node(tmp_path, authority_pem=b"two") as found:
        assert found.seen is None
        found.record(task(1, b"b"))
    with node(tmp_path, authority_pem=b"one") as found:
        assert found.seen == Head(7, (b"a" * 32).hex())


def test_folder_that_was_put_back_forgets_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    budget = NodePrivacy(budget_epsilon=epsilon({Release(noise_multiplier=2.0): 3}, 1e-5) + 1e-9)
    with node(folder, limits=budget) as found:
        found.record(task(1))
    shutil.copytree(folder, tmp_path / "older")
    with node(folder, limits=budget) as found:
        found.record(task(2))
        found.record(task(3))
    for restored in (tmp_path / "older", None):
        shutil.rmtree(folder)
        if restored is not None:
            shutil.copytree(restored, folder)
        with node(folder, limits=budget) as found:
            assert found.seen == Head(3, (b"a" * 32).hex())
            with pytest.raises(ClientRefusal, match="takes no part any more"):
                found.check(task(4))


def test_ledger_and_its_copy_are_for_their_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FED_STATE", str(tmp_path / "state"))
    with node(tmp_path / "node") as found:
        found.record(task(1))
    for path in (*(tmp_path / "node").rglob("*"), *(tmp_path / "state" / "privacy").rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    assert len([*tmp_path.rglob("ledger.jsonl")]) == 2


def test_message_stays_where_it_cannot_be_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(_: int) -> None:
        raise OSError(28, "no space left on device")

    with node(tmp_path) as found:
        found.record(task(1))
        with monkeypatch.context() as full:
            full.setattr("os.fsync", is_full)
            with pytest.raises(LedgerFailed, match="nothing of this round was released"):
                found.record(task(2))
        assert found.seen == Head(1, (b"a" * 32).hex())


def test_entry_has_the_terms_that_were_told(tmp_path: Path) -> None:
    with node(tmp_path, authority_pem=b"one") as found:
        found.record(task(4, number=3))
        (entry,) = found.entries
    assert (entry.run, entry.round, dict(entry.costs[0].releases)) == ("run", 3, {Release(noise_multiplier=2.0): 1})
    assert entry.told is not None
    assert {key: entry.told[key] for key in ("kind", "clip", "delta", "count")} == {
        "kind": "central",
        "clip": 0.5,
        "delta": 1e-5,
        "count": 4,
    }


def test_node_counts_noise_that_later_rounds_take_back(tmp_path: Path) -> None:
    privacy: Any = {"kind": "dp_ftrl", "noise_multiplier": 2.0, "clip": 0.5, "min_separation": 3}
    experiment = Experiment(data=None, rounds={"count": 9}, privacy=privacy)
    settings = FollowTheLeaderPrivacy(noise_multiplier=2.0, clip=0.5, min_separation=3)
    rule = settings.participation_rule(9)
    sensitivity = float(settings.matrix(9).sensitivities(rule)[-1])
    assert sensitivity**2 > 3.5  # three messages with independent noise would cost 3
    found = PrivateNode("ann", tmp_path)
    for place, number in enumerate((1, 4, 7)):
        found.prepare(as_experiment(json.dumps(part_of_nodes(experiment)), []), PLAN)
        found.record(task(place, number=number))
    spent = sum((Counter(cost.releases) for entry in found.entries for cost in entry.costs), Counter[Release]())
    found.close()
    assert epsilon(spent, 1e-5) == pytest.approx(epsilon({Release(noise_multiplier=2.0 / sensitivity): 1}, 1e-5))
