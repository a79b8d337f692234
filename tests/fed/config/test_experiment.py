"""The description of a run: what it takes, what it refuses and how it says so, and what an override changes."""

import copy
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from pydantic import ValidationError

from fed.config import yaml
from fed.config.experiment import Experiment, Local, with_overrides
from fed.errors import InvalidExperiment

PERSONAL = "python:tests.simulations.users_parts:Personal"
DIGITS = """
name: digits
seed: 0
data: {kind: digits, clients: 100, partition: {kind: dirichlet, alpha: 0.3}, test_fraction: 0.2}
model: {kind: mlp, hidden: [128]}
local: {optimizer: sgd, lr: 0.1, momentum: 0.0, batch_size: 16, epochs: 1}    # or steps: 20
algorithm: {kind: fedavg}
rounds: {kind: synchronous, count: 50, cohort: 10, evaluate_every: 1}
"""


class Logger:
    """A tracker of a user's own."""

    def begin(self, run: object) -> None: ...

    def log(self, number: int, values: object) -> None: ...


def experiment(**keys: Any) -> Experiment:
    return Experiment(**keys)


def problems(**keys: Any) -> list[str]:
    """The lines of the error that these keys are."""
    with pytest.raises(InvalidExperiment) as caught:
        experiment(**keys)
    return str(caught.value).splitlines()


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "digits.yaml"
    path.write_text(DIGITS)
    return path


# Any experiment, as its keys: some given, some not.
rates = st.floats(1e-6, 10) | st.integers(1, 3)
counts = st.integers(1, 500)
names = st.text("abcß .:#-1e", min_size=1, max_size=8)


