"""Types of samples become those that model and loss take, the same in memory, on demand and sample by sample."""

import logging
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fed
from fed.clients.setup import Preparation
from fed.errors import InvalidData, InvalidExperiment, InvalidModel

DRAW = np.random.default_rng(0)
INPUTS = DRAW.normal(size=(24, 4))
LABELS = (INPUTS.sum(1) > 0).astype(np.int64)


def experiment(**keys: Any) -> fed.Experiment:
    sections: dict[str, Any] = {"rounds": {"count": 2}, "local": {"batch_size": 4}, "model": {"kind": "logistic"}}
    return fed.Experiment(**sections | keys)


def data(inputs: Any, targets: Any) -> fed.FederatedData:
    pairs = {"a": (inputs[:12], targets[:12]), "b": (inputs[12:], targets[12:])}
    return fed.FederatedData(pairs, (inputs, targets))


def float32() -> fed.FederatedData:
    return data(torch.from_numpy(INPUTS.astype(np.float32)), torch.from_numpy(LABELS))


def linear() -> nn.Module:
    return nn.Linear(4, 2)


def states(run: fed.Run) -> list[Tensor]:
    return list(run.model.state_dict().values())


def assert_same(one: fed.Run, other: fed.Run) -> None:
    assert [part.dtype for part in states(one)] == [part.dtype for part in states(other)]
    assert all(map(torch.equal, states(one), states(other)))
    assert [line["test_loss"] for line in one.metrics] == [line["test_loss"] for line in other.metrics]


@pytest.mark.parametrize("model", [None, pytest.param(linear, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "labels",
    ["uint8", "float64", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("int8", "bool", "float32"))],
)
def test_arrays_of_any_type_train_as_tensors_of_float32(model: Any, labels: str) -> None:
    of_own = experiment() if model is None else experiment(model=None)
    expected = fed.simulate(of_own, data=float32(), model=model)
    brought = data(INPUTS, LABELS.astype(labels))
    assert_same(fed.simulate(of_own, data=brought, model=model), expected)


def test_frames_train_as_tensors_do(caplog: pytest.LogCaptureFixture) -> None:
    frame = pd.DataFrame(INPUTS, columns=list("wxyz"))
    labels = pd.Series(LABELS.astype(float))
    expected = fed.simulate(experiment(), data=float32())
    with caplog.at_level(logging.INFO, "fed"):
        assert_same(fed.simulate(experiment(), data=data(frame, labels)), expected)
    said = [record.getMessage() for record in caplog.records if "cast" in record.getMessage()]
    assert said == [
        "samples are cast: inputs of float64 as float32, targets of float64 as int64, as model and loss take them"
    ]


def test_what_fits_is_neither_cast_nor_spoken_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fed"):
        fed.simulate(experiment(), data=float32())
    assert not [record for record in caplog.records if "cast" in record.getMessage()]


def test_a_model_of_float64_keeps_every_digit() -> None:
    def double() -> nn.Module:
        return nn.Linear(4, 2).double()

    tensors = data(torch.from_numpy(INPUTS), torch.from_numpy(LABELS))
    expected = fed.simulate(experiment(model=None), data=tensors, model=double)
    assert_same(fed.simulate(experiment(model=None), data=data(INPUTS, LABELS), model=double), expected)
    assert states(expected)[0].dtype == torch.float64
    built_in = fed.simulate(experiment(), data=tensors)  # tensors of float64 are meant to be
    assert states(built_in)[0].dtype == torch.float64
    widened = Preparation(experiment(), float32(), double).data
    assert widened.read("a")[0].dtype == torch.float64


def test_whole_numbers_stay_where_the_model_looks_them_up() -> None:
    def embedding() -> nn.Module:
        return nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(8, 2))

    pixels = DRAW.integers(5, size=(24, 4)).astype(np.uint8)
    dense = Preparation(experiment(), data(pixels, LABELS), linear).data
    assert dense.read("a")[0].dtype == torch.float32
    np.testing.assert_array_equal(dense.read("a")[0].numpy(), pixels[:12])
    kept = Preparation(experiment(), data(pixels.astype(np.int32), LABELS), embedding).data
    assert kept.read("a")[0].dtype == torch.int32


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_data_on_demand_are_cast_whenever_they_are_read(workers: int) -> None:
    labels = LABELS.astype(np.float32)
    clients = fed.ClientsOnDemand(("a", "b"), arrays_of)
    on_demand = fed.FederatedData(clients, (INPUTS, labels), classes=2)
    expected = fed.simulate(experiment(), data=float32())
    assert_same(fed.simulate(experiment(simulation={"workers": workers}), data=on_demand), expected)


