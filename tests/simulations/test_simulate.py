"""Properties of whole runs: reproducible, independent of the order of replies, honest about what happened."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fed
from fed.aggregators.base import Aggregator, ClientWork, Reduced, Report
from fed.aggregators.fedavg import FedAvg, State
from fed.errors import Diverged, InvalidData, InvalidExperiment, InvalidModel, OutputExists
from fed.server.evaluation import ScoringByClients, ScoringByCoordinator
from fed.server.training_loop import Scores
from fed.simulations.fleet import SimulatedFleet
from fed.simulations.simulate import simulate
from fed.simulations.simulation import Simulation
from fed.wire.messages import Answer
from tests.thinned import thinned

pytestmark = pytest.mark.usefixtures("device")

MEASURED = {"wall_s"}
SMALL: dict[str, Any] = {
    "data": {"kind": "digits", "clients": 12, "partition": {"kind": "dirichlet", "alpha": 0.5}},
    "model": {"kind": "mlp", "hidden": [8]},
    "rounds": {"count": 4, "cohort": 5},
}
ALL = {"rounds.cohort": "all"}
EVERY_ALGORITHM = ["fedavg", "fedprox", "fedavgm", "bmuf", "dpsgd", "local", "centralized"]


def bits(run: fed.Run) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in run.model.state_dict().values()]


def repeatable(run: fed.Run) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name not in MEASURED} for line in run.metrics]


@pytest.mark.parametrize("kind", thinned(EVERY_ALGORITHM, quick=3))
def test_same_seed_gives_same_bits_and_another_does_not(kind: str) -> None:
    experiment = fed.Experiment(**SMALL, algorithm={"kind": kind}).override(ALL if kind == "dpsgd" else {})
    torch.manual_seed(1)
    first = simulate(experiment)
    torch.manual_seed(2)
    np.random.seed(2)
    second = simulate(experiment)
    assert bits(first) == bits(second)
    assert repeatable(first) == repeatable(second)
    assert bits(first) != bits(simulate(experiment.override({"seed": 1})))


def test_a_run_leaves_the_global_generators_and_threads_alone() -> None:
    torch.manual_seed(7)
    before, threads = torch.random.get_rng_state(), torch.get_num_threads()
    simulate(fed.Experiment(**SMALL))
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("kind", ["fedavg", "fedavgm"])
def test_the_order_of_replies_does_not_matter(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = fed.Experiment(**SMALL, algorithm={"kind": kind}, local={"epochs": 2}, simulation={"group": 2})
    in_order = simulate(experiment)
    collect = SimulatedFleet.collect
    shuffler = np.random.default_rng(0)

    def shuffled(fleet: SimulatedFleet, until: float = float("inf"), enough: int | None = None) -> Iterator[Answer]:
        answers = list(collect(fleet, until, enough))
        yield from (answers[index] for index in shuffler.permutation(len(answers)))

    monkeypatch.setattr(SimulatedFleet, "collect", shuffled)
    out_of_order = simulate(experiment)
    assert bits(in_order) == bits(out_of_order)
    assert repeatable(in_order) == repeatable(out_of_order)


def test_metrics_and_summary_hold_what_is_promised() -> None:
    run = simulate(fed.Experiment(**SMALL, name="small", seed=3))
    size = sum(parameter.numel() for parameter in run.model.parameters())
    assert [line["round"] for line in run.metrics] == [1, 2, 3, 4]
    for line in run.metrics:
        assert {
            *("round", "virtual_s", "wall_s", "test_accuracy", "test_loss", "train_loss", "bytes_up", "bytes_down"),
            *("selected", "replied", "late", "failed", "staleness_mean"),
        } <= set(line)
        assert (line["selected"], line["replied"], line["late"], line["failed"]) == (5, 5, 0, 0)
        assert line["bytes_up"] == line["bytes_down"] == 5 * 4 * size
    assert run.summary["parameters"] == size == 64 * 8 + 8 + 8 * 10 + 10
    assert run.summary["bytes_up"] == sum(line["bytes_up"] for line in run.metrics)
    assert run.summary["final_test_accuracy"] == run.metrics[-1]["test_accuracy"]
    assert (run.summary["experiment"], run.summary["seed"], run.summary["clients"]) == ("small", 3, 12)
    assert (run.summary["rounds"], run.summary["status"]) == (4, "finished")
    assert run.directory is None


@pytest.mark.parametrize(("batching", "said"), [("on", "batched: up to "), ("off", "one client at a time: ")])
def test_the_log_says_how_clients_train(batching: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="fed")
    simulate(fed.Experiment(rounds={"count": 1}, data={"clients": 4}, simulation={"batching": batching}))
    assert any(message.startswith(f"training: {said}") for message in caplog.messages)


def test_freed_memory_is_kept_in_a_program_too(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned: list[tuple[tuple[int, int], ...]] = []
    monkeypatch.setattr("fed.processes.machine._tune", lambda *settings: tuned.append(settings))
    simulate(fed.Experiment(rounds={"count": 1}, data={"clients": 4}, simulation={"workers": 0}))
    assert tuned == [((-3, 32 << 20), (-1, 256 << 20))]  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of mallopt(3)


def test_virtual_time_comes_from_work_and_bytes() -> None:
    def pair(samples: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(samples, 2), torch.zeros(samples, dtype=torch.int64)

    data = fed.FederatedData({0: pair(10), 1: pair(30)}, pair(1))
    experiment = fed.Experiment(local={"epochs": 2}, rounds={"count": 3})
    run = simulate(experiment, data=data, model=lambda: nn.Linear(2, 1))
    size_bytes = 4 * 3
    slowest = 2 * 0.05 + 2 * 30 / 1000 + size_bytes / 5e6 + size_bytes / 1.25e6
    assert [line["virtual_s"] for line in run.metrics] == pytest.approx([slowest, 2 * slowest, 3 * slowest])


def test_evaluate_every_evaluates_then_and_at_the_end() -> None:
    run = simulate(fed.Experiment(**SMALL).override({"rounds.count": 5, "rounds.evaluate_every": 2}))
    assert [line["test_accuracy"] is not None for line in run.metrics] == [False, True, False, True, True]


class Normalised(nn.Module):
    """A BatchNorm between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs


