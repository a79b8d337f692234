"""Audit of a run whose clients' samples are private: one client more, all of whose samples are canaries.

A coin decides for each canary whether it counts: one that is out has a gradient of zero in every batch. All else is the
run's own: batches, clip, noise, the account. Whoever reads the noised gradient of each step, which is what DP-SGD
releases, guesses the coins (Steinke, Nasr & Jagielski 2023, 2305.08846).

Names that end in _m have a number for each of m canaries. Shapes: see :mod:`fed.vectors.layout`.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from fed.clients.data import ClientId, FederatedData, Held
from fed.clients.data.held import samples_at, size_of
from fed.clients.training.clipped_gradients import GradientWay
from fed.clients.training.flat import StackedStates
from fed.clients.training.group_reading import GroupReading
from fed.clients.training.local_context import LocalContext
from fed.clients.training.private_trainer import ClientDraws, PrivateTrainer
from fed.config.experiment import Experiment
from fed.errors import InvalidExperiment
from fed.privacy.dp_sgd import sampling_rate
from fed.privacy.local import LocalPrivacy
from fed.server.rounds.coordinated import Coordinated
from fed.simulations.audited_run import AuditedRun, names_beside, rounds_within_budget, with_canaries
from fed.simulations.choice import hired
from fed.simulations.simulation import Simulation
from fed.vectors import trees
from fed.vectors.randomness import Streams
from fed.vectors.tensors import Tensor, torch

__all__ = ["log_odds", "run_with_canary_samples"]

_Bits = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

_NOTHING = LocalContext()
_PARAMETERS_A_CANARY = 2  # noise is measured where no canary shows
_MOST_NUMBERS = 1 << 28  # of all canaries' gradients: a gigabyte
_AT_ONCE = 256  # canaries whose gradients are computed together
_LEAST_NOISE = 1e-4  # over the clip: sums of float32 are no more exact
_FLAT = 1e-6  # of the largest square of a gradient: directions in which there is less are none


def run_with_canary_samples(
    experiment: Experiment, privacy: LocalPrivacy, data: FederatedData, model: Any, canaries: int
) -> AuditedRun:
    """Run an experiment with one client more, whose samples are canaries, in as many rounds as one client can be in.

    Beside it train as many of the experiment's clients as a cohort has.

    Args:
        experiment: experiment with privacy of unit sample.
        privacy: settings of its privacy.
        data: training data by client.
        model: factory of modules, or a module to copy; None: the experiment's.
        canaries: m, number of canaries.

    Raises:
        InvalidExperiment: if the model has too few parameters, or too many for so many canaries.
    """
    policy = experiment.rounds.make()
    given: dict[str, Any] = {
        "adversaries": None,
        "rounds.count": privacy.participations(policy, len(data.clients)),
        "rounds.cohort": "all",
        "privacy.max_participations": None,
        "simulation.workers": 0,  # in this process, where the steps can be heard
        "simulation.executor": None,
        "simulation.batching": "off",
    }
    changed = experiment.override(given)
    streams = Streams(experiment.seed)
    samples = _crafted(data, canaries, streams.generator("canaries", "samples"))
    others = data.clients[: policy.cohort_of(len(data.clients)) - 1]
    (client,) = names_beside(data.clients, 1, "canaries")
    simulation = Simulation(changed, with_canaries(data, others, [client], samples), model)
    _check_size(simulation.layout.parameters, canaries)
    of_samples = simulation.recipe.sample_privacy
    assert of_samples is not None
    heard = _Canaries(
        client=client,
        included_m=streams.generator("canaries", "coins").integers(0, 2, canaries).astype(bool),
        clip=of_samples.clip,
        rate=sampling_rate(canaries, changed.local.batch_size * changed.local.accumulate),
        scores_m=np.zeros(canaries),
    )
    simulation.recipe = replace(simulation.recipe, make_private=partial(_AuditedTrainer, canaries=heard))
    with contextlib.ExitStack() as stack:
        executor = stack.enter_context(hired(simulation))
        federation = simulation.federation(executor)
        assert isinstance(federation, Coordinated)
        rounds = len([*rounds_within_budget(federation, changed.rounds.make().count)])
        account = federation.coordinator.account
        assert account is not None
        claimed = account.summary()["epsilon_by_client"].get(str(client), 0.0)
    return AuditedRun(scores_m=heard.scores_m, included_m=heard.included_m, rounds=rounds, claimed_epsilon=claimed)


def _check_size(parameters: int, canaries: int) -> None:
    """Refuse a model that cannot tell so many canaries apart, or whose gradients of all of them are too large."""
    if parameters < _PARAMETERS_A_CANARY * canaries:
        raise InvalidExperiment(
            f"an audit of samples needs a model of at least {_PARAMETERS_A_CANARY} parameters a canary, got "
            f"{parameters} parameters and {canaries} canaries: give fewer canaries"
        )
    if parameters * canaries > _MOST_NUMBERS:
        raise InvalidExperiment(
            f"an audit of samples holds a gradient of each canary, of at most {_MOST_NUMBERS} numbers together, got "
            f"{parameters} parameters and {canaries} canaries: give fewer canaries"
        )


def _crafted(data: FederatedData, count: int, generator: np.random.Generator) -> Held:
    """Samples that have little in common: a client's own, with their numbers in another order, drawn signs and labels.

    Args:
        data: data of all clients.
        count: number of samples.
        generator: stream that draws them.
    """
    own = data.read(data.clients[0])
    places = generator.integers(0, size_of(own), count).tolist()
    drawn = samples_at(own, places)
    inputs = [trees.mapped(partial(_shuffled, generator=generator), sample[0]) for sample in drawn]
    classes = data.number_of_classes()

    def target(leaf: Tensor) -> Tensor:
        if leaf.ndim == 0 and not leaf.is_floating_point() and classes:
            return torch.tensor(int(generator.integers(0, classes)), dtype=leaf.dtype)
        return _shuffled(leaf, generator=generator)

    targets = [trees.mapped(target, sample[1]) for sample in drawn]
    return trees.stacked(inputs), trees.stacked(targets)


def _shuffled(leaf: Tensor, generator: np.random.Generator) -> Tensor:
    """The numbers of a tensor in another order, with drawn signs where they are no integers."""
    flat = leaf.flatten()[torch.from_numpy(generator.permutation(leaf.numel()))]
    if leaf.is_floating_point():
        signs = 2 * generator.integers(0, 2, leaf.numel()) - 1
        flat = flat * torch.from_numpy(signs).to(leaf.dtype)
    return flat.view(leaf.shape)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Canaries:
    """Canaries of a run, and what has been heard of them.

    Args:
        client: client whose samples they are.
        included_m: True for canaries whose coin put them in.
        clip: C.
        rate: q, with which each of them is in a step's batch.
        scores_m: log-odds of each canary so far, to which each step adds.
    """

    client: ClientId
    included_m: _Bits
    clip: float
    rate: float
    scores_m: np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(eq=False)
class _AuditedTrainer(PrivateTrainer):
    """Private trainer that leaves out the canaries that are out, and listens to what each step releases.

    Args:
        canaries: canaries of the run.
    """

    canaries: _Canaries = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._is_theirs = False
        self._gradients_mP = torch.empty(0)

    def train(
        self,
        start_V: Tensor,
        integers_I: Tensor,
        samples: Sequence[Held],
        draws: Sequence[ClientDraws],
        context: LocalContext = _NOTHING,
        dtype: "torch.dtype | None" = None,
    ) -> tuple[Tensor, Tensor]:
        """Train clients, each alone."""
        self._is_theirs = context.client == self.canaries.client
        return super().train(start_V, integers_I, samples, draws, context, dtype)

    def _sums(
        self,
        stack: StackedStates,
        group: GroupReading,
        way: GradientWay,
        begins: Sequence[int],
        batches: Sequence[np.ndarray[tuple[int, ...], np.dtype[np.int64]]],
    ) -> Tensor:
        """Sums of the clipped gradients of the canaries that are in."""
        if not self._is_theirs:
            return super()._sums(stack, group, way, begins, batches)
        self._gradients_mP = self._of_each(stack, group, way)
        counting = [places[self.canaries.included_m[places]] for places in batches]
        return super()._sums(stack, group, way, begins, counting)

    def _of_each(self, stack: StackedStates, group: GroupReading, way: GradientWay) -> Tensor:
        """Gradient of each canary at the step's model, as long as the clip lets it be."""
        count = len(self.canaries.included_m)
        rows = []
        for first in range(0, count, _AT_ONCE):
            places = np.arange(first, min(first + _AT_ONCE, count))
            gradients = self._gradients.of_samples(way, stack.tensors(1), self._batch(group, places[None]))
            parts = [
                gradients[place].each()[0].flatten(1) if place in gradients else torch.zeros(len(places), part.size)
                for place, part in enumerate(self.layout.trained)
            ]
            rows.append(torch.cat([part.cpu() for part in parts], 1))
        found_mP = torch.cat(rows).nan_to_num(0.0, 0.0, 0.0)
        norms_m1 = found_mP.norm(dim=1, keepdim=True)
        clipped_mP: Tensor = found_mP * (self.canaries.clip / norms_m1.clamp(min=self.canaries.clip))
        return clipped_mP

    def _note_release(self, gradient_KQ: Tensor, gaps_Q: Tensor) -> None:
        """Score the canaries by a step's noised gradient."""
        if not self._is_theirs:
            return
        canaries = self.canaries
        expected = canaries.rate * len(canaries.included_m)
        sum_P = gradient_KQ[0][gaps_Q > 0].cpu() * expected
        canaries.scores_m[:] += log_odds(self._gradients_mP, sum_P, canaries.rate, canaries.clip).numpy()


