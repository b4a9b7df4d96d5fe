"""One broker of a job, its clock and timers, its restarts, and the laws that hold at any time."""

from __future__ import annotations

import io
import random
from collections.abc import Iterable
from typing import Any

import msgspec
from helpers.broker_rig import MemoryJournal
from helpers.hand_clock import HandClock
from helpers.ledger_facts import difference, facts

from tangram_hpc.broker.driver import Broker, Settings
from tangram_hpc.broker.satellites import SatelliteScripts
from tangram_hpc.domain.event import AnyEvent
from tangram_hpc.domain.rollouts import RolloutService, RolloutsSpec
from tangram_hpc.domain.service import EndpointSpec, ServiceSpec
from tangram_hpc.domain.tenant import TenantSpec
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.scheduler import Scheduler
from tangram_hpc.scheduler.state.ledger import ActionEntry, Ledger
from tangram_hpc.storage import checkpoint

S = 10**9
JOB = "7"
GRACE_S = 5.0
SERVICES = (ServiceSpec("s", S // 5, backend="played", batch=3),
            ServiceSpec("t", S // 5, backend="played", degrees=(1, 2), weights_mib=20, batch=2),
            ServiceSpec("u", S // 10, backend="played", degrees=(2, 4), stay_ns=S))
ENDPOINTS = (EndpointSpec("e", 2, 20_000_000, 4_000_000), EndpointSpec("f", 1))
POOL = RolloutsSpec("p", (100,), tuple(
    RolloutService(name, bucket, degree, 2, 2, 100_000, 10**7, 10**5, 10**4)
    for name, bucket, degree in (("s", 0, 1), ("t", 1, 2))))
POOLS = (POOL, msgspec.structs.replace(POOL, edges=(1000,)),
         msgspec.structs.replace(POOL, edges=(), services=POOL.services[:1]))
# how often a client does each of the things of `Client.act`
WEIGHTS = ((50, 8, 8, 6, 6, 10, 6, 2, 2, 2), (15, 30, 3, 5, 8, 2, 2, 20, 15, 5))
NO_CHECKPOINT: tuple[int, tuple[bytes, bytes] | None] = 0, None
TENANTS = (TenantSpec("default", 2), TenantSpec("a", 1, 5, (("cpu", 4), ("mem", 800))),
           TenantSpec("b", 3, 0, (("gpu", 2),)))


class MemorySpool:
    """A spool (`ports.Spool`) that outlives the broker."""

    def __init__(self) -> None:
        self.calls: dict[str, tuple[bytes, int]] = {}
        self.results: dict[str, tuple[Any, bytes | None, str]] = {}

    def keep_call(self, once: str, payload: Any, action: int) -> bool:
        self.calls[once] = bytes(payload), action
        return True

    def keep_result(self, once: str, result: Any, payload: Any, work: str) -> None:
        self.calls.pop(once, None)
        self.results[once] = result, None if payload is None else bytes(payload), work

    def call(self, once: str, action: int) -> bytes | None:
        payload, owner = self.calls.get(once, (None, 0))
        return payload if owner == action else None

    def result(self, once: str) -> tuple[Any, bytes | None, str] | None:
        return self.results.get(once)

    def has_result(self, once: str) -> bool:
        return once in self.results

    def names(self) -> list[str]:
        return [*self.calls, *self.results]

    def drop(self, names: Iterable[str]) -> None:
        for name in names:
            self.calls.pop(name, None)
            self.results.pop(name, None)

    def commit(self) -> None:
        pass


class MemorySpill:
    """Files for payloads of clients that do not read (`ports.SpillFiles`); a disk that is full now
    and then."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._data: dict[int, bytearray] = {}
        self.kept: dict[int, int] = {}  # by client: how many payloads it needs

    def put(self, client: int, data: Any) -> int:
        if self._rng.random() < 0.1:
            return -1
        found = self._data.setdefault(client, bytearray())
        self.kept[client] = self.kept.get(client, 0) + 1
        found += data
        return len(found) - len(data)

    def get(self, client: int, offset: int, size: int) -> bytes:
        assert self.kept[client]
        return bytes(self._data[client][offset:offset + size])

    def free(self, client: int) -> None:
        self.kept[client] -= 1
        if not self.kept[client]:
            self.drop(client)

    def drop(self, client: int) -> None:
        self._data.pop(client, None)
        self.kept.pop(client, None)


class ChatterJob(HandClock):
    """The job of one seed.

    Attributes:
        rng: draws everything.
        now: the clock of all, in ns.
        broker: the start that serves.
        journal: the events of all starts.
        spill: results that clients do not read; they end with a start.
        checks: whether the ledger is checked after every message.
        said: what happened, for a person.
    """

    def __init__(self, seed: int, placer: str, slurm: Any, checks: bool = False) -> None:
        self.rng, self.placer, self.checks = random.Random(f"{seed} {placer}"), placer, checks
        super().__init__()
        self.journal, self.spool = MemoryJournal(), MemorySpool()
        self.snapshots: list[str] = []  # all that were ever taken
        self.slurm, self.said = slurm, list[str]()
        self._kept = NO_CHECKPOINT
        self.weights = self.rng.choice(WEIGHTS)
        self.snapshot_rate = self.rng.choice((0.1, 0.7))
        self.gap_s = self.rng.choice((0.0, 0.005))
        self.margin_ns = self.rng.choice((0, 2 * S))
        self.tenants = self.rng.choice(((), TENANTS))
        self.policy, self.pool = slurm.policy(self.rng), POOL
        self.start(Scheduler(make_placer(placer), self.margin_ns), 0.0, 0.0)

    @property
    def ledger(self) -> Any:
        """The ledger of the broker that serves."""
        return self.scheduler.ledger

    def check(self) -> None:
        if self.checks or self._count % 16 == 0:
            self.ledger.check()

    # ---- starts ----

    def start(self, scheduler: Scheduler, rejoin_s: float, down_s: float) -> None:
        """Starts a broker that goes on with what a scheduler knows."""
        self.scheduler = scheduler
        self._timers.clear()
        self.spill = MemorySpill(self.rng)
        settings = Settings(
            JOB, "/nowhere", 2, GRACE_S, join_s=3.0, services=SERVICES, endpoints=ENDPOINTS,
            rollouts=(self.pool,), tenants=self.tenants, gap_s=self.gap_s, policy=self.policy,
            slurm_query_s=0.5,
            rejoin_s=rejoin_s, down_s=down_s)
        self.broker = Broker(scheduler, self.journal, self, self, settings, lambda: None,
                             self.spool, self.slurm,  # type: ignore[arg-type]
                             SatelliteScripts({"cpu": "cpu", "gpu": "gpu"}), None, self.spill)
        self.broker.start()
        self.settle()

    def checkpoint(self) -> None:
        """Keeps the ledger as a broker does now and then."""
        self._kept = len(self.journal.events), checkpoint._kept(self.ledger)

    def _resumed(self) -> Scheduler:
        """A scheduler that begins with the last checkpoint and has handled the events since."""
        found = Scheduler(make_placer(self.placer), self.margin_ns)
        at, kept = self._kept
        if kept is not None:
            ledger: Ledger = checkpoint._LedgerUnpickler(io.BytesIO(kept[1])).load()
            ledger.actions = msgspec.msgpack.decode(kept[0], type=dict[int, ActionEntry])
            found.resume(ledger)
        written = msgspec.msgpack.encode(self.journal.events[at:])
        for event in msgspec.msgpack.decode(written, type=list[AnyEvent]):
            found.handle(event)
        found.ledger.check()
        return found

    def compare(self) -> Scheduler:
        """Checks that the journal gives the ledger of the running broker, from its beginning and
        from the last checkpoint, and returns one of both.
        """
        running, resumed = facts(self.ledger), self._resumed()
        assert not (where := difference(facts(resumed.ledger), running)), f"a checkpoint: {where}"
        kept, self._kept = self._kept, NO_CHECKPOINT
        replayed = self._resumed()
        assert not (where := difference(facts(replayed.ledger), running)), f"a replay: {where}"
        self._kept = kept
        return self.rng.choice((replayed, resumed))

    def restart(self, rejoin_s: float, down_s: float) -> None:
        """Kills the broker and starts the next one."""
        scheduler = self.compare()
        self.now += int(down_s * S)
        if self.rng.random() < 0.2:  # somebody has changed the config file
            self.pool = self.rng.choice(POOLS)
            self.tenants = self.tenants and tuple(
                msgspec.structs.replace(each, shares=self.rng.choice((1, 2, 5)),
                                        priority=self.rng.choice((0, 3)))
                for each in self.tenants)
        self.start(scheduler, rejoin_s, down_s)
