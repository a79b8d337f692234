"""Secure aggregation with real nodes, each a thread with all of its side of the wire."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fed
from fed.clients.data import load
from fed.clients.node.sessions import Limits, SecureNode
from fed.errors import InvalidCredentials, RunFailed, SessionFailed
from fed.identity.authority import Authority
from fed.identity.credentials import NodeCredentials, ServerCredentials
from fed.identity.identities import SignedIdentities
from fed.privacy.noise import SeededNoise
from fed.processes.clock import SYSTEM_CLOCK
from fed.protocol import protocol_pb2 as pb
from fed.secure_aggregation.agreement import digests_of, plan_digest, task_digest
from fed.secure_aggregation.coordinator import SessionCoordinator
from fed.secure_aggregation.fixed_point import FixedPoint, SecureSum
from fed.secure_aggregation.reasons import ClientRefusal, Reason
from fed.secure_aggregation.settings import settings_of
from fed.server.grpc.deployment import Deployment
from fed.server.grpc.fleet import NodeFleet
from fed.server.grpc.service import Patience
from fed.server.grpc.sessions import NodeSessions
from fed.server.observer import Essential
from fed.server.secure_fleet import SessionResult
from fed.server.telling import Observers
from fed.simulations.simulation import Simulation
from fed.storage.run_folder import RunFolder
from fed.vectors.randomness import Streams
from fed.wire.dialling import DialPatience
from fed.wire.messages import Answer, GlobalModel, Lanes, Task
from tests.observing import after_round
from tests.server.deployed import wait_for
from tests.server.grpc.threaded import ThreadedNode

PHASES = ("keys", "shares", "masked", "consent", "unmasking")
KEYS: dict[str, Any] = {
    "seed": 5,
    "data": {"kind": "digits", "clients": 6},
    "model": {"kind": "logistic"},
    "local": {"lr": 0.05},
    "checkpoints": {"every": None},
    "secure_aggregation": {"minimum_cohort": 3, "max_weight": 400, "max_drop_out": 0.0},
}
Faults = Mapping[tuple[int, int], str]
"""(client, round) → the phase in which the client falls silent."""


class Faulty(SecureNode):
    """A node that falls silent, and notes what it would have sent without masks."""

    def __init__(self, *arguments: Any, client: int, faults: Faults, plain: dict[tuple[int, int], Tensor]) -> None:
        super().__init__(*arguments, begins_record=True)
        self._client, self._faults, self._plain, self._round = client, faults, plain, 0
        self._rounds: dict[bytes, int] = {}  # by message

    def _is_silent(self, phase: str) -> bool:
        return self._faults.get((self._client, self._round)) == phase

    def prepare(
        self, experiment: fed.Experiment, plan: pb.Plan, fixed: FixedPoint | None, *, keeps_states: bool = False
    ) -> None:
        self._told = plan
        super().prepare(experiment, plan, fixed, keeps_states=keeps_states)

    def join(self, assignment: pb.Assignment) -> Sequence[pb.FromSession]:
        self._round = self._rounds[digests_of(self._told, assignment).own] = assignment.round
        keys = super().join(assignment)
        return () if self._is_silent("keys") else keys

    def answer(self, message: pb.ToSession) -> Sequence[pb.FromSession]:
        answer = super().answer(message)
        phases = {"key_list": "shares", "survivors": "consent", "consents": "unmasking"}
        phase = phases.get(message.WhichOneof("what") or "")
        return () if phase and self._is_silent(phase) else answer

    def trained(self, own_sha256: bytes, lanes: Tensor) -> Sequence[pb.FromSession]:
        number = wait_for(lambda: self._rounds.get(own_sha256, 0), "the session of a task that is trained already")
        self._plain[self._client, number] = lanes.clone()
        return super().trained(own_sha256, lanes)

    def masked(self, own_sha256: bytes, is_wanted: Callable[[], bool]) -> Tensor | None:
        wait_for(lambda: not (self._is_silent("masked") and is_wanted()), "the end of a round without its message")
        return super().masked(own_sha256, is_wanted)


class Outcome:
    """A run over nodes, with all that was summed."""

    def __init__(
        self,
        experiment: fed.Experiment,
        folder: Path,
        faults: Faults,
        monkeypatch: pytest.MonkeyPatch,
        observers: Sequence[Essential] = (),
    ) -> None:
        data = load(experiment.data, Streams(experiment.seed))  # type: ignore[arg-type]
        authority = Authority.create(folder / "keys")
        for client in data.clients:
            authority.issue(str(client))
        self.plain: dict[tuple[int, int], Tensor] = {}
        self.sums: list[tuple[SessionResult, dict[int, int | str]]] = []
        close = NodeSessions.close

        def noted(sessions: NodeSessions) -> SessionResult:
            clients = {task.id: task.client for task in sessions._tasks.values()}
            result = close(sessions)
            self.sums.append((result, clients))
            return result

        monkeypatch.setattr(NodeSessions, "close", noted)
        credentials = ServerCredentials.load(folder / "keys")
        deployment = Deployment(experiment, credentials.identities)
        fleet = NodeFleet(
            "127.0.0.1:0",
            folder / "spool",
            credentials=None,
            accepts=deployment.accepts,
            clock=SYSTEM_CLOCK,
            patience=Patience(session_s=1.5),
        )
        self.nodes = []
        for client in data.clients:
            loaded = NodeCredentials.load(folder / "keys" / "nodes" / str(client))
            (place := folder / f"node-{client}").mkdir()
            secure = Faulty(
                loaded,
                place,
                Limits(minimum_cohort=3, allows_state=True),
                client=int(client),
                faults=faults,
                plain=self.plain,
            )
            self.nodes.append(ThreadedNode(fleet.port, client, data.read(client), place, secure=secure))
        run_folder = RunFolder(folder / "run")
        try:
            with deployment.keeping_ledger(run_folder, None, resume=False):
                self.run = deployment.run(
                    fleet, len(self.nodes), run_folder, resume=False, observers=Observers(observers)
                )
        finally:
            fleet.close("the run is over", is_final=True)
        for node in self.nodes:
            node.end()

    def hold_sums_exact(self) -> None:
        """Each round's sum is that of the plain messages of its survivors, modulo 2^R."""
        for number, (result, clients) in enumerate(self.sums, 1):
            if result.total is None:
                continue
            survivors = [int(clients[task]) for task in result.survivors]
            expected = SecureSum(8 * result.total.lanes.itemsize, len(result.total.lanes))
            for client in survivors:
                expected.add(self.plain[client, number])
            assert result.total.clients == len(survivors)
            assert np.array_equal(result.total.lanes, expected.lanes)


