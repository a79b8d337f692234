"""Runs whose outcome is known: fixed points on quadratics, and algorithms that must coincide."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import fed
from fed.config.registry import TOPOLOGIES
from fed.errors import InvalidExperiment
from fed.simulations.simulate import simulate
from fed.topology import Topology
from fed.vectors.randomness import Streams
from tests.thinned import thinned

from .conftest import Point, Quadratics, mean_output

pytestmark = pytest.mark.usefixtures("device")

LR = 0.1

# Eigenvalues of at least 0.5 contract the error of K steps by 0.95^K a round at the slowest: 1e-12 of it is left.
ENOUGH = {steps: {"count": 540 // steps + 1} for steps in (1, 2, 5, 10)}


def run(quadratics: Quadratics, *, dtype: torch.dtype = torch.float64, **keys: Any) -> fed.Run:
    experiment = fed.Experiment(
        **{"local": {"lr": LR, "steps": 1, "batch_size": 100}, "rounds": ENOUGH[1], **keys},
    )
    model = quadratics.model(dtype)
    return simulate(experiment, data=quadratics.data(dtype), model=lambda: model, loss=mean_output)


def point(run: fed.Run) -> NDArray[np.float64]:
    assert isinstance(run.model, Point)
    x_D: NDArray[np.float64] = run.model.x_D.detach().numpy()
    return x_D


def fixed_point(quadratics: Quadratics, steps: int, mu: float = 0.0) -> NDArray[np.float64]:
    """x* = (Σ p_i M_i)⁻¹ Σ p_i M_i b_i, M_i = [I − (I − η (A_i + μ I))^K] (A_i + μ I)⁻¹ A_i."""
    identity = np.eye(quadratics.centre_ND.shape[1])
    share_N = quadratics.samples_N / quadratics.samples_N.sum()
    left: Any = 0.0
    right: Any = 0.0
    for share, curvature, centre in zip(share_N, quadratics.curvature_NDD, quadratics.centre_ND, strict=True):
        damped = curvature + mu * identity
        contraction = np.linalg.matrix_power(identity - LR * damped, steps)
        matrix = (identity - contraction) @ np.linalg.inv(damped) @ curvature
        left, right = left + share * matrix, right + share * matrix @ centre
    answer: NDArray[np.float64] = np.linalg.solve(left, right)
    return answer


@pytest.mark.parametrize("steps", thinned([2, 1, 5, 10], quick=1))
def test_fedavg_reaches_its_fixed_point(quadratics: Quadratics, steps: int) -> None:
    finished = run(quadratics, local={"lr": LR, "steps": steps, "batch_size": 100}, rounds=ENOUGH[steps])
    np.testing.assert_allclose(point(finished), fixed_point(quadratics, steps), rtol=0, atol=1e-10)


@pytest.mark.parametrize("steps", thinned([2, 1, 5, 10], quick=1))
@pytest.mark.parametrize("mu", [0.7])
def test_fedprox_reaches_its_fixed_point(quadratics: Quadratics, steps: int, mu: float) -> None:
    finished = run(
        quadratics,
        algorithm={"kind": "fedprox", "mu": mu},
        local={"lr": LR, "steps": steps, "batch_size": 100},
        rounds=ENOUGH[steps],
    )
    np.testing.assert_allclose(point(finished), fixed_point(quadratics, steps, mu), rtol=0, atol=1e-10)


@pytest.mark.parametrize("cycles", [1, 3])
def test_cyclic_visits_every_client_in_turn(quadratics: Quadratics, cycles: int) -> None:
    """x ← b_i + (I − η A_i)^K (x − b_i), for one client after another."""
    clients, steps = len(quadratics.centre_ND), 3
    finished = run(
        quadratics,
        algorithm="cyclic",
        local={"lr": LR, "steps": steps, "batch_size": 100},
        rounds={"count": cycles * clients},
    )
    begin = quadratics.model(torch.float64)
    assert isinstance(begin, Point)
    x_D = begin.x_D.detach().numpy()
    order = Streams(0).generator("order of clients").permutation(clients)
    for client in [*order] * cycles:
        curvature, centre = quadratics.curvature_NDD[client], quadratics.centre_ND[client]
        x_D = centre + np.linalg.matrix_power(np.eye(len(x_D)) - LR * curvature, steps) @ (x_D - centre)
    np.testing.assert_allclose(point(finished), x_D, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("rounds", "said"),
    [
        ({"cohort": "all"}, r"rounds\.cohort must be 1 with algorithm cyclic.*, got all: write rounds"),
        ({"sampling": "uniform"}, r"rounds\.sampling must be round_robin with algorithm cyclic.*, got uniform"),
        ({"kind": "buffered"}, r"rounds\.kind must be synchronous with algorithm cyclic.*, got buffered"),
        ({"over_selection": 2.0}, r"rounds\.over_selection must be 1\.0"),
    ],
    ids=["cohort", "sampling", "kind", "over_selection"],
)
def test_cyclic_is_refused_where_others_would_train(rounds: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidExperiment, match=said):
        fed.Experiment(algorithm="cyclic", rounds=rounds)


def test_an_override_of_the_algorithm_leaves_its_rounds_behind() -> None:
    cyclic = fed.Experiment(algorithm="cyclic", rounds={"count": 3})
    assert cyclic.rounds == fed.Experiment(algorithm="cyclic", rounds={"count": 3, "cohort": 1}).rounds
    assert cyclic.override({"algorithm": "fedavg"}) == fed.Experiment(rounds={"count": 3})


@pytest.mark.parametrize("dtype", thinned([torch.float32, torch.float64], quick=1))
@pytest.mark.parametrize(
    "same",
    [
        {"kind": "fedprox", "mu": 0.0},
        {"kind": "bmuf", "block_momentum": 0.0, "block_lr": 1.0},
        {"kind": "bmuf", "block_momentum": 0.0, "block_lr": 1.0, "nesterov": True},
        {"kind": "fedavgm", "momentum": 0.0, "server_lr": 1.0},
    ],
)
def test_what_reduces_to_fedavg_is_fedavg_to_the_bit(
    quadratics: Quadratics, same: dict[str, Any], dtype: torch.dtype
) -> None:
    keys: dict[str, Any] = {
        "local": {"lr": LR, "epochs": 2, "batch_size": 2, "momentum": 0.5},
        "rounds": {"count": 20, "cohort": 3},
    }
    fedavg = run(quadratics, dtype=dtype, **keys)
    other = run(quadratics, dtype=dtype, algorithm=same, **keys)
    assert point(fedavg).tobytes() == point(other).tobytes()
    assert [line["train_loss"] for line in fedavg.metrics] == [line["train_loss"] for line in other.metrics]


def classification(seed: int, dtype: torch.dtype, clients: int) -> fed.FederatedData:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(24 * clients, 5, generator=generator, dtype=dtype)
    targets = torch.randint(3, (24 * clients,), generator=generator)
    return fed.FederatedData(
        {client: (inputs[client::clients], targets[client::clients]) for client in range(clients)},
        (inputs, targets),
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 0.0), (torch.float64, 1e-14)])
def test_fedavg_with_one_client_is_plain_sgd(dtype: torch.dtype, tolerance: float) -> None:
    data = classification(0, dtype, clients=1)
    inputs, targets = data.train[0]
    torch.manual_seed(3)
    first = nn.Sequential(nn.Linear(5, 7, dtype=dtype), nn.Tanh(), nn.Linear(7, 3, dtype=dtype))
    rounds, epochs, batch = 6, 2, 10
    experiment = fed.Experiment(
        seed=5, local={"lr": 0.3, "epochs": epochs, "batch_size": batch}, rounds={"count": rounds}
    )
    finished = simulate(experiment, data=data, model=lambda: first)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.3)
    for number in range(1, rounds + 1):
        order = Streams(5).generator("order", 0, number)
        for _ in range(epochs):
            for indices_B in torch.from_numpy(order.permutation(len(inputs))).split_with_sizes([batch, batch, 4]):
                optimizer.zero_grad()
                torch.autograd.backward(nn.functional.cross_entropy(first(inputs[indices_B]), targets[indices_B]))
                optimizer.step()
    torch.set_num_threads(threads)
    for ours, theirs in zip(finished.model.parameters(), first.parameters(), strict=True):
        assert float((ours - theirs).detach().abs().max()) <= tolerance


def test_gossip_on_a_complete_graph_is_fedavg_with_full_participation() -> None:
    data = classification(1, torch.float64, clients=6)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()

    keys: dict[str, Any] = {"local": {"lr": 0.2, "epochs": 2, "batch_size": 7}, "rounds": {"count": 15}}
    fedavg = simulate(fed.Experiment(**keys), data=data, model=model)
    gossip = {"algorithm": {"kind": "dpsgd", "order": "adapt_then_combine"}, "topology": {"kind": "complete"}}
    dpsgd = simulate(fed.Experiment(**keys, **gossip), data=data, model=model)
    models = [dpsgd.model, *dpsgd.models.values()]
    assert len(models) == 7
    for peer in models:
        for ours, theirs in zip(peer.parameters(), fedavg.model.parameters(), strict=True):
            assert float((ours - theirs).detach().abs().max()) < 1e-12


@pytest.mark.parametrize("order", ["combine_then_adapt", "adapt_then_combine"])
@pytest.mark.parametrize("topology", ["ring", "complete", "exponential"])
def test_dpsgd_is_its_recursion_in_numpy(quadratics: Quadratics, order: str, topology: str) -> None:
    rounds = 7
    finished = run(
        quadratics,
        algorithm={"kind": "dpsgd", "order": order},
        topology={"kind": topology},
        rounds={"count": rounds},
    )
    # Four peers: a ring has degree 2, complete and exponential (offsets 1 and 2) degree 3.
    neighbours = {"ring": (1, 3), "complete": (1, 2, 3), "exponential": (1, 2, 3)}[topology]
    mixing = np.array([[1.0 * (i == j or (j - i) % 4 in neighbours) for j in range(4)] for i in range(4)])
    mixing /= mixing.sum(1, keepdims=True)
    x_ND = np.tile(quadratics.start_D, (4, 1))
    for _ in range(rounds):
        gradient_ND = np.einsum("nij,nj->ni", quadratics.curvature_NDD, x_ND - quadratics.centre_ND)
        combine_then_adapt = order == "combine_then_adapt"
        x_ND = mixing @ x_ND - LR * gradient_ND if combine_then_adapt else mixing @ (x_ND - LR * gradient_ND)
    for client, module in finished.models.items():
        assert isinstance(module, Point)
        np.testing.assert_allclose(module.x_D.detach().numpy(), x_ND[int(client)], rtol=0, atol=1e-12)
    np.testing.assert_allclose(point(finished), x_ND.mean(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("topology", ["one_peer_exponential", "random_matching", "matcha", "directed_ring"])
def test_dpsgd_mixes_over_each_rounds_graph(quadratics: Quadratics, topology: str) -> None:
    """By its recursion, with the matrices of the rounds."""
    given: dict[str, Any] = {"algorithm": {"kind": "dpsgd"}, "topology": {"kind": topology}, "rounds": {"count": 9}}
    finished, section = run(quadratics, **given), TOPOLOGIES.make(topology)
    of_rounds = Topology(section.make, section.target, 4, Streams(finished.experiment.seed))
    x_ND = np.tile(quadratics.start_D, (4, 1))
    for number in range(1, 10):
        gradient_ND = np.einsum("nij,nj->ni", quadratics.curvature_NDD, x_ND - quadratics.centre_ND)
        x_ND = of_rounds.matrix(number).to_dense().numpy() @ (x_ND - LR * gradient_ND)
    for client, module in finished.models.items():
        assert isinstance(module, Point)
        np.testing.assert_allclose(module.x_D.detach().numpy(), x_ND[int(client)], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["choco", "deepsqueeze", "adpsgd", "noloco", "moshpit"])
def test_gossip_of_every_message_is_its_recursion_in_numpy(quadratics: Quadratics, kind: str) -> None:
    """Of runs, with the matrices of their graphs; messages travel as they are."""
    finished, w_NN = run(quadratics, algorithm={"kind": kind}, rounds={"count": 9}), np.eye(4)
    algorithm = finished.experiment.algorithm.make()
    partners = algorithm.partners()
    of_rounds = Topology(partners, partners, 4, Streams(finished.experiment.seed)) if partners else None
    x_ND, momentum_ND = np.tile(quadratics.start_D, (4, 1)), np.zeros((4, len(quadratics.start_D)))
    for number in range(1, 10):
        w_NN = of_rounds.matrix(number).to_dense().numpy() if of_rounds else RING_OF_FOUR
        step_ND = -LR * np.einsum("nij,nj->ni", quadratics.curvature_NDD, x_ND - quadratics.centre_ND)
        if kind == "noloco":
            momentum_ND = 0.3 * momentum_ND + 0.7 * w_NN @ step_ND - 0.7 * (x_ND - w_NN @ x_ND)
            x_ND = x_ND + momentum_ND
        elif kind == "adpsgd":
            x_ND = w_NN @ x_ND + step_ND
        elif kind == "moshpit":
            x_ND = w_NN @ (x_ND + step_ND)
        else:
            x_ND = x_ND + step_ND
            x_ND = x_ND + algorithm.consensus_step * (w_NN @ x_ND - x_ND)
    for client, module in finished.models.items():
        assert isinstance(module, Point)
        np.testing.assert_allclose(module.x_D.detach().numpy(), x_ND[int(client)], rtol=0, atol=1e-12)


RING_OF_FOUR = np.array([[1.0 * (i == j or (i - j) % 4 in (1, 3)) / 3 for j in range(4)] for i in range(4)])


def test_local_moves_each_client_to_its_own_optimum(quadratics: Quadratics) -> None:
    finished = run(quadratics, algorithm={"kind": "local"}, rounds=ENOUGH[1])
    for client, module in finished.models.items():
        assert isinstance(module, Point)
        np.testing.assert_allclose(module.x_D.detach().numpy(), quadratics.centre_ND[int(client)], rtol=0, atol=1e-10)
    assert finished.summary["bytes_up"] == finished.summary["bytes_down"] == 0


def test_centralized_reaches_the_optimum_of_all_samples(quadratics: Quadratics) -> None:
    finished = run(quadratics, algorithm={"kind": "centralized"}, rounds={"count": 600, "cohort": 2})
    np.testing.assert_allclose(point(finished), fixed_point(quadratics, 1), rtol=0, atol=1e-10)
    assert finished.summary["bytes_up"] == finished.summary["bytes_down"] == 0


# Local training that algorithms accept: their equations hold for it.

DECAY = 0.3


def optimum_of_equals(quadratics: Quadratics, decay: float = 0.0) -> NDArray[np.float64]:
    """Where Σ ∇f_i + λ x = 0, each client counting once."""
    curvature_NDD = quadratics.curvature_NDD
    pull_D = np.einsum("nij,nj->i", curvature_NDD, quadratics.centre_ND)
    answer: NDArray[np.float64] = np.linalg.solve(
        curvature_NDD.sum(0) + len(curvature_NDD) * decay * np.eye(len(pull_D)), pull_D
    )
    return answer


@pytest.mark.long
def test_scaffold_with_weight_decay_reaches_the_decayed_optimum(quadratics: Quadratics) -> None:
    local = {"lr": 0.05, "steps": 4, "batch_size": 100, "weight_decay": DECAY}
    finished = run(quadratics, algorithm={"kind": "scaffold"}, local=local, rounds={"count": 400})
    np.testing.assert_allclose(point(finished), optimum_of_equals(quadratics, DECAY), rtol=0, atol=1e-10)


@pytest.mark.long
def test_mimelite_with_weight_decay_rests_where_the_decayed_losses_do(quadratics: Quadratics) -> None:
    # Of one step: at rest m is Σ p_i ∇f_i(x), and (1 − β) m + β m + λ x = 0. Momentum is slow: 0.95 a round at worst.
    equal = Quadratics(
        quadratics.curvature_NDD, quadratics.centre_ND, np.full_like(quadratics.samples_N, 2), quadratics.start_D
    )
    local = {"lr": LR, "steps": 1, "batch_size": 100, "weight_decay": DECAY}
    finished = run(equal, algorithm={"kind": "mimelite"}, local=local, rounds={"count": 600})
    np.testing.assert_allclose(point(finished), optimum_of_equals(equal, DECAY), rtol=0, atol=1e-10)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_qfedavg_with_q_zero_is_fedavg_under_adam(quadratics: Quadratics, optimizer: str) -> None:
    keys: dict[str, Any] = {"local": {"optimizer": optimizer, "lr": 0.05, "steps": 3}, "rounds": {"count": 20}}
    fair = run(quadratics, algorithm={"kind": "qfedavg", "q": 0.0}, **keys)
    mean = run(quadratics, algorithm={"kind": "local_sgd"}, **keys)
    np.testing.assert_allclose(point(fair), point(mean), rtol=0, atol=1e-12)


@pytest.mark.long
def test_feddyn_reaches_the_optimum_under_adam_and_fedavg_does_not(quadratics: Quadratics) -> None:
    # Adam's first step is η long however small the gradient, so that it comes as near as a few η.
    local = {"optimizer": "adam", "lr": 0.005, "steps": 30, "batch_size": 100}
    away = {}
    for kind in ("feddyn", "local_sgd"):
        algorithm = {"kind": "feddyn", "alpha": 2.0} if kind == "feddyn" else {"kind": kind}
        finished = run(quadratics, algorithm=algorithm, local=local, rounds={"count": 80})
        away[kind] = float(np.abs(point(finished) - optimum_of_equals(quadratics)).max())
    assert away["feddyn"] < 0.02
    assert away["local_sgd"] > 5 * away["feddyn"]