def section(required: dict[str, st.SearchStrategy[Any]], **optional: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(required, optional=optional)


def kind(name: str, **optional: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return section({"kind": st.just(name)}, **optional)


partitions = st.one_of(
    kind("iid", overlap=st.floats(0, 3)),
    kind("dirichlet", alpha=rates, min_samples=counts),
    kind("shards", classes_per_client=counts),
    kind("quantity"),
    *(kind(name, by=names, overlap=st.floats(0, 3)) for name in ("range", "hash", "rank")),
    kind("natural"),
    kind("file"),
)
shared = {"clients": counts, "partition": partitions, "test_fraction": st.floats(0, 0.9)}
table = {"label": names, "client": names, "classes": counts}
data_sections = st.one_of(
    kind("digits", **shared),
    kind("synthetic", alpha=rates, beta=rates, **shared),
    section({"kind": st.just("idx"), "path": names}, **shared),
    section({"kind": st.just("text"), "path": names}, sequence_length=counts, min_samples=counts, **shared),
    section({"kind": st.sampled_from(["csv", "npz"]), "path": names}, **shared, **table),
)
models = st.one_of(
    kind("logistic"),
    kind("mlp", hidden=st.lists(counts, max_size=3)),
    kind("cnn", channels=st.lists(counts, max_size=3), hidden=counts),
    kind("char_gru", embedding=counts, hidden=counts, layers=counts),
    kind("char_transformer", width=counts, heads=counts, layers=counts),
)
shares = st.floats(0, 0.99)
common = {"lr": rates, "weight_decay": shares, "batch_size": counts, "accumulate": counts}
common["precision"] = st.sampled_from(["float32", "tf32", "bfloat16", "float16"])
locals_ = st.one_of(
    section({}, optimizer=st.just("sgd"), momentum=shares, epochs=counts, **common),
    section({"momentum": st.floats(0.01, 0.99), "nesterov": st.booleans()}, steps=counts, **common),
    section(
        {"optimizer": st.sampled_from(["adam", "adamw"])},
        betas=st.lists(shares, min_size=2, max_size=2),
        eps=rates,
        **common,
    ),
)
over_mean = st.one_of(
    kind("fedavg"),
    kind("fedprox", mu=rates),
    kind("fedavgm", momentum=shares, server_lr=rates),
    kind("bmuf", block_momentum=shares, block_lr=rates, nesterov=st.booleans()),
    kind("local"),
    kind("centralized"),
)
over_mix = kind("dpsgd", order=st.sampled_from(["combine_then_adapt", "adapt_then_combine"]))
topologies = st.none() | st.one_of(kind("ring"), kind("complete"), kind("exponential"))
rounds = kind("synchronous", count=counts, cohort=counts | st.just("all"), evaluate_every=counts)
evaluations = kind("coordinator") | kind("clients", fraction=st.floats(0.01, 0.99))
executions = section(
    {}, batching=st.sampled_from(["auto", "on", "off"]), group=counts, workers=st.integers(0, 64) | st.just("auto")
)
others = {
    "name": names,
    "seed": st.integers(0, 2**70),
    "data": st.none() | data_sections,
    "model": st.none() | models,
    "local": locals_,
    "rounds": rounds,
    "evaluation": evaluations,
    "simulation": executions,
}
experiments = st.one_of(
    section({}, algorithm=over_mean, topology=st.none(), **others),
    section({"algorithm": over_mix}, topology=topologies, **others),
)


def test_a_file_loads_with_these_very_keys(written: Path) -> None:
    loaded, given_keys = Experiment.load(written), yaml.parse(DIGITS)
    assert holds(loaded.dump(), given_keys)
    assert not holds(loaded.dump(), with_overrides(given_keys, {"data.partition.alpha": 0.4}))
    assert loaded == Experiment.load(str(written)) == experiment(**given_keys)


def holds(dumped: Any, keys: Any) -> bool:
    """Whether a dump shows these keys, perhaps among others."""
    if isinstance(keys, dict):
        return all(name in dumped and holds(dumped[name], inner) for name, inner in keys.items())
    return bool(dumped == keys)


def test_dump_shows_defaults_of_sections_left_out() -> None:
    dumped = experiment().dump()
    assert list(dumped) == list(Experiment.model_fields)
    assert dumped["data"] == {
        "kind": "digits",
        "clients": 100,
        "partition": {"kind": "iid", "overlap": 0.0},
        "test_fraction": 0.2,
        "fold": None,
    }
    assert dumped["evaluation"] == {"kind": "coordinator", "peers": 16, "samples": 250}
    assert (dumped["topology"], dumped["uplink"], dumped["rounds"]["cohort"]) == (None, [], "all")


@given(experiments)
def test_what_is_dumped_is_loaded_as_the_same(tmp_path_factory: pytest.TempPathFactory, keys: dict[str, Any]) -> None:
    keys_before = copy.deepcopy(keys)
    first = experiment(**keys)
    assert holds(first.dump(), keys)
    assert keys == keys_before, "what was given is left alone"
    path = tmp_path_factory.mktemp("dumped") / "experiment.yaml"
    path.write_text(yaml.dump(first.dump()), encoding="utf-8")
    second = Experiment.load(path)
    assert second == first
    assert second.dump() == first.dump()
    assert second.override({}) == first


# Keys that bear on each other, so that any of them may meet any other.
VALUES: dict[str, list[Any]] = {
    "local": [{}, {"lr": 0.5}],
    "local.epochs": [3, None],
    "local.steps": [7, None],
    "data": [None, {"kind": "synthetic"}, {"kind": "digits"}],
    "data.kind": ["digits", "synthetic", "csv"],
    "data.path": ["table.csv"],
    "data.client": ["who"],
    "data.clients": [5],
    "data.partition": [None, {"kind": "iid"}],
    "data.partition.kind": ["iid", "natural", "shards"],
    "algorithm.kind": ["fedavg", "dpsgd", PERSONAL],
    "topology.kind": ["ring", "complete"],
    "topology": [None],
    "evaluation": [{"kind": "coordinator"}, {"kind": "clients", "fraction": 0.5}],
    "evaluation.kind": ["coordinator", "clients"],
    "evaluation.fraction": [0.1],
}
changes_of_keys = st.lists(st.sampled_from(list(VALUES)), unique=True, max_size=5).flatmap(
    lambda paths: st.fixed_dictionaries({path: st.sampled_from(VALUES[path]) for path in paths})
)


@given(changes_of_keys, changes_of_keys)
def test_an_override_is_the_keys_written_otherwise(first: dict[str, Any], then: dict[str, Any]) -> None:
    """Two routes to the same: a default that came in with other keys does not stand in the way of a new value."""
    keys = with_overrides({}, first)
    try:
        base = experiment(**keys)
    except InvalidExperiment:
        reject()
    before = base.dump()
    assert outcome(lambda: base.override(then)) == outcome(lambda: experiment(**with_overrides(keys, then)))
    assert base.dump() == before


def outcome(make: Callable[[], Experiment]) -> Experiment | set[str]:
    """What was made, or all that is wrong with it, in whatever order the keys stood."""
    try:
        return make()
    except InvalidExperiment as error:
        return set(str(error).splitlines())


def test_dotted_path_changes_a_key_and_mapping_a_section() -> None:
    first = experiment(local={"lr": 0.5, "batch_size": 4}, rounds={"count": 3, "cohort": 2})
    dotted = first.override({"local.lr": 0.25, "rounds.count": 9})
    assert (dotted.local.lr, dotted.local.batch_size) == (0.25, 4)
    assert dotted.rounds.model_dump(exclude_unset=True) == {"kind": "synchronous", "count": 9, "cohort": 2}
    whole = first.override({"local": {"lr": 0.25}})
    assert (whole.local.lr, whole.local.batch_size) == (0.25, Local().batch_size)


def test_sections_on_the_way_to_a_key_are_created() -> None:
    changed = experiment(data=None).override({"data.partition.kind": "shards", "data.kind": "digits"})
    assert changed.data is not None
    assert (changed.data.kind, changed.dump()["data"]["partition"]["kind"]) == ("digits", "shards")
    assert experiment().override({"algorithm.kind": "fedprox", "algorithm.mu": 1}).dump()["algorithm"]["mu"] == 1
    assert with_overrides({}, {"a.b.c": 1, "a.b.d": 2, "a.e": 3}) == {"a": {"b": {"c": 1, "d": 2}, "e": 3}}
    assert with_overrides({"a": 5}, {"a.b": 1}) == {"a": {"b": 1}}
    assert with_overrides({}, {"a.b": 1, "a": {"c": 2}, "a.d": 3}) == {"a": {"c": 2, "d": 3}}, "in their order"


def test_a_short_kind_stays_when_its_key_is_set() -> None:
    keys = {"local": {"schedule": "cosine"}, "rounds": {"sampling": "power_of_choice"}, "evaluation": "clients"}
    values = {"local.schedule.warm_up": 2, "rounds.sampling.candidates": 30, "evaluation.fraction": 0.3}
    dumped = experiment(**with_overrides(keys, values)).dump()
    assert dumped["local"]["schedule"] == {"kind": "cosine", "warm_up": 2, "end": 0.0}
    assert dumped["rounds"]["sampling"] == {"kind": "power_of_choice", "candidates": 30}
    assert dumped["evaluation"] == {"kind": "clients", "fraction": 0.3}
    assert with_overrides({}, {"evaluation": "clients", "evaluation.fraction": 0.3})["evaluation"]["kind"] == "clients"
    assert with_overrides(keys, {"local.schedule.kind": "step"})["local"] == {"schedule": {"kind": "step"}}


def test_an_override_shares_nothing_with_what_it_was_given() -> None:
    hidden = [8, 4]
    keys = {"model": {"kind": "mlp", "hidden": hidden}}
    changed = with_overrides(keys, {"model.hidden": hidden, "rounds": keys})
    hidden.append(1)
    keys["model"]["kind"] = "cnn"
    assert changed == {
        "model": {"kind": "mlp", "hidden": [8, 4]},
        "rounds": {"model": {"kind": "mlp", "hidden": [8, 4]}},
    }


def test_an_override_may_choose_steps_where_nobody_chose_epochs() -> None:
    assert experiment(local={"lr": 0.1}).override({"local.steps": 20}).local.epochs is None
    with pytest.raises(InvalidExperiment, match="give epochs or steps, not both, got epochs=3 and steps=20"):
        experiment(local={"epochs": 3}).override({"local.steps": 20})
    assert experiment(local={"epochs": 3}).override({"local.steps": 20, "local.epochs": None}).local.steps == 20


def test_an_override_of_the_source_brings_its_own_defaults() -> None:
    first = experiment(data={"kind": "digits", "test_fraction": 0.5})
    assert first.override({"data.kind": "synthetic"}) == experiment(data={"kind": "synthetic", "test_fraction": 0.5})


@pytest.mark.parametrize(
    ("keys", "clients", "partition"),
    [
        ({}, 100, "iid"),
        ({"kind": "digits"}, 100, "iid"),
        ({"kind": "digits", "clients": 7}, 7, "iid"),
        ({"kind": "digits", "clients": None, "partition": None}, 100, "iid"),
        ({"kind": "synthetic"}, 30, "natural"),
        ({"kind": "synthetic", "partition": {"kind": "iid"}}, 30, "iid"),
        ({"kind": "text", "path": "play.txt"}, None, "natural"),
        ({"kind": "text", "path": "play.txt", "partition": {"kind": "shards"}}, 100, "shards"),
        ({"kind": "csv", "path": "table.csv"}, 100, "iid"),
        ({"kind": "csv", "path": "table.csv", "client": "who"}, None, "natural"),
        ({"kind": "npz", "path": "tables", "partition": {"kind": "file"}}, None, "file"),
        ({"kind": "npz", "path": "tables", "partition": {"kind": "file"}, "clients": 9}, 9, "file"),
    ],
)
def test_clients_and_partition_follow_from_the_source(
    keys: dict[str, Any], clients: int | None, partition: str
) -> None:
    dumped = experiment(data=keys).dump()["data"]
    assert (dumped["clients"], dumped["partition"]["kind"]) == (clients, partition)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, (1, None)),
        ({"epochs": 3}, (3, None)),
        ({"steps": 20}, (None, 20)),
        ({"epochs": None, "steps": 20}, (None, 20)),
        ({"epochs": 2, "steps": None}, (2, None)),
        ({"epochs": None, "steps": None}, (1, None)),
    ],
)
def test_work_is_in_epochs_or_steps_default_one_epoch(
    keys: dict[str, Any], expected: tuple[int | None, int | None]
) -> None:
    local = experiment(local=keys).local
    assert (local.epochs, local.steps) == expected
    assert Local(**keys) == local


