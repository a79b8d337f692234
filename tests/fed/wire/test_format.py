"""The format of a run's messages: what is foretold of them is what they are, and nothing is lost but what codecs drop.

Shapes: K messages, M numbers of each and P of a coded part.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fed.compression.codec import Codec, Draw, TensorSpec
from fed.errors import InvalidExperiment, InvalidPayload
from fed.randomness import Streams
from fed.wire.format import Format
from fed.wire.messages import GlobalModel
from fed.wire.payloads import read, tensor_messages, written
from fed.wire.protocol_pb2 import Format as FormatHeader


@dataclass(frozen=True, kw_only=True)
class Halves(Codec):
    """The values of even places, in the values' type, and the odd places' sum, which another codec never sees."""

    def payload(self, values: TensorSpec) -> tuple[TensorSpec, ...]:
        return TensorSpec(values.dtype, (values.numbers + 1) // 2), TensorSpec(torch.float32, 1)

    def encode(self, rows_KM: Tensor, draw: Draw) -> tuple[Tensor, ...]:
        return rows_KM[:, ::2], rows_KM[:, 1::2].sum(1, keepdim=True)

    def decode(self, payload: Sequence[Tensor], numbers: int, draw: Draw) -> Tensor:
        rows_KM = payload[0].new_zeros(len(payload[0]), numbers)
        rows_KM[:, ::2] = payload[0]
        rows_KM[:, 1::2] = (payload[1] / (numbers // 2)).to(rows_KM.dtype) if numbers > 1 else 0
        return rows_KM


@dataclass(frozen=True, kw_only=True)
class Sixteenths(Codec):
    """Whole sixteenths of each value, below 4, masked by the client's own stream and the round's."""

    def payload(self, values: TensorSpec) -> tuple[TensorSpec, ...]:
        return (TensorSpec(torch.uint8, values.numbers),)

    def encode(self, rows_KM: Tensor, draw: Draw) -> tuple[Tensor, ...]:
        return ((rows_KM.double() * 16 + 64).clamp(0, 255).round().to(torch.uint8) ^ _masks(rows_KM.shape[1], draw),)

    def decode(self, payload: Sequence[Tensor], numbers: int, draw: Draw) -> Tensor:
        return ((payload[0] ^ _masks(numbers, draw)).double() - 64) / 16


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
    payload = message.encode(messages(message, rows), draws(rows))
    integers = torch.zeros(rows, message.integers, dtype=torch.int64)
    tensors = (*payload, integers)
    assert [(part.dtype, part.shape) for part in tensors] == [
        (spec.dtype, (rows, spec.numbers)) for spec in message.uplink
    ]
    assert rows * message.uplink_bytes == sum(part.nbytes for part in tensors)


@given(formats(st.just(())), st.integers(1, 4))
def test_without_codecs_messages_are_rounded_to_the_type_alone(message: Format, rows: int) -> None:
    update_KM = messages(message, rows)
    payload = message.encode(update_KM, draws(rows))
    expected_KM = update_KM.to(message.dtype)
    assert torch.equal(message.decode(payload, draws(rows)), expected_KM)
    received_KM = message.received(update_KM, draws(rows))
    assert received_KM.dtype == torch.float64
    assert torch.equal(received_KM, expected_KM.double())


@given(formats(), st.integers(2, 5))
def test_a_message_is_encoded_alike_alone_and_beside_others(message: Format, rows: int) -> None:
    update_KM = messages(message, rows)
    together = message.encode(update_KM, draws(rows))
    decoded_KM = message.decode(together, draws(rows))
    for row in range(rows):
        alone = message.encode(update_KM[row : row + 1], draws(1, first=row))
        assert all(torch.equal(one[0], all_K[row]) for one, all_K in zip(alone, together, strict=True))
        assert torch.equal(message.decode(alone, draws(1, first=row))[0], decoded_KM[row])


@given(formats(), st.integers(1, 3))
def test_a_coordinator_decodes_what_a_simulation_counts(message: Format, rows: int) -> None:
    update_KM = messages(message, rows)
    payload = message.encode(update_KM, draws(rows))
    decoded_KM = message.decode([part.clone() for part in payload], draws(rows))
    assert decoded_KM.shape == update_KM.shape
    assert torch.equal(message.received(update_KM, draws(rows)), decoded_KM.double())


@given(formats(), st.integers(1, 3))
def test_encoding_and_decoding_change_no_input(message: Format, rows: int) -> None:
    update_KM = messages(message, rows)
    payload = message.encode(update_KM, draws(rows))
    before = [part.clone() for part in payload]
    message.decode(payload, draws(rows))
    assert all(map(torch.equal, payload, before))
    assert torch.equal(update_KM, messages(message, rows))


@given(formats(st.sampled_from([(Halves(),), (Sixteenths(),), (Halves(), Sixteenths())])))
def test_parts_shorter_than_the_parameters_and_buffers_go_raw(message: Format) -> None:
    update_KM = messages(message, 2)
    plain_KM = update_KM.to(message.dtype).double()
    received = message.received(update_KM, draws(2)).split_with_sizes(message.sizes, 1)
    plain = plain_KM.split_with_sizes(message.sizes, 1)
    for numbers, coded, raw in zip(message.sizes[:-1], received, plain, strict=False):
        assert numbers == message.parameters or torch.equal(coded, raw)
    assert torch.equal(received[-1], plain[-1])
    assert not torch.equal(received[0], plain[0]) or message.parameters < 4


def test_buffers_as_long_as_the_parameters_go_raw() -> None:
    message = Format(torch.float64, (4,), buffers=4, parameters=4, codecs=(Sixteenths(),))
    update_KM = messages(message, 2)
    assert torch.equal(message.received(update_KM, draws(2))[:, 4:], update_KM[:, 4:])


@pytest.mark.parametrize(
    ("codecs", "lengths"),
    [((Halves(),), [3, 1]), ((Halves(), Halves()), [2, 1, 1]), ((Halves(), Sixteenths()), [3, 1])],
)
def test_the_next_codec_of_a_chain_takes_the_first_tensor(codecs: tuple[Codec, ...], lengths: list[int]) -> None:
    """Of 1, 2, 1.5, 4 and 0.25, halves are 1, 1.5 and 0.25, and 6; of those, 1 and 0.25, and 1.5: they lose no more."""
    message = Format(torch.float64, (5,), parameters=5, codecs=codecs)
    update_KM = torch.tensor([[1.0, 2.0, 1.5, 4.0, 0.25]], dtype=torch.float64)
    payload = message.encode(update_KM, draws(1))
    assert [part.numel() for part in payload] == lengths
    assert message.decode(payload, draws(1)).tolist() == [[1.0, 3.0, 1.5, 3.0, 0.25]]


@given(formats())
def test_payloads_pass_a_file_unchanged(tmp_path_factory: pytest.TempPathFactory, message: Format) -> None:
    path = tmp_path_factory.mktemp("wire") / "file"
    payload = message.encode(messages(message, 1), draws(1))
    sent = [*(part[0] for part in payload), torch.arange(message.integers)]
    head = written(path, sent)
    assert [*head.tensors] == tensor_messages(message.uplink)
    assert sum(part.nbytes for part in sent) == message.uplink_bytes
    again = read(path, head)
    assert all(torch.equal(one, other) for one, other in zip(again, sent, strict=True))


@given(formats(), st.lists(st.integers(0, 5), max_size=3), st.integers(0, 4))
def test_bytes_of_a_task_are_those_of_its_tensors(message: Format, broadcast: list[int], growth: int) -> None:
    later = [numbers + growth for numbers in broadcast]
    message = replace(message, broadcast=tuple(broadcast), later_broadcast=tuple(later))
    for sizes, said in ((broadcast, message.downlink_bytes), (later, message.later_downlink_bytes)):
        params_V = torch.zeros(message.parameters + message.buffers, dtype=message.dtype)
        integers_I = torch.zeros(message.integers, dtype=torch.int64)
        parts = tuple(torch.zeros(numbers, dtype=message.dtype) for numbers in sizes)
        model = GlobalModel(0, params_V, integers_I, parts)
        assert said == model.size_bytes()
        if sizes is broadcast:
            assert [(part.dtype, part.numel()) for part in model.tensors] == [*message.downlink]


MESSAGE = Format(torch.float32, (21, 21, 1), buffers=6, integers=1, parameters=21, broadcast=(21, 2))


class Short(Halves):
    """Encodes a value less than it says."""

    def encode(self, rows_KM: Tensor, draw: Draw) -> tuple[Tensor, ...]:
        return rows_KM[:, 2::2], rows_KM[:, :1]


class Single(Halves):
    """Forgets a tensor of its payload."""

    def encode(self, rows_KM: Tensor, draw: Draw) -> tuple[Tensor, ...]:
        return (rows_KM[:, ::2],)

    def decode(self, payload: Sequence[Tensor], numbers: int, draw: Draw) -> Tensor:
        return payload[0].new_zeros(len(payload[0]), numbers)


class Shortened(Halves):
    """Decodes the even places alone."""

    def decode(self, payload: Sequence[Tensor], numbers: int, draw: Draw) -> Tensor:
        return payload[0]


class Broken(Halves):
    """Divides by the norm."""

    def encode(self, rows_KM: Tensor, draw: Draw) -> tuple[Tensor, ...]:
        return (rows_KM / (1 / float(rows_KM.norm())),)


class Wordless(Halves):
    """Says nothing of its payload."""

    def payload(self, values: TensorSpec) -> tuple[TensorSpec, ...]:
        raise NotImplementedError("no payload")


class Empty(Wordless):
    """Sends nothing."""

    def payload(self, values: TensorSpec) -> tuple[TensorSpec, ...]:
        return ()

    def encode(self, rows_KM: Tensor, draw: Draw) -> tuple[Tensor, ...]:
        return ()

    def decode(self, payload: Sequence[Tensor], numbers: int, draw: Draw) -> Tensor:
        return torch.zeros(1, numbers)


@pytest.mark.parametrize(
    ("codec", "reason"),
    [
        (Wordless(), "got NotImplementedError: no payload"),
        (Empty(), r"to shapes \[\], as its payload says"),
        (Short(), r"\[\[1, 11\], \[1, 1\]\], as its payload says, .*, got \[\[1, 10\], \[1, 1\]\] and None"),
        (Single(), r"got \[\[1, 11\]\] and None"),
        (Shortened(), r"got \[\[1, 11\], \[1, 1\]\] and \[1, 11\]"),
        (Broken(), "got ZeroDivisionError: float division by zero"),
    ],
)
def test_a_codec_that_breaks_its_contract_is_named(codec: Codec, reason: str) -> None:
    replace(MESSAGE, codecs=(Halves(), Sixteenths())).check_codecs()
    message = replace(MESSAGE, codecs=(codec, Sixteenths()))
    with pytest.raises(InvalidExperiment, match=f"uplink's {type(codec).__name__} .*{reason}"):
        message.check_codecs()


# In a plan.


@pytest.mark.parametrize("codecs", [(), (Halves(), Sixteenths())], ids=["plain", "coded"])
@pytest.mark.parametrize("sends_models", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_node_reads_from_a_plan_what_the_server_has(
    codecs: tuple[Codec, ...], sends_models: bool, dtype: torch.dtype
) -> None:
    message = replace(MESSAGE, dtype=dtype, sends_models=sends_models, codecs=codecs)
    header = FormatHeader.FromString(message.header().SerializeToString())
    own = replace(message, parts=(21, 21, 5), broadcast=(21, 1))  # with another number of clients
    again = Format.of(header, own)
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
    header = MESSAGE.header()
    for name, value in changed.items():
        setattr(header, name, value)
    with pytest.raises(InvalidPayload) as refusal:
        Format.of(header, MESSAGE)
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
        Format.of(replace(MESSAGE, **changed).header(), MESSAGE)
