"""Ledgers of a server and of its nodes, in one process: budgets, other runs, and a server that was put back."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import fed
from fed.clients.data import load
from fed.clients.node.privacy import PrivateNode
from fed.clients.node.training import NodeTraining
from fed.config.node_data import NodePrivacy
from fed.privacy.accounting import epsilon
from fed.privacy.ledger import Ledger, federation_of, ledger_folder
from fed.privacy.releases import Release
from fed.protocol import protocol_pb2 as pb
from fed.secure_aggregation.reasons import Reason
from fed.server.grpc.deploy import serve
from fed.server.grpc.deployment import Deployment
from fed.server.observer import Essential, Event, TaskFailed
from fed.server.sample_account import SampleAccount
from fed.storage.run_folder import RunFolder
from fed.vectors.randomness import Streams
from tests.server.grpc.threaded import ThreadedNode

RELEASE = Release(noise_multiplier=1.0)
LEDGER = Path("ledger.jsonl")


def private(
    name: str = "run", cohort: int | str = "all", deadline_s: float | None = None, **given: Any
) -> fed.Experiment:
    """Two rounds over three clients with central noise."""
    return fed.Experiment(
        name=name,
        data={"kind": "digits", "clients": 3},
        model={"kind": "mlp", "hidden": [8]},
        rounds={"count": 2, "cohort": cohort, "deadline_s": deadline_s},
        privacy={"kind": "central", "clip": 0.3, "noise_multiplier": 1.0, **given},
        checkpoints={"every": 1, "keep": 2},
    )


def served(
    folder: Path,
    name: str = "run",
    limits: Mapping[int, NodePrivacy] | None = None,
    observers: Sequence[Any] = (),
    resume: bool = False,
    **given: Any,
) -> fed.Run:
    """Two rounds over three nodes, whose folders outlive the run."""
    experiment = RunFolder.existing(folder / name).experiment({}) if resume else private(name, **given)
    assert experiment.data is not None
    data = load(experiment.data, Streams(experiment.seed))
    nodes: list[ThreadedNode] = []
    accounts = {
        client: PrivateNode(str(client), folder / f"node-{client}", limits=(limits or {}).get(client))
        for client in range(3)
    }

    def begin(port: int) -> None:
        for client in range(3):
            own = folder / f"node-{client}"
            nodes.append(ThreadedNode(port, client, data.only(client, client), own, private=accounts[client]))

    try:
        return serve(
            experiment,
            listen="127.0.0.1:0",
            output=folder / name,
            min_nodes=3,
            on_listen=begin,
            observers=observers,
            resume=resume,
        )
    finally:
        for node in nodes:
            node.end()
        for one in accounts.values():
            one.close()


def kept() -> Path:
    """The server's own ledger."""
    return ledger_folder(federation_of(None)) / LEDGER


def test_each_run_is_written_down_before_its_tasks(tmp_path: Path) -> None:
    first, second = served(tmp_path), served(tmp_path, "another")
    assert [line["epsilon"] for line in (*first.metrics, *second.metrics)] == pytest.approx(
        [epsilon({RELEASE: count}, 1e-5) for count in range(1, 5)], rel=0.005
    )
    ledger = Ledger.read(kept())
    assert ledger.releases() == {RELEASE: 4}
    assert kept().read_bytes() == (tmp_path / "another" / LEDGER).read_bytes()
    for client in range(3):
        own = Ledger.read(tmp_path / f"node-{client}" / "privacy" / LEDGER)
        assert own.releases() == {RELEASE: 4}
        heads = [entry.told for entry in own.entries]
        # With the round's own entry: a node knows of a release before there is one.
        assert [(told["count"], told["sha256"]) for told in heads if told] == [
            (count, ledger.hash_at(count)) for count in range(1, 5)
        ]


def test_resumed_run_knows_the_rounds_that_are_done_again(tmp_path: Path) -> None:
    """Though its experiment says now what was found when it began: the separation, and the noise for an ε."""
    served(tmp_path, cohort=1, kind="dp_ftrl", noise_multiplier=None, epsilon=8.0)
    (newest,) = (tmp_path / "run").glob("checkpoints/*2.safetensors")
    newest.unlink()
    served(tmp_path, resume=True)
    entries = Ledger.read(kept()).entries
    assert [(entry.round, entry.attempt) for entry in entries] == [(1, 0), (2, 0), (2, 1)]
    own = Ledger.read(tmp_path / "node-0" / "privacy" / LEDGER).entries
    assert len({entry.run for entry in (*entries, *own)}) == 1
    first, second, again = (next(iter(entry.costs[0].releases)).noise_multiplier for entry in entries)
    assert again == first < second  # in the lost round there may have been a client that the first had not


