"""Tensors of arrays, frames, columns and lists: the values stay, and what is no number is named with its place."""

import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse
import torch

from fed.clients.data.arrays import tensor_of
from fed.clients.data.frames import categories_of, parted_by_name
from fed.errors import InvalidData

OWNER = "inputs of client 3"


@pytest.mark.parametrize(
    "dtype", ["?", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8", ">i4", ">f8", "c8", "u2", "u4", "u8"]
)
def test_arrays_of_every_type_keep_their_values(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    tensor = tensor_of(array, OWNER)
    assert tensor.shape == (2, 3)
    np.testing.assert_array_equal(tensor.numpy(), array)
    expected = "int64" if dtype in ("u2", "u4", "u8") else array.dtype.name
    assert str(tensor.dtype) == f"torch.{expected}"


def test_an_array_in_memory_is_not_copied() -> None:
    array = np.zeros((3, 2), dtype=np.float32)
    assert tensor_of(array, OWNER).data_ptr() == array.ctypes.data
    array.flags.writeable = False  # as a mapped file's
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tensor_of(array, OWNER).data_ptr() == array.ctypes.data


@pytest.mark.parametrize("view", [np.s_[::-1], np.s_[:, ::2], np.s_[::2]])
def test_views_become_contiguous_with_the_same_values(view: Any) -> None:
    array = np.arange(12.0).reshape(4, 3)[view]
    tensor = tensor_of(array, OWNER)
    assert tensor.is_contiguous()
    np.testing.assert_array_equal(tensor.numpy(), array)


def test_lists_become_what_torch_makes_of_them() -> None:
    for brought in ([1, 2], [[0.1, 2], [3, 4]], (True, False), [np.ones(2), np.zeros(2)][:1]):
        expected = torch.tensor(np.asarray(brought).tolist())
        torch.testing.assert_close(tensor_of(brought, OWNER), expected, rtol=0, atol=0)
    assert tensor_of([torch.ones(2), torch.zeros(2)], OWNER).shape == (2, 2)


@pytest.mark.parametrize("dtype", ["int8", "Int16", "Float64", "boolean", "int64[pyarrow]", "double[pyarrow]"])
def test_columns_of_pandas_and_arrow_keep_their_values(dtype: str) -> None:
    column = pd.Series([0, 1, 1], dtype=dtype)
    assert tensor_of(column, OWNER).tolist() == column.tolist()
    assert tensor_of(pa.chunked_array([[0, 1], [1]]), OWNER).tolist() == [0, 1, 1]
    assert tensor_of(pa.array([0, 1, 1]), OWNER).tolist() == [0, 1, 1]


def test_a_frame_is_the_matrix_of_its_columns() -> None:
    frame = pd.DataFrame({"a": [1, 2], "b": pd.array([0.5, 0.25], dtype="Float32"), "c": [True, False]})
    expected = torch.tensor([[1, 0.5, 1], [2, 0.25, 0]], dtype=torch.float64)
    for brought in (frame, pa.Table.from_pandas(frame)):
        torch.testing.assert_close(tensor_of(brought, OWNER).double(), expected, rtol=0, atol=0)


def test_codes_of_categories_are_targets_with_names() -> None:
    column = pd.Series(["b", "a", "b"], dtype="category")
    assert tensor_of(column, "targets", are_targets=True).tolist() == [1, 0, 1]
    assert categories_of(column) == categories_of(column.to_frame("label")) == ("a", "b")
    assert categories_of(pd.Series([1])) == categories_of(np.ones(3)) == ()


def test_a_frame_parts_by_the_name_of_its_targets() -> None:
    frame = pd.DataFrame({"a": [1], "label": [2], "b": [3]})
    for brought in (frame, pa.Table.from_pandas(frame)):
        inputs, targets = parted_by_name(brought, "label", "client 3")
        assert tensor_of(inputs, OWNER).tolist() == [[1, 3]]
        assert tensor_of(targets, OWNER).tolist() == [2]
        assert tensor_of(parted_by_name(brought, ["label", "b"], "client 3")[1], OWNER).tolist() == [[2, 3]]
    with pytest.raises(InvalidData, match="targets must name a column of client 3, got 'lable'; did you mean label"):
        parted_by_name(frame, "lable", "client 3")
    with pytest.raises(InvalidData, match="a column beside its targets"):
        parted_by_name(frame, ["a", "b", "label"], "client 3")


@pytest.mark.parametrize(
    ("brought", "message"),
    [
        (
            pd.DataFrame({"a": [1.0, np.nan]}, index=[7, 9]),
            r"got nan in column 'a', row 2 \(index 9\): drop",
        ),
        (pd.DataFrame({"a": [1.0, np.inf]}), r"got inf in column 'a', row 2: correct it"),
        (pd.Series([1, None], dtype="Int64", name="age"), "no missing values, got none in column 'age', row 2: drop"),
        (pa.array([1, None]), "no missing values, got none in row 2"),
        (pd.DataFrame({"a": [1], "t": ["foo"]}), "got 'foo' in column 't', row 1: make columns .*get_dummies"),
        (
            pd.DataFrame({"c": pd.Series(["x"], dtype="category")}),
            "the category 'x' in column 'c', row 1: make",
        ),
        (pd.Series(pd.date_range("2026", periods=2, tz="UTC")), "be numbers, got a date in row 1: make numbers of"),
        (pd.Series([np.ones(2), np.ones(2)]), "got a value of type ndarray in row 1: .*numpy.stack"),
        (pd.DataFrame(), "must be a frame with columns, got one without"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "each column once, got 'a' again: rename one"),
        (np.array([[1, 2], [3, "x"]], dtype=object), "got 'x' in row 2: convert texts"),
        (np.array([1, 2.5], dtype=object), r"objects that are numbers: write \.astype\(float\)"),
        (np.array([1, None]), "got None in row 2: fill it"),
        (np.array([(1, 2.0)], dtype=[("a", int), ("b", float)]), "records with the fields a, b"),
        (np.ma.array([1, 2], mask=[False, True]), r"no masked values, got one in row 2: fill them with \.filled\(\)"),
        (np.array([2**63], dtype=np.uint64), r"at most 2\^63 − 1, got 9223372036854775808"),
        (scipy.sparse.eye_array(2).tocsr(), r"got a value of type csr_array: write \.toarray\(\)"),
        ([[1, 2], [3]], "of one shape, got a list of samples of several: pad them"),
        ([torch.ones(2), torch.ones(3)], r"of one shape, got \(2,\) and \(3,\): pad them with .*pad_sequence"),
        (np.float32(3), "one value a sample, got a value of type float32: give an array of all samples"),
        ("abc", "a tensor, an array, a frame or a list of numbers, got 'abc'"),
        ({"a": 1}, "a tensor, an array, a frame or a list of numbers, got a value of type dict"),
    ],
)
def test_what_is_no_number_is_refused_with_place_and_remedy(brought: object, message: str) -> None:
    with pytest.raises(InvalidData, match=message) as refused:
        tensor_of(brought, OWNER)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("brought", "remedy"),
    [
        (np.array(["yes", "no"]), "numpy.searchsorted"),
        (["yes", "no"], "numpy.searchsorted"),
        (pd.Series(["yes", "no"]), r"\.astype\('category'\)"),
    ],
)
def test_text_labels_are_refused_with_a_remedy_that_works(brought: Any, remedy: str) -> None:
    with pytest.raises(InvalidData, match=f"be numbers, got 'yes' in row 1: number the classes.*{remedy}"):
        tensor_of(brought, "targets", are_targets=True)
    cured = brought.astype("category") if hasattr(brought, "cat") or isinstance(brought, pd.Series) else None
    numbered = np.searchsorted(["no", "yes"], brought) if cured is None else cured
    assert tensor_of(numbered, "targets", are_targets=True).tolist() == [1, 0]


@pytest.mark.long
def test_no_library_is_imported_for_arrays() -> None:
    heavy = "{'pandas', 'pyarrow', 'polars', 'datasets', 'PIL'}"
    program = (
        "import sys, numpy, fed.clients.data.arrays as arrays; arrays.tensor_of(numpy.ones(2), 'inputs'); "
        f"sys.exit(repr({heavy} & set(sys.modules)) if {heavy} & set(sys.modules) else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