def test_float_buffers_are_the_weighted_mean_of_the_clients() -> None:
    generator = torch.Generator().manual_seed(0)
    data = fed.FederatedData(
        {
            client: (torch.randn(samples, 3, generator=generator).double(), torch.zeros(samples, dtype=torch.int64))
            for client, samples in enumerate((4, 12))
        }
    )
    experiment = fed.Experiment(
        algorithm={"kind": "fedavgm", "momentum": 0.9, "server_lr": 3.0},
        local={"steps": 1, "batch_size": 100},
        rounds={"count": 2},
    )
    run = simulate(experiment, data=data, model=lambda: nn.BatchNorm1d(3).double())
    mean = torch.zeros(3, dtype=torch.float64)
    for _ in range(2):
        mean = sum(
            len(inputs) / 16 * (0.9 * mean + 0.1 * inputs.mean(0)) for inputs, _ in data.train.values()
        ) + torch.zeros(3)
    assert torch.allclose(run.model.get_buffer("running_mean"), mean, rtol=0, atol=1e-14)


def test_float64_stays_float64_all_the_way() -> None:
    data = fed.FederatedData({0: (torch.randn(8, 2).double(), torch.zeros(8, dtype=torch.int64))})
    run = simulate(fed.Experiment(rounds={"count": 2}, model={"kind": "mlp", "hidden": [3]}), data=data)
    assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float64}


def test_a_users_loss_takes_any_target_without_accuracy() -> None:
    pair = (torch.randn(10, 3), torch.randn(10, 2))
    data = fed.FederatedData({"a": pair, "b": pair}, pair)
    experiment = fed.Experiment(rounds={"count": 3})
    run = simulate(experiment, data=data, model=lambda: nn.Linear(3, 2), loss=nn.functional.mse_loss)
    assert [line["test_accuracy"] for line in run.metrics] == [None] * 3
    assert run.metrics[-1]["test_loss"] < run.metrics[0]["test_loss"]

    def within_one(output: Tensor, target: Tensor) -> Tensor:
        return ((output - target).abs() < 1).double().mean()

    run = simulate(experiment, data=data, model=lambda: nn.Linear(3, 2), loss=nn.functional.mse_loss, metric=within_one)
    assert 0 <= run.summary["final_test_accuracy"] <= 1


def test_a_model_factory_that_returns_one_module_keeps_it_untouched() -> None:
    module = nn.Linear(64, 10)
    before = module.weight.detach().clone()
    simulate(fed.Experiment(**SMALL).override({"model": None}), model=lambda: module)
    assert torch.equal(module.weight, before)


