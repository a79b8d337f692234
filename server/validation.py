"""What real nodes say, checked before anything is done with it. Shapes: see :mod:`fed.wire.messages`."""

import math

from fed.wire.messages import LARGEST, MOST_SAMPLES, Answer, Task
from fed.wire.protocol import MOST_CLASSES
from fed.wire.protocol_pb2 import Joining, Scores

__all__ = ["BEGAN_ANEW", "failure_of", "refusal_of_joining", "refusal_of_scores"]

BEGAN_ANEW = (
    "client %r has lost what it kept between tasks (its folder was removed, or is damaged), and goes on from what it "
    "had at first"
)
"""What is logged of a client whose answer says so."""

_MOST_DIMENSIONS = 16
_MOST_INPUT_NUMBERS = 1 << 28


def failure_of(task: Task, problem: str, *, has_diverged: bool = False) -> Answer:
    """The failure that a node reports; divergence is the node's own word, and ends no run."""
    return Answer.failure(task, f"its training diverged: {problem}" if has_diverged else problem)


def refusal_of_joining(joining: Joining) -> str | None:
    """Why nobody has such samples; a model is made for them before it is known that somebody does."""
    if joining.samples < 1:
        return "a node must have samples to train on, got none"
    if joining.samples > MOST_SAMPLES:
        return f"a node must have at most 2^53 samples, got {joining.samples}"
    shape, classes = joining.signature.input_shape, joining.signature.classes
    if len(shape) > _MOST_DIMENSIONS or not 0 < math.prod(shape) <= _MOST_INPUT_NUMBERS:
        return (
            f"a sample must have 1 to {_MOST_INPUT_NUMBERS} numbers in at most {_MOST_DIMENSIONS} dimensions, got "
            f"{tuple(shape[:8])}"
        )
    if classes > MOST_CLASSES:
        return f"there may be {MOST_CLASSES} classes at most, got {classes}"
    return None


def refusal_of_scores(scores: Scores) -> str | None:
    """Why a node cannot have found this."""
    if scores.samples > MOST_SAMPLES:
        return f"scores must be of at most 2^53 samples, got {scores.samples}"
    if not (abs(scores.loss) <= LARGEST and abs(scores.metric) <= LARGEST):
        said = f"a loss of {scores.loss} and a metric of {scores.metric}"
        return f"scores must be finite and within ±{LARGEST:.0e}, got {said}"
    return None
