"""Ray: the same bits as in one process, whichever node dies, and nothing left of it."""

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fed
from fed.clients.training.executor import Demand, Item
from fed.errors import Diverged, FedError, InvalidExperiment, InvalidInput, RunFailed
from fed.server.observer import Essential
from fed.simulations.executors.on_ray import Ray
from fed.simulations.simulate import simulate
from tests.simulations import users_parts as parts
from tests.simulations.executors import pure_work as work
from tests.thinned import thinned

ONE = Demand(workers=1, groups=1, device="cpu")


def keys(algorithm: str, **rounds: Any) -> fed.Experiment:
    """Five groups of two or one."""
    cohort = "all" if algorithm in ("dpsgd", "local") else 6
    return fed.Experiment(
        algorithm=algorithm,
        rounds={"count": 3, "cohort": cohort, **rounds},
        local={"batch_size": 4},
        simulation={"batching": "on", "group": 2, "workers": 0},
    )


def on_ray(experiment: fed.Experiment, workers: int | str = 2, **options: Any) -> fed.Experiment:
    return experiment.override({"simulation.executor": {"kind": "ray", **options}, "simulation.workers": workers})


def test_ray_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InvalidInput, match=r'^executor ray needs the package ray, .*: pip install "fed\[ray\]", or '):
        simulate(on_ray(keys("fedavg")), data=parts.unequal(), model=parts.small)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"workers_per_gpu": 0}, r"workers_per_gpu"),
        ({"memory_gb": 0}, r"memory_gb"),
        ({"addres": "auto"}, r"addres.*address"),
    ],
)
def test_keys_of_ray_are_held_to_their_range(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidExperiment, match=rf"simulation\.executor.*{reason}"):
        on_ray(keys("fedavg"), **options)


def test_ray_without_workers_is_refused() -> None:
    with pytest.raises(InvalidExperiment, match="workers must be at least 1 with executor ray"):
        on_ray(keys("fedavg"), workers=0)


def test_ray_is_for_processors_and_gpus_of_cuda() -> None:
    with pytest.raises(InvalidExperiment, match=r"got device mps: set simulation\.device to cpu$"):
        Ray(work.caller, Demand(workers=1, groups=1, device="mps"))


# What follows needs the package.


@pytest.fixture(scope="class")
def cluster() -> Iterator[Any]:
    """A cluster on this machine to which the program is connected: two cores, as far as Ray knows.

    Its workers are as eager as other programs, for which they would wait else, as long as the tests take.
    """
    pytest.importorskip("ray")
    import ray

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_worker_niceness", "0")
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield ray
    ray.shutdown()


long = [pytest.mark.long, pytest.mark.xdist_group("ray"), pytest.mark.filterwarnings("ignore::FutureWarning:ray")]


