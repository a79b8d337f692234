"""Where algorithms settle, and what they equal, on quadratics with unequal curvature in float64."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fed.aggregators.afl import AFL, onto_simplex
from fed.aggregators.base import Aggregator, ClientWork, Reduced
from fed.aggregators.bmuf import BMUF
from fed.aggregators.diloco import DiLoCo
from fed.aggregators.easgd import EAMSGD, EASGD
from fed.aggregators.fedavg import FedAvg
from fed.aggregators.feddyn import FedDyn
from fed.aggregators.fednova import FedNova
from fed.aggregators.local_sgd import LocalSGD
from fed.aggregators.mimelite import MimeLite
from fed.aggregators.post_local_sgd import PostLocalSGD
from fed.aggregators.qfedavg import QFedAvg
from fed.aggregators.scaffold import Scaffold
from fed.aggregators.slowmo import SlowMo
from fed.clients.training.optimizers import SGD
from tests.aggregators.quadratics import Floats, Quadratics, after, cohorts, fixed_point, model_after, states
from tests.thinned import thinned

PROBLEM = Quadratics.random(clients=6, parameters=4, seed=0)
A_NPP, B_NP = PROBLEM.curvature_NPP.numpy(), PROBLEM.minimum_NP.numpy()
EYE = np.eye(4)


def assert_near(got: Floats, expected: Floats, tolerance: float) -> None:
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("steps", "expected"), [(1, 0.909091), (2, 0.884956), (5, 0.810690), (10, 0.713442)])
def test_fedavg_settles_where_the_reference_says(steps: int, expected: float) -> None:
    run = states(FedAvg(), Quadratics.scalar(), 5.0, lr=0.05, steps=steps)
    assert_near(model_after(400, run), np.array([expected]), 1e-6)  # as many digits as it gives


# Corrected averaging.


@pytest.mark.parametrize(
    ("rule", "local", "cohort", "rounds"),
    [
        (Scaffold(), {"lr": 0.05, "steps": [3, 10, 1, 7, 5, 2]}, 6, 200),
        (Scaffold(server_lr=0.5), {"lr": 0.05}, 2, 800),
        pytest.param(Scaffold(), {"lr": 0.01, "momentum": 0.9}, 6, 400, marks=pytest.mark.long),
        (Scaffold(), {"lr": 0.01, "momentum": 0.9, "nesterov": True}, 6, 400),
        (FedDyn(alpha=0.3), {"lr": 0.1, "steps": 10}, 6, 400),
        pytest.param(FedDyn(alpha=1.0), {"lr": 0.1, "steps": 10}, 3, 400, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_corrected_averaging_reaches_the_true_optimum(
    rule: Aggregator, local: dict[str, Any], cohort: int, rounds: int
) -> None:
    run = states(rule, PROBLEM, 5.0, asked=cohorts(6, cohort), **local)
    assert_near(model_after(rounds, run), PROBLEM.optimum(), 1e-8)


def test_scaffold_is_its_recursion_in_numpy_whoever_takes_part() -> None:
    lr, server_lr, steps, asked = 0.05, 0.7, 4, cohorts(6, 2, seed=3)
    x, control, controls = np.full(4, 5.0), np.zeros(4), np.zeros((6, 4))
    run = states(Scaffold(server_lr=server_lr), PROBLEM, 5.0, lr=lr, steps=steps, asked=cohorts(6, 2, seed=3))
    for _ in range(12):
        who = next(asked)
        y = np.tile(x, (2, 1))
        for _ in range(steps):
            y = y - lr * (np.einsum("npq,nq->np", A_NPP[who], y - B_NP[who]) - controls[who] + control)
        controls[who] = controls[who] - control + (x - y) / (steps * lr)
        x, control = x + server_lr * (y - x).mean(0), controls.mean(0)
    state = after(12, run)
    assert_near(state.model_P.numpy(), x, 1e-12)
    assert_near(state.control_P.numpy(), control, 1e-12)


@pytest.mark.parametrize("cohort", [6, 2])
def test_feddyn_is_its_recursion_where_clients_reach_their_minimum(cohort: int) -> None:
    # argmin ½ (y − b)ᵀ A (y − b) − ⟨g, y⟩ + α/2 ‖y − x‖²  ⇒  (A + α I) y = A b + g + α x.
    alpha, x, tilt, gradients = 0.7, np.full(4, 2.0), np.zeros(4), np.zeros((6, 4))
    run = states(FedDyn(alpha=alpha), PROBLEM, 2.0, lr=0.2, steps=400, asked=cohorts(6, cohort))
    for clients in itertools.islice(cohorts(6, cohort), 3):
        solved = [
            np.linalg.solve(A_NPP[i] + alpha * EYE, A_NPP[i] @ B_NP[i] + gradients[i] + alpha * x) for i in clients
        ]
        moved = np.stack(solved) - x
        gradients[clients] -= alpha * moved
        tilt = tilt - alpha * moved.sum(0) / 6
        x = x + moved.mean(0) - tilt / alpha
    assert_near(model_after(3, run), x, 1e-12)


def test_fednova_with_unequal_local_steps_settles_at_its_closed_form() -> None:
    """x* with Σ p_i d_i = 0.

    K plain steps leave y − b = (I − ηA)^K (x − b), so the normalised update is −M (x − b) / K, M = I − (I − ηA)^K, and
    τ_eff > 0 only scales the step: Σ (p_i / K_i) M_i (x* − b_i) = 0.
    """
    steps = [1, 4, 2, 9, 5, 3]
    fixed = PROBLEM.balance(EYE - PROBLEM.contraction(0.05, steps), PROBLEM.shares / np.array(steps))
    assert_near(model_after(400, states(FedNova(), PROBLEM, 5.0, lr=0.05, steps=steps)), fixed, 1e-10)
    fedavg = PROBLEM.balance(EYE - PROBLEM.contraction(0.05, steps), PROBLEM.shares)
    assert np.abs(fixed - fedavg).max() > 0.1  # so that the test can tell them apart


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.8, False), (0.8, True)])
def test_fednova_is_consistent_where_fedavg_is_not(momentum: float, nesterov: bool) -> None:
    """With unequal steps and η → 0 FedNova minimises the clients' weighted loss, FedAvg another one.

    The fixed point's distance is O(η): a tenth of η, a tenth of the distance, if and only if ‖a‖₁ is right.
    """
    optimum, steps = PROBLEM.optimum(PROBLEM.shares), [1, 4, 2, 9, 5, 3]
    local: Any = {"steps": steps, "momentum": momentum, "nesterov": nesterov}
    near, nearer = (np.abs(fixed_point(FedNova(), PROBLEM, lr=lr, **local) - optimum).max() for lr in (1e-4, 1e-5))
    assert nearer < 0.11 * near < 1e-3
    assert np.abs(fixed_point(FedAvg(), PROBLEM, lr=1e-5, **local) - optimum).max() > 0.1


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.99])
def test_gradients_of_an_update_are_the_optimizers_sum(momentum: float, nesterov: bool) -> None:
    optimizer, x = SGD(lr=1.0, momentum=momentum, nesterov=nesterov), torch.zeros(1, dtype=torch.float64)
    for steps in range(1, 13):
        optimizer.step(x, torch.ones_like(x))
        column = torch.full((1, 1), float(steps), dtype=torch.float64)
        work = ClientWork(*(x.view(1, 1), x, x.view(1, 1), column, column), 1.0, momentum, column, nesterov=nesterov)
        np.testing.assert_allclose(work.gradients_K1.item(), -x.item(), rtol=1e-12)


def test_fednova_is_fedavg_where_all_take_as_many_steps() -> None:
    ours, fedavg = (states(rule, PROBLEM, 5.0, momentum=0.5) for rule in (FedNova(), FedAvg()))
    assert_near(model_after(20, ours), model_after(20, fedavg), 1e-13)


@pytest.mark.parametrize("steps", [1, 4])
def test_mimelite_keeps_its_momentum_frozen_during_local_steps(steps: int) -> None:
    beta, lr, x, m = 0.6, 0.05, np.full(4, 5.0), np.zeros(4)
    run = states(MimeLite(beta=beta), PROBLEM, 5.0, lr=lr, steps=steps)
    for _ in range(5):
        gradients = np.einsum("npq,nq->np", A_NPP, x - B_NP)
        y = np.tile(x, (6, 1))
        for _ in range(steps):
            y = y - lr * ((1 - beta) * np.einsum("npq,nq->np", A_NPP, y - B_NP) + beta * m)
        x, m = PROBLEM.shares @ y, (1 - beta) * PROBLEM.shares @ gradients + beta * m
    state = after(5, run)
    assert_near(state.model_P.numpy(), x, 1e-12)
    assert_near(state.momentum_P.numpy(), m, 1e-12)


def test_mimelite_without_momentum_is_fedavg() -> None:
    ours, fedavg = (states(rule, PROBLEM, 5.0) for rule in (MimeLite(beta=0.0), FedAvg()))
    assert_near(model_after(10, ours), model_after(10, fedavg), 1e-13)


# Fairness.


def test_qfedavg_with_q_zero_is_fedavg_with_equal_weights() -> None:
    ours, local_sgd = (states(rule, PROBLEM, 5.0) for rule in (QFedAvg(q=0.0), LocalSGD()))
    assert_near(model_after(20, ours), model_after(20, local_sgd), 1e-13)


@pytest.mark.parametrize(("q", "lipschitz"), [(0.5, None), (1.0, None), (3.0, 7.0)])
def test_qfedavg_is_its_recursion_in_numpy(q: float, lipschitz: float | None) -> None:
    lr, x = 0.05, np.full(4, 3.0)
    run = states(QFedAvg(q=q, lipschitz=lipschitz), PROBLEM, 3.0, lr=lr, steps=5)
    bound = 1 / lr if lipschitz is None else lipschitz
    for _ in range(8):
        y = B_NP + np.einsum("npq,nq->np", PROBLEM.contraction(lr, 5), x - B_NP)
        loss, w = 0.5 * np.einsum("np,npq,nq->n", x - B_NP, A_NPP, x - B_NP), bound * (x - y)
        terms = q * loss ** (q - 1) * (w**2).sum(1) + bound * loss**q
        x = x - (loss**q) @ w / terms.sum()
    assert_near(model_after(8, run), x, 1e-12)


@pytest.mark.parametrize("q", [0.5, 1.0, 3.0])
def test_qfedavg_takes_clients_whose_loss_is_zero(q: float) -> None:
    # f^{q − 1} is infinite at 0 where q < 1; a client that has nothing to learn brings no step and no infinity.
    column = torch.zeros(2, 1, dtype=torch.float64)
    update_KP = torch.tensor([[0.0, 0.0], [1.0, -2.0]], dtype=torch.float64)
    work = ClientWork(
        *(update_KP, torch.zeros(2), torch.zeros(2, 2), column + 1, column + 1), 0.1, 0.0, column, start_loss_K1=column
    )
    report = QFedAvg(q=q).report(work)
    assert all(bool(torch.isfinite(part).all()) for part in report.message)
    assert torch.equal(report.message[0][0], torch.zeros(2, dtype=torch.float64))


def test_afl_settles_where_the_worst_loss_is_least() -> None:
    # ½ x² = 5 (x − 1)² between 0 and 1: x = √10 / (1 + √10); λ balances the gradients, λ₁ x = λ₂ 10 (1 − x).
    worst = np.sqrt(10) / (1 + np.sqrt(10))
    share = 10 * (1 - worst) / (worst + 10 * (1 - worst))
    state = after(1200, states(AFL(mixture_lr=0.3), Quadratics.scalar(), 5.0, lr=0.05, steps=1))
    assert_near(state.model_P.numpy(), np.array([worst]), 1e-9)
    assert_near(state.mixture_N.numpy(), np.array([share, 1 - share]), 1e-9)


def test_afl_is_its_recursion_in_numpy_where_all_take_part() -> None:
    lr, gamma, x, mixture = 0.05, 0.02, np.full(4, 2.0), np.full(6, 1 / 6)
    run = states(AFL(mixture_lr=gamma), PROBLEM, 2.0, lr=lr, steps=3)
    for _ in range(25):
        loss = 0.5 * np.einsum("np,npq,nq->n", x - B_NP, A_NPP, x - B_NP)
        x = x + mixture @ np.einsum("npq,nq->np", PROBLEM.contraction(lr, 3) - EYE, x - B_NP)
        mixture = by_bisection(mixture + gamma * loss)
    state = after(25, run)
    assert_near(state.model_P.numpy(), x, 1e-12)
    assert_near(state.mixture_N.numpy(), mixture, 1e-12)


def test_afl_moves_weights_only_among_sampled_clients() -> None:
    asked = iter([[1, 2, 4], [0, 1]])
    _, first, second = states_of(AFL(mixture_lr=1e-3), 2, asked)
    assert_near(first.mixture_N.numpy()[[0, 3, 5]], np.full(3, 1 / 6), 1e-15)
    assert np.ptp(first.mixture_N.numpy()[[1, 2, 4]]) > 1e-4
    assert_near(second.mixture_N.numpy()[2:], first.mixture_N.numpy()[2:], 1e-15)
    # The step is a mean of those who take part, whatever they have of all shares.
    x = first.model_P.numpy()
    moves = np.einsum("npq,nq->np", PROBLEM.contraction(0.05, 5) - EYE, x - B_NP)[:2]
    share = first.mixture_N.numpy()[:2]
    assert abs(share.sum() - 1 / 3) > 1e-4
    assert_near(second.model_P.numpy(), x + share @ moves / share.sum(), 1e-13)


def test_afl_stays_if_no_sampled_client_has_weight() -> None:
    _, one, two = states_of(AFL(mixture_lr=1e3), 2, iter([[0, 1, 2, 3, 4, 5], [0]]))
    shares = one.mixture_N.numpy()
    assert shares[0] == 0
    assert shares.sum() == 1
    assert torch.equal(one.model_P, two.model_P)


def test_afl_ignores_differences_in_age_and_number() -> None:
    # Client 0 answered twice, client 1 once and counts by half: losses of 2, updates of 1 and -1, shares of 1/3.
    losses_N, here_N = torch.tensor([4.0, 1.0, 0.0]).double(), torch.tensor([2.0, 0.5, 0.0]).double()
    mean = torch.tensor([2 * 1.0 - 0.5 * 1.0]).double(), losses_N, here_N  # λ_i N = 1
    rule = AFL(mixture_lr=1.0)
    state = rule.apply(rule.init(torch.zeros(1).double()), Reduced(tuple(part / 3 for part in mean), 3, 3))
    assert_near(state.mixture_N.numpy(), np.full(3, 1 / 3), 1e-15)
    assert_near(state.model_P.numpy(), np.array([1.5 / 3]), 1e-15)  # Σ s Δ over the number of answers


def states_of(rule: AFL, rounds: int, asked: Iterator[list[int]]) -> list[Any]:
    return list(itertools.islice(states(rule, PROBLEM, 2.0, lr=0.05, asked=asked), rounds + 1))


def by_bisection(point: Floats) -> Floats:
    """max(v − θ, 0) with the θ for which it sums to 1, by halving an interval that holds it."""
    low, high = point.min() - 1, point.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(point - middle, 0).sum() > 1 else (low, middle)
    shares: Floats = np.maximum(point - high, 0)
    return shares


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=9))
def test_the_projection_onto_the_simplex_is_the_nearest_point(numbers: list[float]) -> None:
    point = np.array(numbers)
    nearest = onto_simplex(torch.from_numpy(point)).numpy()
    assert_near(nearest, by_bisection(point), 1e-13)
    # Karush–Kuhn–Tucker: feasible, v − λ one number θ where λ > 0, and at most θ where λ = 0.
    assert nearest.min() >= 0
    assert_near(nearest.sum(), np.array(1.0), 1e-13)
    slack = point - nearest
    theta = slack[nearest > 0].mean()
    assert_near(slack[nearest > 0], np.full((nearest > 0).sum(), theta), 1e-13)
    assert (slack[nearest == 0] <= theta + 1e-13).all()


# Block-wise and local SGD.


@pytest.mark.parametrize(("beta", "alpha"), [(0.0, 1.0), (0.7, 1.0), (0.4, 0.6)])
def test_slowmo_with_a_constant_step_is_classical_bmuf(beta: float, alpha: float) -> None:
    slowmo = states(SlowMo(slow_momentum=beta, slow_lr=alpha), PROBLEM, 5.0, lr=0.03)
    bmuf = states(BMUF(block_momentum=beta, block_lr=alpha), PROBLEM, 5.0, lr=0.03)
    for ours, theirs in itertools.islice(zip(slowmo, bmuf, strict=True), 60):
        assert_near(ours.model_P.numpy(), theirs.model_P.numpy(), 1e-12)
        assert_near(-alpha * 0.03 * ours.momentum_P.numpy(), theirs.update_P.numpy(), 1e-12)


def test_slowmo_remembers_gradients_where_a_schedule_changes_the_step() -> None:
    beta, alpha, x, move = 0.7, 0.9, np.full(4, 5.0), np.zeros(4)

    def lr(number: int) -> float:
        return 0.1 / number

    run = states(SlowMo(slow_momentum=beta, slow_lr=alpha), PROBLEM, 5.0, lr=lr)
    for number in range(1, 12):
        left = PROBLEM.contraction(lr(number), 5)
        update = PROBLEM.shares @ np.einsum("npq,nq->np", left - EYE, x - B_NP)
        move = beta * move * (lr(number) / lr(number - 1) if number > 1 else 1) + alpha * update
        x = x + move
    assert_near(model_after(11, run), x, 1e-12)
    bmuf = states(BMUF(block_momentum=beta, block_lr=alpha), PROBLEM, 5.0, lr=lr)
    assert np.abs(model_after(11, bmuf) - x).max() > 1e-2


@pytest.mark.parametrize(("momentum", "lr"), [(0.9, 0.7), (0.5, 1.0), (0.0, 0.3)])
def test_diloco_with_sgd_inside_is_nesterov_bmuf(momentum: float, lr: float) -> None:
    diloco = states(DiLoCo(outer_momentum=momentum, outer_lr=lr), PROBLEM, 5.0, lr=0.03)
    rule = BMUF(block_momentum=momentum, block_lr=lr, nesterov=True)
    for ours, theirs in itertools.islice(zip(diloco, states(rule, PROBLEM, 5.0, lr=0.03), strict=True), 60):
        assert_near(ours.model_P.numpy(), rule.model_to_send(theirs).numpy(), 1e-12)


def test_diloco_is_torchs_nesterov_sgd_on_the_outer_gradient() -> None:
    model = torch.nn.Parameter(torch.full((4,), 5.0, dtype=torch.float64))
    optimizer = torch.optim.SGD([model], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(20):
        moved = np.einsum("npq,nq->np", PROBLEM.contraction(0.03, 5) - EYE, model.detach().numpy() - B_NP)
        model.grad = -torch.from_numpy(PROBLEM.shares @ moved)
        optimizer.step()
    ours = model_after(20, states(DiLoCo(), PROBLEM, 5.0, lr=0.03))
    assert_near(ours, model.detach().numpy(), 1e-12)


def test_local_sgd_settles_where_fedavg_of_equal_samples_does() -> None:
    fixed = PROBLEM.balance(EYE - PROBLEM.contraction(0.05, 5))
    assert_near(model_after(400, states(LocalSGD(), PROBLEM, 5.0, lr=0.05, steps=5)), fixed, 1e-10)


def test_post_local_sgd_takes_single_steps_until_the_switch() -> None:
    def rounds(number: int, steps: int, start: Floats) -> Floats:
        left = PROBLEM.contraction(0.05, steps)
        for _ in range(number):
            start = start + np.einsum("npq,nq->np", left - EYE, start - B_NP).mean(0)
        return start

    run = states(PostLocalSGD(switch=7), PROBLEM, 5.0, lr=0.05, steps=5)
    models = [state.model_P.numpy() for state in itertools.islice(run, 11)]
    before = rounds(7, 1, np.full(4, 5.0))
    assert_near(models[7], before, 1e-13)
    assert_near(models[10], rounds(3, 5, before), 1e-13)


# Elastic averaging.


@pytest.mark.parametrize(("elasticity", "steps"), thinned([(0.15, 1), (0.15, 10), (0.05, 10), (None, 10)], 2))
def test_easgd_settles_at_its_closed_form(elasticity: float | None, steps: int) -> None:
    """c* with Σ (y_i − c*) = 0.

    τ plain steps from x_i lead to y_i = b_i + R_i (x_i − b_i), R = (I − ηA)^τ, and the exchange to
    x_i = (1 − α) y_i + α c. So (I − (1 − α) R_i) (y_i − c) = (I − R_i) (b_i − c), and as the centre rests,
    Σ M_i (b_i − c*) = 0 with M_i = (I − (1 − α) R_i)⁻¹ (I − R_i).
    """
    alpha, left = elasticity or 0.9 / 6, PROBLEM.contraction(0.05, steps)
    fixed = PROBLEM.balance(np.linalg.solve(EYE - (1 - alpha) * left, EYE - left).astype(np.float64))
    run = states(EASGD(elasticity=elasticity), PROBLEM, 5.0, lr=0.05, steps=steps)
    assert_near(model_after(800, run), fixed, 1e-10)
    fedavg = PROBLEM.balance(EYE - PROBLEM.contraction(0.05, steps))
    assert steps == 1 or np.abs(fixed - fedavg).max() > 1e-3  # so that the test can tell them apart


def test_easgds_period_takes_the_place_of_the_experiments_steps() -> None:
    runs = (
        states(EASGD(period=3), PROBLEM, 5.0, steps=10),
        states(EASGD(), PROBLEM, 5.0, steps=3),
    )
    own, given_steps = (model_after(5, run) for run in runs)
    assert_near(own, given_steps, 0)


@pytest.mark.parametrize("rule", [EASGD(elasticity=0.2), EAMSGD(elasticity=0.2, momentum=0.9)])
def test_easgd_exchange_conserves_the_sum_of_models(rule: Any) -> None:
    # Without gradients, Σ x_i + c stays; so with a single client that moves, the centre gets α of it.
    flat = Quadratics(torch.zeros(6, 4, 4, dtype=torch.float64), PROBLEM.minimum_NP, PROBLEM.samples_N1)
    start = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)
    centre = torch.full((4,), 3.0, dtype=torch.float64)
    kept = type(rule.init_client(centre))(start, *([torch.zeros_like(start)] if isinstance(rule, EAMSGD) else []))
    column = flat.samples_N1
    work = ClientWork(torch.zeros_like(start), centre, start, column, column, 0.1, 0.0, column, kept, population=6)
    report = rule.report(work)
    total = report.client_state.model_P.sum(0) + centre + report.message[0].sum(0)
    assert_near(total.numpy(), (start.sum(0) + centre).numpy(), 1e-13)
    assert_near(report.message[0].numpy(), 0.2 * (start - centre).numpy(), 1e-15)


@pytest.mark.parametrize("delta", [0.0, 0.9])
def test_eamsgd_with_one_step_is_its_recursion_in_numpy(delta: float) -> None:
    lr, alpha = 0.02, 0.1
    rule = EAMSGD(elasticity=alpha, momentum=delta)
    run = states(rule, PROBLEM, 5.0, lr=lr, steps=1, asked=cohorts(6, 3, seed=4))
    x, v, centre, asked = np.full((6, 4), 5.0), np.zeros((6, 4)), np.full(4, 5.0), cohorts(6, 3, seed=4)
    for _ in range(40):
        who = next(asked)
        ahead = x[who] + delta * v[who]
        v[who] = delta * v[who] - lr * np.einsum("npq,nq->np", A_NPP[who], ahead - B_NP[who])
        x[who] += v[who]
        pull = alpha * (x[who] - centre)
        x[who] -= pull
        centre = centre + pull.sum(0)
    assert_near(model_after(40, run), centre, 1e-12)


def test_eamsgd_without_momentum_is_easgd() -> None:
    runs = [states(rule, PROBLEM, 5.0, asked=cohorts(6, 2)) for rule in (EAMSGD(momentum=0.0), EASGD())]
    assert_near(model_after(30, runs[0]), model_after(30, runs[1]), 1e-13)
