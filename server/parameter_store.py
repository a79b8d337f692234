"""Parameter store: keyed tensors that workers push to and pull from, with bounded staleness."""

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, KeysView
from typing import Self, TypeAlias, TypedDict

from fed.errors import InvalidInput, RunFailed, ValueRange
from fed.processes.clock import SYSTEM_CLOCK, Clock
from fed.vectors.tensors import Tensor, torch

__all__ = ["ParameterStore", "State", "Updater"]

Updater: TypeAlias = Callable[[int | str, Tensor, Tensor], Tensor]


class State(TypedDict):
    """Checkpoint of a store: copies of the values, and each worker's clock."""

    bound: float
    slowest: int
    values: dict[int | str, Tensor]
    clocks: dict[int | str, int]


def _add(key: int | str, stored: Tensor, pushed: Tensor) -> Tensor:
    return stored + pushed


class ParameterStore:
    r"""Tensors by key, shared by workers of which none runs more than a bound ahead of the slowest.

    A worker's clock counts the periods that it has ended with :meth:`tick`; a push belongs to the clock at which its
    worker is. At clock c a worker may proceed while

    .. math:: c ≤ \min_{w} c_w + s

    over the workers registered now, and pushes, pulls and ticks only then. So a pull at clock c has every push of
    clocks up to c − s − 1, of any worker, and workers that join later have these too; of later clocks it has those that
    have come. With s = 0 all of a clock's pushes are seen by all workers in the next; with s = ∞ no worker ever waits.
    The slowest may always proceed, so there is always one who may. The smallest clock never falls: a worker that
    registers starts there, and one that leaves holds no other back.

    Any number of threads may use a store. A call has happened when it returns, each at one instant between its call and
    its return (it is linearizable, over all keys together), and a call that raises has changed nothing. Pushes are
    applied in the order in which they come, so that sums of floats repeat to the bit only where that order does.

    Like MXNet's KVStore: keys are numbers or texts; a key is set before it is pushed to; a push has the shape of the
    stored value, lies on any device, and is merged by an updater; no two updates of a value happen at once. Unlike it:
    the updater adds unless given, where MXNet's assigns, and returns the new value, where MXNet's changes the stored
    one; every push is applied as it comes, as in ``dist_async``, and what makes workers wait for each other are clocks
    and the bound, where ``dist_sync`` holds pushes of a key back until every worker has pushed, and updates once with
    their sum; ``set`` is ``init``, may be repeated, and takes any caller's value; ``pull`` returns a copy, where
    MXNet's fills ``out``; calls do their work before they return, where MXNet's queue it; they take one key and one
    tensor; workers come and go. With s = ∞ it is what asynchronous workers find on TensorFlow's parameter servers.

    Args:
        bound: number s of clocks, a whole number ≥ 0, or ``math.inf``.
        updater: (key, stored, pushed) → the new value, of the same shape and type. It is called with copies, under the
            store's lock: it must not wait, nor push. A state of its own is not part of the store's. ``lambda key,
            stored, pushed: pushed`` assigns.
        clock: time, by which calls wait.

    Raises:
        ValueRange: if the bound is not such a number.

    Example:
        >>> store = ParameterStore(bound=1)
        >>> store.set("w", torch.zeros(2))
        >>> for worker in ("quick", "slow"):
        ...     store.register(worker)
        >>> for _ in range(2):
        ...     store.push("w", torch.ones(2), worker="quick")
        ...     store.tick("quick")
        >>> store.get("w"), store.clock("quick"), store.may_proceed("quick")
        (tensor([2., 2.]), 2, False)
        >>> store.pull("w", worker="quick", timeout_s=0)
        Traceback (most recent call last):
        fed.errors.RunFailed: after 0 s worker 'quick' still waits at clock 2 for 'slow' (clock 0), because ...
        >>> store.tick("slow")
        >>> store.pull("w", worker="quick")
        tensor([2., 2.])

    Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", NeurIPS 2013. There
    readers may be served from caches; here all read the one store, and see all that has come.
    """

    def __init__(self, *, bound: float = 0, updater: Updater = _add, clock: Clock = SYSTEM_CLOCK) -> None:
        if bound != math.inf and (type(bound) is not int or bound < 0):  # True is an int
            raise ValueRange(f"bound must be a whole number of clocks, at least 0, or math.inf, got {bound!r}")
        self._bound = bound
        self._updater = updater
        self._time = clock
        self._values: dict[int | str, Tensor] = {}  # replaced, never changed: copied outside the lock
        self._clocks: dict[int | str, int] = {}
        self._workers_at: Counter[int] = Counter()
        self._slowest = 0
        self._changed = threading.Condition()  # its lock is reentrant: methods call each other under it

    @property
    def slowest(self) -> int:
        """The smallest clock; it never falls."""
        return self._slowest

    @property
    def workers(self) -> KeysView[int | str]:
        """Registered workers."""
        return self._clocks.keys()

    def set(self, key: int | str, tensor: Tensor) -> None:
        """Set a key's first value, or another, of any shape and type.

        Raises:
            InvalidInput: if the key is neither a number nor a text, or the value not a dense tensor of finite numbers.
        """
        _refuse_no_key(key)
        # Before the lock is taken: a copy of a large tensor would hold up all workers.
        value = _copy(f"the value of key {key!r}", tensor)
        with self._changed:
            self._values[key] = value

    def get(self, key: int | str) -> Tensor:
        """A copy of a key's value as it is now, whatever the clocks.

        Raises:
            InvalidInput: if the key was never set.
        """
        return self._value(key).clone()

    def push(self, key: int | str, tensor: Tensor, worker: int | str) -> None:
        """Merge a tensor into a key's value, at the worker's clock.

        Args:
            key: key of the value.
            tensor: tensor to be merged, of the value's shape and type.
            worker: worker that pushes.

        Raises:
            InvalidInput: if the key was never set, the worker is not registered or may not proceed, or the tensor, or
                what the updater makes of it, is not finite, or not of the stored value's shape and type.
        """
        name = f"what worker {worker!r} pushes to key {key!r}"
        pushed = _copy(name, tensor)  # outside the lock, which the copy would hold for longest
        with self._changed:
            self._refuse_to_run_ahead(worker)
            stored = self._value(key)
            _refuse_unlike(name, pushed, stored)
            name = f"what the updater makes of key {key!r}"
            value = _copy(name, self._updater(key, stored.clone(), pushed.to(stored.device)))
            _refuse_unlike(name, value, stored)
            self._values[key] = value

    def pull(self, key: int | str, worker: int | str, timeout_s: float | None = None) -> Tensor:
        """Wait until the worker may proceed, and copy a key's value at that instant.

        Args:
            key: key of the value.
            worker: worker that asks for it.
            timeout_s: seconds to wait at most, ≥ 0; None: no limit.

        Raises:
            InvalidInput: if the key was never set, or the worker is not registered, or leaves while it waits.
            RunFailed: if the time passes; the message names the workers that it waits for.
        """
        with self._changed:
            self._value(key)
            self.wait(worker, timeout_s)  # an unknown key has failed before the wait
            value = self._values[key]  # not before the wait, in which others push
        return value.clone()

    def register(self, worker: int | str) -> None:
        """Let a worker take part, from the smallest clock on.

        Raises:
            InvalidInput: if it takes part already.
        """
        with self._changed:
            if worker in self._clocks:
                raise InvalidInput(f"a worker registers once, got {worker!r} again: let it leave first")
            self._clocks[worker] = self._slowest
            self._workers_at[self._slowest] += 1

    def leave(self, worker: int | str) -> None:
        """Remove a worker: what it pushed stays, and no worker waits for it any more.

        Raises:
            InvalidInput: if it is not registered.
        """
        with self._changed:
            self._workers_at[self.clock(worker)] -= 1
            del self._clocks[worker]
            self._find_slowest()
            self._changed.notify_all()  # it may be waiting itself

    def tick(self, worker: int | str) -> None:
        """End a worker's clock period; what it pushes from now on belongs to the next.

        Raises:
            InvalidInput: if it is not registered, or may not proceed.
        """
        with self._changed:
            self._refuse_to_run_ahead(worker)
            clock = self._clocks[worker]
            self._clocks[worker] = clock + 1
            self._workers_at[clock] -= 1
            self._workers_at[clock + 1] += 1
            if self._find_slowest():
                self._changed.notify_all()

    def clock(self, worker: int | str) -> int:
        """Clock of a worker: the smallest clock when it registered, and one more for each tick since.

        Raises:
            InvalidInput: if it is not registered.
        """
        with self._changed:
            if worker not in self._clocks:
                raise InvalidInput(f"worker {worker!r} must be registered, and is not, or has left: register it first")
            return self._clocks[worker]

    def may_proceed(self, worker: int | str) -> bool:
        """True if a worker is at most the bound ahead of the slowest; never waits.

        Raises:
            InvalidInput: if it is not registered.
        """
        with self._changed:
            return self.clock(worker) <= self._slowest + self._bound

    def ready(self, workers: Iterable[int | str]) -> dict[int, list[int | str]]:
        """Workers among these that may proceed, by clock, in their order; never waits.

        Raises:
            InvalidInput: if one is not registered.
        """
        found: dict[int, list[int | str]] = {}
        with self._changed:
            clocks = self._clocks
            latest = self._slowest + self._bound
            for worker in workers:
                clock = clocks[worker] if worker in clocks else self.clock(worker)  # which refuses strangers
                if clock <= latest:
                    found.setdefault(clock, []).append(worker)
        return found

    def wait(self, worker: int | str, timeout_s: float | None = None) -> None:
        """Wait until a worker may proceed.

        Args:
            worker: worker that waits.
            timeout_s: seconds to wait at most, ≥ 0; None: no limit.

        Raises:
            InvalidInput: if it is not registered, or leaves while it waits.
            RunFailed: if the time passes; the message names the workers that it waits for.
        """
        if timeout_s is not None and not timeout_s >= 0:  # so written, NaN is refused
            raise InvalidInput(f"timeout_s must be at least 0, or None to wait as long as it takes, got {timeout_s}")
        limit_s = math.inf if timeout_s is None else timeout_s
        until_s = self._time.monotonic_s() + limit_s
        with self._changed:
            while not self.may_proceed(worker):
                left_s = until_s - self._time.monotonic_s()
                if left_s <= 0:
                    raise RunFailed(
                        f"after {limit_s:g} s worker {worker!r} still {self._described_wait(worker)}: "
                        "let them tick or leave, or raise timeout_s or the bound"
                    )
                # A longer wait raises OverflowError.
                self._time.wait_on(self._changed, min(left_s, threading.TIMEOUT_MAX))

    def state(self) -> State:
        """Whole state at one instant, for a checkpoint; waiting threads are not part of it."""
        with self._changed:
            values = {key: value.clone() for key, value in self._values.items()}
            return State(bound=self._bound, slowest=self._slowest, values=values, clocks=dict(self._clocks))

    @classmethod
    def restore(cls, state: State, *, updater: Updater = _add, clock: Clock = SYSTEM_CLOCK) -> Self:
        """Store that resumes from a state.

        Args:
            state: state of the store, from :meth:`state`.
            updater: updater of that store, which its state does not hold.
            clock: time, by which calls wait.

        Raises:
            InvalidInput: if it is no state of a store.
        """
        if state.keys() != State.__annotations__.keys():
            raise InvalidInput(
                f"a store's state has the keys {', '.join(State.__annotations__)}, got {', '.join(state) or 'none'}: "
                "restore what state() returned"
            )
        if state["slowest"] != min(state["clocks"].values(), default=state["slowest"]):
            raise InvalidInput(
                f"the state's slowest must be the smallest of its clocks, got {state['slowest']} and "
                f"{_few(state['clocks'].values())}: restore what state() returned"
            )
        store = cls(bound=state["bound"], updater=updater, clock=clock)
        for key, value in state["values"].items():
            store.set(key, value)
        store._clocks.update(state["clocks"])
        store._workers_at.update(state["clocks"].values())
        store._slowest = state["slowest"]
        return store

    def _value(self, key: int | str) -> Tensor:
        _refuse_no_key(key)
        if key not in self._values:
            known = _few(map(repr, self._values)) or "none"
            raise InvalidInput(f"a key must be set before it is used, got {key!r}; known: {known}")
        return self._values[key]

    def _refuse_to_run_ahead(self, worker: int | str) -> None:
        if not self.may_proceed(worker):
            raise InvalidInput(
                f"worker {worker!r} may not push or tick while it {self._described_wait(worker)}: call wait first"
            )

    def _described_wait(self, worker: int | str) -> str:
        clock = self._clocks[worker]
        slow = (f"{other!r} (clock {at})" for other, at in self._clocks.items() if at + self._bound < clock)
        return f"waits at clock {clock} for {_few(slow)}, because the bound is {self._bound}"

    def _find_slowest(self) -> bool:
        """True if the smallest clock has risen; over a run this takes no more steps than there are ticks."""
        before = self._slowest
        while self._clocks and not self._workers_at[self._slowest]:
            del self._workers_at[self._slowest]
            self._slowest += 1
        return self._slowest > before