def arrays_of(client: str) -> Any:
    rows = slice(None, 12) if client == "a" else slice(12, None)
    return INPUTS[rows], LABELS[rows].astype(np.float32)


@pytest.mark.parametrize(
    ("loss", "targets", "dtype"),
    [
        (functional.cross_entropy, LABELS.astype(np.int32), torch.int64),
        (functional.cross_entropy, LABELS.astype(np.float32), torch.int64),
        (functional.binary_cross_entropy_with_logits, np.eye(2)[LABELS].astype(np.int64), torch.float32),
        (functional.mse_loss, np.eye(2)[LABELS].astype(np.float32), torch.float32),
    ],
)
def test_targets_become_what_a_users_own_loss_takes(loss: Any, targets: Any, dtype: torch.dtype) -> None:
    prepared = Preparation(experiment(), data(INPUTS.astype(np.float32), targets), linear, loss)
    cast = prepared.data.read("a")[1]
    assert cast.dtype == dtype
    np.testing.assert_array_equal(cast.numpy(), targets[:12])


def test_real_labels_are_refused_with_client_and_place() -> None:
    labels = LABELS.astype(np.float64)
    labels[20] = 0.5
    with pytest.raises(InvalidData, match=r"targets of client 'b' must be whole numbers, .* got 0.5 at index \(8,\)"):
        fed.simulate(experiment(), data=data(INPUTS, labels))
    with pytest.raises(InvalidData, match=r"integer labels for cross-entropy, got torch\.float64"):
        fed.simulate(experiment(), data=data(INPUTS, labels + 0.25))


def test_numbers_too_large_for_the_model_are_refused() -> None:
    inputs = INPUTS.copy()
    inputs[13, 2] = 1e300
    with pytest.raises(InvalidData, match=r"of client 'b' must be finite in float32, got 1e\+300 at index \(1, 2\)"):
        fed.simulate(experiment(), data=data(inputs, LABELS))


def test_a_model_of_another_shape_is_still_told_so() -> None:
    sentence = (
        r"cannot take the data's inputs, torch\.float64 of shape \(2, 4\): .* shapes cannot be multiplied \(2x4 and"
    )
    with pytest.raises(InvalidModel, match=sentence):
        fed.simulate(experiment(model=None), data=data(INPUTS, LABELS), model=lambda: nn.Linear(5, 2))


def test_rows_in_a_list_are_refused_with_what_to_give() -> None:
    with pytest.raises(InvalidExperiment, match=r"got a list with a row for each sample: .* as numpy\.array\(rows\)"):
        fed.simulate(experiment(), data=data(INPUTS.tolist(), LABELS))


def test_complex_inputs_lose_no_part_unsaid() -> None:
    with pytest.raises(InvalidData, match=r"inputs must be real numbers in float32, got complex128"):
        fed.simulate(experiment(), data=data(INPUTS + 1j, LABELS))


@pytest.mark.parametrize(("labels", "got"), [(2 * LABELS - 1, -1), (LABELS + 9, 10)])
def test_the_first_labels_beyond_the_outputs_are_named(labels: Any, got: int) -> None:
    with pytest.raises(InvalidData, match=rf"targets of client 'a' must be in 0 … 1, .* got {got}"):
        fed.simulate(experiment(model=None), data=data(INPUTS.astype(np.float32), labels), model=linear)
