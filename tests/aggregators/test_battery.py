"""One battery over every algorithm over ``mean``, through the reports of clients and the coordinator that counts them.

Shapes: K, clients of a group; N, all clients; P, parameters; V, the model's floating-point state; M, numbers of a
message.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from fed.aggregators.base import Aggregator, ClientWork, Reduced
from fed.aggregators.client_side import first_client_state, format_of, reported, starting_states
from fed.aggregators.fedopt import FedAdagrad, FedAdam, FedYogi
from fed.aggregators.sign_majority import SignMajority
from fed.config.docstrings import arguments
from fed.config.registry import ALGORITHMS
from fed.server.coordinator import Coordinator
from fed.vectors.layout import Layout
from fed.vectors.randomness import Streams
from fed.wire.messages import Answer, Task, Update
from tests.scripted_fleet import ScriptedFleet, one_round
from tests.thinned import thinned

KINDS = [kind for kind in ALGORITHMS.builtin if ALGORITHMS.make(kind).make().primitive == "mean"]
RULES = {kind: ALGORITHMS.make(kind).make() for kind in KINDS}
battery = pytest.mark.parametrize("rule", RULES.values(), ids=KINDS)
linear = pytest.mark.parametrize("rule", [pytest.param(rule, id=kind) for kind, rule in RULES.items() if rule.linear])
"""Those whose messages a fleet may group; the others need them singly."""

MODULE = nn.Linear(4, 2, dtype=torch.float64)
LAYOUT = Layout.of(MODULE)
PARAMETERS, POPULATION = LAYOUT.parameters, 9
COHORTS = [*range(POPULATION)], [6, 2, 4, 1, 0, 8, 7], [5, 3, 4, 2, 1, 7, 8]
"""Of three rounds; in two of them a part of all clients, and as few as Bulyan takes."""


def numbers(*key: int, size: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.random.default_rng(key).standard_normal(size))


def start_vector() -> Tensor:
    return numbers(0, size=[PARAMETERS])


class TableFleet(ScriptedFleet):
    """Clients whose local steps are numbers from a table, and whose answers come in any order and grouping.

    Args:
        rule: what they report to.
        groups: the clients that train together, in the order in which their answers come; of each cohort those who are
            in it.
        weight: each weight, so many times.
        is_idle: whether nobody's model moves.
    """

    def __init__(
        self, rule: Aggregator, groups: Iterable[Sequence[int]], weight: float = 1.0, is_idle: bool = False
    ) -> None:
        super().__init__(range(POPULATION))
        self._rule, self._groups, self._weight, self._is_idle = rule, groups, weight, is_idle
        self._open: dict[int | str, Task] = {}
        self.states: dict[int, Any] = {}

    def size_of(self, client: int | str) -> int:
        return 1 + int(client) % 3

    def collect(self, until: float = float("inf"), enough: int | None = None) -> Iterator[Answer]:
        self._open = {task.client: task for task in self._taken()}
        for group in self._groups:
            if clients := [client for client in group if client in self._open]:
                yield self._answer(clients)

    def _answer(self, clients: list[int]) -> Answer:
        tasks = [self._open[client] for client in clients]
        first, model, rule = tasks[0], tasks[0].model, self._rule
        kept = [self.states.get(client, first_client_state(rule, LAYOUT, model.params_V)) for client in clients]
        state = kept[0] and type(kept[0])(*(torch.stack(parts) for parts in zip(*kept, strict=True)))
        start = starting_states(rule, LAYOUT, model.params_V, state)
        moves = torch.stack([numbers(client, first.round, size=[PARAMETERS]) for client in clients])
        column = torch.tensor(clients, dtype=torch.float64).unsqueeze(1)
        update_KM, weights_K, state, _ = reported(
            *(rule, LAYOUT, model.params_V, start, start + moves * (0.0 if self._is_idle else 0.1)),
            samples_K1=1 + column % 3,
            steps_K1=1 + column % 4,
            lr=0.1,
            momentum=0.5,
            train_loss_K1=1 + column,
            client_state=state,
            broadcast=model.broadcast,
            population=POPULATION,
            start_loss_K1=2 + column / 3,
            start_gradient_KP=-3 * moves,
            places_K=torch.tensor(clients),
        )
        for row, client in enumerate(clients):
            self.states[client] = state and type(state)(*(part[row] for part in state))
        weights_K = weights_K * self._weight
        assert len(clients) == 1 or rule.linear
        return Answer(
            tuple(task.id for task in tasks),
            first.round,
            tuple(clients),
            Update(
                update_KM[0] if len(clients) == 1 else weights_K @ update_KM / weights_K.sum(), float(weights_K.sum())
            ),
            model.integers_I,
            tuple(1 + client % 3 for client in clients),
            tuple(1.0 + client for client in clients),
        )


def model_after(rule: Aggregator, groups: Iterable[Sequence[int]], **script: Any) -> Tensor:
    """The coordinator's model after the three rounds."""
    fleet = TableFleet(rule, groups, **script)
    integers_I = torch.zeros(0, dtype=torch.int64)
    message = format_of(rule, LAYOUT, POPULATION)
    coordinator = Coordinator(rule, fleet, LAYOUT, message, start_vector(), integers_I, Streams(0))
    for number, cohort in enumerate(COHORTS, start=1):
        stats = one_round(coordinator, number, sorted(cohort))
        assert stats.replied == len(cohort)
    return coordinator.model()[0]


