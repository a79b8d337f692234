"""A node's own account of privacy: what it has contributed to, its owner's limits, and the coordinator's ledger."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fed.aggregators.base import Phase
from fed.clients.training.private_costs import releases_of_task, sample_privacy_of
from fed.config.experiment import Experiment
from fed.config.node_data import NodePrivacy
from fed.errors import InvalidLedger, os_errors_as
from fed.privacy.entries import Cost, Head, LedgerEntry
from fed.privacy.kinds import Privacy, privacy_of
from fed.privacy.ledger import LEDGER_FILE, Ledger, federation_of, ledger_folder
from fed.privacy.releases import Release
from fed.protocol import protocol_pb2 as pb
from fed.secure_aggregation.agreement import plan_digest
from fed.secure_aggregation.fixed_point import FixedPoint
from fed.secure_aggregation.reasons import ClientRefusal, Reason

if TYPE_CHECKING:
    from fed.privacy.dp_sgd import SamplePrivacy

__all__ = ["PrivateNode"]

_DIGEST_BYTES = 32
_MOST_ENTRIES = 2**40  # of a ledger, far more than any has
_MOST_LETTERS = 200  # of a run's name, which is written into each entry


class PrivateNode:
    """Ledger of one node, in its own folder, with a copy in the user's state.

    An entry is written before the message that it records leaves, with the terms that the node was told, and with the
    head of the coordinator's ledger. A coordinator that was put back to an older state is known by that head.

    A node counts each message without amplification by sampling: it knows in which rounds it took part, and must not
    rely on what others do not know.

    Args:
        name: name of the node.
        folder: folder of the node's state.
        authority_pem: certificate of the authority; None where the node goes without credentials.
        limits: the owner's limits; None: there are none.

    Raises:
        InvalidLedger: if the node's ledger has been cut or changed.
    """

    def __init__(
        self, name: str, folder: Path, *, authority_pem: bytes | None = None, limits: NodePrivacy | None = None
    ) -> None:
        self._name = name
        self._folder = folder / "privacy"
        # By its place: the folder itself may be put back, and this copy must not go with it.
        place = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:32]
        self._copy = ledger_folder(f"node {place}") / LEDGER_FILE
        self._federation = federation_of(authority_pem)
        self._limits = limits
        self._stack = ExitStack()
        self._ledger: Ledger | None = None
        self._settings: Privacy | None = None
        self._fixed: FixedPoint | None = None
        self._kind = ""
        self._experiment = Experiment()
        self._samples = 0
        self._of_samples: SamplePrivacy | None = None
        if (self._folder / LEDGER_FILE).exists() or self._copy.exists():
            self._opened()

    def close(self) -> None:
        """Let another process have the ledger."""
        self._stack.close()

    @property
    def entries(self) -> Sequence[LedgerEntry]:
        """All entries, in their order."""
        return () if self._ledger is None else self._ledger.entries

    @property
    def seen(self) -> Head | None:
        """Newest head of the coordinator's ledger among the entries; None if there is none."""
        for entry in reversed(self.entries):
            if entry.told is not None and entry.told["federation"] == self._federation:
                return Head(entry.told["count"], entry.told["sha256"])
        return None

    @property
    def counts_attempts(self) -> bool:
        """True if another attempt of a round is another release of the same message."""
        return self._settings is not None and self._settings.shares_noise

    def prepare(self, experiment: Experiment, plan: pb.Plan, fixed: FixedPoint | None = None, samples: int = 0) -> None:
        """Check a plan, and take its terms.

        Args:
            experiment: experiment in the plan.
            plan: plan of the server.
            fixed: fixed point by which the node's messages become lanes; None without secure aggregation.
            samples: number of the node's samples, by which its own steps are counted where these are private.

        Raises:
            ClientRefusal: if the owner asks for privacy, or for more of it than the plan has.
            InvalidExperiment: if the plan has an ε of which there is no noise for so many samples.
            InvalidLedger: if the node's ledger has been cut or changed.
        """
        self._settings = privacy_of(experiment)
        self._fixed = fixed
        self._experiment = experiment
        self._samples = samples
        self._of_samples = None if self._settings is None else sample_privacy_of(experiment, _phases(experiment))
        if self._of_samples is not None:
            self._of_samples.noise_of(samples)  # an ε that no noise spends is refused with the plan
        self._kind = "" if experiment.privacy is None else experiment.privacy.kind
        if self._settings is None:
            if self._limits is not None:
                raise ClientRefusal(
                    "this node's owner asks for privacy, and the plan has no section privacy: leave privacy out of the "
                    "node's file, or the run",
                    Reason.NO_PRIVACY,
                )
            return
        self._check_limits(self._settings)
        if len(plan.run) > _MOST_LETTERS:
            raise ClientRefusal(
                f"the server's name of the run must have at most {_MOST_LETTERS} letters, got {len(plan.run)}: is it a "
                "server that you trust?",
                Reason.CANNOT_FOLLOW,
            )
        ledger = self._opened()
        ledger.run = plan.run or plan_digest(plan).hex()
        ledger.unit = self._settings.unit

    def check(self, assignment: pb.Assignment) -> None:
        """Check a task before it is done.

        Raises:
            ClientRefusal: if the coordinator's ledger is older than the one that the node remembers, or the task would
                pass the owner's budget, or under ``unit: sample`` that of the plan.
        """
        if self._settings is None:
            return
        head = _head_of(assignment)
        if head is None:
            raise ClientRefusal(
                "the server does not say how much it has released, as a run with privacy must: is it the right server?",
                Reason.OTHER_LEDGER,
            )
        # Kept at the node for good, and told to the server at each start.
        if len(assignment.ledger.sha256) != _DIGEST_BYTES or head.count > _MOST_ENTRIES:
            raise ClientRefusal(
                f"the server's ledger of privacy must have a head of {_DIGEST_BYTES} bytes and at most {_MOST_ENTRIES} "
                f"entries, got {len(assignment.ledger.sha256)} and {head.count}: is it a server that you trust?",
                Reason.OTHER_LEDGER,
            )
        seen = self.seen
        if seen is not None and (head.count < seen.count or (head.count == seen.count and head != seen)):
            raise ClientRefusal(
                f"the server's ledger of privacy has {head.count} entries, and this node remembers another one with "
                f"{seen.count}: have the server's owner put the newest ledger back",
                Reason.OTHER_LEDGER,
            )
        releases = self._releases(assignment)
        if self._limits is not None and self._limits.budget_epsilon is not None:
            self._check_budget(self._limits.budget_epsilon, self._limits.delta, releases, whose="its owner allows")
        # What a node's own steps cost its samples it counts as the server must, and need not believe it.
        if self._of_samples is not None and self._settings.budget_epsilon is not None:
            self._check_budget(
                self._settings.budget_epsilon, self._settings.delta, releases, whose="the plan's privacy section allows"
            )
        # Its noise is found for the plan's rounds, and a server may ask it in more.
        if self._of_samples is not None and self._settings.epsilon is not None:
            epsilon = self._settings.epsilon
            whose = "the plan's privacy section promises for the whole run"
            self._check_budget(epsilon, self._settings.delta, releases, whose=whose, run=self._opened().run)

    def record(self, assignment: pb.Assignment) -> None:
        """Write down what a message will have cost, before it leaves.

        Raises:
            ClientRefusal: as for :meth:`check`.
            LedgerFailed: if it cannot be written down; then the message may not leave.
        """
        if self._settings is None:
            return
        self.check(assignment)
        head = _head_of(assignment)
        assert head is not None
        told: dict[str, Any] = {
            "federation": self._federation,
            "count": head.count,
            "sha256": head.sha256,
            "kind": self._kind,
            "clip": self._settings.clip,
            "delta": self._settings.delta,
        }
        self._opened().append(assignment.round, [Cost(releases=self._releases(assignment))], told=told)

    def _releases(self, assignment: pb.Assignment) -> Mapping[Release, int]:
        assert self._settings is not None
        if self._of_samples is None:
            ledger = self._opened()
            return self._settings.releases_of_message(
                self._fixed,
                number=assignment.round,
                earlier=[entry.round for entry in ledger.entries if entry.run == ledger.run],
                rounds=self._experiment.rounds.make().count,
            )
        steps = assignment.steps if assignment.HasField("steps") else None
        phases = _phases(self._experiment)
        return releases_of_task(self._samples, self._experiment.local, phases, self._of_samples, steps=steps)

    def _check_limits(self, settings: Privacy) -> None:
        """Refuse a plan whose privacy is of another kind, or has less noise, than the owner asks for."""
        if self._limits is None:
            return
        kinds = self._limits.kinds
        if kinds is not None and self._kind not in kinds:
            raise ClientRefusal(
                f"this node takes part only in runs whose privacy is of kind {' or '.join(kinds)} (privacy.kinds in "
                f"its file), and the plan's is {self._kind}",
                Reason.HIDES_TOO_LITTLE,
            )
        least = self._limits.least_noise_multiplier
        if least is None:
            return
        of_samples = self._of_samples
        noise = settings.noise_multiplier if of_samples is None else of_samples.noise_of(self._samples)
        if noise is None or noise < least:
            found = "not said" if noise is None else f"{noise:g}"
            raise ClientRefusal(
                f"this node takes part only where privacy.noise_multiplier is at least {least:g} "
                f"(privacy.least_noise_multiplier in its file), and the plan's is {found}",
                Reason.HIDES_TOO_LITTLE,
            )

    def _check_budget(
        self, budget: float, delta: float, releases: Mapping[Release, int], *, whose: str, run: str | None = None
    ) -> None:
        """Refuse releases beyond a budget.

        Args:
            budget: ε that all of the node's releases may cost.
            delta: δ in (0, 1).
            releases: releases of a task, with their counts.
            whose: clause on who has set the budget.
            run: name of the run that the budget is of; None: it is of all.
        """
        from fed.privacy.accounting import epsilon

        total = self._opened().releases(run=run) + Counter(releases)
        if (would_be := epsilon(total, delta)) > budget:
            raise ClientRefusal(
                f"with this task the node would have contributed to releases of ε = {would_be:.4g} at δ = "
                f"{delta:g}, and {whose} {budget:g}: it takes no part any more",
                Reason.BUDGET_SPENT,
            )

    def _opened(self) -> Ledger:
        if self._ledger is None:
            with os_errors_as(InvalidLedger, f"{self._copy.parent} cannot be written to", "make room there"):
                self._copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            opened = Ledger.open(
                self._folder, f"node {self._name}", run="", copy=self._copy, is_resumed=self._copy.exists()
            )
            self._ledger = self._stack.enter_context(opened)
        return self._ledger


def _phases(experiment: Experiment) -> Sequence[Phase]:
    """Phases of local training."""
    phases: Sequence[Phase] = experiment.algorithm.make().phases()
    return phases


def _head_of(assignment: pb.Assignment) -> Head | None:
    """Head of the coordinator's ledger, as the task tells it."""
    if not assignment.HasField("ledger"):
        return None
    return Head(assignment.ledger.count, assignment.ledger.sha256.hex())
