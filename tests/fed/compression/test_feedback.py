"""Error feedback on quadratics with known optima, and what becomes of messages that are lost or count in part.

Client i of N has f_i = ½ ‖x − b_i‖² with unequal b_i, and takes one step: its update is −η (x − b_i).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from fed.clients.training.client_states import at_discount
from fed.compression.chain import CodecChain
from fed.compression.codec import Codec, CodecState, Draw, Encoded, Values
from fed.compression.eden import Eden
from fed.compression.feedback import EF, EF21, Encoder, ErrorFeedback, NoFeedback, error_unknown
from fed.compression.quantisers import QSGD, Sign, TwoLevel
from fed.compression.sparsifiers import RandomK, TopK
from fed.config.registry import CODECS
from fed.errors import InvalidExperiment
from fed.vectors.randomness import Streams

CLIENTS, NUMBERS = 5, 40
TARGETS = torch.from_numpy(np.random.default_rng(0).standard_normal((CLIENTS, NUMBERS))) * torch.arange(1, 6)[:, None]
OPTIMUM = TARGETS.mean(0)


def encoder(feedback: ErrorFeedback, *codecs: Codec) -> Encoder:
    return Encoder(CodecChain(codecs, Values(NUMBERS, torch.float64)), feedback)


def draw(number: int) -> Draw:
    return Draw(Streams(2), [number] * CLIENTS, range(CLIENTS))


def first(of: Encoder) -> CodecState:
    return {name: part.expand(CLIENTS, -1).clone() for name, part in of.init().items()}


def constant(lr: float) -> Callable[[int], float]:
    return lambda number: lr


def distance(of: Encoder, lr: Callable[[int], float], rounds: int) -> float:
    """The largest distance to the optimum in the last fifth of the rounds."""
    model, state, largest = torch.zeros(NUMBERS, dtype=torch.float64), first(of), 0.0
    for number in range(1, rounds + 1):
        sent = of.encode(-lr(number) * (model - TARGETS), state, draw(number))
        model, state = model + sent.decoded_KM.mean(0), sent.counted
        if number > rounds * 4 // 5:
            largest = max(largest, float((model - OPTIMUM).norm()))
    return largest


LONG = [
    pytest.param(codecs, marks=pytest.mark.long) for codecs in ((TopK(fraction=0.1),), (TopK(fraction=0.2), TwoLevel()))
]


@pytest.mark.parametrize("codecs", [(Sign(),), *LONG], ids=str)
def test_the_distance_falls_with_the_step_size(codecs: tuple[Codec, ...]) -> None:
    """Without feedback no step size helps: the codec leaves the same share of any step out. With it the sum of the
    messages lags the sum of the updates by the residuals, whose norm is at most 2 η G/δ with the largest gradient G and
    ‖C(p) − p‖² ≤ (1 − δ) ‖p‖² (Karimireddy et al. 2019, lemma 3): a tenth of η makes the distance a tenth, here at most
    a fifth, for G is not the same on both ways."""
    with_it, without = (
        [distance(encoder(feedback, *codecs), constant(lr), round(8 / lr)) for lr in (0.2, 0.02)]
        for feedback in (EF(), NoFeedback())
    )
    assert with_it[1] < with_it[0] / 5
    assert without[1] > without[0] / 3 or without[1] > 10 * with_it[1]


@pytest.mark.parametrize("codecs", [(Sign(),), LONG[0]], ids=str)
def test_decreasing_steps_lead_to_the_optimum(codecs: tuple[Codec, ...]) -> None:
    found = [distance(encoder(EF(), *codecs), lambda number: 0.5 / (1 + number / 20), rounds) for rounds in (100, 1000)]
    assert found[1] < found[0] / 5


@pytest.mark.parametrize(
    "codecs",
    [
        (Sign(),),
        *LONG,
        pytest.param((QSGD(bits=2),), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_with_the_sum_of_all_updates_the_optimum_is_reached(codecs: tuple[Codec, ...]) -> None:
    """At a constant step size, where the codec alone stops far from it; messages are lost at random."""
    of, generator = encoder(EF21(), *codecs), np.random.default_rng(3)
    state, model, added = first(of), torch.zeros(NUMBERS, dtype=torch.float64), torch.zeros(NUMBERS)
    for number in range(1, 1201):
        sent = of.encode(-0.04 * (model - TARGETS), state, draw(number))
        arrives_K1 = torch.from_numpy(generator.random((CLIENTS, 1)) < 0.8)
        added = added + torch.where(arrives_K1, sent.decoded_KM, 0).mean(0)
        state = {name: torch.where(arrives_K1, sent.counted[name], sent.lost[name]) for name in state}
        assert torch.allclose(added, state["sent"].mean(0), rtol=0, atol=1e-12)
        model = model + added
    assert float((model - OPTIMUM).norm()) < 1e-8
    assert distance(encoder(NoFeedback(), *codecs), constant(0.04), 150) > 1e-3


@pytest.mark.parametrize("codec", [QSGD(bits=2), RandomK(fraction=0.1), Eden(bits=1)], ids=str)
def test_what_is_no_contraction_becomes_one_message_by_message(codec: Codec) -> None:
    of = encoder(EF(), codec)
    update_KM, state = TARGETS.clone(), first(of)
    for number in range(1, 30):
        sent = of.encode(update_KM, state, draw(number))
        wanted_KM = update_KM + state["residual"]
        errors = (wanted_KM - sent.decoded_KM).square().sum(1)
        assert (errors <= wanted_KM.square().sum(1)).all()
        # no other scale makes the error smaller: it is orthogonal to the message
        products = ((wanted_KM - sent.decoded_KM) * sent.decoded_KM).sum(1)
        assert float(products.abs().max() / wanted_KM.square().sum(1).max()) < 1e-12
        assert torch.equal(of.decode(sent.messages, draw(number)), sent.decoded_KM)
        state = sent.counted


LAYERS = (torch.Size([12, 10]), torch.Size([9]))
"""A matrix for codecs that look at those, and numbers beside it."""

FED_BACK = [kind for kind in CODECS.builtin if not error_unknown(CODECS.make(kind).make())]


def test_feedback_goes_around_all_codecs_but_two() -> None:
    assert {*CODECS.builtin} - {*FED_BACK} == {"dgc", "sketch"}


@pytest.mark.parametrize("decay", [1.0, 0.5])
@pytest.mark.parametrize("kind", FED_BACK)
def test_nothing_is_lost_whatever_becomes_of_messages(kind: str, decay: float) -> None:
    """Counted messages, at their discount, and the residual add up to all updates, older residuals at their decay."""
    values = Values(sum(shape.numel() for shape in LAYERS), torch.float64, LAYERS)
    of = Encoder(CodecChain((CODECS.make(kind).make(),), values), EF(decay=decay))
    generator = np.random.default_rng(1)
    state, owed = first(of), torch.zeros(CLIENTS, values.numbers, dtype=torch.float64)
    for number in range(1, 40):
        update_KM = torch.from_numpy(generator.standard_normal((CLIENTS, values.numbers)))
        sent, discount = of.encode(update_KM, state, draw(number)), float(generator.choice([0.0, 0.3, 1.0]))
        owed = update_KM + decay * owed - discount * sent.decoded_KM
        state = at_discount({**sent.lost}, {**sent.counted}, discount)
        assert float((owed - state["residual"]).abs().max()) < 1e-12


@dataclass(frozen=True, kw_only=True)
class Careless(TopK):
    """A user's codec, which keeps a number of tasks.

    Args:
        keeps: the name under which it does.
        counted: the names that it gives once a message counts, but for that one.
        lost: the names that it gives if a message is lost.
    """

    keeps: str = "tasks"
    counted: tuple[str, ...] = ()
    lost: tuple[str, ...] = ("tasks",)

    def init(self, values: Values) -> CodecState:
        return {self.keeps: torch.zeros(1, dtype=values.dtype)}

    def encode(self, rows_KM: Tensor, values: Values, state: CodecState, draw: Draw) -> Encoded:
        assert {*state} == {self.keeps}
        counted = dict.fromkeys((self.keeps, *self.counted), state[self.keeps] + 1)
        lost = dict.fromkeys(self.lost, state[self.keeps])
        return super().encode(rows_KM, values, state, draw)._replace(counted=counted, lost=lost)


def test_a_codec_is_given_its_own_state_alone() -> None:
    of = encoder(EF(), Careless())
    sent = of.encode(TARGETS, first(of), draw(1))
    assert {*sent.counted} == {*sent.lost} == {"residual", "tasks"}
    assert torch.equal(sent.lost["residual"], TARGETS)
    assert (float(sent.counted["tasks"][0]), float(sent.lost["tasks"][0])) == (1, 0)


@pytest.mark.parametrize(
    ("codec", "reason"),
    [
        (
            Careless(counted=("residual",)),
            r"counted must have the names of its init, \[tasks\], got \[residual, tasks\]",
        ),
        (
            Careless(lost=("residual", "tasks")),
            r"lost must have the names of its init, \[tasks\], got \[residual, tasks\]",
        ),
        (Careless(lost=()), r"lost must have the names of its init, \[tasks\], got \[\]"),
        (
            Careless(keeps="residual", lost=("residual",)),
            "Careless must keep .* other names than EF, got residual twice",
        ),
    ],
    ids=["counted", "lost", "too few", "kept"],
)
def test_a_codec_that_writes_anothers_state_is_refused(codec: Codec, reason: str) -> None:
    of = encoder(EF(), codec)
    with pytest.raises(InvalidExperiment, match=reason):
        of.encode(TARGETS, first(of), draw(1))


def test_without_feedback_nothing_is_kept() -> None:
    of = encoder(NoFeedback(), Sign())
    assert of.init() == {}
    sent = of.encode(TARGETS, {}, draw(1))
    assert (sent.counted, sent.lost) == ({}, {})


def test_a_scale_costs_one_number_where_there_is_one() -> None:
    sizes: list[int] = []
    for feedback, codec in ((NoFeedback(), QSGD()), (EF(), QSGD()), (NoFeedback(), Sign()), (EF(), Sign())):
        of = encoder(feedback, codec)
        sizes.append(of.size_bytes)
        messages: list[Tensor] = of.encode(TARGETS, first(of), draw(1)).messages
        assert {len(message) for message in messages} == {of.size_bytes}
    assert (sizes[1] - sizes[0], sizes[3] - sizes[2]) == (8, 0)
