"""From keys to data by client: what is held out, who gets the rest, and what is refused."""

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import ConcatDataset

from fed.clients.data import FederatedData, Samples
from fed.clients.data.held import whole
from fed.clients.data.sources.digits import digits
from fed.errors import InvalidData, InvalidExperiment, InvalidInput

Load = Callable[..., FederatedData]
Named = Callable[[Callable[..., Any]], str]

NUMBERED: list[dict[str, Any]] = [
    {"kind": "iid"},
    {"kind": "dirichlet", "alpha": 1.0},
    {"kind": "shards"},
    {"kind": "quantity"},
    {"kind": "range"},
    {"kind": "hash"},
    {"kind": "rank"},
]


def numbered(samples: int = 60) -> Samples:
    """Samples that tell themselves apart: the input is the sample's number."""
    client = np.array(["ann", "bob", "cleo"])[np.minimum(np.arange(samples) // (samples // 6), 2)]
    return Samples(
        torch.arange(samples, dtype=torch.float64).reshape(-1, 1), torch.arange(samples) % 4, columns={"client": client}
    )


def everything(data: FederatedData) -> list[float]:
    parts = [x for x, _ in data.train.values()] + ([data.test[0]] if data.test else [])
    return sorted(torch.cat(parts).flatten().tolist())


def test_digits_are_the_default_and_hold_out_a_fifth(loaded: Load) -> None:
    data = loaded()
    assert list(data.train) == list(range(100))
    assert data.test is not None
    assert (len(data.test[1]), sum(data.sizes.values())) == (359, 1438)
    x, y = data.train[0]
    assert (x.dtype, x.shape[1:], y.dtype, data.classes) == (torch.float32, (64,), torch.int64, 10)
    pixels = torch.cat([x for x, _ in data.train.values()])
    assert (float(pixels.min()), float(pixels.max())) == (0.0, 1.0)


def test_digits_are_those_of_scikit_learn() -> None:
    pixels_EF, labels_E = load_digits(return_X_y=True)
    samples = digits()
    assert torch.equal(samples.inputs, torch.from_numpy(pixels_EF / 16).to(torch.float32))
    assert samples.targets.tolist() == labels_E.tolist()


@pytest.mark.parametrize("partition", [*NUMBERED, {"kind": "natural"}], ids=lambda keys: str(keys["kind"]))
def test_every_sample_is_trained_on_once_or_held_out(loaded: Load, named: Named, partition: dict[str, Any]) -> None:
    data = loaded(kind=named(numbered), clients=3, partition=partition)
    assert everything(data) == list(range(60))
    for x, y in data.train.values():
        assert torch.equal(x.flatten().long() % 4, y)  # inputs and targets stay together
    assert data.test is not None
    assert len(data.test[1]) == 12


def test_test_set_depends_on_seed_and_not_on_partition(loaded: Load) -> None:
    def test_set(seed: int, **keys: Any) -> Tensor:
        data = loaded(seed=seed, kind="digits", **keys)
        assert data.test is not None
        inputs: Tensor = data.test[0]
        return inputs

    expected = test_set(0, clients=20)
    for partition in NUMBERED:
        assert torch.equal(expected, test_set(0, clients=10, partition=partition))
    assert not torch.equal(expected, test_set(1, clients=20))


def test_a_seed_says_all(loaded: Load) -> None:
    keys: dict[str, Any] = {"clients": 30, "partition": {"kind": "dirichlet", "alpha": 0.5, "overlap": 0.5}}
    first, again, other = loaded(seed=3, **keys), loaded(seed=3, **keys), loaded(seed=4, **keys)
    assert all(torch.equal(first.train[client][0], again.train[client][0]) for client in first.train)
    assert first.sizes != other.sizes


def test_natural_clients_keep_their_names_and_give_the_same_share(loaded: Load, named: Named) -> None:
    data = loaded(kind=named(numbered), test_fraction=0.3)  # natural, because the source names clients
    assert data.sizes == {"ann": 7, "bob": 7, "cleo": 28}
    assert data.test is not None
    held_out = data.test[0].flatten()
    assert [int(((low <= held_out) & (held_out < end)).sum()) for low, end in ((0, 10), (10, 20), (20, 60))] == [
        3,
        3,
        12,
    ]


def test_every_natural_client_keeps_a_sample(loaded: Load, named: Named) -> None:
    lonely = Samples(torch.zeros(5, 1), torch.zeros(5, dtype=torch.long), columns={"client": np.array(list("abccc"))})
    data = loaded(kind=named(lambda: lonely), test_fraction=0.99)
    assert data.sizes == {"a": 1, "b": 1, "c": 1}
    assert data.test is not None
    assert len(data.test[1]) == 2


def test_natural_clients_hold_out_samples_independently_of_others(loaded: Load, named: Named) -> None:
    everyone = loaded(kind=named(numbered))
    alone = loaded(kind=named(lambda: numbered().take(np.arange(10))))
    assert torch.equal(everyone.train["ann"][0], alone.train["ann"][0])


def test_natural_clients_hold_out_by_streams_of_their_own(loaded: Load, named: Named) -> None:
    client = np.repeat(["a", "b"], 50)
    alike = Samples(torch.arange(100.0).reshape(-1, 1), torch.zeros(100, dtype=torch.long), columns={"client": client})
    train = loaded(kind=named(lambda: alike)).train
    assert not torch.equal(train["a"][0], train["b"][0] - 50)


def test_natural_with_a_number_keeps_the_largest(loaded: Load, named: Named) -> None:
    assert list(loaded(kind=named(numbered), clients=2).train) == ["ann", "cleo"]
    with pytest.raises(InvalidData, match=r"clients=4 and 3 clients in the data: lower data.clients"):
        loaded(kind=named(numbered), clients=4)


def test_overlap_adds_holders_and_keeps_the_test_set(loaded: Load, named: Named) -> None:
    kind = named(numbered)
    once, more = (loaded(kind=kind, clients=4, partition={"kind": "iid", "overlap": overlap}) for overlap in (0.0, 1.5))
    assert sum(more.sizes.values()) == 2.5 * sum(once.sizes.values())
    assert once.test is not None
    assert more.test is not None
    assert torch.equal(once.test[0], more.test[0])
    for client in once.train:
        assert set(once.train[client][0].flatten().tolist()) <= set(more.train[client][0].flatten().tolist())
    assert not set(once.test[0].flatten().tolist()) & {v for x, _ in more.train.values() for v in x.flatten().tolist()}


def test_without_a_test_fraction_nothing_is_evaluated(loaded: Load) -> None:
    data = loaded(kind="digits", test_fraction=0.0)
    assert data.test is None
    assert sum(data.sizes.values()) == 1797


def test_a_client_does_not_drag_all_samples_along(loaded: Load) -> None:
    data = loaded(kind="digits", clients=100)
    assert len(pickle.dumps(data.train[0])) < 20_000


def test_a_source_may_return_a_pair_of_arrays(loaded: Load, named: Named) -> None:
    data = loaded(kind=named(lambda: (np.zeros((50, 2)), np.arange(50) % 3)), clients=5)
    assert data.train[0][0].dtype == torch.float64  # as it is
    assert len(data.train) == 5


def test_a_source_may_take_streams_and_keys_of_its_own(loaded: Load, named: Named) -> None:
    def source(streams: Any, size: int) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(streams.generator("mine").normal(size=(size, 2))), torch.zeros(size, dtype=torch.long)

    data = loaded(kind=named(source), size=20, clients=2, seed=1)
    assert sum(data.sizes.values()) == 16
    assert everything(data) != everything(loaded(kind=named(source), size=20, clients=2, seed=2))


def test_federated_data_of_a_source_stay_as_they_are(loaded: Load, named: Named) -> None:
    pair = (torch.zeros(4, 1), torch.zeros(4, dtype=torch.long))
    data = FederatedData({"a": pair, 7: pair}, pair)
    assert loaded(kind=named(lambda: data)) is data


def test_federated_data_of_a_source_can_be_dealt_anew(loaded: Load, named: Named) -> None:
    pair = (torch.arange(8.0).reshape(8, 1), torch.zeros(8, dtype=torch.long))
    kind = named(lambda: FederatedData({"a": pair, 7: pair}))
    assert loaded(kind=kind).sizes == {7: 6, "a": 6}  # held out of each
    assert loaded(kind=kind, partition={"kind": "iid"}, clients=4).sizes == {0: 4, 1: 3, 2: 3, 3: 3}


def test_a_partition_of_ones_own_may_number_or_name(loaded: Load, named: Named) -> None:
    halves = named(lambda samples, clients: np.arange(len(samples)) % clients)
    assert loaded(partition={"kind": halves}, clients=7).sizes.keys() == set(range(7))
    parity = named(lambda samples: np.where(samples.targets.numpy() % 2, "odd", "even"))
    assert list(loaded(partition={"kind": parity}).train) == ["even", "odd"]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"clients": 2000},
            "clients=2000 and 1438 training samples .359 more are held out to test.: lower",
        ),
        (
            {"clients": 50, "partition": {"kind": "hash", "by": "label"}},
            "leaves 4[0-9] without data: 0, .* and 3[0-9] more",
        ),
        ({"partition": {"kind": "natural"}}, "partition natural needs a source that knows the client of each sample"),
        ({"partition": {"kind": "file"}}, "partition file needs a source that knows the file of each sample"),
        ({"clients": 3, "partition": {"kind": "iid", "overlap": 3.0}}, "got overlap=3.0 with 3 clients: lower it"),
        ({"partition": {"kind": "dirichlet", "alpha": 0.01}}, "raise data.partition.alpha"),
    ],
)
def test_what_cannot_be_dealt_is_refused_in_a_line(loaded: Load, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidData, match=said) as caught:
        loaded(kind="digits", **keys)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "must return fed.clients.data.Samples, fed.FederatedData or a pair .inputs, targets., got NoneType"),
        ((np.zeros((3, 1)), np.zeros(2, dtype=int)), "inputs, targets and columns must have one value a sample"),
        ((np.array([[0.0], [np.nan], [1.0]]), np.zeros(3, dtype=int)), "must be finite, got nan"),
    ],
)
def test_what_a_source_may_not_return(loaded: Load, named: Named, returned: object, said: str) -> None:
    with pytest.raises(InvalidData, match=said) as caught:
        loaded(kind=named(lambda: returned), clients=1, test_fraction=0.0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("holders", "said"),
    [
        (lambda samples, clients: [0, 1], "must return a client's number or name for each of 1438 samples"),
        (lambda samples, clients: np.zeros(len(samples)), "must return a client's number"),
        (lambda samples, clients: np.arange(len(samples)), r"must return numbers in 0 … 4, .* got 5"),
        (lambda samples, clients: np.zeros(len(samples), int), "leaves 4 without data: 1, 2, 3, 4; lower data.clients"),
    ],
)
def test_what_a_partition_may_not_return(loaded: Load, named: Named, holders: Callable[..., Any], said: str) -> None:
    with pytest.raises(InvalidData, match=said):
        loaded(partition={"kind": named(holders)}, clients=5)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"kind": "digit"}, "data.kind: no such data; did you mean digits?"),
        ({"kind": "digits", "client": 3}, "data.client: unknown key; did you mean clients?"),
        ({"kind": "text"}, "data.path: missing key"),
        ({"partition": {"kind": "dirichlet", "alpha": 0}}, "data.partition.alpha must be greater than 0"),
        ({"partition": {"kind": "dirichlet", "min_samples": 0}}, "data.partition.min_samples must be greater than 0"),
        (
            {"partition": {"kind": "shards", "classes": 3}},
            "data.partition.classes: unknown key; did you mean",
        ),
    ],
)
def test_bad_keys_are_named_with_what_is_allowed(loaded: Load, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidExperiment) as caught:
        loaded(**keys)
    assert isinstance(caught.value, InvalidInput)
    assert said in str(caught.value)


