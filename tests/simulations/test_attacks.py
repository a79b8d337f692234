"""Attackers: what each kind says, who they are, and what becomes of the mean and of what takes its place.

Shapes: A, attackers; H, honest clients; P, parameters.
"""

import json
import math
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

import fed
from fed.compression.codec import Draw
from fed.config.registry import ADVERSARIES
from fed.errors import InvalidData, InvalidExperiment
from fed.simulations.attacks import (
    ALIE,
    IPM,
    Attack,
    Attackers,
    Gaussian,
    Knowledge,
    LabelFlip,
    Mimic,
    SignFlip,
)
from fed.simulations.simulate import simulate
from fed.simulations.simulation import Simulation
from fed.vectors.randomness import Streams
from fed.wire.format import Format
from fed.wire.messages import Answer, Update
from tests.simulations import users_parts as parts

from .conftest import Point, Quadratics, mean_output

pytestmark = pytest.mark.usefixtures("device")

Matrix = NDArray[np.float64]

OWN_AP = np.random.default_rng(1).normal(size=(2, 5))
HONEST_HP = np.random.default_rng(2).normal(size=(6, 5)) + 0.5
REPLIES, ATTACKERS = 8, 2
NO_INTEGERS = torch.zeros(0, dtype=torch.int64)


def known(own_AP: Matrix = OWN_AP, honest_HP: Matrix = HONEST_HP, seed: int = 0) -> Knowledge:
    generators = tuple(np.random.default_rng([seed, attacker]) for attacker in range(len(own_AP)))
    return Knowledge(torch.from_numpy(own_AP), torch.from_numpy(honest_HP), 3, generators)


def forged(attack: Attack, **given: Any) -> Matrix:
    return np.asarray(attack.forge(known(**given)))


# What each kind says.


def test_sign_flip_is_the_own_update_backwards() -> None:
    np.testing.assert_array_equal(forged(SignFlip(scale=3.0)), -3.0 * OWN_AP)


def test_ipm_is_the_honest_mean_backwards() -> None:
    expected = np.tile(-0.7 * HONEST_HP.mean(0), (ATTACKERS, 1))
    np.testing.assert_allclose(forged(IPM(epsilon=0.7)), expected, rtol=1e-14)


