"""The format of a run's messages: what is foretold of them is what they are, and nothing is lost but what codecs drop.

Shapes: K messages, M numbers of each and P of a coded part.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fed.compression.blocks import as_bytes, from_bytes
from fed.compression.codec import Codec, CodecState, Draw, Encoded, Rows, Values
from fed.errors import InvalidExperiment, InvalidPayload
from fed.protocol.protocol_pb2 import Format as FormatHeader
from fed.vectors.randomness import Streams
from fed.wire.agreed_format import agreed, header_of
from fed.wire.format import Format
from fed.wire.messages import GlobalModel, Task
from fed.wire.payloads import check_tensors, read, type_name, written


@dataclass(frozen=True, kw_only=True)
class Halves(Codec):
    """The values of even places, for the next codec, and the odd places' sum, which it never sees."""

    gives: ClassVar = "values"

    def size_bytes(self, values: Values) -> int:
        return 4

    def inner(self, values: Values, content: Tensor | None = None) -> Values:
        return values._replace(numbers=(values.numbers + 1) // 2, layers=())

    def encode(self, rows_KM: Tensor, values: Values, state: CodecState, draw: Draw) -> Encoded:
        return Encoded(as_bytes(rows_KM[:, 1::2].sum(1, keepdim=True).float()), rows_KM[:, ::2])

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        rows_KM = torch.zeros(len(inner), values.numbers, dtype=values.dtype)
        rows_KM[:, ::2] = torch.stack([*inner])
        if values.numbers > 1:
            rows_KM[:, 1::2] = from_bytes(torch.stack([*content]), torch.float32) / (values.numbers // 2)
        return rows_KM


@dataclass(frozen=True, kw_only=True)
class Sixteenths(Codec):
    """Whole sixteenths of each value, below 4, masked by the client's own stream and the round's."""

    def size_bytes(self, values: Values) -> int:
        return values.numbers

    def encode(self, rows_KM: Tensor, values: Values, state: CodecState, draw: Draw) -> Encoded:
        codes_KM = (rows_KM.double() * 16 + 64).clamp(0, 255).round().to(torch.uint8)
        return Encoded(codes_KM ^ _masks(values.numbers, draw))

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        codes_KM = torch.stack([*content]) ^ _masks(values.numbers, draw)
        return ((codes_KM.double() - 64) / 16).to(values.dtype)


def _masks(numbers: int, draw: Draw) -> Tensor:
    masks = [
        draw.own(row).integers(0, 256, numbers) ^ draw.common(row).integers(0, 256, numbers)
        for row in range(len(draw.clients))
    ]
    return torch.from_numpy(np.stack(masks).astype(np.uint8))


DTYPES = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16])
CHAINS = st.sampled_from([(), (Halves(),), (Sixteenths(),), (Halves(), Halves()), (Halves(), Sixteenths())])


@st.composite
def formats(draw: st.DrawFn, chains: st.SearchStrategy[tuple[Codec, ...]] = CHAINS) -> Format:
    """Whose messages hold the update and perhaps more, some parts as long as the parameters."""
    parameters = draw(st.integers(1, 9))
    parts = parameters, *draw(st.lists(st.sampled_from([parameters, 1, 3, 0]), max_size=3))
    buffers, integers = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    return Format(draw(DTYPES), parts, buffers, integers, parameters, codecs=draw(chains))


