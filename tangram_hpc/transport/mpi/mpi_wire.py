"""Tagged messages between the ranks of one communicator, without blocking inside MPI.

MPI needs a buffer until its send has ended, so the wire keeps each buffer and frees it in `sweep`.
A long message may still arrive while a later one of the same rank is complete already; messages are
handed out in the order in which they were sent. The module `mpi4py.MPI` and the communicator are
handed in. One thread calls everything here.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from ...ports import ChannelLost
from ...protocol.frame import Buffer


class MpiWire:
    """Tagged messages between ranks, without blocking.

    It implements `mpi_channel.Wire` and the gateway's `Ranks`.
    """

    def __init__(self, MPI: Any, comm: Any) -> None:
        self._mpi, self._comm, self._byte = MPI, comm, MPI.BYTE
        self._status = MPI.Status()
        self._requests: list[Any] = []
        self._kept: list[tuple[int, Buffer]] = []  # each request's rank and buffer
        self._on_way: dict[int, int] = {}  # by rank: see `sending`
        self._arriving: dict[int, deque[tuple[Any, int, bytearray]]] = {}

    def send(self, rank: int, tag: int, data: Buffer) -> None:
        """Begins to send; the buffer is kept until MPI has sent it.

        Raises:
            ChannelLost: MPI refused.
        """
        try:
            request = self._comm.Isend([data, len(data), self._byte], rank, tag)
            if request.Test():
                return
        except self._mpi.Exception as error:
            raise ChannelLost(f"MPI: {error}") from None
        self._requests.append(request)
        self._kept.append((rank, data))
        self._on_way[rank] = self._on_way.get(rank, 0) + len(data) + 1

    def sending(self, rank: int) -> int:
        """Returns the bytes under way to this rank; each message counts one byte more."""
        return self._on_way.get(rank, 0)

    def sweep(self) -> None:
        """Frees the buffers of finished sends.

        Raises:
            ChannelLost: MPI refused.
        """
        if not self._requests:
            return
        try:
            done = self._mpi.Request.Testsome(self._requests)
        except self._mpi.Exception as error:
            raise ChannelLost(f"MPI: {error}") from None
        for index in sorted(done or (), reverse=True):
            rank, data = self._kept.pop(index)
            del self._requests[index]
            self._on_way[rank] -= len(data) + 1

    def take(self) -> tuple[int, int, bytearray] | None:
        """Returns the next whole message as (rank, tag, bytes), or None.

        Messages of one rank come in the order in which it sent them.

        Raises:
            ChannelLost: MPI refused.
        """
        status = self._status
        try:
            message = self._probe(status)
            if message is None:
                # MPICH fetches a message in the first probe and finds it in the second.
                message = self._probe(status)
            if message is not None:
                rank, tag = status.Get_source(), status.Get_tag()
                data = bytearray(status.Get_count(self._byte))
                request = message.Irecv([data, len(data), self._byte])
                if not self._arriving.get(rank) and request.Test():
                    return rank, tag, data
                self._arriving.setdefault(rank, deque()).append((request, tag, data))
            for rank, queue in self._arriving.items():
                if queue and queue[0][0].Test():
                    _, tag, data = queue.popleft()
                    return rank, tag, data
        except self._mpi.Exception as error:
            raise ChannelLost(f"MPI: {error}") from None
        return None

    def _probe(self, status: Any) -> Any:
        return self._comm.Improbe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, status)
