"""Deployments whose samples are trees end with the bits of the simulation, and refuse nodes with other trees."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fed
from fed.clients.data import Names
from fed.clients.data.forms import check_form, form_of, zeros_of
from fed.clients.node.own_data import check_collate, samples_of, signature_of
from fed.clients.node.sessions import Limits, SecureNode
from fed.config.node_data import NodeData
from fed.errors import InvalidData
from fed.identity.authority import Authority
from fed.identity.credentials import NodeCredentials, ServerCredentials
from fed.server.grpc.deploy import serve
from fed.server.validation import refusal_of_signature
from tests.clients.training.readers import __name__ as home
from tests.clients.training.readers import augmented, classified, sentences
from tests.server.grpc.threaded import ThreadedNode, nodes_of

CODE = [f"python:{home}:reader", f"python:{home}:augmented"]


def experiment(**keys: Any) -> fed.Experiment:
    sections: dict[str, Any] = {
        "data": None,
        "model": CODE[0],
        "collate": {"kind": CODE[1], "is_alone": False},
        "local": {"lr": 0.1, "batch_size": 4},
        "rounds": {"count": 2},
        "evaluation": {"kind": "clients", "fraction": 0.3},
        "simulation": {"batching": "off", "workers": 0},
    }
    return fed.Experiment(**{**sections, **keys})


@pytest.mark.parametrize("keys", [{}, {"uplink": ["int8"], "error_feedback": "ef"}], ids=["plain", "codec"])
def test_deployment_ends_with_the_simulations_bits(keys: dict[str, Any], tmp_path: Path) -> None:
    """A server without data makes the model by the form that the first node says; batches draw from nodes' streams."""
    data = fed.FederatedData({client: classified(client, 9 + client) for client in range(3)}, classes=3)
    asked = experiment(**keys)
    simulated = fed.simulate(asked, data=data)
    nodes: list[ThreadedNode] = []
    begin = lambda port: nodes.extend(nodes_of(data, port, tmp_path, allowed=CODE))  # noqa: E731
    deployed = serve(asked, listen="127.0.0.1:0", output=tmp_path / "run", min_nodes=3, on_listen=begin)
    for node in nodes:
        node.end()
    for ours, theirs in zip(deployed.model.parameters(), simulated.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert deployed.metrics[-1]["test_loss"] == simulated.metrics[-1]["test_loss"]


def source() -> fed.FederatedData:
    """Three clients with sentences of several lengths, and a test set."""
    return fed.FederatedData({client: classified(client, 9 + client) for client in range(3)}, classified(7), classes=3)


class Scans(nn.Module):
    """A model of two inputs, which a dictionary gives by the names of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.of_pixels = nn.Linear(4, 3)
        self.of_age = nn.Linear(1, 3)

    def forward(self, pixels: torch.Tensor, age: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.of_pixels(pixels)) + torch.as_tensor(self.of_age(age))


def archives(path: str) -> fed.FederatedData:
    """Archives of a folder, or one file, each a client whose inputs are a dictionary of its arrays."""
    files = sorted(Path(path).glob("*.npz")) or [Path(path)]
    found = {}
    for client, file in enumerate(files):
        with np.load(file) as arrays:
            found[client] = {"pixels": arrays["pixels"], "age": arrays["age"]}, arrays["label"]
    return fed.FederatedData(found, classes=3)


@pytest.mark.long
def test_archives_of_several_arrays_have_the_simulations_bits(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    (folder := tmp_path / "scans").mkdir()
    for client in range(3):
        size = 9 + client
        pixels = draw.normal(size=(size, 4)).astype(np.float32)
        age = draw.normal(size=(size, 1)).astype(np.float32)
        np.savez(folder / f"{client}.npz", pixels=pixels, age=age, label=np.arange(size) % 3)
    kind = f"python:{__name__}:archives"
    asked = experiment(model=f"python:{__name__}:Scans", collate=None)
    simulated = fed.simulate(asked, data=archives(str(folder)))
    nodes: list[ThreadedNode] = []

    def begin(port: int) -> None:
        for client in range(3):
            source: Any = {"kind": kind, "path": str(folder / f"{client}.npz"), "test_fraction": 0.0}
            own = samples_of(NodeData(data=source, client=0), client)
            nodes.append(ThreadedNode(port, client, own, tmp_path / f"node-{client}", [f"python:{__name__}:Scans"]))

    deployed = serve(asked, listen="127.0.0.1:0", output=tmp_path / "run", min_nodes=3, on_listen=begin)
    for node in nodes:
        node.end()
    for ours, theirs in zip(deployed.model.parameters(), simulated.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert deployed.metrics[-1]["test_loss"] == simulated.metrics[-1]["test_loss"]
    archive: Any = {"kind": "npz", "path": str(folder / "0.npz")}
    plain = NodeData(data=archive)
    with pytest.raises(
        InvalidData, match="must name the one array of inputs, got pixels, age: name one; for a model of"
    ):
        samples_of(plain, 0)


@pytest.mark.long
def test_masked_sums_of_trees_have_the_simulations_bits(tmp_path: Path) -> None:
    asked = experiment(
        data={"kind": f"python:{__name__}:source"},
        evaluation="coordinator",
        secure_aggregation={"minimum_cohort": 3, "max_weight": 20, "max_drop_out": 0.0},
    )
    authority = Authority.create(tmp_path / "keys", hosts=["127.0.0.1"])
    folders = [authority.issue(str(client)) for client in range(3)]
    nodes: list[ThreadedNode] = []

    def begin(port: int) -> None:
        for client, folder in enumerate(folders):
            (own := tmp_path / f"node-{client}").mkdir()
            limits = Limits(minimum_cohort=3)
            secure = SecureNode(NodeCredentials.load(folder), own, limits, begins_record=True)
            nodes.append(ThreadedNode(port, client, source().only(client, client), own, CODE, secure, over_tls=True))

    credentials = ServerCredentials.load(authority.folder)
    where: dict[str, Any] = {"listen": "127.0.0.1:0", "output": tmp_path / "run", "credentials": credentials}
    deployed = serve(asked, **where, min_nodes=3, on_listen=begin)
    for node in nodes:
        node.end()
    simulated = fed.simulate(asked)
    plain = fed.simulate(asked.override({"secure_aggregation": None}))
    every = zip(deployed.model.parameters(), simulated.model.parameters(), plain.model.parameters(), strict=True)
    for ours, theirs, unmasked in every:
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, unmasked, rtol=0, atol=1e-5)  # the grid of the lanes
    assert deployed.metrics[-1]["bytes_up"] == simulated.metrics[-1]["bytes_up"]


def test_a_node_with_another_tree_is_refused() -> None:
    ours = signature_of(fed.FederatedData({0: classified(0)}).read(0), 3, Names())
    other = signature_of(fed.FederatedData({0: ({"words": sentences(0)}, [1] * 9)}).read(0), 3, Names())
    said = refusal_of_signature(other, ours)
    assert said is not None
    assert 'form [{"input_ids":"int64[*]"},"int64[]"], got [{"words":"int64[*]"},"int64[]"]' in said
    assert refusal_of_signature(ours, ours) is None
    plain = signature_of((torch.zeros(2, 3), torch.tensor([0, 1])), 2, Names())
    assert plain.form == ""
    assert "got two tensors" in str(refusal_of_signature(plain, ours))


def test_zeros_have_the_form_that_they_are_made_of() -> None:
    pair = {"a": (torch.zeros(2, 3), [[1], [2, 3]]), "b": torch.zeros(2, dtype=torch.bool)}, None
    form = form_of(fed.FederatedData({0: pair}).read(0))
    assert form == '[{"a":["float32[3]","int64[*]"],"b":"bool[]"},null]'
    assert form_of(zeros_of(form, 4)) == form


@pytest.mark.parametrize(
    "form",
    [
        *("", "[1]", "{}", '["float32[]"]', '["float33[]",null]', '["float32[999999999999]",null]', "[null,null]"),
        *('["float32[-1]",null]', "[" * 40 + "]" * 40, '[{"a":"float32[*,*]"},null]', '["float32[1e3]",null]'),
    ],
)
def test_a_form_that_is_none_is_refused(form: str) -> None:
    with pytest.raises(InvalidData):
        check_form(form)


def test_data_of_a_deployment_bring_no_collate() -> None:
    with pytest.raises(InvalidData, match="name it in the server's experiment, as collate: python:module:function"):
        check_collate(fed.FederatedData({0: classified(0)}, collate=augmented))
