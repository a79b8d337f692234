"""Combinations of an experiment's sections: each declares its terms, and one checker refuses what they rule out.

A section's kind, a user's own too, is :class:`Combinable`: it needs features of the other sections, and lacks features
that others may need. A combination is refused where one part needs what another lacks, in one sentence with the reason,
both values and both ways out.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeAlias

from pydantic import BaseModel

from fed.errors import InvalidExperiment

__all__ = [
    "Combinable",
    "Feature",
    "Sections",
    "Term",
    "check_combination",
    "check_deployment",
    "lacks",
    "without_use_for_apps",
]


class Sections(Protocol):
    """Sections of an experiment, as far as their kinds look at each other; :class:`fed.Experiment` has them."""

    @property
    def app(self) -> Any:
        """Section of clients that train with code of their own, or None."""

    @property
    def data(self) -> Any:
        """Section of the data; None where they are given in Python."""

    @property
    def table(self) -> Any:
        """Schema of the clients' tables, or None."""

    @property
    def model(self) -> Any:
        """Section of the model that is trained; None where a model is given in Python."""

    @property
    def local(self) -> Any:
        """A client's work in a round."""

    @property
    def algorithm(self) -> Any:
        """Section of the algorithm."""

    @property
    def topology(self) -> Any:
        """Section of the topology, or None."""

    @property
    def rounds(self) -> Any:
        """Section of the rounds' policy."""

    @property
    def stages(self) -> Any:
        """Sections of the changes of what clients send, or None."""

    @property
    def uplink(self) -> Any:
        """Sections of the codecs of what clients send."""

    @property
    def error_feedback(self) -> Any:
        """Section of the error feedback."""

    @property
    def downlink(self) -> Any:
        """Sections of the codecs of what goes out."""

    @property
    def secure_aggregation(self) -> Any:
        """Section of secure aggregation, or None."""

    @property
    def privacy(self) -> Any:
        """Section of differential privacy, or None."""

    @property
    def hierarchy(self) -> Any:
        """Section of edge coordinators, or None."""

    @property
    def devices(self) -> Any:
        """Section of simulated devices."""

    @property
    def evaluation(self) -> Any:
        """Section of the evaluation."""

    @property
    def fixed(self) -> Any:
        """Section of the file of what is not trained, or None."""

    @property
    def loss(self) -> Any:
        """Section of the loss; None where one is given in Python."""

    @property
    def metrics(self) -> Any:
        """Sections of the metrics; None where they are given in Python."""

    @property
    def adversaries(self) -> Any:
        """Section of simulated attackers, or None."""

    def objects(self) -> Mapping[str, Any]:
        """Objects given in Python that no file can name, by section."""


class Feature(Enum):
    """A property of an experiment on which some sections rely; the value names it in a sentence."""

    COORDINATOR = "a coordinator that asks clients"
    REPORTS = "clients that report to a coordinator"
    MESSAGES = "clients that send what they have learned"
    ENCODED = "messages that codecs encode"
    NEIGHBOURS = "clients that exchange models with neighbours"
    GIVEN_NEIGHBOURS = "neighbours that a topology gives"
    GLOBAL_MODEL = "a global model that clients use"
    SINGLE_ANSWERS = "each client's own message"
    PLAIN_UPDATES = "clients that report nothing but their update, and keep no state"
    WHOLE_UPDATES = "updates that count in full"
    COHORTS = "rounds that wait for a cohort"
    MEAN_OF_ANSWERS = "a mean over the clients that answered"
    FIXED_MEMBERS = "the same clients from a run's beginning to its end"
    SIMULATION = "a simulation"
    CLIENT_NUMBERS = "each client's loss and number of samples"
    COMMON_ENCODING = "codecs that are linear and the same for all clients"
    DIRECT_MESSAGES = "clients that talk to the coordinator itself"
    FIXED_COHORTS = "rounds that ask their clients once"
    LEGIBLE_MESSAGES = "messages that attackers can read"
    DECODED_MESSAGES = "messages that are decoded one by one"
    OWN_TRAINING = "clients that fed itself trains"
    ANONYMOUS_SUMS = "messages whose sum singles no client out"
    SAME_PARAMETERS = "parameters that mean the same from round to round"