def test_another_run_shares_no_rounds_with_the_first(tmp_path: Path) -> None:
    """Of the same experiment: its noise is fresh from the first round on."""
    for name in ("one", "two"):
        served(tmp_path, name, cohort=1, kind="dp_ftrl")
    one, another = (Ledger.read(kept()).entries[place : place + 2] for place in (0, 2))
    assert [entry.costs for entry in one] == [entry.costs for entry in another]
    assert {entry.run for entry in one}.isdisjoint({entry.run for entry in another})


def test_run_ends_before_the_round_that_would_pass_the_budget(tmp_path: Path) -> None:
    budget = epsilon({RELEASE: 3}, 1e-5) + 0.01
    assert served(tmp_path).summary["rounds"] == 2
    run = served(tmp_path, "another", budget_epsilon=budget)
    assert run.summary["rounds"] == 1
    assert "would pass privacy.budget_epsilon" in run.summary["reason"]
    assert Ledger.read(kept()).releases() == {RELEASE: 3}


def test_node_refuses_what_would_pass_its_own_budget(tmp_path: Path) -> None:
    budget = NodePrivacy(budget_epsilon=epsilon({RELEASE: 1}, 1e-5) + 0.01)
    run = served(tmp_path, limits={0: budget})
    assert [line["failed"] for line in run.metrics] == [0, 1]
    assert Ledger.read(tmp_path / "node-0" / "privacy" / LEDGER).releases() == {RELEASE: 1}
    assert "allows" not in str(run.summary)  # what its owner has spent elsewhere is nobody's business


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of the node that refuses
@pytest.mark.parametrize(
    "limits",
    [NodePrivacy(kinds=["local", "distributed"]), NodePrivacy(kinds=["central"], least_noise_multiplier=2.0)],
    ids=["kind", "noise"],
)
def test_node_refuses_weaker_privacy_than_its_owner_asks_for(
    limits: NodePrivacy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    # A task that it was given while it left would be waited for, as that of a node that is away for a moment.
    run = served(tmp_path, limits={0: limits}, deadline_s=5.0)
    assert {line["replied"] for line in run.metrics} == {2}
    assert caplog.text.count(f"client 0 takes no part: {Reason.HIDES_TOO_LITTLE}") == 1
    assert not (tmp_path / "node-0" / "privacy" / LEDGER).exists()
    assert (tmp_path / "node-1" / "privacy" / LEDGER).exists()


def test_server_with_an_older_ledger_is_refused_as_nodes_join(tmp_path: Path) -> None:
    served(tmp_path)
    older = kept().read_bytes()
    served(tmp_path, "another")
    node = PrivateNode("0", tmp_path / "node-0")
    seen = node.seen
    node.close()
    assert seen is not None
    head = pb.LedgerHead(count=seen.count, sha256=bytes.fromhex(seen.sha256))
    reasons = {}
    for content in (kept().read_bytes(), older):
        kept().write_bytes(content)
        deployment = Deployment(private())
        with deployment.keeping_ledger(RunFolder(tmp_path / "new"), None, resume=False):
            reasons[content == older] = deployment.accepts(pb.Joining(ledger=head))
    assert "ledger" not in str(reasons[False])
    assert "put the newest ledger back at the server" in str(reasons[True])


def test_node_counts_its_own_samples_whatever_the_server_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server knows of no budget here, and each node ends at its first task beyond the plan's."""
    monkeypatch.setattr(SampleAccount, "_has_left", lambda *_: True)
    run = served(tmp_path, kind="local", unit="sample", budget_epsilon=1e-3)
    assert [(line["replied"], line["failed"]) for line in run.metrics] == [(0, 3), (0, 3)]


@pytest.mark.parametrize("kind", ["central", "local"])
def test_server_hears_a_constant_of_what_went_wrong(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss, a label or a number of samples in a sentence would be outside the noise."""

    def failed(self: NodeTraining, assignment: Any, *_: Any) -> Any:
        if self._client == 1:
            raise ValueError("label 7 of 59 samples is out of range")
        return pb.Failed(task=assignment.task, reason="the training loss became 8.8e14", diverged=True)

    monkeypatch.setattr(NodeTraining, "train", failed)
    heard: list[TaskFailed] = []

    class Listener:
        kinds = (TaskFailed,)

        def observe(self, event: Event) -> None:
            assert isinstance(event, TaskFailed)
            heard.append(event)

    served(tmp_path, kind=kind, observers=[Essential(Listener())])
    assert {event.reason for event in heard} <= {str(reason) for reason in Reason}
    assert [event.has_diverged for event in heard] == [False] * 6
