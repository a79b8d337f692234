"""Audits of runs whose samples are private: an honest run does not pass its claim, and one with a fault does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fed
from fed.clients.training import clipped_gradients, private_trainer
from fed.clients.training.sample_gradients import clipped_sums
from fed.errors import InvalidExperiment
from fed.privacy.accounting import epsilon
from fed.privacy.dp_sgd import Inclusion, noised_means
from fed.privacy.releases import Release
from fed.simulations.audit import Audit, audit
from fed.simulations.sample_audit import log_odds
from tests.fed.cli.commands import runner
from tests.simulations import users_parts as parts

PRIVACY = {"kind": "local", "unit": "sample", "clip": 0.5, "noise_multiplier": 3.0}
CANARIES = 200


def data(scale: float = 1.0) -> fed.FederatedData:
    """Three clients with points in 64 dimensions, of ten classes."""
    generator = torch.Generator().manual_seed(0)
    return fed.FederatedData(
        {
            client: (scale * torch.randn(40, 64, generator=generator), torch.arange(40) % 10)
            for client in ("a", "b", "c")
        }
    )


def audited(canaries: int = CANARIES, confidence: float = 0.95, scale: float = 1.0, **changed: Any) -> Audit:
    keys: dict[str, Any] = {
        "data": None,
        "model": None,
        "local": {"lr": 0.1, "batch_size": 16},
        "rounds": {"count": 4, "cohort": 2},
        "privacy": PRIVACY,
        "simulation": {"workers": 0},
    }
    return audit(
        fed.Experiment(**{**keys, **changed}),
        data(scale),
        lambda: nn.Linear(64, 10),
        canaries=canaries,
        confidence=confidence,
    )


def with_noise_times(factor: float, patch: pytest.MonkeyPatch) -> None:
    def weakened(sums_KQ: Tensor, normals_KQ: Tensor, expected_K1: Tensor, **named: Any) -> Tensor:
        return noised_means(sums_KQ, factor * normals_KQ, expected_K1, **named)

    patch.setattr(private_trainer, "noised_means", weakened)


_HONEST: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "epsilon": {"privacy": {**PRIVACY, "noise_multiplier": None, "epsilon": 1.0}},
    "every batch holds all": {"local": {"lr": 0.1, "batch_size": 500}, "privacy": {**PRIVACY, "noise_multiplier": 6.0}},
    "in turn": {"rounds": {"count": 6, "cohort": 1, "sampling": "round_robin"}},
    "corrected": {"algorithm": "scaffold"},
    "momentum": {"local": {"lr": 0.1, "batch_size": 8, "accumulate": 2, "momentum": 0.9}},
}


@pytest.mark.parametrize("changed", _HONEST.values(), ids=_HONEST)
def test_an_honest_run_does_not_pass_its_claim(changed: dict[str, Any]) -> None:
    found = audited(confidence=0.999, **changed)
    assert not found.passes_claim
    assert 0.3 < found.claimed_epsilon < found.guesses.largest_epsilon


def test_claim_is_that_of_the_canaries_as_samples() -> None:
    """200 samples in batches of 16 take 13 steps a round."""
    step = Release(noise_multiplier=3.0, sampling=16 / CANARIES)
    found = audited()
    assert found.claimed_epsilon == epsilon({step: 4 * 13}, 1e-5)
    assert found.rounds == 4
    assert 70 < found.included < 130


@pytest.mark.parametrize("factor", [0.0, 0.2])
@pytest.mark.parametrize("changed", [{}, _HONEST["epsilon"]], ids=["noise", "epsilon"])
def test_too_little_noise_passes_the_claim(
    factor: float, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_noise_times(factor, monkeypatch)
    found = audited(**changed)
    assert found.passes_claim
    if not factor:  # one in 75 has never been in a batch
        assert found.guesses.right >= 0.95 * found.guesses.made


def test_gradients_that_nobody_clips_pass_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not audited(confidence=0.999, scale=2.0).passes_claim

    def unclipped(gradients: Any, mask_KB: Tensor, clip: float, **named: Any) -> Any:
        return clipped_sums(gradients, mask_KB, 1e9, **named)

    monkeypatch.setattr(clipped_gradients, "clipped_sums", unclipped)
    assert audited(scale=2.0).passes_claim


def test_batches_that_are_no_lottery_pass_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inclusion, "next", lambda inclusion: np.arange(inclusion._samples))
    assert audited().passes_claim


def test_log_odds_of_one_canary_are_those_of_two_gaussians() -> None:
    r"""y = b g + n: log(1 − q + q exp((g·y − ‖g‖²/2) / σ²)), with σ² measured across g."""
    generator = torch.Generator().manual_seed(3)
    gradient_P = torch.randn(400, generator=generator, dtype=torch.float64)
    sum_P = gradient_P + 5 * torch.randn(400, generator=generator, dtype=torch.float64)
    along = gradient_P @ sum_P
    variance = (sum_P @ sum_P - along**2 / (gradient_P @ gradient_P)) / 399
    exponent = (along - gradient_P @ gradient_P / 2) / variance
    for rate in (0.3, 1.0):
        found = log_odds(gradient_P[None], sum_P, rate, clip=float(gradient_P.norm()))
        assert found[0] == pytest.approx(torch.log(1 - rate + rate * exponent.exp()), rel=1e-4)


def test_sums_without_noise_tell_who_is_in_a_batch() -> None:
    generator = torch.Generator().manual_seed(4)
    gradients_mP = torch.randn(50, 200, generator=generator)
    gradients_mP /= gradients_mP.norm(dim=1, keepdim=True)
    is_in_m = torch.rand(50, generator=generator) < 0.2
    found_m = log_odds(gradients_mP, gradients_mP[is_in_m].sum(0), 0.4, clip=1.0)
    assert bool((found_m[is_in_m] > 10).all())
    assert torch.allclose(found_m[~is_in_m], torch.tensor(np.log(0.6)), atol=1e-3)


def embedded() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 16), nn.Flatten(), nn.Linear(48, 4))


@pytest.mark.parametrize(
    ("given", "model"),
    [
        (parts.on_demand(), parts.small),
        (fed.FederatedData({"a": (torch.randint(9, (12, 3)), torch.arange(12) % 4)}), embedded),
    ],
    ids=["on demand", "integers"],
)
def test_canaries_are_made_of_samples_of_any_kind(given: fed.FederatedData, model: Any) -> None:
    experiment = fed.Experiment(data=None, model=None, rounds={"count": 1}, privacy=PRIVACY)
    found = audit(experiment, given, model, canaries=20)
    assert (found.guesses.canaries, found.rounds) == (20, 1)
    assert found.claimed_epsilon > 0


EXPERIMENT = """
data: {kind: digits, clients: 6}
model: {kind: mlp, hidden: []}
local: {lr: 0.1, batch_size: 16}
rounds: {count: 2}
privacy: {kind: local, unit: sample, clip: 0.3, noise_multiplier: 3.0}
"""


def test_the_command_audits_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "private.yaml").write_text(EXPERIMENT)
    result = runner(tmp_path, monkeypatch, capsys, "audit")("private.yaml")
    assert result.code == 0
    assert result.out.startswith("canaries  200, of which coins put ")
    assert "No fault was found: the bound does not pass the claim." in result.out


@pytest.mark.parametrize(
    ("canaries", "reason"),
    [(400, "at least 2 parameters a canary, got 650 parameters and 400 canaries"), (10, "at least 20 canaries")],
)
def test_too_many_or_too_few_canaries_are_refused(canaries: int, reason: str) -> None:
    with pytest.raises(InvalidExperiment, match=reason):
        audited(canaries=canaries)


@pytest.mark.long
@pytest.mark.parametrize("changed", _HONEST.values(), ids=_HONEST)
def test_no_seed_of_honest_runs_passes_its_claim(changed: dict[str, Any]) -> None:
    for seed in range(10):
        assert not audited(confidence=0.9999, seed=seed, **changed).passes_claim
