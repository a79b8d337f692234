"""Registry of the built-in kinds that each section of an experiment chooses from."""

import re
from typing import Annotated, Any, Self

from pydantic import Field, ModelWrapValidatorHandler, PositiveInt, model_validator

from fed.config.components import Component, Family
from fed.config.sections import (
    AdversariesSection,
    FoldSection,
    MetricSection,
    ModelSection,
    PartitionSection,
    TopologySection,
    TrackerSection,
)

__all__ = [
    "ADVERSARIES",
    "ALGORITHMS",
    "AVAILABILITIES",
    "CODECS",
    "COLLATES",
    "DATA",
    "DEVICES",
    "ERROR_FEEDBACKS",
    "EVALUATIONS",
    "EXECUTORS",
    "HIERARCHIES",
    "LOSSES",
    "MATRIX_MECHANISMS",
    "METRICS",
    "MODELS",
    "PARALLELS",
    "PARTITIONS",
    "PRIVACIES",
    "ROUNDS",
    "RULES",
    "SAMPLINGS",
    "SCHEDULES",
    "SECURE_AGGREGATIONS",
    "STAGES",
    "STALENESSES",
    "TOPOLOGIES",
    "TRACKERS",
    "DataSection",
]


def _in(module: str, *names: str, **others: str) -> dict[str, str]:
    """Places of the kinds that one module has: each its name as words in small letters, or the one that is given.

    Example:
        >>> _in("aggregators.local_sgd", "LocalSGD", plain="FedAvg")
        {'local_sgd': 'fed.aggregators.local_sgd:LocalSGD', 'plain': 'fed.aggregators.local_sgd:FedAvg'}
    """
    kinds = {re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower(): name for name in names} | others
    return {kind: f"fed.{module}:{name}" for kind, name in kinds.items()}


def _pages(*names: str) -> dict[str, str]:
    """Places of the algorithms whose kind and module are their class's name in small letters."""
    return {name.lower(): f"fed.aggregators.{name.lower()}:{name}" for name in names}


PARTITIONS = Family(
    "partition",
    PartitionSection,
    _in("clients.data.partitions", "iid", "dirichlet", "shards", "similarity", "quantity")
    | _in("clients.data.partitions", range="by_range", hash="by_hash")
    | _in("clients.data.partitions", "rank", "file", "natural"),
    given=("samples", "clients", "generator"),
)


