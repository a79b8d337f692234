"""Runs of models with low-rank adapters: what travels, exactness, and the same bits simulated and on nodes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fed
from fed.aggregators.adapters import adapted_layers
from fed.server.grpc.deploy import serve
from tests.flower_stand_ins import install, run_app
from tests.lora_models import INPUTS, OUTPUTS, adapted
from tests.observing import after_round
from tests.server.grpc.threaded import ThreadedNode, nodes_of

pytestmark = pytest.mark.usefixtures("device")

CLIENTS = 3
KIND = "python:tests.lora_models:adapted"
TRAINED = 3 * (INPUTS + 12) + 3 * (12 + OUTPUTS) + 2 * 12
BASES = INPUTS * 12 + 12 * OUTPUTS
FACTORS = 3 * (INPUTS + 12) + 3 * (12 + OUTPUTS)
EXACT = ["fedex_lora", "flora"]


def experiment(**keys: Any) -> fed.Experiment:
    given: dict[str, Any] = {
        "data": {"kind": "digits", "clients": CLIENTS, "partition": {"kind": "dirichlet", "alpha": 0.5}},
        "model": KIND,
        "local": {"lr": 0.3, "steps": 4, "batch_size": 8},
        "rounds": {"count": 3},
        "simulation": {"batching": "off"},
        "seed": 4,
    }
    return fed.Experiment(**(given | keys))


def state(run: fed.Run) -> dict[str, Tensor]:
    return run.model.state_dict()


def assert_same_state(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name, part in one.items() if not torch.equal(part, other[name])] == []


def matrices(model: nn.Module) -> list[Tensor]:
    """W + s B A of each layer, in float64."""
    parts = {name: part.detach().double() for name, part in model.named_parameters()}
    return [parts[one.base] + one.scale * parts[one.up] @ parts[one.down] for one in adapted_layers(model)]


@pytest.mark.parametrize(
    ("algorithm", "up", "first", "later"),
    [
        ("fedavg", TRAINED, TRAINED, TRAINED),
        ("ffa_lora", TRAINED - 3 * (INPUTS + 12), TRAINED - 3 * (INPUTS + 12), TRAINED - 3 * (INPUTS + 12)),
        ("fedex_lora", TRAINED, TRAINED + BASES, TRAINED + (CLIENTS - 1) * FACTORS),
        ("flora", TRAINED, TRAINED + BASES, TRAINED + CLIENTS * FACTORS),
    ],
)
def test_factors_go_up_and_down_once_matrices_are_there(algorithm: str, up: int, first: int, later: int) -> None:
    run = fed.simulate(experiment(algorithm=algorithm))
    sent = [(line["bytes_up"], line["bytes_down"]) for line in run.metrics]
    assert sent == [(CLIENTS * 4 * up, CLIENTS * 4 * down) for down in (first, later, later)]


def test_matrices_go_down_where_factors_are_more_bytes() -> None:
    model = lambda: adapted(rank=5)  # noqa: E731
    run = fed.simulate(experiment(algorithm="fedex_lora", model=None), model=model)
    sent = [line["bytes_down"] for line in run.metrics]
    assert sent == [sent[0]] * 3


@pytest.mark.parametrize("algorithm", EXACT)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_the_model_is_the_mean_of_clients_trained_products(
    algorithm: str, dtype: torch.dtype, tolerance: float
) -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = {0: 9, 1: 17, 2: 12}
    samples = {
        client: (torch.randn(size, INPUTS, generator=generator, dtype=dtype), torch.arange(size) % OUTPUTS)
        for client, size in sizes.items()
    }
    keys = experiment(data=None, model=None, rounds={"count": 1}, algorithm=algorithm)
    first = adapted().to(dtype)
    if algorithm == "fedex_lora":  # else all clients have one A after the first round, for B begins at 0
        nn.init.normal_(first.get_parameter("1.lora_B.default.weight"), generator=generator)
    whole = fed.simulate(keys, data=fed.FederatedData(samples, samples[0]), model=first).model
    # A client's batches depend on its name alone, so that it trains by itself as among others.
    own = keys.override({"algorithm": "fedavg"})
    alone = [
        matrices(fed.simulate(own, data=fed.FederatedData({client: pair}, pair), model=first).model)
        for client, pair in samples.items()
    ]
    shares = [size / sum(sizes.values()) for size in sizes.values()]
    for place, found in enumerate(matrices(whole)):
        mean = sum((share * one[place] for share, one in zip(shares, alone, strict=True)), torch.zeros(()))
        torch.testing.assert_close(found, mean, rtol=0, atol=tolerance)
    averaged = matrices(fed.simulate(own, data=fed.FederatedData(samples, samples[0]), model=first).model)
    if algorithm == "fedex_lora":
        assert float((averaged[0] - matrices(whole)[0]).abs().max()) > 1e-3


def test_with_one_client_the_residual_is_zero() -> None:
    one = {"data": {"kind": "digits", "clients": 1}}
    exact, averaged = (fed.simulate(experiment(algorithm=kind, **one)) for kind in ("fedex_lora", "fedavg"))
    for name, part in state(exact).items():
        # Updates are rounded on their way in one of them, and models in the other.
        torch.testing.assert_close(part, state(averaged)[name], rtol=0, atol=1e-6)
    assert_same_state({"W": state(exact)["1.base_layer.weight"]}, {"W": adapted().state_dict()["1.base_layer.weight"]})


def test_frozen_factors_are_as_if_left_out_by_patterns() -> None:
    by_patterns = {"kind": KIND, "train": ["*lora_B*", "2.*"]}
    frozen, left_out = (
        fed.simulate(experiment(**keys)) for keys in ({"algorithm": "ffa_lora"}, {"model": by_patterns})
    )
    assert_same_state(state(frozen), state(left_out))
    assert [line["bytes_up"] for line in frozen.metrics] == [line["bytes_up"] for line in left_out.metrics]


def test_a_frozen_factor_goes_with_masked_sums_and_with_replicas() -> None:
    averaged = fed.simulate(experiment(algorithm="ffa_lora"))
    masked = {"secure_aggregation": {"minimum_cohort": 3, "max_drop_out": 0.0, "max_weight": 2000, "bits": 64}}
    for keys in ({"algorithm": "ffa_lora", **masked}, {"algorithm": {"kind": "allreduce", "rule": "ffa_lora"}}):
        run = fed.simulate(experiment(**keys))
        assert run.summary["parameters"] == TRAINED - 3 * (INPUTS + 12)
        for name, part in state(averaged).items():
            # Models travel in float32 in one of them, and sums in fixed point or as they are in the others.
            torch.testing.assert_close(state(run)[name], part, rtol=0, atol=1e-5)


def test_groups_of_clients_agree_with_single_ones() -> None:
    single, batched = (
        fed.simulate(experiment(algorithm="fedex_lora", simulation={"batching": kind})) for kind in ("off", "on")
    )
    for name, part in state(single).items():
        torch.testing.assert_close(state(batched)[name], part, rtol=0, atol=1e-5)


@pytest.mark.processes
@pytest.mark.long
def test_workers_and_codecs_change_what_they_should() -> None:
    given = experiment(algorithm="fedex_lora")
    assert_same_state(state(fed.simulate(given)), state(fed.simulate(given.override({"simulation.workers": 2}))))
    encoded = fed.simulate(given.override({"uplink": ["int8"], "downlink": ["int8"]}))
    assert encoded.metrics[-1]["bytes_up"] < CLIENTS * 2 * TRAINED
    whole, later = (line["bytes_down"] for line in encoded.metrics[:2])
    assert whole == CLIENTS * 4 * (TRAINED + BASES)
    factors = 4 * (CLIENTS - 1) * FACTORS
    assert CLIENTS * factors < later < CLIENTS * (factors + 2 * TRAINED)


@pytest.mark.parametrize("algorithm", EXACT)
def test_a_resumed_run_ends_with_the_same_bits(algorithm: str, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(line: Any) -> None:
        if line["round"] == 2:
            raise Stop

    given = experiment(algorithm=algorithm)
    with pytest.raises(Stop):
        fed.simulate(given, output=tmp_path / "run", observers=[after_round(stop)])
    assert_same_state(state(fed.simulate(given, output=tmp_path / "run", resume=True)), state(fed.simulate(given)))


def over_grpc(given: fed.Experiment, folder: Path, kind: str = KIND) -> fed.Run:
    nodes: list[ThreadedNode] = []
    data = fed.clients.data.load(given.data, given.data_streams)
    begin = lambda port: nodes.extend(nodes_of(data, port, folder, (kind,)))  # noqa: E731
    run = serve(given, listen="127.0.0.1:0", output=folder / "run", min_nodes=CLIENTS, on_listen=begin)
    for node in nodes:
        node.end()
    return run


def over_flower(given: fed.Experiment, folder: Path) -> fed.Run:
    run_app(given, folder, CLIENTS)
    return fed.Run.load(folder / "run")


RANKS = {"kind": "flora", "ranks": [1, 3, 2]}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("engine", "algorithm"),
    [
        (over_grpc, "fedex_lora"),
        pytest.param(over_grpc, RANKS, marks=pytest.mark.long),
        pytest.param(over_grpc, "ffa_lora", marks=pytest.mark.long),
        pytest.param(over_flower, "fedex_lora", marks=pytest.mark.long),
        pytest.param(over_flower, RANKS, marks=pytest.mark.long),
    ],
    ids=["grpc-fedex", "grpc-ranks", "grpc-ffa", "flower-fedex", "flower-ranks"],
)
def test_nodes_that_miss_rounds_have_the_bits_of_the_simulation(
    engine: Any, algorithm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    # Two of three in a round: each node misses some, and needs what they have moved.
    given = experiment(algorithm=algorithm, rounds={"count": 4, "cohort": 2})
    simulated = fed.simulate(given)
    run = engine(given, tmp_path)
    assert_same_state(state(run), state(simulated))
    for name in ("bytes_up", "bytes_down"):
        assert [line[name] for line in run.metrics] == [line[name] for line in simulated.metrics]