def test_deployed_run_has_the_bits_and_bytes_of_the_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = fed.Experiment(**KEYS, rounds={"count": 3}, algorithm="scaffold")
    deployed = Outcome(experiment, tmp_path, {}, monkeypatch)
    deployed.hold_sums_exact()
    off = {"simulation.batching": "off", "simulation.workers": 0}
    simulated = fed.simulate(experiment.override(off))
    for one, other in zip(deployed.run.metrics, simulated.metrics, strict=True):
        times = {"wall_s": 0, "virtual_s": 0}
        assert {**one, **times} == {**other, **times}
    ours, theirs = (run.model.state_dict() for run in (deployed.run, simulated))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("kind", ["central", "distributed"])
def test_masked_clip_moves_as_the_simulated(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where noise in lanes is less than a unit, and the coordinator's is that of the simulation."""
    privacy = {"kind": kind, "clip": "adaptive", "noise_multiplier": 1e-9, "first_clip": 0.3}
    off = {"batching": "off", "workers": 0}
    given = fed.Experiment(**KEYS, rounds={"count": 3}, privacy=privacy, simulation=off)
    experiment = Simulation(given).experiment  # with all keys that follow from the clients
    noise = SeededNoise.of(Streams(experiment.seed), experiment.dump())
    monkeypatch.setattr("fed.server.grpc.deployment.SystemNoise", lambda: noise)
    deployed = Outcome(experiment, tmp_path, {}, monkeypatch)
    deployed.hold_sums_exact()
    simulated = fed.simulate(experiment)
    clips = [line["clip"] for line in deployed.run.metrics]
    assert clips == [line["clip"] for line in simulated.metrics]
    assert clips[0] not in (0.3, clips[1])
    ours, theirs = (run.model.state_dict() for run in (deployed.run, simulated))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_messages_that_nodes_are_asked_for_are_never_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fed.server.grpc.service._UNASKED", 10)  # of which a node may say one a second
    outcome = Outcome(fed.Experiment(**KEYS, rounds={"count": 12}), tmp_path, {}, monkeypatch)
    assert [line["replied"] for line in outcome.run.metrics] == [6] * 12
    assert outcome.run.summary["refused"] == 0


def test_server_learns_no_number_of_a_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[pb.Answer] = []
    seen = NodeFleet._received

    def noted(fleet: NodeFleet, task: Any, header: pb.Answer, tensors: Any) -> Any:
        received.append(header)
        return seen(fleet, task, header, tensors)

    monkeypatch.setattr(NodeFleet, "_received", noted)
    run = Outcome(fed.Experiment(**KEYS, rounds={"count": 1}), tmp_path, {}, monkeypatch).run
    assert {(header.weight, header.samples, header.train_loss) for header in received} == {(1.0, 1, 0.0)}
    assert run.metrics[0]["train_loss"] > 0.5
    assert len({node["answered"] for node in run.summary["nodes"].values()}) == 1


@pytest.mark.parametrize(
    "phase",
    [phase if phase == "unmasking" else pytest.param(phase, marks=pytest.mark.long) for phase in PHASES],
)
def test_sum_is_exact_with_a_node_lost(phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = fed.Experiment(**KEYS, rounds={"count": 2, "deadline_s": 8.0})
    outcome = Outcome(experiment, tmp_path, {(2, 1): phase}, monkeypatch)
    outcome.hold_sums_exact()
    is_in_sum = phase in ("consent", "unmasking")
    assert [line["replied"] for line in outcome.run.metrics] == [6 if is_in_sum else 5, 6]


@pytest.mark.long
@pytest.mark.parametrize("phase", ["shares", "masked", "consent"])
def test_round_with_too_few_is_tried_again_among_the_others(
    phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of six five are needed; of the four that are left three would do."""
    experiment = fed.Experiment(**KEYS, rounds={"count": 2, "deadline_s": 10.0, "partial_work": "drop"})
    outcome = Outcome(experiment, tmp_path, {(1, 1): phase, (4, 1): phase}, monkeypatch)
    outcome.hold_sums_exact()
    assert [line["replied"] for line in outcome.run.metrics] == [4, 6]
    trained = [len(node.training.worked) for node in outcome.nodes]
    assert trained == [2] * 6  # nobody trains twice for one round


def test_round_whose_shares_were_revealed_ends_without_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = fed.Experiment(**KEYS, rounds={"count": 2, "deadline_s": 10.0})
    faults = {(client, 1): "unmasking" for client in (1, 4)}
    outcome = Outcome(experiment, tmp_path, faults, monkeypatch)
    assert [line["replied"] for line in outcome.run.metrics] == [0, 6]
    assert outcome.run.metrics[0]["failed"] == 6
    assert outcome.sums[0][0].total is None
    outcome.hold_sums_exact()


class _Known:
    """A node's sessions, ready for a plan."""

    def __init__(self, folder: Path, minimum_cohort: int = 3) -> None:
        self.folder = folder
        self.authority = Authority.create(folder / "keys")
        for name in ("0", "1", "2"):
            self.authority.issue(name)
        self.experiment = fed.Experiment(**KEYS)
        self.fixed = FixedPoint(32, (3,), (8.0,), most_clients=4)
        self.node = self.made(minimum_cohort)

    def made(self, minimum_cohort: int = 3, name: str = "0") -> SecureNode:
        credentials = NodeCredentials.load(self.folder / "keys" / "nodes" / name)
        (state := self.folder / f"state-{name}").mkdir(exist_ok=True)
        return SecureNode(credentials, state, Limits(minimum_cohort=minimum_cohort), begins_record=True)

    def plan(self, folder: str = "keys") -> pb.Plan:
        content = (self.folder / folder / "server" / "identities.json").read_bytes()
        return pb.Plan(run="run", identities=content)


def test_node_refuses_runs_that_hide_too_little(tmp_path: Path) -> None:
    known = _Known(tmp_path, minimum_cohort=4)
    plain = known.experiment.override({"secure_aggregation": None})
    with pytest.raises(RunFailed, match="the plan has none"):
        known.node.prepare(plain, known.plan(), None)
    with pytest.raises(RunFailed, match="at least 4 clients"):
        known.node.prepare(known.experiment, known.plan(), known.fixed)
    trusting = known.experiment.override({"secure_aggregation.corrupt": 0.05})
    with pytest.raises(RunFailed, match=r"0\.1 of the clients may collude"):
        known.made().prepare(trusting, known.plan(), known.fixed)


def test_node_takes_later_identities_and_refuses_earlier_ones(tmp_path: Path) -> None:
    known = _Known(tmp_path)
    earlier = known.plan()
    known.authority.issue("3")
    known.node.prepare(known.experiment, known.plan(), known.fixed)
    for node in (known.node, known.made()):  # after a restart, too
        with pytest.raises(RunFailed, match="version"):
            node.prepare(known.experiment, earlier, known.fixed)
    known.authority.revoke("3")
    known.node.prepare(known.experiment, known.plan(), known.fixed)
    assert "3" not in SignedIdentities.read(known.plan().identities, known.node.credentials.authority_pem).points


def test_renewal_of_an_earlier_plan_changes_no_terms(tmp_path: Path) -> None:
    """It waited for its turn while the node was prepared for the next plan."""
    known = _Known(tmp_path)
    known.node.prepare(known.experiment, known.plan(), known.fixed)
    known.authority.issue("3")
    renewal = known.plan()
    later = known.plan()
    later.run = "later"
    careful = known.experiment.override({"secure_aggregation.minimum_cohort": 4})
    known.node.prepare(careful, later, known.fixed)
    known.node.renew(renewal)
    assignment = pb.Assignment(task=pb.TaskId(start=1, number=1), round=1)
    known.node.join(assignment)
    joined = known.node._participant._joined
    assert joined is not None
    terms = joined.client._terms
    assert (terms.run, terms.plan_sha256, terms.settings.minimum_cohort) == ("later", plan_digest(later), 4)


@pytest.mark.parametrize("knows", ["folder", "credentials"])
def test_newest_identities_count_wherever_a_node_has_them(knows: str, tmp_path: Path) -> None:
    """A node's credentials may be copied anew, or put back from a backup."""
    known = _Known(tmp_path)
    earlier, theirs = known.plan(), tmp_path / "keys" / "nodes" / "0" / "identities.json"
    before = theirs.read_bytes()
    known.authority.issue("3")
    assert theirs.read_bytes() != before
    if knows == "folder":
        theirs.write_bytes(before)
        known.made().prepare(known.experiment, known.plan(), known.fixed)
    else:
        (tmp_path / "state-0" / "identities.json").write_bytes(before)
    with pytest.raises(RunFailed, match="version"):
        known.made().prepare(known.experiment, earlier, known.fixed)


@pytest.mark.parametrize("wrong", ["authority", "changed", "empty", "version"])
def test_identities_of_nobody_are_refused(wrong: str, tmp_path: Path) -> None:
    known = _Known(tmp_path)
    plan = known.plan()
    match wrong:
        case "authority":
            Authority.create(tmp_path / "other")
            plan = known.plan("other")
        case "changed":
            plan.identities = plan.identities.replace(b'"2"', b'"7"')
        case "empty":
            plan.identities = b""
        case "version":
            said = json.loads(plan.identities.split(b"\n")[0])
            said["version"] += 1
            plan.identities = json.dumps(said).encode() + b"\n" + plan.identities.split(b"\n")[1]
    with pytest.raises(ClientRefusal, match="signed by this node's authority") as refused:
        known.node.prepare(known.experiment, plan, known.fixed)
    assert refused.value.reason is Reason.OLD_IDENTITIES


def test_node_without_identities_says_so(tmp_path: Path) -> None:
    known = _Known(tmp_path)
    (tmp_path / "keys" / "nodes" / "0" / "identities.json").unlink()
    with pytest.raises(InvalidCredentials, match="copy the node's folder anew"):
        known.made()


class _Task:
    """A task of a node in a round, with its message of zeros."""

    def __init__(self, known: _Known, number: int, attempt: int = 0, **fields: Any) -> None:
        self.id = pb.TaskId(start=1, number=number)
        self.assignment = pb.Assignment(task=self.id, round=number, attempt=attempt, **fields)
        self.own_sha256 = digests_of(known.plan(), self.assignment).own
        self.lanes = torch.zeros(known.fixed.lanes, dtype=torch.int32)

    def told(self, **said: Any) -> pb.ToSession:
        return pb.ToSession(task=self.id, attempt=self.assignment.attempt, **said)


def test_message_told_twice_is_answered_alike(tmp_path: Path) -> None:
    known = _Known(tmp_path)
    known.node.prepare(known.experiment, known.plan(), known.fixed)
    task = _Task(known, 1)
    keys = known.node.join(task.assignment)
    assert known.node.join(task.assignment) == keys
    said = task.told(key_list=pb.KeyList(clients=b"noise"))
    (answer,) = known.node.answer(said)
    assert answer.aborted == Reason.BROKEN_RULE
    assert known.node.answer(said) == [answer]
    with pytest.raises(SessionFailed, match="must"):
        known.node.masked(task.own_sha256, _wanted_for_two_seconds())


def test_end_of_an_attempt_leaves_the_next_one_alone(tmp_path: Path) -> None:
    """It came before anybody waited for the message."""
    known = _Known(tmp_path)
    known.node.prepare(known.experiment, known.plan(), known.fixed)
    task = _Task(known, 1)
    known.node.join(task.assignment)
    known.node.answer(task.told(key_list=pb.KeyList(clients=b"noise")))
    (keys,) = known.node.join(_Task(known, 1, attempt=1).assignment)
    assert keys.HasField("keys")
    looks = iter([True, False])
    assert known.node.masked(task.own_sha256, lambda: next(looks)) is None


def _wanted_for_two_seconds() -> Callable[[], bool]:
    end_s = time.monotonic() + 2.0
    return lambda: time.monotonic() < end_s


def _asked_for_shares(known: _Known, task: _Task) -> tuple[dict[str, SecureNode], dict[str, pb.ToSession]]:
    """Nodes that have consented, and the message that asks each of them for its shares."""
    nodes = {name: known.made(name=name) for name in ("0", "1", "2")}
    keys = {}
    for name, node in nodes.items():
        node.prepare(known.experiment, known.plan(), known.fixed)
        (said,) = node.join(task.assignment)
        keys[name] = said.keys
    joined = nodes["0"]._participant._joined
    assert joined is not None
    identities = SignedIdentities.read(known.plan().identities, known.node.credentials.authority_pem).known()
    coordinator = SessionCoordinator(joined.client._terms, identities)

    def answer(name: str, **said: Any) -> pb.FromSession:
        return next(iter(nodes[name].answer(task.told(**said))), pb.FromSession())

    for name, own in keys.items():
        coordinator.take_keys(name, own)
    for name, listed in coordinator.close_keys():
        coordinator.take_shares(name, answer(name, key_list=listed).shares)
    for name, delivery in coordinator.close_shares().items():
        nodes[name].trained(task.own_sha256, task.lanes)
        answer(name, delivery=delivery)
        lanes = nodes[name].masked(task.own_sha256, lambda: True)
        assert lanes is not None
        coordinator.take_masked(name, lanes)
    survivors, names = coordinator.close_masked()
    for name in names:
        coordinator.take_consent(name, answer(name, survivors=survivors).consent)
    relayed = coordinator.close_consents()
    return nodes, {name: task.told(consents=consents) for name, consents in relayed.items()}


def test_revealed_round_is_on_the_disk_before_shares_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = _Known(tmp_path)
    task = _Task(known, 4)
    nodes, asked = _asked_for_shares(known, task)
    kept = [path.read_bytes() for path in tmp_path.glob("state-*/revealed-rounds")]

    def is_full(*_: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", is_full)
        (refused,) = nodes["1"].answer(asked["1"])
    assert refused.aborted == Reason.NODE_FAILED
    assert [path.read_bytes() for path in tmp_path.glob("state-*/revealed-rounds")] == kept
    (answer,) = nodes["0"].answer(asked["0"])
    assert answer.HasField("unmasking")
    assert nodes["0"].answer(asked["0"]) == [answer]  # should the connection have been lost
    restarted = known.made()
    restarted.prepare(known.experiment, known.plan(), known.fixed)
    for node in (nodes["0"], restarted):
        (said,) = node.join(_Task(known, 4, attempt=1).assignment)
        assert said.aborted == Reason.REVEALED
        (said,) = node.join(_Task(known, 5).assignment)
        assert said.HasField("keys")


def test_messages_of_another_task_or_attempt_are_not_answered(tmp_path: Path) -> None:
    known = _Known(tmp_path)
    nodes, asked = _asked_for_shares(known, _Task(known, 4))
    other_attempt, other_task = pb.ToSession(), pb.ToSession()
    for other in (other_attempt, other_task):
        other.CopyFrom(asked["0"])
    other_attempt.attempt, other_task.task.number = 1, 5
    assert [nodes["0"].answer(other) for other in (other_attempt, other_task)] == [[], []]
    (answer,) = nodes["0"].answer(asked["0"])
    assert answer.HasField("unmasking")


def test_one_task_with_two_models_ends_the_session(tmp_path: Path) -> None:
    known = _Known(tmp_path)
    known.node.prepare(known.experiment, known.plan(), known.fixed)
    first = _Task(known, 1, model_sha256=b"a" * 32)
    other = _Task(known, 1, model_sha256=b"b" * 32)
    known.node.join(first.assignment)
    (said,) = known.node.join(other.assignment)
    assert said.aborted == Reason.TOLD_TWICE
    with pytest.raises(SessionFailed, match="two models"):
        known.node.masked(other.own_sha256, _wanted_for_two_seconds())
    (answer,) = known.node.answer(first.told(key_list=pb.KeyList()))
    assert answer.aborted == Reason.BROKEN_RULE


def test_all_that_tasks_have_in_common_is_digested() -> None:
    base = pb.Assignment(round=1, lr=0.1, steps=2, model_sha256=b"a", broadcast_count=1, population=5)
    changed = []
    for name, value in {
        "round": 2,
        "lr": 0.2,
        "steps": 3,
        "model_sha256": b"b",
        "broadcast_count": 2,
        "population": 6,
        "repeats": 1,
        "takes_parts": True,
    }.items():
        other = pb.Assignment()
        other.CopyFrom(base)
        setattr(other, name, value)
        changed.append(other)
    without = pb.Assignment()
    without.CopyFrom(base)
    without.ClearField("lr")
    assert len({task_digest(one) for one in (base, without, *changed)}) == 2 + len(changed)
    own = pb.Assignment()
    own.CopyFrom(base)
    own.place = 3  # a client's own, as are others; and two that are in the terms by themselves, or shape nothing
    own.deadline_s = 4.0
    own.attempt = 1
    assert task_digest(own) == task_digest(base)
    plans = pb.Plan(experiment="a"), pb.Plan(experiment="b"), pb.Plan(experiment="a", format=pb.Format(parts=[1]))
    assert len({plan_digest(plan) for plan in plans}) == 3


def test_node_trains_no_other_model_than_was_agreed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fed.server.grpc.sessions.model_digest", lambda tensors: b"0" * 32)
    run = Outcome(fed.Experiment(**KEYS, rounds={"count": 1}), tmp_path, {}, monkeypatch).run
    assert run.metrics[0]["replied"] == 0
    assert run.summary["nodes"]["0"]["failed"] == 1
    assert Reason.OTHER_MODEL in caplog.text


def test_nodes_go_on_when_identities_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def issue(line: Mapping[str, Any]) -> None:
        if line["round"] == 1:
            Authority.load(tmp_path / "keys").issue("another")

    experiment = fed.Experiment(**KEYS, rounds={"count": 3})
    outcome = Outcome(experiment, tmp_path, {}, monkeypatch, observers=[after_round(issue)])
    assert [line["replied"] for line in outcome.run.metrics] == [6, 6, 6]
    assert all("another" in node.node.secure._identities.points for node in outcome.nodes if node.node.secure)


class _Stub:
    """A fleet that does nothing, for what arrives in odd orders."""

    clock = 0.0

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def test_messages_in_odd_orders_end_no_server(tmp_path: Path) -> None:
    known = _Known(tmp_path)
    content = SignedIdentities.read(known.plan().identities, known.node.credentials.authority_pem)
    stub: Any = _Stub()
    settings = settings_of(known.experiment)
    assert settings is not None
    sessions = NodeSessions(stub, settings, known.fixed, "run", lambda: content, 1.0)
    model = GlobalModel(0, torch.zeros(3), torch.zeros(0, dtype=torch.int64))
    tasks = [Task(number, 1, number, model) for number in range(3)]
    answer = Answer((0,), 1, (0,), Lanes(torch.zeros(known.fixed.lanes, dtype=torch.int32)))
    sessions.open(tasks)
    sessions.take(answer)  # before there is a session
    assignments = {task.client: pb.Assignment(task=pb.TaskId(number=task.id), round=1) for task in tasks}
    sessions.begin(assignments, model)
    for said in ("aborted", "consent", "unmasking", "shares", "keys"):
        message = pb.FromSession(task=pb.TaskId(number=0))
        if said == "aborted":
            message.aborted = "tired"
        else:
            getattr(message, said).SetInParent()
        sessions.take_message(0, message)
    sessions.take(answer)  # after it has ended its session
    assert not sessions._sent
    sessions.take_failure(1)
    assert sessions.close().total is None


def test_client_whose_task_failed_after_its_keys_is_told_nothing(tmp_path: Path) -> None:
    known = _Known(tmp_path)
    known.authority.issue("3")
    identities = SignedIdentities.read(known.plan().identities, known.node.credentials.authority_pem)
    told: list[int | str] = []
    dropped: list[str] = []
    fleet: Any = _Stub()
    fleet.tell = lambda client, message: told.append(client)
    fleet.give_up = lambda task, reason: dropped.append(reason)
    settings = settings_of(known.experiment)
    assert settings is not None
    plan_sha256 = plan_digest(known.plan())
    sessions = NodeSessions(fleet, settings, known.fixed, "run", lambda: identities, 1.0, plan_sha256)
    model = GlobalModel(0, torch.zeros(3), torch.zeros(0, dtype=torch.int64))
    sessions.open([Task(number, 1, number, model) for number in range(4)])
    ids = [pb.TaskId(start=1, number=number) for number in range(4)]
    assignments: dict[int | str, pb.Assignment] = {one.number: pb.Assignment(task=one, round=1) for one in ids}
    sessions.begin(assignments, model)
    for number in (3, 2, 1, 0):
        node = known.made(name=str(number))
        node.prepare(known.experiment, known.plan(), known.fixed)
        (keys,) = node.join(assignments[number])
        sessions.take_message(number, keys)
        if number == 3:
            sessions.take_failure(3)
        sessions.take_message(number, keys)  # again, after a connection was lost
    assert sorted(told) == [0, 1, 2]
    assert not dropped


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of the node that refuses
def test_server_is_told_why_a_node_takes_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prepare = SecureNode.prepare

    def refusing(node: SecureNode, *given: Any, **limits: Any) -> None:
        if node.credentials.name == "2":
            raise ClientRefusal("this node takes part in sums of 60", Reason.HIDES_TOO_LITTLE)
        prepare(node, *given, **limits)

    monkeypatch.setattr(SecureNode, "prepare", refusing)
    monkeypatch.setattr(DialPatience, "pause_s", lambda self, failures: 0.0)  # one that came back would do so at once
    caplog.set_level("INFO")
    outcome = Outcome(fed.Experiment(**KEYS, rounds={"count": 2, "cohort": "all"}), tmp_path, {}, monkeypatch)
    assert {line["replied"] for line in outcome.run.metrics} <= {4, 5}
    assert caplog.text.count(f"client 2 takes no part: {Reason.HIDES_TOO_LITTLE}") == 1
    assert caplog.text.count("client 2 has joined") == 1  # and does not come back
