"""Products of float32 have the precision that the experiment names, and PyTorch's settings stay the user's."""

from typing import Any

import pytest
import torch

import fed
from fed.clients.training.float32_products import float32_products, note_without_tf32
from fed.config.experiment import Local

GPU = torch.device("cuda:0")


def settings() -> list[str]:
    cudnn: Any = torch.backends.cudnn
    matmul: Any = torch.backends.cuda.matmul
    return [cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision, matmul.fp32_precision]


@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("by_default", [True, False])
def test_a_block_sets_all_products_and_leaves_the_users_settings(tf32: bool, by_default: bool) -> None:
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=by_default):
        before = settings()
        with float32_products(GPU, tf32=tf32):
            assert settings() == ["tf32" if tf32 else "ieee"] * 3
            with float32_products(torch.device("cpu"), tf32=not tf32):
                assert settings() == ["tf32" if tf32 else "ieee"] * 3
            with torch.backends.cudnn.flags(enabled=False):  # an error where older and newer flags disagree
                pass
        assert settings() == before
        assert torch.backends.cudnn.allow_tf32 == by_default


def test_settings_come_back_after_an_error() -> None:
    before = settings()
    with pytest.raises(ZeroDivisionError), float32_products(GPU):
        raise ZeroDivisionError
    assert settings() == before


@pytest.mark.parametrize(("capability", "has_it"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_gpus_have_tf32_from_ampere_on(
    capability: tuple[int, int], has_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert (note_without_tf32(Local(precision="tf32"), GPU) == "") == has_it
    assert not note_without_tf32(Local(), GPU)


def test_a_cpu_computes_tf32_in_float32_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    experiment = fed.Experiment(rounds={"count": 1}, data={"clients": 3}, simulation={"workers": 0, "device": "cpu"})
    asked, plain = (
        fed.simulate(experiment.override({"local.precision": precision})) for precision in ("tf32", "float32")
    )
    note = "in float32, since the device cpu has no TF32"
    assert [one.message for one in caplog.records if "TF32" in one.message] == [
        f"local.precision tf32: clients train {note}"
    ]
    assert asked.summary["training"] == f"{plain.summary['training']}; {note}"
    for ours, theirs in zip(asked.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
