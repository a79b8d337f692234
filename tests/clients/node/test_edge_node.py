"""A node whose connection breaks at the worst moments, and what it says to whoever looks after it."""

import contextlib
import json
import logging
import queue
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, Self, cast

import grpc
import pytest
import torch

from fed.clients.node.edge_node import EdgeNode
from fed.clients.node.fixed_part import FixedPartMissing
from fed.clients.node.training import Hidden
from fed.clients.node.training_process import TrainingProcessDied
from fed.config.experiment import Experiment
from fed.errors import FedError, RunFailed
from fed.identity.authority import Authority
from fed.identity.credentials import NodeCredentials, ServerCredentials
from fed.protocol.protocol_pb2 import (
    Answer,
    Assignment,
    Chunk,
    Examination,
    Failed,
    Farewell,
    FromNode,
    Heartbeat,
    Part,
    Payload,
    Plan,
    Receipt,
    Scores,
    TaskId,
    ToNode,
    ToSession,
    Wanted,
    Withdrawal,
)
from fed.protocol.protocol_pb2 import Tensor as TensorMessage
from fed.protocol.protocol_pb2_grpc import add_CoordinationServicer_to_server
from fed.wire.dialling import DialPatience
from fed.wire.format import TaskSpec
from fed.wire.payloads import TensorSpec
from tests.clients.node.test_hostile_server import BOUND_S, KEYS, MODEL, Server, Training, assignment, payload, plan

OVER = ToNode(farewell=Farewell(reason="enough", is_final=True))
TASK = TaskId(start=1, number=1)


class Trained(Training):
    """Answers the model that came, once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.begun = threading.Event()
        self.problem = ""

    def train(self, assignment: Assignment, path: Path, until_s: float | None = None) -> Answer | Failed:
        self.trained.append(assignment)
        self.begun.set()
        assert self.goes_on.wait(BOUND_S)
        if self.problem:
            return Failed(task=assignment.task, reason=self.problem)
        return answer(assignment)


def answer(to: Assignment, content: Payload | None = None) -> Answer:
    return Answer(task=to.task, payload=content or payload(), weight=10.0, samples=10, train_loss=0.5)


class Coordinator(Server):
    """Says what it is told to, sends the model, and takes answers."""

    def __init__(self, says: Callable[["Coordinator", int], Iterator[ToNode]]) -> None:
        super().__init__(lambda _: iter(()), ())
        self.script = says
        self.connections = 0
        self.received = threading.Event()

    def Attend(self, request_iterator: Iterator[Any], context: Any) -> Iterator[ToNode]:  # noqa: N802
        self.connections += 1
        threading.Thread(target=self._listen, args=(request_iterator,), daemon=True).start()
        yield from self.script(self, self.connections)

    def Download(self, request: Wanted, context: Any) -> Iterator[Chunk]:  # noqa: N802
        yield Chunk(data=MODEL, crc32=zlib.crc32(MODEL))

    def Deliver(self, request_iterator: Iterator[Part], context: Any) -> Receipt:  # noqa: N802
        self.delivered.append(list(request_iterator))
        self.received.set()
        return Receipt(accepted=True)


def attended(
    folder: Path,
    says: Callable[[Any, int], Iterator[ToNode]],
    training: Any,
    kind: type[Coordinator] = Coordinator,
    silence_s: float = 20.0,
    secure: Any = None,
    nodes: list[EdgeNode] | None = None,
) -> tuple[str, Any]:
    """What a node says last that dials such a server."""
    server, coordinator = grpc.server(futures.ThreadPoolExecutor(8)), kind(says)
    add_CoordinationServicer_to_server(coordinator, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    patience = DialPatience(silence_s=silence_s, backoff_s=0.001, most_backoff_s=0.002)
    node = EdgeNode(f"127.0.0.1:{port}", None, "0", 0, training, folder, patience=patience, secure=secure)
    if nodes is not None:
        nodes.append(node)
    stopped = threading.Event()
    limit = threading.Timer(BOUND_S, stopped.set)
    limit.start()
    try:
        return node.run(stopped=stopped), coordinator
    except FedError as error:
        return str(error), coordinator
    finally:
        limit.cancel()
        server.stop(0).wait()


def test_training_node_stays_however_often_its_connection_breaks(tmp_path: Path) -> None:
    training = Trained()
    training.goes_on.clear()

    def says(server: Coordinator, connection: int) -> Iterator[ToNode]:
        yield plan()
        if connection == 1:
            yield assignment(payload=payload())
            assert training.begun.wait(BOUND_S)
        elif connection > 120:
            training.goes_on.set()
            assert server.received.wait(BOUND_S)
            yield OVER

    words, server = attended(tmp_path, says, training)
    assert words == "enough"
    assert len(training.trained) == len(server.delivered) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_answer_is_removed_where_the_run_ends_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has it, and says farewell before the node's own thread comes to remove it."""
    has_ended = threading.Event()
    monkeypatch.setattr(EdgeNode, "_say_answered", lambda *_: has_ended.wait(BOUND_S))

    def says(server: Coordinator, connection: int) -> Iterator[ToNode]:
        yield plan()
        yield assignment(payload=payload())
        assert server.received.wait(BOUND_S)
        yield OVER

    words, server = attended(tmp_path, says, Trained())
    left = list(tmp_path.iterdir())
    has_ended.set()
    assert (words, len(server.delivered), left) == ("enough", 1, [])


