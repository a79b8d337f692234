"""Tables of a user's own, and what is said about the cell that is wrong."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fed.clients.data import FederatedData
from fed.clients.data.sources.archives import npz
from fed.clients.data.sources.tables import csv, parquet
from fed.errors import InvalidData

Load = Callable[..., FederatedData]

TABLE = """age,height,town,label
30,1.5,Ulm,0
31,2.5,Hof,1
32,-3e1,Ulm,2
"""


def written(folder: Path, content: str = TABLE, name: str = "table.csv") -> str:
    (folder / name).write_text(content, encoding="utf-8")
    return str(folder / name)


def saved(folder: Path, name: str = "table.npz", **arrays: Any) -> str:
    np.savez(folder / name, **arrays)
    return str(folder / name)


def refused(source: Callable[..., Any], *args: Any, **keys: Any) -> str:
    with pytest.raises(InvalidData) as caught:
        source(*args, **keys)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_columns_are_features_but_label_and_client(tmp_path: Path) -> None:
    samples = csv(written(tmp_path), client="town")
    assert samples.inputs.dtype == torch.float32
    assert samples.inputs.tolist() == [[30, 1.5], [31, 2.5], [32, -30]]
    assert samples.targets.tolist() == [0, 1, 2]
    assert samples.columns["client"].tolist() == ["Ulm", "Hof", "Ulm"]


def test_a_client_column_makes_natural_clients(tmp_path: Path, loaded: Load) -> None:
    data = loaded(kind="csv", path=written(tmp_path), client="town", test_fraction=0.0)
    assert data.sizes == {"Hof": 1, "Ulm": 2}
    numbers = written(tmp_path, "x,who,label\n1,10,0\n1,9,0\n")
    assert list(loaded(kind="csv", path=numbers, client="who", test_fraction=0.0).train) == [9, 10]
    padded = written(tmp_path, "x,who,label\n1,10,0\n1,09,0\n")
    assert list(loaded(kind="csv", path=padded, client="who", test_fraction=0.0).train) == ["09", "10"]


def test_metadata_are_no_features_and_serve_partitions(tmp_path: Path, loaded: Load) -> None:
    keys: dict[str, Any] = {"kind": "csv", "path": written(tmp_path), "metadata": ["town"], "test_fraction": 0.0}
    data = loaded(**keys, partition={"kind": "range", "by": "town"}, clients=3)
    assert [x.tolist() for x, _ in data.train.values()] == [[[31, 2.5]], [[30, 1.5]], [[32, -30]]]
    by_feature = loaded(**keys, partition={"kind": "rank", "by": "height"}, clients=3)
    assert [y.tolist() for _, y in by_feature.train.values()] == [[1], [0], [2]]


def test_a_feature_may_be_called_client(tmp_path: Path, loaded: Load) -> None:
    path = written(tmp_path, "client,label\n5,0\n6,1\n")
    assert list(loaded(kind="csv", path=path, clients=2, test_fraction=0.0).train) == [0, 1]
    assert "with the key data.client" in refused(loaded, kind="csv", path=path, partition={"kind": "natural"})


def test_a_folder_is_one_table_and_a_client_a_file(tmp_path: Path, loaded: Load) -> None:
    written(tmp_path, name="b.csv")
    written(tmp_path, TABLE.replace("\n31,2.5,Hof,1", ""), name="a.csv")
    keys: dict[str, Any] = {"kind": "csv", "path": str(tmp_path), "client": "town", "test_fraction": 0.0}
    assert loaded(**keys, partition={"kind": "file"}).sizes == {"a": 2, "b": 3}
    assert loaded(**keys, partition={"kind": "file"}, clients=1).sizes == {"b": 3}
    assert loaded(**keys).sizes == {"Hof": 1, "Ulm": 4}


def test_windows_and_spreadsheets_write_tables_too(tmp_path: Path) -> None:
    path = written(tmp_path, '\ufefflabel, x \r\n"0",1\r\n\r\n1,2\r\n')
    assert csv(path).inputs.tolist() == [[1], [2]]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (TABLE.replace("2.5", ""), "row 2, column height must not be empty, got ''"),
        (TABLE.replace("31,", "  ,"), "row 2, column age must not be empty, got '  '"),
        (TABLE.replace("32", "old"), "row 3, column age must be a number, got 'old'"),
        (TABLE.replace("32", "nan"), "row 3, column age must be finite in float32, got 'nan'"),
        (TABLE.replace("32", "1e60"), "row 3, column age must be finite in float32, got '1e60'"),
        (TABLE.replace("Hof,1", "Hof,1.0"), "row 2, column label must be an integer, got '1.0'"),
        (TABLE.replace("Hof,1", "Hof,"), "row 2, column label must not be empty"),
        (TABLE.replace("Hof,1", "Hof,99999999999999999999"), "row 2, column label must be an integer"),
        (TABLE.replace("Hof", ""), "row 2, column town must not be empty"),
        (TABLE.replace("Hof,1", "Hof,-1"), "labels must be at least 0, got -1 in row 2 of label"),
        (TABLE.replace("Hof,1", "Hof"), "row 2 must have 4 cells like the header, got 3"),
        (TABLE.replace("label", "lable"), "has no column 'label', which data.label names; did you mean lable?"),
        (
            TABLE.replace("town", "city"),
            "has no column 'town', which data.client names; known: age, height, city, label",
        ),
        (TABLE.replace("age", "height"), "the header must name each column once, got 'height' again"),
        (TABLE.splitlines()[0], "must have rows below the header, got none"),
        ("", "must begin with a header, got an empty file"),
        ("town,label\nUlm,1\n", "must have a column beside label, town to be a feature"),
    ],
)
def test_a_bad_table_names_the_file_and_the_place(tmp_path: Path, content: str, said: str) -> None:
    path = written(tmp_path, content)
    message = refused(csv, path, client="town")
    assert said in message
    assert path in message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (",age,label\n0,30,1\n", "column 1 must have a name, got '', which is how pandas saves an index: save the"),
        ("Unnamed: 0,age,label\n0,30,1\n", "column 1 must have a name, got 'Unnamed: 0', which is how pandas"),
        ("age,label,\n30,1,\n", "column 3 must have a name, got ''"),
        ("age,a\x00b,label\n1,2,0\n", "column 2 must have a name of at most 256 printable letters, got 'a\\x00b'"),
        ('age,"a\nb",label\n1,2,0\n', "column 2 must have a name of at most 256 printable letters, got 'a\\nb'"),
        ("age,\x1b[2J,label\n1,2,0\n", "column 2 must have a name of at most 256 printable letters"),
        ("x" * 300 + ",label\n1,0\n", "column 1 must have a name of at most 256 printable letters, got 'xxxx"),
        ("age, age ,label\n1,2,0\n", "the header must name each column once, got 'age' again"),
        (",".join(f"c{n}" for n in range(70_000)) + "\n", "must have at most 65536 columns, got 70000"),
        ("age,label\n=1+2,0\n1,1\n", "row 1, column age must be a number, got '=1+2'"),
        ("age,label\n1,0\n0x10,1\n", "row 2, column age must be a number, got '0x10'"),
        ("age,label\n1,0\n1,0x1\n", "row 2, column label must be an integer, got '0x1'"),
        ("age,label\n1,0\n1e400,1\n", "row 2, column age must be finite in float32, got '1e400'"),
        ("age,label\n1,0\n-inf,1\n", "row 2, column age must be finite in float32, got '-inf'"),
        ("age,label\n1,0\n1\x00,1\n", "row 2, column age must be a number, got '1\\x00'"),
        (
            "age,label\n1,no\n2,yes\n",
            "table.csv --schema --target label writes, or number them from 0",
        ),
        (
            'age,label\n1,"0\n2,1\n',
            "row 1, column label must be an integer, got '0\\n2,1\\n'",
        ),  # a quote that is never closed
        ("age,label\n1,0\n" + "x" * 500 + ",1\n", "x…': correct the cell"),
    ],
)
def test_a_hostile_table_is_answered_in_one_sentence(tmp_path: Path, content: str, said: str) -> None:
    message = refused(csv, path := written(tmp_path, content))
    assert said in message
    assert path in message
    assert len(message.replace(path, "")) < 300


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_bytes("age,label\n1,0\n\xe9,1\n".encode("latin1"))
    assert "cannot be read as comma-separated text in UTF-8" in refused(csv, f"{tmp_path}/table.csv")


REALS = st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=20)


@given(REALS, st.integers(1, 20))
def test_numbers_are_read_to_the_last_bit(tmp_path_factory: pytest.TempPathFactory, reals: list[float], k: int) -> None:
    cells = [f"{real:.{k}e}" for real in reals]
    path = written(tmp_path_factory.mktemp("bits"), "x,label\n" + "".join(f"{cell},0\n" for cell in cells))
    expected = np.array([float(cell) for cell in cells]).astype(np.float32)
    assume(np.isfinite(expected).all())
    assert csv(path).inputs[:, 0].numpy().tobytes() == expected.tobytes()


def test_parquet_has_the_bits_of_the_same_csv(tmp_path: Path) -> None:
    frame = pd.read_csv(written(tmp_path, TABLE + "33,0.1,Ulm,0\n"))
    frame.to_parquet(tmp_path / "table.parquet", index=False)
    typed = parquet(f"{tmp_path}/table.parquet", client="town")
    text = csv(f"{tmp_path}/table.csv", client="town")
    assert typed.inputs.numpy().tobytes() == text.inputs.numpy().tobytes()
    assert typed.targets.tolist() == text.targets.tolist()
    assert typed.columns["client"].tolist() == text.columns["client"].tolist()
    assert typed.names == text.names


def test_parquet_is_held_to_the_rules_of_csv(tmp_path: Path) -> None:
    frame = pd.DataFrame({"age": [1.0, None], "label": [0, 1]})
    path = f"{tmp_path}/table.parquet"
    frame.to_parquet(path, index=False)
    assert "row 2, column age must not be empty" in refused(parquet, path)
    frame.fillna(0).set_axis(pd.Index([3, 1]), axis=0).to_parquet(path)
    assert "column 3 must have a name, got '__index_level_0__', which is how pandas" in refused(parquet, path)
    pd.DataFrame({"age": [[1], [2]], "label": [0, 1]}).to_parquet(path, index=False)
    assert "column age must hold one value a row, got lists" in refused(parquet, path)
    (tmp_path / "table.parquet").write_bytes(b"PAR1 torn")
    assert "table.parquet: cannot be read as Parquet" in refused(parquet, path)


def test_a_column_of_texts_must_be_declared(tmp_path: Path) -> None:
    message = refused(csv, written(tmp_path))
    assert "row 1, column town must be a number, got 'Ulm'" in message
    assert "data.metadata" in message
    assert "data.client" in message


def test_a_long_cell_takes_room_for_itself_alone(tmp_path: Path) -> None:
    path = written(tmp_path, "age,label\n" + "9" * 20_000 + ",1\n" + "30,0\n" * 1000)
    tracemalloc.start()
    message = refused(csv, path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "row 1, column age must be finite in float32" in message
    assert peak_bytes < 8e6  # where each of the 1,001 cells had as much, they would take 80 MB


def test_labels_are_held_to_the_classes_that_are_given(tmp_path: Path, loaded: Load) -> None:
    path = written(tmp_path)
    assert "labels must be in 0 … 1, as data.classes says, got 2 in row 3" in refused(
        csv, path, client="town", classes=2
    )
    assert loaded(kind="csv", path=path, client="town", classes=7, test_fraction=0.0).number_of_classes() == 7


def test_files_of_a_folder_must_be_alike(tmp_path: Path) -> None:
    assert "must hold files that end in .csv" in refused(csv, str(tmp_path))
    written(tmp_path, name="a.csv")
    written(tmp_path, TABLE.replace("age", "years"), name="b.csv")
    assert "b.csv: must have the header of" in refused(csv, str(tmp_path), client="town")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for source in (csv, npz):
        assert f"that exists, got {tmp_path}/none" in refused(source, f"{tmp_path}/none")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00label")
    assert "binary.csv: cannot be read as comma-separated text" in refused(csv, f"{tmp_path}/binary.csv")


def test_arrays_are_taken_as_they_are(tmp_path: Path, loaded: Load) -> None:
    pixels = np.arange(2 * 6, dtype=np.uint8).reshape(6, 1, 2)
    path = saved(tmp_path, pixels=pixels, label=np.arange(6, dtype=np.uint8) % 3, who=np.array(list("aabbbb")))
    data = loaded(kind="npz", path=path, client="who", test_fraction=0.0)
    assert data.sizes == {"a": 2, "b": 4}
    x, y = data.train["a"]
    assert (x.dtype, x.tolist(), y.dtype, y.tolist()) == (torch.float32, [[[0, 1]], [[2, 3]]], torch.int64, [0, 1])


def test_arrays_beside_the_inputs_serve_partitions(tmp_path: Path, loaded: Load) -> None:
    path = saved(tmp_path, x=np.zeros(6), label=np.arange(6), age=np.array([5, 3, 9, 1, 0, 2]))
    data = loaded(
        kind="npz", path=path, inputs="x", partition={"kind": "range", "by": "age"}, clients=3, test_fraction=0.0
    )
    assert [y.tolist() for _, y in data.train.values()] == [[3, 4], [1, 5], [0, 2]]
    assert data.train[0][0].shape == (2, 1)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"label": np.zeros(4)},
            "must be one integer a sample, got float64 of shape (4,): give class numbers, label.astype(int)",
        ),
        (
            {"label": np.zeros((4, 2), int)},
            "array 'label' must be one integer a sample, got int64 of shape (4, 2): give class numbers, label.argmax",
        ),
        (
            {"label": np.array(list("abca"))},
            "got <U1 of shape (4,): give class numbers, numpy.searchsorted(classes, label)",
        ),
        ({"label": np.array([0, 1, -2, 0])}, "labels must be at least 0, got -2 in row 3 of label"),
        ({"label": np.zeros(3, int)}, "arrays must be of one length, got {'x': 4, 'label': 3}"),
        ({"x": np.array([[0.0], [1.0], [np.inf], [0.0]])}, "array 'x' must be finite in float32, got inf in row 3"),
        ({"x": np.array(list("abcd"))}, "array 'x' must be real numbers, got <U1"),
        ({"x": np.array([{}, 1, 2, 3], dtype=object)}, "cannot be read as arrays of numbers or texts"),
        ({"x": np.float64(3)}, "must hold arrays of at least one sample"),
        ({"z": np.zeros(4)}, "data.inputs must name the one array of inputs, got x, z"),
    ],
)
def test_a_bad_archive_names_the_array(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    path = saved(tmp_path, **({"x": np.zeros((4, 1)), "label": np.zeros(4, int)} | changed))
    message = refused(npz, path)
    assert said in message
    assert path in message


def test_missing_arrays_are_named(tmp_path: Path) -> None:
    path = saved(tmp_path, x=np.zeros((4, 1)), labels=np.zeros(4, int))
    assert "data.label must name an array, got 'label'; did you mean labels?" in refused(npz, path)
    assert "data.client must name an array, got 'who'" in refused(npz, path, label="labels", client="who")
    assert "data.inputs must name an array, got 'y'" in refused(npz, path, label="labels", inputs="y")


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 torn"])
def test_what_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.npz").write_bytes(content)
    assert "x.npz: cannot be read as arrays" in refused(npz, str(tmp_path / "x.npz"))


def test_a_single_array_is_no_archive(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(3))
    renamed = (tmp_path / "x.npy").rename(tmp_path / "x.npz")
    assert "x.npz: must hold arrays by name, inputs and labels, got one array without" in refused(npz, str(renamed))


def test_a_truncated_archive_is_refused(tmp_path: Path) -> None:
    path = Path(saved(tmp_path, x=np.zeros((400, 1)), label=np.zeros(400, int)))
    path.write_bytes(path.read_bytes()[:-200])
    assert "cannot be read as arrays" in refused(npz, str(path))


def test_archives_of_a_folder_are_one_table(tmp_path: Path, loaded: Load) -> None:
    for number, name in ((2, "b.npz"), (3, "a.npz")):
        saved(tmp_path, name, x=np.zeros((number, 2)), label=np.zeros(number, int))
    keys: dict[str, Any] = {"kind": "npz", "path": str(tmp_path), "test_fraction": 0.0}
    assert loaded(**keys, partition={"kind": "file"}).sizes == {"a": 3, "b": 2}
    saved(tmp_path, "c.npz", x=np.zeros((2, 5)), label=np.zeros(2, int))
    assert "c.npz: must hold arrays like those of" in refused(loaded, **keys, clients=2)