def _refuse_no_key(key: object) -> None:
    # MXNet takes lists of keys, too: the remedy is for those who come from there.
    if not isinstance(key, int | str):
        raise InvalidInput(f"a key must be a whole number or a text, got {key!r}: give one key and one tensor a call")


def _copy(name: str, tensor: Tensor) -> Tensor:
    """A copy of a dense tensor of finite numbers, which no caller can change."""
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
        raise InvalidInput(f"{name} must be a dense tensor, got {type(tensor).__name__}")
    copy = tensor.detach().clone()
    if not (finite := copy.isfinite()).all():
        raise InvalidInput(
            f"{name} must be finite, got {int((~finite).sum())} of {finite.numel()} numbers that are not: look for "
            "a step that diverged"
        )
    return copy


def _refuse_unlike(name: str, tensor: Tensor, stored: Tensor) -> None:
    if tensor.shape != stored.shape or tensor.dtype != stored.dtype:
        raise InvalidInput(
            f"{name} must be {stored.dtype} {tuple(stored.shape)} like the stored value, got {tensor.dtype} "
            f"{tuple(tensor.shape)}: convert it, or set the key anew"
        )


def _few(items: Iterable[object]) -> str:
    """Text of the first of many items, and the number of the others."""
    texts = [str(item) for item in items]
    more = f" and {len(texts) - 10} more" if len(texts) > 10 else ""
    return ", ".join(texts[:10]) + more
