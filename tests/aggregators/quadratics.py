"""Clients whose losses are quadratics, and rounds of an algorithm on them as its contract says, in float64.

.. math:: f_i(x) = ½ (x - b_i)ᵀ A_i (x - b_i)

Shapes: N, clients; K, clients of a round; P, parameters.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fed.aggregators.base import Aggregator, ClientWork, Reduced

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Quadratics:
    """The losses of N clients, and how many samples they say that they hold."""

    curvature_NPP: Tensor
    minimum_NP: Tensor
    samples_N1: Tensor

    @classmethod
    def random(cls, clients: int, parameters: int, seed: int) -> "Quadratics":
        """Curvatures from 0.5 to 4 along axes that differ from client to client; 1 to 9 samples."""
        generator = np.random.default_rng(seed)
        axes, _ = np.linalg.qr(generator.standard_normal((clients, parameters, parameters)))
        curvature = axes * generator.uniform(0.5, 4, (clients, 1, parameters)) @ axes.swapaxes(1, 2)
        minimum, samples = generator.standard_normal((clients, parameters)), generator.integers(1, 10, (clients, 1))
        return cls(torch.from_numpy(curvature), torch.from_numpy(minimum), torch.from_numpy(samples).double())

    @classmethod
    def scalar(cls) -> "Quadratics":
        """h = (1, 10), b = (0, 1) of the reference; the optimum is 10/11."""
        curvature = torch.tensor([1.0, 10.0], dtype=torch.float64).view(2, 1, 1)
        return cls(curvature, torch.tensor([[0.0], [1.0]], dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64))

    @property
    def population(self) -> int:
        return len(self.minimum_NP)

    @property
    def shares(self) -> Floats:
        """Each client's share of the samples: [N]."""
        shares: Floats = (self.samples_N1 / self.samples_N1.sum()).numpy()[:, 0]
        return shares

    def gradient(self, x_KP: Tensor, clients: Tensor) -> Tensor:
        return torch.einsum("kpq,kq->kp", self.curvature_NPP[clients], x_KP - self.minimum_NP[clients])

    def loss(self, x_KP: Tensor, clients: Tensor) -> Tensor:
        away_KP = x_KP - self.minimum_NP[clients]
        return 0.5 * (away_KP * self.gradient(x_KP, clients)).sum(1, keepdim=True)

    def optimum(self, weights_N: Floats | None = None) -> Floats:
        """Where the weighted sum of the losses is least; all weights are alike unless given."""
        return self.balance(self.curvature_NPP.numpy(), weights_N)

    def balance(self, pulls_NPP: Floats, weights_N: Floats | None = None) -> Floats:
        """x with Σ w_i M_i (x − b_i) = 0."""
        weights = np.ones(self.population) if weights_N is None else weights_N
        total = np.einsum("n,npq->pq", weights, pulls_NPP)
        point: Floats = np.linalg.solve(total, np.einsum("n,npq,nq->p", weights, pulls_NPP, self.minimum_NP.numpy()))
        return point

    def contraction(self, lr: float, steps: int | Sequence[int]) -> Floats:
        """R_i = (I − η A_i)^K_i: what K_i plain steps leave of the distance to the client's own minimum."""
        each = np.broadcast_to(steps, self.population)
        once = np.eye(self.minimum_NP.shape[1]) - lr * self.curvature_NPP.numpy()
        return np.stack([np.linalg.matrix_power(own, int(number)) for own, number in zip(once, each, strict=True)])


def cohorts(population: int, size: int, seed: int = 0) -> Iterator[list[int]]:
    """A random part of the clients for each round."""
    generator = np.random.default_rng(seed)
    while True:
        yield sorted(generator.choice(population, size, replace=False).tolist())