class Term(NamedTuple):
    """A feature that a part of an experiment needs, or lacks.

    Args:
        feature: the feature.
        way_out: imperative clause on how the user can change this part; {section} stands for its key.
        why: the reason, as a clause to follow a comma; empty where the name of the feature says it.
        subject: the key and value that decide, such as ``devices.failure 0.1``; the section and its kind unless given.
    """

    feature: Feature
    way_out: str
    why: str = ""
    subject: str = ""


class Combinable:
    """A section's kind, with the terms on which it combines with others; one that overrides nothing combines freely."""

    def needs(self) -> Sequence[Term]:
        """The features that other sections must not lack."""
        return ()

    def lacks(self) -> Sequence[Term]:
        """The features that it does not offer to other sections."""
        return ()

    def check_experiment(self, experiment: Sections) -> None:
        """Refuse what no feature can express.

        Raises:
            InvalidExperiment: if the part cannot be used in this experiment.
        """


def lacks(part: object, feature: Feature) -> bool:
    """Tell whether a part does not offer a feature."""
    return isinstance(part, Combinable) and any(term.feature is feature for term in part.lacks())


def check_combination(experiment: Sections) -> None:
    """Refuse sections that do not go together.

    Raises:
        InvalidExperiment: one line for each pair of them.
    """
    _refuse(_terms(experiment))
    if experiment.app is not None:
        _check_that_an_app_brings_all(experiment)
    # Only after the features, whose sentences name a way out on both sides.
    for _, part in _parts(experiment):
        part.check_experiment(experiment)


_TOLD_TO_APPS = {"lr", "schedule", "scaling", "base_cohort", "batch_size", "epochs", "steps"}  # keys of local


_BROUGHT_BY_APPS = ("data", "model", "fixed", "loss", "metrics")


def without_use_for_apps(local: type[BaseModel]) -> list[str]:
    """Dotted paths of the keys that change nothing where an app trains.

    Args:
        local: class of the section ``local``.
    """
    untold = [f"local.{name}" for name in local.model_fields if name not in _TOLD_TO_APPS]
    return [*_BROUGHT_BY_APPS, "table", "collate", *untold, "evaluation.fraction", *_OF_TRAINING]


# An app trains as it sees fit.
_OF_TRAINING = ("simulation.batching", "simulation.group", "simulation.device", "simulation.deterministic")


def _check_that_an_app_brings_all(experiment: Sections) -> None:
    """Refuse sections that would say what an app's own code says."""
    for name in _BROUGHT_BY_APPS:
        if getattr(experiment, name):
            raise InvalidExperiment(
                f"{name} belongs to experiments that fed itself trains, and an app brings its own, got both: remove "
                f"{'it, and name metrics in app.metrics' if name == 'metrics' else 'one of them'}"
            )
    for name, field in type(experiment.local).model_fields.items():
        if name not in _TOLD_TO_APPS and getattr(experiment.local, name) != field.default:
            raise InvalidExperiment(
                f"local.{name} changes nothing where an app trains, for no client is told it, got "
                f"{getattr(experiment.local, name)!r}: write it into app.config, which each client is told, or leave "
                "it out"
            )
    fraction = type(experiment.evaluation).model_fields.get("fraction")
    if fraction is not None and experiment.evaluation.fraction != fraction.default:
        raise InvalidExperiment(
            "evaluation.fraction changes nothing where an app trains, for its clients hold out samples themselves, got "
            f"{experiment.evaluation.fraction}: leave it out"
        )
    if experiment.adversaries is not None and not getattr(experiment.adversaries.make(), "forges", True):
        raise InvalidExperiment(
            f"adversaries {experiment.adversaries.kind} changes samples, which an app keeps to itself: choose one that "
            "changes messages, such as sign_flip"
        )