def test_a_question_before_the_first_round_is_no_task(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    table = {"features": dict.fromkeys("abc", "real"), "target": "d"}
    standardized: list[Any] = ["federated", dict.fromkeys("abc", (1.0, None)), dict.fromkeys("abc", (1.0, 2.0))]
    nodes: list[EdgeNode] = []

    def says(server: Coordinator, _: int) -> Iterator[ToNode]:
        for number, standardize in enumerate(standardized, start=1):
            yield plan(experiment=json.dumps({**KEYS, "table": {**table, "standardize": standardize}}))
            yield assignment(number, payload=payload())
            assert server.received.wait(BOUND_S)
            server.received.clear()
        yield OVER

    attended(tmp_path, says, Trained(), nodes=nodes)
    assert [message for message in caplog.messages if "answered" in message] == [
        "answered the question for the mean of 3 columns",
        "answered the question for the standard deviation of 3 columns",
        "round 1: answered, with a training loss of 0.5",
    ]
    assert sum(message.startswith("connected to") for message in caplog.messages) == 1
    assert nodes[0].tasks_done == 1


def test_a_refusal_says_why_a_table_needs_a_schema(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    training = Trained()
    training.needs_schema = "column town holds texts"
    attended(tmp_path, lambda *_: iter([OVER]), training)
    assert caplog.messages == []
    refusal = ToNode(farewell=Farewell(reason="it has no section table", is_final=True, is_refusal=True))
    assert "it has no section table" in attended(tmp_path, lambda *_: iter([refusal]), training)[0]
    assert caplog.messages == ["without a schema this node's table cannot be read: column town holds texts"]


def test_a_task_that_nobody_waits_for_fails_in_silence(tmp_path: Path) -> None:
    training = Trained()
    training.goes_on.clear()
    training.problem = "there is no room"
    failed: list[int] = []

    def says(server: Coordinator, connection: int) -> Iterator[ToNode]:
        yield plan()
        yield assignment(payload=payload())
        assert training.begun.wait(BOUND_S)
        yield ToNode(withdrawal=Withdrawal(task=TASK))
        yield assignment(2, payload=payload())
        while server.heard.get(timeout=BOUND_S).accepted.number != 2:
            continue
        training.goes_on.set()
        while not (message := server.heard.get(timeout=BOUND_S)).HasField("failed"):
            continue
        failed.append(message.failed.task.number)
        yield OVER

    words, _ = attended(tmp_path, says, training)
    assert (words, failed) == ("enough", [2])
    assert list(tmp_path.iterdir()) == []


def _held(node: EdgeNode) -> Any:
    node._accept(assignment().assignment)
    (held,) = node._held.values()
    return held


def test_a_connection_begins_with_a_joining_whatever_fails_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = EdgeNode("127.0.0.1:1", None, "0", 0, cast(Any, Trained()), tmp_path)
    node._described = Training().describe()
    held = _held(node)

    class Lock:
        """Has the task fail when somebody is about to look at the tasks."""

        def __enter__(self) -> None:
            node._lock = threading.Lock()
            node._give_up(held, Failed(reason="the disk is full"))

        def __exit__(self, *_: object) -> None: ...

    said: list[FromNode] = []

    class Call:
        """A connection that ends when something was said on it."""

        def __init__(self, channel: Any) -> None: ...

        def Attend(self, outbox: Iterator[FromNode]) -> Self:  # noqa: N802
            said.append(next(outbox))
            return self

        def __iter__(self) -> Iterator[ToNode]:
            return iter(())

        def cancel(self) -> None: ...

    monkeypatch.setattr("fed.clients.node.edge_node.CoordinationStub", Call)
    node._lock = cast(Any, Lock())
    node.attend(threading.Event())
    assert said[0].HasField("joining")
    assert list(said[0].joining.held) == []


def test_failed_task_in_delivery_is_not_reported_as_held(tmp_path: Path) -> None:
    """Else a connection that is begun meanwhile would name it, and the server wait for as long as its lease."""
    node = EdgeNode("127.0.0.1:1", None, "0", 0, cast(Any, Trained()), tmp_path)
    held, named = _held(node), list[list[Any]]()

    def join() -> None:
        with node._lock:
            named.append([*node._held])

    joining = threading.Thread(target=join)

    class Outbox(queue.Queue[Any]):
        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            joining.start()
            joining.join(0.2)
            super().put(item)

    node._outbox = Outbox()
    node._give_up(held, Failed(reason="the disk is full"))
    joining.join()
    assert named == [[]]


def test_an_answer_whose_file_is_gone_has_failed(tmp_path: Path) -> None:
    class Forgetful(Trained):
        def train(self, assignment: Assignment, path: Path, until_s: float | None = None) -> Answer | Failed:
            path.unlink()
            return super().train(assignment, path)

    reasons = []

    def says(server: Coordinator, connection: int) -> Iterator[ToNode]:
        yield plan()
        yield assignment(payload=payload())
        reasons.append(server.failure())
        yield OVER

    words, server = attended(tmp_path, says, Forgetful())
    assert words == "enough"
    assert "a file of the node's is gone" in reasons[0]
    assert not server.delivered


def test_a_node_says_once_why_its_connections_are_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    def says(server: Coordinator, connection: int) -> Iterator[ToNode]:
        if connection <= 3:
            yield ToNode(farewell=Farewell(reason="another connection came\nin your name"))
        else:
            yield OVER

    words, _ = attended(tmp_path, says, Trained())
    assert words == "enough"
    said = [record.getMessage() for record in caplog.records if "ends the connection" in record.getMessage()]
    assert len(said) == 1
    assert said[0].endswith("ends the connection: another connection came?in your name")


def test_node_logs_once_that_the_run_has_not_begun(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    alive = ToNode(heartbeat=Heartbeat())

    def says(server: Coordinator, connection: int) -> Iterator[ToNode]:
        yield from (alive, alive, plan(), alive, OVER)

    assert attended(tmp_path, says, Trained())[0] == "enough"
    said = [record.getMessage() for record in caplog.records if record.name == "fed.clients.node.edge_node"]
    assert ["yet to begin" in words for words in said] == [True] + [False] * (len(said) - 1)


def test_what_stays_on_this_machine_goes_through_no_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def says(server: Coordinator, connection: int) -> Iterator[ToNode]:
        yield OVER

    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        words, _ = attended(tmp_path, says, Trained())
        assert words == "enough"
        proxy.settimeout(0.1)
        with pytest.raises(TimeoutError):
            proxy.accept()


LARGE = struct.pack("<100000f", *range(100_000))
PIECE = 1 << 17


class Large(Trained):
    """Has a model of several chunks."""

    spec = TaskSpec((TensorSpec(torch.float32, 100_000), TensorSpec(torch.int64, 0)))

    def train(self, assignment: Assignment, path: Path, until_s: float | None = None) -> Answer | Failed:
        assert path.read_bytes() == LARGE
        super().train(assignment, path)
        return answer(assignment, large())


def large() -> Payload:
    return payload(LARGE, tensors=[TensorMessage(dtype="float32", numbers=100_000), TensorMessage(dtype="int64")])


class Breaking(Coordinator):
    """Ends each transfer after a chunk."""

    asked: list[int]

    def Download(self, request: Wanted, context: Any) -> Iterator[Chunk]:  # noqa: N802
        self.asked = [*getattr(self, "asked", []), request.offset]
        data = LARGE[request.offset : request.offset + PIECE]
        yield Chunk(data=data, crc32=zlib.crc32(data))
        context.abort(grpc.StatusCode.UNAVAILABLE, "the line is cut")

    def Deliver(self, request_iterator: Iterator[Part], context: Any) -> Receipt:  # noqa: N802
        parts = list(request_iterator)
        offset = parts[0].answer.offset
        self.delivered.append(offset)
        assert b"".join(part.chunk.data for part in parts[1:]) == LARGE[offset:]
        if offset + PIECE < len(LARGE):
            return Receipt(received_bytes=offset + PIECE)
        return Receipt(accepted=True)


def test_transfers_go_on_where_they_broke_off(tmp_path: Path) -> None:
    def says(server: Coordinator, connection: int) -> Iterator[ToNode]:
        yield plan()
        yield assignment(payload=large())
        while len(server.delivered) < 4:
            time.sleep(0.01)
        yield OVER

    words, server = attended(tmp_path, says, Large(), Breaking)
    assert words == "enough"
    assert server.asked == server.delivered == [0, PIECE, 2 * PIECE, 3 * PIECE]


def test_a_task_is_done_as_it_was_assigned(tmp_path: Path) -> None:
    scored = list[Examination]()

    class Keeping(Trained):
        def score(self, examination: Examination, path: Path) -> Scores:
            scored.append(examination)
            return Scores(id=examination.id, samples=3, loss=0.5, metrics=[0.25])

    kept, durable = TaskId(start=8, number=4), TaskId(start=8, number=2)
    found: list[Scores] = []

    def says(server: Coordinator, connection: int) -> Iterator[ToNode]:
        yield plan()
        yield assignment(payload=payload())
        said = {"repeats": 3, "lr": 0.25, "steps": 5, "population": 9, "place": 0}
        yield assignment(2, payload=payload(), kept_after=kept, kept_discount=0.5, durable_after=durable, **said)
        for number, (after, discount) in enumerate([(None, None), (kept, None), (kept, 0.25)]):
            asked = Examination(id=number, payload=payload(), kept_after=after, kept_discount=discount)
            yield ToNode(examination=asked)
        while len(found) < 3:
            message = server.heard.get(timeout=BOUND_S)
            found.extend([message.scores] if message.HasField("scores") else [])
        yield OVER

    training = Keeping()
    words, server = attended(tmp_path, says, training)
    assert words == "enough"
    plain, changed = training.trained
    assert (plain.task, plain.lr, plain.HasField("steps")) == (TASK, 0.0, False)
    assert (changed.kept_after, changed.kept_discount, changed.lr, changed.steps) == (kept, 0.5, 0.25, 5)
    assert changed.durable_after == durable
    assert [(one.kept_after == kept, one.kept_discount) for one in scored] == [(False, 0.0), (True, 0.0), (True, 0.25)]
    assert [(one.id, one.samples, one.loss, list(one.metrics)) for one in found] == [
        (0, 3, 0.5, [0.25]),
        (1, 3, 0.5, [0.25]),
        (2, 3, 0.5, [0.25]),
    ]
    assert [delivered[0].answer.task.number for delivered in server.delivered] == [1, 2]


def test_node_reports_held_tasks_until_delivery(tmp_path: Path) -> None:
    training = Trained()
    training.goes_on.clear()
    named: list[list[int]] = []

    def heard(server: Coordinator, kind: str) -> list[int]:
        while not (message := server.heard.get(timeout=BOUND_S)).HasField(kind):
            continue
        return [task.number for task in getattr(message, kind).held]

    def says(server: Coordinator, connection: int) -> Iterator[ToNode]:
        named.append(heard(server, "joining"))
        yield plan(heartbeat_s=0.01)
        yield assignment(payload=payload())
        yield assignment(payload=payload())
        assert training.begun.wait(BOUND_S)
        named.append(heard(server, "heartbeat"))
        if connection == 2:
            training.goes_on.set()
            assert server.received.wait(BOUND_S)
            while heard(server, "heartbeat"):
                continue
            yield OVER

    words, server = attended(tmp_path, says, training)
    assert words == "enough"
    assert named == [[], [1], [1], [1]]
    assert len(training.trained) == len(server.delivered) == 1


def test_a_server_that_says_nothing_is_dialled_again(tmp_path: Path) -> None:
    def says(server: Coordinator, connection: int) -> Iterator[ToNode]:
        if connection > 1:
            yield OVER
        while not server.received.wait(0.05):
            if server.connections > 1:
                return

    words, server = attended(tmp_path, says, Trained(), silence_s=0.5)
    assert (words, server.connections) == ("enough", 2)


@pytest.mark.parametrize(("deaths", "reason"), [(1, ""), (2, "the training process has died")])
def test_a_training_process_may_die_of_a_task_once(tmp_path: Path, deaths: int, reason: str) -> None:
    class Dying(Trained):
        def train(self, assignment: Assignment, path: Path, until_s: float | None = None) -> Answer | Failed:
            done = super().train(assignment, path)
            if len(self.trained) <= deaths:
                path.write_bytes(b"half")
                raise TrainingProcessDied("the training process has died")
            assert path.read_bytes() == MODEL
            return done

    reasons = []

    def says(server: Coordinator, connection: int) -> Iterator[ToNode]:
        yield plan()
        yield assignment(payload=payload())
        if reason:
            reasons.append(server.failure())
        else:
            assert server.received.wait(BOUND_S)
        yield OVER

    training = Dying()
    words, server = attended(tmp_path, says, training)
    assert (words, reasons) == ("enough", [reason] if reason else [])
    assert len(training.trained) == 2
    assert len(server.delivered) == (0 if reason else 1)


@pytest.fixture
def server_credentials(tmp_path: Path) -> ServerCredentials:
    """Those of a server that no machine's name fits."""
    authority = Authority.create(tmp_path / "keys", hosts=["fed.example.org"])
    authority.issue("0")
    return ServerCredentials.load(tmp_path / "keys")


def said_of(folder: Path, authority: Path, credentials: ServerCredentials | None, until: threading.Event) -> str:
    """Sentence with which a node of an authority ends that dials a server with or without certificates."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials.for_listening())
    server.start()
    own = NodeCredentials.load(authority / "nodes" / "0").for_dialling()
    training: Any = Training()
    node = EdgeNode(f"127.0.0.1:{port}", own, "0", 0, training, folder / "files")
    limit = threading.Timer(BOUND_S, until.set)
    limit.start()
    try:
        return node.run(stopped=until)
    except RunFailed as error:
        return str(error).replace(str(port), "PORT")
    finally:
        limit.cancel()
        server.stop(0).wait()


def test_a_server_whose_certificate_has_another_name_ends_the_node(
    tmp_path: Path, server_credentials: ServerCredentials
) -> None:
    assert said_of(tmp_path, tmp_path / "keys", server_credentials, threading.Event()) == (
        "127.0.0.1:PORT shows a certificate that does not name 127.0.0.1: dial the server by a name that its "
        "certificate has, or give it one that names this one too (fed keys server DIR --host 127.0.0.1)"
    )


def test_a_foreign_authority_is_told_in_our_words_alone(
    tmp_path: Path, server_credentials: ServerCredentials, capfd: pytest.CaptureFixture[str]
) -> None:
    Authority.create(tmp_path / "others").issue("0")
    assert said_of(tmp_path, tmp_path / "others", server_credentials, threading.Event()) == (
        "127.0.0.1:PORT is not the server that this node's authority certifies: is it the right address, and are the "
        "credentials of the same authority?"
    )
    assert capfd.readouterr() == ("", "")


def test_a_server_without_tls_is_told_in_our_words(
    tmp_path: Path, server_credentials: ServerCredentials, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stopped = threading.Event()

    class Stopping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "cannot be reached" in record.getMessage():
                stopped.set()

    handler = Stopping()
    logging.getLogger("fed").addHandler(handler)
    try:
        said_of(tmp_path, tmp_path / "keys", None, stopped)
    finally:
        logging.getLogger("fed").removeHandler(handler)
    assert (
        "cannot be reached (it answers without TLS: does another program listen there, or a server with --insecure?); "
        "trying again"
    ) in caplog.text


def test_a_node_begins_with_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "left").write_bytes(b"by an earlier start")

    def says(server: Coordinator, connection: int) -> Iterator[ToNode]:
        yield OVER

    assert attended(tmp_path, says, Trained())[0] == "enough"
    assert list(tmp_path.iterdir()) == []


class Hiding(Trained):
    """Answers what is to be masked."""

    fixed = None
    keeps_states = False

    def train(self, assignment: Assignment, path: Path, until_s: float | None = None) -> Any:
        super().train(assignment, path, until_s)
        return Hidden(Answer(task=assignment.task), torch.zeros(3, dtype=torch.int32))

    def forget(self) -> None:
        return


class Sessions:
    """Stands for a node's sessions, which mask a message of each attempt once the server has told them to."""

    def __init__(self) -> None:
        self.renewed: list[Plan] = []
        self.joined = 0
        self.waits = threading.Event()
        self.joined_again = threading.Event()
        self._told: queue.Queue[int] = queue.Queue()
        self._holds = False

    def prepare(self, *_: Any, **__: Any) -> None:
        return

    def renew(self, plan: Plan) -> None:
        self.renewed.append(plan)

    def take(self, said: Assignment | ToSession | Withdrawal) -> Sequence[Any]:
        if isinstance(said, ToSession):
            self._told.put(said.attempt)
        if isinstance(said, Assignment):
            self.joined += 1
        if self.joined == 2:
            self.joined_again.set()
        return ()

    def holds(self, _: bytes, __: Assignment) -> bool:
        return self._holds

    def trained(self, _: bytes, __: torch.Tensor) -> Sequence[Any]:
        self._holds = True
        return ()

    def masked(self, _: bytes, is_wanted: Callable[[], bool]) -> torch.Tensor | None:
        self.waits.set()
        while is_wanted():
            with contextlib.suppress(queue.Empty):
                return torch.full((3,), self._told.get(timeout=0.01), dtype=torch.int32)
        return None


def test_renewed_identities_reach_sessions_that_a_task_waits_for(tmp_path: Path) -> None:
    sessions = Sessions()

    def says(server: Coordinator, _: int) -> Iterator[ToNode]:
        yield plan(identities=b"first")
        yield assignment(payload=payload())
        assert sessions.waits.wait(BOUND_S)
        yield plan(identities=b"later")
        yield ToNode(session=ToSession(task=TASK))
        assert server.received.wait(BOUND_S)
        yield OVER

    words, server = attended(tmp_path, says, Hiding(), secure=sessions)
    assert words == "enough"
    assert len(server.delivered) == 1
    assert [one.identities for one in sessions.renewed] == [b"later"]


def test_keys_lost_with_a_connection_are_said_again(tmp_path: Path) -> None:
    sessions = Sessions()

    def says(server: Coordinator, connection: int) -> Iterator[ToNode]:
        yield plan()
        if connection == 1:
            yield assignment(payload=payload())
            assert sessions.waits.wait(BOUND_S)
            return
        assert sessions.joined_again.wait(BOUND_S)
        yield ToNode(session=ToSession(task=TASK))
        assert server.received.wait(BOUND_S)
        yield OVER

    words, _ = attended(tmp_path, says, Hiding(), secure=sessions)
    assert words == "enough"
    assert sessions.joined == 2


def test_sessions_wait_for_the_last_of_the_plans_told(tmp_path: Path) -> None:
    first_begun = threading.Event()
    first_may_end = threading.Event()
    joined = threading.Event()
    joined_under: list[str] = []

    class Slow(Hiding):
        def prepare(self, experiment: Experiment, plan: Any) -> None:
            if plan.run == "first":
                first_begun.set()
                assert first_may_end.wait(BOUND_S)
            else:
                joined.wait(0.3)  # time enough for a session to be joined too early

    class Planned(Sessions):
        def prepare(self, _: Experiment, plan: Plan, *__: Any, **___: Any) -> None:
            self.run = plan.run

        def take(self, said: Assignment | ToSession | Withdrawal) -> Sequence[Any]:
            if isinstance(said, Assignment):
                joined_under.append(self.run)
                joined.set()
            return super().take(said)

    def says(server: Coordinator, _: int) -> Iterator[ToNode]:
        yield plan(run="first")
        assert first_begun.wait(BOUND_S)
        yield plan(run="second")
        yield assignment(payload=payload())
        while not server.heard.get(timeout=BOUND_S).HasField("accepted"):
            pass
        first_may_end.set()
        yield ToNode(session=ToSession(task=TASK))
        assert server.received.wait(BOUND_S)
        yield OVER

    words, _ = attended(tmp_path, says, Slow(), secure=Planned())
    assert words == "enough"
    assert joined_under == ["second"]


class Receiving(Coordinator):
    """Keeps the receipt of the first delivery back until the next attempt is told."""

    def __init__(self, says: Any) -> None:
        super().__init__(says)
        self.is_told = threading.Event()
        self.again = threading.Event()

    def Deliver(self, request_iterator: Iterator[Part], context: Any) -> Receipt:  # noqa: N802
        receipt = super().Deliver(request_iterator, context)
        if len(self.delivered) == 1:
            assert self.is_told.wait(BOUND_S)
        else:
            self.again.set()
        return receipt


def test_attempt_told_before_the_last_receipt_is_answered(tmp_path: Path) -> None:
    def says(server: Receiving, _: int) -> Iterator[ToNode]:
        yield plan()
        yield assignment(payload=payload())
        yield ToNode(session=ToSession(task=TASK))
        assert server.received.wait(BOUND_S)
        yield assignment(payload=payload(), attempt=1)
        accepted = 0
        while accepted < 2:
            accepted += server.heard.get(timeout=BOUND_S).HasField("accepted")
        server.is_told.set()
        yield ToNode(session=ToSession(task=TASK, attempt=1))
        assert server.again.wait(BOUND_S)
        yield OVER

    training = Hiding()
    words, server = attended(tmp_path, says, training, Receiving, secure=Sessions())
    assert words == "enough"
    assert len(training.trained) == 1
    first, second = (parts[0].answer.payload.sha256 for parts in server.delivered)
    assert first != second


def test_one_task_told_without_end_ends_the_node(tmp_path: Path) -> None:
    over = threading.Event()

    class Preparing(Hiding):
        def prepare(self, experiment: Experiment, signature: bytes) -> None:
            over.wait(BOUND_S)

    def says(_: Coordinator, __: int) -> Iterator[ToNode]:
        yield plan()
        yield from (assignment(payload=payload()) for _ in range(100_000))

    words, _ = attended(tmp_path, says, Preparing(), secure=Sessions())
    over.set()
    assert "more than 100 things at once" in words


class Lacking(Trained):
    """Has another fixed part than the server until it is given a file."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[bytes] = []
        self.has_part = threading.Event()

    def prepare(self, experiment: Experiment, signature: bytes, fixed_part: Path | None = None) -> None:
        if fixed_part is None:
            raise FixedPartMissing("another")
        self.given.append(fixed_part.read_bytes())
        self.has_part.set()


class Cut(Coordinator):
    """The connection is cut while the fixed part is on its way for the first time."""

    def __init__(self, says: Callable[["Coordinator", int], Iterator[ToNode]]) -> None:
        super().__init__(says)
        self.is_asked = threading.Event()
        self.is_back = threading.Event()

    def Download(self, request: Wanted, context: Any) -> Iterator[Chunk]:  # noqa: N802
        if not self.is_asked.is_set():
            self.is_asked.set()
            assert self.is_back.wait(BOUND_S)
            context.abort(grpc.StatusCode.UNAVAILABLE, "the connection was cut")
        yield from super().Download(request, context)


def test_a_cut_while_the_fixed_part_comes_costs_nothing(tmp_path: Path) -> None:
    """The same plan, told on the next connection, does not end the download."""
    training = Lacking()

    def says(server: Any, connection: int) -> Iterator[ToNode]:
        yield plan(fixed_part=payload())
        if connection == 1:
            assert server.is_asked.wait(BOUND_S)
            return
        server.is_back.set()
        assert training.has_part.wait(BOUND_S / 4)
        yield OVER

    words, _ = attended(tmp_path, says, training, Cut)
    assert words == "enough"
    assert training.given == [MODEL]


def test_a_plan_with_another_fixed_part_ends_the_first_download(tmp_path: Path) -> None:
    training = Lacking()
    another = bytes(range(100)) * 26

    class Never(Cut):
        def Download(self, request: Wanted, context: Any) -> Iterator[Chunk]:  # noqa: N802
            if request.sha256 == payload().sha256:
                yield from super().Download(request, context)
            else:
                yield Chunk(data=another, crc32=zlib.crc32(another))

    def says(server: Any, _: int) -> Iterator[ToNode]:
        yield plan(fixed_part=payload())
        assert server.is_asked.wait(BOUND_S)
        yield plan(fixed_part=payload(another))
        server.is_back.set()
        assert training.has_part.wait(BOUND_S / 4)
        yield OVER

    words, _ = attended(tmp_path, says, training, Never)
    assert words == "enough"
    assert training.given == [another]


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_stopped_node_blames_no_training_process(is_stopped: bool, tmp_path: Path) -> None:
    """As a service manager's stop goes to all processes, the one that trains may be gone before the node is asked."""

    class Dies(Training):
        def describe(self) -> Any:
            if is_stopped:
                stopped.set()
            raise TrainingProcessDied("the training process has died (exit code -15)")

    stopped = threading.Event()
    node = EdgeNode("127.0.0.1:1", None, "0", 0, cast("Any", Dies()), tmp_path)
    if is_stopped:
        assert node.run(stopped=stopped) == ""
        return
    with pytest.raises(RunFailed, match="has died"):
        node.run(stopped=stopped)
