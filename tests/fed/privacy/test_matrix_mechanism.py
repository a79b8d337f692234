"""Matrix mechanisms, beside dense matrices, all patterns of participation, and jax-privacy.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Iterator
from itertools import combinations
from typing import Literal

import numpy as np
import pytest
from scipy.linalg import toeplitz

from fed.privacy.banded import Banded, banded_root, optimal_banded
from fed.privacy.blt import BufferedToeplitz, optimal_blt
from fed.privacy.matrix_mechanism import MatrixMechanism
from fed.privacy.participation import ParticipationRule
from fed.privacy.toeplitz import prefix_root
from fed.vectors.tensors import Tensor, torch

RULES = [
    ParticipationRule(rounds=9, min_separation=4),
    ParticipationRule(rounds=9, min_separation=3, max_participations=2),
    ParticipationRule(rounds=8, min_separation=2),
    ParticipationRule(rounds=8, min_separation=1, max_participations=3),
    ParticipationRule(rounds=7, min_separation=9),
]
MECHANISMS = [
    pytest.param(Banded(coefficients=(1.0,)), id="independent"),
    pytest.param(banded_root(6), id="root"),
    pytest.param(optimal_banded(3, RULES[0]), id="banded"),
    pytest.param(optimal_banded(5, RULES[2]), id="bands that overlap"),
    pytest.param(optimal_blt(1, RULES[0]), id="one buffer"),
    pytest.param(optimal_blt(3, RULES[1]), id="three buffers"),
]
every_mechanism = pytest.mark.parametrize("mechanism", MECHANISMS)
every_rule = pytest.mark.parametrize("rule", RULES)


def dense(column_T: np.ndarray) -> np.ndarray:
    return np.asarray(toeplitz(column_T, np.zeros(len(column_T))))


def patterns(rule: ParticipationRule) -> Iterator[list[int]]:
    """All sets of rounds, from 0, in which a client may take part."""
    for times in range(1, rule.rounds + 1):
        if rule.max_participations is not None and times > rule.max_participations:
            return
        for rounds in combinations(range(rule.rounds), times):
            if np.diff(rounds).min(initial=rule.min_separation) >= rule.min_separation:
                yield list(rounds)


def streamed(mechanism: MatrixMechanism, noise_TM: Tensor) -> Tensor:
    kept_DM = torch.zeros(mechanism.rows, noise_TM.shape[1], dtype=torch.float64)
    return torch.stack([mechanism.step(kept_DM, noise_M, number) for number, noise_M in enumerate(noise_TM, 1)])


@every_mechanism
def test_one_factor_is_the_inverse_of_the_other(mechanism: MatrixMechanism) -> None:
    product = dense(mechanism.column(50)) @ dense(mechanism.inverse_column(50))
    assert np.abs(product - np.eye(50)).max() < 1e-12


@every_mechanism
def test_a_stream_of_noise_is_the_matrix_product(mechanism: MatrixMechanism) -> None:
    noise_TM = torch.randn(50, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    product_TM = np.linalg.solve(dense(mechanism.column(50)), noise_TM.numpy())
    assert np.abs(streamed(mechanism, noise_TM).numpy() - product_TM).max() < 1e-12


@every_rule
@every_mechanism
def test_sensitivities_are_those_of_the_worst_pattern(mechanism: MatrixMechanism, rule: ParticipationRule) -> None:
    matrix_TT = dense(mechanism.column(rule.rounds))
    products = np.array([matrix_TT[:, rounds].sum(axis=1) for rounds in patterns(rule)])
    worst_T = np.sqrt((products**2).cumsum(axis=1)).max(axis=0)
    assert mechanism.sensitivities(rule) == pytest.approx(worst_T, rel=1e-12)


@every_rule
@every_mechanism
def test_no_client_moves_more_than_the_sensitivity(mechanism: MatrixMechanism, rule: ParticipationRule) -> None:
    generator = np.random.default_rng(0)
    matrix_TT = dense(mechanism.column(rule.rounds))
    for rounds in patterns(rule):
        messages_TM = np.zeros((rule.rounds, 2))
        messages_TM[rounds] = generator.standard_normal((len(rounds), 2))
        messages_TM /= np.maximum(np.linalg.norm(messages_TM, axis=1, keepdims=True), 1e-300)
        moved_T = np.sqrt(((matrix_TT @ messages_TM) ** 2).sum(axis=1).cumsum())
        assert (moved_T <= mechanism.sensitivities(rule) * (1 + 1e-12)).all()


@every_rule
@every_mechanism
def test_releases_of_all_rounds_cost_the_sensitivity(mechanism: MatrixMechanism, rule: ParticipationRule) -> None:
    releases = [mechanism.release(2.0, rule, number) for number in range(1, rule.rounds + 1)]
    cost_T = np.cumsum([release.noise_multiplier**-2 if release else 0.0 for release in releases])
    assert cost_T == pytest.approx(mechanism.sensitivities(rule) ** 2 / 4, rel=1e-12)


@every_rule
@every_mechanism
def test_a_repeated_row_costs_what_any_pattern_moves(mechanism: MatrixMechanism, rule: ParticipationRule) -> None:
    matrix_TT = dense(mechanism.column(rule.rounds))
    worst_T = np.array([matrix_TT[:, rounds].sum(axis=1) for rounds in patterns(rule)]).max(axis=0)
    releases = [mechanism.release(2.0, rule, number, is_repeated=True) for number in range(1, rule.rounds + 1)]
    assert [2.0 / release.noise_multiplier for release in releases if release] == pytest.approx(worst_T, rel=1e-12)


def test_rounds_without_a_trace_of_the_worst_pattern_are_free() -> None:
    rule = ParticipationRule(rounds=6, min_separation=3)
    is_free = [Banded(coefficients=(1.0, 0.5)).release(1.0, rule, number) is None for number in range(1, 7)]
    assert is_free == [False, False, True] * 2


@every_mechanism
def test_errors_are_the_norms_of_rows(mechanism: MatrixMechanism) -> None:
    rows_TT = np.tri(20) @ np.linalg.inv(dense(mechanism.column(20)))
    assert mechanism.errors(20) == pytest.approx(np.linalg.norm(rows_TT, axis=1), rel=1e-12)


@every_mechanism
def test_running_sums_of_streamed_noise_have_these_errors(mechanism: MatrixMechanism) -> None:
    numbers = 20_000
    noise_TM = torch.randn(12, numbers, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sums_TM = streamed(mechanism, noise_TM).cumsum(dim=0)
    # A mean of n squares of Gaussians has a relative standard deviation of (2/n)^½; 12 × 6 such are within 5 of them
    # but for 4 seeds in 100,000.
    ratio_T = sums_TM.square().mean(dim=1).numpy() / mechanism.errors(12) ** 2
    assert np.abs(ratio_T - 1).max() < 5 * (2 / numbers) ** 0.5


def loss(mechanism: MatrixMechanism, rule: ParticipationRule, error: str) -> float:
    squared_T = mechanism.errors(rule.rounds) ** 2
    return float((squared_T.mean() if error == "mean" else squared_T.max()) * mechanism.sensitivities(rule)[-1] ** 2)


# Computed by jax-privacy 2.0.0 in float64: toeplitz.optimize_banded_toeplitz over its first coefficient, and
# toeplitz_coefs of buffered_toeplitz.optimize_loss.
def test_banded_coefficients_are_those_of_jax_privacy() -> None:
    rule = ParticipationRule(rounds=40, max_participations=1)
    mean = optimal_banded(5, rule).coefficients
    assert mean == pytest.approx(
        (1.0, 0.60505983414377, 0.48981953319638816, 0.4187440185533378, 0.35971311886843566), abs=1e-6
    )
    largest = optimal_banded(5, rule, "max").coefficients
    assert largest == pytest.approx(
        (1.0, 0.6601455839146593, 0.557186255850638, 0.4885513694003673, 0.4247823142053677), abs=1e-6
    )


@pytest.mark.parametrize(
    ("buffers", "rule", "error", "column"),
    [
        (1, ParticipationRule(rounds=60, min_separation=10), "mean", (1.0, 0.5894596852830265, 0.47940230810824336)),
        (2, ParticipationRule(rounds=100, max_participations=1), "max", (1.0, 0.4695687723898113, 0.3944943396781804)),
        (2, ParticipationRule(rounds=1000, min_separation=100), "max", (1.0, 0.5038566147728956, 0.3979272470575662)),
    ],
)
def test_blt_coefficients_are_those_of_jax_privacy(
    buffers: int, rule: ParticipationRule, error: Literal["mean", "max"], column: tuple[float, ...]
) -> None:
    assert optimal_blt(buffers, rule, error).column(3).tolist() == pytest.approx(column, abs=1e-6)


def test_all_bands_are_the_root_of_prefix_sums() -> None:
    rule = ParticipationRule(rounds=32, max_participations=1)
    # The loss is flat to a rounding within the root of it of the optimum.
    assert optimal_banded(32, rule, "max").coefficients == pytest.approx(prefix_root(32).tolist(), abs=1e-6)
    assert np.convolve(prefix_root(32), prefix_root(32))[:32] == pytest.approx(np.ones(32), rel=1e-12)


@pytest.mark.parametrize("rule", [ParticipationRule(rounds=60, min_separation=b) for b in (3, 8, 20)])
def test_optimal_mechanisms_beat_those_that_are_simpler(rule: ParticipationRule) -> None:
    independent = loss(Banded(coefficients=(1.0,)), rule, "mean")
    root = loss(banded_root(8), rule, "mean")
    banded = loss(optimal_banded(8, rule), rule, "mean")
    buffered = loss(optimal_blt(2, rule, "mean"), rule, "mean")
    assert banded < root < independent
    assert buffered < independent
    # No falling column is better than the best one of as many bands as rounds.
    assert loss(optimal_banded(60, rule), rule, "mean") < min(banded, buffered) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Banded(coefficients=(1.0, 0.5, 0.6)), "coefficients must begin with 1, fall"),
        (lambda: Banded(coefficients=(1.0, -0.1)), "coefficients must begin with 1, fall"),
        (lambda: Banded(coefficients=(2.0, 0.5)), "coefficients must begin with 1, fall"),
        (lambda: BufferedToeplitz(decays=(0.5,), inverse_decays=(0.6,)), "must alternate and fall"),
        (lambda: BufferedToeplitz(decays=(0.9, 0.5), inverse_decays=(0.4, 0.3)), "must alternate and fall"),
        (lambda: optimal_banded(10, RULES[0]), "bands must be between 1 and the 9 rounds, got 10"),
        (lambda: optimal_blt(0, RULES[0]), "buffers must be at least 1, got 0"),
        (lambda: ParticipationRule(rounds=3, max_participations=0), "must be at least 1"),
        (lambda: ParticipationRule(rounds=3, min_separation=0), "must be at least 1"),
    ],
)
def test_what_has_no_closed_form_is_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.long
@pytest.mark.parametrize("error", ["mean", "max"])
@pytest.mark.parametrize(("rounds", "bands"), [(100, 8), (300, 20)])
def test_banded_mechanisms_equal_those_of_jax_privacy(rounds: int, bands: int, error: Literal["mean", "max"]) -> None:
    jax = pytest.importorskip("jax", reason="jax-privacy is of the extra all-tests")
    theirs = pytest.importorskip("jax_privacy.matrix_factorization.toeplitz", reason="it is of the extra all-tests")
    rule = ParticipationRule(rounds=rounds, min_separation=bands)
    with jax.enable_x64():
        found = np.array(theirs.optimize_banded_toeplitz(rounds, bands, reduction_fn=getattr(jax.numpy, error)))
        ours = optimal_banded(bands, ParticipationRule(rounds=rounds, max_participations=1), error)
        assert ours.coefficients == pytest.approx(found / found[0], abs=1e-6)
        inverse_T = np.array(theirs.inverse_coef(ours.column(rounds)))
        squared_sensitivity = theirs.minsep_sensitivity_squared(ours.column(rounds), bands, n=rounds)
        squared_errors_T = np.array(theirs.per_query_error(noising_coef=inverse_T))
    assert np.abs(ours.inverse_column(rounds) - inverse_T).max() < 1e-12
    assert ours.sensitivities(rule)[-1] ** 2 == pytest.approx(float(squared_sensitivity), rel=1e-12)
    assert ours.errors(rounds) ** 2 == pytest.approx(squared_errors_T, rel=1e-12)


@pytest.mark.long
@pytest.mark.parametrize(
    ("buffers", "rule", "error"),
    [
        (3, ParticipationRule(rounds=300, max_participations=1), "max"),
        (2, ParticipationRule(rounds=400, min_separation=100, max_participations=4), "mean"),
    ],
)
def test_blt_mechanisms_equal_those_of_jax_privacy(
    buffers: int, rule: ParticipationRule, error: Literal["mean", "max"]
) -> None:
    jax = pytest.importorskip("jax", reason="jax-privacy is of the extra all-tests")
    theirs = pytest.importorskip(
        "jax_privacy.matrix_factorization.buffered_toeplitz", reason="it is of the extra all-tests"
    )
    rounds = rule.rounds
    ours = optimal_blt(buffers, rule, error)
    with jax.enable_x64():
        their_loss = theirs.LossFn.build_min_sep(
            n=rounds, error=error, min_sep=rule.min_separation, max_participations=rule.max_participations
        )
        found, least = theirs.optimize_loss(their_loss, num_buffers=buffers)
        same = theirs.BufferedToeplitz.build(buf_decay=ours.decays, output_scale=ours.scales)
        assert loss(ours, rule, error) == pytest.approx(float(their_loss.loss(same)), rel=1e-9)
        assert loss(ours, rule, error) <= float(least) * (1 + 1e-9)
        assert ours.column(rounds) == pytest.approx(np.array(found.toeplitz_coefs(rounds)), abs=1e-6)
        assert ours.inverse_column(rounds) == pytest.approx(np.array(same.inverse().toeplitz_coefs(rounds)), abs=1e-9)


@every_mechanism
@every_rule
def test_participations_one_by_one_add_up(mechanism: MatrixMechanism, rule: ParticipationRule) -> None:
    columns_TT = dense(mechanism.column(rule.rounds))
    for pattern in patterns(rule):
        rounds = [place + 1 for place in pattern]
        added = [mechanism.added_by(number, rounds[:count], rule.rounds) for count, number in enumerate(rounds)]
        assert sum(added) == pytest.approx(np.sum(columns_TT[:, pattern].sum(1) ** 2))
    last = mechanism.added_by(rule.rounds, [], rule.rounds)
    assert mechanism.added_by(rule.rounds + 7, [], rule.rounds) == last == pytest.approx(1.0)
