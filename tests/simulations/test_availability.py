"""When clients are there, and on what they run: what is said of them holds in the long run, and at every boundary."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fed
from fed.config.registry import AVAILABILITIES, DEVICES
from fed.errors import InvalidData
from fed.simulations.availability import Spell, Spells
from fed.simulations.devices import Device, Devices
from fed.simulations.presence import Presence
from fed.vectors.randomness import Streams

DAY_S, HOUR_S = 86400.0, 3600.0
KINDS = [
    {"kind": "daily"},
    {"kind": "daily", "hours": 23.9, "spread_hours": 12},
    {"kind": "daily", "hours": 0.1, "begins_hour": 0, "spread_hours": 0},
    {"kind": "on_off", "on_s": 100, "off_s": 300},
    {"kind": "on_off", "on_s": 0.01, "off_s": 5000},
]


def spells(section: dict[str, Any], client: int = 0, seed: int = 0) -> Spells:
    found = AVAILABILITIES.validate(section).make().of(client, Streams(seed))
    assert isinstance(found, Spells)
    return found


def through(of: Spells, until_s: float) -> list[tuple[float, float, bool]]:
    """The spells (begin, end, is there) from the beginning."""
    found, now = [], 0.0
    while now < until_s:
        is_there, end_s, _ = of.at(now)
        assert end_s > now
        found.append((now, end_s, is_there))
        now = end_s
    return found


@pytest.mark.parametrize("section", KINDS, ids=str)
@pytest.mark.parametrize("client", [0, 1, 2])
def test_spells_alternate_and_a_time_within_one_finds_it_again(section: dict[str, Any], client: int) -> None:
    of, found = spells(section, client), through(spells(section, client), 5 * DAY_S if "daily" in str(section) else 2e4)
    assert all(before[2] != after[2] for before, after in pairwise(found))
    for begin_s, end_s, is_there in reversed(found):  # whatever was asked before
        for time_s in (begin_s, (begin_s + end_s) / 2, math.nextafter(end_s, 0)):
            assert of.at(time_s) == Spell(is_there, end_s)


def test_daily_clients_are_there_for_their_hours_around_the_mean() -> None:
    begins = []
    for client in range(300):
        of = spells({"kind": "daily", "hours": 6, "begins_hour": 20, "spread_hours": 2}, client)
        found = through(of, 10 * DAY_S)[2:-1]
        lengths = [end_s - begin_s for begin_s, end_s, is_there in found if is_there]
        assert lengths == pytest.approx([6 * HOUR_S] * len(lengths))
        begins += [begin_s % DAY_S / HOUR_S for begin_s, _, is_there in found[:2] if is_there]
    around = (np.array(begins) - 8) % 24 + 8  # so that hours after midnight come after those before it
    assert abs(around.mean() - 20) < 4 * 2 / math.sqrt(300)
    assert abs(around.std() - 2) < 4 * 2 / math.sqrt(2 * 300)


def test_alternating_clients_are_available_as_configured_from_the_start() -> None:
    """In 1,000 clients with p = 1/4, within 4 standard deviations: at the beginning and later."""
    of = [spells({"kind": "on_off", "on_s": 100, "off_s": 300}, client) for client in range(1000)]
    for time_s in (0.0, 50.0, 1000.0):
        share = np.mean([one.at(time_s).is_there for one in of])
        assert abs(share - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 1000)
    lengths = [end_s - begin_s for one in of[:200] for begin_s, end_s, is_there in through(one, 8e3)[1:-1] if is_there]
    assert np.mean(lengths) == pytest.approx(100, abs=4 * 100 / math.sqrt(len(lengths)))


def table(path: Path, *rows: str) -> str:
    path.write_text("\n".join(rows) + "\n")
    return str(path)


def test_a_trace_says_when_clients_are_there(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", "client,begins_s,ends_s", "a,10,20", "0,5,6", "a,30,40")
    section = {"kind": "trace", "path": path}
    assert through(spells(section), 100) == [(0, 5, False), (5, 6, True), (6, math.inf, False)]
    again = {**section, "period_s": 50}
    of_a = AVAILABILITIES.validate(again).make().of("a", Streams(0))
    assert through(of_a, 100)[:5] == [
        (0, 10, False),
        (10, 20, True),
        (20, 30, False),
        (30, 40, True),
        (40, 60, False),
    ]
    others = {str(through(spells(section, client), 100)) for client in range(1, 30)}
    assert len(others) == 2, "who is not named draws one of those that are"


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (["client,begins_s"], "must have the columns client, begins_s, ends_s, got none named ends_s"),
        (["client,begins_s,ends_s"], "at least one row"),
        (["client,begins_s,ends_s", "0,1,x"], "line 2: ends_s must be a number, .*, got 'x'"),
        (["client,begins_s,ends_s", "0,1,nan"], "line 2"),
        (["client,begins_s,ends_s", "0,5,5"], "end after it begins"),
        (["client,begins_s,ends_s", "0,5,8", "0,7,9"], "before the next one"),
        (["client,begins_s,ends_s", "0,-5,8"], r"each spell .* got \(begins_s, ends_s\) of \(-5, 8\) for client 0"),
        (
            ["client;begins_s;ends_s", "0;5;8"],
            "none named client: .* separated by commas, and is 'client;begins_s;ends_s'",
        ),
    ],
)
def test_a_trace_that_makes_no_sense_is_refused(tmp_path: Path, rows: list[str], words: str) -> None:
    with pytest.raises(InvalidData, match=words):
        spells({"kind": "trace", "path": table(tmp_path / "t.csv", *rows)})
    with pytest.raises(InvalidData, match=r"cannot be read as a table \(No such file or directory\): give the path"):
        spells({"kind": "trace", "path": str(tmp_path / "nothing.csv")})


def test_overlong_spell_is_refused_with_the_period(tmp_path: Path) -> None:
    section = {"kind": "trace", "path": table(tmp_path / "t.csv", "client,begins_s,ends_s", "0,5,80")}
    assert through(spells(section), 100) == [(0, 5, False), (5, 80, True), (80, math.inf, False)]
    with pytest.raises(InvalidData, match=r"within the period of 50 s, got"):
        spells({**section, "period_s": 50})


def test_a_trace_may_be_written_as_spreadsheets_do(tmp_path: Path) -> None:
    section = {"kind": "trace", "path": table(tmp_path / "t.csv", "\ufeffclient, begins_s, ends_s\r", "0, 5, 6\r")}
    assert through(spells(section), 100) == [(0, 5, False), (5, 6, True), (6, math.inf, False)]


def devices(section: Any) -> Devices:
    made: Devices = DEVICES.validate(section).make()
    return made


def test_speeds_of_lognormal_devices_have_their_median_and_spread() -> None:
    made = devices({"kind": "lognormal", "samples_per_s": 300, "sigma": 1.5, "bandwidth_sigma": 0.5})
    of = [made.device(client, Streams(0)) for client in range(4000)]
    speeds = np.log([one.samples_per_s for one in of])
    assert abs(np.median(speeds) - math.log(300)) < 4 * 1.2533 * 1.5 / math.sqrt(4000)
    assert abs(speeds.std() - 1.5) < 4 * 1.5 / math.sqrt(8000)
    down, up = (np.log([getattr(one, name) for one in of]) for name in ("down_bytes_per_s", "up_bytes_per_s"))
    assert abs(down.std() - 0.5) < 4 * 0.5 / math.sqrt(8000)
    np.testing.assert_allclose(down - up, math.log(Device.down_bytes_per_s / Device.up_bytes_per_s), rtol=1e-12)
    assert abs(np.corrcoef(speeds, down)[0, 1]) < 4 / math.sqrt(4000)


DEVICE_COLUMNS = "client,samples_per_s,down_bytes_per_s,up_bytes_per_s,latency_s"


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([DEVICE_COLUMNS.replace(",latency_s", ""), "0,1,1,1"], "got none named latency_s"),
        ([DEVICE_COLUMNS], "at least one row"),
        ([DEVICE_COLUMNS, "0,fast,1,1,0"], "line 2: samples_per_s must be a number, .*, got 'fast'"),
        ([DEVICE_COLUMNS, "0,0,1,1,0"], "line 2: samples_per_s must be greater than 0, got '0'"),
        ([DEVICE_COLUMNS, "0,1,1,1,-1"], "latency_s must be greater than or equal to 0, got '-1'"),
        ([DEVICE_COLUMNS, "0,1,1,1,0", "0,2,1,1,0"], "must have one row for each client, got two for client 0"),
    ],
)
@pytest.mark.parametrize("algorithm", ["fedavg", "dpsgd"])
def test_invalid_devices_are_refused_before_the_run_begins(
    tmp_path: Path, rows: list[str], words: str, algorithm: str
) -> None:
    section = {"kind": "trace", "path": table(tmp_path / "t.csv", *rows)}
    experiment = fed.Experiment(algorithm={"kind": algorithm}, data={"clients": 3}, devices=section)
    with pytest.raises(InvalidData, match=words):
        fed.simulate(experiment, output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("algorithm", ["fedavg", "dpsgd"])
def test_an_invalid_trace_leaves_an_earlier_run_as_it_was(tmp_path: Path, algorithm: str) -> None:
    keys = {"algorithm": {"kind": algorithm}, "data": {"clients": 3}, "model": {"kind": "logistic"}}
    experiment = fed.Experiment(**keys, rounds={"count": 1}, simulation={"workers": 0})
    fed.simulate(experiment, output=tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    trace = {"kind": "trace", "path": table(tmp_path / "t.csv", "client,begins_s,ends_s", "0,1,x")}
    with pytest.raises(InvalidData, match="line 2"):
        fed.simulate(experiment.override({"devices.availability": trace}), output=tmp_path / "run", overwrite=True)
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_devices_without_spread_are_uniform_and_constant() -> None:
    made = devices({"kind": "lognormal", "sigma": 0})
    uniform = devices("uniform").device(7, Streams(5))
    assert made.device(3, Streams(0)) == Device(**{name: getattr(uniform, name) for name in vars(Device())}) == Device()
    varied = devices("mobile")
    assert varied.device("a", Streams(0)) == varied.device("a", Streams(0)) != varied.device("b", Streams(0))


@given(
    st.floats(0.1, 1e4),
    st.floats(1, 1e9),
    st.floats(0, 10),
    st.integers(1, 10**6),
    st.integers(0, 10**9),
)
def test_samples_in_a_time_invert_the_exchange_time(
    speed: float, bandwidth: float, latency_s: float, samples: int, size_bytes: int
) -> None:
    device = Device(samples_per_s=speed, down_bytes_per_s=bandwidth, up_bytes_per_s=bandwidth / 2, latency_s=latency_s)
    moved = {"bytes_down": size_bytes, "bytes_up": size_bytes}
    takes_s = device.task_s(samples=samples, **moved)
    assert device.samples_in(takes_s, **moved) == pytest.approx(samples, rel=1e-6, abs=1e-9 * takes_s * speed)


@given(st.integers(1, 70), st.lists(st.tuples(st.booleans(), st.integers(0, 69)), max_size=60), st.booleans())
def test_presence_is_a_sorted_list_of_who_is_there(count: int, moves: list[tuple[bool, int]], are_named: bool) -> None:
    clients: Any = [f"c{number:02}" for number in range(count)] if are_named else range(count)
    present, there = Presence(clients), set(clients)
    for comes, number in moves:
        client = clients[number % count]
        present.set(client, comes)
        (there.add if comes else there.discard)(client)
        assert list(present) == sorted(there)
        assert [present[place] for place in range(len(present))] == sorted(there)
    assert present[:2] == sorted(there)[:2]
    if there:
        assert present[-1] == max(there)
    with pytest.raises(IndexError):
        present[len(there)]


def test_membership_times_have_the_configured_distribution() -> None:
    made = devices({"kind": "uniform", "joining_s": 100, "staying_s": 50})
    found = [made.membership(client, Streams(0)) for client in range(4000)]
    joins_s, stays_s = np.array([joins for joins, _ in found]), np.array([leaves - joins for joins, leaves in found])
    assert 0 <= joins_s.min() < joins_s.max() < 100
    assert abs(joins_s.mean() - 50) < 4 * 100 / math.sqrt(12 * 4000)
    assert abs(stays_s.mean() - 50) < 4 * 50 / math.sqrt(4000)
    of = made.spells(7, Streams(0))
    assert isinstance(of, Spells)
    joins, leaves = made.membership(7, Streams(0))
    assert through(of, 1e4) == [(0, joins, False), (joins, leaves, True), (leaves, math.inf, False)]
    assert devices("uniform").are_members_for_ever
    assert devices({"kind": "uniform", "joining_s": 5}).membership(3, Streams(0))[1] == math.inf