class DataSection(Component):
    """Data source, its test set, and its partition among clients."""

    clients: PositiveInt | None = None
    """Number of clients, 100 unless given; with partition natural or file those with the most samples, null for all."""
    partition: Annotated[PartitionSection, PARTITIONS] | None = None
    """Rule that deals samples to clients; unless given, natural where the source names clients, and iid elsewhere."""
    test_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Share of samples held out to evaluate on, where the source brings no test set of its own; 0 with a fold."""
    fold: FoldSection | None = None
    """Fold of each client's samples to test on, in place of any other test set; null for none."""

    @model_validator(mode="wrap")
    @classmethod
    def _fill_in(cls, keys: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(keys, dict):
            return handler(keys)
        # Nothing is known of a user's own source: it gets no defaults of ours.
        is_users_own = str(keys.get("kind")).startswith("python:")
        defaults = {} if is_users_own else cls._defaults_of_the_source(keys)
        if keys.get("fold") is not None and "test_fraction" not in keys:
            # A fold is a test set of its own.
            defaults["test_fraction"] = 0.0
        section = handler({**keys, **defaults})
        section.model_fields_set.difference_update(defaults)  # an override may choose another source
        return section

    @model_validator(mode="after")
    def _hold_fold(self) -> Self:
        if self.fold is not None and self.test_fraction:
            raise ValueError(
                f"test_fraction must be 0 with a fold, whose samples are the test set, got {self.test_fraction:g}: "
                "remove it"
            )
        if self.fold is not None and self.partition is not None and self.partition.overlap:
            raise ValueError(
                "partition.overlap must be 0 with a fold, for another holder would train on samples that are tested, "
                f"got {self.partition.overlap:g}: remove it"
            )
        return self

    @classmethod
    def _defaults_of_the_source(cls, keys: dict[str, Any]) -> dict[str, Any]:
        defaults: dict[str, Any] = {}
        if not keys.get("partition"):
            names_clients = keys.get("kind") in ("synthetic", "text") or keys.get("client") is not None
            defaults["partition"] = {"kind": "natural" if names_clients else "iid"}
        partition = {**keys, **defaults}["partition"]
        chosen = str(partition.get("kind") if isinstance(partition, dict) else getattr(partition, "kind", partition))
        # These partitions find the clients in the data, where a default of 100 would leave most of them out.
        names_them = chosen in ("natural", "file") or chosen.startswith("python:")
        if keys.get("clients") is None and "clients" not in cls.target.__annotations__ and not names_them:
            defaults["clients"] = 100
        return defaults


DATA = Family(
    "data",
    DataSection,
    {name: f"fed.clients.data.sources.{name}:{name}" for name in ("digits", "idx", "image_folder", "synthetic", "text")}
    | _in("clients.data.sources.archives", "npz")
    | _in("clients.data.sources.tables", "csv", "parquet"),
    given=("streams", "schema"),
    default="digits",
)


COLLATES = Family(
    "collate",
    Component,
    _in("clients.data.collate", "Pad"),
    given=("generator", "training"),
    of_functions=True,
    arguments=1,
)
"""Kinds that make a batch of a list of samples."""


MODELS = Family(
    "model",
    ModelSection,
    _in("clients.models", "logistic", "mlp", "cnn", "char_gru", "char_transformer"),
    given=("input_shape", "classes"),
    default="mlp",
)


LOSSES = Family(
    "loss",
    Component,
    _in("clients.scoring.losses", "cross_entropy", "mse", "huber", "bce", "cox", model="model_loss"),
    default="cross_entropy",
    of_functions=True,
)


METRICS = Family(
    "metric",
    MetricSection,
    _in("clients.scoring.metrics", "accuracy", "balanced_accuracy", "macro_f1", "auroc", "log_loss")
    | _in("clients.scoring.metrics", "mse", "mae", "r2", "c_index", "calibration_error"),
    of_functions=True,
)

_RULES = {
    **_pages("FedAvg", "FedProx", "FedAvgM", "BMUF", "MOON", "SlowMo", "DiLoCo", "Scaffold", "FedNova"),
    **_in("aggregators.easgd", easgd="EASGD", eamsgd="EAMSGD"),
    **_in("aggregators.fedopt", fedadagrad="FedAdagrad", fedadam="FedAdam", fedyogi="FedYogi"),
    **_pages("FedDyn", "MimeLite", "QFedAvg", "AFL", "FedBN", "FedPer", "FedRep", "Ditto"),
    **_in("aggregators.local_sgd", "LocalSGD"),
    **_in("aggregators.post_local_sgd", "PostLocalSGD"),
    **_in("aggregators.ffa_lora", ffa_lora="FFALoRA"),
}

# All-reduce applies these at each peer: they need nothing but the mean of the messages.
RULES = Family("rule", Component, _RULES, default="fedavg")

ALGORITHMS = Family(
    "algorithm",
    Component,
    {
        **_RULES,
        **_pages("Cyclic"),
        **_pages("DPSGD", "D2", "SGP", "MATCHA", "CHOCO", "DeepSqueeze", "ADPSGD", "NoLoCo", "Moshpit"),
        **_in("aggregators.gradient_tracking", "GradientTracking"),
        **_in("aggregators.clipped_gossip", "ClippedGossip"),
        **_in("aggregators.replicated", "allreduce"),
        **_pages("Centralized"),
        **_in("aggregators.local", local="LocalOnly"),
        **_in("aggregators.sign_majority", "SignMajority"),
        **_in("aggregators.fedex_lora", fedex_lora="FedExLoRA"),
        **_in("aggregators.flora", flora="FLoRA"),
        **_in("aggregators.robust.algorithms", median="FedMedian", trimmed_mean="FedTrimmedMean", krum="FedKrum"),
        **_in("aggregators.robust.algorithms", multi_krum="FedMultiKrum", bulyan="FedBulyan"),
        **_in("aggregators.robust.algorithms", geometric_median="FedGeometricMedian"),
        **_in("aggregators.robust.algorithms", centered_clipping="FedCenteredClipping", norm_bound="FedNormBound"),
    },
    default="fedavg",
)


TOPOLOGIES = Family(
    "topology",
    TopologySection,
    _in("topology.graphs", "ring", "path", "torus", "hypercube", "complete", "star", "tree", "exponential")
    | _in("topology.graphs", "erdos_renyi", "random_regular", "small_world", "clusters", "edges")
    | _in("topology.graphs", "directed_ring", "directed_exponential", "random_directed")
    | _in("topology.changing", "one_peer_exponential", "random_matching", "matcha"),
    given=("peers", "number", "streams"),
    default="ring",
)


ADVERSARIES = Family(
    "adversaries",
    AdversariesSection,
    _in("simulations.attacks", "SignFlip", "LabelFlip", "Gaussian", "ALIE", "IPM", "Mimic"),
)

SCHEDULES = Family(
    "schedule",
    Component,
    _in("config.lr_schedules", constant="ConstantSchedule", cosine="Cosine", step="Step"),
    default="constant",
)

STAGES = Family("stage", Component, {})
"""Changes of clients' updates before codecs encode them, and of their mean; none is built in."""

CODECS = Family(
    "codec",
    Component,
    {
        **_in("compression.quantisers", "Int8", "Sign", "Natural", "TwoLevel", float16="Float16", bfloat16="BFloat16"),
        **_in("compression.quantisers", fp4="FP4", qsgd="QSGD", terngrad="TernGrad"),
        **_in("compression.sparsifiers", "Threshold", topk="TopK", randomk="RandomK", stc="STC", dgc="DGC"),
        **_in("compression.eden", "Eden"),
        **_in("compression.powersgd", powersgd="PowerSGD"),
        **_in("compression.sketch", "Sketch"),
        **_in("compression.rotation", "Rotation"),
        **_in("compression.lossless", "Zstd"),
    },
)

ERROR_FEEDBACKS = Family(
    "error feedback",
    Component,
    _in("compression.feedback", none="NoFeedback", ef="EF", ef21="EF21"),
    default="none",
)
"""Kinds that keep the errors of codecs."""

SAMPLINGS = Family(
    "sampling",
    Component,
    _in("server.rounds.sampling", uniform="UniformSampling")
    | _in("server.rounds.sampling", "Weighted", "RoundRobin", "Poisson", "PowerOfChoice"),
    default="uniform",
)

SECURE_AGGREGATIONS = Family(
    "secure aggregation",
    Component,
    _in("secure_aggregation.settings", masks="SecureAggregation"),
    default="masks",
)

PRIVACIES = Family(
    "privacy",
    Component,
    _in("privacy.central", central="CentralPrivacy")
    | _in("privacy.local", local="LocalPrivacy")
    | _in("privacy.distributed", distributed="DistributedPrivacy")
    | _in("privacy.dp_ftrl", dp_ftrl="FollowTheLeaderPrivacy"),
    default="central",
)

MATRIX_MECHANISMS = Family(
    "matrix mechanism",
    Component,
    _in("privacy.mechanisms", banded="BandedNoise", blt="BufferedNoise"),
    default="blt",
)

STALENESSES = Family(
    "staleness",
    Component,
    _in("server.rounds.staleness", constant="ConstantStaleness", polynomial="Polynomial", hinge="Hinge"),
    default="polynomial",
)

ROUNDS = Family(
    "rounds",
    Component,
    _in("server.rounds.synchronous", "Synchronous")
    | _in("server.rounds.asynchronous", "Buffered", "Asynchronous")
    | _in("server.rounds.bounded_staleness", "BoundedStaleness"),
    default="synchronous",
)

EVALUATIONS = Family(
    "evaluation",
    Component,
    _in("config.evaluation", coordinator="ByCoordinator", clients="ByClients", both="ByBoth"),
    default="clients",
)

AVAILABILITIES = Family(
    "availability",
    Component,
    _in("simulations.availability", always="Always", daily="Daily", on_off="OnOff", trace="TraceAvailability"),
    default="always",
)

DEVICES = Family(
    "devices",
    Component,
    _in("simulations.devices", uniform="UniformDevices", lognormal="Lognormal", mobile="Mobile", trace="TraceDevices"),
    default="uniform",
)

EXECUTORS = Family(
    "executor",
    Component,
    {
        **_in("clients.training.executor", in_process="InProcess"),
        **_in("simulations.executors.pool", "Workers"),
        **_in("simulations.executors.on_ray", "Ray"),
    },
    given=("make", "devices", "capacity_bytes", "small_bytes", "awaits", "demand"),
)


PARALLELS = Family(
    "parallel",
    Component,
    _in("config.parallel", ddp="DDP", fsdp="FSDP", tensor="TensorParallel", pipeline="Pipeline"),
    default="ddp",
)
"""Ways in which several devices train one client."""

TRACKERS = Family(
    "tracker",
    TrackerSection,
    _in("tracking.tensor_board", tensorboard="TensorBoard")
    | _in("tracking.ml_flow", mlflow="MLflow")
    | _in("tracking.weights_and_biases", wandb="WandB", trackio="Trackio"),
)

HIERARCHIES = Family("hierarchy", Component, {"edges": "fed.server.hierarchy:Hierarchy"}, default="edges")
