"""A member of a hybrid replica: a process that serves rollouts and computes gradients when asked.

It carries out the coordinator's orders one after the other and reports each as done.

Invariants: the process serves rollouts or belongs to training, never both. The rollout server is
told to stop before the gradient channel is opened, and starts again after the channel is closed.
When the coordinator is gone, the process is a rollout worker again.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...domain.hybrid import MemberDone, MemberFailed, StageOrder
from ...domain.hybrid import ReplicaState as R
from ...errors import ProtocolError, TangramError
from ...protocol.gradient_messages import (
    PAYLOAD_MAX,
    Alive,
    Gradient,
    GradientReceipt,
    GradientWork,
    JoinMessage,
    MemberHello,
    MemberReport,
    OrderMessage,
)
from ...protocol.value import decode_value
from ...storage.access import Access
from ...transport.socket.bulk_socket import BulkLink, dial_bulk

_ALIVE_S = 2.0


class ReplicaCallbacks(Protocol):
    """The methods that a trainer's author implements for a member.

    A TangramError from any of the methods brings the replica back to rollout; any other exception
    ends the process.
    """

    def stop_rollouts(self) -> None:
        """Finishes or hands on running generations; returns when the GPU is free for training."""
        ...

    def start_rollouts(self) -> None:
        """Serves rollouts again. It is also called when the rollouts never stopped."""
        ...

    def gradient(self, params: NDArray[Any], samples: list[Any]) -> NDArray[Any]:
        """Returns the sum of the samples' gradients at `params`, with the same shape and dtype."""
        ...


Skills = ReplicaCallbacks  # the old name, kept for one release


class Member:
    """A member of a replica, in its own process.

    Args:
        access: Where the coordinator listens; `CoreTrainer` writes the file.
        member: The number of its GPU, as in the pool's replicas.
        incarnation: A number above that of every earlier incarnation; the time of the start will
            do.
        callbacks: What the trainer's author implements.
        life, skills: Old names of `incarnation` and `callbacks`, kept for one release.

    Example:
        Member(read_access(Path("run/hybrid.json")), 6, time.time_ns(), MyCallbacks()).run()
    """

    def __init__(self, access: Access, member: int, incarnation: int | None = None,
                 callbacks: ReplicaCallbacks | None = None, *, life: int | None = None,
                 skills: ReplicaCallbacks | None = None) -> None:
        incarnation = life if incarnation is None else incarnation
        callbacks = callbacks or skills
        if incarnation is None or callbacks is None:
            raise TypeError("Member: pass `incarnation` and `callbacks`")
        self._access, self._callbacks = access, callbacks
        self._member, self._incarnation = member, incarnation
        self._coordinator: BulkLink | None = None
        self._channel: _ChannelThread | None = None

    def run(self) -> None:
        """Obeys the coordinator until its connection ends; then the process serves rollouts again.

        Raises:
            TangramError: No coordinator answers at that address, or it does not hold the key.
        """
        access = self._access
        coordinator = self._coordinator = dial_bulk(access.addresses, access.key, access.job)
        stop = threading.Event()
        try:
            coordinator.send(MemberHello(self._member, self._incarnation))
            threading.Thread(target=_breathe, args=(coordinator, stop), daemon=True).start()
            while (got := coordinator.receive()) is not None:
                if not isinstance(got[0], OrderMessage):
                    raise ProtocolError("the coordinator sent a message that is not an order")
                self._obey(got[0].order, got[0].channel)
        except OSError:
            pass  # the coordinator is gone
        finally:
            stop.set()
            coordinator.close()
            self._leave_channel()
            self._callbacks.start_rollouts()

    def _obey(self, order: StageOrder, channel: tuple[str, ...]) -> None:
        try:
            match order.stage:
                case R.REQUESTED:
                    self._callbacks.stop_rollouts()
                case R.FETCHING_STATE:
                    self._leave_channel()
                    self._channel = _ChannelThread(self, channel, order)
                    return  # the channel's thread reports the arrival of the parameters
                case R.ZERO_SYNC:
                    if self._channel is not None:
                        self._channel.follow()
                    return
                case R.RETURNING:
                    self._leave_channel()
                    self._callbacks.start_rollouts()
                case _:
                    raise ProtocolError(f"a member has nothing to do at stage {order.stage.value}")
        except TangramError as error:
            self.failed(order, str(error))
            return
        self.done(order, order.stage)

    def done(self, order: StageOrder, stage: R) -> None:
        """Reports to the coordinator that a stage is done."""
        self._report(MemberDone(self._member, self._incarnation, order.generation, stage))

    def failed(self, order: StageOrder, reason: str) -> None:
        """Reports to the coordinator that this join cannot go on."""
        self._report(MemberFailed(self._member, self._incarnation, order.generation, reason))

    def _report(self, event: MemberDone | MemberFailed) -> None:
        assert self._coordinator is not None
        self._coordinator.send(MemberReport(event))

    def gradient(self, params: NDArray[Any], samples: list[Any]) -> NDArray[Any]:
        """See `ReplicaCallbacks.gradient`."""
        return self._callbacks.gradient(params, samples)

    def access_key(self) -> tuple[bytes, str]:
        """The secret and the job name that a peer must prove to a gradient channel."""
        return self._access.key, self._access.job

    def _leave_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