def test_the_run_folder_holds_the_run(tmp_path: Path) -> None:
    run = simulate(fed.Experiment(**SMALL), output=tmp_path / "run")
    assert run.directory == tmp_path / "run"
    assert {path.name for path in run.directory.iterdir()} == {
        *(
            "experiment.yaml",
            "environment.json",
            "metrics.jsonl",
            "participation.jsonl",
            "clients.jsonl",
            "summary.json",
            "model.safetensors",
            "population.json",
        )
    }
    assert fed.Experiment.load(run.directory / "experiment.yaml") == run.experiment
    lines = (run.directory / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == run.metrics
    assert json.loads((run.directory / "summary.json").read_text()) == run.summary
    stored = load_file(run.directory / "model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in run.model.state_dict().items())
    with pytest.raises(OutputExists, match="--overwrite"):
        simulate(fed.Experiment(**SMALL), output=tmp_path / "run")


def poisoned(at: int) -> fed.FederatedData:
    """Client "bad" has inputs so large that its loss overflows after some steps."""
    good = (torch.randn(8, 2), torch.randint(2, (8,)))
    return fed.FederatedData({"good": good, "bad": (good[0] * 10.0**at, good[1])}, good)


@pytest.mark.parametrize("kind", ["fedavg", "dpsgd", "local"])
def test_nan_loss_stops_the_run_and_keeps_last_model(kind: str, tmp_path: Path) -> None:
    experiment = fed.Experiment(
        algorithm={"kind": kind}, rounds={"count": 9}, local={"lr": 1e30, "epochs": 3, "batch_size": 4}
    )
    with pytest.raises(Diverged, match=r"round 1, client 'bad'.*last good model is kept.*local\.lr") as caught:
        simulate(experiment, data=poisoned(8), model=lambda: nn.Linear(2, 2), output=tmp_path / "run")
    assert "\n" not in str(caught.value)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("failed", 0)
    assert "client 'bad'" in summary["reason"]
    stored = load_file(tmp_path / "run" / "model.safetensors")
    assert all(bool(torch.isfinite(tensor).all()) for tensor in stored.values())


@pytest.mark.parametrize("batching", ["on", "off"])
def test_overflowing_report_stops_the_run_and_names_the_client(batching: str) -> None:
    """The loss of client 2 is 1e10, and finite; its power is not."""
    data = fed.FederatedData(
        {client: (torch.ones(2, 1), torch.full((2,), 1e10 if client == 2 else 1.0)) for client in range(4)}
    )
    experiment = fed.Experiment(
        algorithm={"kind": "qfedavg", "q": 40.0}, rounds={"count": 1}, simulation={"batching": batching}
    )
    with pytest.raises(Diverged, match="round 1, client 2: what it reports is not finite"):
        simulate(
            experiment,
            data=data,
            model=lambda: nn.Linear(1, 1),
            loss=lambda output, target: (1e-9 * output + target[:, None]).mean(),
        )


def labelled(targets: list[int]) -> fed.FederatedData:
    pair = (torch.zeros(2, 3), torch.tensor([0, 1]))
    return fed.FederatedData({0: pair, 7: (torch.zeros(len(targets), 3), torch.tensor(targets))}, pair)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            {"data": labelled([0, 5]), "model": lambda: nn.Linear(3, 2)},
            InvalidData,
            "client 7 must be in 0 … 1.* got 5",
        ),
        ({"data": labelled([-1, 1])}, InvalidData, "client 7 must be in .* got -1"),
        ({"data": labelled([0, 1]), "model": lambda: nn.Linear(4, 2)}, InvalidModel, "cannot take the data's"),
        ({"data": labelled([0, 1]), "model": nn.Flatten}, InvalidModel, "must have parameters to train"),
        ({"data": labelled([0, 1]), "model": lambda: 3}, InvalidModel, r"must make a torch\.nn\.Module, got int"),
        (
            {"data": labelled([0, 1]), "model": nn.Linear},
            InvalidModel,
            r"a function without arguments .*, got <class .*Linear'>, whose call raised .*: 'in_features'",
        ),
        ({"data": labelled([0, 1]), "model": 3}, InvalidModel, "got 3, whose call raised TypeError: 'int' object is"),
        (
            {"data": labelled([0, 1]), "model": lambda: nn.LazyLinear(2)},
            InvalidModel,
            "got weight of a lazy module",
        ),
        (
            {"data": labelled([0, 1]), "loss": lambda output, target: output},
            InvalidModel,
            "must be a scalar tensor",
        ),
        (
            {"data": labelled([0, 1]), "loss": lambda output, target: output.detach().sum()},
            InvalidModel,
            r"must have a gradient, .* leave \.detach",
        ),
    ],
)
def test_parts_that_do_not_fit_are_one_sentence(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        simulate(fed.Experiment(rounds={"count": 1}), **given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "given", "problem"),
    [
        (
            {"model": "mlp"},
            {"model": lambda: nn.Linear(3, 2)},
            "model must be given once, got mlp in the .* and model= in",
        ),
        (
            {"model": {"train": ["head.*"]}},
            {"model": lambda: nn.Linear(3, 2)},
            "model must be given once, .* and set requires_grad to False in the model itself in place of train",
        ),
        ({"data": {"kind": "digits"}}, {"data": labelled([0, 1])}, "data must be given once, got digits"),
        ({"loss": "mse"}, {"loss": nn.functional.mse_loss}, "loss must be given once, got mse"),
        (
            {"metrics": ["mse", "mae"]},
            {"metric": lambda *_: 0.0},
            "metrics must .*, got mse, mae .* leave out metric=, or",
        ),
        (
            {"app": {"kind": "python:mine:App", "clients": 2}},
            {"app": object},
            "app.kind must .*, got python:mine:App .* app.kind: null",
        ),
    ],
)
def test_a_part_is_not_given_twice(keys: dict[str, Any], given: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidExperiment, match=problem):
        simulate(fed.Experiment(**keys), **given)


