"""Simulated replicas: the bits of the rule under a coordinator, and the time and bytes of a ring."""

from pathlib import Path
from typing import Any

import pytest
import torch

import fed
from fed.config.experiment import Experiment
from fed.config.registry import RULES
from fed.errors import InvalidExperiment
from fed.server.evaluation import ScoringByCoordinator
from fed.server.training_loop import Scores

pytestmark = pytest.mark.usefixtures("device")

PEERS = 5
KEYS: dict[str, Any] = {
    "data": {"kind": "synthetic", "clients": PEERS},
    "model": {"kind": "mlp", "hidden": [7]},
    "local": {"lr": 0.1, "steps": 3, "batch_size": 8},
    "rounds": {"count": 3},
}


def runs(rule: Any, **others: Any) -> tuple[fed.Run, fed.Run]:
    """The rule among peers, and under a coordinator."""
    keys = {**KEYS, **others}
    return tuple(
        fed.simulate(Experiment(**keys, algorithm=each)) for each in ({"kind": "allreduce", "rule": rule}, rule)
    )  # type: ignore[return-value]


def long(rule: str) -> Any:
    return pytest.param(rule, marks=pytest.mark.long)


def assert_same_bits(one: fed.Run, other: fed.Run) -> None:
    for name, tensor in one.model.state_dict().items():
        assert torch.equal(tensor, other.model.state_dict()[name]), name
    for line, its_line in zip(one.metrics, other.metrics, strict=True):
        for key in ("test_loss", "train_loss", "replied", "failed", "late"):
            assert line[key] == its_line[key]


@pytest.mark.parametrize(
    "rule",
    [
        kind if kind in ("scaffold", "fedadam", "median", "ditto", "ffa_lora") else long(kind)
        for kind in RULES.builtin
        if kind != "fedbn"  # its model has BatchNorm
    ],
)
def test_replicas_have_the_bits_of_a_coordinator(rule: str) -> None:
    adapters = {"model": "python:tests.lora_models:adapted", "data": {"kind": "digits", "clients": PEERS}}
    assert_same_bits(*runs(rule, **adapters if rule == "ffa_lora" else {}))


@pytest.mark.parametrize(
    "others",
    [
        {"simulation": {"batching": "off"}},
        pytest.param({"simulation": {"workers": 2}}, marks=[pytest.mark.long, pytest.mark.processes]),
        {"adversaries": {"kind": "sign_flip", "fraction": 0.4}},
        {"devices": {"failure": 0.4}, "rounds": {"count": 6}},
    ],
    ids=str,
)
def test_replicas_follow_a_coordinator_however_clients_train(others: dict[str, Any]) -> None:
    assert_same_bits(*runs("scaffold", **others))


def devices(folder: Path, lines: list[str]) -> dict[str, Any]:
    path = folder / "devices.csv"
    path.write_text("\n".join(["client,samples_per_s,down_bytes_per_s,up_bytes_per_s,latency_s", *lines]))
    return {"kind": "trace", "path": str(path)}


def test_a_ring_takes_as_long_as_its_slowest_link(tmp_path: Path) -> None:
    """In each of eight steps a fifth of the sum goes over each link; a peer sends slowly, and another trains slowly."""
    links = [f"{peer},{10 if peer == 1 else 1000},1e4,{100 if peer == 3 else 1e4},0.25" for peer in range(PEERS)]
    run, _ = runs("fedavg", devices=devices(tmp_path, links))
    parameters = sum(tensor.numel() for tensor in run.model.parameters())
    chunk_bytes = 16 * parameters / PEERS
    round_s = 3 * 8 / 10 + 8 * (0.25 + chunk_bytes / 100)
    assert [line["virtual_s"] for line in run.metrics] == pytest.approx([round_s, 2 * round_s, 3 * round_s])
    for line in run.metrics:
        assert line["bytes_up"] == line["bytes_down"] == 8 * 16 * parameters


def test_peers_that_are_late_are_not_in_the_ring(tmp_path: Path) -> None:
    links = [f"{peer},{1 if peer == 1 else 1000},1e4,1e4,0.25" for peer in range(PEERS)]
    rounds = {"count": 2, "deadline_s": 2.0, "partial_work": "accept"}
    run, _ = runs("fedavg", devices=devices(tmp_path, links), rounds=rounds, local={**KEYS["local"], "batch_size": 20})
    parameters = sum(tensor.numel() for tensor in run.model.parameters())
    assert [line["replied"] for line in run.metrics] == [PEERS - 1] * 2
    assert [line["late"] for line in run.metrics] == [1, 0]  # it still trains when the second one begins
    assert run.metrics[0]["bytes_up"] == 6 * 16 * parameters
    assert run.metrics[0]["virtual_s"] == pytest.approx(2.0 + 6 * (0.25 + 16 * parameters / 4 / 1e4))


def test_a_run_of_replicas_is_resumed_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {**KEYS, "rounds": {"count": 5}, "checkpoints": {"every": 2}, "simulation": {"workers": 0}}
    experiment = Experiment(**keys, algorithm={"kind": "allreduce", "rule": "bmuf"})
    whole = fed.simulate(experiment)
    with monkeypatch.context() as patch:
        found, scored = ScoringByCoordinator.scores, list[int]()

        def interrupted(scoring: ScoringByCoordinator) -> Scores:
            scored.append(1)
            if len(scored) == 4:
                raise KeyboardInterrupt
            return found(scoring)

        patch.setattr(ScoringByCoordinator, "scores", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fed.simulate(experiment, output=tmp_path / "run")
    resumed = fed.simulate(experiment, output=tmp_path / "run", resume=True)
    assert_same_bits(resumed, whole)
    assert [line["virtual_s"] for line in resumed.metrics] == [line["virtual_s"] for line in whole.metrics]


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ({"algorithm": {"kind": "allreduce", "rule": "krum"}}, "no such rule"),
        ({"algorithm": {"kind": "allreduce", "rule": "dpsgd"}}, "no such rule"),
        ({"algorithm": {"kind": "allreduce", "rule": "python:fed.aggregators:FedMedian"}}, "needs a rule that applies"),
        ({"uplink": ["topk"]}, "whose sums are exact: set uplink to .*, or choose an algorithm over mix such as choco"),
        ({"downlink": ["int8"]}, "downlink int8 needs clients that report"),
        ({"topology": "ring"}, "topology ring needs clients that exchange models with neighbours"),
        ({"hierarchy": "edges"}, "hierarchy edges needs clients that report"),
        ({"rounds": "buffered"}, "needs a coordinator that asks clients"),
        ({"rounds": {"cohort": 3}}, "rounds.cohort must be 5, the number of peers"),
        ({"rounds": {"over_selection": 1.5}}, "rounds.over_selection needs a coordinator"),
    ],
)
def test_what_needs_a_coordinator_is_refused(others: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidExperiment, match=why):
        fed.simulate(Experiment(**{**KEYS, "algorithm": "allreduce", **others}))