SINGLY = [[client] for client in range(POPULATION)]


@battery
def test_the_model_moves(rule: Aggregator) -> None:
    model = model_after(rule, SINGLY)
    assert bool(torch.isfinite(model).all())
    assert float((model - start_vector()).abs().min()) > 1e-6


@battery
def test_the_order_of_replies_does_not_matter_to_the_bit(rule: Aggregator) -> None:
    orders = [np.random.default_rng(seed).permutation(POPULATION).tolist() for seed in range(3)]
    models = [model_after(rule, [[client] for client in order]) for order in orders]
    assert {model.numpy().tobytes() for model in models} == {model_after(rule, SINGLY).numpy().tobytes()}


@linear
@pytest.mark.parametrize("groups", thinned([[[6, 0], [3, 1, 5], [2], [8, 4, 7]], [[*range(POPULATION)]]], quick=1))
def test_grouping_of_the_reduction_changes_the_model_by_rounding_alone(
    rule: Aggregator, groups: list[list[int]]
) -> None:
    torch.testing.assert_close(model_after(rule, groups), model_after(rule, SINGLY), rtol=1e-12, atol=1e-13)


@battery
@pytest.mark.parametrize("factor", thinned([3.0, 0.125, 1e6], quick=1))
def test_weights_scaled_by_a_constant_change_nothing(rule: Aggregator, factor: float) -> None:
    # Sums of products of 53 bits are rounded anew; the deviation of a mean of 9 is some of its last bits.
    once, scaled = (model_after(rule, SINGLY, weight=weight) for weight in (1.0, factor))
    torch.testing.assert_close(scaled, once, rtol=1e-12, atol=1e-13)


@battery
def test_updates_of_zero_leave_the_model_in_place(rule: Aggregator) -> None:
    if isinstance(rule, SignMajority):  # whose zeros vote
        return
    assert torch.equal(model_after(rule, SINGLY, is_idle=True), start_vector())


def a_group(rule: Aggregator, state: Any, rows: slice = slice(None)) -> ClientWork:
    """What four clients, or some of them, have done, each with a state of its own."""
    kept = rule.init_client(start_vector())
    if kept is not None:
        kept = type(kept)(*(part + numbers(9, place, size=[4, len(part)])[rows] for place, part in enumerate(kept)))
    anchor_P = rule.model_to_send(state)
    update_KP = numbers(1, size=[4, PARAMETERS])[rows]
    column = torch.arange(1.0, 5.0, dtype=torch.float64).unsqueeze(1)[rows]
    return ClientWork(
        update_KP=update_KP,
        anchor_P=anchor_P,
        began_KP=rule.local_start(anchor_P, kept).expand_as(update_KP),
        samples_K1=column,
        steps_K1=2 * column,
        lr=0.3,
        momentum=0.9,
        train_loss_K1=column,
        client_state=kept,
        broadcast=rule.broadcast(state),
        population=POPULATION,
        start_loss_K1=column / 3,
        start_gradient_KP=numbers(2, size=[4, PARAMETERS])[rows],
        places_K=torch.tensor([5, 0, 6, 2])[rows],
    )


