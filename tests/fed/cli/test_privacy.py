"""``fed privacy``: what a plan costs, on the terminal and in files."""

import json
import math
from pathlib import Path

import pytest

from fed.clients.training import private_costs
from fed.privacy.accounting import epsilon
from fed.privacy.releases import Release
from tests.fed.cli.commands import Run, runner

EXPERIMENT = """
name: private
data: {kind: digits, clients: 20}
rounds: {count: 30, cohort: 2, sampling: poisson}
privacy: {kind: central, clip: 0.5, noise_multiplier: 1.0, delta: 1.0e-5, budget_epsilon: 4}
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    (tmp_path / "private.yaml").write_text(EXPERIMENT)
    return runner(tmp_path, monkeypatch, capsys, "privacy")


def test_terminal_shows_cost_budget_and_promise(run: Run) -> None:
    code, out, err = run("private.yaml")
    assert (code, err) == (0, "")
    spent = epsilon({Release(noise_multiplier=1.0, sampling=0.1): 30}, 1e-5)
    assert f"{spent:.3g}"[:3] in out.splitlines()[0]
    for text in (
        "δ                1e-05",
        "Poisson sampling",
        "ε = 4 allows",
        "not covered",
        "noise_multiplier   1 clients",
    ):
        assert text in out


@pytest.mark.parametrize("suffix", [".md", ".json"])
def test_files_hold_the_sheet_and_are_kept(run: Run, tmp_path: Path, suffix: str) -> None:
    sheet = tmp_path / f"sheet{suffix}"
    arguments = ["private.yaml", "--noise", "2", "--cohort", "4", "--clients", "40", "--budget", "2", "--json"]
    code, out, _ = run(*arguments, "--to", str(sheet))
    assert code == 0
    values = json.loads(out)
    assert values["clients"] == 40
    assert values["sampling"] == 0.05
    assert values["budget_epsilon"] == 2
    (cell,) = values["table"]
    assert cell == {"noise_multiplier": 2, "cohort": 4, "epsilon": cell["epsilon"]}
    assert cell["epsilon"] == epsilon({Release(noise_multiplier=2.0, sampling=0.1): 30}, 1e-5)
    text = sheet.read_text()
    assert text == out if suffix == ".json" else "NIST SP 800-226" in text
    assert run(*arguments, "--to", str(sheet)).code == 2
    assert sheet.read_text() == text
    assert run(*arguments, "--to", str(sheet), "--overwrite").code == 0


def test_local_noise_is_told_by_its_key(run: Run) -> None:
    local = "privacy={kind: local, clip: 1, epsilon: 50}"
    code, out, _ = run("private.yaml", "--set", local, "--json")
    assert code == 0
    values = json.loads(out)
    assert 50 * 0.999 <= values["epsilon"] <= 50
    of_release = Release(noise_multiplier=values["noise_multiplier"] / 2)
    assert values["epsilon"] == pytest.approx(epsilon({of_release: 30}, 1e-5), rel=1e-9)
    of_run = [cell for cell in values["table"] if cell["noise_multiplier"] == values["noise_multiplier"]]
    assert [cell["epsilon"] for cell in of_run] == [values["epsilon"]]


SAMPLES = "privacy={kind: local, unit: sample, clip: 1, noise_multiplier: 1, budget_epsilon: 20}"


def of_samples(samples: int, noise_multiplier: float = 1.0) -> float:
    """ε of a client of the experiment, whose batches are of 16 samples."""
    step = Release(noise_multiplier=noise_multiplier, sampling=min(16 / samples, 1))
    return epsilon({step: 30 * math.ceil(samples / 16)}, 1e-5)


def test_samples_cost_each_client_by_its_number(run: Run) -> None:
    arguments = ["--set", SAMPLES, "--set", "data.clients=4", "--noise", "2", "--json"]
    code, out, _ = run("private.yaml", *arguments)
    assert code == 0
    values = json.loads(out)
    clients = values["by_client"]
    assert sorted(client["client"] for client in clients) == ["0", "1", "2", "3"]
    for client in clients:
        samples = client["samples"]
        assert client["epsilon"] == of_samples(samples)
        step = Release(noise_multiplier=1.0, sampling=16 / samples)
        within = client["rounds_within_budget"]
        steps = [rounds * math.ceil(samples / 16) for rounds in (within, within + 1)]
        assert epsilon({step: steps[0]}, 1e-5) <= 20 < epsilon({step: steps[1]}, 1e-5)
        assert of_samples(samples, client["noise_for_budget"]) == pytest.approx(20, rel=1e-3)
    assert values["epsilon"] == max(client["epsilon"] for client in clients)
    cells = {(cell["noise_multiplier"], cell["epsilon"]) for cell in values["table"]}
    assert cells == {(2, of_samples(client["samples"], 2.0)) for client in clients}


def test_many_clients_are_three_and_the_one_that_loses_most(run: Run) -> None:
    """Of 16 samples one step takes all, of 17 two steps take nearly all: the smallest client does not lose most."""
    sizes = [12, 16, 17, *range(40, 60)]
    arguments = [text for size in sizes for text in ("--samples", str(size))]
    code, out, _ = run("private.yaml", "--set", SAMPLES, "--set", "data=null", *arguments, "--json")
    assert code == 0
    values = json.loads(out)
    shown = [(client["client"], client["samples"]) for client in values["by_client"]]
    assert shown == [("smallest", 12), ("median", 48), ("largest", 59)]
    assert (values["samples"], values["epsilon"]) == (17, of_samples(17))
    assert max(of_samples(size) for size in sizes) == of_samples(17)


def test_sheet_of_samples_says_whose_cost_it_is(run: Run, tmp_path: Path) -> None:
    told = "privacy={kind: local, unit: sample, clip: 1, epsilon: 5}"
    sheet = tmp_path / "sheet.md"
    code, out, err = run("private.yaml", "--set", told, "--samples", "32", "--samples", "64", "--to", str(sheet))
    assert (code, err) == (0, f"sheet in {sheet}\n")
    page = sheet.read_text()
    for text in ("one sample of one client", "noise_multiplier by client, for ε = 5 of each", "(DP-SGD)"):
        assert text in page
    for text in ("which loses most of 2 clients", "| 32 samples | 32 | 0.5 | 2 |", "| 64 samples | 64 | 0.25 | 4 |"):
        assert text in page
    assert "Clients, over 30 rounds:" in out


def test_search_for_noise_that_takes_long_is_told_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    told = "privacy={kind: local, unit: sample, clip: 1, epsilon: 5}"
    arguments = ["private.yaml", "--set", told, "--samples", "32", "--samples", "64", "--samples", "32"]
    assert run(*arguments).err == ""
    monkeypatch.setattr(private_costs, "_LONG_S", 0.0)
    assert run(*arguments).err == "finding the noise for privacy.epsilon, for each of 2 numbers of samples\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "privacy=null"], "private.yaml must have the section privacy, got none: write one"),
        (["--noise", "0"], "--noise must exceed 0, got 0"),
        (["--cohort", "21"], "--cohort must be at most the 20 clients, got 21"),
        (["--set", "rounds.sampling=uniform", "--cohort", "4"], "--cohort changes ε only where Poisson sampling"),
        (["--samples", "9"], "--samples is for privacy.unit sample, got unit client"),
        (["--set", SAMPLES, "--cohort", "4"], "--cohort changes ε only where Poisson sampling"),
        (["--set", SAMPLES, "--set", "data=null"], "data: null says no client's number of samples"),
        (["--to", "sheet.txt"], "--to must end in .md or .json, got sheet.txt"),
    ],
)
def test_a_mistake_is_one_sentence(run: Run, arguments: list[str], message: str) -> None:
    code, out, err = run("private.yaml", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert len(err.splitlines()) == 1
