"""A member of a hybrid replica: a process that serves rollouts and, when asked, computes gradients.

Law: it does what the coordinator asks, in that order, and says when it is done. It serves rollouts
or belongs to training, never both: its server is told to stop before its channel is opened and
starts again after that is closed. Without a coordinator it is a rollout worker.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...domain.hybrid import Ask, MemberDone, MemberFailed
from ...domain.hybrid import ReplicaState as R
from ...errors import ProtocolError, TangramError
from ...protocol.lane import (
    PAYLOAD_MAX,
    Alive,
    Gradient,
    GradientReceipt,
    Hello,
    JoinMessage,
    MemberReport,
    Told,
    Work,
)
from ...protocol.value import decode_value
from ...storage.access import Access
from ...transport.socket.lane import BulkLink, dial_bulk

_ALIVE_S = 2.0


class ReplicaCallbacks(Protocol):
    """What a trainer's author fills in. A TangramError from any of them brings the replica back to
    rollout; another exception ends the process."""

    def stop_rollouts(self) -> None:
        """Ends or hands on what is being generated; returns when the GPU is free for training."""
        ...

    def start_rollouts(self) -> None:
        """Serves again; also if it never stopped."""
        ...

    def gradient(self, params: NDArray[Any], samples: list[Any]) -> NDArray[Any]:
        """The sum of the samples' gradients at these parameters; same shape and dtype."""
        ...


Skills = ReplicaCallbacks  # the old name, kept for one release


class Member:
    """Runs in the member's process.

    Args:
        access: where the coordinator listens (`CoreTrainer` writes the file).
        member: its GPU's number, as in the pool's replicas.
        incarnation: above that of every earlier incarnation of it; the time of its start will do.
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
        """Serves until the coordinator is gone; a rollout worker when it returns.

        Raises:
            TangramError: there is no coordinator there, or it does not hold the key.
        """
        access = self._access
        coordinator = self._coordinator = dial_bulk(access.addresses, access.key, access.job)
        stop = threading.Event()
        try:
            coordinator.send(Hello(self._member, self._incarnation))
            threading.Thread(target=_breathe, args=(coordinator, stop), daemon=True).start()
            while (got := coordinator.receive()) is not None:
                if not isinstance(got[0], Told):
                    raise ProtocolError("the coordinator sent no order")
                self._obey(got[0].order, got[0].channel)
        except OSError:
            pass  # the coordinator is gone
        finally:
            stop.set()
            coordinator.close()
            self._leave_channel()
            self._callbacks.start_rollouts()

    def _obey(self, order: Ask, channel: tuple[str, ...]) -> None:
        try:
            match order.stage:
                case R.REQUESTED:
                    self._callbacks.stop_rollouts()
                case R.FETCHING_STATE:
                    self._leave_channel()
                    self._channel = _ChannelThread(self, channel, order)
                    return  # it says itself when it has the parameters
                case R.ZERO_SYNC:
                    if self._channel is not None:
                        self._channel.follow()
                    return
                case R.RETURNING:
                    self._leave_channel()
                    self._callbacks.start_rollouts()
                case _:
                    raise ProtocolError(f"{order.stage.value} is nothing that a member does")
        except TangramError as error:
            self.failed(order, str(error))
            return
        self.done(order, order.stage)

    def done(self, order: Ask, stage: R) -> None:
        """Says so to the coordinator."""
        self._report(MemberDone(self._member, self._incarnation, order.generation, stage))

    def failed(self, order: Ask, reason: str) -> None:
        """Says so to the coordinator."""
        self._report(MemberFailed(self._member, self._incarnation, order.generation, reason))

    def _report(self, event: MemberDone | MemberFailed) -> None:
        assert self._coordinator is not None
        self._coordinator.send(MemberReport(event))

    def gradient(self, params: NDArray[Any], samples: list[Any]) -> NDArray[Any]:
        """See `ReplicaCallbacks.gradient`."""
        return self._callbacks.gradient(params, samples)

    def access_key(self) -> tuple[bytes, str]:
        """What channels are dialled with."""
        return self._access.key, self._access.job

    def _leave_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


class _ChannelThread:
    """The conversation with the core; computes. Parameters that came before it may follow are
    answered with zeros once it may, as is everything that gives it no samples."""

    def __init__(self, member: Member, channel: tuple[str, ...], order: Ask) -> None:
        self._member, self._order = member, order
        key, job = member.access_key()
        self._link = dial_bulk(channel, key, job)
        self._link.most = PAYLOAD_MAX
        self._lock = threading.Lock()
        self._fetched = self._follows = self._synced = self._closing = False
        self._unanswered: Work | None = None
        self._thread = threading.Thread(target=self._run, name="gradient-channel", daemon=True)
        self._link.send(JoinMessage(order.replica, order.generation))
        self._thread.start()

    def follow(self) -> None:
        """Contributes zero from here on."""
        with self._lock:
            self._follows = True
            work, self._unanswered = self._unanswered, None
        if work is not None:
            try:
                self._answer_zero(work)
            except OSError:
                pass  # its own thread sees that and says so

    def close(self) -> None:
        """Leaves the core; returns when nothing is computed any more."""
        self._closing = True
        self._link.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            while (got := self._link.receive()) is not None:
                message, payload = got
                if isinstance(message, Work):
                    self._work(message, payload)
                elif isinstance(message, GradientReceipt):
                    self._received(message)
                else:
                    raise ProtocolError("the core sent no work")
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

    def _work(self, work: Work, payload: bytearray) -> None:
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

    def _answer_zero(self, work: Work) -> None:
        header = work.header
        self._link.send(Gradient(header), np.zeros(header.size, np.dtype(header.dtype)).data)

    def _received(self, receipt: GradientReceipt) -> None:
        if not receipt.refusal and not receipt.header.samples and not self._synced:
            self._synced = True
            self._member.done(self._order, R.ZERO_SYNC)


def _breathe(coordinator: BulkLink, stop: threading.Event) -> None:
    """Says that the process lives, while it may be busy."""
    while not stop.wait(_ALIVE_S):
        try:
            coordinator.send(Alive())
        except OSError:
            return
