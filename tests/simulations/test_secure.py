"""Secure aggregation in the simulator: the protocol and its arithmetic agree with each other and with plain runs."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fed
from fed.compression.codec import Draw
from fed.errors import InvalidExperiment
from fed.secure_aggregation.fixed_point import ClientNumbers, SecureSum
from fed.server.observer import Essential
from fed.server.secure_fleet import SessionResult
from fed.simulations.secure import SimulatedSessions
from fed.simulations.simulation import Simulation
from fed.vectors.randomness import Streams
from fed.wire.lanes import hide
from tests.simulations.users_parts import Watcher
from tests.thinned import thinned

pytestmark = pytest.mark.usefixtures("device")

SECTION = {"max_weight": 200, "clip": 8.0, "minimum_cohort": 3}
KINDS = [
    "fedavg",
    "fedavgm",
    "fedadam",
    "bmuf",
    "diloco",
    "slowmo",
    "easgd",
    "fedprox",
    "fednova",
    "scaffold",
    "feddyn",
    "mimelite",
    "qfedavg",
    "sign_majority",
    "moon",
]


def experiment(**changes: Any) -> fed.Experiment:
    keys: dict[str, Any] = {
        "seed": 3,
        "rounds.count": 3,
        "rounds.cohort": 6,
        "data": {"kind": "digits", "clients": 12},
        "model": {"kind": "logistic"},
        "local.lr": 0.05,
        "simulation.workers": 0,
        "secure_aggregation": SECTION,
    }
    return fed.Experiment().override({**keys, **{key.replace("__", "."): value for key, value in changes.items()}})


def modes(**changes: Any) -> list[fed.Run]:
    return [
        fed.simulate(experiment(**changes).override({"secure_aggregation.mode": mode})) for mode in ("emulated", "real")
    ]


def vector(run: fed.Run) -> Tensor:
    return nn.utils.parameters_to_vector(run.model.parameters()).detach()


def same(first: fed.Run, second: fed.Run) -> None:
    assert torch.equal(vector(first), vector(second))
    for one, other in zip(first.metrics, second.metrics, strict=True):
        assert {**one, "wall_s": 0} == {**other, "wall_s": 0}


@pytest.mark.parametrize("kind", thinned(KINDS, quick=7))
def test_protocol_and_arithmetic_give_the_same_run(kind: str) -> None:
    section = {**SECTION, "clip": 1e4} if kind in ("fednova", "qfedavg") else SECTION
    first, second = modes(algorithm=kind, secure_aggregation=section, uplink=[])
    same(first, second)
    assert all(line["replied"] == 6 for line in first.metrics)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"simulation__workers": 2}, marks=pytest.mark.long),
        pytest.param({"simulation__batching": "off"}, marks=pytest.mark.long),
        {"simulation__batching": "on", "simulation__group": 4},
        {"secure_aggregation": {**SECTION, "bits": 16}},
        pytest.param({"secure_aggregation": {**SECTION, "bits": 64}}, marks=pytest.mark.long),
        {
            "rounds__over_selection": 1.3,
            "devices__failure": 0.1,
            "secure_aggregation": {**SECTION, "max_drop_out": 0.3},
        },
        pytest.param({"rounds__sampling": "poisson"}, marks=pytest.mark.long),
        pytest.param(
            {"devices__failure": 0.15, "secure_aggregation": {**SECTION, "max_drop_out": 0.3}}, marks=pytest.mark.long
        ),
        {"rounds__cohort": 12, "rounds__deadline_s": 1.2, "devices": {"kind": "lognormal"}},
        pytest.param({"uplink": [{"kind": "randomk", "fraction": 0.3}]}, marks=pytest.mark.long),
        pytest.param({"uplink": ["rotation"]}, marks=pytest.mark.long),
        {"uplink": ["rotation", {"kind": "randomk", "fraction": 0.3}], "error_feedback": "ef"},
        {"uplink": [{"kind": "sketch", "fraction": 0.5, "read": 0.2}]},
        {"downlink": [{"kind": "qsgd", "bits": 4}], "error_feedback": "none"},
        {"adversaries": {"kind": "sign_flip", "fraction": 0.2}},
    ],
    ids=str,
)
def test_protocol_and_arithmetic_agree_however_rounds_go(changes: dict[str, Any]) -> None:
    same(*modes(**{"algorithm": "scaffold", **changes} if "uplink" not in changes else changes))


@pytest.mark.parametrize("bits", [16, *(pytest.param(bits, marks=pytest.mark.long) for bits in (32, 64))])
@pytest.mark.parametrize("kind", ["fedavg", "scaffold", "diloco"])
def test_one_round_differs_from_the_plain_one_by_the_bound(bits: int, kind: str) -> None:
    changes = {"rounds__count": 1, "algorithm": kind}
    section = {**SECTION, "bits": bits}
    secure = fed.simulate(experiment(**changes, secure_aggregation=section))
    plain = fed.simulate(experiment(**changes, secure_aggregation=None))
    line = secure.metrics[0]
    assert (line["clipped_share"], line["capped_weights"]) == (0, 0)
    levels = min((2 ** (bits - 1) - 1) // (6 * 200), 2**40)
    # a mean moves by less than a step C/L, and DiLoCo's outer step (Nesterov, η = 0.7, μ = 0.9) by 0.7 · 1.9 of it;
    # both models are rounded to float32
    step = SECTION["clip"] / levels * (1.33 if kind == "diloco" else 1.0)
    rounding = vector(plain).abs() * 2.0**-23 + 1e-9
    difference = (vector(secure) - vector(plain)).abs()
    assert (difference <= step + rounding).all()
    if bits == 16:
        assert difference.max() > step / 100  # the arithmetic did take place
    assert line["train_loss"] == pytest.approx(plain.metrics[0]["train_loss"], abs=1e-4)


def test_bytes_are_the_lanes_and_the_sessions() -> None:
    run = fed.simulate(experiment(rounds__count=1))
    plain = fed.simulate(experiment(rounds__count=1, secure_aggregation=None))
    simulation = Simulation(experiment())
    assert simulation.message is not None
    assert simulation.message.fixed is not None
    masked = 6 * simulation.message.fixed.lanes * 4
    # by hand for 6 clients, of whom each is a neighbour of 5: keys of 134 bytes, a commitment and five boxes of 91; a
    # signature of 66 and six shares of 42
    assert run.metrics[0]["bytes_up"] == masked + 6 * (134 + 34 + 5 * 91) + 6 * (66 + 6 * 42)
    names = sum(1 + 1 + 1 + 1 + len(name) + 34 for name in _asked(run))
    threshold = 5  # ⌊2·6/3⌋ + 1
    down = 6 * (3 + names + 5 * 145 + 5 * 91) + 6 * (3 + (threshold - 1) * 73)
    assert run.metrics[0]["bytes_down"] == plain.metrics[0]["bytes_down"] + down


def _asked(run: fed.Run) -> list[str]:
    simulation = Simulation(run.experiment)
    draw = simulation.streams.generator("cohort", 1)
    return [str(simulation.data.clients[place]) for place in sorted(draw.choice(12, size=6, replace=False))]


def test_unmasking_alone_is_on_the_critical_path() -> None:
    keys = {"rounds__count": 1, "devices": {"kind": "uniform", "latency_s": 0.1, "up_bytes_per_s": 1e12}}
    secure = fed.simulate(experiment(**keys))
    plain = fed.simulate(experiment(**keys, secure_aggregation=None))
    # two more exchanges of two messages each
    assert secure.metrics[0]["virtual_s"] == pytest.approx(plain.metrics[0]["virtual_s"] + 4 * 0.1, abs=1e-2)


def test_round_with_too_few_messages_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    changes: dict[str, Any] = {"devices__failure": 0.45, "rounds__count": 12, "rounds__cohort": 9}
    changes["secure_aggregation"] = {**SECTION, "minimum_cohort": 4, "corrupt": 0.0}
    with caplog.at_level(logging.WARNING):
        first, second = modes(**changes)
    same(first, second)
    replied = {line["replied"] for line in first.metrics}
    assert 0 in replied  # fewer than four
    assert replied & {4, 5, 6}  # fewer than the threshold of seven: a second attempt
    assert replied & {7, 8, 9}
    assert "has no sum, and no update was revealed" in caplog.text
    for line in first.metrics:
        assert line["replied"] == 0 or line["replied"] >= 4
        assert line["replied"] + line["failed"] == line["selected"]


def test_second_attempt_costs_another_masked_message() -> None:
    changes: dict[str, Any] = {"devices__failure": 0.3, "rounds__count": 20, "rounds__cohort": 9}
    changes["secure_aggregation"] = {**SECTION, "minimum_cohort": 4, "corrupt": 0.0}
    run = fed.simulate(experiment(**changes))
    once = {line["bytes_up"] for line in run.metrics if line["replied"] == 7}
    again = {line["bytes_up"] for line in run.metrics if line["replied"] == 6}
    assert len(once) == len(again) == 1
    assert min(again) > 1.5 * max(once)


def test_clipping_and_capping_are_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    section = {**SECTION, "clip": 1e-3, "max_weight": 2}
    with caplog.at_level(logging.WARNING):
        run = fed.simulate(experiment(secure_aggregation=section, rounds__count=1))
    assert 0 < run.metrics[0]["clipped_share"] <= 1
    assert run.metrics[0]["capped_weights"] == 6
    assert "raise secure_aggregation.clip" in caplog.text
    assert "raise secure_aggregation.max_weight" in caplog.text


def test_plain_runs_measure_no_clipping() -> None:
    run = fed.simulate(experiment(rounds__count=1, secure_aggregation=None))
    assert "clipped_share" not in run.metrics[0]


def test_randomk_with_feedback_learns_what_it_left_out() -> None:
    changes = {"uplink": [{"kind": "randomk", "fraction": 0.1}], "rounds__count": 40, "rounds__cohort": 12}
    fed_back = fed.simulate(experiment(**changes, error_feedback="ef"))
    plain = fed.simulate(experiment(rounds__count=40, rounds__cohort=12))
    assert fed_back.metrics[-1]["train_loss"] < 1.3 * plain.metrics[-1]["train_loss"]
    assert fed_back.metrics[-1]["bytes_up"] < plain.metrics[-1]["bytes_up"]


@pytest.mark.parametrize("chain", [["rotation"], [{"kind": "randomk", "fraction": 1.0}]])
def test_codecs_that_lose_nothing_give_the_plain_round(chain: list[Any]) -> None:
    section = {**SECTION, "bits": 64}
    coded = fed.simulate(experiment(rounds__count=1, uplink=chain, secure_aggregation=section))
    plain = fed.simulate(experiment(rounds__count=1, secure_aggregation=None))
    assert (vector(coded) - vector(plain)).abs().max() < 1e-5


def test_sketch_is_read_once_from_the_sum() -> None:
    chain = [{"kind": "sketch", "fraction": 0.8, "read": 0.3}]
    section = {**SECTION, "bits": 64}
    hidden = fed.simulate(experiment(rounds__count=1, uplink=chain, secure_aggregation=section))
    open_ = fed.simulate(experiment(rounds__count=1, uplink=chain, secure_aggregation=None))
    assert (vector(hidden) - vector(open_)).abs().max() < 1e-5


@pytest.mark.parametrize("clip", [8.0, 0.05])
@pytest.mark.parametrize("chain", [["rotation"], [{"kind": "randomk", "fraction": 0.2}]])
def test_residual_is_all_that_the_sum_lacks(chain: list[Any], clip: float) -> None:
    section = {**SECTION, "clip": clip, "bits": 16, "max_weight": 1}
    message = Simulation(experiment(uplink=chain, error_feedback="ef", secure_aggregation=section)).message
    assert message is not None
    assert message.fixed is not None
    update_1M, residual_1M = torch.randn(1, message.numbers, dtype=torch.float64), torch.randn(1, message.parameters)
    draw = Draw(Streams(0), [1], [4])
    outgoing = hide(message, update_1M, {"residual": residual_1M}, draw, ClientNumbers([1], [5], [0.5]))
    total = SecureSum(16, message.fixed.lanes)
    assert outgoing.lanes_KL is not None
    total.add(outgoing.lanes_KL[0])
    read_M = message.read(message.fixed.read(total).mean_M, Streams(0), 1)
    wanted_1M = update_1M + residual_1M
    assert torch.allclose(read_M + outgoing.counted["residual"].double(), wanted_1M, atol=1e-5)
    assert torch.allclose(outgoing.lost["residual"].double(), wanted_1M, atol=1e-5)
    assert message.fixed.read(total).clipped > (0 if clip < 1 else -1)


@pytest.mark.parametrize("mode", ["emulated", "real"])
@pytest.mark.parametrize(("feedback", "times"), [("ef", 2), ("none", 1)])
def test_updates_of_a_round_without_a_sum_go_back(
    feedback: str, times: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step on all samples from the same model gives the same update: the second round's sum holds it twice."""
    without_sum: list[int] = []
    close = SimulatedSessions.close

    def closed(sessions: SimulatedSessions) -> SessionResult:
        number = next(iter(sessions._tasks.values())).round
        return SessionResult(problem="too few stayed") if number in without_sum else close(sessions)

    monkeypatch.setattr(SimulatedSessions, "close", closed)
    keys: dict[str, Any] = {"data__clients": 6, "local__batch_size": 1000, "uplink": ["rotation"]}
    keys |= {"error_feedback": feedback, "secure_aggregation": {**SECTION, "bits": 64, "mode": mode}}

    def moved(rounds: int) -> Tensor:
        run = fed.simulate(experiment(**keys, rounds__count=rounds))
        assert [line["replied"] for line in run.metrics] == [6 * (n not in without_sum) for n in range(1, rounds + 1)]
        return vector(run)

    once = moved(1)
    without_sum[:] = [1]
    start, again = moved(1), moved(2)
    assert (once - start).abs().max() > 1e-3
    assert torch.allclose(again - start, times * (once - start), atol=1e-6)  # of float32 models


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"algorithm": "krum"}, "each client's own message"),
        ({"algorithm": "median"}, "each client's own message"),
        ({"algorithm": "afl"}, "a place for each client"),
        ({"algorithm": "ditto"}, "evaluation"),
        ({"algorithm": "dpsgd", "rounds__cohort": "all"}, "report to a coordinator"),
        ({"algorithm": {"kind": "allreduce"}, "rounds__cohort": "all"}, "report"),
        ({"rounds": {"kind": "asynchronous"}}, "wait for a cohort"),
        ({"rounds": {"kind": "buffered"}}, "wait for a cohort"),
        ({"rounds": {"kind": "bounded_staleness"}}, "wait for a cohort"),
        ({"rounds__quorum": 0.5}, "rounds.quorum 0.5"),
        ({"rounds__backup_after_s": 5.0}, "rounds.backup_after_s 5.0"),
        ({"rounds__sampling": "weighted"}, "number of samples"),
        ({"rounds__sampling": "power_of_choice"}, "number of samples"),
        ({"hierarchy": {"kind": "edges", "fan_out": 3}}, "talk to the coordinator itself"),
        ({"evaluation": "clients"}, "evaluation: coordinator"),
        ({"uplink": ["topk"]}, "choose randomk, rotation or sketch for uplink"),
        ({"uplink": ["qsgd"]}, "choose randomk, rotation or sketch for uplink"),
        ({"uplink": [{"kind": "randomk"}, "zstd"]}, "choose randomk, rotation or sketch for uplink"),
        ({"uplink": ["rotation"], "error_feedback": "ef21", "rounds__cohort": "all"}, "error_feedback to ef"),
        ({"secure_aggregation": {"minimum_cohort": 3}}, "max_weight must be given"),
        ({"secure_aggregation": {**SECTION, "bits": 16, "max_weight": 40_000}}, "do not fit into 16 bits"),
        ({"secure_aggregation": {**SECTION, "minimum_cohort": 7}}, "minimum_cohort"),
        ({"secure_aggregation": {**SECTION, "minimum_cohort": 1}}, "minimum_cohort must be .* got 1$"),
        ({"secure_aggregation": {**SECTION, "max_drop_out": 0.5}}, "max_drop_out"),
        ({"rounds__cohort": 2}, "minimum_cohort"),
        (
            {"rounds__over_selection": 1.5},
            "over_selection asks 9 clients for 6 answers, .* which needs 7: lower over_selection",
        ),
        ({"secure_aggregation": {**SECTION, "clip": 0.0}}, "^secure_aggregation.clip must be a number .* got 0.0$"),
        (
            {"secure_aggregation": {**SECTION, "clip": [1.0, -1.0]}},
            "^secure_aggregation.clip must be .* got \\[1.0, -1.0\\]$",
        ),
        ({"secure_aggregation": {**SECTION, "clip": "x"}}, "^secure_aggregation.clip must be a number .* got 'x'$"),
        ({"secure_aggregation": {**SECTION, "bits": 8}}, "bits"),
        ({"secure_aggregation": {**SECTION, "max_drop_out": 1.0}}, "max_drop_out"),
        ({"secure_aggregation": {**SECTION, "minimun_cohort": 3}}, "did you mean minimum_cohort"),
    ],
    ids=str,
)
def test_combinations_without_meaning_are_refused_when_read(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidExperiment, match=match):
        experiment(**changes)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"secure_aggregation": {**SECTION, "clip": [1.0, 2.0, 3.0]}}, "one for each of 1 parts"),
        ({"rounds__cohort": "all", "data__clients": 2}, "minimum_cohort"),
    ],
    ids=str,
)
def test_rounds_that_cannot_succeed_are_refused_before_the_first(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidExperiment, match=match):
        fed.simulate(experiment(**changes))


