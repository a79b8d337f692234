"""Algorithms over low-rank adapters: what they make of factors, against NumPy and against products written out."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fed
from fed.aggregators.adapters import OverAdapters, adapted_layers
from fed.aggregators.fedex_lora import FedExLoRA
from fed.aggregators.ffa_lora import FFALoRA
from fed.aggregators.flora import FLoRA
from fed.aggregators.reports import Reduced
from fed.compression.stage import Stage
from fed.errors import FedError, InvalidExperiment, InvalidModel, InvalidPayload
from fed.vectors.layout import Layout
from tests.lora_models import Adapted, adapted

CLIENTS, RANK = 4, 3
WEIGHTS_S = torch.tensor([3.0, 1.0, 4.0, 2.0], dtype=torch.float64)


class Transposed(Adapted):
    """A layer whose weight is stored as [inputs, outputs], as GPT-2's are."""

    def __init__(self, base: nn.Linear, rank: int, scaling: float) -> None:
        super().__init__(base, rank, scaling)
        base.weight = nn.Parameter(base.weight.detach().T.contiguous(), requires_grad=False)
        self.fan_in_fan_out = True


def a_model(kind: type[Adapted] = Adapted) -> nn.Module:
    """Two adapters between other parameters, in float64."""
    torch.manual_seed(2)
    layers = kind(nn.Linear(5, 4), RANK, 2.0), nn.LayerNorm(4), kind(nn.Linear(4, 6), RANK, 0.5)
    return nn.Sequential(*layers).double()


def prepared(rule: OverAdapters, module: nn.Module) -> tuple[Any, Layout]:
    layout = Layout.of(module, moved=rule.moves(module))
    return rule.for_model(module, layout), layout


def numbers(*size: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(size))


def effective(module: nn.Module, vector_V: Tensor, layout: Layout) -> list[np.ndarray[Any, Any]]:
    """W + s B A of each layer in a state, [outputs, inputs], in NumPy."""
    by_name = {part.name: part.view(vector_V).numpy() for part in (*layout.trained, *layout.averaged)}
    found = []
    for layer in adapted_layers(module):
        base = by_name[layer.base].T if layer.is_transposed else by_name[layer.base]
        found.append(base + layer.scale * by_name[layer.up] @ by_name[layer.down])
    return found


def after_a_round(rule: Any, state: Any, messages_SM: Tensor, weights_S: Tensor = WEIGHTS_S) -> Any:
    state, mean_M = rule.combine(state, messages_SM, weights_S, np.random.default_rng(7))
    return rule.apply(state, Reduced((mean_M,), clients=len(weights_S), population=9))


def model_of(rule: Any, state: Any, first_V: Tensor, layout: Layout) -> Tensor:
    return torch.cat([state.model_P, first_V[layout.parameters :] + rule.moved(state)])


