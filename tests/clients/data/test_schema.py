"""Tables whose columns a schema finds by name: wherever they stand, with texts for categories and labels."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_wine

import fed
from fed.clients.data import Samples
from fed.clients.data.sources.keys import TestFile
from fed.clients.data.sources.suggested_schema import schema_of
from fed.clients.data.sources.tables import csv, parquet
from fed.config import yaml
from fed.config.table import TableSection
from fed.errors import InvalidData, InvalidExperiment
from tests.fed.cli.commands import runner

TABLE = """age,colour,ill,time
30,red,no,1.5
31, white ,yes,2
32,red,no,3
"""
KEYS: dict[str, Any] = {
    "features": {"age": "real", "colour": ["white", "red"]},
    "target": "ill",
    "classes": ["no", "yes"],
}


def section(**keys: Any) -> TableSection:
    return TableSection(**{**KEYS, **keys})


def written(folder: Path, content: str = TABLE, name: str = "table.csv") -> str:
    (folder / name).write_text(content, encoding="utf-8")
    return str(folder / name)


def read(folder: Path, content: str = TABLE, **keys: Any) -> Samples:
    return csv(written(folder, content), schema=section(**keys))


def refused(folder: Path, content: str = TABLE, **keys: Any) -> str:
    with pytest.raises(InvalidData) as caught:
        read(folder, content, **keys)
    assert "\n" not in str(caught.value)
    assert str(folder / "table.csv") in str(caught.value)
    return str(caught.value)


def test_columns_are_found_by_name_and_categories_are_features(tmp_path: Path) -> None:
    samples = read(tmp_path)
    assert samples.inputs.tolist() == [[30, 0, 1], [31, 1, 0], [32, 0, 1]]
    assert samples.targets.tolist() == [0, 1, 0]
    assert samples.classes == 2
    assert samples.names.columns == ("age", "colour=white", "colour=red", "ill")
    assert samples.names.labels == ("no", "yes")


def test_the_order_of_columns_changes_nothing(tmp_path: Path) -> None:
    frame = pd.read_csv(written(tmp_path))
    frame[["ill", "time", "colour", "age"]].to_csv(tmp_path / "other.csv", index=False)
    frame.to_parquet(tmp_path / "table.parquet", index=False)
    for samples in (
        csv(f"{tmp_path}/other.csv", schema=section()),
        parquet(f"{tmp_path}/table.parquet", schema=section()),
    ):
        assert samples.inputs.tolist() == read(tmp_path).inputs.tolist()
        assert samples.targets.tolist() == read(tmp_path).targets.tolist()


def test_a_column_beyond_the_schema_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read(tmp_path)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/table.csv: columns that the experiment's table does not name are left out: time"
    ]


def test_real_targets_are_one_or_several_columns(tmp_path: Path) -> None:
    assert read(tmp_path, target="time", classes=None).targets.tolist() == [1.5, 2, 3]
    assert "got 'no': list the classes of a target" in refused(tmp_path, target="ill", classes=None)
    several = read(tmp_path, target=["time", "age"], classes=None, features={"colour": ["red", "white"]})
    assert several.targets.tolist() == [[1.5, 30], [2, 31], [3, 32]]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (TABLE.replace("age", "Age"), "table.csv has no column 'age', which the run's table needs; did you mean Age?"),
        (TABLE.replace("ill", "sick"), "has no column 'ill', which the run's table needs"),
        (TABLE.replace(" white ", "rosé"), "row 2, column colour must be one of white, red, got 'rosé': correct"),
        (TABLE.replace(" white ", "=1+2"), "row 2, column colour must be one of white, red, got '=1+2'"),
        (TABLE.replace(" white ", ""), "row 2, column colour must not be empty, got '': fill the cell, remove the row"),
        (
            TABLE.replace("31", ""),
            "age must not be empty, got '': fill the cell, remove the row, or say with missing",
        ),
        (TABLE.replace(",", ";"), "cells must be separated by commas, got semicolons in the header: save the table"),
        (TABLE.replace("yes", "1.5"), "row 2, column ill must be one of no, yes, got '1.5'"),
        (TABLE.replace("yes", "Yes"), "row 2, column ill must be one of no, yes, got 'Yes'"),
        (TABLE.replace("31", "old"), "row 2, column age must be a number, got 'old'"),
        (TABLE.replace("age", ""), "column 1 must have a name, got '', which is how pandas saves an index"),
        (TABLE.replace("time", "age"), "the header must name each column once, got 'age' again"),
    ],
)
def test_what_does_not_fit_is_named_with_its_place(tmp_path: Path, content: str, said: str) -> None:
    assert said in refused(tmp_path, content)


def test_numbers_are_held_to_their_bounds(tmp_path: Path) -> None:
    features = {"age": {"bounds": [0, 31]}, "colour": ["red", "white"]}
    said = "row 3, column age must be from 0 to 31, as table.features.age says, got '32'"
    assert said in refused(tmp_path, features=features)


def test_an_empty_cell_is_refused_filled_or_dropped(tmp_path: Path) -> None:
    holes = TABLE.replace("30", "").replace(" white ", "")
    assert "row 1, column age must not be empty" in refused(tmp_path, holes)
    filled = {"age": {"missing": 7}, "colour": {"values": ["white", "red"], "missing": "red"}}
    assert read(tmp_path, holes, features=filled).inputs.tolist() == [[7, 0, 1], [31, 0, 1], [32, 0, 1]]
    dropped = read(tmp_path, holes, missing="drop")
    assert (dropped.inputs.tolist(), dropped.targets.tolist()) == ([[32, 0, 1]], [0])
    wrong = holes.replace("32", "old")
    assert "row 3, column age must be a number" in refused(tmp_path, wrong, missing="drop")  # rows of the file
    own = {"age": {"missing": 7}, "colour": ["", "white", "red"]}
    assert read(tmp_path, holes, features=own).inputs[1].tolist() == [31, 1, 0, 0]


def test_given_mean_and_deviation_standardize(tmp_path: Path) -> None:
    assert read(tmp_path, standardize={"age": [31, 2]}).inputs[:, 0].tolist() == [-0.5, 0, 0.5]


def test_a_test_file_is_all_test_whatever_it_lacks(tmp_path: Path) -> None:
    train = written(tmp_path, "who," + TABLE.replace("\n3", "\na,3"))
    test = TestFile(path=written(tmp_path, TABLE.replace("yes", "no"), "test.csv"))
    samples = csv(train, client="who", test=test, schema=section())
    assert samples.test is not None
    assert (len(samples), samples.test[1].tolist(), samples.classes) == (3, [0, 0, 0], 2)
    alone: dict[str, Any] = {"data": {"kind": "csv", "test": {"path": test.path}}, "table": KEYS}
    with pytest.raises(InvalidData, match=r"data.path must name samples to train on, got data.test alone"):
        fed.simulate(fed.Experiment(**alone))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"classes": ["no"]}, "classes"),
        ({"classes": ["no", "no"]}, "classes must name each once"),
        ({"features": {"age": "number"}}, "must be real, a list of categories, or a mapping"),
        ({"features": {"ill": "real"}}, "target must be no feature, got 'ill' as both"),
        ({"features": {"age": {"values": ["a"], "bounds": [0, 1]}}}, "bounds are of numbers"),
        ({"features": {"age": {"bounds": [1, 0]}}}, "bounds must be the lowest number and a higher one"),
        ({"features": {"age": {"missing": "red"}}}, "missing must be a number where the column holds numbers"),
        ({"features": {"age": {"values": ["a"], "missing": "b"}}}, "missing must be one of the categories a, got 'b'"),
        ({"target": ["ill", "time"]}, "classes are of one target"),
        ({"standardize": {"colour": [0, 1]}}, "standardize must name features of real numbers, got 'colour'"),
    ],
)
def test_a_schema_without_a_meaning_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidExperiment) as caught:
        fed.Experiment(table={**KEYS, **keys})
    assert said in str(caught.value)
    assert "table" in str(caught.value)


def test_a_schema_needs_data_by_columns() -> None:
    with pytest.raises(InvalidData, match="is of data by columns, such as csv and parquet, got digits"):
        fed.simulate(fed.Experiment(table=KEYS))
    pair = (torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(InvalidExperiment, match="were read without it: give FederatedData"):
        fed.simulate(fed.Experiment(table=KEYS), data=fed.FederatedData({0: pair}))


def wine(folder: Path, *, is_shuffled: bool) -> dict[str, Any]:
    """Wine of three nodes; the columns of each in another order where they are shuffled, with one more."""
    frame = load_wine(as_frame=True).frame
    names = ["barolo", "grignolino", "barbera"]
    frame["target"] = frame["target"].map(lambda number: names[number])
    frame = frame.rename(columns={"target": "cultivar"}).sample(frac=1, random_state=0)
    folder.mkdir()
    generator = np.random.default_rng(0)
    for node in range(3):
        part = frame.iloc[node::3]
        if is_shuffled:
            part = part[generator.permutation(part.columns)].assign(**{f"note {node}": "x"})
        part.to_csv(folder / f"{'abc'[node]}.csv", index=False)
    features = dict.fromkeys((name for name in frame.columns if name != "cultivar"), "real")
    return {
        "data": {"kind": "csv", "path": str(folder), "partition": "file"},
        "table": {"features": features, "target": "cultivar", "classes": names},
        "model": "logistic",
        "local": {"lr": 1e-6},
        "rounds": {"count": 2},
    }


def test_wine_of_three_orders_has_the_bits_of_one(tmp_path: Path) -> None:
    models = []
    for is_shuffled in (False, True):
        run = fed.simulate(fed.Experiment(**wine(tmp_path / str(is_shuffled), is_shuffled=is_shuffled)))
        models.append(b"".join(part.numpy().tobytes() for part in run.model.state_dict().values()))
    assert models[0] == models[1]


@pytest.mark.parametrize("standardize", [None, "federated"])
def test_a_simulation_says_that_scales_are_unlike(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, standardize: str | None
) -> None:
    keys = wine(tmp_path / "wine", is_shuffled=False)
    keys["table"] |= {"standardize": standardize}
    fed.simulate(fed.Experiment(**keys | {"rounds": {"count": 1}}))
    said = [words for words in caplog.messages if "columns differ in scale by a factor of" in words]
    assert len(said) == (standardize is None)


def test_the_schema_of_a_file_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runner(tmp_path, monkeypatch, capsys, "data")
    path = written(tmp_path)
    shown = run(path, "--schema", "--target", "ill")
    found = TableSection(**yaml.parse(shown.out)["table"])
    assert found == schema_of(Path(path), "ill")
    assert csv(path, schema=found).inputs.tolist() == [[30, 1, 0, 1.5], [31, 0, 1, 2], [32, 1, 0, 3]]
    assert schema_of(Path(path), "time").classes is None
    assert "has no column 'label', which --target (label unless given) names" in run(path, "--schema").err
    assert f"got the table {path}: give the experiment's file, or add --schema" in run(path).err
    assert "got the folder .: give one of its files" in run(".", "--schema").err


def test_a_suggested_schema_names_empty_cells_and_unlike_scales(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runner(tmp_path, monkeypatch, capsys, "data")
    (tmp_path / "wine.csv").write_text("alcohol,proline,colour,label\n1,1000,red,0\n2,,,1\n3,3000,red,1\n2,2000,,0\n")
    shown = run("wine.csv", "--schema")
    assert yaml.parse(shown.out)["table"]["missing"] == "refuse"
    empty, unlike = shown.err.splitlines()
    assert empty == (
        "note: 2 of 4 rows have empty cells, in proline (1), colour (2); missing: refuse has such a table "
        "refused: write missing: drop to leave the rows out, or missing: VALUE at a feature"
    )
    # The deviations are sqrt(2/3) * 1000 and sqrt(1/2).
    assert unlike == (
        "note: columns differ in scale by a factor of 1.15e+03 (proline and alcohol), and most models train badly on "
        "such: write standardize: federated in the section table, or bring the columns to one scale"
    )
    (tmp_path / "alike.csv").write_text("a,b,label\n1,9,0\n2,1,1\n")
    assert run("alike.csv", "--schema").err == ""
