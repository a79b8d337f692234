"""Runs that earlier code began go on with today's: the same bits, though code of the package has moved since."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import fed
from fed.aggregators.fedavg import FedAvg
from fed.errors import InvalidExperiment, InvalidInput
from fed.storage.checkpoints import Checkpoints
from tests.simulations import earlier_runs
from tests.simulations.earlier_runs import BROKEN_OFF, CASES, END, FOLDERS, ROUNDS


@pytest.fixture
def begun(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the folder of a run that earlier code began."""
    return shutil.copytree(FOLDERS / request.param, tmp_path / "run")


def resume(case: str, folder: Path, **other: Any) -> fed.Run:
    return fed.simulate(
        earlier_runs.experiment(case), output=folder, resume=True, **{**earlier_runs.parts(case), **other}
    )


@pytest.mark.parametrize(("case", "begun"), [(case, case) for case in CASES], indirect=["begun"])
def test_earlier_run_ends_with_the_bits_of_earlier_code(case: str, begun: Path) -> None:
    resume(case, begun)
    end = json.loads((begun / END).read_text(encoding="utf-8"))
    lines = earlier_runs.lines_of(begun)
    assert len(lines) == ROUNDS
    # later code may measure more
    assert [{key: line[key] for key in known} for line, known in zip(lines, end["metrics"], strict=True)] == end[
        "metrics"
    ]
    assert earlier_runs.model_sha256(begun) == end["model"]


@pytest.mark.parametrize("case", CASES)
def test_earlier_run_is_read(case: str) -> None:
    run = fed.Run.load(FOLDERS / case)
    assert run.summary["status"] == "unfinished"
    assert [line["round"] for line in run.metrics] == [*range(1, BROKEN_OFF + 1)]


def doubled(inner: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def half(output: Tensor, target: Tensor) -> Tensor:
        return 2 * inner(output, target)

    return half


def built_in(kind: str) -> Any:
    section = fed.Experiment(loss=kind).loss
    assert section is not None
    return section.make()


class Wider(earlier_runs.Linear):
    def forward(self, inputs_BF: Tensor) -> Tensor:
        return 2 * super().forward(inputs_BF)


@pytest.mark.parametrize("begun", ["users_loss"], indirect=True)
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("loss", doubled(built_in("mse"))),
        ("loss", earlier_runs.halved(built_in("huber"))),
        ("loss", built_in("mse")),
        ("model", Wider),
        ("metric", {"half": doubled(built_in("mse"))}),
    ],
)
def test_changed_code_of_users_is_still_refused(name: str, part: Any, begun: Path) -> None:
    with pytest.raises(InvalidInput, match=f"but the SHA-256 of the {name}s? is"):
        resume("users_loss", begun, **{name: part})


@pytest.mark.parametrize("begun", ["fedavg"], indirect=True)
def test_another_built_in_loss_is_still_refused(begun: Path) -> None:
    other = earlier_runs.experiment("fedavg").override({"loss": "huber"})
    with pytest.raises(InvalidExperiment, match=r"loss\.kind is mse in .*, got huber"):
        fed.simulate(other, output=begun, resume=True, **earlier_runs.parts("fedavg"))


def other_than(default: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """The keys whose values are not the default's, at every depth."""
    return {
        name: other_than(default[name], value)
        if isinstance(value, dict) and isinstance(default.get(name), dict)
        else value
        for name, value in keys.items()
        if value != default.get(name)
    }


@pytest.mark.parametrize("begun", ["secure"], indirect=True)
def test_key_that_a_checkpoint_lacks_has_its_default(begun: Path) -> None:
    checkpoints = Checkpoints(begun / "checkpoints", ROUNDS)
    kept = checkpoints.newest()
    assert kept is not None
    number, state = kept
    written = state["fingerprint"]
    default = fed.Experiment(secure_aggregation={"max_weight": 1}).dump()
    given = other_than(default, written["experiment"])
    assert given["secure_aggregation"] == {"max_weight": 2, "minimum_cohort": 3}
    checkpoints.write(number, {**state, "fingerprint": {**written, "experiment": given}})
    resume("secure", begun)
    assert earlier_runs.model_sha256(begun) == json.loads((begun / END).read_text(encoding="utf-8"))["model"]


@pytest.mark.parametrize("begun", ["secure"], indirect=True)
def test_key_that_a_checkpoint_lacks_differs_from_another_value(begun: Path) -> None:
    other = earlier_runs.experiment("secure").override({"secure_aggregation.bits": 64})
    with pytest.raises(InvalidExperiment, match=r"secure_aggregation\.bits is 32 in .*, got 64"):
        fed.simulate(other, output=begun, resume=True, **earlier_runs.parts("secure"))


def test_object_is_told_from_another_by_its_text(tmp_path: Path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Own(FedAvg):
        gain: float = 1.0

    def run(gain: float, **more: Any) -> fed.Run:
        keys = {**earlier_runs.BASE, "algorithm": Own(gain=gain), "rounds": {"count": 1}}
        return fed.simulate(fed.Experiment(**keys), output=tmp_path, **earlier_runs.parts("fedavg"), **more)

    run(1.0)
    run(1.0, resume=True)
    with pytest.raises(InvalidExperiment, match=r"algorithm\.kind is object:.*gain=1\.0.*, got object:.*gain=2\.0"):
        run(2.0, resume=True)