class _ChannelThread:
    """The connection to the core's gradient channel; a thread of its own computes.

    Work without samples is answered with zeros, but only after the coordinator has told the member
    to follow (ZERO_SYNC). Until then the last such work is kept in `_unanswered`.
    """

    def __init__(self, member: Member, channel: tuple[str, ...], order: StageOrder) -> None:
        self._member, self._order = member, order
        key, job = member.access_key()
        self._link = dial_bulk(channel, key, job)
        self._link.most = PAYLOAD_MAX
        self._lock = threading.Lock()
        self._fetched = self._follows = self._synced = self._closing = False
        self._unanswered: GradientWork | None = None
        self._thread = threading.Thread(target=self._run, name="gradient-channel", daemon=True)
        self._link.send(JoinMessage(order.replica, order.generation))
        self._thread.start()

    def follow(self) -> None:
        """From now on, answers work without samples with zeros."""
        with self._lock:
            self._follows = True
            work, self._unanswered = self._unanswered, None
        if work is not None:
            try:
                self._answer_zero(work)
            except OSError:
                pass  # the channel's thread notices and reports it

    def close(self) -> None:
        """Leaves the core; returns when no gradient is being computed any more."""
        self._closing = True
        self._link.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            while (got := self._link.receive()) is not None:
                message, payload = got
                if isinstance(message, GradientWork):
                    self._work(message, payload)
                elif isinstance(message, GradientReceipt):
                    self._received(message)
                else:
                    raise ProtocolError("the core sent a message that is not work")
            why = "its channel ended"
        except OSError as error:
            why = f"its channel broke: {error.strerror or error}"
        except TangramError as error:
            why = str(error)
        if not self._closing:
            try:
                self._member.failed(self._order, why)
            except OSError:
                pass  # the coordinator is gone as well

    def _work(self, work: GradientWork, payload: bytearray) -> None:
        if not self._fetched:
            self._fetched = True
            self._member.done(self._order, R.FETCHING_STATE)
        if not work.header.samples:
            with self._lock:
                if not self._follows:
                    self._unanswered = work
                    return
            self._answer_zero(work)
            return
        header = work.header
        dtype = np.dtype(header.dtype)
        params = np.frombuffer(payload, dtype, header.size)
        samples = decode_value(memoryview(payload)[header.size * dtype.itemsize :])
        gradient = self._member.gradient(params, samples)
        self._link.send(Gradient(header), np.ascontiguousarray(gradient, dtype).data)

    def _answer_zero(self, work: GradientWork) -> None:
        header = work.header
        self._link.send(Gradient(header), np.zeros(header.size, np.dtype(header.dtype)).data)

    def _received(self, receipt: GradientReceipt) -> None:
        if not receipt.refusal and not receipt.header.samples and not self._synced:
            self._synced = True
            self._member.done(self._order, R.ZERO_SYNC)


def _breathe(coordinator: BulkLink, stop: threading.Event) -> None:
    """Sends `Alive` every `_ALIVE_S` seconds, also while the process computes."""
    while not stop.wait(_ALIVE_S):
        try:
            coordinator.send(Alive())
        except OSError:
            return
