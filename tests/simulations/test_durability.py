"""A run that is interrupted and resumed ends with the same bits as one that never was."""

import math
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import fed
from fed.config import yaml
from fed.errors import InvalidInput
from fed.server.observer import Essential
from fed.simulations.choice import hired
from fed.simulations.simulation import Simulation
from fed.storage.atomic_files import LOCK
from fed.storage.checkpoint_files import file_name, numbers_in
from fed.storage.checkpoints import Checkpoints
from tests.fed.storage.random_trees import same
from tests.simulations import users_parts as parts
from tests.simulations.durable_runs import CASES, DAMAGES, DEVICES, experiment, left_in
from tests.thinned import thinned

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 6
KINDS_OF_ROUNDS = (
    "synchronous",
    "tolerant",
    "buffered",
    "asynchronous",
    "bounded_staleness",
    "scaffold_buffered",
    "choco",
)
QUICK = (
    "tolerant",
    "buffered",
    "bounded_staleness",
    "choco",
    "deepsqueeze",
    "ditto_buffered",
    "scaffold_joining",
    "afl",
    "mimic_buffered",
    "feedback_tolerant",
    "feedback_buffered",
)


class Break(Exception):
    """Of a run, from outside."""


def broken(one: fed.Experiment, folder: Path, after: int, **more: Any) -> None:
    """Begin or resume a run until it is interrupted."""

    def break_off(number: int) -> None:
        if number == after:
            raise Break

    with pytest.raises(Break):
        fed.simulate(
            one, output=folder, observers=[Essential(parts.Watcher(break_off))], resume=folder.exists(), **more
        )


def hold_same(whole: fed.Run, again: fed.Run) -> None:
    assert whole.directory is not None
    assert again.directory is not None
    assert _differing(left_in(again.directory), left_in(whole.directory)) == []
    assert again.models.keys() == whole.models.keys()
    for client, model in whole.models.items():
        assert same_state(model, again.models[client])
    assert _differing(_lines(again), _lines(whole)) == []


def _lines(run: fed.Run) -> dict[int, dict[str, Any]]:
    return {line["round"]: {**line, "wall_s": 0} for line in run.metrics}


def _differing(one: Mapping[Any, object], other: Mapping[Any, object]) -> list[Any]:
    """Keys whose values differ; pytest would take minutes to show how, in runs that are to differ."""
    return [key for key in {**one, **other} if one.get(key) != other.get(key)]