def after_two_rounds(rule: Aggregator) -> Any:
    """A state in which nothing is zero any more."""
    state = rule.init(start_vector())
    for clients in (4, 3):
        report = rule.report(a_group(rule, state, slice(clients)))
        state = rule.apply(state, reduced(report))
    return state


def reduced(report: Any) -> Reduced:
    weights_K = report.weight_K1[:, 0] / report.weight_K1.sum()
    return Reduced(tuple(weights_K @ part for part in report.message), len(weights_K), POPULATION)


@linear
def test_messages_that_count_by_half_move_the_model_by_half(rule: Aggregator) -> None:
    """As stale ones do, whatever they hold beside an update. (Of adaptive rules the first step is a sign alone, and a
    vote counts whole.)"""
    if isinstance(rule, FedAdagrad | FedAdam | FedYogi | SignMajority):
        return
    state = rule.init(start_vector())
    whole = reduced(rule.report(a_group(rule, state)))
    half = dataclasses.replace(whole, mean=tuple(part / 2 for part in whole.mean))
    step_P, half_P = (rule.apply(state, one).model_P - state.model_P for one in (whole, half))
    torch.testing.assert_close(half_P, step_P / 2, rtol=1e-12, atol=1e-14)


@battery
def test_a_report_of_many_clients_is_that_of_each_alone(rule: Aggregator) -> None:
    state = after_two_rounds(rule)
    together = rule.report(a_group(rule, state))
    alone = [rule.report(a_group(rule, state, slice(row, row + 1))) for row in range(4)]
    parts = [*together.message, together.weight_K1, *(together.client_state or ())]
    for part, *rows in zip(
        parts, *([*one.message, one.weight_K1, *(one.client_state or ())] for one in alone), strict=True
    ):
        assert part.shape[0] == 4
        torch.testing.assert_close(torch.cat(rows), part, rtol=1e-14, atol=0)  # norms may be summed in another order


@battery
def test_local_rule_on_many_clients_equals_each_alone(rule: Aggregator) -> None:
    if not rule.corrects:
        return
    work = a_group(rule, after_two_rounds(rule))
    gradient_KP, x_KP = numbers(3, size=[4, PARAMETERS]), numbers(4, size=[4, PARAMETERS])
    together = rule.correct(gradient_KP, x_KP, work.anchor_P.expand(4, -1), work.client_state, work.broadcast)
    for row in range(4):
        kept = work.client_state and type(work.client_state)(*(part[row] for part in work.client_state))
        alone = rule.correct(gradient_KP[row], x_KP[row], work.anchor_P, kept, work.broadcast)
        assert torch.equal(alone, together[row])


@battery
def test_messages_are_as_long_as_foretold_and_all_is_float64(rule: Aggregator) -> None:
    state = rule.init(start_vector())
    report = rule.report(a_group(rule, state))
    sizes = tuple(part.shape[1] for part in report.message)
    assert sizes == format_of(rule, LAYOUT, POPULATION).parts
    assert {tensor.dtype for tensor in tensors(state).values()} == {torch.float64}
    kept, state = rule.init_client(start_vector()), rule.apply(state, reduced(report))
    assert {part.dtype for part in (*report.message, *(report.client_state or ()), *rule.broadcast(state))} <= {
        torch.float64
    }
    assert {tensor.dtype for tensor in tensors(state).values()} == {torch.float64}
    assert report.weight_K1.shape == (4, 1)
    assert type(report.client_state) is type(kept)
    assert [part.shape for part in report.client_state or ()] == [(4, *part.shape) for part in kept or ()]


