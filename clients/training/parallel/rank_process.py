"""Process of one rank: its main loop, and the messages between it and its parent.

Through a pipe the parent sends the messages of :mod:`fed.clients.training.parallel.setup`, pickled. The rank replies
with a :class:`RankReply` when it is ready, when a task has ended, and when it fails.

Shapes: see :mod:`fed.vectors.layout`.
"""

import contextlib
import os
import pickle
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from enum import Enum
from multiprocessing import context, reduction
from multiprocessing.connection import Connection
from typing import Any

from torch import distributed
from torch._C._distributed_c10d import FileStore

from fed.clients.training.determinism import deterministic, fix_workspaces
from fed.clients.training.float32_products import float32_products
from fed.clients.training.parallel.rank_training import RankTraining
from fed.clients.training.parallel.setup import BatchPart, Begin, SharedSetup, TakeStep
from fed.clients.training.parallel.way import Rank
from fed.clients.training.parallel.ways import make_way
from fed.clients.training.working_process import prepare_process
from fed.config.parallel import FSDP
from fed.errors import FedError
from fed.processes.crash_report import portable, words_of_error
from fed.processes.machine import pool_freed_memory
from fed.vectors import trees
from fed.vectors.arrays import ArrayTensor
from fed.vectors.shared_memory import Place, SharedMemory
from fed.vectors.tensors import Tensor, torch
from fed.vectors.trees import Tree

__all__ = ["Meeting", "RankReply", "packed_message", "serve_rank"]

_MOST_ERROR_BYTES = 1 << 16
"""Bytes of an error that fit into the pipe, for the parent may wait until a message has room in it, and not read."""


class Meeting:
    """File without a name through which the ranks find each other; no other process can open it.

    It goes to a spawned process among its arguments.
    """

    def __init__(self) -> None:
        self._hold(os.memfd_create("fed ranks"))

    def _hold(self, fd: int) -> None:
        self.path = f"/proc/self/fd/{fd}"
        self._fd = fd
        weakref.finalize(self, os.close, fd).atexit = False

    def __getstate__(self) -> Any:
        context.assert_spawning(self)  # in any other pickle a descriptor means nothing
        return (reduction.DupFd(self._fd),)

    def __setstate__(self, state: Any) -> None:
        (handle,) = state
        self._hold(handle.detach())


class RankReply(Enum):
    """Reply of a rank; each is sent with a content.

    Attributes:
        READY: rank waits for tasks. The content is None.
        ENDED: task has ended. The content is the rank's part of the sum of losses.
        REFUSED: rank raised a :class:`fed.errors.FedError`, the content, and ends.
        RAISED: rank raised another error, and ends. The content is (a description, the traceback, True if another rank
            may be the cause).
    """

    READY = "ready"
    ENDED = "ended"
    REFUSED = "refused"
    RAISED = "raised"


def packed_message(message: Begin | TakeStep | Any) -> bytes:
    """A message for :meth:`multiprocessing.connection.Connection.send_bytes`: tensors go as their bytes."""
    if isinstance(message, TakeStep):
        message = TakeStep(tuple(_with_trees(part, ArrayTensor) for part in message.parts))
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def _unpacked(sent: bytes) -> Any:
    message = pickle.loads(sent)  # noqa: S301  # from the parent
    if isinstance(message, TakeStep):
        return TakeStep(tuple(_with_trees(part, _tensor_of) for part in message.parts))
    return message


def _tensor_of(held: ArrayTensor) -> Tensor:
    return held.tensor


def _with_trees(part: BatchPart, change: Callable[[Any], Any]) -> BatchPart:
    return BatchPart(
        inputs=_mapped(change, part.inputs),
        targets=_mapped(change, part.targets),
        shares=part.shares,
        sizes=part.sizes,
        weight=part.weight,
        samples=part.samples,
    )


def _mapped(change: Callable[[Any], Any], tree: Tree) -> Tree:
    return tree if tree is None else trees.mapped(change, tree)


def serve_rank(
    connection: Connection,
    setup: SharedSetup,
    memory: SharedMemory,
    places: tuple[Place, Place, Place],
    meeting: Meeting,
    rank: Rank,
) -> None:
    """The main function of a rank: do tasks until there is nothing more to come.

    Args:
        connection: end of the pipe that belongs to the rank.
        setup: setup of all ranks.
        memory: memory shared with the parent and all ranks: the state, tensors of a task's context, and last
            ``FAULT_BYTES`` for the report of a crash of any of them.
        places: places in it of the vector [V], the integers [I] and the bytes of contexts.
        meeting: file through which the ranks find each other.
        rank: place of this process.
    """
    try:
        read = setup.read()
        prepare_process(connection, memory, read.settings)
        if isinstance(read.kind, FSDP):
            # Gathered parameters come and go, and would leave gaps as large as the model in memory that is kept.
            pool_freed_memory()
        is_deterministic = torch.are_deterministic_algorithms_enabled()  # as the parent was when it started this rank
        if is_deterministic:
            fix_workspaces(rank.device)
        _join(meeting, rank)
        vector_V, integers_I, context_bytes = (place.in_(memory.all_bytes) for place in places)
        tf32 = read.local.precision == "tf32"
        training = RankTraining(
            read,
            rank,
            make_way,
            state=(vector_V, integers_I),
            context_bytes=context_bytes,
            fixed=setup.fixed,
        )
        del read
        connection.send((RankReply.READY, None))
        with (
            deterministic(rank.device, on=is_deterministic),
            float32_products(rank.device, tf32=tf32),
            contextlib.suppress(EOFError, ConnectionError),
        ):
            while True:
                _do_task(connection, training)
    except FedError as error:
        _leave(connection, RankReply.REFUSED, portable(error, _MOST_ERROR_BYTES))
    except BaseException as error:
        words, details = words_of_error(error)
        details = details.encode()[-_MOST_ERROR_BYTES:].decode(errors="ignore")
        _leave(connection, RankReply.RAISED, (words, details, _is_of_another(error)))
    os._exit(0)  # the end of the ranks' connections may wait for others


def _do_task(connection: Connection, training: RankTraining) -> None:
    begin = _unpacked(connection.recv_bytes())
    with ExitStack() as block:
        training.begin(begin, block)
        while isinstance(message := _unpacked(connection.recv_bytes()), TakeStep):
            training.step(message.parts)
        loss_sum = training.end()
    if distributed.get_world_size() > 1:
        distributed.barrier()  # all pieces are written
    connection.send((RankReply.ENDED, loss_sum))


def _join(meeting: Meeting, rank: Rank) -> None:
    """Meet the other ranks, over the machine's own interface alone."""
    interface = "lo" if sys.platform == "linux" else "lo0"
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    os.environ["NCCL_SOCKET_IFNAME"] = interface
    is_gpu = rank.device.type == "cuda"
    if is_gpu:
        torch.cuda.set_device(rank.device)
    distributed.init_process_group(
        "nccl" if is_gpu else "gloo",
        store=FileStore(meeting.path, rank.count),
        rank=rank.number,
        world_size=rank.count,
        timeout=rank.patience,
    )


def _is_of_another(error: BaseException) -> bool:
    """True for an error of a connection between ranks, which the end of another rank causes."""
    text = str(error).lower()
    return isinstance(error, distributed.DistError) or "gloo" in text or "nccl" in text


def _leave(connection: Connection, reply: RankReply, content: Any) -> None:
    with contextlib.suppress(OSError):
        connection.send((reply, content))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