SECTIONS: list[tuple[tuple[str, ...], str, str]] = [
    ((), "rouns", "rounds"),
    ((), "modle", "model"),
    (("local",), "batchsize", "batch_size"),
    (("data",), "client", "clients"),
    (("data", "partition"), "alhpa", "alpha"),
    (("model",), "hiden", "hidden"),
    (("algorithm",), "nu", "mu"),
    (("topology",), "knd", "kind"),
    (("rounds",), "cuont", "count"),
    (("simulation",), "worker", "workers"),
]


@pytest.mark.parametrize(("place", "wrong", "meant"), SECTIONS, ids=lambda part: str(part))
def test_unknown_key_error_names_the_nearest_and_all_known(
    place: tuple[str, ...], wrong: str, meant: str, tmp_path: Path
) -> None:
    keys = yaml.parse(DIGITS) | {"algorithm": {"kind": "fedprox"}}
    if place == ("topology",):
        keys |= {"algorithm": {"kind": "dpsgd"}, "topology": {"kind": "ring"}}
    inner = keys
    for name in place:
        inner = inner.setdefault(name, {})
    inner[wrong] = 5
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.dump(keys))
    with pytest.raises(InvalidExperiment) as caught:
        Experiment.load(path)
    dotted = re.escape(".".join([*place, wrong]))
    known = rf"known: [\w, ]*\b{meant}\b[\w, ]*"
    pattern = rf"{re.escape(str(path))}: {dotted}: unknown key; did you mean {meant}\? {known} \(value: 5\)"
    assert re.fullmatch(pattern, str(caught.value))