def test_float_targets_without_a_loss_are_refused() -> None:
    for targets in (torch.tensor([0.5, 1]), torch.tensor([-1.0, 1]), torch.tensor([250_000.0, 1])):
        data = fed.FederatedData({0: (torch.zeros(2, 3), targets)})
        with pytest.raises(InvalidData, match=r"integer labels.*loss="):
            simulate(fed.Experiment(rounds={"count": 1}), data=data)


def test_a_cohort_above_the_population_is_refused() -> None:
    with pytest.raises(InvalidExperiment, match=r"rounds\.cohort must be at most 12.*got 13"):
        simulate(fed.Experiment(**SMALL).override({"rounds.cohort": 13}))


def test_too_few_candidates_are_refused_before_the_first_round() -> None:
    sampling = {"kind": "power_of_choice", "candidates": 4}
    with pytest.raises(InvalidExperiment, match="candidates must be at least the cohort of 5, got 4"):
        Simulation(fed.Experiment(**SMALL).override({"rounds.sampling": sampling}))


def test_null_sections_need_python_objects() -> None:
    with pytest.raises(InvalidExperiment, match="data"):
        simulate(fed.Experiment(data=None))
    with pytest.raises(InvalidExperiment, match="model"):
        simulate(fed.Experiment(**{**SMALL, "model": None}))


def test_single_sample_under_batch_norm_names_its_client() -> None:
    pair = (torch.randn(4, 64), torch.randint(10, (4,)))
    data = fed.FederatedData({"many": pair, "lonely": (pair[0][:1], pair[1][:1])})
    with pytest.raises(InvalidData, match="2 samples or more on every client, got 1 on client 'lonely'"):
        simulate(fed.Experiment(rounds={"count": 1}), data=data, model=Normalised)