def states(
    rule: Aggregator,
    problem: Quadratics,
    start: float | Floats = 0.0,
    *,
    lr: float | Callable[[int], float] = 0.1,
    steps: int | Sequence[int] = 5,
    momentum: float = 0.0,
    nesterov: bool = False,
    asked: Iterator[list[int]] | None = None,
) -> Iterator[Any]:
    """The coordinator's state before the first round and after each.

    Args:
        rule: the algorithm.
        problem: its clients.
        start: the first model, or the value of all of it.
        lr: of local steps, or of the local steps of a round, from 1.
        steps: local steps, or each client's.
        momentum: of local steps.
        nesterov: whether that looks ahead.
        asked: the clients of each round; all unless given.
    """
    model_P = torch.from_numpy(np.broadcast_to(start, problem.minimum_NP[0].shape).astype(np.float64))
    state, kept = rule.init(model_P), [rule.init_client(model_P)] * problem.population
    for number in count(1):
        yield state
        clients = torch.tensor(next(asked) if asked else range(problem.population))
        step_size = lr(number) if callable(lr) else lr
        own = rule.steps(state)
        steps_N = torch.tensor(np.broadcast_to(steps if own is None else own, problem.population).copy()).double()
        of_clients = [kept[client] for client in clients]
        work = _work(rule, problem, state, clients, _rows(of_clients), steps_N[clients], step_size, momentum, nesterov)
        report = rule.report(work)
        for row, client in enumerate(clients.tolist() if report.client_state else ()):
            kept[client] = type(report.client_state)(*(part[row] for part in report.client_state))
        share_K = report.weight_K1[:, 0] / report.weight_K1.sum()
        mean = tuple(share_K @ part for part in report.message)
        state = rule.apply(state, Reduced(mean, len(clients), problem.population))


def after(rounds: int, of: Iterator[Any]) -> Any:
    """The state after so many rounds."""
    for _ in range(rounds):
        next(of)
    return next(of)


def model_after(rounds: int, of: Iterator[Any]) -> Floats:
    """The model after so many rounds."""
    model: Floats = after(rounds, of).model_P.numpy()
    return model


def fixed_point(rule: Aggregator, problem: Quadratics, **run: Any) -> Floats:
    """Where an algorithm rests whose round is an affine map of its model, x → M x + c, found from M and c."""
    origin, *axes = np.vstack([np.zeros(len(problem.minimum_NP[0])), np.eye(len(problem.minimum_NP[0]))])
    moved = model_after(1, states(rule, problem, origin, **run))
    matrix = np.stack([model_after(1, states(rule, problem, axis, **run)) - moved for axis in axes], axis=1)
    return np.linalg.solve(np.eye(len(moved)) - matrix, moved).astype(np.float64)


def _rows(of_clients: list[Any]) -> Any:
    """Clients' states as one with a row for each."""
    first = of_clients[0]
    return first and type(first)(*(torch.stack(parts) for parts in zip(*of_clients, strict=True)))


def _work(
    rule: Aggregator,
    problem: Quadratics,
    state: Any,
    clients: Tensor,
    client_state: Any,
    steps_K: Tensor,
    lr: float,
    momentum: float,
    nesterov: bool,
) -> ClientWork:
    """Local steps by gradient descent, corrected where the algorithm says so."""
    anchor_P, broadcast = rule.model_to_send(state), rule.broadcast(state)
    anchor_KP = anchor_P.expand(len(clients), -1)
    began_KP = rule.local_start(anchor_P, client_state).expand_as(anchor_KP)
    x_KP, velocity_KP = began_KP.clone(), torch.zeros_like(began_KP)
    for step in range(int(steps_K.max())):
        gradient_KP = problem.gradient(x_KP, clients)
        if rule.corrects:
            gradient_KP = rule.correct(gradient_KP, x_KP, anchor_KP, client_state, broadcast)
        velocity_KP = momentum * velocity_KP + gradient_KP
        descent_KP = gradient_KP + momentum * velocity_KP if nesterov else velocity_KP
        x_KP = torch.where((steps_K > step).unsqueeze(1), x_KP - lr * descent_KP, x_KP)
    return ClientWork(
        update_KP=x_KP - began_KP,
        anchor_P=anchor_P,
        began_KP=began_KP,
        samples_K1=problem.samples_N1[clients],
        steps_K1=steps_K.unsqueeze(1),
        lr=lr,
        momentum=momentum,
        train_loss_K1=problem.loss(x_KP, clients),
        client_state=client_state,
        broadcast=broadcast,
        population=problem.population,
        start_loss_K1=problem.loss(anchor_KP, clients) if "loss" in rule.asks else None,
        start_gradient_KP=problem.gradient(anchor_KP, clients) if "gradient" in rule.asks else None,
        places_K=clients if rule.needs_fixed_members else None,
        nesterov=nesterov,
    )
