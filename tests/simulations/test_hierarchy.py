"""Edge coordinators: the same value as without them, what they send, and the time that takes."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

import fed
from fed.simulations.simulate import simulate
from tests.observing import after_round
from tests.thinned import thinned

pytestmark = pytest.mark.usefixtures("device")

SMALL: dict[str, Any] = {
    "data": {"kind": "digits", "clients": 24, "partition": "dirichlet"},
    "model": {"kind": "mlp", "hidden": [8]},
    "local": {"batch_size": 8},
}


def run(hierarchy: Any = None, **keys: Any) -> fed.Run:
    given = {**SMALL, "rounds": {"count": 4, "cohort": 12}, **keys}
    return simulate(fed.Experiment(**given, hierarchy=hierarchy))


def bits(run: fed.Run) -> bytes:
    return b"".join(part.numpy().tobytes() for part in run.model.state_dict().values())


@pytest.mark.parametrize("fan_out", [1, 5, *(pytest.param(most, marks=pytest.mark.long) for most in (24, 100))])
@pytest.mark.parametrize("algorithm", thinned(["fedavg", "scaffold", "fedadam", "ditto"], quick=2))
def test_edges_change_no_bit_where_clients_train_one_by_one(algorithm: str, fan_out: int) -> None:
    keys: dict[str, Any] = {"algorithm": algorithm, "simulation": {"batching": "off"}}
    flat, tree = run(**keys), run({"fan_out": fan_out}, **keys)
    assert bits(flat) == bits(tree)
    for line, its in zip(flat.metrics, tree.metrics, strict=True):
        for name in ("test_accuracy", "train_loss", "selected", "replied", "late", "failed", "staleness_mean"):
            assert line[name] == its[name]


def test_edges_with_groups_change_the_model_by_rounding_alone() -> None:
    flat, tree = (run(hierarchy, simulation={"batching": "on", "group": 5}) for hierarchy in (None, {"fan_out": 7}))
    for part, its in zip(flat.model.state_dict().values(), tree.model.state_dict().values(), strict=True):
        torch.testing.assert_close(part, its, rtol=1e-5, atol=1e-6)  # float32, a few of its bits


def test_an_edge_sends_and_gets_one_message_more() -> None:
    """With everybody in each round all edges take part: ⌈24 / 7⌉ of them."""
    keys: dict[str, Any] = {"rounds": {"count": 3}}
    flat, tree = run(**keys), run({"fan_out": 7}, **keys)
    size_bytes = 4 * flat.summary["parameters"]
    for name in ("bytes_up", "bytes_down"):
        assert tree.summary[name] - flat.summary[name] == 3 * 4 * size_bytes


def test_the_way_through_an_edge_takes_its_time() -> None:
    """Down and up once a round, each a latency and a model over the bandwidth."""
    flat, tree = run(), run({"fan_out": 7, "latency_s": 0.25, "bytes_per_s": 1e4})
    once_s = 0.25 + 4 * flat.summary["parameters"] / 1e4
    for number, (line, its) in enumerate(zip(flat.metrics, tree.metrics, strict=True), start=1):
        assert its["virtual_s"] - line["virtual_s"] == pytest.approx(2 * once_s * number)


def test_a_deadline_leaves_time_for_the_way_through_an_edge() -> None:
    keys: dict[str, Any] = {
        "devices": {"kind": "lognormal", "sigma": 1.5},
        "rounds": {"count": 5, "deadline_s": 1.0, "partial_work": "drop"},
    }
    flat, tree = run(**keys), run({"fan_out": 7, "latency_s": 0.3}, **keys)
    assert tree.metrics[-1]["virtual_s"] <= 5.0 + 1e-9
    assert sum(line["late"] for line in tree.metrics) > sum(line["late"] for line in flat.metrics)


def test_a_run_with_edges_resumes_to_the_bit(tmp_path: Any) -> None:
    class Stop(Exception):
        pass

    def stop(line: Mapping[str, Any]) -> None:
        if line["round"] == 3:
            raise Stop

    described = fed.Experiment(
        **SMALL, rounds={"count": 6, "cohort": 12}, hierarchy={"fan_out": 5}, checkpoints={"every": 2}
    )
    whole = simulate(described)
    with pytest.raises(Stop):
        simulate(described, output=tmp_path / "run", observers=[after_round(stop)])
    resumed = simulate(described, output=tmp_path / "run", resume=True)
    assert bits(whole) == bits(resumed)
    assert [{**line, "wall_s": 0} for line in whole.metrics] == [{**line, "wall_s": 0} for line in resumed.metrics]
