"""Sections that have no meaning together are refused when the experiment is read, and all others are not."""

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fed.aggregators.base import ClientWork, Report
from fed.aggregators.centralized import Centralized
from fed.aggregators.fedavg import FedAvg
from fed.aggregators.local_sgd import LocalSGD
from fed.aggregators.peer_rule import PeerRule
from fed.cli.main import main
from fed.clients.node.plans import as_experiment
from fed.compression.blocks import as_bytes, from_bytes
from fed.compression.codec import Codec, CodecState, Draw, Encoded, Rows, Values
from fed.config.comparison import Comparison
from fed.config.compatibility import check_deployment
from fed.config.experiment import Experiment, Local
from fed.config.registry import ADVERSARIES, ALGORITHMS
from fed.errors import InvalidExperiment
from fed.simulations.attacks import Attack, Knowledge
from tests.thinned import thinned

LOCAL: dict[str, dict[str, Any]] = {
    "plain": {},
    "schedule": {"schedule": "cosine", "scaling": "linear"},
    "decay": {"weight_decay": 0.01},
    "half": {"precision": "bfloat16"},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "adam": {"optimizer": "adam"},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.01},
}
REFUSED = {
    "scaffold": {"adam", "adamw"},
    "mimelite": {"adam", "adamw", "momentum", "nesterov"},
    "qfedavg": {"adam", "adamw"},
    **{kind: {"momentum", "nesterov", "adam", "adamw"} for kind in ("d2", "gradient_tracking")},
}
PEER_RULES = [kind for kind in ALGORITHMS.builtin if isinstance(ALGORITHMS.make(kind).make(), PeerRule)]


def problem(**keys: Any) -> str:
    """The one sentence that these keys are answered with."""
    with pytest.raises(InvalidExperiment) as caught:
        Experiment(**keys)
    (line,) = str(caught.value).splitlines()
    return line


# Local training.


@pytest.mark.parametrize("local", LOCAL)
@pytest.mark.parametrize("kind", thinned(ALGORITHMS.builtin, quick=17))
def test_algorithm_refuses_local_steps_that_break_its_equation(kind: str, local: str) -> None:
    keys: dict[str, Any] = {"algorithm": {"kind": kind}, "local": LOCAL[local]}
    if local not in REFUSED.get(kind, set()):
        assert Experiment(**keys).algorithm.kind == kind
        return
    line = problem(**keys)
    assert line.startswith(f"{kind} ")
    for part in ("needs local.optimizer sgd", ", for ", f", got {LOCAL[local].get('optimizer', 'sgd')}", "choose "):
        assert part in line


def test_qfedavg_that_is_not_fair_takes_any_local_steps() -> None:
    assert Experiment(algorithm={"kind": "qfedavg", "q": 0.0}, local={"optimizer": "adam"}).local.optimizer == "adam"


def test_wrong_local_steps_are_refused_in_their_variant() -> None:
    keys: dict[str, Any] = {
        "base": {"local": {"optimizer": "adam"}},
        "compare": [{"name": "ours"}, {"name": "theirs", "algorithm": {"kind": "scaffold"}}],
    }
    with pytest.raises(InvalidExperiment) as caught:
        Comparison(**keys)
    (line,) = str(caught.value).splitlines()
    assert line.startswith("compare[1] theirs: scaffold needs local.optimizer sgd")


@dataclass(frozen=True, kw_only=True)
class Picky(FedAvg):
    def check_local(self, local: Local) -> None:
        """Steps of 0.1 or less."""
        if local.lr > 0.1:
            raise InvalidExperiment(f"picky needs local.lr of at most 0.1, got {local.lr}: lower it")


def picky() -> Picky:
    return Picky()


@pytest.mark.parametrize("kind", ["Picky", "picky"])
def test_a_users_algorithm_may_refuse_local_steps_too(kind: str) -> None:
    algorithm = {"kind": f"python:{__name__}:{kind}"}
    assert Experiment(algorithm=algorithm).local.lr == 0.1
    assert problem(algorithm=algorithm, local={"lr": 0.2}) == "picky needs local.lr of at most 0.1, got 0.2: lower it"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (f"python:{__name__}:Picky", "steps of 0.1 or less"),
        ("fedavg", "any local training"),
        ("dpsgd", "any local training"),
        ("scaffold", "steps of sgd, with momentum or without"),
        ("mimelite", "steps of sgd without momentum"),
    ],
)
def test_what_an_algorithm_combines_with_is_told(
    kind: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["algorithms", kind]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("combines with")]
    assert line.removeprefix("combines with").strip().startswith(f"{said};")


