"""Robust rules against other people's versions, what attackers far away can do, and what weights mean.

Shapes: S, messages; M, numbers of a message; H, honest ones.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import fed
from fed.aggregators.base import ClientWork, Reduced
from fed.aggregators.robust.algorithms import (
    FedBulyan,
    FedCenteredClipping,
    FedGeometricMedian,
    FedKrum,
    FedMedian,
    FedMultiKrum,
    FedNormBound,
    FedTrimmedMean,
    Robust,
)
from fed.aggregators.robust.centres import CenteredClipping, Centre, Median, NormBound, TrimmedMean, ascending
from fed.aggregators.robust.distances import (
    Bucketing,
    Bulyan,
    GeometricMedian,
    Krum,
    MultiKrum,
    NearestNeighbourMixing,
    squared_distances,
)
from fed.aggregators.transforms import Messages, Momentum, Reducer, Weigh, chain
from fed.errors import InvalidExperiment, ValueRange
from fed.simulations.simulation import Simulation

pytestmark = pytest.mark.usefixtures("device")

Matrix = NDArray[np.float64]

SHAPES = [(7, 1, 1), (9, 5, 2), (12, 40, 3)]
"""Messages, numbers of each, attackers."""

AT_ONCE = pytest.mark.parametrize(("count", "size", "attackers"), SHAPES)


def _byzfl() -> ModuleType:
    """byzfl's aggregators; its ``__init__`` asks for torchvision, which has to fit the build of torch."""
    spec = importlib.util.find_spec("byzfl")
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError("these tests compare with the package byzfl: pip install -e '.[dev]' brings it")
    package = ModuleType("byzfl")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["byzfl"] = package
    return importlib.import_module("byzfl.aggregators")


byzfl = _byzfl()


def drawn(count: int, size: int, seed: int = 0) -> Matrix:
    return np.random.default_rng(seed).normal(size=(count, size))


def reduced(piece: Reducer, messages_SM: Matrix, weights_S: Any = None, state: Any = None, seed: int = 0) -> Any:
    """What a piece leaves, as (state, messages, weights)."""
    weights = torch.from_numpy(
        np.ones(len(messages_SM)) if weights_S is None else np.array(weights_S, dtype=np.float64)
    )
    state = piece.init(torch.zeros(messages_SM.shape[1], dtype=torch.float64)) if state is None else state
    messages = Messages(torch.from_numpy(messages_SM), weights)
    state, messages = piece.reduce(state, messages, np.random.default_rng(seed))
    return state, *messages


def result(rule: Robust, messages_SM: Matrix, weights_S: Any = None, seed: int = 0) -> Matrix:
    """What takes the place of the mean in a first round."""
    weights = torch.from_numpy(
        np.ones(len(messages_SM)) if weights_S is None else np.array(weights_S, dtype=np.float64)
    )
    state = rule.init(torch.zeros(messages_SM.shape[1], dtype=torch.float64))
    _, mean_M = rule.combine(state, torch.from_numpy(messages_SM), weights, np.random.default_rng(seed))
    return np.asarray(mean_M)


def one(left: Any) -> Matrix:
    """The only message that a piece left."""
    _, messages_1M, _ = left
    assert messages_1M.shape[0] == 1
    return np.asarray(messages_1M[0])


# Other people's versions. Sums are taken in other orders, so that a few bits of 53 may differ.


