"""A comparison's description: which variants it names, and what it says of one that cannot be."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fed
from fed.config import yaml
from fed.config.comparison import Distribution
from fed.errors import InvalidExperiment
from fed.vectors.randomness import Streams

FEDPROX = {"kind": "fedprox", "mu": 0.1}


def comparison(**keys: Any) -> fed.Comparison:
    return fed.Comparison(**keys)


def drawn(trials: int = 5, seed: int = 0, **keys: dict[str, Any]) -> list[dict[str, Any]]:
    """What each trial's ``local`` came to."""
    distributions = {f"local.{key}": distribution for key, distribution in keys.items()}
    found = comparison(random={"trials": trials, "seed": seed, "keys": distributions})
    return [variant.dump()["local"] for variant in found.variants().values()]


def test_variant_is_the_base_overridden() -> None:
    base: dict[str, Any] = {"rounds": {"count": 5, "cohort": 3}, "local": {"lr": 0.5}}
    changes = {"algorithm": FEDPROX, "rounds.count": 7, "local": {"batch_size": 4}}
    variant = comparison(base=base, compare=[{"name": "P", **changes}]).variants()["P"]
    assert variant.dump() == fed.Experiment(name="P", **base).override(changes).dump()


def test_variant_that_changes_nothing_is_the_base_under_its_name() -> None:
    base = fed.Experiment().override({"rounds.count": 3, "seed": 4})
    variant = comparison(base=base, compare=[{"name": "same"}]).variants()["same"]
    assert variant.dump() == base.dump() | {"name": "same"}


def test_variants_keep_their_order() -> None:
    names = ["b", "a", "c"]
    assert list(comparison(compare=[{"name": name} for name in names]).variants()) == names


def test_grid_is_the_product_of_its_lists() -> None:
    found = comparison(grid={"local.lr": [0.1, 0.2], "algorithm": [{"kind": "fedavg"}, FEDPROX]}).variants()
    settings = {name: (variant.local.lr, variant.algorithm.kind) for name, variant in found.items()}
    assert settings == {
        "local.lr=0.1, algorithm=fedavg": (0.1, "fedavg"),
        "local.lr=0.1, algorithm=fedprox(mu=0.1)": (0.1, "fedprox"),
        "local.lr=0.2, algorithm=fedavg": (0.2, "fedavg"),
        "local.lr=0.2, algorithm=fedprox(mu=0.1)": (0.2, "fedprox"),
    }


def test_trial_depends_on_neither_their_number_nor_other_keys() -> None:
    lr = {"log_uniform": [0.001, 1.0]}
    few = [local["lr"] for local in drawn(3, lr=lr)]
    many = [local["lr"] for local in drawn(9, batch_size={"integer": [1, 64]}, lr=lr)]
    assert many[:3] == few
    assert len(set(many)) == 9


def test_trials_of_another_seed_are_others() -> None:
    lr = {"uniform": [0.1, 0.2]}
    assert drawn(seed=0, lr=lr) == drawn(seed=0, lr=lr)
    assert drawn(seed=0, lr=lr) != drawn(seed=1, lr=lr)


@given(st.floats(1e-6, 1e3), st.floats(1.001, 1e3), st.integers(0, 2**31))
def test_draws_stay_within_their_bounds(low: float, factor: float, seed: int) -> None:
    low, high = (float(f"{bound:.4g}") for bound in (low, low * factor))  # so that five digits cannot leave them
    for kind in ("uniform", "log_uniform"):
        value = Distribution.model_validate({kind: [low, high + low]}).draw(Streams(seed), "lr", 0)
        assert low <= value <= high + low
        assert value == float(f"{value:.5g}")


def test_integers_include_both_ends_and_choices_every_one() -> None:
    locals_ = drawn(200, steps={"integer": [3, 5]}, optimizer={"choice": ["sgd", "adam"]})
    # The chance that 200 draws miss one of three values is below 3 (2/3)^200 < 1e-34.
    assert {local["steps"] for local in locals_} == {3, 4, 5}
    assert {local["optimizer"] for local in locals_} == {"sgd", "adam"}


def test_log_uniform_has_the_geometric_mean_for_its_median() -> None:
    distribution = Distribution.model_validate({"log_uniform": [1e-4, 1.0]})
    below = sum(distribution.draw(Streams(0), "lr", trial) < 1e-2 for trial in range(2000))
    assert abs(below - 1000) < 5 * math.sqrt(2000 / 4)  # five standard deviations of a fair coin


