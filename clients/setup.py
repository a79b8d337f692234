"""Preparation of a run: experiment, data and model, checked against each other before the first round.

Shapes: see :mod:`fed.vectors.layout`.
"""

import copy
import secrets
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fed.aggregators.base import Aggregator, Phase
from fed.aggregators.client_side import first_client_state, format_of
from fed.aggregators.peer_rule import PeerRule
from fed.clients.apps.app import App
from fed.clients.apps.app_trainer import AppTrainers, metrics_of, unmeasured
from fed.clients.apps.arrays import AppModel, specs_of
from fed.clients.casting import fitted, what_was_cast, with_labels
from fed.clients.checks import (
    check_batch_norm,
    check_labels,
    check_model,
    check_state,
    check_targets,
    check_trained_part,
    made_by,
    module_of,
    own_copy,
)
from fed.clients.data import ClientId, FederatedData, Held, held_out
from fed.clients.data.collate import Collating
from fed.clients.data.on_demand import ByClient
from fed.clients.data.samples import pattern_of
from fed.clients.first_exchange import SoughtMeans, negative_output
from fed.clients.scoring.losses import cross_entropy, outputs_for
from fed.clients.scoring.measures import Loss, Metric, Metrics, loss_in_force, metrics_in_force
from fed.clients.training.client_states import ClientStates
from fed.clients.training.local_context import LocalContext
from fed.clients.training.local_trainer import MakeTrainer
from fed.clients.training.parallel.parallel_trainer import ParallelTrainers, kind_of
from fed.clients.training.parallel.refusals import check_parallel
from fed.clients.training.private_costs import sample_privacy_of
from fed.clients.training.private_refusals import check_private
from fed.clients.training.work_items import Recipe
from fed.clients.way_out import UpdateStages, WayOut
from fed.compression.codec import Codec
from fed.compression.feedback import Encoder, ErrorFeedback, ScaleAlone
from fed.compression.lossless import Zstd
from fed.compression.stage import Stage, check_stage
from fed.config.evaluation import ByBoth, ByClients, ByCoordinator
from fed.config.experiment import Experiment, Local
from fed.errors import InvalidExperiment, InvalidModel, users_errors_as
from fed.privacy.adaptive_clip import AdaptiveClip
from fed.privacy.dp_sgd import SamplePrivacy
from fed.privacy.kinds import privacy_of
from fed.privacy.noise import NoiseSource, SeededNoise
from fed.privacy.noisy_sum import NoisySum
from fed.privacy.protection import Protection
from fed.secure_aggregation.settings import settings_of
from fed.storage.model_files import ModelInputs, read_fixed_part
from fed.vectors import trees
from fed.vectors.fixed_part import fixed_state, packed
from fed.vectors.layout import Layout
from fed.vectors.randomness import Streams, seeded_torch
from fed.vectors.tensors import Tensor, nn, torch
from fed.wire.format import Format
from fed.wire.lanes import secured

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fed.privacy.ledger import Ledger

__all__ = ["Preparation"]