def test_users_model_error_names_the_training_client() -> None:
    class Fragile(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            if self.training:
                raise RuntimeError("no training today")
            return super().forward(inputs)

    with pytest.raises(RuntimeError, match="no training today") as caught:
        simulate(fed.Experiment(**SMALL).override({"model": None}), model=lambda: Fragile(64, 10))
    assert "of round 1 trained" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("evaluation", "scores"), [("coordinator", ScoringByCoordinator), ("clients", ScoringByClients)]
)
def test_interruption_after_training_keeps_the_last_measured_model(
    evaluation: str, scores: type[ScoringByCoordinator], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[int] = []
    found = scores.scores

    def interrupted(scoring: ScoringByCoordinator) -> Scores:
        scored.append(1)
        if len(scored) == 3:  # the third round has trained and moved the model, and is not recorded yet
            raise KeyboardInterrupt
        return found(scoring)

    for kind in ("fedavg", "dpsgd"):
        keys = {"algorithm": {"kind": kind}, "evaluation": evaluation, "simulation": {"workers": 0}}
        experiment = fed.Experiment(**SMALL, **keys).override(ALL if kind == "dpsgd" else {})
        scored.clear()
        monkeypatch.setattr(scores, "scores", interrupted)
        with pytest.raises(KeyboardInterrupt):
            simulate(experiment, output=tmp_path / kind)
        summary = json.loads((tmp_path / kind / "summary.json").read_text())
        assert (summary["status"], summary["rounds"]) == ("interrupted", 2)
        monkeypatch.setattr(scores, "scores", found)
        two = simulate(experiment.override({"rounds.count": 2}))
        stored = load_file(tmp_path / kind / "model.safetensors")
        assert all(torch.equal(stored[name], tensor) for name, tensor in two.model.state_dict().items())


class _Forgetful(Aggregator):
    """An aggregator of a user's own, whose state is a plain tuple."""

    def init(self, params_P: Tensor) -> tuple[Tensor]:
        return (params_P,)

    def model_to_send(self, state: tuple[Tensor]) -> Tensor:
        return state[0]

    def apply(self, state: tuple[Tensor], reduced: Reduced) -> tuple[Tensor]:
        return (state[0] + reduced.update_P,)


class _Growing(FedAvg):
    """An aggregator of a user's own whose model becomes a matrix."""

    def apply(self, state: State, reduced: Reduced) -> State:
        return State(super().apply(state, reduced).model_P.unsqueeze(0))


class _Bare(FedAvg):
    """An aggregator of a user's own that reports no Report."""

    def report(self, work: ClientWork) -> Any:
        return work.update_KP


class _Scalar(FedAvg):
    """An aggregator of a user's own whose message has no row for each client."""

    def report(self, work: ClientWork) -> Report:
        return Report((work.update_KP, work.update_KP.sum()), work.samples_K1)


class _NoRule:
    """A class that keeps neither contract."""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "_Forgetful",
            r"_Forgetful.init must return a named tuple whose model_P is .*, got tuple: correct _Forgetful.i",
        ),
        (
            "_Growing",
            r"_Growing.apply must .* of shape \(\d+,\), got model_P of shape \(1, \d+\): correct _Growing.apply",
        ),
        ("_Bare", r"_Bare.report must return a Report .*, got Tensor: correct _Bare.report"),
        ("_Scalar", r"_Scalar.report must .*, got part 1 of the message as Tensor: correct _Scalar.report"),
        ("_NoRule", "must make a fed.aggregators.base.Aggregator or fed.aggregators.peer_rule.PeerRule"),
    ],
)
def test_an_algorithm_that_keeps_no_contract_is_one_sentence(name: str, message: str) -> None:
    with pytest.raises(InvalidExperiment, match=message):
        simulate(fed.Experiment(**SMALL, algorithm={"kind": f"python:{__name__}:{name}"}))


def test_a_folder_of_the_users_own_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "experiment.yaml").write_text("mine")
    with pytest.raises(OutputExists):
        simulate(fed.Experiment(**SMALL), output=tmp_path, overwrite=True)
    assert (tmp_path / "experiment.yaml").read_text() == "mine"


def test_a_path_in_place_of_an_experiment_is_one_sentence() -> None:
    with pytest.raises(InvalidExperiment, match=r"must be a fed\.Experiment, got str"):
        simulate("base.yaml")  # type: ignore[arg-type]  # the mistake


class Masked(nn.Module):
    """Reader of words that needs a mask, and may do without positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)

    def forward(self, words: Tensor, mask: Tensor, positions: Tensor | None = None) -> Tensor:
        states: Tensor = self.embed(words) * mask[..., None]
        return states.sum(1)


def test_a_mask_that_the_collate_lacks_is_named() -> None:
    data = fed.FederatedData({0: ({"words": [[1], [2, 3]]}, [0, 1])})
    said = r"needs mask, got inputs with words alone: .* or write collate: \{kind: pad, mask: mask\}"
    with pytest.raises(InvalidModel, match=said):
        simulate(fed.Experiment(model=None, collate="pad"), data=data, model=Masked)
    experiment = fed.Experiment(model=None, collate={"kind": "pad", "mask": "mask"}, rounds={"count": 1})
    assert simulate(experiment, data=data, model=Masked).summary["status"] == "finished"


def test_samples_without_clients_lead_to_partition() -> None:
    samples: Any = (torch.zeros(2, 3), torch.tensor([0, 1]))
    with pytest.raises(InvalidData, match=r"got tuple: write .* fed\.partition"):
        simulate(fed.Experiment(), data=samples)


def test_a_printed_run_has_short_scores_of_its_metrics_alone() -> None:
    run = simulate(
        fed.Experiment(rounds={"count": 1}),
        data=labelled([0, 1]),
        loss=nn.functional.cross_entropy,
        metric={"error": lambda output, target: torch.tensor(2 / 3)},
    )
    assert "final_test_error=0.6667" in repr(run)
    assert "final_test_accuracy" not in repr(run)
    assert run.summary["final_test_error"] == pytest.approx(2 / 3)
