"""Checks of what real nodes say, made before anything is done with it."""

import math
from collections.abc import Sequence
from itertools import zip_longest

from fed.clients.data.forms import check_form
from fed.errors import InvalidData
from fed.protocol.limits import MOST_CLASSES, MOST_HELD, PROTOCOL
from fed.protocol.protocol_pb2 import Failed, Joining, Scores, Signature
from fed.protocol.signatures import types_fit
from fed.wire.messages import LARGEST, MOST_SAMPLES, one_line

__all__ = ["reason_of", "refusal_of_joining", "refusal_of_scores", "refusal_of_signature"]

# What a node says of itself is believed up to these: models are made by it, and log lines written.
_MOST_DIMENSIONS = 16
_MOST_INPUT_NUMBERS = 1 << 28
_MOST_SIGNATURE_BYTES = 1 << 16
_MOST_METRICS = 1000
_MOST_LETTERS = 60  # of a name, in a refusal


def reason_of(failed: Failed) -> str:
    """Reason that a node gives for a failure. Divergence that a node reports fails its task, not the run."""
    # A node's text becomes a line of the log, and must not look like several.
    reason = one_line(failed.reason) or "it says no reason"
    return f"its training diverged: {reason}" if failed.diverged else reason


def refusal_of_joining(joining: Joining) -> str | None:
    """Reason for which no node can join like this, or None; a model is made for such samples before any is seen."""
    if joining.protocol != PROTOCOL:
        return f"the server speaks version {PROTOCOL} of the protocol, got {joining.protocol}: update the older"
    if joining.HasField("table_sha256") and not joining.signature.input_dtype:
        return (
            "the run's experiment has no section table, by which alone this node's table can be read (the node's log "
            "says why): give the experiment one"
        )
    if len(joining.held) > MOST_HELD:
        return f"a node may hold {MOST_HELD} tasks at most, got {len(joining.held)}"
    if joining.hides_numbers and joining.samples:
        return f"a node that hides its numbers must not say its samples, got {joining.samples}"
    if joining.samples < 1 and not joining.hides_numbers:
        return "a node must have samples to train on, got none"
    if joining.samples > MOST_SAMPLES:
        return f"a node must have at most 2^53 samples, got {joining.samples}"
    signature = joining.signature
    shapes = (("a sample must have", signature.input_shape), ("a sample's targets must be", signature.target_shape))
    for what, shape in shapes:
        # The number of dimensions is checked first: a product over millions of them would take long.
        if len(shape) > _MOST_DIMENSIONS or not 0 < math.prod(shape) <= _MOST_INPUT_NUMBERS:
            return (
                f"{what} 1 to {_MOST_INPUT_NUMBERS} numbers in at most {_MOST_DIMENSIONS} dimensions, got "
                f"{tuple(shape[:8])}"
            )
    if signature.form:
        try:
            check_form(signature.form)
        except InvalidData as error:
            return str(error)
    classes = signature.classes
    if classes > MOST_CLASSES:
        return f"there may be {MOST_CLASSES} classes at most, got {classes}"
    if (size_bytes := signature.ByteSize()) > _MOST_SIGNATURE_BYTES:  # other engines have no limit of their own
        return f"a signature must have at most {_MOST_SIGNATURE_BYTES} bytes, got {size_bytes}"
    return None


def refusal_of_signature(said: Signature, asked: Signature) -> str | None:
    """Reason for which a node's samples do not fit the model, or None; names are compared where both sides have some.

    Args:
        said: signature of the node's samples.
        asked: signature that the model is made for.
    """
    if said.form != asked.form:
        return (
            f"the model is made for samples of the form {asked.form[:200] or 'of two tensors'}, got "
            f"{said.form[:200] or 'two tensors'}: check the node's data file"
        )
    shape = tuple(asked.input_shape)
    dtype = asked.input_dtype
    if tuple(said.input_shape) != shape or not types_fit(said, asked):
        return (
            f"the model is made for {dtype} inputs of shape {shape}, got {said.input_dtype[:20]} of shape "
            f"{tuple(said.input_shape)[:8]}: check the node's data file"
        )
    for kind, theirs, ours in (("column", said.columns, asked.columns), ("class", said.labels, asked.labels)):
        if reason := _first_difference(kind, theirs, ours):
            return reason
    # A node with very many names tells the first ones, and a hash of all.
    if said.names_sha256 and asked.names_sha256 and said.names_sha256 != asked.names_sha256:
        return f"columns or classes after the first {len(asked.columns)} differ from the model's: compare the headers"
    expected = _targets(asked)
    got = _targets(said)
    # Whole numbers are real ones too, and real ones may be labels such as 1.0: the node, which casts them, finds out.
    may_be_cast = "float" in asked.target_dtype or asked.classes > 0
    if tuple(said.target_shape) != tuple(asked.target_shape) or (expected != got and not may_be_cast):
        return f"the run is for targets that are {expected}, got {got}: check the node's data file"
    if asked.classes and said.classes > asked.classes:
        return f"the model is made for {asked.classes} classes, got {said.classes}: check the node's labels"
    return None


def _targets(signature: Signature) -> str:
    what = "real numbers" if "float" in signature.target_dtype else "integers"
    shape = tuple(signature.target_shape)[:_MOST_DIMENSIONS]
    return f"{what} of shape {shape} a sample" if shape else f"{what}, one a sample"


def _first_difference(kind: str, said: Sequence[str], asked: Sequence[str]) -> str | None:
    if not said or not asked:
        return None
    for number, pair in enumerate(zip_longest(asked, said), start=1):
        if pair[0] != pair[1]:
            expected, got = ["none" if name is None else repr(one_line(name[:_MOST_LETTERS])) for name in pair]
            return (
                f"{kind} {number} must be {expected}, which the model is made for, got {got}: give the node the same "
                "names in the same order"
            )
    return None


def refusal_of_scores(scores: Scores) -> str | None:
    """Reason for which no node can have found such scores, or None."""
    if scores.samples > MOST_SAMPLES:
        return f"scores must be of at most 2^53 samples, got {scores.samples}"
    if len(scores.metrics) > _MOST_METRICS:
        return f"scores must have at most {_MOST_METRICS} metrics, got {len(scores.metrics)}"
    is_usual = abs(scores.loss) <= LARGEST  # so written, NaN is refused, which of a metric means that it is undefined
    if not is_usual or any(abs(metric) > LARGEST for metric in scores.metrics):
        said = f"a loss of {scores.loss} and metrics of {', '.join(map(str, scores.metrics[:8]))}"
        return f"scores must be finite and within ±{LARGEST:.0e}, got {said}"
    return None
