"""Schedules of kills, restores and resumes: ε never falls, and equals that of what was released."""

from pathlib import Path

import pytest

from tests.fed.privacy.schedules import World, may_be_killed

_KINDS = {"real": (True, False), "real, state lost": (True, True), "simulated": (False, False)}


def held_to_schedules(root: Path, seeds: range, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[World]]:
    """Run schedules; returns their worlds by kind."""
    worlds: dict[str, list[World]] = {kind: [] for kind in _KINDS}
    one: list[World] = []
    with may_be_killed(monkeypatch, one):
        for seed in seeds:
            kind = [*_KINDS][seed % len(_KINDS)]
            is_real, loses_state = _KINDS[kind]
            one[:] = [World(root / str(seed), seed, is_real=is_real, loses_state=loses_state)]
            for _ in range(12):
                one[0].event()
            one[0].attend(is_last=True)
            one[0].go()  # which may not be refused once more
            worlds[kind].append(one[0])
    return worlds


def check_that_schedules_bite(worlds: dict[str, list[World]]) -> None:
    """Hold the schedules to what they are for: all kinds of ends have come."""
    for kind, those in worlds.items():
        assert sum(world.killed for world in those) >= len(those)
        assert sum(len(world.published) for world in those) >= 6 * len(those)
        assert (sum(world.refused for world in those) > 0) == (kind == "real, state lost")


def test_epsilon_never_falls_in_fifty_schedules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_that_schedules_bite(held_to_schedules(tmp_path, range(50), monkeypatch))


@pytest.mark.long
def test_epsilon_never_falls_in_a_thousand_schedules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_that_schedules_bite(held_to_schedules(tmp_path, range(50, 1050), monkeypatch))