def test_alie_is_so_many_deviations_below_the_honest_mean() -> None:
    expected = np.tile(HONEST_HP.mean(0) - 1.3 * HONEST_HP.std(0), (ATTACKERS, 1))
    np.testing.assert_allclose(forged(ALIE(z=1.3)), expected, rtol=1e-13)
    z = stats.norm.ppf((8 - 2 - (8 // 2 + 1 - 2)) / (8 - 2))
    assert z == 0  # with 2 of 8 a majority lacks 3 honest ones, of 6
    np.testing.assert_allclose(forged(ALIE()), np.tile(HONEST_HP.mean(0), (ATTACKERS, 1)), rtol=1e-13)
    own_AP = np.vstack([OWN_AP, OWN_AP])
    z = stats.norm.ppf((10 - 4 - (10 // 2 + 1 - 4)) / (10 - 4))
    assert z > 0.4
    expected = np.tile(HONEST_HP.mean(0) - z * HONEST_HP.std(0), (4, 1))
    np.testing.assert_allclose(forged(ALIE(), own_AP=own_AP), expected, rtol=1e-12)


def test_alies_z_is_the_papers() -> None:
    # Section 4 of the paper: 24 of 50 workers need 2 more for a majority of 26, and 24 of 26 honest ones farther away.
    assert ALIE.z_of(50, 24) == pytest.approx(stats.norm.ppf(24 / 26))
    for replies in range(2, 40):
        for attackers in range(1, replies):
            assert 0 <= ALIE.z_of(replies, attackers) < 3


def test_gaussian_is_noise_of_its_deviation_and_each_attackers_own() -> None:
    noise_AP = forged(Gaussian(deviation=2.5), own_AP=np.zeros((2, 20_000)))
    expected = [2.5 * np.random.default_rng([0, attacker]).normal(size=20_000) for attacker in range(2)]
    np.testing.assert_array_equal(noise_AP, expected)
    # Of 20,000 draws the deviation is within 2.5 / √(2 · 20,000) of 2.5, the correlation within 1/√20,000; five times.
    assert abs(noise_AP.std(1) - 2.5).max() < 5 * 2.5 / math.sqrt(40_000)
    assert abs(np.corrcoef(*noise_AP).flat[1]) < 5 / math.sqrt(20_000)


def test_mimic_is_one_honest_update() -> None:
    np.testing.assert_array_equal(forged(Mimic()), np.tile(HONEST_HP[3], (ATTACKERS, 1)))


def test_label_flip_turns_labels_around() -> None:
    assert LabelFlip().poison(torch.tensor([0, 1, 9]), 10).tolist() == [9, 8, 0]
    assert LabelFlip().poison(torch.tensor([[0, 2], [1, 1]], dtype=torch.uint8), 3).tolist() == [[2, 0], [1, 1]]
    assert LabelFlip().poison(torch.tensor([True, False]), 2).tolist() == [False, True]
    assert LabelFlip().poison(torch.tensor([-100, 0, 2, -1]), 3).tolist() == [-100, 2, 0, -1], "those that are left out"


@pytest.mark.parametrize("attack", [ALIE(), IPM(), Mimic()], ids=lambda attack: type(attack).__name__)
def test_attacker_without_honest_clients_reports_its_training(attack: Attack) -> None:
    np.testing.assert_array_equal(forged(attack, honest_HP=HONEST_HP[:0]), OWN_AP)


# In a round.


MESSAGE = Format(torch.float64, (5, 2), parameters=5)


def row(client: int) -> Tensor:
    """The update in five parameters, and two numbers beside it."""
    return torch.from_numpy(np.random.default_rng(client).normal(size=7))


def answers(
    attack: Attack, clients: Iterable[int], number: int = 1, message: Format = MESSAGE, rounds: Sequence[int] = ()
) -> list[Answer]:
    """What becomes of the reports of these clients, of which 2 and 5 attack; 5 comes first, the others backwards."""
    tasks = enumerate(zip(clients, rounds or [number] * len([*clients]), strict=True))
    reports = [
        Answer(
            tasks=(task,),
            round=of_round,
            clients=(client,),
            content=Update(row(client), client + 1.0),
            integers_I=NO_INTEGERS,
            samples=(client + 1,),
            train_losses=(0.1 * client,),
            size_bytes=56,
        )
        for task, (client, of_round) in tasks
    ]
    reports.sort(key=lambda report: (report.clients != (5,), -report.tasks[0]))

    def encoded(answer: Answer) -> Answer:
        draw = Draw(Streams(0), [answer.round], answer.clients)
        return answer.with_update(message.encode(answer.update.update_M[None], {}, draw).update_KM[0])

    return list(Attackers(attack, frozenset({2, 5}), Streams(0)).attacked(reports, message, encoded))


def test_the_updates_of_attackers_change_and_nothing_else() -> None:
    attack = IPM(epsilon=2.0)
    said, trained = (
        {int(answer.clients[0]): answer for answer in answers(kind, range(9))} for kind in (attack, Attack())
    )
    honest = [0, 1, 3, 4, 6, 7, 8]
    assert sorted(said) == sorted(trained) == [*range(9)]
    for client, answer in said.items():
        assert torch.equal(answer.update.update_M[5:], row(client)[5:])
        unchanged = trained[client].with_update(answer.update.update_M)
        assert answer == unchanged
        assert answer.update.weight == client + 1.0
        assert answer[4:] == (NO_INTEGERS, (client + 1,), (0.1 * client,), 56, 0, ())
    mean_P = np.mean([row(client)[:5].numpy() for client in honest], axis=0)
    for client in honest:
        assert torch.equal(said[client].update.update_M, row(client))
    for client in (2, 5):
        assert torch.equal(trained[client].update.update_M, row(client))
        np.testing.assert_allclose(said[client].update.update_M[:5], -2 * mean_P, rtol=1e-14)


def test_attackers_know_the_honest_updates_of_their_own_round_alone() -> None:
    rounds, clients = [1, 1, 2, 2, 2], [0, 2, 1, 3, 5]
    found = answers(IPM(epsilon=2.0), clients, rounds=rounds)
    said = {answer.clients[0]: answer.update.update_M[:5] for answer in found}
    for attacker, honest in ((2, [0]), (5, [1, 3])):
        expected = -2.0 * torch.stack([row(client)[:5] for client in honest]).mean(0)
        torch.testing.assert_close(said[attacker], expected, rtol=1e-14, atol=0)


@dataclass(frozen=True, kw_only=True)
class Rounded(Mimic):
    """Half of what the honest client is known to have sent."""

    def forge(self, known: Knowledge) -> Tensor:
        assert torch.equal(known.honest_HP, known.honest_HP.float().double())
        assert not torch.equal(known.own_AP, known.own_AP.float().double())
        return super().forge(known) / 3


def test_attackers_know_and_send_what_the_coordinator_receives() -> None:
    narrow = replace(MESSAGE, dtype=torch.float32)
    said = {int(answer.clients[0]): answer.update.update_M for answer in answers(Rounded(), range(9), message=narrow)}
    for client, update_M in said.items():
        assert update_M.dtype == torch.float64
        assert torch.equal(update_M, update_M.float().double())
        assert torch.equal(update_M[5:], row(client)[5:].float().double())
        if client not in (2, 5):
            assert torch.equal(update_M, row(client).float().double())
    third_P = said[2][:5]
    assert any(torch.equal(third_P, (said[client][:5] / 3).float().double()) for client in (0, 1, 3, 4, 6, 7, 8))


def test_attackers_answer_last() -> None:
    assert [answer.clients[0] for answer in answers(IPM(), range(9))] == [8, 7, 6, 4, 3, 1, 0, 2, 5]


def test_attackers_that_fail_are_failures_like_others() -> None:
    keys: dict[str, Any] = {"devices": {"kind": "uniform", "failure": 0.4}, "model": {"kind": "logistic"}}
    plain, attacked = (
        simulate(fed.Experiment(rounds={"count": 4}, **keys, **more), data=parts.unequal())
        for more in ({}, {"adversaries": {"kind": "ipm", "fraction": 0.5}})
    )
    counts = [
        [(line["selected"], line["replied"], line["failed"]) for line in run.metrics] for run in (plain, attacked)
    ]
    assert counts[0] == counts[1]
    assert 0 < sum(failed for _, _, failed in counts[0]) < sum(selected for selected, _, _ in counts[0])


def test_the_order_of_arrival_changes_nothing() -> None:
    for attack in (ALIE(z=1.0), Gaussian(), Mimic()):
        one, other = (
            {answer.clients[0]: answer.update.update_M for answer in answers(attack, clients)}
            for clients in ((0, 1, 2, 3, 5), (5, 3, 2, 1, 0))
        )
        for client in (2, 5):
            np.testing.assert_allclose(one[client], other[client], rtol=1e-13)


def test_mimicked_client_stays_the_same_while_it_participates() -> None:
    def mimicked(clients: list[int], number: int) -> int:
        replies = {
            answer.clients[0]: answer.update.update_M[:5] for answer in answers(Mimic(), [*clients, 2, 5], number)
        }
        assert torch.equal(replies[2], replies[5])
        (one,) = (client for client in clients if torch.equal(replies[client], replies[2]))
        return one

    everybody = [0, 1, 3, 6, 7, 8]
    first = mimicked(everybody, 1)
    assert {mimicked(everybody, number) for number in range(2, 6)} == {first}
    assert {mimicked([first, other], 7) for other in everybody if other != first} == {first}
    others = [client for client in everybody if client != first]
    assert mimicked(others, 8) == mimicked(others, 9) != first


def test_noise_differs_by_attacker_and_by_round() -> None:
    one, again, other = (
        [answer.update.update_M for answer in answers(Gaussian(), [3, 2, 5], number)] for number in (1, 1, 2)
    )
    assert all(map(torch.equal, one, again))
    drawn = {tuple(noise_M[:5].tolist()) for noise_M in (*one[1:], *other[1:])}
    assert len(drawn) == 4


@dataclass(frozen=True, kw_only=True)
class Blind(Attack):
    """Notes how many of the others' updates it is shown."""

    looks_at_others: ClassVar[bool] = False

    def forge(self, known: Knowledge) -> Tensor:
        return torch.full_like(known.own_AP, float(len(known.honest_HP)))


@dataclass(frozen=True, kw_only=True)
class Seeing(Blind):
    """Looks at them."""

    looks_at_others: ClassVar[bool] = True


@pytest.mark.parametrize(("attack", "shown"), [(Blind(), 0), (Seeing(), 1)], ids=["blind", "seeing"])
def test_an_attack_that_looks_at_nobody_sees_nobody(attack: Attack, shown: int) -> None:
    of_fleet = [answer.update.update_M[0] for answer in answers(attack, [3, 2, 5]) if answer.clients[0] in (2, 5)]
    assert {float(number) for number in of_fleet} == {float(shown)}
    of_peers = Attackers(attack, frozenset({2, 5}), Streams(0)).forged(torch.zeros(3, 4), [3, 2, 5], 1, 0)
    assert of_peers[:, 0].tolist() == [0.0, shown, shown]


# Who they are.


def recruits(fraction: float = 0.2, clients: int = 20, seed: int = 0, kind: str = "ipm") -> frozenset[int | str]:
    section = ADVERSARIES.make(kind, fraction=fraction)
    return Attackers.recruited(section, range(clients), Streams(seed)).clients


def test_attackers_are_drawn_once_alike_for_every_kind() -> None:
    assert len(recruits()) == 4
    assert {recruits(kind=kind) for kind in ADVERSARIES.builtin} == {recruits()}
    assert len({recruits(seed=seed) for seed in range(20)}) > 15
    counts = np.zeros(20)
    for seed in range(1000):
        counts[list(map(int, recruits(seed=seed)))] += 1
    # Each client attacks with p = 0.2; five standard deviations of 1,000 such draws.
    assert abs(counts - 200).max() < 5 * math.sqrt(1000 * 0.2 * 0.8)


@pytest.mark.parametrize(("fraction", "clients", "count"), [(0.2, 12, 2), (0.29, 100, 29), (0.5, 2, 1), (0.99, 10, 9)])
def test_the_fraction_is_taken_to_the_nearest_client(fraction: float, clients: int, count: int) -> None:
    if count == 9:  # 9.9 clients are 10, and nobody is left
        with pytest.raises(InvalidExperiment, match=r"got 0.99 of 10 clients, which is 10: change it"):
            recruits(fraction, clients)
    else:
        assert len(recruits(fraction, clients)) == count


# What they learn from.


def test_label_flip_changes_the_labels_of_attackers_alone() -> None:
    data = parts.unequal()
    changed = Attackers(LabelFlip(), frozenset({"c1", "c4"}), Streams(0)).poisoned(data)
    assert changed.clients == data.clients
    assert changed.test is data.test
    for client in data.clients:
        (inputs, targets), (new_inputs, new_targets) = data.read(client), changed.read(client)
        assert torch.equal(inputs, new_inputs)
        assert torch.equal(new_targets, 2 - targets if client in ("c1", "c4") else targets)


def test_data_on_demand_stay_so_and_can_be_sent() -> None:
    held = parts.unequal()
    for data in (
        fed.FederatedData(fed.ClientsOnDemand(range(50), read, lambda client: 6), classes=3),
        fed.FederatedData(fed.ClientsOnDemand(range(50), read), classes=3),
    ):
        changed = Attackers(LabelFlip(), frozenset({7}), Streams(0)).poisoned(data)
        assert changed.is_on_demand
        assert changed.size_of(7) == 6
        assert torch.equal(changed.read(7)[1], 2 - read(7)[1])
        assert torch.equal(changed.read(8)[1], read(8)[1])
    sent = pickle.loads(pickle.dumps(Attackers(LabelFlip(), frozenset({7}), Streams(0)).poisoned(data)))
    assert torch.equal(sent.read(7)[1], 2 - read(7)[1])
    assert Attackers(SignFlip(), frozenset({"c1"}), Streams(0)).poisoned(held) is held


def read(client: int) -> tuple[Tensor, Tensor]:
    return parts.samples(6, client)


def test_targets_that_are_no_labels_are_refused() -> None:
    pair = torch.zeros(3, 2), torch.zeros(3)
    with pytest.raises(InvalidData, match=r"LabelFlip needs integer labels to change, got targets of torch.float32"):
        Attackers(LabelFlip(), frozenset({0}), Streams(0)).poisoned(fed.FederatedData({0: pair, 1: pair}))


# In whole runs.


def test_fedavg_round_under_sign_flip_is_its_closed_form(quadratics: Quadratics) -> None:
    # One step of client i moves x by −η A_i (x − b_i); an attacker says −s times that; weights are those of samples.
    lr, scale = 0.1, 4.0
    keys: dict[str, Any] = {
        "local": {"lr": lr, "steps": 1, "batch_size": 100},
        "rounds": {"count": 3},
        "adversaries": {"kind": "sign_flip", "scale": scale, "fraction": 0.25},
    }
    experiment, data, model = fed.Experiment(**keys), quadratics.data(), quadratics.model()
    assert experiment.adversaries is not None
    attackers = Attackers.recruited(experiment.adversaries, data.clients, Streams(0)).clients
    assert len(attackers) == 1
    finished = simulate(experiment, data=data, model=lambda: model, loss=mean_output)
    x_D = quadratics.start_D
    share_N = quadratics.samples_N / quadratics.samples_N.sum()
    for _ in range(3):
        update_ND = -lr * np.einsum("nij,nj->ni", quadratics.curvature_NDD, x_D - quadratics.centre_ND)
        update_ND[list(map(int, attackers))] *= -scale
        x_D = x_D + share_N @ update_ND
    assert finished.summary["adversaries"] == list(attackers)
    assert isinstance(finished.model, Point)
    np.testing.assert_allclose(finished.model.x_D.detach().numpy(), x_D, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["ipm", "label_flip"])
def test_a_summary_says_who_attacked(kind: str, tmp_path: Path) -> None:
    data = fed.FederatedData({client: parts.samples(6, place) for place, client in enumerate([100, "b", 9, "a", 80])})
    keys: dict[str, Any] = {"rounds": {"count": 1}, "model": {"kind": "logistic"}}
    adversaries = {"kind": kind, "fraction": 0.8}
    run = simulate(fed.Experiment(adversaries=adversaries, **keys), data=data, output=tmp_path / "run")
    who = run.summary["adversaries"]
    section = ADVERSARIES.validate(adversaries)
    assert set(who) == Attackers.recruited(section, data.clients, Streams(0)).clients
    assert who == [client for client in (9, 80, 100, "a", "b") if client in who]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["adversaries"] == who
    assert "adversaries" not in simulate(fed.Experiment(**keys), data=data).summary


def test_seed_repeats_a_run_and_attackers_change_it() -> None:
    def model(**keys: Any) -> bytes:
        experiment = fed.Experiment(rounds={"count": 2}, model={"kind": "logistic"}, **keys)
        return b"".join(
            part.numpy().tobytes() for part in simulate(experiment, data=parts.unequal()).model.state_dict().values()
        )

    attacked: dict[str, Any] = {"adversaries": {"kind": "gaussian", "fraction": 0.3}}
    assert model(**attacked) == model(**attacked)
    others = [model(adversaries={"kind": kind, "fraction": 0.3}) for kind in ("mimic", "label_flip")]
    assert len({model(), model(**attacked), model(**attacked, seed=1), *others}) == 5


def accuracy(algorithm: dict[str, Any], adversaries: dict[str, Any] | None, seed: int) -> float:
    experiment = fed.Experiment(
        seed=seed,
        data={"kind": "digits", "clients": 20},
        model={"kind": "logistic"},
        local={"lr": 0.1, "epochs": 2},
        algorithm=algorithm,
        rounds={"count": 15},
        adversaries=adversaries,
        simulation={"workers": 0},
    )
    return float(simulate(experiment).summary["final_test_accuracy"])


ROBUST: list[dict[str, Any]] = [
    {"kind": "median"},
    {"kind": "trimmed_mean", "attackers": 4},
    {"kind": "krum", "attackers": 4},
    {"kind": "multi_krum", "attackers": 4},
    {"kind": "bulyan", "attackers": 4},
    {"kind": "geometric_median", "bucketing": 2},
    {"kind": "median", "attackers": 4, "nearest_neighbour_mixing": True},
]


@pytest.mark.long
def test_fedavg_collapses_on_digits_where_robust_rules_do_not() -> None:
    adversaries = {"kind": "ipm", "epsilon": 10.0}
    # Without attackers all reach about 0.92; ten classes guessed are 0.1. A fifth at −10 turns the mean around.
    assert accuracy({"kind": "fedavg"}, None, seed=0) > 0.9
    assert accuracy({"kind": "fedavg"}, adversaries, seed=0) < 0.3
    for algorithm in ROBUST:
        assert accuracy(algorithm, adversaries, seed=0) > 0.85, algorithm


def test_bounded_rules_are_slowed_down_but_not_turned_around() -> None:
    adversaries = {"kind": "sign_flip", "scale": 100.0}
    assert accuracy({"kind": "fedavg"}, adversaries, seed=0) < 0.3
    for algorithm in ({"kind": "centered_clipping"}, {"kind": "norm_bound"}):
        assert accuracy(algorithm, adversaries, seed=0) > 0.75, algorithm


# What has no meaning.


def test_a_users_kind_must_be_an_attack() -> None:
    experiment = fed.Experiment(adversaries={"kind": "python:fed.aggregators.fedavg:FedAvg"})
    with pytest.raises(InvalidExperiment, match=r"must make a fed.simulations.attacks.Attack, got FedAvg"):
        Simulation(experiment)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kind": "sign_flop"}, "no such adversaries; did you mean sign_flip"),
        ({"fraction": 0.2}, "missing key; known: sign_flip"),
        ({"kind": "ipm", "fraction": 1.0}, "fraction"),
        ({"kind": "ipm", "fraction": 0}, "fraction"),
        ({"kind": "ipm", "scale": 2.0}, "scale"),
        ({"kind": "alie", "z": -1.0}, "z"),
    ],
)
def test_a_wrong_section_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidExperiment, match=message):
        fed.Experiment(adversaries=keys)
