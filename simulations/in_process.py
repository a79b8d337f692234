"""Simulated clients that train in this process, one after another.

Shapes: V, a model's floating-point state; I, its integers.
"""

import math

import torch
from torch import Tensor

from fed.clients.data import ClientId, FederatedData
from fed.clients.training import Trained, Trainer
from fed.errors import Diverged
from fed.randomness import Streams

__all__ = ["InProcessClients"]


class InProcessClients:
    """What every simulated client can do: train from a state on its own data, with its own random streams.

    Args:
        data: by client.
        trainer: trains them.
        streams: the run's random streams; a client's are named by client and round.
    """

    def __init__(self, data: FederatedData, trainer: Trainer, streams: Streams) -> None:
        self.data = data
        self.trainer = trainer
        self._streams = streams

    def train(
        self,
        client: ClientId,
        number: int,
        vector_V: Tensor,
        integers_I: Tensor,
        broadcast: tuple[Tensor, ...] = (),
    ) -> Trained:
        """One client's work of one round.

        Args:
            client: whose data.
            number: of the round, from 1; with the client it names the random streams.
            vector_V: where to start.
            integers_I: the integer buffers to start with.
            broadcast: what the rule gives to every client beside the model.

        Raises:
            Diverged: if the loss or the trained state is not finite.
        """
        try:
            trained = self.trainer.train(
                vector_V,
                integers_I,
                self.data.train[client],
                order=self._streams.generator("order", client, number),
                seed=self._streams.torch_seed("module", client, number),
                broadcast=broadcast,
            )
        except Exception as error:
            error.add_note(f"while client {client!r} was training in round {number}")
            raise
        if not math.isfinite(trained.train_loss):
            raise Diverged(f"the training loss became {trained.train_loss}")
        if not bool(torch.isfinite(trained.vector_V).all()):
            raise Diverged("the trained model is not finite")
        return trained