def test_a_key_like_none_is_refused_without_a_guess() -> None:
    known = "name, seed, data_seed, app, data, table, model, fixed, loss, metrics, collate, local, algorithm"
    known += ", topology, rounds, stages, uplink"
    known += ", error_feedback, downlink, secure_aggregation, privacy, hierarchy, devices, evaluation"
    known += ", adversaries, checkpoints, tracking, simulation"
    assert problems(zzz={"a": 1}) == [f"zzz: unknown key; known: {known} (value: {{'a': 1}})"]
    assert problems(local={"{braces}": 1})[0].startswith("local.{braces}: unknown key; known: optimizer, lr,")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "name must have at least 1 character, got ''"),
    ({"seed": True}, "seed must be an integer, got True"),
    ({"seed": -1}, "seed must be greater than or equal to 0, got -1"),
    ({"local": {"lr": True}}, "local.lr must be a number, got True"),
    ({"local": {"lr": 0}}, "local.lr must be greater than 0, got 0"),
    ({"local": {"lr": math.inf}}, "local.lr must be a finite number, got inf"),
    ({"local": {"momentum": 1.0}}, "local.momentum must be less than 1, got 1.0"),
    ({"local": {"momentum": -0.1}}, "local.momentum must be greater than or equal to 0, got -0.1"),
    ({"local": {"nesterov": 1}}, "local.nesterov must be a boolean, got 1"),
    ({"local": {"batch_size": 0}}, "local.batch_size must be greater than 0, got 0"),
    ({"local": {"epochs": 0}}, "local.epochs must be greater than 0, got 0"),
    ({"local": {"optimizer": "sdg"}}, "local.optimizer must be 'sgd', 'adam' or 'adamw', got 'sdg'"),
    (
        {"local": {"precision": "half"}},
        "local.precision must be 'float32', 'tf32', 'bfloat16' or 'float16', got 'half'",
    ),
    ({"local": {"betas": [0.9, 1.0]}}, "local.betas[1] must be less than 1, got 1.0"),
    ({"local": {"betas": [0.9]}}, "local.betas[1]: missing key"),
    ({"local": None}, "local must be a mapping of keys to values, got None"),
    ({"data": 3}, "data: must be a name, a mapping with the key kind, or an object of a kind, got 3"),
    ({"model": {"hidden": [1.5]}}, "model.hidden[0] must be an integer, got 1.5"),
    ({"model": {"hidden": [8, 0]}}, "model.hidden[1] must be greater than 0, got 0"),
    ({"algorithm": None}, "algorithm: must be a name, a mapping with the key kind, or an object of a kind, got None"),
    ({"data": {"clients": 0}}, "data.clients must be greater than 0, got 0"),
    ({"data": {"test_fraction": 1.0}}, "data.test_fraction must be less than 1, got 1.0"),
    (
        {"data": {"partition": {"kind": "iid", "overlap": -1}}},
        "data.partition.overlap must be greater than or equal to 0, got -1",
    ),
    ({"data": {"kind": "npz"}}, "data.path: missing key"),
    ({"rounds": {"evaluate_every": 0}}, "rounds.evaluate_every must be greater than 0, got 0"),
    *(
        ({"evaluation": {"kind": "clients", "fraction": wrong}}, f"evaluation.fraction must be {said}, got {wrong}")
        for wrong, said in ((0, "greater than 0"), (1, "less than 1"))
    ),
    ({"simulation": {"batching": True}}, "simulation.batching must be 'auto', 'on' or 'off', got True"),
    ({"simulation": {"group": 0}}, "simulation.group must be greater than 0 or 'auto', got 0"),
    ({"simulation": {"workers": -1}}, "simulation.workers must be greater than or equal to 0 or 'auto', got -1"),
    ({"simulation": {"workers": "two"}}, "simulation.workers must be an integer or 'auto', got 'two'"),
    (
        {"tracking": {"kind": "wandb"}},
        "tracking must be a list, got {'kind': 'wandb'}: put it in brackets, [{…}]",
    ),
    (
        {"tracking": [Logger()]},
        (
            "tracking: must name its trackers, got an object of Logger: give it to the run, as "
            "observers=[fed.server.tracking.Tracking(logger)]"
        ),
    ),
]


