"""Plays one seed under one placer: what happens is drawn, and then everything comes to its end."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from chatter.client import Client
from chatter.job import GRACE_S, JOB, ChatterJob, S
from chatter.slurm import PlayedSlurm, Satellite
from chatter.worker import Worker
from tangram_hpc.broker import client_outbox
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.states import ENDED
from tangram_hpc.protocol import message as ms
from tangram_hpc.scheduler.policy.admission import reason

PLACERS = ("elastic", "elastic:0", "elastic:4", "paper", "first-fit", "fcfs:2", "fcfs:64",
           "static:1", "static:2")
KINDS = ("cpu", "call", "turn", "grant", "endpoint")
FAULTS = ("client_bye", "client_lost", "client_back", "worker_lost", "worker_leaves", "restart",
          "restart_for_good", "restart_elsewhere", "checkpoint", "compare", "wild", "node_more",
          "long_pause", "suspended", "late_peer", "slow", "reads_again")
ROUNDS = 400


@dataclass
class Played:
    """How a run ended.

    Attributes:
        law: what failed and where; empty if nothing did.
        text: the end of the traceback.
        said: the faults that struck, and when.
        events: how many events the journal has.
    """

    seed: int
    placer: str
    law: str = ""
    text: str = ""
    said: list[str] = field(default_factory=list)
    events: int = 0


class Run(ChatterJob):
    """The job with its people."""

    def __init__(self, seed: int, placer: str, checks: bool = False) -> None:
        played = PlayedSlurm()
        super().__init__(seed, placer, played, checks)
        rng, played.run = self.rng, self
        self.kinds = [k for k in KINDS if rng.random() < 0.6] or ["cpu"]
        self.rates = {k: rng.choice((0.001, 0.004, 0.015)) for k in FAULTS if rng.random() < 0.4}
        self.steps = rng.choice(((0.0, 0.001, 0.02, 0.3), (0.02, 0.3, 1.0)))
        self.ahead, self.names = rng.choice((0, 2, 4, 8)), 0
        self.workers = [self.worker() for _ in range(rng.choice((1, 2, 2)))]
        self.clients = [self.client() for _ in range(rng.choice((1, 2, 3)))]

    def worker(self, last: bool = False) -> Worker:
        """Lets a node join."""
        rng, self.names = self.rng, self.names + 1
        ends = rng.random() < 0.2 and not last
        spec = NodeSpec(
            f"w{self.names}", "host", tuple(range(8 if last else rng.choice((2, 4, 8)))), 2000,
            tuple(range(8 if last else rng.choice((0, 2, 4, 8)))),
            "big" if last or rng.random() < 0.5 else "", backends=("model",),
            untrusted=("model",), ahead=self.ahead,
            ends_at_ns=self._end() if ends else 0,
            allocation=JOB if ends and rng.random() < 0.7 else "")
        return Worker(self, spec.name, spec)

    def _end(self) -> int:
        played = self.slurm
        if played.ends_at_ns <= self.now:
            played.ends_at_ns = self.now + self.rng.choice((3, 8)) * S
        return played.ends_at_ns

    def satellite(self, one: Satellite) -> None:
        """Lets the worker of a satellite join."""
        shape = one.shape
        self.names += 1
        spec = NodeSpec(
            f"w{self.names}", "host", tuple(range(shape.cpus)), shape.mem_mib,
            tuple(range(shape.gpus)), shape.component, backends=("model",),
            untrusted=("model",), ahead=self.ahead, ends_at_ns=one.end_ns,
            allocation=str(one.job))
        self.workers.append(Worker(self, spec.name, spec))

    def client(self) -> Client:
        """Lets a client join."""
        self.names += 1
        return Client(self, f"c{self.names}")

    # ---- turns ----

    def turn(self) -> None:
        """One thing that happens."""
        rng = self.rng
        for fault, rate in self.rates.items():
            if rng.random() < rate:
                self.said.append(f"{self.now / S:.3f} {fault}")
                getattr(self, fault)()
        chance = rng.random()
        if chance < 0.45:
            rng.choice(self.workers).act()
        elif chance < 0.85:
            client = rng.choice(self.clients)
            if client.connected:
                client.act()
        else:
            self.run(rng.choice(self.steps))
        if rng.random() < 0.03:
            self.slurm.act()
        self._replace_workers()
        self._replace_clients()

    def _replace_workers(self) -> None:
        """Lets another node join for each that is gone, but for satellites."""
        kept = [w for w in self.workers if not (w.gone and w.is_satellite)]
        self.workers = [self.worker() if w.gone else w for w in kept] or [self.worker()]

    def _replace_clients(self) -> None:
        for n, client in enumerate(self.clients):
            if self._is_over(client):
                self.clients[n] = self.client()

    def _is_over(self, client: Client) -> bool:
        if client.gone:
            client.leave(False)
        return client.gone

    def client_bye(self) -> None:
        """A client closes."""
        self.rng.choice(self.clients).leave(True)

    def client_lost(self) -> None:
        """A client's connection breaks."""
        self.rng.choice(self.clients).leave(False)

    def client_back(self) -> None:
        """Clients without a connection come back, or others come in their place."""
        for n, client in enumerate(self.clients):
            if not client.connected:
                if self.rng.random() < 0.8:
                    client.join()
                else:
                    client.leave(False)
                    self.clients[n] = self.client()

    def late_peer(self) -> None:
        """A client connects again while its earlier connection is there."""
        self.rng.choice(self.clients).join()

    def worker_lost(self) -> None:
        """A node is lost."""
        self.rng.choice(self.workers).lose()

    def worker_leaves(self) -> None:
        """A worker says that it leaves."""
        self.rng.choice(self.workers).say(ms.Leaving("it leaves"))

    def wild(self) -> None:
        """A worker reports what no good worker does; then it ends."""
        worker = self.rng.choice(self.workers)
        for _ in range(3):
            worker.wild()
        worker.lose()

    def node_more(self) -> None:
        """One more node joins."""
        if len(self.workers) < 4:
            self.workers.append(self.worker())

    def long_pause(self) -> None:
        """Time passes, in which nobody does anything."""
        self.run(self.rng.choice((1.0, GRACE_S + 1)))

    def restart(self, rejoin_s: float = GRACE_S, down_s: float = 0.5) -> None:
        """The broker is killed; its peers find the next one, some of them too late."""
        for peer in (*self.workers, *self.clients):
            if peer.link is not None:
                peer.link.closed = True
                if self.rng.random() < 0.7:
                    peer.hear() if isinstance(peer, Client) else None
        super().restart(rejoin_s, down_s)
        for worker in self.workers:
            if self.rng.random() < 0.8:
                worker.join()
            else:
                worker.gone = True
        for client in self.clients:
            if self.rng.random() < 0.8:
                client.join()

    def restart_for_good(self) -> None:
        """The next broker waits for nobody."""
        self.restart(0.0, 50.0)

    def restart_elsewhere(self) -> None:
        """The next broker is on a machine whose clock is behind."""
        self.restart(GRACE_S, -2.0)

    def suspended(self) -> None:
        """The whole job is suspended."""
        self.stall(self.rng.choice((5.0, 100.0)))

    def slow(self) -> None:
        """A client does not read what arrives."""
        client = self.rng.choice(self.clients)
        if client.link is not None:
            client.link.slow = True

    def reads_again(self) -> None:
        """All clients read what arrives."""
        for client in self.clients:
            if client.link is not None and client.link.slow:
                client.link.go_on()

    # ---- the end ----

    def come_to_the_end(self) -> None:
        """Lets all work end, then checks that nothing is left."""
        self.rates.clear()
        self.reads_again()
        self.slurm.ends_at_ns = 0
        for client in self.clients:
            if not client.connected and not client.gone:
                client.join()
        self._replace_clients()
        self.workers.append(self.worker(last=True))
        for turn in range(ROUNDS):
            self._round(close=turn > ROUNDS // 2)
            if not any(c.open or c.environments.asked for c in self.clients if c.connected) and (
                    not self.ledger.ready):
                break
        else:
            raise AssertionError(f"stuck: {self._waiting()}")
        for client in self.clients:
            client.leave(True)
        for _ in range(ROUNDS):
            self._round(close=True)
            if not (self.ledger.by_uid or self.ledger.leases or self.ledger.sessions):
                break
        self._nothing_is_left()
        self.compare()

    def _round(self, close: bool) -> None:
        self.clients = [client for client in self.clients if not self._is_over(client)]
        for worker in list(self.workers):
            worker.come_to_the_end()
            if worker.gone:
                self.workers.remove(worker)
        for client in self.clients:
            if client.connected:
                client.come_to_the_end(close)
        due = self.scheduler.next_deadline()
        self.run(min(max((due - self.now) / S, 0.05), 2.0) + 0.002 if due else 0.1)

    def _waiting(self) -> list[str]:
        ledger, reserve = self.ledger, self.scheduler.state.placer.reserve
        known = [e for e in ledger.actions.values() if e.state not in ENDED]
        lines = [f"{e.state} {reason(ledger, e, reserve, self.now) if not e.lease else ''} "
                 f"withheld={e.withheld} {e.action}" for e in known]
        lost = [f"unknown {a}" for c in self.clients if c.connected
                for n, a in c.open.items() if n not in ledger.actions]
        asked = [f"not answered {c.environments.asked}" for c in self.clients
                 if c.environments.asked]
        return [*lines, *lost, *asked][:4]

    def _nothing_is_left(self) -> None:
        ledger, broker = self.ledger, self.broker
        left: dict[str, Any] = {name: getattr(ledger, name) for name in (
            "actions", "leases", "sessions", "disconnected", "by_uid", "clients", "background",
            "short", "batching", "prefetched", "once", "ownerless", "shared")}
        left |= {"payloads": broker._payloads, "leaders": broker._keys._leader,
                 "spilled": self.spill.kept, "results": broker._outbox._kept,
                 "builds": [e for e in broker._snapshots._environments.values() if e.builder],
                 "followers": broker._keys._followers, "named": broker._keys._open}
        left |= {f"turns of {p.spec.name}": p.open_turns for p in ledger.rollouts.values()}
        for what, found in left.items():
            assert not found, f"left over: {what}: {str(found)[:600]}"
        for node in ledger.up_nodes():
            assert node.cores.free == len(node.spec.cores), f"cores of {node}"
            assert node.gpus.free == len(node.spec.gpus), f"gpus of {node}"
            assert node.free_mem_mib == node.spec.mem_mib and not node.wide, f"{node}"


def play(seed: int, placer: str, turns: int = 0, checks: bool = False) -> Played:
    """Plays one seed; an error of the product, or a law that does not hold, is in the answer."""
    found = Played(seed, placer)
    job: Run | None = None
    try:
        with mock.patch.object(client_outbox, "KEPT_MAX", 100):
            job = Run(seed, placer, checks)
            for _ in range(turns or job.rng.choice((100, 300, 600))):
                job.turn()
            job.come_to_the_end()
    except Exception as error:  # noqa: BLE001 - any error in the product ends the seed
        frames = traceback.extract_tb(error.__traceback__)
        last = next((f for f in reversed(frames) if "tangram_hpc" in f.filename), frames[-1])
        found.law = f"{type(error).__name__} {last.filename.rsplit('/', 1)[-1]}:{last.name}"
        found.text = "".join(traceback.format_exception(error)[-8:])
    if job is not None:
        found.said, found.events = job.said, len(job.journal.events)
    return found
