"""Examples that repeat published results: their data are prepared as said, and their orderings hold."""

import os
from pathlib import Path

import pytest

import fed
from examples.tcga_prepare import prepare
from fed.clients.data import load
from fed.vectors.randomness import Streams

ROOT = Path(__file__).resolve().parent.parent.parent
FLAMBY = os.environ.get("FED_FLAMBY")
PLAY = "ROMEO:\n" + "She speaks. O speak again, bright angel.\n" * 6 + "\nJULIET:\n" + "What's in a name?\n" * 12


def test_tcga_rows_keep_their_centre_fold_and_targets(tmp_path: Path) -> None:
    (tmp_path / "dataset_creation_scripts").mkdir()
    (tmp_path / "brca.csv").write_text(
        'pid,age,"duct, NOS",E,T\na,90,1,0.0,538.0\nb,51,0,1.0,677.5\nc,30,0,1.0,3.0\nd,40,1,0.0,9.0\n'
    )
    (tmp_path / "dataset_creation_scripts" / "train_test_split.csv").write_text(
        "pid,fold,fold2\nd,train,train_5\nb,test,test_0\na,train,train_0\n"
    )
    assert prepare(tmp_path, tmp_path / "data" / "tcga.csv") == 3
    section = fed.Comparison.load(ROOT / "examples" / "tcga.yaml").variants()["FedAvg"].data
    assert section is not None
    data = load(section.model_copy(update={"path": str(tmp_path / "data" / "tcga.csv")}), Streams(0))
    held = {client: [part.tolist() for part in data.read(client)] for client in data.clients}
    assert held == {"Northeast": [[[90, 1]], [[538, 0]]], "Canada": [[[40, 1]], [[9, 0]]]}
    assert data.test is not None
    assert [part.tolist() for part in data.test] == [[[51, 0]], [[677.5, 1]]]


@pytest.mark.long
def test_an_lstm_learns_from_a_play(tmp_path: Path) -> None:
    (tmp_path / "play.txt").write_text(PLAY)
    experiment = fed.Experiment.load(ROOT / "examples" / "shakespeare.yaml").override(
        {"data.path": str(tmp_path), "data.sequence_length": 20, "rounds.count": 3, "rounds.cohort": 2}
        | {"model.hidden": 8, "rounds.evaluate_every": 1, "simulation.workers": 0}
    )
    losses = [line["test_loss"] for line in fed.simulate(experiment).metrics]
    assert losses[-1] < losses[0]


@pytest.mark.long
def test_scaffold_needs_fewer_rounds_than_fedavg_on_sorted_digits() -> None:
    """Karimireddy et al. 2020, 1910.06378, table 3: likewise with 1, 5 and 10 local epochs."""
    comparison = fed.Comparison.load(ROOT / "examples" / "similarity.yaml")
    rows = fed.compare(comparison.model_copy(update={"seeds": [0]}), jobs=2).rows
    rounds = {row["name"]: row["rounds_to_target"] for row in rows}
    for epochs in (1, 5, 10):
        cells = [f"local.epochs={epochs}, data.partition=similarity(percent={share})" for share in (0, 10, 100)]
        fedavg, scaffold = ([rounds[f"algorithm={kind}, {cell}"] for cell in cells] for kind in ("fedavg", "scaffold"))
        assert scaffold[0] < fedavg[0]
        assert fedavg[0] > fedavg[2]


@pytest.mark.long
@pytest.mark.skipif(
    FLAMBY is None, reason="FED_FLAMBY must name FLamby's folder datasets/fed_tcga_brca, which users bring"
)
def test_tcga_reaches_the_published_concordance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best of our seeds is at most 0.03 below the best published one."""
    from examples import tcga

    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from compared import Compared  # type: ignore[import-not-found]  # programs beside each other, in no package
    from tcga_table import PUBLISHED  # type: ignore[import-not-found]

    assert FLAMBY is not None
    prepare(Path(FLAMBY), tmp_path / "data" / "tcga.csv")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr("sys.argv", ["tcga", "runs"])
    assert tcga.main() == 0
    found = Compared.read(tmp_path / "runs")
    ours = {name: found.finals(name, "final_test_c_index") for name in PUBLISHED}
    for name, published in PUBLISHED.items():
        assert max(ours[name]) >= max(published[:3]) - 0.03, name  # seeds 42 to 44
    for name in ("FedAdam", "FedAdagrad"):
        assert sum(ours[name]) / 5 >= 0.8