@pytest.mark.parametrize(("key", "value"), [("joining_s", 20.0), ("staying_s", 60.0)])
@pytest.mark.parametrize("rounds", ["synchronous", "buffered", "bounded_staleness"])
def test_algorithm_that_numbers_clients_refuses_changing_membership(rounds: str, key: str, value: float) -> None:
    line = problem(algorithm="afl", rounds=rounds, devices={"kind": "lognormal", key: value})
    assert line.startswith("algorithm afl needs the same clients from a run's beginning to its end, because it numbers")
    assert f"got devices.{key} {value}: choose an algorithm such as fedavg, or write devices.{key}: " in line
    assert Experiment(algorithm="scaffold", rounds=rounds, devices={key: value}).algorithm.kind == "scaffold"
    assert Experiment(algorithm="afl", rounds=rounds, devices={"availability": "on_off"}).algorithm.kind == "afl"


@pytest.mark.parametrize(
    ("keys", "part", "way_out"),
    [
        ({"uplink": ["topk"], "error_feedback": "ef"}, "error_feedback ef", "set error_feedback to none"),
        ({"uplink": ["dgc"]}, "uplink dgc", "choose another codec"),
    ],
)
def test_errors_of_adapters_that_are_gone_are_refused(keys: dict[str, Any], part: str, way_out: str) -> None:
    assert problem(algorithm="flora", **keys) == (
        f"{part} needs parameters that mean the same from round to round, to which the error of an earlier message is "
        "added, got algorithm flora, whose adapters begin anew in each round: "
        f"{way_out}, or choose fedex_lora, whose adapters go on"
    )
    assert Experiment(algorithm="fedex_lora", **keys).algorithm.kind == "fedex_lora"
    assert Experiment(algorithm="flora", uplink=["topk"]).algorithm.kind == "flora"


# Adversaries and edges.


@dataclass(frozen=True, kw_only=True)
class AllInOnePlace(Centralized):
    """A ceiling of a user's own."""


def in_one_place() -> Centralized:
    return Centralized()


class Untouched(Codec):
    """Keeps all."""

    def size_bytes(self, values: Values) -> int:
        return values.size_bytes

    def encode(self, rows_KM: Tensor, values: Values, state: CodecState, draw: Draw) -> Encoded:
        return Encoded(as_bytes(rows_KM))

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        return from_bytes(torch.stack([*content]), values.dtype)


@pytest.mark.parametrize(
    ("name", "section", "without"),
    [
        ("adversaries", "ipm", "null"),
        ("hierarchy", "edges", "null"),
        ("uplink", f"python:{__name__}:Untouched", "[]"),
        ("downlink", "int8", "[]"),
    ],
)
@pytest.mark.parametrize("kind", ["dpsgd", "local", "centralized", "AllInOnePlace", "in_one_place"])
def test_attacks_edges_and_codecs_need_clients_that_report(kind: str, name: str, section: str, without: str) -> None:
    named = kind if kind in ALGORITHMS.builtin else f"python:{__name__}:{kind}"
    keys: Any = [section] if without == "[]" else {"kind": section}
    if (kind, name) == ("dpsgd", "adversaries"):  # peers forge what they send to each other
        assert Experiment(algorithm=kind, adversaries=keys).adversaries is not None
        return
    line = problem(algorithm={"kind": named}, **{name: keys})
    needs = {"uplink": "messages that codecs encode", "adversaries": "clients that send what they have learned"}
    needed = needs.get(name, "clients that report to a coordinator")
    assert line.startswith(f"{name} {section} needs {needed}, got algorithm {named}, ")
    assert f": set {name} to {without}, or choose a" in line
    assert ("choco" in line) == (name == "uplink" and kind == "dpsgd")


@pytest.mark.parametrize("kind", ["choco", "deepsqueeze"])
def test_rules_that_encode_take_an_uplink_and_nothing_beside_it(kind: str) -> None:
    for uplink in ([], ["topk", "int8"], ["zstd"], ["powersgd"]):
        assert [codec.kind for codec in Experiment(algorithm=kind, uplink=uplink).uplink] == uplink
    assert problem(algorithm=kind, uplink=["dgc"]).startswith(
        f"algorithm {kind} cannot send through uplink dgc, which keeps a residual of its own: choose another codec"
    )
    for keys in ({"downlink": ["topk"]}, {"uplink": ["topk"], "error_feedback": "ef"}):
        (name,) = {*keys} - {"uplink"}
        line = problem(algorithm=kind, **keys)
        assert line.startswith(f"{name} ")
        assert "needs clients that report to a coordinator, got algorithm" in line


