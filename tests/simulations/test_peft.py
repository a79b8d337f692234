"""Adapters that peft makes for a model of transformers: the example, exactness, and the same bits on nodes."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fed
from fed.aggregators.adapters import adapted_layers
from tests.conftest import ROOT
from tests.simulations.test_adapters import assert_same_state, over_grpc

pytestmark = [
    pytest.mark.long,  # they need the extra lora
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of peft, which uses what transformers will remove
]

KIND = f"python:{__name__}:reader"


@pytest.fixture(autouse=True)
def without_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide torchvision, which another library brings and transformers would import: it must fit the build of torch."""
    monkeypatch.setitem(sys.modules, "torchvision", None)


class Reader(nn.Module):
    """A causal model that reads an image as tokens, with adapters of its attention, and a head that is trained."""

    def __init__(self) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model
        from transformers import GPT2Config, GPT2Model

        options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
        config = GPT2Config(vocab_size=17, n_positions=64, n_embd=32, n_layer=2, n_head=2, **options)
        adapters = LoraConfig(r=2, lora_alpha=4, target_modules=["c_attn"], fan_in_fan_out=True)
        self.body = get_peft_model(GPT2Model(config), adapters)
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = (16 * images).round().long()
        scores: Tensor = self.head(self.body(input_ids=tokens).last_hidden_state[:, -1])
        return scores


def reader(input_shape: tuple[int, ...] = (), classes: int = 10) -> nn.Module:
    """The model, with the same numbers wherever it is made."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        made = Reader()
        for layer in adapted_layers(made):  # else all clients have one A after the first round
            nn.init.normal_(made.get_parameter(layer.up), std=0.1)
        return made


def matrices(model: nn.Module) -> list[Tensor]:
    """W + s (B A)ᵀ of each layer, in float64, as GPT-2 stores them."""
    parts = {name: part.detach().double() for name, part in model.named_parameters()}
    return [parts[one.base] + one.scale * (parts[one.up] @ parts[one.down]).T for one in adapted_layers(model)]


def test_the_example_prints_bytes_losses_and_the_gap() -> None:
    run = f"import runpy, sys; sys.modules['torchvision'] = None; runpy.run_path({str(ROOT / 'examples/lora.py')!r}, "
    command = [sys.executable, "-c", run + "run_name='__main__')"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    numbers = r" +([\d,]+) +(\d+)× +([\d,]+) +(\d+)× +([\d.]+) +([\d.]+)$"
    rows = re.findall(r"^(\w.*?)" + numbers, printed, re.MULTILINE)
    assert [row[0] for row in rows] == ["fedavg", "ffa_lora", "fedex_lora", "flora", "flora, ranks 1 and 2"]
    assert all(int(ratio) >= 100 for _, _, ratio, *_ in rows)
    adapters, _, covariance, *stacked = (int(row[3].replace(",", "")) for row in rows)
    # Of nine clients a covariance has eight terms, each as large as a client's adapters.
    assert (covariance, *stacked) == (9 * adapters, 10 * adapters, 10 * adapters)
    assert all(float(accuracy) > 0.6 for *_, accuracy in rows)  # 0.3 before the first round
    (gap,) = re.findall(r"mean\(BA\) - mean\(B\) mean\(A\), scaled: ([\d.]+)", printed)
    assert float(gap) > 0.01


@pytest.mark.usefixtures("device")
def test_the_residual_is_exact_in_float32() -> None:
    keys = fed.Experiment(
        data={"kind": "digits", "clients": 3, "partition": {"kind": "dirichlet", "alpha": 0.5}},
        model=None,
        local={"lr": 0.5, "steps": 3, "batch_size": 8},
        rounds={"count": 1},
        simulation={"workers": 0},
        algorithm="fedex_lora",
    )
    data = fed.clients.data.load(keys.data, keys.data_streams)
    whole = fed.simulate(keys, model=reader)
    own = keys.override({"algorithm": "fedavg"})
    alone = [matrices(fed.simulate(own, data=data.only(client, client), model=reader).model) for client in data.clients]
    sizes = [data.size_of(client) for client in data.clients]
    averaged = matrices(fed.simulate(own, model=reader).model)
    for place, found in enumerate(matrices(whole.model)):
        mean = sum((size / sum(sizes) * one[place] for size, one in zip(sizes, alone, strict=True)), torch.zeros(()))
        torch.testing.assert_close(found, mean, rtol=0, atol=1e-6)
        assert float((averaged[place] - mean).abs().max()) > 1e-5


@pytest.mark.parametrize("algorithm", ["fedex_lora", {"kind": "ffa_lora"}])
def test_nodes_have_the_bits_of_the_simulation(algorithm: Any, tmp_path: Path) -> None:
    given = fed.Experiment(
        data={"kind": "digits", "clients": 3},
        model=KIND,
        local={"lr": 0.3, "steps": 2, "batch_size": 8},
        rounds={"count": 3, "cohort": 2},
        simulation={"batching": "off", "workers": 0},
        algorithm=algorithm,
    )
    simulated = fed.simulate(given)
    run = over_grpc(given, tmp_path, KIND)
    assert_same_state(run.model.state_dict(), simulated.model.state_dict())
    assert [line["bytes_up"] for line in run.metrics] == [line["bytes_up"] for line in simulated.metrics]
