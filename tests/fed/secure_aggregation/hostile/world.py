"""World of a transcript: honest clients, colluders, and all that their coordinator has heard."""

import hashlib
import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal

from cryptography.hazmat.primitives.asymmetric import ec

from fed.errors import FedError
from fed.protocol.protocol_pb2 import Box, FromSession, SessionKeys, ToSession
from fed.secure_aggregation.settings import SecureAggregation
from fed.secure_aggregation.terms import Identities
from tests.fed.secure_aggregation.hostile import ideal
from tests.fed.secure_aggregation.hostile.honest import Beliefs, Honest
from tests.fed.secure_aggregation.hostile.plans import MAY_SHAPE, Task, Truth, told_plans
from tests.fed.secure_aggregation.hostile.record import Record

_LETTERS = "ABCDEFGHI"
_ALIKE: Sequence[Literal["", "run", "plan and task"]] = ("", "", "run", "plan and task")


@cache
def signer_of(name: str) -> ec.EllipticCurvePrivateKey:
    """Long-term identity of a client, the same in all transcripts and processes."""
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:31], "big")
    return ec.derive_private_key(number, ec.SECP256R1())


@cache
def public_of(name: str) -> ec.EllipticCurvePublicKey:
    """Public half of that identity."""
    return signer_of(name).public_key()


@cache
def lowest_threshold(clients: int, corrupt: float) -> int | None:
    """The lowest threshold that the product lets a session of so many clients have."""
    for threshold in range(1, clients + 1):
        section = SecureAggregation(threshold=threshold, corrupt=corrupt, minimum_cohort=2, graph="complete")
        try:
            section.degree(clients, is_begun=True)
        except FedError:
            continue
        return threshold
    return None