@pytest.mark.parametrize("kind", ["adpsgd", "moshpit", "noloco"])
def test_rules_that_choose_partners_refuse_a_topology(kind: str) -> None:
    assert Experiment(algorithm=kind).topology is None
    assert problem(algorithm=kind, topology="ring") == (
        f"topology ring needs neighbours that a topology gives, got algorithm {kind}, whose peers choose their own "
        "partners in each round: set topology to null, or choose an algorithm over mix such as dpsgd"
    )


@pytest.mark.parametrize(("fraction", "clients", "count"), [(0.02, 20, 0), (0.99, 10, 10), (0.5, 1, 0)])
def test_attackers_that_are_nobody_or_everybody_are_refused(fraction: float, clients: int, count: int) -> None:
    line = problem(data={"clients": clients}, adversaries={"kind": "ipm", "fraction": fraction})
    assert f"got {fraction} of {clients} clients, which is {count}: change it" in line


def test_number_of_attackers_stays_open_without_number_of_clients() -> None:
    adversaries = {"kind": "ipm", "fraction": 0.001}
    of_the_source = {"kind": "text", "path": "plays", "clients": None}
    for data in (None, of_the_source):
        assert Experiment(data=data, adversaries=adversaries).adversaries is not None
    assert "of 100 clients" in problem(adversaries=adversaries)


# Hierarchy, rounds and client states.


WITHOUT_COORDINATOR = (*PEER_RULES, "allreduce")


@pytest.mark.parametrize(
    "kind", [kind for kind in ALGORITHMS.builtin if kind not in (*WITHOUT_COORDINATOR, "centralized")]
)
def test_edges_go_with_algorithms_that_need_sums_alone(kind: str) -> None:
    if ALGORITHMS.make(kind).make().linear:
        assert Experiment(algorithm=kind, hierarchy="edges").hierarchy is not None
        return
    line = problem(algorithm=kind, hierarchy="edges")
    assert line.startswith(f"algorithm {kind} needs each client's own message, got hierarchy edges, whose edges ")


@pytest.mark.parametrize("rounds", ["buffered", "asynchronous", "bounded_staleness"])
def test_edges_need_rounds_that_wait_for_a_cohort(rounds: str) -> None:
    line = problem(rounds=rounds, hierarchy="edges")
    assert line.startswith(f"hierarchy edges needs rounds that wait for a cohort, got rounds {rounds}, which ")
    assert line.endswith(": set hierarchy to null, or choose synchronous rounds")


@pytest.mark.parametrize("kind", ["moon", "easgd", "eamsgd", f"python:{__name__}:Remembering"])
def test_client_states_that_cannot_follow_a_discount_refuse_one(kind: str) -> None:
    for staleness in ("polynomial", "hinge"):
        line = problem(algorithm=kind, rounds={"kind": "buffered", "staleness": staleness})
        assert line.startswith(f"algorithm {kind} needs updates that count in full, because what ")
        assert line.endswith(", or write rounds.staleness: constant")
    for undiscounted in ("constant", {"kind": "polynomial", "exponent": 0.0}):
        buffered = {"kind": "buffered", "staleness": undiscounted}
        assert Experiment(algorithm=kind, rounds=buffered).rounds.kind == "buffered"
    for rounds in ("synchronous", "bounded_staleness"):
        assert Experiment(algorithm=kind, rounds=rounds).rounds.kind == rounds


@pytest.mark.parametrize("kind", ["scaffold", "feddyn"])
def test_client_states_that_are_linear_in_updates_take_a_discount(kind: str) -> None:
    assert Experiment(algorithm=kind, rounds="buffered").rounds.kind == "buffered"


BESIDE_UPDATES = {
    **dict.fromkeys(
        ["scaffold", "mimelite", "fednova", "slowmo", "qfedavg", "afl", "easgd", "eamsgd", "sign_majority"],
        "report more",
    ),
    # FedDyn's clients keep a sum of their updates. Asynchronous rounds move the model by something else, the difference
    # from another x, so that h is no mean of the g_i any more.
    "feddyn": "keep a state",
    # MOON's clients keep their last model, which is in no sum; but a mixed part of it is nobody's last model.
    "moon": "keep a state",
    f"python:{__name__}:Remembering": "keep a state",
    f"python:{__name__}:Elsewhere": "steps begin elsewhere",
    f"python:{__name__}:Silent": "report more",
}
"""Algorithms whose equations need more than the mixing of models by which asynchronous rounds replace their mean."""


