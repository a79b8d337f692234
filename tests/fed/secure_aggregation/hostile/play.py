"""A transcript from its seed: coordinators with a goal, and such that move at random."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tests.fed.secure_aggregation.hostile import strategies_of_lists as lists
from tests.fed.secure_aggregation.hostile import strategies_of_tasks as tasks
from tests.fed.secure_aggregation.hostile.checker import Checker
from tests.fed.secure_aggregation.hostile.gathering import Gathering
from tests.fed.secure_aggregation.hostile.moves import play_at_random
from tests.fed.secure_aggregation.hostile.plans import Task
from tests.fed.secure_aggregation.hostile.world import World


def honest_round(world: World) -> None:
    """A round of its own, with the truth for everybody."""
    held = Gathering(world, dict.fromkeys(world.usual, Task(round=3, base=300)))
    held.until_masked()
    held.survive(held.masked())
    held.unmask()


STRATEGIES = {
    strategy.__name__: strategy
    for strategy in (
        tasks.two_tasks_in_one_session,
        tasks.message_of_another_task,
        tasks.two_sums_of_one_round,
        tasks.from_session_to_session,
        lists.two_lists_of_survivors,
        lists.others_lost_to_each,
        lists.false_keys,
        lists.few_survivors,
        lists.late_message,
    )
}


class Transcript(NamedTuple):
    """The outcome of a transcript.

    Args:
        world: its clients.
        parts: the parts that its coordinator played, one after another.
        sums: the number of independent sums that the adversary has.
        findings: sentences, one for each thing that no adversary may have.
    """

    world: World
    parts: Sequence[str]
    sums: int
    findings: Sequence[str]

    def __str__(self) -> str:
        found = "".join(f"\nFOUND: {one}" for one in self.findings)
        return f"{self.world.record}{found}"


def play(seed: int, *, strategies: Sequence[str] = (), settings: Mapping[str, Any] | None = None) -> Transcript:
    """Play and check one transcript.

    Args:
        seed: the seed of all that is drawn.
        strategies: the strategies of which one is played; none: any, or none.
        settings: settings in place of those that are drawn.
    """
    world = World(seed, settings or {})
    parts = [world.rng.choice(strategies)] if strategies else _drawn_parts(world)
    for part in parts:
        world.step(part.replace("_", " "))
        _PARTS[part](world)
    checker = Checker(world.record, world.settings["minimum_cohort"] - len(world.colluders))
    findings = checker.findings()
    return Transcript(world, parts, len(checker.sums), findings)


def _drawn_parts(world: World) -> list[str]:
    rng = world.rng
    if rng.random() < 0.4:
        return [play_at_random.__name__]
    parts = [rng.choice([*STRATEGIES])]
    if rng.random() < 0.5:
        parts.insert(rng.randrange(2), honest_round.__name__)
    if rng.random() < 0.1:
        parts.append(play_at_random.__name__)
    return parts


_PARTS = STRATEGIES | {part.__name__: part for part in (honest_round, play_at_random)}