class World:
    """Clients of a transcript, and what their coordinator has.

    Attributes:
        rng: draws all moves.
        record: the record of the transcript.
        honest: the honest clients, by name.
        usual: names of those on a list, where no strategy has another one.
        colluders: names of the clients whose secrets are the coordinator's.
        plans: the plans that it may tell.
        keys: all that each client has ever said.
        boxes: session and receiver → sender → box.
        consents: session and survivors → client → signature.

    Args:
        seed: the seed of all that is drawn.
        given: in place of settings that are drawn, with ``clients``, ``colluders`` and ``listed``, the usual number on
            a list.
    """

    def __init__(self, seed: int, given: Mapping[str, Any]) -> None:
        self.rng = random.Random(seed)
        drawn = _drawn_settings(self.rng) | {**given}
        count, colluders = drawn.pop("clients"), drawn.pop("colluders")
        listed = drawn.pop("listed", count)
        names = [f"client-{letter}" for letter in _LETTERS[:count]]
        self.colluders = sorted(self.rng.sample(names, colluders))
        self.names = names
        self.settings = drawn
        self.record = Record()
        identities = Identities({name: public_of(name) for name in names}, b"identities")
        self.plans = told_plans(drawn, count, identities)
        shaping = [name for name in MAY_SHAPE if self.rng.random() < 0.5]
        alike = self.rng.choice(_ALIKE)
        truth = Truth(self.rng.randbytes(32), shaping, alike)
        entropy = ideal.Entropy(self.rng)
        self.beliefs = Beliefs()
        self.honest = {
            name: Honest(name, signer_of(name), truth, self.beliefs, entropy, self.record)
            for name in names
            if name not in self.colluders
        }
        self.usual = sorted(self.rng.sample([*self.honest], listed - colluders))
        self.entropy = entropy
        self.told_plan: dict[str, int] = {}
        self.boxes: dict[tuple[bytes, str], dict[str, Box]] = defaultdict(dict)
        self.keys: dict[str, list[SessionKeys]] = defaultdict(list)
        self.consents: dict[tuple[bytes, bytes], dict[str, bytes]] = defaultdict(dict)
        said = ", ".join(f"{name} {value}" for name, value in drawn.items())
        self.step(f"{count} clients, colluders {self.colluders}; {said}; read: {shaping}; anew: {alike or 'no'}")

    def step(self, sentence: str) -> None:
        """Note a step."""
        self.record.steps.append(sentence)

    def anybody(self) -> str:
        """One of the usual clients."""
        return self.rng.choice(self.usual)

    def some(self, names: Sequence[str]) -> list[str]:
        """At least two of some clients, in any order."""
        return self.rng.sample(names, self.rng.randint(min(2, len(names)), len(names)))

    def begin(self, name: str, plan: int) -> None:
        """Tell a client a plan."""
        self.told_plan[name] = plan
        self.honest[name].begin(self.plans[plan])
        self.step(f"{name} is told {self.plans[plan].label}")

    def assign(self, name: str, task: Task) -> None:
        """Tell a client a task."""
        said = self.honest[name].assign(task.assignment(self.names.index(name)))
        self.keys[name] += [message.keys for message in said if message.HasField("keys")]
        self.step(f"{name} is assigned {task}{_heard(said)}")

    def train(self, name: str) -> None:
        """Let a client end a training."""
        before = len(self.record.masked)
        self._hear(name, self.honest[name].train())
        self.step(f"{name} has trained{self._delivered(before)}")

    def tell(self, name: str, message: ToSession, what: str) -> list[FromSession]:
        """Tell a client a message of a session."""
        before = len(self.record.masked)
        said = self.honest[name].tell(message)
        self._hear(name, said)
        self.step(f"{name} is told {what}{self._delivered(before)}{_heard(said)}")
        return said

    def withdraw(self, name: str, task: Task) -> None:
        """Tell a client that its task is needed no more."""
        said = self.honest[name].withdraw(task.assignment(self.names.index(name)).task)
        self.step(f"{name} is told that the task is withdrawn{_heard(said)}")

    def write(self, name: str) -> None:
        """Let a client's record reach its disk."""
        said = self.honest[name].write()
        self._hear(name, said)
        self.step(f"{name} has its record on the disk{_heard(said)}")

    def restart(self, name: str, *, is_written: bool = False) -> None:
        """Let a client die and come back."""
        if is_written:
            self.honest[name].write_and_die()
        else:
            self.honest[name].restart()
        self.told_plan.pop(name, None)
        self.step(f"{name} dies and comes back{', with its record on the disk' if is_written else ''}")

    def _hear(self, name: str, said: Sequence[FromSession]) -> None:
        dealt = self.honest[name].dealt
        for message in said:
            if message.HasField("shares") and dealt is not None:
                for box in message.shares.boxes:
                    receiver = dealt.names[box.place - 1]
                    self.boxes[dealt.session, receiver][name] = Box(place=dealt.place + 1, sealed=box.sealed)

    def _delivered(self, before: int) -> str:
        return " → its masked message" if len(self.record.masked) > before else ""


def _heard(said: Sequence[FromSession]) -> str:
    kinds = [message.WhichOneof("what") for message in said]
    return "".join(
        f" → {message.aborted!r}" if kind == "aborted" else f" → {kind}"
        for kind, message in zip(kinds, said, strict=True)
    )


def _drawn_settings(rng: random.Random) -> dict[str, Any]:
    """Settings, and as many colluders as they tolerate in the shortest list, or fewer."""
    clients = rng.choice([3, 4, 4, 5, 5, 5, 6, 6, 7, 8, 9])
    if clients > 4 and rng.random() < 0.15:
        drop_out = rng.choice([0.0, 0.12, 0.2])
        least = rng.randint(3, clients)
        settings = {"graph": "harary", "corrupt": 0.0, "max_drop_out": drop_out, "minimum_cohort": least}
        return {"clients": clients, "colluders": 0, **settings}
    corrupt = rng.choice([0.0, 0.1, 0.1, 0.2, 0.3])
    least = rng.randint(2, clients)
    tolerated = min(math.ceil(corrupt * least), least - 2)
    colluders = rng.choice([tolerated, tolerated, rng.randint(0, tolerated)])
    shortest = clients if rng.random() < 0.8 else rng.randint(max(3, least), clients)
    lowest = lowest_threshold(shortest, corrupt)
    threshold = rng.choice(["auto", lowest or "auto", lowest or "auto"])
    return {
        "clients": clients,
        "colluders": colluders,
        "graph": "complete",
        "corrupt": corrupt,
        "minimum_cohort": least,
        "threshold": threshold,
        "listed": clients if threshold == "auto" else shortest,
    }
