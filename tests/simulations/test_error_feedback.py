"""Error feedback in simulated runs: nothing is lost of any update, in every kind of rounds, attacked or not."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import fed
from fed.aggregators.base import ClientWork, Report
from fed.aggregators.fedavg import FedAvg
from fed.compression.codec import CodecState, Draw
from fed.compression.feedback import Encoder, Sent, error_unknown
from fed.config.registry import CODECS
from fed.errors import InvalidExperiment, RunFailed
from fed.server.sent_sum import SentSum
from fed.simulations.fleet import SimulatedFleet
from fed.wire.messages import Answer
from tests.simulations import users_parts as parts
from tests.thinned import thinned

pytestmark = pytest.mark.usefixtures("device")

SLOW = {"kind": "lognormal", "samples_per_s": 10.0, "failure": 0.2}
ROUNDS: dict[str, dict[str, Any]] = {
    "synchronous": {"rounds": {"count": 6, "cohort": 4}},
    "deadline": {"rounds": {"count": 8, "cohort": 4, "over_selection": 1.5, "deadline_s": 1.0}, "devices": SLOW},
    "buffered": {"rounds": {"kind": "buffered", "count": 10, "buffer": 2, "concurrency": 5}, "devices": SLOW},
    "most stale": {
        "rounds": {"kind": "buffered", "count": 12, "buffer": 1, "concurrency": 6, "most_stale": 1},
        "devices": SLOW,
    },
    "asynchronous": {"rounds": {"kind": "asynchronous", "count": 12, "concurrency": 4}, "devices": SLOW},
}


DATA = fed.FederatedData({client: parts.samples(6, client, torch.float64) for client in range(8)}, None, classes=3)
"""Of clients of one size, so that means are of equal weights."""


class Ledger:
    """Everything that clients reported, and what the coordinator counted of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.updates: list[Tensor] = []
        self.counted = torch.zeros(())
        self.answered = self.lost = 0
        answers: dict[int, Answer] = {}
        encode, collect, settle = Encoder.encode, SimulatedFleet.collect, SimulatedFleet.settle

        def encoded(encoder: Encoder, update_KM: Tensor, state: CodecState, draw: Draw) -> Sent:
            self.updates += [*update_KM.clone()]
            return encode(encoder, update_KM, state, draw)

        def collected(fleet: SimulatedFleet, *arguments: Any, **named: Any) -> Iterator[Answer]:
            self.fleet = fleet
            for answer in collect(fleet, *arguments, **named):
                if not answer.problem:
                    answers[answer.tasks[0]] = answer
                yield answer

        def settled(fleet: SimulatedFleet, counted: Mapping[int, float]) -> None:
            for answer in answers.values():
                share = counted.get(answer.tasks[0], 0.0)
                self.lost += share == 0.0
                self.answered += len(answer.tasks)
                self.counted = self.counted + share * len(answer.tasks) * answer.update.update_M
            answers.clear()
            settle(fleet, counted)

        monkeypatch.setattr("fed.simulations.simulate.facts_of", lambda encoder: {})  # which encodes a vector of nobody
        monkeypatch.setattr(Encoder, "encode", encoded)
        monkeypatch.setattr(SimulatedFleet, "collect", collected)
        monkeypatch.setattr(SimulatedFleet, "settle", settled)

    def residual(self) -> Tensor:
        """What all clients still have to send, those too whose answers are on their way."""
        assert not self.fleet._unsettled
        kept = {client: state["codec.residual"] for client, state in self.fleet.states._kept.items()}
        kept |= {one.task.client: one.lost["codec.residual"] for one in self.fleet._flights.values() if one.lost}
        return torch.stack([*kept.values()]).sum(0)


TOPK = {"kind": "topk", "fraction": 0.1}
CASES = [(rounds, attacked, TOPK) for rounds in ROUNDS for attacked in (False, True)] + [
    ("most stale", attacked, kind)
    for kind in CODECS.builtin
    for attacked in (False, True)
    if kind != "topk" and not error_unknown(CODECS.make(kind).make())
]


def with_a_matrix() -> torch.nn.Module:
    """A model with a matrix that PowerSGD takes apart, and numbers beside it."""
    return torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3)).double()


