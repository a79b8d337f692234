"""Frames given in Python beside an experiment's schema: columns are matched by name, as those of a file."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import fed
from fed.clients.data import Held
from fed.errors import InvalidData, InvalidExperiment
from tests.clients.data.test_schema import KEYS, TABLE, section, written

SMALL: dict[str, Any] = {"table": KEYS, "model": "logistic", "rounds": {"count": 1}, "evaluation": {"kind": "clients"}}


def frame(**columns: Any) -> pd.DataFrame:
    return pd.DataFrame({"time": [1, 2, 3], "ill": ["no", "yes", "no"], "colour": ["red", " white ", "red"], **columns})


def as_lists(held: Held) -> tuple[Any, Any]:
    assert isinstance(held, tuple)
    return held[0].tolist(), held[1].tolist()


def test_a_frame_is_read_as_its_file(tmp_path: Path) -> None:
    file = fed.FederatedData({"a": pd.read_csv(written(tmp_path))}, table=section())
    categories = frame(age=[30, 31, 32]).astype({"colour": "category", "age": "float64"})
    arrow = pa.Table.from_pandas(frame(age=[30, 31, 32]))
    data = fed.FederatedData({"a": categories, "b": arrow}, test=frame(age=[30, 31, 32]), table=section())
    assert as_lists(file.read("a")) == ([[30, 0, 1], [31, 1, 0], [32, 0, 1]], [0, 1, 0])
    assert [as_lists(data.read(client)) for client in "ab"] == [as_lists(file.read("a"))] * 2
    assert data.names.columns == ("age", "colour=white", "colour=red", "ill")
    assert (data.classes, data.names.labels) == (2, ("no", "yes"))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (frame(), "client 'b' has no column 'age', which the run's table needs"),
        (frame(age=[30, None, 32]), "client 'b': row 2, column age must not be empty"),
        (frame(age=["30", "old", "32"]), "client 'b': row 2, column age must be a number, got 'old'"),
        (frame(age=1, colour="pink"), "client 'b': row 1, column colour must be one of white, red, got 'pink'"),
        (frame(age=1, ill=0.5), "client 'b': row 1, column ill must be one of no, yes, got '0.5'"),
        (frame(age=[1, "x", 2.5]), "client 'b': the frame's columns must hold numbers or texts, one kind each"),
        (frame(age=1)[:0], "client 'b': the frame must have rows, got none"),
        (frame(age=[[1], [2], [3]]), "client 'b': column age must hold one value a row, got lists"),
    ],
    ids=range(8),
)
def test_a_frame_that_does_not_fit_names_the_cell(wrong: pd.DataFrame, said: str) -> None:
    with pytest.raises(InvalidData) as caught:
        fed.FederatedData({"a": frame(age=1), "b": wrong}, table=section())
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_frames_of_three_orders_have_the_bits_of_one() -> None:
    draw = np.random.default_rng(0)
    own = [frame(age=draw.normal(size=3)) for _ in range(3)]
    shuffled = {number: part[draw.permutation(part.columns)] for number, part in enumerate(own)}
    experiment = fed.Experiment(**SMALL)
    runs = [fed.simulate(experiment, data=data) for data in (dict(enumerate(own)), shuffled)]
    models = [b"".join(part.numpy().tobytes() for part in run.model.state_dict().values()) for run in runs]
    assert models[0] == models[1]


def test_a_frame_is_dealt_by_its_schema() -> None:
    data = fed.partition(frame(age=[30, 31, None]), table=section(missing="drop"), clients=2, test_fraction=0.0)
    rows = sorted(as_lists(data.read(client))[0] for client in data.clients)
    assert rows == [[[30, 0, 1]], [[31, 1, 0]]]
    with pytest.raises(InvalidData, match="schema of a frame with its targets in it"):
        fed.partition(frame(age=1), "ill", table=section())
    with pytest.raises(InvalidData, match="table says what to predict, got targets='ill'"):
        fed.FederatedData({0: frame(age=1)}, table=section(), targets="ill")
    with pytest.raises(InvalidExperiment, match="were read by another: give FederatedData"):
        fed.simulate(fed.Experiment(**SMALL), data=data)


@pytest.mark.long
def test_polars_frames_are_read_as_their_files(tmp_path: Path) -> None:
    import polars

    read = polars.read_csv(written(tmp_path, TABLE))
    data = fed.FederatedData({0: read, 1: read.cast({"colour": polars.Categorical})}, table=section())
    assert as_lists(data.read(0)) == as_lists(data.read(1)) == ([[30, 0, 1], [31, 1, 0], [32, 0, 1]], [0, 1, 0])
    plain = fed.FederatedData({0: read.select("age", "time")}, targets="time")
    assert as_lists(plain.read(0)) == ([[30], [31], [32]], [1.5, 2, 3])
    assert fed.partition(read.select("age", "time"), "time", clients=3, test_fraction=0.0).names.columns == (
        "age",
        "time",
    )
    with pytest.raises(InvalidData, match="inputs of client 0 must be numbers, got 'red' in column 'colour', row 1"):
        fed.FederatedData({0: read}, targets="time")