@battery
def test_reports_and_rounds_change_nothing_in_place(rule: Aggregator) -> None:
    state = after_two_rounds(rule)
    before = {name: tensor.clone() for name, tensor in tensors(state).items()}
    work, untouched = a_group(rule, state), a_group(rule, state)
    rule.apply(state, reduced(rule.report(work)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(state).items())
    assert torch.equal(work.update_KP, untouched.update_KP)
    for part, was in zip(work.client_state or (), untouched.client_state or (), strict=True):
        assert torch.equal(part, was)


def tensors(state: Any, name: str = "state") -> dict[str, Tensor]:
    """The tensors of nested (named) tuples, by their place; of None there are none."""
    if isinstance(state, Tensor):
        return {name: state}
    assert state is None or isinstance(state, tuple), f"{name} must be a tensor or a tuple, got {state!r}"
    parts = [tensors(part, f"{name}.{place}") for place, part in enumerate(state or ())]
    return {key: tensor for part in parts for key, tensor in part.items()}


def refilled(state: Any, source: Callable[[str], Tensor], name: str = "state") -> Any:
    """The same tuples, around other tensors."""
    if state is None or isinstance(state, Tensor):
        return None if state is None else source(name)
    parts = [refilled(part, source, f"{name}.{place}") for place, part in enumerate(state)]
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)


@battery
def test_a_state_survives_a_checkpoint(rule: Aggregator) -> None:
    for state in (rule.init(start_vector()), after_two_rounds(rule)):
        assert state._fields[0] == "model_P"
        kept = load(save({name: tensor.contiguous().clone() for name, tensor in tensors(state).items()}))
        again = refilled(rule.init(start_vector()), kept.__getitem__)
        assert type(again) is type(state)
        report = rule.report(a_group(rule, again))
        on, on_again = (rule.apply(one, reduced(report)) for one in (state, again))
        assert {name: tensor.numpy().tobytes() for name, tensor in tensors(on).items()} == {
            name: tensor.numpy().tobytes() for name, tensor in tensors(on_again).items()
        }
        assert torch.equal(rule.model_to_send(on), rule.model_to_send(on_again))


@battery
def test_steps_are_none_or_a_valid_number(rule: Aggregator) -> None:
    steps = rule.steps(rule.init(start_vector()))
    assert steps is None or (type(steps) is int and steps > 0)


@battery
def test_a_rule_is_a_frozen_value(rule: Aggregator) -> None:
    assert rule == type(rule)()
    assert hash(rule) == hash(type(rule)())
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.model_P = 1  # type: ignore[attr-defined]  # what must not be possible


@battery
def test_page_has_paper_equation_and_each_hyper_parameter(rule: Aggregator) -> None:
    target = type(rule)
    own = {field.name for field in dataclasses.fields(rule)}
    assert own <= arguments(target).keys()
    assert ".. math::" in (inspect.getdoc(target) or "")
    assert inspect.getdoc(inspect.getmodule(target))


@pytest.mark.parametrize("kind", [kind for kind, rule in RULES.items() if rule.linear_client_state])
def test_discounted_client_states_stay_the_servers_mean(kind: str) -> None:
    """The invariant of SCAFFOLD (c is the mean c_i) and FedDyn (h is the mean g_i), whatever each report counts."""
    rule, generator = RULES[kind], np.random.default_rng(0)
    state = rule.init(start_vector())
    (own_NP,) = (part.expand(POPULATION, -1).clone() for part in rule.init_client(start_vector()))
    kept_type = type(rule.init_client(start_vector()))
    for number in range(4):
        clients = torch.from_numpy(generator.choice(POPULATION, size=4, replace=False))
        work = dataclasses.replace(
            a_group(rule, state),
            update_KP=numbers(number, size=[4, PARAMETERS]),
            client_state=kept_type(own_NP[clients]),
            broadcast=rule.broadcast(state),
        )
        report = rule.report(work)
        discount_K1 = torch.from_numpy(generator.uniform(0.1, 1.0, size=(4, 1)))
        own_NP[clients] += discount_K1 * (report.client_state[0] - own_NP[clients])
        state = rule.apply(
            state, Reduced(tuple((discount_K1 * part).mean(0) for part in report.message), 4, POPULATION)
        )
    torch.testing.assert_close(own_NP.mean(0), state[1], rtol=1e-12, atol=1e-13)  # sums of 16 reports, in two orders