@pytest.mark.parametrize(("rounds", "attacked", "codec"), thinned(CASES, quick=10), ids=str)
def test_counted_and_kept_is_all_that_was_reported(
    rounds: str, attacked: bool, codec: str | dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 1e-9 of float64: late and stale messages go back, and those at a discount in part."""
    ledger = Ledger(monkeypatch)
    more: dict[str, Any] = {"adversaries": {"kind": "sign_flip", "fraction": 0.3}} if attacked else {}
    experiment = fed.Experiment(
        **ROUNDS[rounds],
        **more,
        local={"lr": 0.1, "batch_size": 4},
        uplink=[codec],
        error_feedback="ef",
        simulation={"workers": 0},
    )
    fed.simulate(experiment, data=DATA, model=with_a_matrix)
    reported = torch.stack(ledger.updates).sum(0)
    assert float((reported - ledger.counted - ledger.residual()).abs().max()) < 1e-9
    assert float(ledger.counted.abs().max()) > 0
    assert (ledger.lost > 0) == (rounds == "most stale")
    if rounds in ("synchronous", "deadline"):
        assert (len(ledger.updates) > ledger.answered) == (rounds == "deadline")


def unequal(sizes: Sequence[int]) -> fed.FederatedData:
    return fed.FederatedData({place: parts.samples(size, place, torch.float64) for place, size in enumerate(sizes)})


ALL: dict[str, Any] = {
    "local": {"lr": 0.1, "batch_size": 4},
    "error_feedback": "ef21",
    "simulation": {"workers": 0},
}


@pytest.mark.parametrize("algorithm", ["fedavg", "local_sgd"])
def test_the_sum_is_that_of_what_clients_have_sent(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weighted by samples or alike, with messages that are late, tasks that fail and clients that come and go."""
    sizes = (4, 6, 9, 12, 5)
    found: list[tuple[SentSum, Tensor]] = []
    fleets: list[SimulatedFleet] = []
    add, settle, failures = SentSum.add, SimulatedFleet.settle, 0

    def added(of: SentSum, *arguments: Any) -> Tensor:
        found.append((of, add(of, *arguments)))
        return found[-1][1]

    def settled(fleet: SimulatedFleet, counted: Mapping[int, float]) -> None:
        nonlocal failures
        failures += len(counted) < len(sizes)
        settle(fleet, counted)
        sent = {client: state["codec.sent"] for client, state in fleet.states._kept.items()}
        weight = {client: size if algorithm == "fedavg" else 1 for client, size in enumerate(sizes)}
        total_M = torch.stack([weight[int(client)] * sent_M for client, sent_M in sent.items()]).sum(0)
        assert float((found[-1][0]._sum_M - total_M).abs().max()) < 1e-9
        assert torch.equal(found[-1][1], found[-1][0]._sum_M / sum(weight.values()))
        fleets.append(fleet)

    monkeypatch.setattr(SentSum, "add", added)
    monkeypatch.setattr(SimulatedFleet, "settle", settled)
    experiment = fed.Experiment(
        algorithm=algorithm,
        rounds={"count": 8, "deadline_s": 0.5, "partial_work": "drop"},
        devices=SLOW,
        uplink=["topk"],
        **ALL,
    )
    run = fed.simulate(experiment, data=unequal(sizes), model=parts.double)
    assert len(fleets) == 8
    assert sum(line["late"] for line in run.metrics) > 0
    assert failures > 0


def test_with_an_exact_codec_the_sum_is_the_mean() -> None:
    exact, plain = (
        fed.simulate(
            fed.Experiment(**{**ALL, "rounds": {"count": 5}, **changed}), data=unequal((4, 6, 9)), model=parts.double
        )
        for changed in ({"uplink": [{"kind": "topk", "fraction": 1.0}]}, {"error_feedback": "none"})
    )
    for name, tensor in plain.model.state_dict().items():
        torch.testing.assert_close(exact.model.state_dict()[name], tensor, rtol=0, atol=1e-12)


@dataclass(frozen=True, kw_only=True)
class ByLoss(FedAvg):
    """Weighs clients by their loss."""

    update_alone: ClassVar[bool] = True

    def report(self, work: ClientWork) -> Report:
        return super().report(work)._replace(weight_K1=work.train_loss_K1)


def test_weights_that_change_are_refused_where_a_sum_is_kept() -> None:
    experiment = fed.Experiment(algorithm=f"python:{__name__}:ByLoss", uplink=["topk"], **ALL)
    with pytest.raises(RunFailed, match="ef21 needs clients that are weighed by their samples, or alike"):
        fed.simulate(experiment, data=unequal((4, 6, 9)), model=parts.double)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"error_feedback": "ef21", "uplink": ["topk"], "rounds": {"cohort": 3}},
            "ef21 needs all clients in every round, got rounds.cohort 3: write rounds.cohort all",
        ),
        (
            {"error_feedback": "ef21", "uplink": ["topk"], "rounds": "buffered"},
            "ef21 needs rounds that wait for a cohort, got rounds buffered",
        ),
        (
            {"error_feedback": "ef21", "uplink": ["topk"], "algorithm": "median"},
            "median needs each client's own message, got error_feedback ef21, which keeps the sum of all updates",
        ),
        (
            {"error_feedback": "ef21", "uplink": ["topk"], "algorithm": "scaffold"},
            "ef21 needs clients that report nothing but their update, and keep no state, because it counts",
        ),
        ({"error_feedback": "ef21", "uplink": ["dgc"]}, "the errors of dgc, which keeps a residual of its own"),
        ({"error_feedback": "ef"}, "error_feedback needs codecs whose errors it keeps, got uplink"),
        ({"error_feedback": "ef", "uplink": ["dgc"]}, "the errors of dgc, which keeps a residual of its own"),
        (
            {"error_feedback": "ef", "uplink": ["sketch"]},
            "the errors of sketch, whose sums alone are read, by the",
        ),
        ({"algorithm": "median", "uplink": ["sketch"]}, "median needs each client's own message, got uplink sketch"),
        ({"algorithm": "dpsgd", "uplink": ["zstd"]}, "got algorithm dpsgd, .* such as choco"),
        ({"uplink": ["zstd", "int8"]}, "Zstd leaves nothing to encode: put it last"),
        ({"uplink": ["int8", "topk"]}, "TopK finds no values behind Int8, which writes bytes"),
        ({"uplink": ["topk", "powersgd"]}, "PowerSGD looks at the matrices of layers: put it first"),
        ({"uplink": ["topk", "stc"]}, "STC selects the largest of values that were selected for that already"),
        ({"uplink": ["topk", "sketch"]}, "Sketch adds values of the whole update: put it first"),
    ],
)
def test_what_makes_no_sense_is_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidExperiment, match=reason):
        fed.Experiment(**changed)


