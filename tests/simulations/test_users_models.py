"""Whole runs with models, losses and data of a user's own that do what PyTorch allows."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fed
from fed.simulations.expectation import Expectation
from fed.simulations.simulate import simulate


def samples(count: int = 12, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    return inputs, (inputs.sum(1) > 0).long()


def two_clients() -> fed.FederatedData:
    inputs, labels = samples()
    return fed.FederatedData({"a": (inputs[:6], labels[:6]), "b": (inputs[6:], labels[6:])}, samples())


def experiment(**keys: Any) -> fed.Experiment:
    return fed.Experiment(**{"rounds": {"count": 3}, "local": {"batch_size": 4}, **keys})


def state_of(run: fed.Run) -> list[Tensor]:
    return list(run.model.state_dict().values())


def equal(left: fed.Run, right: fed.Run) -> bool:
    return all(map(torch.equal, state_of(left), state_of(right)))


class Watcher:
    def begin(self, expectation: Expectation) -> None:
        pass

    def round(self, line: object) -> None:
        pass


class MaxNorm(nn.Linear):
    """Holds its weights to a norm by putting other ones in their place, as is usual in models of brain waves."""

    def forward(self, inputs: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 1e6)
        return super().forward(inputs)


@pytest.mark.parametrize("local", [{"batch_size": 4}, {"batch_size": 2, "accumulate": 2}, {"optimizer": "adam"}])
@pytest.mark.parametrize("algorithm", ["fedprox", "dpsgd"])
def test_a_parameter_whose_data_a_forward_pass_replaces_is_trained(algorithm: str, local: dict[str, Any]) -> None:
    keys = experiment(algorithm={"kind": algorithm}, local=local)
    replaced = simulate(keys, data=two_clients(), model=lambda: MaxNorm(4, 2))
    assert equal(replaced, simulate(keys, data=two_clients(), model=lambda: nn.Linear(4, 2)))


def test_what_a_model_caches_while_it_is_evaluated_it_can_train_with() -> None:
    class Caching(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 2)
            self.cache: dict[int, Tensor] = {}

        def forward(self, inputs: Tensor) -> Tensor:
            scale = self.cache.setdefault(len(inputs), torch.full((len(inputs), 1), 2.0))
            scores: Tensor = super().forward(inputs) * scale
            return scores

    data = fed.FederatedData({0: samples()}, samples())
    run = simulate(experiment(local={"batch_size": 12}), data=data, model=Caching, observer=Watcher())
    assert run.summary["status"] == "finished"


def test_buffers_that_are_not_saved_do_not_go_from_one_client_or_evaluation_to_the_next() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 2)
            self.register_buffer("calls", torch.zeros(2), persistent=False)

        def forward(self, inputs: Tensor) -> Tensor:
            calls = self.get_buffer("calls").add_(torch.tensor([0.1, 0.0]))
            return super().forward(inputs) + calls.clone()

    often, once = (
        simulate(experiment(rounds={"count": 4, "evaluate_every": every}), data=two_clients(), model=Counting)
        for every in (1, 4)
    )
    assert equal(often, once)
    assert often.metrics[-1]["test_loss"] == once.metrics[-1]["test_loss"]


def test_batches_that_share_a_step_are_shuffled_for_a_model_may_normalise_within_each() -> None:
    seen: list[tuple[float, ...]] = []

    class Watching(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            if self.training:
                seen.append(tuple(sorted(inputs[:, 0].tolist())))
            return super().forward(inputs)

    data = fed.FederatedData({0: samples(8)})
    simulate(experiment(local={"batch_size": 4, "accumulate": 2, "epochs": 5}), data=data, model=lambda: Watching(4, 2))
    assert len(set(seen)) > 2


def test_sparse_gradients_are_taken() -> None:
    inputs, labels = torch.arange(12).reshape(6, 2) % 5, torch.arange(6) % 2
    dense, sparse = (
        simulate(
            experiment(),
            data=fed.FederatedData({0: (inputs, labels)}),
            model=lambda is_sparse=is_sparse: nn.Sequential(  # type: ignore[misc]  # a factory with a default
                nn.Embedding(5, 3, sparse=is_sparse), nn.Flatten(), nn.Linear(6, 2)
            ),
        )
        for is_sparse in (False, True)
    )
    assert equal(dense, sparse)