@pytest.mark.parametrize(("keys", "problem"), WRONG, ids=lambda part: str(part)[:60])
def test_wrong_value_error_names_path_and_allowed_values(keys: dict[str, Any], problem: str) -> None:
    assert problem in problems(**keys)


def test_a_cohort_is_a_number_or_all() -> None:
    assert experiment(rounds={"cohort": "all"}).rounds.model_dump()["cohort"] == "all"
    for wrong in ("some", 0, 2.5, None):
        assert any(
            line.startswith("rounds.cohort") and f"got {wrong!r}" in line for line in problems(rounds={"cohort": wrong})
        )


def test_every_wrong_value_has_a_line_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("seed: true\nlocal: {lr: .inf, batch_size: 1.5}\nrounds: {count: 0}\nalgorithm: {kind: fedavgg}")
    with pytest.raises(InvalidExperiment) as caught:
        Experiment.load(path)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    for expected in ("seed", "local.lr", "local.batch_size", "rounds.count", "algorithm.kind"):
        assert sum(line.startswith(f"{path}: {expected}") for line in lines) == 1
    assert len(lines) == 5


@pytest.mark.parametrize(
    ("local", "problem"),
    [
        ({"epochs": 1, "steps": 5}, "local: give epochs or steps, not both, got epochs=1 and steps=5: set one to null"),
        ({"optimizer": "adam", "momentum": 0.9}, "local: momentum and nesterov belong to sgd, got optimizer=adam: rem"),
        ({"optimizer": "adamw", "nesterov": True}, "local: momentum and nesterov belong to sgd, got optimizer=adamw:"),
        ({"betas": [0.5, 0.9]}, "local: betas and eps belong to adam and adamw"),
        ({"eps": 1e-3}, "local: betas and eps belong to adam and adamw"),
        ({"nesterov": True}, "local: nesterov needs momentum above 0, got momentum=0: raise momentum or drop nesterov"),
    ],
)
def test_contradicting_keys_are_refused_with_the_remedy(local: dict[str, Any], problem: str) -> None:
    (line,) = problems(local=local)
    assert line.startswith(problem)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox", "bmuf", "local", "centralized"])