def assert_same(ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(np.asarray(ours), theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("shape", [(1, 5), (5, 1), (1, 1), (7, 5)])
def test_values_are_sorted_in_a_copy(shape: tuple[int, int]) -> None:
    part_SJ = torch.randn(shape, dtype=torch.float64)
    kept_SJ = part_SJ.clone()
    sorted_SJ = ascending(part_SJ)
    assert torch.equal(sorted_SJ, part_SJ.sort(0).values)
    sorted_SJ.zero_()
    assert torch.equal(part_SJ, kept_SJ)


@AT_ONCE
def test_the_median_is_byzfls(count: int, size: int, attackers: int) -> None:
    messages_SM = drawn(count, size)
    assert_same(one(reduced(Median(), messages_SM)), byzfl.Median()(messages_SM))


@AT_ONCE
def test_the_trimmed_mean_is_byzfls(count: int, size: int, attackers: int) -> None:
    messages_SM = drawn(count, size)
    theirs = byzfl.TrMean(f=attackers)(messages_SM)
    assert_same(one(reduced(TrimmedMean(attackers=attackers), messages_SM)), theirs)


@AT_ONCE
def test_krum_is_byzfls(count: int, size: int, attackers: int) -> None:
    # byzfl sums over n − f − 1 neighbours, the paper over n − f − 2: what byzfl does with one attacker more.
    messages_SM = drawn(count, size)
    theirs = byzfl.Krum(f=attackers + 1)(messages_SM)
    assert np.array_equal(one(reduced(Krum(attackers=attackers), messages_SM)), theirs)


@AT_ONCE
def test_multi_krum_is_byzfls_less_its_last_choice(count: int, size: int, attackers: int) -> None:
    # With the same scores byzfl averages n − f − 1 messages, the paper at most n − f − 2.
    messages_SM = drawn(count, size)
    theirs_M = byzfl.MultiKrum(f=attackers + 1)(messages_SM)
    _, ours_TM, _ = reduced(MultiKrum(attackers=attackers), messages_SM)
    assert len(ours_TM) == count - attackers - 2
    last_M = (len(ours_TM) + 1) * theirs_M - ours_TM.numpy().sum(0)
    rows = [row for row, message_M in enumerate(messages_SM) if np.allclose(message_M, last_M, rtol=0, atol=1e-11)]
    assert len(rows) == 1
    assert not (ours_TM.numpy() == messages_SM[rows[0]]).all(1).any()


@AT_ONCE
def test_multi_krum_of_one_is_krum(count: int, size: int, attackers: int) -> None:
    messages_SM = drawn(count, size, seed=1)
    krum, multi = (Krum(attackers=attackers), MultiKrum(attackers=attackers, selected=1))
    assert np.array_equal(one(reduced(krum, messages_SM)), one(reduced(multi, messages_SM)))


@AT_ONCE
def test_the_geometric_median_is_byzfls(count: int, size: int, attackers: int) -> None:
    # Theirs begins at 0 and takes all steps; both then stand where the gradient is below 1e-8 or so.
    messages_SM = drawn(count, size) + 3.0
    theirs = byzfl.GeometricMedian(nu=1e-3, T=5000)(messages_SM)
    ours = one(reduced(GeometricMedian(nu=1e-3, iterations=5000, tolerance=1e-12), messages_SM))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-8)


@AT_ONCE
@pytest.mark.parametrize("steps", [1, 3])
def test_centred_clipping_is_byzfls_round_after_round(count: int, size: int, attackers: int, steps: int) -> None:
    theirs, ours = byzfl.CenteredClipping(L=steps, tau=0.8), CenteredClipping(radius=0.8, iterations=steps)
    state = None
    for number in range(4):
        messages_SM = drawn(count, size, seed=number) + number
        state, message_1M, _ = reduced(ours, messages_SM, state=state)
        assert_same(message_1M[0], theirs(messages_SM))


@AT_ONCE
def test_the_norm_bound_is_byzfls_clipping(count: int, size: int, attackers: int) -> None:
    messages_SM = drawn(count, size)
    bound = float(np.median(np.linalg.norm(messages_SM, axis=1)))
    _, ours_SM, weights_S = reduced(NormBound(norm=bound), messages_SM, range(1, count + 1))
    assert_same(ours_SM, byzfl.Clipping(c=bound)(messages_SM.copy()))
    assert weights_S.tolist() == list(range(1, count + 1))


@AT_ONCE
def test_nearest_neighbour_mixing_is_byzfls(count: int, size: int, attackers: int) -> None:
    messages_SM = drawn(count, size)
    _, ours_SM, _ = reduced(NearestNeighbourMixing(attackers=attackers), messages_SM)
    assert_same(ours_SM, byzfl.NNM(f=attackers)(messages_SM))


@AT_ONCE
@pytest.mark.parametrize("bucket", [1, 2, 5])
def test_bucketing_is_byzfls(count: int, size: int, attackers: int, bucket: int) -> None:
    messages_SM = drawn(count, size)
    np.random.seed(3)  # theirs draws from the global generator
    theirs = byzfl.Bucketing(s=bucket)(messages_SM)
    piece, stream = Bucketing(size=bucket), np.random.RandomState(3)
    messages = Messages(torch.from_numpy(messages_SM), torch.ones(count, dtype=torch.float64))
    _, (ours_BM, weights_B) = piece.reduce(None, messages, stream)  # type: ignore[arg-type]  # as a generator permutes
    assert_same(ours_BM, theirs)
    assert len(ours_BM) == piece.left(count)
    assert set(weights_B.tolist()) == {1.0}


@pytest.mark.parametrize(("count", "size", "attackers"), [*SHAPES, (8, 3, 1)])  # of eight the median lies between two
def test_bulyan_is_its_definition(count: int, size: int, attackers: int) -> None:
    count = max(count, 4 * attackers + 3)
    messages_SM = drawn(count, size)
    rest, chosen = list(messages_SM), list[Matrix]()
    while len(chosen) < count - 2 * attackers:
        neighbours = max(len(rest) - attackers - 2, 1)
        scores = []
        for i, mine in enumerate(rest):
            squares = sorted(float(((mine - other) ** 2).sum()) for j, other in enumerate(rest) if j != i)
            scores.append((sum(squares[:neighbours]), *squares[neighbours:]))
        chosen.append(rest.pop(scores.index(min(scores))))
    expected = []
    for column in np.array(chosen).T:
        median = np.median(column)
        expected.append(np.mean(sorted(column, key=lambda value: abs(value - median))[: count - 4 * attackers]))
    assert_same(one(reduced(Bulyan(attackers=attackers), messages_SM)), expected)


def test_krum_adds_up_squares_of_distances() -> None:
    differ = 0
    for seed in range(300):
        messages_SM = drawn(7, 2, seed=seed)
        apart_SS = np.sort(np.linalg.norm(messages_SM[:, np.newaxis] - messages_SM, axis=2), axis=1)[:, 1:5]
        best = int((apart_SS**2).sum(1).argmin())
        assert_same(one(reduced(Krum(attackers=1), messages_SM)), messages_SM[best])
        differ += best != int(apart_SS.sum(1).argmin())
    assert differ, "distances themselves would do as well"


def test_messages_are_mixed_behind_the_bucketing() -> None:
    rule = FedMedian(attackers=1, bucketing=2, nearest_neighbour_mixing=True)
    assert [type(piece) for piece in rule.transforms()] == [Weigh, Bucketing, NearestNeighbourMixing, Median]


# What f attackers far away can do.

IN_THE_RANGE: list[Callable[..., Robust]] = [FedMedian, FedTrimmedMean, FedKrum, FedMultiKrum, FedBulyan]
FRONTS = [{}, {"bucketing": 2}, {"nearest_neighbour_mixing": True}, {"bucketing": 2, "nearest_neighbour_mixing": True}]
fronts = pytest.mark.parametrize("front", FRONTS, ids=lambda front: "+".join(front) or "none")
N, F, FAR = 24, 2, 1e6


def attacked(how: str, size: int = 6) -> tuple[Matrix, Matrix]:
    """N messages of which F are the attackers', in random places, and the honest ones alone."""
    generator = np.random.default_rng(5)
    honest_HM = generator.normal(size=(N - F, size))
    directions = generator.choice([-1.0, 1.0], size=(F, size))
    lies = {
        "apart": FAR * directions,
        "together": np.full((F, size), FAR),
        "in one coordinate": honest_HM[0] + FAR * np.eye(size)[[0] * F],
        "beyond squares": 1e200 * directions,
    }
    messages_SM = np.vstack([honest_HM, lies[how]])
    return messages_SM[generator.permutation(N)], honest_HM


attacks = pytest.mark.parametrize("how", ["apart", "together", "in one coordinate", "beyond squares"])


@attacks
@fronts
@pytest.mark.parametrize("kind", IN_THE_RANGE)
def test_attackers_far_away_leave_the_result_within_the_honest_values(
    kind: Callable[..., Robust], front: dict[str, Any], how: str
) -> None:
    # Median, trimmed mean: no more than f values of a column lie outside the honest ones, at either end. Krum: with
    # n ≥ 2f + 3 an attacker has two honest ones at least among its n − f − 2 nearest, each 1e6 away, an honest one has
    # none but honest ones, so that no attacker's score is among the n − f best. Bulyan: a median of n − 2f ≥ 2f + 3
    # values of which f lie outside is within; and there are more honest values than are averaged, all nearer to it.
    # Buckets' means, and means of honest neighbours, are within as well, and f attackers spoil f buckets at most.
    messages_SM, honest_HM = attacked(how)
    result_M = result(kind(attackers=F, **front), messages_SM)
    rounding = 1e-12
    assert (result_M >= honest_HM.min(0) - rounding).all()
    assert (result_M <= honest_HM.max(0) + rounding).all()


@attacks
@fronts
def test_attackers_far_away_leave_the_geometric_median_near_the_honest(front: dict[str, Any], how: str) -> None:
    # v has no larger mean distance than c, the honest mean. With r the largest honest distance from c, t = ‖v − c‖ and
    # a share α of attackers: (1 − α)(t − r) − α t ≤ (1 − α) r, so t ≤ 2 (1 − α) r / (1 − 2 α).
    messages_SM, honest_HM = attacked(how)
    centre_M = honest_HM.mean(0)
    radius = np.linalg.norm(honest_HM - centre_M, axis=1).max()
    share = F / -(-N // front.get("bucketing", 1))
    moved = np.linalg.norm(result(FedGeometricMedian(attackers=F, **front), messages_SM) - centre_M)
    assert moved <= 2 * (1 - share) / (1 - 2 * share) * radius


@attacks
@pytest.mark.parametrize("kind", [FedNormBound, FedCenteredClipping])
def test_distant_attackers_move_a_bounded_rule_by_a_bounded_share(kind: Callable[..., Robust], how: str) -> None:
    # From 0 both sum p_i m_i min(1, τ / ‖m_i‖): a share α of attackers adds vectors of at most τ.
    messages_SM, honest_HM = attacked(how)
    bound = 1.5
    key = {"norm": bound} if kind is FedNormBound else {"radius": bound}
    norms_H1 = np.linalg.norm(honest_HM, axis=1, keepdims=True)
    honest_M = (honest_HM * np.minimum(1, bound / norms_H1)).sum(0) / N
    moved = np.linalg.norm(result(kind(**key), messages_SM) - honest_M)
    assert moved <= F / N * bound * (1 + 1e-12)


def test_one_attacker_more_than_half_moves_the_median() -> None:
    # So that the tests above can fail: what they hold is the rule's doing.
    messages_SM = np.vstack([drawn(3, 2), np.full((4, 2), FAR)])
    assert (result(FedMedian(), messages_SM) > FAR / 2).all()


@pytest.mark.parametrize("weight", [0.1, 0.7, 1 / 3])
def test_what_rounding_leaves_of_a_trimmed_value_is_nothing(weight: float) -> None:
    # The weight that is cut, f/n of the sum, is rarely to the bit where a value ends.
    for count in range(3, 30):
        for attackers in range(1, (count + 1) // 2):
            messages_SM = np.linspace([0.0, 0.0], [1.0, 1.0], count)
            messages_SM[:attackers] = [1e200, -1e200]
            means_M = one(reduced(TrimmedMean(attackers=attackers), messages_SM, [weight] * count))
            assert ((means_M >= 0) & (means_M <= 1)).all()


# What does not matter, and what does.

EVERY: list[Robust] = [
    FedMedian(),
    FedTrimmedMean(attackers=2),
    FedKrum(attackers=2),
    FedMultiKrum(attackers=2),
    FedBulyan(attackers=2),
    FedGeometricMedian(),
    FedCenteredClipping(radius=2.0, iterations=2),
    FedNormBound(norm=2.0),
    FedMedian(attackers=2, nearest_neighbour_mixing=True),
]


def name_of(rule: Robust) -> str:
    return type(rule).__name__


@pytest.mark.parametrize("rule", EVERY, ids=name_of)
def test_the_order_of_messages_does_not_matter(rule: Robust) -> None:
    messages_SM, weights_S = drawn(11, 7), np.ones(11)
    for order_S in (np.random.default_rng(seed).permutation(11) for seed in range(10)):
        assert_same(result(rule, messages_SM[order_S], weights_S[order_S]), result(rule, messages_SM, weights_S))


# All but those with a fixed centre: the norm bound, and clipping about what it kept.
WITHOUT_CENTRE = [rule for rule in EVERY if not isinstance(rule, FedNormBound | FedCenteredClipping)]


@pytest.mark.parametrize("rule", WITHOUT_CENTRE, ids=name_of)
def test_a_message_is_moved_as_all_are_moved(rule: Robust) -> None:
    messages_SM, away_M = drawn(11, 7), np.linspace(-2, 3, 7)
    np.testing.assert_allclose(
        result(rule, messages_SM + away_M), result(rule, messages_SM) + away_M, rtol=0, atol=1e-7
    )


@pytest.mark.parametrize("rule", EVERY, ids=name_of)
def test_messages_that_agree_are_the_result(rule: Robust) -> None:
    message_M = np.linspace(-0.5, 0.5, 7)  # shorter than what is clipped
    assert_same(result(rule, np.tile(message_M, (11, 1))), message_M)


@pytest.mark.parametrize("scale", [0.25, 8.0])
@pytest.mark.parametrize("rule", EVERY, ids=name_of)
def test_weights_scaled_by_a_constant_change_nothing(rule: Robust, scale: float) -> None:
    messages_SM = drawn(11, 7)
    assert_same(result(rule, messages_SM, np.full(11, scale)), result(rule, messages_SM))


# Five messages with 10 samples between them; of five one is cut at either end, of ten two.
REPEATS = [1, 4, 2, 1, 2]
WEIGHTED: list[tuple[Reducer, Reducer]] = [
    (Median(), Median()),
    (TrimmedMean(attackers=1), TrimmedMean(attackers=2)),
    (GeometricMedian(tolerance=1e-12), GeometricMedian(tolerance=1e-12)),
    (CenteredClipping(radius=0.5, iterations=2), CenteredClipping(radius=0.5, iterations=2)),
]


@pytest.mark.parametrize(("weighted", "repeated"), WEIGHTED, ids=lambda piece: type(piece).__name__)
def test_a_weight_is_so_many_messages(weighted: Reducer, repeated: Reducer) -> None:
    messages_SM = drawn(5, 9, seed=2)
    by_weight_M = one(reduced(weighted, messages_SM, REPEATS))
    np.testing.assert_allclose(
        by_weight_M, one(reduced(repeated, np.repeat(messages_SM, REPEATS, axis=0))), rtol=0, atol=1e-9
    )
    assert np.abs(by_weight_M - one(reduced(weighted, messages_SM))).max() > 1e-3


def test_the_norm_bound_weighs_what_it_has_shortened() -> None:
    messages_SM = drawn(5, 9, seed=2)
    rule = FedNormBound(norm=0.5)
    assert_same(result(rule, messages_SM, REPEATS), result(rule, np.repeat(messages_SM, REPEATS, axis=0)))


@pytest.mark.parametrize("weights", [np.ones(10), np.arange(1.0, 11.0)], ids=["alike", "by samples"])
def test_buckets_of_any_size_leave_a_mean_as_it_is(weights: Matrix) -> None:
    """A bound that shortens nothing; of ten messages the last bucket of four has two."""
    messages_SM = drawn(10, 9, seed=2)
    rule = FedNormBound(norm=1e9, bucketing=4)
    expected = np.average(messages_SM, axis=0, weights=weights)
    np.testing.assert_allclose(result(rule, messages_SM, weights), expected, rtol=0, atol=1e-12)


def test_buckets_and_neighbours_are_means_by_weight() -> None:
    messages_SM, weights = drawn(4, 3), [1.0, 2.0, 3.0, 6.0]
    mean_M = np.average(messages_SM, axis=0, weights=weights)
    _, bucket_1M, weight_1 = reduced(Bucketing(size=4), messages_SM, weights)
    assert_same(bucket_1M[0], mean_M)
    assert weight_1.tolist() == [3.0]
    _, mixed_SM, weights_S = reduced(NearestNeighbourMixing(attackers=0), messages_SM, weights)
    assert_same(mixed_SM, np.tile(mean_M, (4, 1)))
    assert weights_S.tolist() == weights


@pytest.mark.parametrize("piece", [Krum(), MultiKrum(), Bulyan()], ids=lambda piece: type(piece).__name__)
def test_rules_that_choose_clients_refuse_weights(piece: Reducer) -> None:
    with pytest.raises(InvalidExperiment, match=r"must get equal weights, got some from 1 to 7: put Weigh"):
        reduced(piece, drawn(7, 2), range(1, 8))


@pytest.mark.parametrize("kind", [FedKrum, FedMultiKrum, FedBulyan])
def test_algorithms_that_choose_clients_refuse_samples_for_weights(kind: Callable[..., Robust]) -> None:
    with pytest.raises(ValueRange, match=r"weights must be clients, .* got samples: use median"):
        kind(weights="samples")


def test_clients_count_alike_unless_told_otherwise() -> None:
    samples_K1 = torch.tensor([[3.0], [5.0]], dtype=torch.float64)
    vectors = torch.zeros(2, 4), torch.zeros(4), torch.zeros(2, 4)
    work = ClientWork(*vectors, samples_K1, samples_K1, lr=0.1, momentum=0.0, train_loss_K1=samples_K1)
    assert FedMedian().report(work).weight_K1.tolist() == [[1.0], [1.0]]
    assert FedMedian(weights="samples").report(work).weight_K1.tolist() == [[3.0], [5.0]]


# How many replies are enough.


@pytest.mark.parametrize(
    ("rule", "needed"),
    [
        (FedMedian(attackers=2), 5),
        (FedTrimmedMean(attackers=2), 5),
        (FedKrum(attackers=2), 7),
        (FedMultiKrum(attackers=2), 7),
        (FedBulyan(attackers=2), 11),
        (FedGeometricMedian(attackers=2), 5),
        (FedCenteredClipping(attackers=2), 5),
        (FedNormBound(attackers=2, nearest_neighbour_mixing=True), 5),
        (FedKrum(attackers=2, bucketing=3), 19),  # 19 in threes are 7 buckets, 18 are 6
        (FedMultiKrum(attackers=2, selected=5), 9),
    ],
    ids=str,
)
def test_exactly_the_bounds_number_of_replies_is_enough(rule: Robust, needed: int) -> None:
    rule.check(needed)
    result(rule, drawn(needed, 3))
    for refused in (lambda: rule.check(needed - 1), lambda: result(rule, drawn(needed - 1, 3))):
        with pytest.raises(InvalidExperiment, match=r"got (n=|5 with n=).*lower"):
            refused()


def test_too_small_a_cohort_is_refused_before_the_first_round() -> None:
    keys: dict[str, Any] = {"data": {"clients": 12}, "rounds": {"count": 1, "cohort": 6}}
    experiment = fed.Experiment(algorithm={"kind": "krum", "attackers": 2}, **keys)
    with pytest.raises(
        InvalidExperiment, match=r"krum needs n ≥ 2f \+ 3 messages in a round, got n=6 with attackers f=2"
    ):
        Simulation(experiment)


def test_mixing_without_attackers_is_refused() -> None:
    with pytest.raises(ValueRange, match="attackers must be 1 or more for nearest_neighbour_mixing, got 0"):
        FedMedian(nearest_neighbour_mixing=True)


# As parts of a chain.


def test_the_centre_stays_from_round_to_round_behind_other_transforms() -> None:
    rule = chain(Momentum(momentum=0.0), CenteredClipping(radius=1.0))
    state = rule.init(torch.zeros(1, dtype=torch.float64))
    for number in range(1, 4):
        messages_SM, weights_S = torch.full((3, 2), 10.0, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        state, mean_M = rule.combine(state, messages_SM, weights_S, np.random.default_rng(0))
        state = rule.apply(state, Reduced((mean_M[:1],), 3, 3))
        assert isinstance(state.kept[1], Centre)
        assert 0 < float(state.kept[1].centre_P) <= number  # a radius a round
    # A step of length 1 towards (10, 10) from (v, 0): what is beside the update is drawn from 0 each time.
    v, x = 0.0, 0.0
    for _ in range(3):
        v += (10 - v) / np.hypot(10 - v, 10)
        x += v
    assert_same(state.kept[1].centre_P, [v])
    assert_same(state.model_P, [x])


@pytest.mark.parametrize("rule", EVERY, ids=name_of)
def test_robust_rule_sees_single_messages_and_keeps_them_unchanged(rule: Robust) -> None:
    assert not rule.linear
    messages_SM = drawn(11, 7)
    before = messages_SM.copy()
    assert result(rule, messages_SM).dtype == np.float64
    assert np.array_equal(messages_SM, before)


def test_the_geometric_median_leaves_a_message_that_it_begins_at() -> None:
    # The coordinates' medians are the first message, whose angle in the triangle is less than 120°: at the median the
    # directions to all three sum to 0.
    messages_SM = np.array([[0.0, 0.0], [10.0, -0.1], [-0.1, 10.0]])
    point_M = one(reduced(GeometricMedian(iterations=1000), messages_SM))
    away_SM = messages_SM - point_M
    directions_SM = away_SM / np.linalg.norm(away_SM, axis=1, keepdims=True)
    np.testing.assert_allclose(directions_SM.sum(0), np.zeros(2), rtol=0, atol=1e-7)


@pytest.mark.parametrize("threads", [1, 2])
def test_no_column_is_forgotten_where_there_are_many(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    messages_SM = drawn(5, 70_001)
    assert_same(one(reduced(Median(), messages_SM)), np.median(messages_SM, axis=0))
    away_SSM = messages_SM[:, np.newaxis] - messages_SM
    assert_same(squared_distances(torch.from_numpy(messages_SM)), np.square(away_SSM).sum(2))


APART = {
    "near": 1.0,
    "a pair among far ones": np.array([1e3, 1e3, 1e3, 1e3 + 1e-5, 0, 1, 2, 3, 4.0]),
    "two groups": np.array([0, 1, 2, 3, 4, 1e7, 1e7, 1e7, 1e7]),
    "nearly alike, far away": 1e8,
    "some beyond squares": np.array([0, 1, 2, 3, 4, 5, 6, 1e200, -1e200]),
}


@pytest.mark.parametrize("where", APART.values(), ids=APART)
@pytest.mark.parametrize("size", [1, 300, 20_001])
def test_squared_distances_keep_their_digits(where: Any, size: int) -> None:
    # At a distance of 1e-6 of the sum of both squares, a difference of squares has lost 6 of 16 digits.
    messages_SM = drawn(9, size) * 1e-3 + np.broadcast_to(where, 9)[:, np.newaxis]
    with np.errstate(over="ignore"):
        expected_SS = np.stack([np.square(messages_SM - one_M).sum(1) for one_M in messages_SM])
    found_SS = squared_distances(torch.from_numpy(messages_SM)).numpy()
    assert np.array_equal(found_SS, found_SS.T)
    np.testing.assert_allclose(found_SS, expected_SS, rtol=1e-9, atol=0)


def test_equal_messages_are_at_no_distance() -> None:
    messages_SM = drawn(6, 5000)[[0, 1, 2, 1, 4, 1]]
    found_SS = squared_distances(torch.from_numpy(messages_SM)).numpy()
    assert np.array_equal(found_SS == 0, (messages_SM[:, np.newaxis, :1] == messages_SM[:, :1])[:, :, 0])


def test_a_message_heavier_than_the_others_pull_is_the_median() -> None:
    # Two unit vectors at a right angle pull by √2.
    messages_SM = np.array([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])
    for heavy in (1.1, 1.3):
        point_M = one(reduced(GeometricMedian(tolerance=1e-10), messages_SM, [heavy, 1, 1]))
        away_SM = point_M - messages_SM
        pulls_SM = np.array([[heavy], [1], [1]]) * away_SM / np.linalg.norm(away_SM, axis=1, keepdims=True)
        np.testing.assert_allclose(pulls_SM.sum(0), np.zeros(2), rtol=0, atol=1e-8)
    assert np.linalg.norm(one(reduced(GeometricMedian(), messages_SM, [2, 1, 1]))) < 1e-5
