"""The gradient channel of one core rank: sends work to its replicas' members, receives gradients.

One member of each replica that helps this core connects here. With every step each connected member
is sent the parameters. Members of replicas that count are sent samples as well; the others are
expected to answer with zeros.

Invariants: the trainer's thread waits only in `collect`, for at most `wait_s`. Arrived gradients
are kept until `collect` returns them. `libra/hybrid/gradient_filter.py` decides which gradients are
added; the others are counted by the reason of their refusal.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...domain.hybrid import ContributorId, GradientHeader, StepPlan
from ...errors import ProtocolError
from ...protocol.frame import Buffer
from ...protocol.gradient_messages import Gradient, GradientReceipt, GradientWork, JoinMessage
from ...protocol.liveness import Patience
from ...protocol.value import encode_value
from ...transport.socket.bulk_socket import BulkLink, BulkListener
from ..hybrid.gradient_filter import GradientFilter, contributors, split

Vector = NDArray[Any]

_LOOK_S = 0.1  # seconds between two checks of the clock in `collect`; a longer gap is a stall


class _MemberLink:
    """The connection to one member.

    It has a sending thread of its own, so that a slow member delays no other one. Only the newest
    work waits to be sent: older unsent work for a slow member is dropped.

    Attributes:
        link: The connection.
        id: The replica, its generation and its core.
        zeros: Headers of work that was sent without samples and is not answered yet; values are
            unused.
    """

    def __init__(self, link: BulkLink, contributor: ContributorId) -> None:
        self.link, self.id = link, contributor
        self.zeros: dict[GradientHeader, None] = {}
        self._work: tuple[GradientWork, tuple[Buffer, ...]] | None = None
        self._wake = threading.Condition()
        self._ended = False
        threading.Thread(target=self._run, name="channel-send", daemon=True).start()

    def give(self, work: GradientWork, *payload: Buffer) -> None:
        with self._wake:
            self._work = (work, payload)
            self._wake.notify()

    def end(self) -> None:
        with self._wake:
            self._ended = True
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._ended or self._work is not None)
                if self._ended or self._work is None:
                    return
                (work, payload), self._work = self._work, None
            if not work.header.samples:
                self.zeros[work.header] = None
            try:
                self.link.send(work, *payload)
            except OSError:
                self.link.close()  # the receiving thread then ends the link
                return


@dataclass
class _Step:
    """The messages that were sent and received since the last call of `begin`.

    Attributes:
        plan: The plan of the running step.
        params: Its parameters.
        filter: Decides which payloads are added.
        taken: The gradients that were accepted, by replica.
    """

    plan: StepPlan
    params: Vector
    filter: GradientFilter
    taken: dict[int, Vector] = field(default_factory=dict)


class GradientChannel:
    """The gradient channel of one rank of core number `core`.

    Args:
        core: The core's number in its group.
        host: The address of the interface to listen on.
        key, job: The secret and the job name that members must prove.

    Attributes:
        ignored: How many payloads were refused, by reason.
        added: How many payloads were accepted.
        address: Where members dial.
    """

    def __init__(self, core: int, host: str, key: bytes, job: str) -> None:
        self._core = core
        self._lock = threading.Condition()
        self._members: dict[int, _MemberLink] = {}
        self._step: _Step | None = None
        self.ignored: Counter[str] = Counter()
        self.added = 0
        self._listener = BulkListener(host, key, job, self._serve)
        self.address = self._listener.address

    def close(self) -> None:
        """Ends every connection."""
        self._listener.close()
        with self._lock:
            for member in self._members.values():
                member.end()

    # ---- the trainer's side ----

    def begin(self, plan: StepPlan, params: Vector, samples: list[Any]
              ) -> tuple[tuple[int, int], dict[int, tuple[int, int]]]:
        """Sends out the work of a step.

        The caller may change `params` before all members have received them: this spoils only
        gradients that arrive too late to be added.

        Returns:
            The range of samples that this core computes itself, and the range of each replica that
                counts here.
        """
        counting = contributors(plan, self._core)
        own, *others = split(len(samples), 1 + len(counting))
        given = dict(zip(counting, others, strict=True))
        counts = {contributor: end - begin for contributor, (begin, end) in given.items()}
        wanted = GradientFilter(plan, counts, params.size, params.dtype.str)
        with self._lock:
            self._step = _Step(plan, params, wanted)
            for contributor in counting:
                member = self._members.get(contributor.replica)
                if member is None or member.id != contributor:
                    wanted.evict(contributor.replica, contributor.generation)
            for member in self._members.values():
                begin, end = given.get(member.id, (0, 0))
                self._give(self._step, member, samples[begin:end])
        return own, {contributor.replica: range_ for contributor, range_ in given.items()}

    def collect(self, wait_s: float) -> dict[int, Vector]:
        """Waits for the gradients of this step, and returns those that arrived, by replica.

        Nothing is accepted for this step afterwards. Time in which this process was stopped does
        not count, because gradients that arrived meanwhile are unread in its sockets.

        Args:
            wait_s: The longest time to wait, in seconds.
        """
        patience = Patience(time.monotonic(), wait_s, _LOOK_S)
        with self._lock:
            step = self._step
            assert step is not None, "no step has begun"
            while step.filter.missing and not patience.over(time.monotonic()):
                self._lock.wait(min(_LOOK_S, max(wait_s, 0)))
            self._step = None
            return step.taken

    # ---- the members' side ----

    def _give(self, step: _Step, member: _MemberLink, samples: list[Any]) -> None:
        plan, params = step.plan, step.params
        header = GradientHeader(
            member.id.replica, member.id.generation, plan.epoch, plan.step, plan.version,
            len(samples), params.size, params.dtype.str)
        member.link.most = params.nbytes
        member.give(GradientWork(header), params.data, encode_value(samples))

    def _serve(self, link: BulkLink) -> None:
        first = link.receive()
        if first is None or not isinstance(first[0], JoinMessage):
            return
        member = _MemberLink(link, ContributorId(first[0].replica, first[0].generation, self._core))
        replica, generation = member.id.replica, member.id.generation
        with self._lock:
            known = self._members.get(replica)
            if known is not None and known.id.generation >= generation:
                self.ignored["entrance"] += 1
                member.end()
                return
            if known is not None:
                known.link.close()
            self._members[replica] = member
            if self._step is not None:
                self._give(self._step, member, [])
        try:
            self._listen(member)
        finally:
            member.end()
            with self._lock:
                if self._members.get(replica) is member:
                    del self._members[replica]
                    if self._step is not None:
                        self._step.filter.evict(replica, generation)
                        self._lock.notify_all()

    def _listen(self, member: _MemberLink) -> None:
        while (got := member.link.receive()) is not None:
            message, payload = got
            if not isinstance(message, Gradient):
                raise ProtocolError("a member sent a message that is not a gradient")
            refusal = self._take(member, message.header, payload)
            member.link.send(GradientReceipt(message.header, refusal))

    def _take(self, member: _MemberLink, header: GradientHeader, payload: bytearray) -> str:
        size = header.size * np.dtype(header.dtype).itemsize if _is_float(header.dtype) else -1
        with self._lock:
            step = self._step
            if header in member.zeros and len(payload) == size:
                del member.zeros[header]  # zeros change no sum, but prove that the channel works
                return ""
            if (header.replica, header.generation) != (member.id.replica, member.id.generation):
                refusal = "seat"
            elif step is None:
                refusal = "step"
            elif len(payload) != size:
                refusal = "size"
            else:
                refusal = step.filter.refusal(header)
            if refusal or step is None:
                self.ignored[refusal] += 1
                return refusal
            step.taken[header.replica] = np.frombuffer(payload, step.params.dtype)
            self.added += 1
            self._lock.notify_all()
            return ""


def _is_float(dtype: str) -> bool:
    """Whether `dtype` is numpy's name of a type that gradients may have."""
    return dtype in ("<f2", "<f4", "<f8", ">f2", ">f4", ">f8")
