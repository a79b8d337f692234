"""Models of ``transformers`` train as they are: what the guide shows, and in groups as alone."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fed
from tests.clients.training.readers import sentences

pytestmark = pytest.mark.long  # transformers is installed for the long tests alone

PAGE = Path(__file__).resolve().parents[3] / "docs" / "your-own-kinds.md"
SHOWN = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop")


@pytest.fixture(autouse=True)
def without_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide torchvision, which another library brings and transformers would import: it must fit the build of torch."""
    monkeypatch.setitem(sys.modules, "torchvision", None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BertForSequenceClassification"])
def test_what_the_guide_shows_trains_in_twelve_lines(name: str) -> None:
    (code,) = [block for block in SHOWN if name in block]
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    found: dict[str, Any] = {}
    exec(code, found)
    losses = [line["train_loss"] for line in found["run"].metrics]
    assert len(losses) == 2
    assert losses[1] < losses[0] * 1.01, "two rounds of plain SGD: none diverges"


def bert(dropout: float) -> torch.nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    drops = dict.fromkeys(DROPOUTS[:2], dropout)
    config = BertConfig(vocab_size=11, max_position_embeddings=16, num_labels=3, **SMALL, **drops)
    return BertForSequenceClassification(config).double()  # type: ignore[no-any-return]


def gpt2(dropout: float) -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    drops = dict.fromkeys(DROPOUTS[2:], dropout)
    config = GPT2Config(vocab_size=11, n_positions=16, n_embd=16, n_layer=2, n_head=2, **drops)
    return GPT2LMHeadModel(config).double()  # type: ignore[no-any-return]


def pairs(name: str, client: int) -> Any:
    ids = sentences(client)
    if name == "gpt2":
        return {"input_ids": [words[:-1] for words in ids]}, [words[1:] for words in ids]
    return {"input_ids": ids}, [int(words.sum()) % 3 for words in ids]


@pytest.mark.usefixtures("device")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_models_of_transformers_train_in_groups_as_alone(name: str, dropout: float) -> None:
    """In float64 up to its rounding; with dropout clients train one by one, and repeat their bits."""
    data = fed.FederatedData({client: pairs(name, client) for client in range(3)}, pairs(name, 3))
    runs = []
    for batching in ("off", "off" if dropout else "on"):
        experiment = fed.Experiment(
            model=None,
            collate={"kind": "pad", "mask": "attention_mask", "multiple": 8},
            local={"lr": 0.1, "batch_size": 4, "momentum": 0.9},
            rounds={"count": 2},
            simulation={"batching": batching},
        )
        runs.append(fed.simulate(experiment, data=data, model=lambda: {"bert": bert, "gpt2": gpt2}[name](dropout)))
    for one, other in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        assert float((one - other).abs().max()) < (1e-300 if dropout else 1e-10)
    assert runs[0].summary["final_test_loss"] == pytest.approx(runs[1].summary["final_test_loss"], abs=1e-10)
