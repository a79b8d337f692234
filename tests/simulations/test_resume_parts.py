"""A run is resumed with the data, the model, the loss and the metric that it began with."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fed
from fed.errors import InvalidInput
from fed.server.observer import Essential
from fed.storage.run_reader import json_of
from tests.simulations.users_parts import Watcher, small, unequal

pytestmark = pytest.mark.usefixtures("device")


def loss(output: Tensor, target: Tensor, *, smoothing: float = 0.0) -> Tensor:
    return nn.functional.cross_entropy(output, target, label_smoothing=smoothing)


def metric(output: Tensor, target: Tensor) -> float:
    return float((output.argmax(1) == target).double().mean())


def moved() -> fed.FederatedData:
    data = unequal()
    inputs, targets = data.train["c3"]
    return fed.FederatedData({**data.train, "c3": (inputs + 1e-6, targets)}, data.test, classes=3)


def broken_off(number: int) -> None:
    if number == 2:
        raise InterruptedError


ONE = fed.Experiment(rounds={"count": 4, "cohort": 3}, checkpoints={"every": 1}, simulation={"workers": 0})
PARTS: dict[str, Callable[[], Any]] = {
    "data": unequal,
    "model": lambda: small,
    "loss": lambda: partial(loss, smoothing=0.1),
    "metric": lambda: metric,
}
OTHERS: dict[str, Callable[[], Any]] = {
    "data": moved,
    "model": lambda: lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)),
    "loss": lambda: partial(loss, smoothing=0.2),
    "metric": lambda: lambda output, target: metric(output, target),
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("begun") / "run"
    with pytest.raises(InterruptedError):
        fed.simulate(
            ONE,
            output=folder,
            observers=[Essential(Watcher(broken_off))],
            **{name: make() for name, make in PARTS.items()},
        )
    return folder


@pytest.mark.parametrize("name", PARTS)
def test_another_part_is_named_and_refused(name: str, begun: Path) -> None:
    parts = {**{key: make() for key, make in PARTS.items()}, name: OTHERS[name]()}
    part = "metrics" if name == "metric" else name
    message = rf"with the {part} that it began with, but the SHA-256 of the {part} is \w{{12}}… in .*, got \w{{12}}…: "
    with pytest.raises(InvalidInput, match=message) as refused:
        fed.simulate(ONE, output=begun, resume=True, **parts)
    assert "\n" not in str(refused.value)
    assert fed.Run.load(begun).summary["status"] == "failed", "the folder is as it was"


def test_the_same_parts_made_again_are_taken(begun: Path, tmp_path: Path) -> None:
    parts = {key: make() for key, make in PARTS.items()}
    folder = shutil.copytree(begun, tmp_path / "run")
    run = fed.simulate(ONE, output=folder, resume=True, **parts)
    whole = fed.simulate(ONE, **{key: make() for key, make in PARTS.items()})
    assert all(map(torch.equal, run.model.state_dict().values(), whole.model.state_dict().values()))


def test_older_folder_is_resumed_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = ONE.override({"data.clients": 5})
    with pytest.raises(InterruptedError):
        fed.simulate(one, output=tmp_path / "run", observers=[Essential(Watcher(broken_off))])
    file = tmp_path / "run" / "environment.json"
    kept = json_of(file)
    assert kept is not None
    assert kept["sha256"].keys() == {"data", "model", "loss", "metrics"}
    assert kept["inputs"] == {"input_shape": [64], "classes": 10, "dtype": "float32"}
    file.write_text('{"given": []}')
    run = fed.simulate(one, output=tmp_path / "run", resume=True)
    assert run.summary["status"] == "finished"
    assert "does not say which data and code it began with, so that these are not checked" in caplog.text


def test_data_that_are_read_again_are_held_to_the_first(tmp_path: Path) -> None:
    """The experiment is the same; the file that it names is another."""
    table = tmp_path / "table.csv"
    rows = [f"{number % 7},{number % 5},{number % 2}" for number in range(60)]
    table.write_text("\n".join(["a,b,label", *rows]) + "\n")
    one = ONE.override(
        {"data": {"kind": "csv", "path": str(table), "label": "label", "clients": 4, "partition": "iid"}}
    )
    with pytest.raises(InterruptedError):
        fed.simulate(one, output=tmp_path / "run", observers=[Essential(Watcher(broken_off))])
    table.write_text("\n".join(["a,b,label", *rows[:-1], "6,4,0"]) + "\n")
    with pytest.raises(InvalidInput, match="resumed with the data that it began with, but the SHA-256 of the data is"):
        fed.simulate(one, output=tmp_path / "run", resume=True)
