"""What a lease's block of GPUs did while it ran: use, memory, and its part of the energy.

Law: never keeps its caller waiting: a thread of its own reads NVML, every `EVERY_S` at most, and
only while leases run or did just now. Without GPUs that NVML knows there is no thread and no cost.
What was not seen is -1. A device's counters cover whatever ran on it, so energy is an estimate: of
each moment's power, the leases that hold the device then have equal parts.
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
_LINGER_NS = 5_000_000_000  # reads on for so long: short leases follow each other
_BEHIND_NS = 100_000_000  # what a GPU says of its use is about the time before
_UNREAD = Reading()


class GpuUsage(NamedTuple):
    """What a lease used; -1: not known. `util_pct`: the mean of its GPUs over its time;
    `max_mem_mib`: the most that was taken on all of them, by whomever; `energy_mj`: estimated."""

    util_pct: int = -1
    max_mem_mib: int = -1
    energy_mj: int = -1


@dataclass
class _Gpu:
    """One device: its last reading, what it draws as far as is known, and who holds it."""

    uuid: str
    read: Reading = _UNREAD
    read_ns: int = 0
    power_mw: float = -1.0
    told_ns: int = 0  # up to here its energy is dealt out
    holders: dict[int, _Lease] = field(default_factory=dict)

    def deal(self, now: int) -> None:
        """Gives those that hold it their parts of what it drew since."""
        span_s, self.told_ns = (now - self.told_ns) / 1e9, now
        for lease in self.holders.values() if self.power_mw >= 0 else ():
            lease.add(self.uuid, self.power_mw * span_s / len(self.holders))

    def renew(self, read: Reading, now: int) -> None:
        """A new reading: its counter says what the time since the last one really took."""
        before, since_s = self.read, (now - self.read_ns) / 1e9
        counted = -1.0
        if min(before.energy_mj, read.energy_mj) >= 0 and since_s > 0:
            counted = max(0, read.energy_mj - before.energy_mj) / since_s
        if self.power_mw < 0:
            self.power_mw = counted  # it tells no power, or did not yet
        self.deal(now)
        for lease in self.holders.values():
            lease.settle(self.uuid, counted / self.power_mw
                         if counted >= 0 and self.power_mw > 0 else 1.0)
        self.power_mw = float(read.power_mw) if read.power_mw >= 0 else counted
        self.read, self.read_ns = read, now


@dataclass
class _Lease:
    """What is known of one lease so far. `guessed`: by device, since its last reading."""

    gpus: list[_Gpu]
    began_ns: int
    settled_mj: float = 0.0
    guessed: dict[str, float] = field(default_factory=dict)
    known: bool = False
    mem_mib: int = -1
    utils: list[float] = field(default_factory=list)

    def add(self, gpu: str, energy_mj: float) -> None:
        """Its part of what a device drew, by the power last known."""
        self.known = True
        self.guessed[gpu] = self.guessed.get(gpu, 0.0) + energy_mj

    def settle(self, gpu: str, factor: float) -> None:
        """That was a guess; by the counter it was `factor` times as much."""
        self.settled_mj += self.guessed.pop(gpu, 0.0) * factor

    def look(self, now: int) -> None:
        """All of its GPUs have just been read."""
        used = [g.read.used_mib for g in self.gpus]
        if min(used) >= 0:
            self.mem_mib = max(self.mem_mib, sum(used))
        rates = [g.read.util_pct for g in self.gpus]
        if min(rates) >= 0 and now - self.began_ns >= _BEHIND_NS:
            self.utils.append(sum(rates) / len(rates))

    def usage(self) -> GpuUsage:
        """What is known at its end."""
        energy = self.settled_mj + sum(self.guessed.values())
        return GpuUsage(round(sum(self.utils) / len(self.utils)) if self.utils else -1,
                        self.mem_mib, round(energy) if self.known else -1)


class Tally:
    """The sums alone: no thread, no clock. Times are ns of one clock, in order."""

    def __init__(self, uuids: Iterable[str]) -> None:
        self.gpus = {uuid: _Gpu(uuid) for uuid in uuids}
        self.leases: dict[int, _Lease] = {}

    def begin(self, token: int, uuids: Iterable[str], now: int) -> None:
        """A lease on these devices begins."""
        lease = self.leases[token] = _Lease([self.gpus[uuid] for uuid in uuids], now)
        for gpu in lease.gpus:
            gpu.deal(now)
            gpu.holders[token] = lease

    def end(self, token: int, now: int) -> GpuUsage:
        """It ended; what it used. A token that is not known, or ended before: nothing known."""
        lease = self.leases.pop(token, None)
        for gpu in lease.gpus if lease is not None else ():
            gpu.deal(now)
            del gpu.holders[token]
        return lease.usage() if lease is not None else GpuUsage()

    def renew(self, readings: Mapping[str, Reading], now: int) -> None:
        """All devices have been read."""
        for uuid, reading in readings.items():
            self.gpus[uuid].renew(reading, now)
        for lease in self.leases.values():
            lease.look(now)


class GpuMeter:
    """Measures leases on the devices of one node. `begin` and `end` cost microseconds, from any
    thread.

    Args:
        devices: what the node lends.
        read: how a device is read, by its UUID; None: NVML.
    """

    def __init__(self, devices: Devices, read: Callable[[str], Reading] | None = None) -> None:
        self.devices = devices
        self._uuids = {d.index: d.uuid for d in devices.devices if d.uuid}
        self._read = read
        self._tally = Tally(self._uuids.values())
        self._tokens = 0
        self._idle_since = 0
        self._closed = not self._uuids
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None

    def begin(self, block: Sequence[int]) -> int:
        """A lease on these lent numbers begins; the token to end it with, 0 when nothing can be
        measured."""
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
        """The lease ended; what it used. Nothing is known of 0, nor of a token twice."""
        with self._change:
            self._idle_since = time.monotonic_ns()
            return self._tally.end(token, self._idle_since)

    def measured(self, token: int, outcome: Outcome) -> Outcome:
        """Ends the lease; its outcome with what it used."""
        if not token:
            return outcome
        util, mem, energy = self.end(token)
        return msgspec.structs.replace(outcome, gpu_util_pct=util, gpu_max_mem_mib=mem,
                                       energy_mj=energy)

    def close(self) -> None:
        """Ends the thread; what is measured now stays unknown."""
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
            if nvml is None:  # it was there when the node began
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
        """Waits while nobody has held a device for a while; False: it is over."""
        with self._change:
            if time.monotonic_ns() - self._idle_since > _LINGER_NS:
                self._change.wait_for(lambda: self._closed or bool(self._tally.leases))
            return not self._closed