def log_odds(gradients_mP: Tensor, sum_P: Tensor, rate: float, clip: float) -> Tensor:
    r"""Log-odds of each canary to be in the run, by the noised sum of one step.

    The sum is y = Σ b_i g_i + n, with b_i = 1 where canary i is in the batch. Others are taken for Gaussian noise
    beside n, of which nothing is believed: its deviation is measured where no canary shows. Then the best estimate of
    b_i is linear (that of a receiver of many users' signals):

    .. math::
        R = σ² I + v \sum_j g_j g_j^T, \quad γ_i = g_i^T R_{-i}^{-1} g_i, \quad
        r_i = g_i^T R_{-i}^{-1} \Big(y - \tfrac q 2 \sum_{j ≠ i} g_j\Big), \quad
        \log \big(1 - q + q e^{r_i - γ_i / 2}\big)

    v = q/2 (1 − q/2) is the variance of b_j, and R₋ᵢ is R without canary i. All of it follows from matrices [m, m].

    Args:
        gradients_mP: g, clipped gradient of each canary.
        sum_P: y.
        rate: q, with which a canary that is in is in the batch.
        clip: C, beside which noise that is far smaller is rounding.
    """
    parameters = gradients_mP.shape[1]
    kernel_mm = (gradients_mP @ gradients_mP.T).double()
    count = len(kernel_mm)
    seen_m = (gradients_mP @ sum_P.to(gradients_mP.dtype)).double()
    identity_mm = torch.eye(count, dtype=torch.float64)
    shown = float(seen_m @ torch.linalg.solve(kernel_mm + _FLAT * clip**2 * identity_mm, seen_m))
    beside = max(float(sum_P.double() @ sum_P.double()) - shown, 0.0) / (parameters - count)
    noise = max(beside, (_LEAST_NOISE * clip) ** 2)
    mean = rate / 2
    variance = mean * (1 - mean)
    inverse_mm = torch.cholesky_inverse(torch.linalg.cholesky(noise * identity_mm + variance * kernel_mm))
    left_m = noise * inverse_mm.diagonal()  # 1 / (1 + v γ)
    seen_alone_m = (1 - left_m) / variance  # gᵀ R⁻¹ g
    matched_m = inverse_mm @ (seen_m - mean * kernel_mm.sum(1)) + mean * seen_alone_m
    gain_m = seen_alone_m / left_m
    exponent_m = matched_m / left_m - gain_m / 2
    if rate >= 1:
        return exponent_m
    return torch.logaddexp(torch.full_like(exponent_m, np.log1p(-rate)), exponent_m + np.log(rate))