def test_models_with_integer_buffers_are_refused() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10))
    with pytest.raises(InvalidExperiment, match="integer buffers"):
        fed.simulate(experiment(model=None, local__batch_size=20), model=lambda: model)


def test_log_and_summary_say_what_follows_from_the_section(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    clipping = {**SECTION, "clip": 1e-3, "max_weight": 1}
    run = fed.simulate(experiment(secure_aggregation=clipping))
    facts = run.summary["secure_aggregation"]
    assert facts == {
        "clients": 6,
        "neighbours": 5,
        "threshold": 5,
        "least_survivors": 5,
        "corrupt_clients": 1,
        "levels": (2**31 - 1) // 6,
        "largest_rounding": 1e-3 / ((2**31 - 1) // 6),
    }
    assert "each has masks with 5 others, 5 must stay" in caplog.text
    for words in ("were clipped: raise", "weights of 6 clients were capped"):
        assert caplog.text.count(words) == 1  # of three rounds


def test_algorithms_that_weigh_alike_need_no_max_weight() -> None:
    run = fed.simulate(experiment(algorithm="qfedavg", secure_aggregation={"minimum_cohort": 3}, rounds__count=1))
    assert run.metrics[0]["replied"] == 6


def test_run_cut_off_and_resumed_has_the_same_bits(tmp_path: Path) -> None:
    changes = experiment(rounds__count=4, checkpoints__every=1, uplink=["rotation"], error_feedback="ef")
    whole = fed.simulate(changes, output=tmp_path / "whole")
    cut = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        fed.simulate(changes, output=cut, observers=[Essential(Watcher(_interrupt_after_two))])
    same(whole, fed.simulate(changes, output=cut, resume=True))


def _interrupt_after_two(number: int) -> None:
    if number == 2:
        raise KeyboardInterrupt