def check_deployment(experiment: Sections) -> None:
    """Refuse experiments that real nodes cannot run.

    Raises:
        InvalidExperiment: one line for each reason.
    """
    needed = Term(Feature.REPORTS, "run it on peers with fed peer, or simulate it")
    lacked = Term(Feature.SIMULATION, "simulate it")
    _refuse({**_terms(experiment), "a deployment": ([needed], [lacked])})
    # The plan travels as a document, in which an object has no name.
    for name, made in experiment.objects().items():
        raise InvalidExperiment(
            f"{name} must be of a class that nodes can import, got {made!r}: define one at the top of a module, with "
            "numbers and texts as its hyper-parameters"
        )
    if experiment.app is not None:
        return
    if experiment.model is None:
        raise InvalidExperiment("model: null needs a model given in Python, which nodes cannot be given: name one")


def _parts(experiment: Sections) -> Iterator[tuple[str, Combinable]]:
    """The sections in force, as ``section kind``; a user's kind that is none declares nothing."""
    names = (
        "secure_aggregation",
        "privacy",
        "algorithm",
        "rounds",
        "error_feedback",
        "hierarchy",
        "devices",
        "evaluation",
        "adversaries",
    )
    sections = [(name, getattr(experiment, name)) for name in names]
    chains = {"stages": experiment.stages or (), "uplink": experiment.uplink, "downlink": experiment.downlink}
    for name, section in [*sections, *((name, part) for name, parts in chains.items() for part in parts)]:
        if section is not None and isinstance(part := section.make(), Combinable):
            yield f"{name} {section.kind}", part


_Terms: TypeAlias = dict[str, tuple[Sequence[Term], Sequence[Term]]]
"""Part of an experiment → the terms that it needs, and those that it lacks."""


def _terms(experiment: Sections) -> _Terms:
    terms: _Terms = {
        name: ([*_of_section(name, part.needs())], [*_of_section(name, part.lacks())])
        for name, part in _parts(experiment)
    }
    if experiment.topology is not None:  # its kinds are functions that make graphs, and declare nothing
        features = Feature.NEIGHBOURS, Feature.GIVEN_NEIGHBOURS
        needed = [Term(feature, "set topology to null") for feature in features]
        terms[f"topology {experiment.topology.kind}"] = (needed, [])
    if experiment.app is not None:
        terms["an app"] = _terms_of_an_app()
    return terms


def _terms_of_an_app() -> tuple[list[Term], list[Term]]:
    why = "whose clients train with code of their own"
    way_out = "set app to null, and name data and a model"
    needed = Term(Feature.REPORTS, way_out, "to give them its model")
    return [needed], [Term(Feature.OWN_TRAINING, way_out, why)]


def _of_section(name: str, terms: Sequence[Term]) -> Iterator[Term]:
    section, _, _ = name.partition(" ")
    for term in terms:
        # Each client decodes what goes out by itself: nothing is added while it is encoded.
        if section == "downlink" and term.feature is Feature.COMMON_ENCODING:
            continue
        feature = term.feature
        if section == "downlink" and feature is Feature.ENCODED:
            feature = Feature.REPORTS  # a coordinator encodes messages to clients, whatever the algorithm
        yield term._replace(feature=feature, way_out=term.way_out.replace("{section}", section))


def _refuse(terms: _Terms) -> None:
    needed = [(term.subject or name, term) for name, (needs, _) in terms.items() for term in needs]
    lacked = [(term.subject or name, term) for name, (_, lacks) in terms.items() for term in lacks]
    # All at once: a user need not mend one combination to hear of the next.
    problems = [
        f"{subject} needs {need.feature.value}{_clause(need)}, got {other}{_clause(lack)}: "
        f"{need.way_out}, or {lack.way_out}"
        for subject, need in needed
        for other, lack in lacked
        if need.feature is lack.feature
    ]
    if problems:
        raise InvalidExperiment("\n".join(problems))


def _clause(term: Term) -> str:
    return f", {term.why}" if term.why else ""
