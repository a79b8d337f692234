"""A section given from Python as the object itself is written down where a file can name it, and held elsewhere."""

import pickle
from dataclasses import dataclass
from pathlib import Path

import pytest

import fed
from fed.aggregators import Clip, Composed, FedProx, Lookahead, Momentum, Transform, chain
from fed.aggregators.fedavg import FedAvg
from fed.config.compatibility import check_deployment
from fed.config.experiment import Experiment
from fed.errors import InvalidExperiment
from fed.server.rounds.asynchronous import Buffered

SMALL = {"rounds": {"count": 2, "cohort": 3}, "data": {"clients": 6}, "checkpoints": {"every": 1}}


@dataclass(frozen=True, kw_only=True)
class FedLookahead(Composed):
    """FedAvg whose model goes back to slow weights.

    Args:
        period: rounds between two of them.
    """

    period: int = 2

    def transforms(self) -> tuple[Transform, ...]:
        return (Lookahead(period=self.period),)


CHAIN = chain(Clip(norm=1.0), Momentum(momentum=0.5))


def test_an_object_is_written_down_by_its_kind() -> None:
    assert Experiment(algorithm=FedProx(mu=0.3)) == Experiment(algorithm={"kind": "fedprox", "mu": 0.3})
    assert Experiment(rounds=Buffered(buffer=3)).rounds.model_dump()["buffer"] == 3
    own = Experiment(algorithm=FedLookahead(period=3))
    assert own.dump()["algorithm"] == {"kind": f"python:{__name__}:FedLookahead", "period": 3}
    assert Experiment(**own.dump()) == own
    check_deployment(own)


def test_an_object_runs_as_its_kind_does() -> None:
    by_object = fed.simulate(Experiment(**SMALL, algorithm=FedLookahead(period=1)))
    by_name = fed.simulate(Experiment(**SMALL, algorithm={"kind": f"python:{__name__}:FedLookahead", "period": 1}))
    assert by_object.metrics[-1]["test_loss"] == by_name.metrics[-1]["test_loss"]


def test_what_no_file_can_name_is_kept_as_it_is() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Hidden(FedAvg):
        """A class that no other process finds."""

    for made in (CHAIN, Hidden()):
        experiment = Experiment(**SMALL, algorithm=made)
        assert experiment.override({"seed": 3}).algorithm.make() == made
        with pytest.raises(
            InvalidExperiment, match="was given in Python as an object that no file can name: give it a"
        ):
            Experiment(**experiment.dump())
        with pytest.raises(InvalidExperiment, match="algorithm must be of a class that nodes can import, got "):
            check_deployment(experiment)
    assert pickle.loads(pickle.dumps(Experiment(algorithm=CHAIN))).algorithm.make() == CHAIN


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_of_an_object_is_resumed_with_that_object(tmp_path: Path, workers: int) -> None:
    keys = {**SMALL, "simulation": {"workers": workers}}
    experiment = Experiment(**keys, algorithm=CHAIN)
    run = fed.simulate(experiment, output=tmp_path / "run")
    again = fed.simulate(experiment, output=tmp_path / "run", resume=True)
    assert again.metrics[-1]["test_loss"] == run.metrics[-1]["test_loss"]
    with pytest.raises(InvalidExperiment, match="give it again"):
        fed.simulate(Experiment(**keys), output=tmp_path / "run", resume=True)
    with pytest.raises(InvalidExperiment, match=r"algorithm.kind .*Clip\(norm=2.0\)"):
        fed.simulate(Experiment(**keys, algorithm=chain(Clip(norm=2.0))), output=tmp_path / "run", resume=True)


def test_every_algorithm_and_transform_is_exported() -> None:
    for name in fed.aggregators.__all__:
        assert getattr(fed.aggregators, name).__name__ == name
    assert set(fed.aggregators.__all__) <= set(dir(fed.aggregators))