@pytest.mark.parametrize(
    "keys",
    [
        {"compare": [{"name": "A", "algorithm": FEDPROX}], "target": 0.9},
        {"grid": {"local.lr": [0.1, 1]}, "seeds": [3, 1]},
        {"random": {"trials": 2, "keys": {"local.lr": {"uniform": [0.1, 1.0]}}}, "base": {"seed": 5}},
    ],
)
def test_dump_is_read_back_as_the_same(keys: dict[str, Any], tmp_path: Path) -> None:
    first = comparison(**keys)
    path = tmp_path / "comparison.yaml"
    path.write_text(yaml.dump(first.dump()), encoding="utf-8")
    second = fed.Comparison.load(path)
    assert second.dump() == first.dump()
    assert [variant.dump() for variant in second.variants().values()] == [
        variant.dump() for variant in first.variants().values()
    ]


def test_seeds_are_the_bases_own_unless_given() -> None:
    grid = {"local.lr": [0.1]}
    assert comparison(grid=grid).seeds == [0]
    assert comparison(grid=grid, base={"seed": 7}).seeds == [7]
    given_seeds = comparison(grid=grid, base={"seed": 7}, seeds=[1, 2])
    assert given_seeds.seeds == [1, 2]
    assert [variant.seed for variant in given_seeds.variants().values()] == [1]


@pytest.mark.parametrize(
    ("vary", "base", "expected"),
    [
        ("both", {"seed": 7}, [(1, None), (2, None)]),
        ("training", {"seed": 7}, [(1, 7), (2, 7)]),
        ("training", {"data_seed": 9}, [(1, 9), (2, 9)]),
        ("data", {"seed": 7}, [(7, 1), (7, 2)]),
    ],
)
def test_seeds_set_what_varies(vary: str, base: dict[str, int], expected: list[tuple[int, int | None]]) -> None:
    made = comparison(base=base, grid={"local.lr": [0.1]}, seeds=[1, 2], vary=vary)
    (variant,) = made.variants().values()
    runs = [made.repeated(variant, repetition) for repetition in made.repetitions()]
    assert [(run.seed, run.data_seed) for run in runs] == expected


def test_folds_repeat_every_seed() -> None:
    made = comparison(grid={"local.lr": [0.1]}, seeds=[4, 2], folds=2)
    assert made.repetitions() == [(4, 1), (4, 2), (2, 1), (2, 2)]
    (variant,) = made.variants().values()
    folds = [made.repeated(variant, repetition).dump()["data"]["fold"] for repetition in made.repetitions()]
    assert folds == [{"number": number, "of": 2} for number in (1, 2, 1, 2)]