class TestOnOneMachine:
    pytestmark = long

    @pytest.fixture
    def one(self, cluster: Any) -> Iterator[Ray]:
        with Ray(work.caller, ONE) as executor:
            yield executor

    @pytest.mark.parametrize("algorithm", thinned(["fedavg", "ditto", "dpsgd", "local"], quick=2))
    def test_ray_changes_no_bit(self, algorithm: str, cluster: Any) -> None:
        """In float64, which shows if sums are grouped otherwise."""
        data = parts.unequal(torch.float64)
        alone = simulate(keys(algorithm), data=data, model=parts.double)
        apart = simulate(on_ray(keys(algorithm), "auto"), data=data, model=parts.double)
        assert parts.outcome(alone) == parts.outcome(apart)
        assert cluster.is_initialized()

    @pytest.mark.parametrize(
        "given",
        [
            {"model": parts.with_dropout},
            {"model": parts.small, "loss": parts.brier, "metric": parts.second_guess},
            {"model": parts.small, "data": parts.unequal(test=0)},
            {"model": parts.small, "data": parts.on_demand()},
        ],
        ids=["dropout", "loss and metric", "no test set", "on demand"],
    )
    def test_ray_changes_no_bit_for_parts_of_a_users_own(self, given: dict[str, Any], cluster: Any) -> None:
        given = {"data": parts.unequal(), **given}
        alone, apart = (simulate(run, **given) for run in (keys("fedavg"), on_ray(keys("fedavg"))))
        assert parts.outcome(alone) == parts.outcome(apart)

    def test_large_tensors_go_through_the_store_unchanged(self, one: Ray) -> None:
        model = torch.randn(200_000).bfloat16()
        tickets = [one.submit(Item(work.same, (model, torch.zeros(0, 3), model[::2]), "large")) for _ in range(3)]
        assert len(one._stored) == 2
        for _, _, tensors in one.results(tickets):
            assert all(map(torch.equal, tensors, (model, torch.zeros(0, 3), model[::2])))
            tensors[0] += 1  # the caller's own
        assert not one._stored

    def test_an_actor_computes_with_one_thread(self, one: Ray) -> None:
        [(_, (_, threads, _), _)] = one.results([one.submit(Item(work.who, (), "who"))])
        assert threads == 1

    @pytest.mark.parametrize(
        ("how", "words"),
        [
            (work.raises, r"ValueError: bad batch \(.*pure_work.py:\d+ in raises\)"),
            (work.kills_itself, "its process died .*"),
            (work.leaves, r"SystemExit: 7 .*"),
        ],
    )
    def test_an_item_that_ends_three_workers_is_given_up(
        self, how: Any, words: str, one: Ray, tmp_path: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        once = one.submit(Item(work.Fail(how, tmp_path / "once", 1), (), "client 3"))
        ever = one.submit(Item(work.Fail(how, tmp_path / "ever"), (), "client 5"))
        [(_, pid, _)] = one.results([once])
        assert str(pid) != work.notes(tmp_path / "once")[0]
        with pytest.raises(RunFailed, match=rf"^client 5 ended 3 workers on Ray; last words: {words}"):
            [*one.results([ever])]
        assert len(work.notes(tmp_path / "ever")) == 3
        assert "worker 0 on Ray died, at client 3: " in caplog.text

    def test_an_error_of_ours_arrives_as_it_is(self, one: Ray) -> None:
        with pytest.raises(Diverged, match="the training loss became nan"):
            [*one.results([one.submit(Item(work.diverging, (), "client 5"))])]

    @pytest.mark.parametrize("make", [work.make_that_raises, work.make_that_diverges])
    def test_work_that_cannot_be_made_ends_the_executor(self, make: Any, cluster: Any) -> None:
        executor = Ray(make, ONE)
        ticket = executor.submit(Item(work.who, (), "who"))
        with pytest.raises(FedError, match=r"^workers on Ray cannot begin: ValueError: no work on cpu|became nan"):
            [*executor.results([ticket])]

    def test_more_workers_than_a_cluster_has_are_refused(self, cluster: Any) -> None:
        with pytest.raises(InvalidExperiment, match=r"has room for 2 workers with 1 cores each, got 3: lower "):
            simulate(on_ray(keys("fedavg"), 3), data=parts.unequal(), model=parts.small)
        with pytest.raises(InvalidExperiment, match=r"room for 0 workers with 1 cores and 1e\+15 bytes of memory each"):
            simulate(on_ray(keys("fedavg"), memory_gb=1e6), data=parts.unequal(), model=parts.small)

    def test_cores_are_given_back_at_the_end(self, cluster: Any) -> None:
        with Ray(work.caller, Demand(workers=2, groups=2, device="cpu")) as executor:
            tickets = [executor.submit(Item(work.who, (), "who")) for _ in range(2)]
            assert len([*executor.results(tickets)]) == 2
            assert cluster.available_resources().get("CPU", 0) == 0
        work.await_that(lambda: cluster.available_resources().get("CPU", 0) == 2, "the cores")


def those_called(name: str) -> list[int]:
    """Processes of this machine that Ray has given such a name."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if work.is_alive(int(folder.name)) and (folder / "cmdline").read_bytes().startswith(name.encode()):
                found.append(int(folder.name))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
class TestOnNodes:
    pytestmark = long

    @pytest.fixture
    def nodes(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        """A cluster of three nodes with a core each, as far as Ray knows."""
        pytest.importorskip("ray")
        monkeypatch.setenv("RAY_worker_niceness", "0")
        from ray.cluster_utils import Cluster

        small = {"num_cpus": 1, "object_store_memory": 100 << 20}
        made = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
        for _ in range(2):
            made.add_node(**small)
        yield made
        made.shutdown()

    def test_nodes_change_no_bit_whichever_dies(
        self,
        nodes: Any,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        """Three nodes, of which one is killed in the run; then two, likewise; then one."""
        data = parts.unequal(torch.float64)
        experiment = keys("fedavg", count=4)
        alone = simulate(experiment, data=data, model=parts.double)
        submit = Ray.submit

        def submit_to_all(executor: Ray, item: Item) -> int:
            while not executor._submitted and not all(worker.is_ready for worker in executor._workers):
                executor._listen(None)
            return submit(executor, item)

        monkeypatch.setattr(Ray, "submit", submit_to_all)

        def kill(number: int) -> None:
            if number == 2 and (left := list(nodes.worker_nodes)):
                before = len(those_called("ray::RayWorker"))
                nodes.remove_node(left[0], allow_graceful=False)
                work.await_that(lambda: len(those_called("ray::RayWorker")) < before, "the end of its worker")

        for count in (3, 2, 1):
            assert len(nodes.list_all_nodes()) == count
            run = simulate(
                on_ray(experiment, count, address=nodes.address),
                data=data,
                model=parts.double,
                observers=[Essential(parts.Watcher(kill))],
            )
            assert parts.outcome(run) == parts.outcome(alone)
        assert len([line for line in caplog.messages if "on Ray died, " in line]) == 2
        assert "(raylet)" not in "".join(capfd.readouterr())


EXPERIMENT = """
data: {kind: digits, clients: 10}
rounds: {count: 100000}
simulation: {executor: ray, workers: 1}
checkpoints: {every: 1}
"""


def those_with(mark: str) -> list[int]:
    """Processes whose environment has this mark."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and work.is_alive(int(folder.name)):
            with contextlib.suppress(OSError):
                if mark.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
class TestEnds:
    pytestmark = long

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
    def test_nothing_is_left_of_a_cluster_after_a_signal(self, number: signal.Signals, tmp_path: Path) -> None:
        pytest.importorskip("ray")
        mark = uuid.uuid4().hex
        (tmp_path / "experiment.yaml").write_text(EXPERIMENT)
        process = subprocess.Popen(
            [sys.executable, "-m", "fed", "simulate", "experiment.yaml", "--output", "run"],
            cwd=tmp_path,
            env={**os.environ, "FED_MARK": mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            work.await_that(lambda: (tmp_path / "run" / "checkpoints").exists(), "a round", 4 * work.BOUND_S)
            workers = {*those_with(mark)} & {*those_called("ray::RayWorker")}
            own = os.getpriority(os.PRIO_PROCESS, 0)
            assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in workers} == {own}, "as eager as this process"
            if number == signal.SIGINT:
                os.killpg(process.pid, number)  # as a terminal does
            else:
                process.send_signal(number)
            said, _ = process.communicate(timeout=2 * work.BOUND_S)
            work.await_that(lambda: not {*those_with(mark)} & {*those_called("ray::RayWorker")}, "the worker's end")
            # An agent of Ray's tries sixty times, each second, to reach the store of the cluster's state.
            work.await_that(lambda: not those_with(mark), "the end of all processes", 2 * work.BOUND_S)
        finally:
            for pid in those_with(mark):
                os.kill(pid, signal.SIGKILL)
        assert process.returncode == (-9 if number == signal.SIGKILL else 130)
        lines = [line for line in said.splitlines() if not line.startswith("waiting for a node")]
        assert "ray" not in "\n".join(lines).lower()


def compared(jobs: Any, output: Path | None = None, observer: Any = None, **options: Any) -> fed.ComparisonResult:
    """Two variants with two seeds, on Ray where that has options."""
    base: dict[str, Any] = {"data": {"kind": "digits", "clients": 6}, "rounds": {"count": 6, "cohort": 3}}
    base["checkpoints"] = {"every": 1}
    if options:
        base["simulation"] = {"executor": {"kind": "ray", **options}}
    variants: list[Any] = [{"name": "FedAvg"}, {"name": "slower", "local.lr": 0.01}]
    given = fed.Comparison(base=base, compare=variants, seeds=[0, 1])
    return fed.compare(given, output=output, jobs=jobs, observer=observer)


class Noting:
    """Notes what it is told of runs, and does something at the first second round."""

    def __init__(self, act: Callable[[], None] = lambda: None) -> None:
        self.act = act
        self.told: list[tuple[Any, ...]] = []

    def begin(self, runs: Any) -> None:
        self.told.append(("begin", len(runs)))

    def start(self, name: str, repetition: Any) -> None:
        self.told.append((name, repetition, "start"))

    def round(self, name: str, repetition: Any, line: Any) -> None:
        if line["round"] == 2 and not any(what[-1] == 2 for what in self.told):
            self.act()
        self.told.append((name, repetition, line["round"]))

    def end(self, name: str, repetition: Any, summary: Any) -> None:
        self.told.append((name, repetition, summary["status"]))


class TestComparisons:
    pytestmark = long

    def test_runs_on_ray_have_the_same_figures(self, cluster: Any, tmp_path: Path) -> None:
        """Their processes are killed, and they go on in others."""

        def kill() -> None:
            for pid in those_called("ray::RayRun"):
                os.kill(pid, signal.SIGKILL)

        watch = Noting(kill)
        apart = compared("auto", tmp_path / "out", watch, address="auto")
        assert rows(apart) == rows(compared(1))
        assert sorted(watch.told, key=str) == sorted(told_of_all(), key=str)
        assert (tmp_path / "out" / "runs" / "fedavg" / "seed-1" / "summary.json").exists()

    def test_a_folder_that_nodes_do_not_see_is_refused(self, cluster: Any, monkeypatch: Any, tmp_path: Path) -> None:
        monkeypatch.setattr(Path, "resolve", lambda path: Path("/nowhere") / path.name)
        with pytest.raises(InvalidInput, match="a node of the Ray cluster does not see /nowhere as this machine does"):
            compared(2, tmp_path / "out", address="auto")

    def test_interruption_keeps_what_was_done(self, cluster: Any, tmp_path: Path) -> None:
        def interrupt() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            compared(2, tmp_path / "out", Noting(interrupt), address="auto")
        work.await_that(lambda: not those_called("ray::RayRun"), "the end of all runs")
        resumed = fed.compare(
            fed.Comparison.load(tmp_path / "out" / "comparison.yaml"), output=tmp_path / "out", resume=True, jobs=2
        )
        assert rows(resumed) == rows(compared(1))


def rows(result: fed.ComparisonResult) -> str:
    """The figures of a comparison, but for times."""
    return re.sub(r"'(\w*wall_s\w*)': [^,}]*", r"'\1': 0", repr(result.rows))


def told_of_all() -> list[tuple[Any, ...]]:
    runs = [(name, seed) for name in ("FedAvg", "slower") for seed in (0, 1)]
    each = ["start", 1, 2, 3, 4, 5, 6, "finished"]
    return [("begin", 4), *((*run, what) for run in runs for what in each)]