def messages(message: Format, rows: int, seed: int = 0) -> Tensor:
    """Multiples of 2⁻⁴⁰ below 2, which no type but float64 holds."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**41), 2**41, (rows, message.numbers), generator=generator, dtype=torch.float64) / 2**40


def draws(rows: int, first: int = 0) -> Draw:
    return Draw(Streams(3), [1 + row % 2 for row in range(first, first + rows)], [*range(first, first + rows)])


@given(formats(), st.integers(1, 4))
def test_sizes_are_those_of_what_is_encoded(message: Format, rows: int) -> None:
    outgoing = message.encode(messages(message, rows), {}, draws(rows))
    assert len(outgoing.payloads) == rows
    for payload in outgoing.payloads:
        tensors = (*payload, torch.zeros(message.integers, dtype=torch.int64))
        check_tensors([(type_name(part.dtype), part.numel()) for part in tensors], message.uplink)
        assert message.uplink_bytes == sum(part.nbytes for part in tensors)
    if message.encoder:
        assert outgoing.sizes == (message.uplink_bytes - 8 * message.integers,) * rows


@given(formats(st.just(())), st.integers(1, 4))
def test_without_codecs_messages_are_rounded_to_the_type_alone(message: Format, rows: int) -> None:
    update_KM = messages(message, rows)
    outgoing = message.encode(update_KM, {}, draws(rows))
    expected_KM = update_KM.to(message.dtype)
    for row, (payload, expected_M) in enumerate(zip(outgoing.payloads, expected_KM, strict=True)):
        assert torch.equal(message.decode(payload, draws(1, row)), expected_M)
    assert outgoing.update_KM.dtype == torch.float64
    assert torch.equal(outgoing.update_KM, expected_KM.double())


@given(formats(), st.integers(2, 5))
def test_a_message_is_encoded_alike_alone_and_beside_others(message: Format, rows: int) -> None:
    update_KM = messages(message, rows)
    together = message.encode(update_KM, {}, draws(rows))
    for row in range(rows):
        alone = message.encode(update_KM[row : row + 1], {}, draws(1, first=row))
        assert all(map(torch.equal, alone.payloads[0], together.payloads[row]))
        assert torch.equal(alone.update_KM[0], together.update_KM[row])


@given(formats(), st.integers(1, 3))
def test_a_coordinator_decodes_what_a_simulation_counts(message: Format, rows: int) -> None:
    update_KM = messages(message, rows)
    outgoing = message.encode(update_KM, {}, draws(rows))
    assert outgoing.update_KM.shape == update_KM.shape
    for row, payload in enumerate(outgoing.payloads):
        decoded_M = message.decode([part.clone() for part in payload], draws(1, first=row))
        assert torch.equal(decoded_M.double(), outgoing.update_KM[row])


@given(formats(), st.integers(1, 3))
def test_encoding_and_decoding_change_no_input(message: Format, rows: int) -> None:
    update_KM = messages(message, rows)
    for row, payload in enumerate(message.encode(update_KM, {}, draws(rows)).payloads):
        before = [part.clone() for part in payload]
        message.decode(payload, draws(1, first=row))
        assert all(map(torch.equal, payload, before))
    assert torch.equal(update_KM, messages(message, rows))


@given(formats(st.sampled_from([(Halves(),), (Sixteenths(),), (Halves(), Sixteenths())])))
def test_parts_shorter_than_the_parameters_and_buffers_go_raw(message: Format) -> None:
    update_KM = messages(message, 2)
    plain_KM = update_KM.to(message.dtype).double()
    received = message.encode(update_KM, {}, draws(2)).update_KM.split_with_sizes(message.sizes, 1)
    plain = plain_KM.split_with_sizes(message.sizes, 1)
    for numbers, coded, raw in zip(message.sizes[:-1], received, plain, strict=False):
        assert numbers == message.parameters or torch.equal(coded, raw)
    assert torch.equal(received[-1], plain[-1])
    assert not torch.equal(received[0], plain[0]) or message.parameters < 4


def test_buffers_as_long_as_the_parameters_go_raw() -> None:
    message = Format(torch.float64, (4,), buffers=4, parameters=4, codecs=(Sixteenths(),))
    update_KM = messages(message, 2)
    assert torch.equal(message.encode(update_KM, {}, draws(2)).update_KM[:, 4:], update_KM[:, 4:])


@pytest.mark.parametrize(
    ("codecs", "size_bytes"),
    [((Halves(),), 5 + 4 + 24), ((Halves(), Halves()), 9 + 4 + 4 + 16), ((Halves(), Sixteenths()), 5 + 4 + 3)],
)
def test_the_next_codec_of_a_chain_takes_the_values(codecs: tuple[Codec, ...], size_bytes: int) -> None:
    """Of 1, 2, 1.5, 4 and 0.25, halves are 1, 1.5 and 0.25, and 6; of those, 1 and 0.25, and 1.5: they lose no more."""
    message = Format(torch.float64, (5,), parameters=5, codecs=codecs)
    update_KM = torch.tensor([[1.0, 2.0, 1.5, 4.0, 0.25]], dtype=torch.float64)
    ((payload,),) = message.encode(update_KM, {}, draws(1)).payloads
    assert payload.numel() == size_bytes
    assert message.decode([payload], draws(1)).tolist() == [1.0, 3.0, 1.5, 3.0, 0.25]


@given(formats())
def test_payloads_pass_a_file_unchanged(tmp_path_factory: pytest.TempPathFactory, message: Format) -> None:
    path = tmp_path_factory.mktemp("wire") / "file"
    (payload,) = message.encode(messages(message, 1), {}, draws(1)).payloads
    sent = [*payload, torch.arange(message.integers)]
    head = written(path, sent)
    check_tensors([(part.dtype, part.numbers) for part in head.tensors], message.uplink)
    assert sum(part.nbytes for part in sent) == path.stat().st_size == message.uplink_bytes
    again = read(path, head)
    assert all(torch.equal(one, other) for one, other in zip(again, sent, strict=True))


@given(formats(), st.lists(st.integers(0, 5), max_size=3), st.integers(0, 4))
def test_bytes_of_a_task_are_those_of_its_tensors(message: Format, broadcast: list[int], growth: int) -> None:
    later = [numbers + growth for numbers in broadcast]
    message = replace(message, broadcast=tuple(broadcast), later_broadcast=tuple(later))
    for sizes, said in ((broadcast, message.downlink_bytes), (later, message.later_downlink_bytes)):
        params_V = torch.zeros(message.parameters + message.buffers + message.moved, dtype=message.dtype)
        integers_I = torch.zeros(message.integers, dtype=torch.int64)
        parts = tuple(torch.zeros(numbers, dtype=message.dtype) for numbers in sizes)
        model = GlobalModel(0, params_V, integers_I, parts)
        assert said == Task(0, 1, "ann", model).size_bytes()
        if sizes is broadcast:
            check_tensors([(type_name(part.dtype), part.numel()) for part in model.tensors], message.downlink)


MESSAGE = Format(torch.float32, (21, 21, 1), buffers=6, integers=1, parameters=21, broadcast=(21, 2))


class Shortened(Halves):
    """Decodes the even places alone."""

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        return torch.stack([*inner])


class Longer(Sixteenths):
    """Writes a byte more than it says."""

    def encode(self, rows_KM: Tensor, values: Values, state: CodecState, draw: Draw) -> Encoded:
        content = super().encode(rows_KM, values, state, draw).content
        return Encoded(torch.nn.functional.pad(torch.stack([*content]), (0, 1)))


class Broken(Halves):
    """Divides by the norm."""

    def encode(self, rows_KM: Tensor, values: Values, state: CodecState, draw: Draw) -> Encoded:
        return Encoded(as_bytes(rows_KM[:, :1] / (1 / float(rows_KM.norm()))), rows_KM[:, ::2])


class Wordless(Halves):
    """Does not say how long its content is."""

    def size_bytes(self, values: Values) -> int:
        raise NotImplementedError("no size")


@pytest.mark.parametrize(
    ("codec", "reason"),
    [
        (Wordless(), "got NotImplementedError: no size"),
        (Longer(), "got InvalidPayload: "),
        (Shortened(), r"to \[1, 21\], got \[1, 11\]"),
        (Broken(), "got ZeroDivisionError: float division by zero"),
    ],
)
def test_a_codec_that_breaks_its_contract_is_named(codec: Codec, reason: str) -> None:
    replace(MESSAGE, codecs=(Halves(), Sixteenths())).check_codecs()
    message = replace(MESSAGE, codecs=(codec,))
    with pytest.raises(InvalidExperiment, match=f"uplink's {type(codec).__name__} .*{reason}"):
        message.check_codecs()


class Counting(Halves):
    """Keeps the number of its tasks."""

    def init(self, values: Values) -> CodecState:
        return {"sent": torch.zeros(1, dtype=values.dtype)}

    def encode(self, rows_KM: Tensor, values: Values, state: CodecState, draw: Draw) -> Encoded:
        made = super().encode(rows_KM, values, state, draw)
        return made._replace(counted={"sent": state["sent"] + 1}, lost=state)


class Forgetful(Counting):
    """Gives no state for messages that are lost."""

    def encode(self, rows_KM: Tensor, values: Values, state: CodecState, draw: Draw) -> Encoded:
        return super().encode(rows_KM, values, state, draw)._replace(lost={})


class CommonCounting(Counting):
    """Says that it is the same for all clients."""

    is_common: ClassVar[bool] = True


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"codecs": (Halves(), Counting())},
            "uplink: a codec that keeps a state must be the first of its chain, got sent",
        ),
        ({"codecs": (Forgetful(),)}, r"uplink: Forgetful's lost must have the names of its init, \[sent\], got \[\]"),
        ({"codecs": (CommonCounting(),)}, "uplink: a codec that is the same for all clients must keep no client's"),
        (
            {"downlink_codecs": (Counting(),)},
            "Counting must keep its state under other names than EF21, got sent twice",
        ),
    ],
    ids=["second", "forgetful", "common", "names"],
)
def test_a_codec_that_keeps_what_it_cannot_is_refused(changed: dict[str, Any], reason: str) -> None:
    replace(MESSAGE, codecs=(Counting(),)).check_codecs()
    with pytest.raises(InvalidExperiment, match=reason):
        replace(MESSAGE, **changed).check_codecs()


# In a plan.


@pytest.mark.parametrize("codecs", [(), (Halves(), Sixteenths())], ids=["plain", "coded"])
@pytest.mark.parametrize("sends_models", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_node_reads_from_a_plan_what_the_server_has(
    codecs: tuple[Codec, ...], sends_models: bool, dtype: torch.dtype
) -> None:
    message = replace(MESSAGE, dtype=dtype, sends_models=sends_models, codecs=codecs)
    header = FormatHeader.FromString(header_of(message).SerializeToString())
    own = replace(message, parts=(21, 21, 5), broadcast=(21, 1))  # with another number of clients
    again = agreed(header, own)
    assert again == message
    assert (again.uplink, again.downlink, again.numbers) == (message.uplink, message.downlink, message.numbers)


@pytest.mark.parametrize(
    ("changed", "theirs"),
    [
        ({"dtype": "float64"}, ("torch.float64", 21, 6, 1)),
        ({"dtype": "x" * 10_000}, (f"torch.{'x' * 20}", 21, 6, 1)),
        ({"parameters": 22}, ("torch.float32", 22, 6, 1)),
        ({"buffers": 0}, ("torch.float32", 21, 0, 1)),
        ({"integers": 2}, ("torch.float32", 21, 6, 2)),
    ],
)
def test_a_plan_of_another_model_is_refused_with_both_values(changed: dict[str, Any], theirs: Any) -> None:
    header = header_of(MESSAGE)
    for name, value in changed.items():
        setattr(header, name, value)
    with pytest.raises(InvalidPayload) as refusal:
        agreed(header, MESSAGE)
    assert f"must have the type, parameters, buffers and integers ('torch.float32', 21, 6, 1), got {theirs}" in str(
        refusal.value
    )


@pytest.mark.parametrize(
    "changed",
    [{"sends_models": True}, {"parts": (21, 21)}, {"parts": (21, 2**40, 1)}, {"broadcast": (21, 2**62)}],
    ids=str,
)
def test_a_plan_of_other_messages_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(InvalidPayload, match="the server's messages must have parts of"):
        agreed(header_of(replace(MESSAGE, **changed)), MESSAGE)