class Preparation:
    """Parts of a run, made before the first round: the first model, the phases of local training, the samples.

    Attributes:
        streams: random streams of the run.
        data: data to train on, without the clients' held-out samples, and held to the model's classes.
        held_out: client → samples on which it scores models, its own test set or a held-out share; None where the
            coordinator alone evaluates.
        loss: loss that is minimised.
        metrics: metrics of evaluation, by name.
        collate: function that makes batches of samples; None: they are stacked.
        inputs: arguments of the experiment's model; None where another model was given.
        module: the first model.
        casting: sentence on the types to which samples were cast, for the log; empty where none were.
        algorithm: algorithm of the experiment.
        phases: phases of local training, one after another.
        layout: layout of the model, private parts last.
        stages: the changes of clients' updates before they are encoded, and of their mean.
        codecs: the chain that encodes clients' updates.
        downlink_codecs: the chain that encodes the coordinator's models.
        error_feedback: keeper of the errors of ``codecs``.
        secure_aggregation: settings of the experiment, or None.
        privacy: differential privacy of the experiment, or None.
        noise: source of its noise.
        ledger: ledger of what is released; None: it is kept in memory.
        cohort_streams: random streams of the draws of cohorts, which nobody can follow where privacy rests on them.
        recipe: everything that a process needs to train these clients one by one, except their way out.

    Args:
        experiment: description of the run.
        data: samples by client, of all clients or of those that this process knows.
        model: a factory of modules, or a module to copy, in place of the experiment's.
        loss: (output, target) → scalar, in place of the experiment's.
        metric: (output, target) → number, to be called accuracy, or several by name, in place of the experiment's.
            With a ``loss`` alone, metrics are those that the experiment names itself.
        app: code of the clients' own, in the place of model, loss and metrics; None: fed trains.
        noise: source of the noise of privacy; None: the seed, as in simulations.

    Raises:
        InvalidInput: if the parts do not fit each other.
    """

    def __init__(
        self,
        experiment: Experiment,
        data: FederatedData,
        model: "Callable[[], nn.Module] | nn.Module | None" = None,
        loss: Loss | None = None,
        metric: Metric | Metrics | None = None,
        app: App | None = None,
        noise: NoiseSource | None = None,
    ) -> None:
        if experiment.table is not None and experiment.table.sought:
            # Before the first round clients find what their tables are standardized by.
            model = partial(SoughtMeans, len(experiment.table.sought))
            loss = negative_output
            metric = {}
        self.streams = Streams(experiment.seed)
        self.algorithm = made_by(experiment.algorithm, "algorithm", Aggregator, PeerRule)
        self.data = data
        self.app = app
        self.casting = ""
        self.loss: Loss = loss_in_force(experiment, loss if app is None else unmeasured)
        self.metrics = metrics_in_force(experiment, loss, metric) if app is None else metrics_of(app.section)
        self.collate = _collate_in_force(experiment, data)
        self.inputs: ModelInputs | None = None
        self.module = self._first_module(experiment, model) if app is None else self._module_of(app)
        self.held_out: Mapping[ClientId, Held] | None = None
        evaluation = made_by(experiment.evaluation, "evaluation", ByClients, ByCoordinator)
        if isinstance(evaluation, ByClients) and app is not None:
            self.held_out = ByClient(self.data.clients, self.data.read)  # each scores on samples of its own
        elif isinstance(evaluation, ByClients):
            self.data, self.held_out = held_out.for_each(self.data, evaluation.fraction, experiment.data_streams)
        is_tested = isinstance(evaluation, ByCoordinator | ByBoth)
        self.data = self.data.with_test_set() if is_tested else self.data
        # Only now: holding samples out may have left a client with a single one.
        check_batch_norm(self.module, self.data, experiment.local.batch_size)
        self.phases, self.layout = self._local_training()
        if isinstance(self.algorithm, Aggregator):
            self.algorithm = self.algorithm.for_model(self.module, self.layout.shared)
        self.stages = self._stages(experiment)
        self.codecs = tuple(made_by(section, "uplink", Codec, Zstd) for section in experiment.uplink)
        self.downlink_codecs = tuple(made_by(section, "downlink", Codec, Zstd) for section in experiment.downlink)
        self.error_feedback = made_by(experiment.error_feedback, "error_feedback", ErrorFeedback)
        self.secure_aggregation = settings_of(experiment)
        self.privacy = privacy_of(experiment)
        self.noise = self._noise(experiment, noise)
        self.ledger: Ledger | None = None  # given to a coordinator's preparation, once its folder is known
        # A plan tells nodes the seed, from which they could tell who is in which cohort.
        is_secret = self.privacy is not None and noise is not None
        self.cohort_streams = Streams(secrets.randbits(256)) if is_secret else self.streams
        of_samples = sample_privacy_of(experiment, self.phases)
        self._check_privacy(experiment.local, of_samples)
        self.recipe = Recipe(
            module=self.module,
            loss=self.loss,
            metrics=self.metrics,
            local=experiment.local,
            aggregator=self.algorithm if isinstance(self.algorithm, Aggregator) else None,
            phases=self.phases,
            private=self.layout.private,
            moved=self.layout.moved,
            read=self.data.read,
            test=self.data.test if is_tested else None,
            streams=self.streams,
            held_out=None if self.held_out is None else self.held_out.__getitem__,
            collate=self.collate,
            make_trainer=self._trainers_of(app, experiment.local),
            sample_privacy=of_samples,
            private_source=None if of_samples is None else self.noise,
            is_deterministic=experiment.simulation.deterministic and app is None,  # an app's settings are its own
        )

    def _noise(self, experiment: Experiment, given: NoiseSource | None) -> NoiseSource | None:
        """Source of the noise of privacy: the one that is given, or the seed where there is privacy."""
        if given is not None or self.privacy is None:
            return given
        return SeededNoise.of(self.streams, experiment.dump())

    def _check_privacy(self, local: Local, of_samples: SamplePrivacy | None) -> None:
        """Refuse a model, a loss or an algorithm that tells something which privacy does not cover.

        Args:
            local: the experiment's section of that name.
            of_samples: clip and noise of each local step; None where whole messages are protected.
        """
        if self.privacy is None:
            return
        shared = self.layout.shared
        self.privacy.check_layout(
            dtype=shared.dtype,
            float_buffers=shared.returned_size - shared.parameters,
            integer_buffers=shared.integer_count,
        )
        if of_samples is None:
            return
        assert isinstance(self.algorithm, Aggregator)
        check_private(
            module=self.module,
            loss=self.loss,
            local=local,
            algorithm=self.algorithm,
            phases=self.phases,
            is_collated=self.collate is not None,
        )

    def fixed_part(self) -> list[Tensor]:
        """The model's fixed part as it travels, a row for each type; empty where all of the model is trained."""
        return packed(fixed_state(self.module))

    def message_format(self, population: int, clients: int = 1, most: int | None = None) -> Format:
        """The format of the run's messages, where clients report to a coordinator.

        Args:
            population: the number of clients.
            clients: the number of clients that report in a round.
            most: the largest number of clients that a round asks; ``clients`` unless given.

        Raises:
            InvalidExperiment: if a codec breaks its contract, or messages cannot be added under secure aggregation.
        """
        shared = self.layout.shared
        secure = self.secure_aggregation
        private = self.privacy
        changes = bool(self.update_stages()) or self._protection() is not None
        # A changed update travels as it is: as a trained model it would be rounded once more.
        is_encoded = bool(self.codecs or secure or changes)
        message = format_of(self.algorithm, shared, population, is_encoded=is_encoded, clients=clients)
        layers = tuple(part.shape for part in shared.trained)
        message = replace(
            message,
            codecs=self.codecs,
            layers=layers,
            error_feedback=self.error_feedback,
            downlink_codecs=self.downlink_codecs,
        )
        if private is not None:
            message = replace(
                message,
                weighs_samples=False,
                weighs_alike=True,
                hides_numbers=True,
                clip=private.accepted_clip,
                has_bits=private.has_bits,
            )
        message.check_codecs()
        if secure is None:
            return message
        noise = None if private is None else private.lane_noise(secure.least_honest())
        return secured(message, secure, most or clients, noise)

    def update_stages(self, own_streams: Streams | None = None) -> UpdateStages:
        """The stages that change updates; the others cost nothing at clients.

        Args:
            own_streams: the streams of clients' own draws, where nobody else may follow them; None: the run's.
        """
        changing = tuple(stage for stage in self.stages if stage.changes_updates)
        return UpdateStages(changing, self.streams, own_streams)

    def way_out(self, message: Format, own_streams: Streams | None = None) -> WayOut:
        """The way out of clients that report to a coordinator.

        Args:
            message: the format of their messages.
            own_streams: the streams of clients' own draws, where nobody else may follow them; None: the run's.
        """
        stages = self.update_stages(own_streams)
        return WayOut(
            self.algorithm,
            self.layout.shared,
            message=message,
            stages=stages,
            protection=self._protection(),
            lane_noise_source=None if message.fixed is None or message.fixed.noise is None else self.noise,
        )

    def _protection(self) -> Protection | None:
        """Protection of a client's message by differential privacy; None where it has none."""
        if self.privacy is None or self.noise is None:
            return None
        return self.privacy.protection(self.noise)

    def adaptive_clip(self) -> AdaptiveClip | None:
        """The clip that moves from round to round; None where none does."""
        return None if self.privacy is None else self.privacy.adaptive_clip()

    def noisy_sum(self, rounds: int) -> NoisySum | None:
        """The noise that a trusted coordinator adds to sums; None where it adds none.

        Args:
            rounds: number of rounds of the run.
        """
        if self.privacy is None or self.noise is None:
            return None
        return self.privacy.noisy_sum(self.noise, rounds)

    def peer_encoder(self) -> Encoder:
        """The chain that encodes peers' vectors, of the model's length; without codecs it leaves them as they are.

        Raises:
            InvalidExperiment: if a codec breaks its contract.
        """
        numbers = self.layout.parameters
        # The rule of the peers keeps the errors itself; it needs a contraction to do so.
        kept = ScaleAlone()
        message = Format(
            self.layout.dtype,
            (numbers,),
            parameters=numbers,
            codecs=self.codecs,
            layers=tuple(part.shape for part in self.layout.trained),
            error_feedback=kept,
        )
        message.check_codecs()
        return Encoder(message.chain(self.codecs), kept)

    def first_context(self) -> LocalContext:
        """Context of a client's first task beside the model, and the algorithm's first client state."""
        if not isinstance(self.algorithm, Aggregator):
            return LocalContext()
        shared = self.layout.shared
        vector_V, _ = shared.pack(self.module)
        state = self.algorithm.init(vector_V[: shared.parameters].double())
        broadcast = tuple(part.to(shared.dtype) for part in self.algorithm.broadcast(state))
        return LocalContext(first_client_state(self.algorithm, shared, vector_V), broadcast)

    def client_states(self, message: Format | None = None) -> ClientStates:
        """Client states before the first round.

        Args:
            message: the format of clients' messages, where they report to a coordinator.
        """
        codec = message.codec_state() if message else {}
        keeps_models = any(phase.is_personal for phase in self.phases)
        state = self.first_context().client_state
        first = self.layout.pack(self.module)
        return ClientStates(
            clients=self.data.clients,
            layout=self.layout,
            first=first,
            state=state,
            keeps_models=keeps_models,
            codec=codec,
        )

    def _first_module(self, experiment: Experiment, model: "Callable[[], nn.Module] | nn.Module | None") -> "nn.Module":
        """Module initialised from its own stream, and checked against the data."""
        # Before the model is made: targets decide how many outputs it has.
        check_targets(self.data, self.loss)
        before = pattern_of(self.data.read(self.data.clients[0]))
        # Now, since a built-in model is made for the number of classes.
        self.data = with_labels(self.data) if self.loss is cross_entropy else self.data
        # On the CPU, so that the first model has the same bits whatever device trains it.
        with seeded_torch(self.streams.torch_seed("model"), torch.device("cpu")):
            made = self._built_in(experiment) if model is None else module_of(model)
            module = own_copy(made)
            if experiment.fixed is not None:
                read_fixed_part(Path(experiment.fixed.path).expanduser(), module)
            self._fix(module)  # only now: the file need not hold what the algorithm fixes
            tried = copy.deepcopy(module)  # forward passes may leave tensors in it that cannot be copied
            self.data = fitted(self.data, tried, self.loss, self.collate)
            self.casting = what_was_cast(before, pattern_of(self.data.read(self.data.clients[0])))
            classes = check_model(tried, self.data, self.loss, self.metrics, self.collate)
        check_trained_part(module, tried)
        if self.loss is cross_entropy:
            self.data = check_labels(self.data, classes)
        check_state(module, experiment.local.precision)
        return module

    def _fix(self, module: "nn.Module") -> None:
        """Leave out of what is trained the parameters that the algorithm keeps as they are."""
        if isinstance(self.algorithm, Aggregator):
            fixed = self.algorithm.fixes(module)
            for name, part in module.named_parameters():
                part.requires_grad_(part.requires_grad and name not in fixed)

    def _built_in(self, experiment: Experiment) -> "nn.Module":
        section = experiment.model
        if section is None:
            raise InvalidExperiment("model: null needs a model given in Python: fed.simulate(…, model=…)")
        inputs, targets = pattern_of(self.data.read(self.data.clients[0]))
        if not isinstance(inputs, Tensor) and not section.kind.startswith("python:"):
            if isinstance(inputs, trees.Ragged):
                raise InvalidExperiment(
                    f"the model {section.kind} takes inputs of one tensor, got a list with a row for each sample: "
                    "where all rows have one length, give an array, as numpy.array(rows); where they have not, give a "
                    "model of your own and a collate"
                )
            raise InvalidExperiment(
                f"the model {section.kind} takes inputs of one tensor, got {trees.outline(inputs)}: name a model of "
                "your own, as python:module:Name, or give one in Python, as fed.simulate(…, model=…)"
            )
        outputs = outputs_for(self.loss, targets, self.data.number_of_classes)
        # Kept for Run.load, which builds the model again without the data.
        shape = trees.mapped(_shape_of_sample, inputs)
        dtype = str(trees.leaves(inputs)[0].dtype).removeprefix("torch.")
        if self.data.is_from_arrays and dtype == "float64":
            dtype = "float32"  # float64 is merely what arrays and frames have
        self.inputs = ModelInputs(shape, outputs, dtype)
        with users_errors_as(InvalidModel, f"the model's factory {section.kind}"):
            return self.inputs.make(section)

    def _module_of(self, app: App) -> AppModel:
        """Model of an app's arrays: its first ones, or zeros where a server has told their names and shapes."""
        if app.section.arrays is not None:
            return AppModel(app.section.arrays)
        with app.seeded(self.streams.torch_seed("model")):
            arrays = app.first_arrays(self.data.clients[0])
        module = AppModel(specs_of(arrays), arrays)
        check_state(module, "float32")
        return module

    def _trainers_of(self, app: App | None, local: Local) -> MakeTrainer | None:
        if app is None:
            return self._parallel_trainers(local) if local.devices > 1 else None
        if local.devices > 1:
            raise InvalidExperiment(
                f"local.devices must be 1 where an app trains, which has devices of its own, got {local.devices}: "
                "remove it"
            )
        assert isinstance(self.module, AppModel)
        told = {name: getattr(self.algorithm, name) for name in self.algorithm.told_to_apps}
        return AppTrainers(app, self.module.specs, local, told)

    def _parallel_trainers(self, local: Local) -> ParallelTrainers:
        """Trainers of several devices, where these can train the model as one does."""
        check_parallel(kind_of(local), local.devices, self.module, self.loss, self.phases)
        return ParallelTrainers(
            module=self.module,
            local=local,
            private=self.layout.private,
            moved=self.layout.moved,
            collate=self.collate,
        )

    def _stages(self, experiment: Experiment) -> tuple[Stage, ...]:
        stages = tuple(made_by(section, "stages", Stage) for section in experiment.stages or ())
        for stage in stages:
            check_stage(stage, self.layout.shared.size)
        return stages

    def _local_training(self) -> tuple[tuple[Phase, ...], Layout]:
        """Phases of a client's training, and the layout with the parts that it does not share."""
        algorithm: Any = self.algorithm
        if not isinstance(algorithm, Aggregator):
            return (Phase(rule=algorithm.local_rule),), Layout.of(self.module)
        phases = algorithm.phases()
        layout = Layout.of(self.module, algorithm.private(self.module), algorithm.moves(self.module))
        has_own = any(phase.is_personal for phase in phases)
        if all(phase.is_personal for phase in phases) or (has_own and layout.private):
            raise InvalidExperiment(
                f"{type(algorithm).__name__}'s clients must train a model that they report, and keep either "
                f"private parts of it or a whole model of their own, got {phases}: see fed.aggregators.ditto"
            )
        return phases, layout


def _shape_of_sample(leaf: trees.Leaf) -> list[int | None]:
    """Shape of one sample; None for a number of rows that differs from sample to sample."""
    return [None, *leaf.values_T.shape[1:]] if isinstance(leaf, trees.Ragged) else list(leaf.shape[1:])


def _collate_in_force(experiment: Experiment, data: FederatedData) -> Collating | None:
    """The collate of a run, from the experiment or from data given in Python.

    Raises:
        InvalidExperiment: if both bring one, or it cannot be called.
    """
    if experiment.collate is None:
        function = data.collate
    elif data.collate is not None:
        raise InvalidExperiment(
            f"collate must be given once, got {experiment.collate.kind} in the experiment and another one with the "
            "data: remove one of them"
        )
    else:
        function = experiment.collate.make()
    if function is None:
        return None
    if not callable(function):
        raise InvalidExperiment(f"collate must be a function of a list of samples, got {type(function).__name__}")
    return Collating(function)