@pytest.mark.parametrize("kind", [*ALGORITHMS.builtin, *(kind for kind in BESIDE_UPDATES if ":" in kind)])
def test_asynchronous_rounds_take_plain_updates_alone(kind: str) -> None:
    keys: dict[str, Any] = {"algorithm": kind, "rounds": "asynchronous"}
    if kind in WITHOUT_COORDINATOR:
        assert problem(**keys).startswith("rounds asynchronous needs a coordinator that asks clients, got algorithm ")
    elif kind in ("fedex_lora", "flora"):
        with pytest.raises(InvalidExperiment, match=f"^algorithm {kind} needs rounds that wait for a cohort, for it "):
            Experiment(**keys)
    elif kind in BESIDE_UPDATES:
        line = problem(**keys)
        assert line.startswith(
            "rounds asynchronous needs clients that report nothing but their update, and keep no stat"
        )
        assert f"got algorithm {kind}, whose clients" in line
        assert BESIDE_UPDATES[kind] in line
        assert line.endswith(": choose buffered rounds, or choose an algorithm such as fedavg")
    elif kind == "cyclic":
        assert problem(**keys).startswith("rounds.kind must be synchronous with algorithm cyclic")
    else:
        assert Experiment(**keys).algorithm.kind == kind


class Kept(NamedTuple):
    model_P: Tensor


@dataclass(frozen=True, kw_only=True)
class Remembering(FedAvg):
    """Clients that keep something, of which nothing more is known."""

    def init_client(self, params_P: Tensor) -> Kept:
        return Kept(params_P)


@dataclass(frozen=True, kw_only=True)
class Elsewhere(FedAvg):
    def local_start(self, anchor_P: Tensor, client_state: Any, places_K: Tensor | None = None) -> Tensor:
        return anchor_P / 2


@dataclass(frozen=True, kw_only=True)
class Silent(LocalSGD):
    """A report that does not say of itself that it is an update alone."""

    def report(self, work: ClientWork) -> Report:
        return super().report(work)


# Deployments.


@pytest.mark.parametrize("kind", ALGORITHMS.builtin)
def test_a_deployment_takes_every_algorithm_whose_clients_report(kind: str) -> None:
    experiment = Experiment(algorithm=kind)
    if kind not in (*WITHOUT_COORDINATOR, "centralized"):
        check_deployment(experiment)
        return
    with pytest.raises(
        InvalidExperiment, match="a deployment needs clients that report to a coordinator, got algorith"
    ):
        check_deployment(experiment)


@pytest.mark.parametrize("section", [{"adversaries": {"kind": "ipm"}}, {"hierarchy": "edges"}])
def test_what_is_simulated_is_refused_in_a_deployment(section: dict[str, Any]) -> None:
    (name,) = section
    with pytest.raises(
        InvalidExperiment, match=rf"^{name} \w+ needs a simulation, got a deployment: set {name} to null"
    ):
        check_deployment(Experiment(**section))


def test_a_node_refuses_a_plan_that_it_cannot_run() -> None:
    keys = Experiment(algorithm="dpsgd").dump()
    plan = {key: keys[key] for key in ("name", "seed", "model", "local", "algorithm", "evaluation")}
    with pytest.raises(InvalidExperiment, match="got algorithm dpsgd, whose clients exchange models with neighbours"):
        as_experiment(json.dumps(plan), allowed=())


HIDING: dict[str, dict[str, Any]] = {
    "uplink sketch, whose sum alone is read": {"uplink": ["sketch"]},
    "secure_aggregation, which hides them from everybody": {"secure_aggregation": {"max_weight": 500}},
    "error_feedback ef21, whose messages say how an update differs": {"uplink": ["topk"], "error_feedback": "ef21"},
}
"""Sections under which nobody can read a client's update, by what a refusal says of them."""


@dataclass(frozen=True, kw_only=True)
class OfUsers(Attack):
    """An attack that does not say at what it looks."""

    def forge(self, known: Knowledge) -> Tensor:
        return known.own_AP


@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize("kind", [*ADVERSARIES.builtin, f"python:{__name__}:OfUsers"])
def test_attackers_that_look_at_others_need_legible_messages(kind: str, hiding: str) -> None:
    keys: dict[str, Any] = {"adversaries": kind, **HIDING[hiding]}
    if kind in ("sign_flip", "label_flip", "gaussian"):
        assert Experiment(**keys).adversaries is not None
        return
    line = problem(**keys)
    assert line.startswith(f"adversaries {kind} needs messages that attackers can read, because they look at the ")
    assert f"got {hiding}" in line


@pytest.mark.parametrize("algorithm", ["fedavg", "ditto"])
def test_asynchronous_rounds_refuse_sums_that_are_read_at_the_end(algorithm: str) -> None:
    line = problem(algorithm=algorithm, uplink=["sketch"], rounds="asynchronous")
    assert line.startswith("rounds asynchronous needs messages that are decoded one by one, because they mix clients' ")
    assert line.endswith(": choose buffered rounds, or choose another codec")
    assert Experiment(algorithm=algorithm, uplink=["sketch"], rounds="buffered").uplink
