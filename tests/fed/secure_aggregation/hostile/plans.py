"""Plans and tasks that a hostile coordinator tells, and the messages that clients truly make of them."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from fed.protocol.protocol_pb2 import Assignment, LedgerHead, Plan, TaskId
from fed.secure_aggregation.agreement import TASK_OWN
from fed.secure_aggregation.fixed_point import FixedPoint
from fed.secure_aggregation.participant import AgreedPlan
from fed.secure_aggregation.settings import SecureAggregation
from fed.secure_aggregation.terms import Identities
from tests.fed.secure_aggregation.hostile.spec import stream

NEVER_SHAPES = ("task", "attempt", "deadline_s", "takes_parts", "payload", "durable_after", "ledger")
"""Fields of a task that shape no message of a client that takes all steps."""

MAY_SHAPE = ("repeats", "population", "broadcast_count", "place", "kept_after")
"""Fields that shape messages of some algorithms, and not those of others."""

STILL = 2
"""Shape of a plan by which clients take no step."""

HURRY_S = 0.001
"""Deadline by which a client that may take fewer steps has taken none."""


class ToldPlan(NamedTuple):
    """A plan, with its name in transcripts."""

    label: str
    agreed: AgreedPlan


def told_plans(settings: Mapping[str, Any], most_clients: int, identities: Identities) -> list[ToldPlan]:
    """Four plans that lead to the same messages by other names and texts, one to others, one to no step."""
    section = SecureAggregation(**settings)
    fixed = FixedPoint(32, (1,), (8.0,), most_clients)
    named = [("run", 0, 0), ("other run", 0, 0), ("run", 0, 1), ("other run", 0, 1), ("run", 1, 0), ("run", STILL, 0)]
    return [
        ToldPlan(
            f"plan {number} ({run}, text {text}, shape {shape})",
            AgreedPlan(Plan(run=run, experiment=json.dumps([shape, text])), section, fixed, identities),
        )
        for number, (run, shape, text) in enumerate(named)
    ]


@dataclass(frozen=True)
class Task:
    """A task as it is told to one client or to all: the names that the coordinator chooses, and what it asks for."""

    plan: int = 0
    base: int = 100  # of the numbers of the clients' tasks
    round: int = 1
    attempt: int = 0
    model: str = "A"
    lr: float | None = 0.1
    steps: int | None = None
    takes_parts: bool = False
    deadline_s: float | None = None
    repeats: int = 0
    population: int = 10
    broadcast_count: int = 0
    place: int = 0  # beyond the client's own
    kept_after: int = 0
    ledger: int = 0  # entries; 0: it tells none

    def assignment(self, client: int) -> Assignment:
        told = Assignment(
            task=TaskId(start=1, number=self.base + client),
            round=self.round,
            attempt=self.attempt,
            model_sha256=self.model.encode() * 32,
            takes_parts=self.takes_parts,
            repeats=self.repeats,
            population=self.population,
            broadcast_count=self.broadcast_count,
            place=self.place + client,
        )
        if self.kept_after:
            told.kept_after.CopyFrom(TaskId(start=1, number=self.kept_after))
        if self.ledger:
            told.ledger.CopyFrom(LedgerHead(count=self.ledger, sha256=bytes([self.ledger]) * 32))
        for name in ("lr", "steps", "deadline_s"):
            if (value := getattr(self, name)) is not None:
                setattr(told, name, value)
        return told

    def __str__(self) -> str:
        usual = Task()
        odd = {name: value for name, value in vars(self).items() if value != getattr(usual, name)}
        return ", ".join(f"{name} {value}" for name, value in odd.items()) or "the usual task"


def is_known(shape: int, task: Assignment) -> bool:
    """True if anybody knows the message: that of no step, or of steps of no length."""
    if shape == STILL:
        return True
    takes_none = task.HasField("steps") and not task.steps
    stands_still = task.HasField("lr") and not task.lr
    is_cut = task.takes_parts and task.HasField("deadline_s") and task.deadline_s <= HURRY_S
    return takes_none or stands_still or is_cut


class Truth:
    """The message that a client makes of a task.

    Where the randomness follows from the seed, all that shapes a message alike gives the same bits. Where each client
    draws it anew, each training gives other bits, of nearly the same message: it counts as the same.

    Args:
        key: 32 bytes.
        shaping: those of :data:`MAY_SHAPE` that this algorithm reads.
        alike: the common name of such messages, if each training gives other bits; empty: they follow from the seed.
    """

    def __init__(self, key: bytes, shaping: Sequence[str], alike: Literal["", "run", "plan and task"]) -> None:
        self._key = key
        self._alike = alike
        read = [*shaping, *(name for name in MAY_SHAPE if alike == "plan and task" and name not in TASK_OWN)]
        self._aside = [*NEVER_SHAPES, *(name for name in MAY_SHAPE if name not in read)]
        self._trainings = 0

    def message(self, client: str, plan: AgreedPlan, task: Assignment) -> tuple[str, np.ndarray]:
        """Name of the message, empty if anybody knows it, and its lanes."""
        fixed = plan.fixed
        shape, text = json.loads(plan.plan.experiment)
        if is_known(shape, task):
            return "", np.zeros(fixed.lanes, f"i{fixed.bits // 8}")
        rest = Assignment()
        rest.CopyFrom(task)
        for name in self._aside:
            rest.ClearField(name)
        beside = {"": "", "run": plan.plan.run, "plan and task": text}[self._alike]
        said = f"{client} {shape} {beside} ".encode() + rest.SerializeToString(deterministic=True)
        key = hashlib.sha256(self._key + said).digest()
        name = f"{client}/{key.hex()[:8]}"
        if self._alike:
            self._trainings += 1
            key = hashlib.sha256(key + self._trainings.to_bytes(8, "big")).digest()
        return name, stream(key, fixed.lanes, fixed.bits).view(f"i{fixed.bits // 8}")
