"""Pieces and chains of them: what clients clip and weigh, in which order, and what is left to the server."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from fed.aggregators.base import Aggregator, ClientWork, Reduced, Report
from fed.aggregators.robust.centres import Median, NormBound
from fed.aggregators.transforms import (
    Clip,
    Lookahead,
    Momentum,
    Nesterov,
    Scale,
    Transform,
    TrustRatio,
    Weigh,
    WeightDecay,
    chain,
)
from fed.errors import InvalidExperiment

UPDATE_KP = torch.tensor([[3.0, -4.0], [0.3, 0.4], [0.0, 0.0], [0.6, 0.8]], dtype=torch.float64)


def work(update_KP: Tensor = UPDATE_KP) -> ClientWork:
    column = torch.arange(1.0, len(update_KP) + 1, dtype=torch.float64).unsqueeze(1)
    zeros_KP = torch.zeros_like(update_KP)
    return ClientWork(update_KP, zeros_KP[0], zeros_KP, column, column, 0.1, 0.0, column)


@dataclass(frozen=True, kw_only=True)
class Also(Transform):
    """Reports twice the update beside what there is."""

    def report(self, report: Report, work: ClientWork) -> Report:
        return report._replace(message=(*report.message, 2 * report.message[0]))


def test_clipping_shortens_only_long_updates_to_the_norm() -> None:
    (clipped_KP,) = chain(Clip(norm=1.0)).report(work()).message
    expected_KP = torch.tensor([[0.6, -0.8], [0.3, 0.4], [0.0, 0.0], [0.6, 0.8]], dtype=torch.float64)
    torch.testing.assert_close(clipped_KP, expected_KP, rtol=1e-15, atol=0)
    assert torch.equal(clipped_KP[1:3], UPDATE_KP[1:3])


def test_transforms_report_in_the_order_of_the_chain() -> None:
    before, after = chain(Clip(norm=1.0), Also()), chain(Also(), Clip(norm=1.0))
    one, other = (rule.report(work()).message for rule in (before, after))
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], 2 * one[0])
    assert torch.equal(other[1], 2 * UPDATE_KP), "what is beside the update is not clipped"


def test_clients_weigh_as_much_as_they_hold_unless_told_otherwise() -> None:
    samples, alike = [[1.0], [2.0], [3.0], [4.0]], [[1.0]] * 4
    assert chain(Clip()).report(work()).weight_K1.tolist() == samples
    assert chain(Weigh(by="clients")).report(work()).weight_K1.tolist() == alike
    assert chain(Weigh(by="clients"), Weigh()).report(work()).weight_K1.tolist() == samples


def test_server_transforms_act_in_the_order_of_the_chain() -> None:
    # v ← β v + Δ, then the double of v; or v ← β v + 2 Δ and v itself: the same model, another velocity.
    after, before = chain(Momentum(momentum=0.5), Scale(factor=2.0)), chain(Scale(factor=2.0), Momentum(momentum=0.5))
    states = []
    for rule in (after, before):
        state = rule.init(torch.zeros(1, dtype=torch.float64))
        for _ in range(3):
            state = rule.apply(state, Reduced((torch.ones(1, dtype=torch.float64),), 1, 1))
        states.append(state)
    assert [state.model_P.item() for state in states] == [2 * (1 + 1.5 + 1.75)] * 2
    assert (states[0].kept[0].velocity_P.item(), states[1].kept[1].velocity_P.item()) == (1.75, 3.5)


def test_nesterovs_momentum_looks_a_step_ahead_of_its_velocity() -> None:
    transform = Nesterov(momentum=0.5)
    state, moves = transform.init(torch.zeros(1)), []
    for _ in range(3):
        move_P, state = transform.update(torch.ones(1), state, torch.zeros(1))
        moves.append(move_P.item())
    assert moves == [1 + 0.5 * 1, 1 + 0.5 * 1.5, 1 + 0.5 * 1.75]


def test_message_rules_act_before_the_mean_in_chain_order() -> None:
    messages_SM = torch.tensor([[1.0], [2.0], [30.0]], dtype=torch.float64)
    weights_S, stream = torch.ones(3, dtype=torch.float64), np.random.default_rng(0)

    def combined(*pieces: Transform) -> float:
        rule = chain(*pieces)
        assert rule.linear is not any(isinstance(piece, Median | NormBound) for piece in pieces)
        return rule.combine(rule.init(torch.zeros(1, dtype=torch.float64)), messages_SM, weights_S, stream)[1].item()

    assert combined(Scale(factor=5.0)) == 11.0, "server pieces come later"
    assert combined(NormBound(norm=3.0)) == 2.0
    assert combined(NormBound(norm=1.5), Median()) == 1.5
    assert combined(Median(), NormBound(norm=1.5)) == 1.5
    assert combined(Median(), Scale(factor=5.0)) == 2.0


def test_what_is_no_piece_is_refused() -> None:
    with pytest.raises(InvalidExperiment, match=r"of\[1\] must be an instance of Transform, got 0\.5"):
        chain(Clip(), 0.5)  # type: ignore[arg-type]  # what must not be possible


def models(rule: Aggregator, start: list[float], update: list[float], rounds: int) -> list[list[float]]:
    """The models of so many rounds with always the same mean update."""
    state, mean_P = rule.init(torch.tensor(start, dtype=torch.float64)), torch.tensor(update, dtype=torch.float64)
    found = []
    for _ in range(rounds):
        state = rule.apply(state, Reduced((mean_P,), 1, 1))
        found.append(state.model_P.tolist())
    return found


def test_lookahead_returns_to_its_slow_weights_every_period() -> None:
    # φ goes half of the way to where two updates of 1 lead, so that two rounds come to 1.
    assert models(chain(Lookahead(step=0.5, period=2)), [0.0], [1.0], 6) == [[1], [1], [2], [2], [3], [3]]
    assert models(chain(Lookahead(step=0.25, period=1)), [2.0], [1.0], 3) == [[2.25], [2.5], [2.75]]


def test_weight_decay_ends_where_it_takes_what_comes() -> None:
    rounds = models(chain(WeightDecay(decay=0.5)), [8.0], [1.0], 60)
    assert rounds[:3] == [[5.0], [3.5], [2.75]]
    assert rounds[-1][0] == pytest.approx(1.0 / 0.5, abs=1e-15)  # x = (1 − λ) x + Δ


def test_a_trust_ratio_makes_steps_as_long_as_the_model() -> None:
    rule = chain(TrustRatio(), Scale(factor=0.1))
    # ‖x‖ = 5 and Δ along x: the model grows by a tenth a round, however long Δ is.
    for length in (1e-3, 1.0, 1e3):
        final = models(rule, [3.0, 4.0], [0.6 * length, 0.8 * length], 3)[-1]
        assert final == pytest.approx([3 * 1.1**3, 4 * 1.1**3], rel=1e-14)
    assert models(rule, [0.0, 0.0], [3.0, 4.0], 1) == [pytest.approx([0.3, 0.4])]
    assert models(rule, [3.0, 4.0], [0.0, 0.0], 1) == [[3.0, 4.0]]


def test_a_chain_says_whether_it_adds_to_updates() -> None:
    assert chain(Clip(), Weigh(by="clients"), Momentum()).update_alone
    assert not chain(Clip(), Also()).update_alone