@pytest.mark.parametrize("kind", [Adapted, Transposed])
@pytest.mark.parametrize("made", [FedExLoRA, FLoRA])
def test_the_model_is_that_of_the_mean_of_products(made: type[OverAdapters], kind: type[Adapted]) -> None:
    module = a_model(kind)
    rule, layout = prepared(made(), module)
    first_V, _ = layout.pack(module)
    state = rule.init(first_V[: layout.parameters])
    shares = (WEIGHTS_S / WEIGHTS_S.sum()).tolist()
    for number in range(3):
        before_V = model_of(rule, state, first_V, layout)
        updates_SM = numbers(CLIENTS, layout.parameters, seed=number)
        clients = [
            effective(module, torch.cat([state.model_P + update_M, before_V[layout.parameters :]]), layout)
            for update_M in updates_SM
        ]
        state = after_a_round(rule, state, updates_SM)
        after = effective(module, model_of(rule, state, first_V, layout), layout)
        for place, found in enumerate(after):
            mean = sum(share * one[place] for share, one in zip(shares, clients, strict=True))
            np.testing.assert_allclose(found, mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("made", [FedExLoRA, FLoRA])
def test_factors_give_the_movement_to_the_bit(made: type[OverAdapters], dtype: torch.dtype) -> None:
    module = a_model(Transposed).to(dtype)
    rule, layout = prepared(made(), module)
    before = rule.init(layout.pack(module)[0][: layout.parameters].double())
    after = after_a_round(rule, before, numbers(CLIENTS, layout.parameters))
    travelled = rule.factors(after).to(dtype).double()
    assert len(travelled) == rule.factor_count(CLIENTS) == (CLIENTS - (made is FedExLoRA)) * RANK * (5 + 4 + 4 + 6)
    assert torch.equal(rule.moved(after), rule.movement(travelled))
    with pytest.raises(InvalidPayload, match=r"a multiple of 57, got \d+"):
        rule.movement(travelled[:-1])


@pytest.mark.parametrize("made", [FedExLoRA, FLoRA])
def test_what_has_no_adapter_is_averaged_as_in_fedavg(made: type[OverAdapters]) -> None:
    module = a_model()
    rule, layout = prepared(made(), module)
    state = rule.init(layout.pack(module)[0][: layout.parameters])
    updates_SM = numbers(CLIENTS, layout.parameters)
    moved_P = after_a_round(rule, state, updates_SM).model_P - state.model_P
    norm = [part for part in layout.trained if part.name.startswith("1.")]
    assert len(norm) == 2
    for part in norm:
        mean = WEIGHTS_S @ part.view(updates_SM).flatten(1) / WEIGHTS_S.sum()
        torch.testing.assert_close(part.view(moved_P).flatten(), mean, rtol=0, atol=1e-12)


def test_without_a_covariance_of_factors_no_residual_is_left() -> None:
    module = a_model()
    rule, layout = prepared(FedExLoRA(), module)
    state = rule.init(layout.pack(module)[0][: layout.parameters])
    alone = after_a_round(rule, state, numbers(1, layout.parameters), torch.tensor([3.0], dtype=torch.float64))
    assert not alone.moved_J.any()
    for factor in ("lora_A", "lora_B"):
        updates_SM = numbers(CLIENTS, layout.parameters)
        for part in layout.trained:
            if factor in part.name:
                part.view(updates_SM).copy_(part.view(updates_SM)[:1].clone())
        assert float(after_a_round(rule, state, updates_SM).moved_J.abs().max()) < 1e-15
    assert float(after_a_round(rule, state, numbers(CLIENTS, layout.parameters)).moved_J.abs().max()) > 0.1


def test_factors_of_unequal_ranks_are_stacked_as_by_hand() -> None:
    module = a_model()
    ranks = (1, 3, 2)
    rule, layout = prepared(FLoRA(ranks=ranks), module)
    first_V, _ = layout.pack(module)
    first_P = first_V[: layout.parameters]
    places_K = torch.tensor([4, 0, 2, 1])
    started_KP = rule.local_start(first_P, None, places_K)
    updates_SM = numbers(CLIENTS, layout.parameters)
    own = [ranks[place % 3] for place in places_K.tolist()]
    by_hand = effective(module, first_V, layout)
    shares = (WEIGHTS_S / WEIGHTS_S.sum()).tolist()
    for place, layer in enumerate(adapted_layers(module)):
        (down,) = (part for part in layout.trained if part.name == layer.down)
        (up,) = (part for part in layout.trained if part.name == layer.up)
        downs, ups = [], []
        for row, rank in enumerate(own):
            started = down.view(started_KP[row])
            assert torch.equal(started[:rank], down.view(first_P)[:rank])
            assert not started[rank:].any()
            # Gradients are 0 beyond the rank, and so are updates.
            down.view(updates_SM[row])[rank:] = 0.0
            up.view(updates_SM[row])[:, rank:] = 0.0
            trained = started + down.view(updates_SM[row])
            downs.append(shares[row] * trained[:rank].numpy())
            ups.append(up.view(updates_SM[row])[:, :rank].numpy())
        by_hand[place] = by_hand[place] + layer.scale * np.hstack(ups) @ np.vstack(downs)
    state = after_a_round(rule, rule.init(first_P), updates_SM)
    after = effective(module, model_of(rule, state, first_V, layout), layout)
    for found, expected in zip(after, by_hand, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_ranks_beyond_a_clients_own_keep_gradients_of_zero() -> None:
    module = a_model()
    rule, layout = prepared(FLoRA(ranks=(2,)), module)
    vector_V, integers_I = layout.pack(module)
    parameters = layout.parameters
    vector_V[:parameters] = rule.local_start(vector_V[:parameters], None, torch.tensor([0]))[0]
    layout.unpack(vector_V, integers_I, module)
    optimizer = torch.optim.SGD([part for part in module.parameters() if part.requires_grad], 0.1)
    for seed in range(4):
        optimizer.zero_grad()
        module(numbers(8, 5, seed=seed)).square().sum().backward()
        optimizer.step()
    for name, part in module.named_parameters():
        if "lora_A" in name:
            assert not part[2:].any()
            assert part[:2].all()
        if "lora_B" in name:
            assert not part[:, 2:].any()
            assert part[:, :2].all()


def test_adapters_begin_anew_within_their_bound() -> None:
    module = a_model()
    rule, layout = prepared(FLoRA(), module)
    state = rule.init(layout.pack(module)[0][: layout.parameters])
    after = after_a_round(rule, state, numbers(CLIENTS, layout.parameters))
    for layer in adapted_layers(module):
        parts = {part.name: part.view(after.model_P) for part in layout.trained}
        assert not parts[layer.up].any()
        inputs = parts[layer.down].shape[1]
        assert 0.5 * inputs**-0.5 < float(parts[layer.down].abs().max()) <= inputs**-0.5


def test_frozen_factors_are_named() -> None:
    assert FFALoRA().fixes(adapted()) == ["1.lora_A.default.weight", "4.lora_A.default.weight"]


def with_two_adapters(module: Adapted) -> None:
    module.lora_A["other"] = nn.Linear(5, 2, bias=False)


def with_a_bias(module: Adapted) -> None:
    module.lora_B["default"] = nn.Linear(RANK, 4)


def with_dora(module: Adapted) -> None:
    vars(module)["use_dora"] = {"default": True}


def with_another_shape(module: Adapted) -> None:
    module.base_layer = nn.Linear(6, 4)


@pytest.mark.parametrize("change", [with_two_adapters, with_a_bias, with_dora, with_another_shape])
def test_adapters_of_another_form_are_refused(change: Any) -> None:
    module = Adapted(nn.Linear(5, 4), RANK, 1.0)
    change(module)
    with pytest.raises(InvalidModel, match="adapt linear layers alone"):
        adapted_layers(module)


def frozen(module: nn.Module) -> nn.Module:
    module.get_parameter("4.lora_A.default.weight").requires_grad_(False)
    return module


def begun(module: nn.Module) -> nn.Module:
    nn.init.ones_(module.get_parameter("1.lora_B.default.weight"))
    return module


@pytest.mark.parametrize(
    ("algorithm", "model", "problem"),
    [
        ("fedex_lora", lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), "have lora_A, lora_B and scaling"),
        ("ffa_lora", lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), "have lora_A, lora_B and scaling"),
        ("fedex_lora", lambda: frozen(adapted()), r"both of whose factors are trained, got 4\.lora_A"),
        ("flora", lambda: begun(adapted()), r"that begin at 0, got numbers in 1\.lora_B"),
        ({"kind": "flora", "ranks": [2, 5]}, adapted, r"flora.ranks must be 1 to 3, .* got 5: lower it"),
        ("fedex_lora", lambda: adapted().requires_grad_(True), r"not trained, got 1\.base_layer\.weight"),
    ],
    ids=["no adapter", "none to freeze", "half", "begun", "rank", "all is trained"],
)
def test_models_without_such_adapters_are_refused(algorithm: Any, model: Any, problem: str) -> None:
    keys = fed.Experiment(data={"kind": "digits", "clients": 3}, model=None, algorithm=algorithm)
    with pytest.raises(FedError, match=problem):
        fed.simulate(keys, model=model)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"secure_aggregation": {}}, "needs each client's own message, got secure_aggregation"),
        ({"hierarchy": {"fan_out": 2}}, "needs each client's own message, got hierarchy"),
        ({"rounds": {"kind": "bounded_staleness", "count": 2}}, "needs a mean over the clients that answered"),
        ({"stages": ["python:tests.aggregators.test_adapters:Noise"]}, "must be without stages that change the mean"),
    ],
    ids=["masked", "edges", "staleness", "noise"],
)
def test_combinations_without_single_messages_are_refused(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidExperiment, match=problem):
        fed.Experiment(algorithm="fedex_lora", **keys)


class Noise(Stage):
    """A stage of the mean."""

    def change_mean(self, mean_M: Tensor, clients: int, draw: Any) -> Tensor:
        return mean_M + 1.0