def test_a_topology_is_for_algorithms_over_mix(algorithm: str) -> None:
    (line,) = problems(algorithm={"kind": algorithm}, topology={"kind": "complete"})
    assert line.startswith(
        f"topology complete needs clients that exchange models with neighbours, got algorithm {algorithm}"
    )
    assert line.endswith(": set topology to null, or choose an algorithm over mix such as dpsgd")
    assert experiment(algorithm={"kind": algorithm}).topology is None
    assert experiment(algorithm={"kind": algorithm}, topology=None).topology is None


def test_clients_evaluate_where_models_are_their_own_unless_given() -> None:
    first = experiment(algorithm={"kind": PERSONAL})
    assert first.evaluation.model_dump() == {"kind": "clients", "fraction": 0.2}
    assert first.override({"algorithm": {"kind": "fedavg"}}).evaluation.kind == "coordinator"
    assert experiment().override({"algorithm": {"kind": PERSONAL}}).evaluation.kind == "clients"
    chosen = experiment(evaluation={"kind": "clients", "fraction": 0.5})
    for kind in (PERSONAL, "dpsgd"):
        assert chosen.override({"algorithm": {"kind": kind}}).evaluation == chosen.evaluation


def test_coordinator_evaluation_refuses_keys_for_clients_own_models() -> None:
    (line,) = problems(algorithm={"kind": PERSONAL}, evaluation="coordinator")
    assert line.startswith(f"evaluation coordinator needs a global model that clients use, got algorithm {PERSONAL}, ")
    assert "whose clients use models of their own, each on its own data: write evaluation: clients, or " in line
    with pytest.raises(InvalidExperiment, match="evaluation coordinator needs"):
        experiment(evaluation="coordinator").override({"algorithm": {"kind": PERSONAL}})


def test_peers_are_on_a_ring_unless_given() -> None:
    first = experiment(algorithm={"kind": "dpsgd"})
    assert first.topology is not None
    assert first.topology.kind == "ring"
    assert first.override({"algorithm": {"kind": "fedavg"}}).topology is None
    chosen = experiment(algorithm={"kind": "dpsgd"}, topology={"kind": "exponential"})
    assert chosen.topology is not None
    assert chosen.topology.kind == "exponential"
    with pytest.raises(InvalidExperiment, match="topology exponential needs clients that exchange"):
        chosen.override({"algorithm": {"kind": "fedavg"}})
    assert chosen.override({"algorithm": {"kind": "fedavg"}, "topology": None}).topology is None


def test_data_and_model_may_be_null_and_given_in_python(tmp_path: Path) -> None:
    path = tmp_path / "bare.yaml"
    path.write_text("data: null\nmodel:\n")
    loaded = Experiment.load(path)
    assert (loaded.data, loaded.model) == (None, None)
    assert (loaded.dump()["data"], loaded.dump()["model"]) == (None, None)
    assert (experiment().data is None, experiment().model is None) == (False, False)


def test_an_experiment_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        setattr(experiment().local, "lr", 0.1)  # noqa: B010


def test_an_experiment_goes_from_process_to_process() -> None:
    experiment = Experiment(name="sent", algorithm={"kind": "fedprox", "mu": 0.3}, local={"steps": 4})
    received = pickle.loads(pickle.dumps(experiment))
    assert received == experiment
    assert received.override({"seed": 1}) == experiment.override({"seed": 1})


@pytest.mark.parametrize("algorithm", ["dpsgd", "local"])
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"rounds": "buffered"}, "rounds buffered needs a coordinator"),
        ({"devices": {"kind": "lognormal", "joining_s": 5}}, r"needs the same clients .*got devices\.joining_s 5\.0"),
        ({"devices": {"kind": "uniform", "staying_s": 9}}, r"needs the same clients .*got devices\.staying_s 9\.0"),
    ],
    ids=str,
)
def test_what_peers_do_not_take_of_time_is_refused(algorithm: str, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidExperiment, match=words):
        experiment(algorithm=algorithm, **keys)
    assert experiment(algorithm=algorithm, devices={"kind": "mobile", "interruption": 0.5}).devices.kind == "mobile"
