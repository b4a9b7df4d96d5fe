"""Measures what a lease's GPUs did while it ran: utilisation, memory, and its part of the energy.

A thread of its own reads NVML, at most every `EVERY_S`, and only while leases run or have just
ended; so no caller ever waits. If NVML knows no GPU on this node, there is no thread and no cost. A
value that was not measured is -1. A device's counters cover everything that ran on it, so energy is
an estimate: the power of a device is divided equally among the leases that hold it at that time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from ...domain.outcome import Outcome
from .devices import Devices
from .nvml import Reading, open_nvml

EVERY_S = 0.5
# the thread reads on for so long after a lease, as short leases often follow each other
_LINGER_NS = 5_000_000_000
_BEHIND_NS = 100_000_000  # a GPU's utilisation describes the time before the reading
_UNREAD = Reading()


class GpuUsage(NamedTuple):
    """What a lease used; -1 means unknown.

    Attributes:
        util_pct: the mean utilisation of its GPUs over its time, in percent.
        max_mem_mib: the most memory that was in use on all of them together, by anyone, in MiB.
        energy_mj: its estimated part of the energy, in mJ.
    """

    util_pct: int = -1
    max_mem_mib: int = -1
    energy_mj: int = -1


@dataclass
class _Gpu:
    """One device.

    Attributes:
        uuid: its UUID.
        read: its last reading, at `read_ns`.
        power_mw: what it draws now in mW, as far as is known; -1 for unknown.
        told_ns: the time up to which its energy has been assigned to leases.
        holders: the leases that hold the device, by token.
    """

    uuid: str
    read: Reading = _UNREAD
    read_ns: int = 0
    power_mw: float = -1.0
    told_ns: int = 0
    holders: dict[int, _Lease] = field(default_factory=dict)

    def deal(self, now: int) -> None:
        """Divides the energy that the device drew since `told_ns` among the leases that hold it."""
        span_s, self.told_ns = (now - self.told_ns) / 1e9, now
        for lease in self.holders.values() if self.power_mw >= 0 else ():
            lease.add(self.uuid, self.power_mw * span_s / len(self.holders))

    def renew(self, read: Reading, now: int) -> None:
        """Takes a new reading. Its energy counter tells how much the device really drew since the
        last reading.
        """
        before, since_s = self.read, (now - self.read_ns) / 1e9
        counted = -1.0
        if min(before.energy_mj, read.energy_mj) >= 0 and since_s > 0:
            counted = max(0, read.energy_mj - before.energy_mj) / since_s
        if self.power_mw < 0:
            self.power_mw = counted  # no power was read yet, or the device does not report it
        self.deal(now)
        for lease in self.holders.values():
            lease.settle(self.uuid, counted / self.power_mw
                         if counted >= 0 and self.power_mw > 0 else 1.0)
        self.power_mw = float(read.power_mw) if read.power_mw >= 0 else counted
        self.read, self.read_ns = read, now


@dataclass
class _Lease:
    """What is known of one lease so far.

    Attributes:
        gpus: its devices.
        began_ns: when it began.
        settled_mj: the lease's energy up to the last readings, corrected by the energy counters.
        guessed: for each device, the lease's energy since the last reading, estimated from the
            power that was read last.
        known: whether any energy was measured or estimated.
        mem_mib: the most memory seen; -1 before a reading.
        utils: the utilisation at each reading.
    """

    gpus: list[_Gpu]
    began_ns: int
    settled_mj: float = 0.0
    guessed: dict[str, float] = field(default_factory=dict)
    known: bool = False
    mem_mib: int = -1
    utils: list[float] = field(default_factory=list)

    def add(self, gpu: str, energy_mj: float) -> None:
        """Adds the lease's estimated part of a device's energy, from the power read last."""
        self.known = True
        self.guessed[gpu] = self.guessed.get(gpu, 0.0) + energy_mj

    def settle(self, gpu: str, factor: float) -> None:
        """Corrects the estimate for a device whose energy counter showed `factor` times the energy
        that was estimated.
        """
        self.settled_mj += self.guessed.pop(gpu, 0.0) * factor

    def look(self, now: int) -> None:
        """Notes memory and utilisation, after all of its GPUs have been read."""
        used = [g.read.used_mib for g in self.gpus]
        if min(used) >= 0:
            self.mem_mib = max(self.mem_mib, sum(used))
        rates = [g.read.util_pct for g in self.gpus]
        if min(rates) >= 0 and now - self.began_ns >= _BEHIND_NS:
            self.utils.append(sum(rates) / len(rates))

    def usage(self) -> GpuUsage:
        """Returns what is known when the lease ends."""
        energy = self.settled_mj + sum(self.guessed.values())
        return GpuUsage(round(sum(self.utils) / len(self.utils)) if self.utils else -1,
                        self.mem_mib, round(energy) if self.known else -1)


class GpuTally:
    """The sums of all leases. It has no thread and no clock: callers hand in ascending times,
    ns."""

    def __init__(self, uuids: Iterable[str]) -> None:
        self.gpus = {uuid: _Gpu(uuid) for uuid in uuids}
        self.leases: dict[int, _Lease] = {}

    def begin(self, token: int, uuids: Iterable[str], now: int) -> None:
        """Begins a lease on these devices."""
        lease = self.leases[token] = _Lease([self.gpus[uuid] for uuid in uuids], now)
        for gpu in lease.gpus:
            gpu.deal(now)
            gpu.holders[token] = lease

    def end(self, token: int, now: int) -> GpuUsage:
        """Ends a lease; returns what it used. For a token that is unknown or has ended, the usage
        is empty.
        """
        lease = self.leases.pop(token, None)
        for gpu in lease.gpus if lease is not None else ():
            gpu.deal(now)
            del gpu.holders[token]
        return lease.usage() if lease is not None else GpuUsage()

    def renew(self, readings: Mapping[str, Reading], now: int) -> None:
        """Takes readings of all devices."""
        for uuid, reading in readings.items():
            self.gpus[uuid].renew(reading, now)
        for lease in self.leases.values():
            lease.look(now)


class GpuMeter:
    """Measures leases on the devices of one node. `begin` and `end` take microseconds, from any
    thread.

    Args:
        devices: what the node lends.
        read: reads a device by its UUID; None: NVML does.
    """

    def __init__(self, devices: Devices, read: Callable[[str], Reading] | None = None) -> None:
        self.devices = devices
        self._uuids = {d.index: d.uuid for d in devices.devices if d.uuid}
        self._read = read
        self._tally = GpuTally(self._uuids.values())
        self._tokens = 0
        self._idle_since = 0
        self._closed = not self._uuids
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None

    def begin(self, block: Sequence[int]) -> int:
        """Begins a lease on these numbers; returns the token to end it with, 0 when nothing can be
        measured.
        """
        if self._closed or not block or any(i not in self._uuids for i in block):
            return 0
        with self._change:
            self._tokens += 1
            self._tally.begin(self._tokens, (self._uuids[i] for i in block), time.monotonic_ns())
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="gpu-meter", daemon=True)
                self._thread.start()
            self._change.notify()
            return self._tokens

    def end(self, token: int) -> GpuUsage:
        """Ends a lease; returns what it used. All values are unknown for the token 0, and for a
        token whose lease has ended.
        """
        with self._change:
            self._idle_since = time.monotonic_ns()
            return self._tally.end(token, self._idle_since)

    def measured(self, token: int, outcome: Outcome) -> Outcome:
        """Ends a lease; returns the outcome with what it used."""
        if not token:
            return outcome
        util, mem, energy = self.end(token)
        return msgspec.structs.replace(outcome, gpu_util_pct=util, gpu_max_mem_mib=mem,
                                       energy_mj=energy)

    def close(self) -> None:
        """Ends the thread. The use of leases that have not ended stays unknown."""
        with self._change:
            self._closed = True
            self._change.notify()
        if self._thread is not None:
            self._thread.join()

    # ---- the thread ----

    def _watch(self) -> None:
        nvml, read = None, self._read
        if read is None:
            nvml, _ = open_nvml()
            if nvml is None:  # NVML worked when the worker started, but not now
                self._closed = True
                return
            read = nvml.read
        while self._wanted():
            told = {uuid: read(uuid) for uuid in self._uuids.values()}
            with self._change:
                self._tally.renew(told, time.monotonic_ns())
                self._change.wait_for(lambda: self._closed, EVERY_S)
        if nvml is not None:
            nvml.close()

    def _wanted(self) -> bool:
        """Waits until a lease holds a device, or one held a device until a moment ago.

        Returns False when the meter was closed.
        """
        with self._change:
            if time.monotonic_ns() - self._idle_since > _LINGER_NS:
                self._change.wait_for(lambda: self._closed or bool(self._tally.leases))
            return not self._closed
