"""A run read from its folder is the run as it was in memory."""

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fed
from fed.errors import InvalidInput
from fed.server.observer import Essential
from fed.storage.model_files import read_model, read_models, write_models
from tests.simulations.durable_runs import experiment
from tests.simulations.users_parts import Watcher


def bits(module: nn.Module) -> dict[str, bytes]:
    return {name: part.numpy().tobytes() for name, part in module.state_dict().items()}


@pytest.mark.parametrize("case", ["synchronous", "fedper", "ditto", "choco", "local"])
def test_a_loaded_run_is_the_one_in_memory(case: str, tmp_path: Path) -> None:
    run = fed.simulate(experiment(case, 2), output=tmp_path / "run")
    before = torch.get_rng_state()
    again = fed.Run.load(tmp_path / "run")
    assert (again.experiment, again.metrics, again.directory) == (run.experiment, run.metrics, run.directory)
    assert again.summary == json.loads(json.dumps(run.summary))
    assert bits(again.model) == bits(run.model)
    assert not again.model.training
    assert [*again.models] == [*run.models]
    for client, model in run.models.items():
        assert bits(again.models[client]) == bits(model)
    assert bool(run.models) == (case != "synchronous")
    assert again.participation == run.participation
    assert torch.equal(torch.get_rng_state(), before), "the global generator stays as it is"


def test_tables_are_frames_for_pandas(tmp_path: Path) -> None:
    run = fed.simulate(experiment("tolerant", 4), output=tmp_path / "run")
    metrics, who = (pd.DataFrame(run.table(what)) for what in ("metrics", "participation"))
    assert metrics["bytes_up"].tolist() == [line["bytes_up"] for line in run.metrics]
    assert metrics.equals(pd.DataFrame(run.metrics)[metrics.columns])
    for event, count in {"asked": "selected", "replied": "replied", "late": "late", "failed": "failed"}.items():
        rows = who[who["event"] == event]
        assert [(rows["round"] == number).sum() for number in metrics["round"]] == metrics[count].tolist()
    with pytest.raises(InvalidInput, match="a table must be metrics, clients or participation, got 'models'"):
        run.table("models")


def test_scores_of_clients_are_read_where_there_are_some(tmp_path: Path) -> None:
    run = fed.simulate(experiment("synchronous", 2), output=tmp_path / "run")
    rows = [{"round": number, "client": client, "loss": 0.5} for number in (1, 2, 3) for client in (0, "ann")]
    (tmp_path / "run" / "clients.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run.clients == rows[:4], "round 3 has no metrics"
    assert run.table("clients")["client"].tolist() == [0, "ann", 0, "ann"]


def made() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False))


def test_a_model_given_in_python_is_given_again(tmp_path: Path) -> None:
    run = fed.simulate(experiment("ditto", 1).override({"model": None}), model=made, output=tmp_path / "run")
    again = fed.Run.load(tmp_path / "run")
    assert again.metrics == run.metrics, "which need no model"
    with pytest.raises(InvalidInput, match=r"was given in Python, and cannot be rebuilt .* alone: give fed.Run.load\("):
        _ = again.model
    for model in (made, made()):
        again = fed.Run.load(tmp_path / "run", model=model)
        assert bits(again.model) == bits(run.model)
        assert bits(again.models[3]) == bits(run.models[3])
    with pytest.raises(InvalidInput, match=r"must hold the tensors of the run's model, got others for 1.bias: give"):
        _ = fed.Run.load(tmp_path / "run", model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))).model


def test_of_a_run_under_way_there_is_what_there_is(tmp_path: Path) -> None:
    seen: list[fed.Run] = []

    def look(number: int) -> None:
        seen.append(fed.Run.load(tmp_path / "run"))
        if number == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        fed.simulate(experiment("synchronous", 3), output=tmp_path / "run", observers=[Essential(Watcher(look))])
    assert [(len(run.metrics), run.summary["status"], run.summary["rounds"]) for run in seen] == [
        (1, "unfinished", 1),
        (2, "unfinished", 2),
    ]
    assert len(seen[1].participation) == 2
    (tmp_path / "run" / "model.safetensors").rename(tmp_path / "model.safetensors")
    with pytest.raises(InvalidInput, match="must hold the run's model, got no such file: a run writes it at its end"):
        _ = fed.Run.load(tmp_path / "run").model
    (tmp_path / "model.safetensors").rename(tmp_path / "run" / "model.safetensors")
    ended = fed.Run.load(tmp_path / "run")
    assert ended.summary["status"] == "failed"
    assert bits(ended.model).keys() == bits(fed.simulate(experiment("synchronous", 1)).model).keys()


def test_only_a_run_can_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="must be the folder of a run, got none there: fed runs lists"):
        fed.Run.load(tmp_path)


# Files of models


class Mixed(nn.Module):
    """Parameters of several types and shapes, one of them tied, and buffers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, dtype in {"f16": torch.float16, "b16": torch.bfloat16, "f64": torch.float64}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(3, 2, generator=generator).to(dtype)))
        self.tied = self.f64
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("none", torch.zeros(0, 4))


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


def test_clients_models_of_any_types_come_back_to_the_bit(tmp_path: Path) -> None:
    models: dict[int | str, nn.Module] = {7: Mixed(1), "7": Mixed(2), "ann/ü": Mixed(3)}
    path = tmp_path / "models.safetensors"
    write_models(path, models)
    again = read_models(path, Mixed)
    assert [*again] == [*models], "7 and '7' are two"
    assert all(same(again[client], model) for client, model in models.items())
    by_library = load_file(path)
    assert torch.equal(by_library["f64"], torch.stack([model.state_dict()["f64"] for model in models.values()]))
    assert read_models(tmp_path / "none", Mixed) == {}


@pytest.mark.parametrize("content", [b"", b"rubbish", (2).to_bytes(8, "little") + b"{}"])
def test_a_damaged_file_is_a_sentence(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    for read in (lambda: read_model(path, Mixed()), lambda: read_models(path, Mixed)):
        with pytest.raises(InvalidInput, match=r"model.safetensors must hold"):
            read()


def test_earlier_models_go_with_their_run(tmp_path: Path) -> None:
    fed.simulate(experiment("ditto", 1), output=tmp_path / "run")
    assert (tmp_path / "run" / "models.safetensors").exists()
    fed.simulate(experiment("synchronous", 1), output=tmp_path / "run", overwrite=True)
    assert not (tmp_path / "run" / "models.safetensors").exists()


def test_a_run_is_read_without_code_of_its_trackers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fed.storage.run_folder._missing_trackers", set())
    for name in ("one", "two"):
        file = tmp_path / name / "experiment.yaml"
        fed.simulate(
            experiment("synchronous", 2).override({"local.lr": 0.1 if name == "one" else 0.2}), output=file.parent
        )
        text = file.read_text().replace("tracking: null", "tracking: [{kind: 'python:gone:Logger'}]")
        file.write_text(text)
    assert fed.Run.load(tmp_path / "one").experiment.tracking is None
    assert len(fed.compare_runs([tmp_path / "one", tmp_path / "two"], output=tmp_path / "both").rows) == 2
    assert caplog.text.count("; the run is read without its trackers") == 1
    file.write_text(text.replace("kind: fedavg", "kind: nonsense"))
    with pytest.raises(InvalidInput, match=r"algorithm\.kind"):
        fed.Run.load(tmp_path / "two")
