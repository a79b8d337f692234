"""The way out of a client: one pipeline, from its trained model to the message that leaves it.

    report → attack → stages → clip and noise → residual, and encode or quantise → mask

Each step takes rows of K clients and gives rows; the last gives messages. A row does not depend on the others, so that
a client's message has the same bits in a group, alone, on a node and at a peer.

- *report*: the algorithm makes messages of the trained models (:meth:`WayOut.report`).
- *attack*: in a simulation attackers look at the others' messages and replace their own
  (:mod:`fed.simulations.attacks`). Their fleet asks workers for reports, and goes on with :meth:`WayOut.leave`.
- *stages*: the experiment's ``stages``, such as clipping and noise, change messages (:class:`UpdateStages`). At peers
  of a rule over ``mix`` they change the sum of the local steps; no other step of this page acts there.
- *clip and noise*: under differential privacy the whole message is clipped, and the client may add noise
  (:class:`fed.privacy.protection.Protection`). Then it tells neither its loss nor its number of samples, and weighs as
  much as any other.
- *residual, and encode or quantise*: codecs with their error feedback, or lanes of a fixed point
  (:class:`fed.wire.format.Format`).
- *mask*: lanes never leave a client unmasked. Masks need the session's other clients, so a conversation adds them
  (:class:`fed.clients.node.sessions.SecureNode`, and :mod:`fed.simulations.secure`).

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from fed.aggregators.base import Aggregator
from fed.aggregators.client_side import reported
from fed.clients.data import ClientId
from fed.clients.training.group_trainer import completed, rows_not_finite
from fed.clients.training.work_items import Trained, TrainedClients
from fed.compression.codec import CodecState, Draw
from fed.compression.stage import Stage
from fed.privacy.noise import NoiseSource
from fed.privacy.protection import Protection
from fed.secure_aggregation.fixed_point import ClientNumbers
from fed.vectors.layout import Layout
from fed.vectors.randomness import Streams
from fed.vectors.tensors import Tensor, torch
from fed.wire.format import Format, Outgoing
from fed.wire.lanes import hide

__all__ = ["Rows", "UpdateStages", "WayOut"]


class Rows(NamedTuple):
    """Messages of K clients before they are encoded.

    Args:
        update_KM: the messages, in float64.
        numbers: each client's weight, number of samples and training loss.
        params_KV: the trained models of which the messages are the plain updates; None where they are anything else.
        start: the model that came with the task, [V], or each client's own, [K, V]; None where no model is sent.
    """

    update_KM: Tensor
    numbers: ClientNumbers
    params_KV: Tensor | None = None
    start: Tensor | None = None


@dataclass(frozen=True)
class UpdateStages:
    """Stages that change updates, one after another.

    Args:
        stages: first to last.
        streams: the run's random streams.
        own_streams: the streams of clients' own draws, where nobody else may follow them; None: the run's.
    """

    stages: tuple[Stage, ...]
    streams: Streams
    own_streams: Streams | None = None

    def __bool__(self) -> bool:
        """True if there is a stage."""
        return bool(self.stages)

    def __call__(
        self, update_KM: Tensor, rounds: Sequence[int], clients: Sequence[ClientId], repeats: Sequence[int] = ()
    ) -> Tensor:
        """Updates as the last stage leaves them.

        Args:
            update_KM: updates, in float64.
            rounds: the round of each row, from 1.
            clients: the client of each row.
            repeats: number of earlier tasks of each row's client in that round; empty: none had one.
        """
        for place, stage in enumerate(self.stages):
            purpose = f"stage {place}"  # each stage draws from streams of its own
            draw = Draw(self.streams, rounds, clients, purpose=purpose, own_streams=self.own_streams, repeats=repeats)
            update_KM = stage.change_updates(update_KM, draw)
        return update_KM


@dataclass(frozen=True)
class WayOut:
    """The way out of clients that report to a coordinator, composed once when a run is prepared.

    Steps that an experiment does not ask for cost nothing, and two steps are fused where that saves time: the report
    of an algorithm whose clients report their updates as they are, and the mean of a group whose clients send models.

    Args:
        aggregator: the algorithm, which clients report to.
        layout: the layout of what leaves a client.
        message: the format of clients' messages.
        stages: the changes of messages before they are encoded.
        protection: the clip and the noise of messages under differential privacy; None without.
        lane_noise_source: source of the noise that clients add to their lanes; None where they add none.
        is_fused: True if plain reports, which are the updates, are made without a call of the algorithm; the bits are
            the same.
    """

    aggregator: Aggregator
    layout: Layout
    message: Format
    stages: UpdateStages
    protection: Protection | None = None
    lane_noise_source: NoiseSource | None = None
    is_fused: bool = True

    def __call__(self, trained: TrainedClients) -> tuple[Trained, Sequence[Tensor]]:
        """Make the answer that a task wants of its trained clients: all steps, one after another."""
        count = len(trained.samples)
        if self.message.hides_numbers:
            trained = trained._replace(samples=(1,) * count, train_losses=(0.0,) * count, metrics=())
        is_mean_of_models = self._models_leave and trained.task.wants == "mean" and trained.begin.ndim == 1
        if is_mean_of_models and self._reports_updates:
            return completed(trained, self._mean_of_models(trained, _by_samples(trained)))
        if self._is_clipped_alone and trained.task.wants == "mean" and trained.begin.ndim == 1 and count > 1:
            return completed(trained, self._mean_of_clipped(trained), _by_samples(trained))
        if self._models_leave and self._reports_updates and trained.task.wants == "payload":
            return completed(trained, (trained.params_KV[:1], trained.integers_KI))  # the coordinator finds the update
        rows, client_state = self.report(trained)
        trained = trained._replace(client_state=client_state)
        weights = tuple(rows.numbers.weights)
        is_update = rows.params_KV is not None
        if is_mean_of_models and is_update:
            return completed(trained, self._mean_of_models(trained, weights), weights)
        if not is_update and (overflown := self._overflown(rows.update_KM, "what it reports")):
            return completed(trained, (), weights, overflown=overflown)
        if trained.task.wants == "reported":
            return completed(trained, (rows.update_KM, trained.integers_KI), weights)
        task = trained.task
        outgoing = self.leave(
            rows, trained.kept, task.rounds, clients=task.clients, repeats=task.repeats, clip=task.clip
        )
        return completed(
            trained,
            self._wanted(trained, outgoing, weights),
            weights,
            sizes=outgoing.sizes,
            counted=outgoing.counted,
            lost=outgoing.lost,
            overflown=outgoing.overflown,
        )

    @property
    def averages_models(self) -> bool:
        """True if the mean of a group that started from one model is that of its models, weighted by samples."""
        return self._models_leave and self._reports_updates and not self.message.hides_numbers

    def report(self, trained: TrainedClients) -> tuple[Rows, Any]:
        """Messages as the algorithm reports them, and its new state of the clients."""
        numbers = ClientNumbers(_by_samples(trained), trained.samples, trained.train_losses)
        if self._reports_updates:
            # A copy in any case: a model in float64 is itself sent later, and must not be overwritten.
            returned = self.layout.returned_size
            update_KV = trained.params_KV[:, :returned].to(torch.float64, copy=True).sub_(trained.begin[..., :returned])
            rows = Rows(update_KV, numbers, params_KV=trained.params_KV, start=trained.start)
            return rows, trained.client_state
        update_KM, weights_K, client_state, is_update = reported(
            self.aggregator,
            self.layout,
            trained.start,
            trained.begin,
            trained.params_KV,
            client_state=trained.client_state,
            **trained.facts(),
        )
        if not self.message.hides_numbers:
            numbers = numbers._replace(weights=tuple(weights_K.tolist()))
        params_KV = trained.params_KV if is_update else None
        return Rows(update_KM, numbers, params_KV=params_KV, start=trained.start), client_state

    def leave(
        self,
        rows: Rows,
        kept: CodecState,
        rounds: Sequence[int],
        clients: Sequence[ClientId],
        repeats: Sequence[int] = (),
        clip: float | None = None,
    ) -> Outgoing:
        """Stages, then the residual and the encoding: messages as they leave clients, and as they are received.

        Args:
            rows: reports of the clients, or of attackers in their place.
            kept: states of the clients' codecs, [K, ·] each.
            rounds: the round of each row, from 1.
            clients: the client of each row.
            repeats: number of earlier tasks of each row's client in that round; empty: none had one.
            clip: clip of the round, in units of which messages are sent, where it moves; None: the experiment's.
        """
        if self.stages:
            update_KM = self.stages(rows.update_KM, rounds, clients=clients, repeats=repeats)
            rows = rows._replace(update_KM=update_KM, params_KV=None)
            if overflown := self._overflown(rows.update_KM, "what stages make of its update"):
                return Outgoing([], rows.update_KM, overflown=overflown)
        if self.protection is not None:
            update_KM = self.protection(rows.update_KM, rounds, clients=clients, repeats=repeats, clip=clip)
            rows = rows._replace(update_KM=update_KM, params_KV=None)
        draw = Draw(self.stages.streams, rounds, clients, own_streams=self.stages.own_streams)
        if self.message.fixed is not None:
            draw = draw._replace(repeats=repeats)
            return hide(self.message, rows.update_KM, kept, draw, rows.numbers, source=self.lane_noise_source)
        if self.message.sends_models:
            return self._as_models(rows)
        outgoing = self.message.encode(rows.update_KM, kept, draw)
        if not self.message.encoder:
            return outgoing
        what = "what the codecs of uplink make of its update"
        return outgoing._replace(overflown=self._overflown(outgoing.update_KM, what))

    @cached_property
    def _reports_updates(self) -> bool:
        """True if clients report their updates, weighted by samples: fused, it takes a tenth of the time."""
        return self.is_fused and self.aggregator.plain_report

    @cached_property
    def _models_leave(self) -> bool:
        """True if trained models leave clients as they are, unless the algorithm has changed the update.

        The mean of a group's updates is then found from its models, which takes half the time. It is the mean of the
        models less the one that was sent: the mean of the updates, but for the rounding of sums.
        """
        changes = bool(self.stages) or self.protection is not None
        return self.message.sends_models and self.message.fixed is None and not changes

    @cached_property
    def _is_clipped_alone(self) -> bool:
        """True if a clip is all that happens to updates before their mean, whose rows then need not be made.

        A message that travels by itself is rounded to the type on the wire; here nothing travels but the mean.
        """
        is_plain = self._reports_updates and not self.stages and not self.message.codecs and self.message.fixed is None
        return is_plain and self.protection is not None and not self.protection.adds_noise

    def _mean_of_clipped(self, trained: TrainedClients) -> tuple[Tensor, Tensor]:
        assert self.protection is not None
        returned = self.layout.returned_size
        params_KV = trained.params_KV[:, :returned]
        # Models that were widened for their mean are nobody's.
        is_own = trained.params_KV.dtype != self.layout.dtype
        update_KV = (params_KV if is_own else params_KV.to(torch.float64, copy=True)).sub_(trained.begin[:returned])
        return self.protection.mean(update_KV, trained.task.clip), _largest(trained)

    def _mean_of_models(self, trained: TrainedClients, weights: Sequence[float]) -> tuple[Tensor, Tensor]:
        mean_V = trained.params_KV[0] if trained.is_mean else _mean(trained.params_KV.double(), weights)
        update_V = mean_V - trained.begin
        return update_V, _largest(trained)

    def _as_models(self, rows: Rows) -> Outgoing:
        """Trained models as messages; the coordinator finds the updates."""
        update_KM = rows.update_KM
        params_KV = rows.params_KV
        if params_KV is None:  # the algorithm has changed this update
            assert rows.start is not None
            params_KV = (rows.start.double() + update_KM).to(self.message.dtype)
            # The update as the coordinator finds it, from a model in the type on the wire.
            update_KM = params_KV.double() - rows.start
        return Outgoing([(params_V,) for params_V in params_KV], update_KM)

    def _wanted(self, trained: TrainedClients, outgoing: Outgoing, weights: Sequence[float]) -> tuple[Tensor, ...]:
        """Tensors that a task wants of messages; none where one of them cannot be sent."""
        if outgoing.overflown:
            return ()
        if trained.task.wants == "payload":
            return (*(tensor[None] for tensor in outgoing.payloads[0]), trained.integers_KI)
        is_mean = trained.task.wants == "mean"
        if outgoing.lanes_KL is not None:
            lanes_KL = outgoing.lanes_KL
            if is_mean:  # integers modulo 2^R: their sum must wrap
                return lanes_KL.sum(0, dtype=lanes_KL.dtype), _largest(trained)
            return lanes_KL, trained.integers_KI
        if is_mean:
            return _mean(outgoing.update_KM, weights), _largest(trained)
        return outgoing.update_KM, trained.integers_KI

    def _overflown(self, update_KM: Tensor, what: str) -> dict[int, str]:
        """Row → why its message cannot be sent: it is not finite on the wire, as where a power of a loss overflows.

        Args:
            update_KM: the messages.
            what: subject of the sentence, such as "what it reports".
        """
        return dict.fromkeys(rows_not_finite(update_KM.to(self.message.dtype)), f"{what} is not finite")


def _by_samples(trained: TrainedClients) -> tuple[float, ...]:
    return tuple(map(float, trained.samples))


def _mean(rows_KM: Tensor, weights: Sequence[float]) -> Tensor:
    """The weighted mean; of a single vector the vector itself, to the bit."""
    if len(weights) == 1:
        return rows_KM[0]
    return (torch.tensor(weights, dtype=torch.float64) / sum(weights)) @ rows_KM


def _largest(trained: TrainedClients) -> Tensor:
    """The largest of the trained integers, [I]."""
    return trained.integers_KI.amax(0) if trained.integers_KI.numel() else trained.integers_I