def same_state(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize("case", thinned(QUICK, quick=6))
def test_an_interrupted_run_resumes_to_the_same_bits(case: str, tmp_path: Path) -> None:
    one = experiment(case, ROUNDS)
    whole = fed.simulate(one, output=tmp_path / "whole")
    broken(one, tmp_path / "broken", 3)
    hold_same(whole, fed.simulate(one, output=tmp_path / "broken", resume=True))


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("case", CASES)
def test_so_does_one_that_is_broken_off_at_every_round(case: str, workers: int, tmp_path: Path) -> None:
    one = experiment(case, ROUNDS, simulation={"workers": workers, "group": 3})
    whole = fed.simulate(experiment(case, ROUNDS), output=tmp_path / "whole")
    for after in range(1, ROUNDS + 1):
        broken(one, tmp_path / "broken", after)
    hold_same(whole, fed.simulate(one, output=tmp_path / "broken", resume=True))


IDLE = {
    "buffered": {"losses", "asked", "population"},
    "power_of_choice": {"version", "asked", "population"},
    "bounded_staleness": {"losses", "population"},
    "scaffold_joining": {"losses", "version", "asked"},
    "choco": set(),
}
"""Of what is kept, parts that make no difference to what a case comes to; each makes one in another."""


@pytest.mark.parametrize(
    "case",
    [case if case == "choco" else pytest.param(case, marks=pytest.mark.long) for case in IDLE],
)
def test_every_part_of_what_is_kept_counts(case: str, tmp_path: Path) -> None:
    """A run that went on without one of them would end with other bits, or not at all."""
    # There always, for a run that has forgotten its open tasks waits for their clients.
    always = {"devices": {**DEVICES, "availability": "always", "failure": 0.4}} if case == "bounded_staleness" else {}
    one = experiment(case, 8, **always)
    whole = fed.simulate(one, output=tmp_path / "whole")
    fresh, kept = forgotten(one, tmp_path)
    shutil.copytree(tmp_path / "kept", tmp_path / "unchanged")
    # Were resumption itself broken, every part would seem to count.
    hold_same(whole, fed.simulate(one, output=tmp_path / "unchanged", resume=True))
    idle = set()
    for path in kept:
        folder = tmp_path / "-".join(path)
        shutil.copytree(tmp_path / "kept", folder)
        number, state = checkpoint_in(folder)
        put(state, path, at(fresh, path))
        Checkpoints(folder / "checkpoints", 9).write(number, state)
        try:
            hold_same(whole, fed.simulate(one, output=folder, resume=True))
        except (AssertionError, InvalidInput, TypeError):  # a staleness below 0 has a complex weight
            continue
        idle.add(path[-1])
    assert len(kept) > 1
    assert idle == IDLE[case]


def forgotten(one: fed.Experiment, folder: Path) -> tuple[Any, list[tuple[str, ...]]]:
    """The state of a run before its first round, and in which parts it differs from one that is broken off."""
    broken(one, folder / "kept", 5)
    number, state = checkpoint_in(folder / "kept")
    assert number == 4
    simulation = Simulation(one)
    with hired(simulation) as executor:
        fresh = {"federation": simulation.federation(executor).state()}
    names: list[tuple[str, ...]] = [("federation", name) for name in state["federation"]]
    if "coordinator" in fresh["federation"]:
        names = [(*path, part) for path in names for part in at(state, path) or ()]
    differ = [path for path in names if not same(at(fresh, path), at(state, path))]
    return fresh, differ


def checkpoint_in(folder: Path) -> tuple[int, Any]:
    found = Checkpoints(folder / "checkpoints", 9).newest()
    assert found is not None
    return found


def at(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def put(tree: Any, path: tuple[str, ...], value: Any) -> None:
    at(tree, path[:-1])[path[-1]] = value


# What is begun again, and what is refused


@pytest.mark.parametrize("recorded", [0, 1, 2])
def test_a_run_before_its_first_checkpoint_begins_again(
    recorded: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two rounds have metrics where it dies before the first checkpoint is written."""
    one = experiment("buffered", 4)
    whole = fed.simulate(one, output=tmp_path / "whole")
    broken(one, tmp_path / "run", 2)
    cut(tmp_path / "run", recorded)
    hold_same(whole, fed.simulate(one, output=tmp_path / "run", resume=True))
    assert (f"rounds 1 to {recorded} are repeated" in caplog.text) == bool(recorded)


def cut(folder: Path, rounds: int) -> None:
    """Leave a run as if it were killed after some rounds, before it has written a checkpoint."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    (folder / "summary.json").unlink()
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines[:rounds]))


@pytest.mark.parametrize(
    ("gone", "every", "message"),
    [
        (["checkpoints"], 2, "a run with metrics of 5 rounds needs a checkpoint to be resumed, but .*/checkpoints hol"),
        (["checkpoints"], None, "needs a checkpoint to be resumed, but checkpoints.every is null: restore it, or run"),
        (["checkpoints", "metrics.jsonl"], 2, "a run with metrics of 5 rounds needs a checkpoint to be resumed"),
        (["metrics.jsonl"], 2, r"round-000004.safetensors is newer than metrics.jsonl, which ends with round 0;"),
    ],
)
def test_no_metrics_are_thrown_away_unasked(gone: list[str], every: int | None, message: str, tmp_path: Path) -> None:
    folder, one = tmp_path / "run", experiment("synchronous", ROUNDS, checkpoints={"every": every, "keep": 2})
    broken(one, folder, 5)
    for name in gone:
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).unlink(missing_ok=True)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(fed.errors.InvalidCheckpoint, match=message):
        fed.simulate(one, output=folder, resume=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("lost", [1, 200])
def test_the_newest_checkpoint_within_whole_metrics_is_used(
    lost: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The metrics of rounds 4, or 3 and 4, are lost with their last bytes; the checkpoint of round 4 is there."""
    folder, one = tmp_path / "run", experiment("scaffold", ROUNDS)
    whole = fed.simulate(one, output=tmp_path / "whole")
    broken(one, folder, 5)
    text = b"".join((folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)[:4])
    (folder / "metrics.jsonl").write_bytes(text[:-lost])
    hold_same(whole, fed.simulate(one, output=folder, resume=True))
    assert "metrics.jsonl: the last line is cut short, as a crash leaves it: it is dropped" in caplog.text
    assert "safetensors is newer than metrics.jsonl, which ends with round" in caplog.text
    assert "the checkpoint of round 2 is used" in caplog.text


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_checkpoint_before_a_damaged_one_is_used(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = experiment("buffered", ROUNDS)
    whole = fed.simulate(one, output=tmp_path / "whole")
    broken(one, tmp_path / "broken", 5)
    checkpoints = tmp_path / "broken/checkpoints"
    assert numbers_in(checkpoints) == [2, 4]
    DAMAGES[damage](checkpoints / file_name(4))
    hold_same(whole, fed.simulate(one, output=tmp_path / "broken", resume=True))
    assert f"{checkpoints / file_name(4)} " in caplog.text
    assert "the checkpoint of round 2 is used, and rounds 3 to 5 are repeated" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"local.lr": 0.2}, r"local.lr is 0.1 in .*experiment.yaml, got 0.2: take that back, or run"),
        ({"rounds.count": 9}, r"rounds.count is 4 in"),
        ({"seed": 1}, r"seed is 0 in"),
        ({"simulation.batching": "off"}, r"simulation.batching is on in"),
    ],
)
def test_another_experiment_is_not_gone_on_with(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    one = experiment("synchronous", 4)
    broken(one, tmp_path / "run", 3)
    with pytest.raises(fed.errors.InvalidExperiment, match=message):
        fed.simulate(one.override(change), output=tmp_path / "run", resume=True)
    (tmp_path / "run/experiment.yaml").unlink()
    with pytest.raises(fed.errors.InvalidInput, match=r"experiment.yaml must hold the experiment to resume, got no"):
        fed.simulate(one, output=tmp_path / "run", resume=True)


def test_what_has_no_effect_on_the_bits_may_change(tmp_path: Path) -> None:
    one = experiment("synchronous", 4)
    whole = fed.simulate(one, output=tmp_path / "whole")
    broken(one, tmp_path / "run", 3)
    other = one.override({"checkpoints.every": 1, "checkpoints.keep": 7})
    again = fed.simulate(other, output=tmp_path / "run", resume=True)
    assert left_in(tmp_path / "run") == left_in(tmp_path / "whole")
    hold_same(whole, again)


def test_what_was_given_in_python_must_be_given_again(tmp_path: Path) -> None:
    one = experiment("synchronous", 4)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output, target, label_smoothing=0.1)

    whole = fed.simulate(one, output=tmp_path / "whole", loss=loss)
    broken(one, tmp_path / "run", 3, loss=loss)
    with pytest.raises(fed.errors.InvalidInput, match=r"with loss given .*, got nothing: call fed.simulate\(exp"):
        fed.simulate(one, output=tmp_path / "run", resume=True)
    hold_same(whole, fed.simulate(one, output=tmp_path / "run", resume=True, loss=loss))


def test_another_model_or_other_clients_are_refused(tmp_path: Path) -> None:
    one = experiment("synchronous", 4, data=None, model=None)
    data = {client: (torch.randn(5, 3), torch.randint(2, (5,))) for client in range(6)}
    given: dict[str, Any] = {"data": fed.FederatedData(train=data), "model": lambda: torch.nn.Linear(3, 2)}
    broken(one, tmp_path / "run", 3, **given)
    again: dict[str, Any] = {"output": tmp_path / "run", "resume": True}
    with pytest.raises(fed.errors.InvalidInput, match=r"model.bias is \[2\] in the checkpoint of round 2, got None"):
        fed.simulate(one, **again, **{**given, "model": lambda: torch.nn.Linear(3, 2, bias=False)})
    fewer = fed.FederatedData(train={client: data[client] for client in range(5)})
    with pytest.raises(fed.errors.InvalidInput, match=r"clients is 6 in the checkpoint of round 2, got 5"):
        fed.simulate(one, **again, **{**given, "data": fewer})
    fed.simulate(one, **again, **given)


def test_a_folder_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(fed.errors.InvalidInput, match="resume needs the folder of a run, got none"):
        fed.simulate(experiment("synchronous", 3), resume=True)
    with pytest.raises(fed.errors.InvalidInput, match="must be the folder of a run, got none there"):
        fed.simulate(experiment("synchronous", 3), output=tmp_path, resume=True)


class Overflowing(torch.nn.Linear):
    """Whose scores are not finite outside training."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = super().forward(inputs)
        return output if self.training else output * math.nan


def test_losses_that_are_not_finite_are_summed_up_alike(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"rounds": {"cohort": 5, "evaluate_every": 2}, "simulation": {"batching": "off"}}
    one = experiment("synchronous", 4, model=None, **keys)

    def model() -> torch.nn.Module:
        return Overflowing(64, 10)

    whole = fed.simulate(one, output=tmp_path / "whole", model=model)
    broken(one, tmp_path / "run", 3, model=model)
    fed.simulate(one, output=tmp_path / "run", model=model, resume=True)
    assert left_in(tmp_path / "run") == left_in(tmp_path / "whole")
    assert whole.summary["final_test_accuracy"] is not None


# Processes that are killed


def program(*arguments: str | Path | int, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulations.simulation_deaths", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False, **more)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def written(one: fed.Experiment, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "given.yaml").write_text(yaml.dump(one.dump()), encoding="utf-8")
    return folder / "given.yaml"


@pytest.mark.long
@pytest.mark.parametrize("case", ["ditto_buffered"])
def test_killed_again_and_again_it_ends_with_the_same_bits(case: str, tmp_path: Path) -> None:
    one = experiment(case, 12)
    fed.simulate(one, output=tmp_path / "whole")
    program("killed", written(one, tmp_path), tmp_path / "killed", 2, 0)
    assert left_in(tmp_path / "killed") == left_in(tmp_path / "whole")


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_run_killed_at_random_times_resumes_to_same_bits(case: str, tmp_path: Path) -> None:
    """At twenty points in each kind of rounds; at five where another algorithm is all that differs."""
    one = experiment(case, 40)
    fed.simulate(one, output=tmp_path / "whole")
    for seed in range(4 if case in KINDS_OF_ROUNDS else 1):
        program("killed", written(one, tmp_path / str(seed)), tmp_path / str(seed) / "killed", 5, seed)
        assert left_in(tmp_path / str(seed) / "killed") == left_in(tmp_path / "whole")


@pytest.mark.long
def test_run_killed_between_any_files_resumes_to_same_bits(tmp_path: Path) -> None:
    one = experiment("buffered", 3, checkpoints={"every": 1, "keep": 1})
    fed.simulate(one, output=tmp_path / "whole")
    steps = int(program("stepwise", written(one, tmp_path), tmp_path / "steps").stdout)
    assert steps > 20
    for step in range(1, steps + 1):
        assert left_in(tmp_path / "steps" / str(step)) == left_in(tmp_path / "whole"), step
        hidden = {path.name for path in (tmp_path / "steps" / str(step)).rglob(".*")}
        assert hidden <= {LOCK}, "nothing unfinished stays; a lock whose process died is open"