def test_a_source_that_raises_is_named_in_one_sentence(loaded: Load, named: Named) -> None:
    def broken() -> None:
        raise KeyError("path")

    kind = named(broken)
    with pytest.raises(InvalidData, match=rf"^{kind} raised KeyError: 'path', at .*test_load\.py:\d+: correct it$"):
        loaded(kind=kind)


def test_a_source_may_return_what_people_have(loaded: Load, named: Named) -> None:
    frame = pd.DataFrame({"a": [0.5, 1.5, 2.5, 3.5], "label": [0, 1, 1, 0]})
    inputs = frame[["a"]].to_numpy()
    forms: list[Any] = [(inputs, frame["label"]), (frame, "label"), [*zip(inputs, frame["label"], strict=True)]]
    forms[2] = ConcatDataset([forms[2]])
    data = [loaded(kind=named(partial(_given, form)), clients=2, test_fraction=0) for form in forms]
    for client in (0, 1):
        arrays, parted, read = (whole(one.read(client)) for one in data)
        assert all(map(torch.equal, arrays, parted))
        assert all(map(torch.equal, arrays, read))


def _given(form: Any) -> Any:
    return form


def test_a_frame_alone_is_answered_with_what_to_return(loaded: Load, named: Named) -> None:
    with pytest.raises(InvalidData, match=r"a frame needs its targets, .* \(frame, name\)"):
        loaded(kind=named(lambda: pd.DataFrame({"a": [1.0]})))
