"""Everything a simulated run is made of, put together and held to each other before the first round.

Shapes: V, a model's floating-point state; I, its integers; N peers.
"""

import copy
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fed.aggregators.centralized import Centralized
from fed.aggregators.contracts import LocalRule, PeerRule
from fed.clients.data import FederatedData, load
from fed.clients.evaluation import Metric, Score, accuracy, evaluate
from fed.clients.training import Loss, Trainer
from fed.errors import InvalidData, InvalidExperiment
from fed.experiment import Experiment
from fed.kinds import Component
from fed.layout import Layout
from fed.randomness import Streams, seeded_torch
from fed.server.coordinator import Coordinator
from fed.simulations.checks import (
    check_algorithm,
    check_batch_norm,
    check_labels,
    check_model,
    check_state,
    cross_entropy,
    own_copy,
)
from fed.simulations.devices import Device
from fed.simulations.federation import Coordinated, Federation
from fed.simulations.fleet import SimulatedFleet
from fed.simulations.in_process import InProcessClients
from fed.simulations.peers import SimulatedPeers
from fed.topology import mixing_matrix

__all__ = ["Simulation"]


class Simulation:
    """One experiment with its data and model, ready to run.

    Args:
        experiment: what to run.
        data: in place of the experiment's.
        model: a factory of modules, or a module to copy, in place of the experiment's.
        loss: (output, target) → scalar, in place of cross-entropy.
        metric: (output, target) → number, in place of accuracy; with a ``loss`` there is none unless given.

    Raises:
        InvalidInput: if the parts do not fit each other.
    """

    def __init__(
        self,
        experiment: Experiment,
        data: FederatedData | None = None,
        model: Callable[[], nn.Module] | None = None,
        loss: Loss | None = None,
        metric: Metric | None = None,
    ) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.streams = Streams(experiment.seed)
        self.experiment = _resolved(experiment, data, model)
        self.data = _data(experiment, data, self.streams)
        self.population = len(self.data.train)
        self.policy = experiment.rounds.make()
        self.policy.check(self.population)
        self.loss = loss or cross_entropy
        module = self._module(model, labelled=loss is None)
        self._untrained = copy.deepcopy(module)  # later copies begin here: what forward passes leave may not be copied
        self.loss = _on_device(self.loss, self.device)
        self.metric = _on_device(metric or (None if loss else accuracy), self.device)
        self.algorithm = check_algorithm(experiment.algorithm.make(), experiment.algorithm.kind)
        self.rule = self.algorithm if isinstance(self.algorithm, LocalRule) else None
        self.trainer = Trainer(module, self.loss, experiment.local, self.rule, self.device)
        self._pooled = isinstance(self.algorithm, Centralized)
        self.clients = InProcessClients(self.data.pooled() if self._pooled else self.data, self.trainer, self.streams)
        self.federation = self._federation()

    @property
    def layout(self) -> Layout:
        """The model's."""
        return self.trainer.layout

    def evaluate(self) -> dict[str, Any]:
        """The metrics of the model as it is, and of the clients' own where they keep some; None without a test set."""
        own = [self._score(*state) for state in self.federation.models().values()]
        line: dict[str, Any] = {}
        if own:
            accuracies = [score.accuracy for score in own if score.accuracy is not None]
            line = {
                "client_accuracy_mean": statistics.fmean(accuracies) if accuracies else None,
                "client_accuracy_std": _deviation(accuracies) if accuracies else None,
            }
        if own and self.algorithm.primitive is None and self.data.test is not None:
            loss = statistics.fmean(score.loss for score in own if score.loss is not None)
            return {"test_accuracy": line["client_accuracy_mean"], "test_loss": loss, **line}
        score = self._score(*self.federation.model())
        return {"test_accuracy": score.accuracy, "test_loss": score.loss, **line}

    def module_of(self, state: tuple[Tensor, Tensor]) -> nn.Module:
        """A module of its own, on the CPU and in evaluation mode, in a given state."""
        module = copy.deepcopy(self._untrained).eval()
        self.layout.unpack(*state, module)
        return module

    def _score(self, vector_V: Tensor, integers_I: Tensor) -> Score:
        if self.data.test is None:
            return Score(None, None)
        module = self.trainer.load(vector_V, integers_I)
        with seeded_torch(self.streams.torch_seed("evaluation"), self.device):
            return evaluate(module, self.loss, self.metric, self.data.test, self.device)

    def _module(self, model: Callable[[], nn.Module] | None, labelled: bool) -> nn.Module:
        """The first model, initialised from its own stream, and held to the data."""
        with seeded_torch(self.streams.torch_seed("model"), torch.device("cpu")):
            made = self._built_in_module() if model is None else model if isinstance(model, nn.Module) else model()
            module = own_copy(made)
            classes = check_model(module, self.data, self.loss, labelled)
        if labelled:
            check_labels(self.data, classes)
        check_state(module, self.experiment.local.precision)
        check_batch_norm(module, self.data, self.experiment.local.batch_size)
        return module

    def _built_in_module(self) -> nn.Module:
        section = self.experiment.model
        if section is None:
            raise InvalidExperiment("model: null needs a model given in Python: fed.simulate(…, model=…)")
        inputs, _ = next(iter(self.data.train.values()))
        module: nn.Module = section.make(
            input_shape=tuple(inputs.shape[1:]), classes=max(1, self.data.number_of_classes() or 1)
        )
        is_users_own = section.kind.startswith("python:")
        return module.to(inputs.dtype) if inputs.is_floating_point() and not is_users_own else module

    def _mixing_matrix(self, topology: Component) -> Tensor:
        graph = topology.make(peers=self.population)
        if len(graph) != self.population:
            raise InvalidExperiment(f"topology must have a node for each of {self.population} clients, got {graph}")
        return mixing_matrix(graph)

    def _federation(self) -> Federation:
        vector_V, integers_I = (part.cpu() for part in self.layout.pack(self.trainer.module))
        if isinstance(self.algorithm, PeerRule):
            topology = self.experiment.topology
            mixing_NN = self._mixing_matrix(topology) if topology else None
            return SimulatedPeers(self.algorithm, mixing_NN, self.clients, self.layout, vector_V, integers_I, Device())
        fleet = SimulatedFleet(self.clients, Device.without_network() if self._pooled else Device())
        coordinator = Coordinator(self.algorithm, fleet, self.layout, vector_V, integers_I, self.streams)
        return Coordinated(self.policy, coordinator, 0 if self._pooled else self.layout.size_bytes())


def _deviation(values: list[float]) -> float:
    return statistics.pstdev(values) if all(map(math.isfinite, values)) else math.nan  # pstdev takes no infinity


def _on_device(measure: Any, device: torch.device) -> Any:
    """A loss or metric that is a module, such as one with weights of classes, where the model's output will be."""
    return copy.deepcopy(measure).to(device) if isinstance(measure, nn.Module) else measure


def _resolved(experiment: Experiment, data: object, model: object) -> Experiment:
    """The experiment as it is run: sections that Python objects take the place of are null."""
    given = {name: None for name, value in (("data", data), ("model", model)) if value is not None}
    return experiment.override(given) if given else experiment


def _data(experiment: Experiment, data: FederatedData | None, streams: Streams) -> FederatedData:
    if data is not None:
        if not isinstance(data, FederatedData):
            raise InvalidData(f"data must be a fed.FederatedData, got {type(data).__name__}")
        return data
    if experiment.data is None:
        raise InvalidExperiment("data: null needs data given in Python: fed.simulate(…, data=…)")
    return load(experiment.data, streams)
