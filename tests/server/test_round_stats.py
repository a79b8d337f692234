"""What is counted of answers, one by one, in groups and of several rounds. Shapes: S, replies; M, numbers."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from fed.server.round_stats import Participation, RoundStats, joined, mean_loss
from fed.server.way_in import UpdateAccumulator
from fed.storage.run_folder import to_json
from fed.wire.messages import Answer, GlobalModel, Task, Update

INTEGERS_I = torch.zeros(0, dtype=torch.int64)
NOW = 5


def opened(versions: Sequence[int]) -> dict[int, Task]:
    """A task of each client, numbered alike, that was sent when the model had moved so often."""
    models = [GlobalModel(version, torch.zeros(2), INTEGERS_I) for version in versions]
    return {client: Task(client, 1, client, model) for client, model in enumerate(models)}


def group(clients: Sequence[int], mean: float, weight: float) -> Answer:
    mean_M, alike = torch.full((2,), mean, dtype=torch.float64), [1] * len(clients)
    of = tuple(clients)
    return Answer(of, 1, of, Update(mean_M, weight), INTEGERS_I, tuple(alike), tuple(0.5 for _ in clients))


def accumulator(*, is_linear: bool = True) -> UpdateAccumulator:
    return UpdateAccumulator(2, INTEGERS_I, is_linear)


def halved(staleness: int) -> float | None:
    return 0.5**staleness if staleness < 3 else None


@pytest.mark.parametrize("scale", [1.0, 1e307, 1.7e308])
def test_the_mean_of_finite_losses_is_finite(scale: float) -> None:
    """Losses that are about to diverge have sums beyond the largest number; an exact mean is never above them."""
    losses = [(scale, 3), (0.5 * scale, 5), (0.25 * scale, 8)]
    mean = mean_loss(losses)
    assert mean is not None
    assert abs(mean / scale - 7.5 / 16) <= 2**-52


def test_staleness_discounts_messages_and_not_weights() -> None:
    """Two answers of weights 1 and 3 and ages 0 and 2."""
    for is_linear in (True, False):
        gathered, tasks = accumulator(is_linear=is_linear), opened([5, 3])
        for client, weight in ((0, 1.0), (1, 3.0)):
            gathered.take(group([client], 1.0 + client, weight), tasks, NOW, halved)
        assert gathered.counted == {0: 1.0, 1: 0.25}
        if is_linear:
            assert gathered.mean().tolist() == [(1 * 1 + 3 * 2 / 4) / 4] * 2
        else:
            messages_SM, weights_S = gathered.rows()
            assert messages_SM.tolist() == [[1.0, 1.0], [0.5, 0.5]]
            assert weights_S.tolist() == [1, 3]


def test_grouped_clients_count_singly_in_age_and_lateness() -> None:
    gathered, tasks = accumulator(), opened([4, 4, 4, 5, 1, 1])
    for clients in ([0, 1, 2], [3], [4, 5]):
        gathered.take(group(clients, 1.0, len(clients)), tasks, NOW, halved)
    stats = gathered.stats()
    assert (stats.replied, stats.late, stats.staleness_mean) == (4, 2, 3 / 4)
    assert gathered.counted == {0: 0.5, 1: 0.5, 2: 0.5, 3: 1.0}
    assert tasks == {}


def test_several_rounds_are_one_in_which_each_reply_counts_alike() -> None:
    few = RoundStats(3, 1, 1, 1, 10, 20, 8.0, 4.0, participation=Participation([1, 2, 3], [1], [2], [3]))
    many = RoundStats(5, 3, 0, 0, 30, 40, 4.0, 0.0, participation=Participation([4, 5, 6, 7, 2], [4, 2, 6]))
    nobody = RoundStats(1, 0, 0, 1, 0, 5, None, participation=Participation([9], failed=[9]))
    all_of_them = Participation((1, 2, 3, 4, 5, 6, 7, 2, 9), (1, 4, 2, 6), (2,), (3, 9))
    assert joined([few, many, nobody]) == RoundStats(9, 4, 1, 2, 40, 65, 5.0, 1.0, participation=all_of_them)
    of_two = Participation((4, 5, 6, 7, 2, 9), (4, 2, 6), (), (9,))
    assert joined([many, nobody]) == RoundStats(6, 3, 0, 1, 30, 45, 4.0, 0.0, participation=of_two)
    assert joined([nobody]) == nobody._replace(participation=Participation((9,), (), (), (9,)))


def test_participation_line_is_in_order_without_empty_lists() -> None:
    nine: Any = np.int64(9)  # as a user's data may number a client
    who = Participation([nine, "ann", 2], ["ann", nine], failed=[2])
    assert to_json(who.line(3)) == '{"round":3,"asked":[2,9,"ann"],"replied":[9,"ann"],"failed":[2]}'
    assert Participation().line(1) == {"round": 1, "asked": []}


def test_an_infinite_loss_stays_infinite_when_rounds_are_joined() -> None:
    infinite = RoundStats(1, 1, 0, 0, 0, 0, math.inf)
    assert joined([infinite, RoundStats(1, 1, 0, 0, 0, 0, 1.0)]).train_loss == pytest.approx(math.inf)


def test_numbers_that_nodes_tell_count_for_apps_alone() -> None:
    told = RoundStats(1, 1, 0, 0, 10, 20, 8.0, metrics={"train_loss": 2.0, "bonus": 3.0})
    of_app = told.measured(is_of_app=True)
    assert (of_app["train_loss"], of_app["fit_bonus"]) == (2.0, 3.0)
    usual = told.measured()
    assert usual["train_loss"] == 8.0
    assert not [name for name in usual if name.startswith("fit_")]