def test_baseline_is_the_first_that_bounds_nothing() -> None:
    variants = [{"name": name, "algorithm": {"kind": name}} for name in ("local", "centralized", "fedavg", "fedprox")]
    assert comparison(compare=variants).baseline_in_force() == "fedavg"
    assert comparison(compare=variants[:2]).baseline_in_force() == "local"
    assert comparison(compare=variants, baseline="fedprox").baseline_in_force() == "fedprox"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing to compare": ({}, "exactly one of compare, grid and random, got none of them"),
    "two ways": ({"grid": {"local.lr": [0.1]}, "compare": [{"name": "A"}]}, r"got \['compare', 'grid'\]"),
    "no variant": ({"compare": []}, r"compare must have at least 1 item, got \[\]"),
    "no name": ({"compare": [{"rounds.count": 3}]}, r"compare\[0\]\.name: missing key"),
    "a name twice": ({"compare": [{"name": "A"}, {"name": "A"}]}, "names of variants must be distinct, got A more"),
    "a seed twice": ({"compare": [{"name": "A"}], "seeds": [1, 1]}, "seeds must be distinct, got 1 more"),
    "a value twice": ({"grid": {"local.lr": [0.1, 0.1]}}, r"grid\.local\.lr must be distinct, got 0.1 more"),
    "an empty grid": ({"grid": {}}, "grid must have at least 1 item"),
    "no values": ({"grid": {"local.lr": []}}, r"grid\.local\.lr must have at least 1 item"),
    "no finite target": ({"grid": {"local.lr": [0.1]}, "target": math.inf}, "target must be a finite number"),
    "an unknown key": ({"grd": {}}, "grd: unknown key; did you mean grid?"),
    "an unknown key of a variant": (
        {"compare": [{"name": "A"}, {"name": "B", "rounds.cuont": 3}]},
        r"^compare\[1\] B: rounds\.cuont: unknown key; did you mean count\?",
    ),
    "a value of a variant": (
        {"compare": [{"name": "A", "algorithm": {"kind": "fedprox", "mu": -1}}]},
        r"^compare\[0\] A: algorithm\.mu must be greater than or equal to 0, got -1$",
    ),
    "a value of a grid": ({"grid": {"local.lr": [0.1, -2]}}, r"^grid local\.lr=-2: local\.lr must be greater than 0"),
    "a value drawn": (
        {"random": {"trials": 1, "keys": {"local.lr": {"choice": [0]}}}},
        r"^random trial 1: local\.lr=0: local\.lr must be greater than 0, got 0$",
    ),
    "a seed of a variant's data": (
        {"compare": [{"name": "A", "data_seed": 3}]},
        "compare.0. A: data_seed: a comparison deals the same data to every variant: remove it",
    ),
    "a seed of data that is set": (
        {"base": {"data_seed": 3}, "grid": {"local.lr": [0.1]}},
        "base: data_seed: the comparison's seeds set it with vary: both, got 3: remove it",
    ),
    "no such baseline": ({"compare": [{"name": "A"}], "baseline": "B"}, "one of A, got B: correct it, or leave it out"),
    "folds of no data": (
        {"base": {"data": None}, "compare": [{"name": "A"}], "folds": 2},
        "compare.0. A: folds need data that the experiment names",
    ),
    "folds beside a test share": (
        {"base": {"data": {"test_fraction": 0.5}}, "compare": [{"name": "A"}], "folds": 2},
        "test_fraction must be 0 with a fold",
    ),
    "a fold beside folds": (
        {"base": {"data": {"fold": {"number": 1, "of": 2}}}, "compare": [{"name": "A"}], "folds": 2},
        "data.fold: the comparison's folds set it",
    ),
    "a seed of a variant": ({"compare": [{"name": "A", "seed": 3}]}, "compare.0. A: seed: a comparison runs every"),
    "bounds in the wrong order": (
        {"random": {"trials": 1, "keys": {"local.lr": {"uniform": [2, 1]}}}},
        r"random\.keys\.local\.lr: uniform must be \[low, high\] with low < high, got \[2\.0, 1\.0\]",
    ),
    "a logarithm of nothing": (
        {"random": {"trials": 1, "keys": {"local.lr": {"log_uniform": [0, 1]}}}},
        "log_uniform must be .* with low > 0",
    ),
    "two distributions": (
        {"random": {"trials": 1, "keys": {"local.lr": {"uniform": [0, 1], "choice": [1]}}}},
        "must hold exactly one of choice, uniform",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_by_name(case: str) -> None:
    keys, message = REFUSED[case]
    with pytest.raises(InvalidExperiment, match=message):
        comparison(**keys)


def test_what_is_wrong_with_the_base_is_said_once() -> None:
    with pytest.raises(InvalidExperiment) as refused:
        comparison(base={"local": {"lr": -1}}, compare=[{"name": "A"}, {"name": "B"}, {"name": "C", "local.lr": 0.1}])
    assert str(refused.value) == "base: local.lr must be greater than 0, got -1"


def test_base_may_be_completed_by_its_variants() -> None:
    base = {"topology": {"kind": "complete"}}
    variants = comparison(base=base, compare=[{"name": "A", "algorithm": {"kind": "dpsgd"}}]).variants()
    assert variants["A"].topology is not None


def test_who_evaluates_follows_the_algorithm_of_each_variant_unless_given() -> None:
    personal = {"name": "B", "algorithm": {"kind": "python:tests.simulations.users_parts:Personal"}}
    compare = [{"name": "A"}, personal, {**personal, "name": "C", "evaluation.kind": "clients"}]
    kinds = {name: variant.evaluation.kind for name, variant in comparison(compare=compare).variants().items()}
    assert kinds == {"A": "coordinator", "B": "clients", "C": "clients"}
    given = comparison(base={"evaluation": "clients"}, compare=compare).variants()
    assert {variant.evaluation.kind for variant in given.values()} == {"clients"}
    with pytest.raises(InvalidExperiment, match="evaluation coordinator needs a global model"):
        comparison(base={"evaluation": "coordinator"}, compare=compare)


def test_error_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("compare: [{name: A, local.lr: -1}, {name: B, rounds: {cont: 1}}]", encoding="utf-8")
    with pytest.raises(InvalidExperiment) as refused:
        fed.Comparison.load(path)
    lines = str(refused.value).splitlines()
    assert len(lines) == 2
    assert lines[0] == f"{path}: compare[0] A: local.lr must be greater than 0, got -1"
    assert lines[1].startswith(f"{path}: compare[1] B: rounds.cont: unknown key; did you mean count?")