@pytest.mark.parametrize("codec", [{"uplink": ["topk"], "error_feedback": "ef"}, {"uplink": ["dgc"]}], ids=str)
@pytest.mark.parametrize("algorithm", ["ditto", "fedper"])
def test_a_client_without_a_counted_message_has_a_model(algorithm: str, codec: dict[str, Any]) -> None:
    experiment = fed.Experiment(
        algorithm=algorithm,
        rounds={"count": 2, "deadline_s": 0.7},
        devices={"kind": "lognormal", "samples_per_s": 10.0},
        local={"batch_size": 4},
        evaluation="clients",
        simulation={"workers": 0},
        **codec,
    )
    run = fed.simulate(experiment, data=DATA, model=parts.double)
    assert sum(line["late"] for line in run.metrics) > 0
    assert run.models.keys() == {*range(8)}
    assert all(model.state_dict() for model in run.models.values())


@pytest.mark.parametrize("feedback", ["none", "ef", "ef21"])
def test_powersgd_takes_models_without_large_matrices(feedback: str) -> None:
    keys: dict[str, Any] = {"rounds": {"count": 2}, "simulation": {"workers": 0}}
    for codecs in ({"uplink": ["powersgd"], "error_feedback": feedback}, {"downlink": ["powersgd"]}):
        run = fed.simulate(fed.Experiment(**keys, **codecs), data=DATA, model=lambda: torch.nn.Linear(4, 3).double())
        assert run.summary["status"] == "finished"


def test_chains_that_make_sense_are_taken() -> None:
    for chain in (["topk", "two_level"], ["randomk", "topk", "int8", "zstd"], ["powersgd", "float16"], ["dgc", "sign"]):
        assert len(fed.Experiment(uplink=chain).uplink) == len(chain)
