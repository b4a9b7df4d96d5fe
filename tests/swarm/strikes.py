"""What the faults do, each as one function of the job."""

from __future__ import annotations

import os
from collections.abc import Callable

from swarm.broker import BrokerProcess
from swarm.job import LONG_S, Job
from swarm.world import S


def _serving(job: Job) -> BrokerProcess | None:
    found = job.serving
    return found if found is not None and found.running() else None


def kill_broker(job: Job) -> None:
    """Kills the broker between two steps, also one that is just starting."""
    living = [broker for broker in job.brokers if broker.alive]
    if living:
        job.kill_broker(living[-1], "killed")


def kill_at_write(job: Job) -> None:
    """Kills the broker before, within or after its next write."""
    job.disk.armed = job.stream("kill_at_write").choice(("before", "within", "after"))


def disk_error(job: Job) -> None:
    """Lets the next write fail."""
    job.disk.armed = job.stream("disk_error").choice(("ENOSPC", "EIO"))


def supersede(job: Job) -> None:
    """Stops the broker on a host that the next one cannot see; that one waits, and takes over."""
    broker, rng = _serving(job), job.stream("supersede")
    if broker is None:
        return
    silent_s, more_s = 10.5, rng.choice((0.0, 0.2, 5.0))
    broker.stopped_until = job.now + int((silent_s + more_s) * S)
    job.last_sign = job.now + job.wall_ns
    job.note(f"{broker.name} stands still and is superseded")
    job.supervisor.after(silent_s, job.start_broker)


def supersede_at_write(job: Job) -> None:
    """Lets another broker take over between the check and the write of this one."""
    if _serving(job) is not None:
        job.disk.armed = "supersede"


def pause_broker(job: Job) -> None:
    """Stops the broker for a while."""
    broker = _serving(job)
    if broker is not None:
        for_s = job.stream("pause_broker").choice((1.0, 4.0, 15.0, 31.0, 60.0))
        broker.stopped_until = job.now + int(for_s * S)
        job.note(f"{broker.name} stands still for {for_s} s")


def bit_flip(job: Job) -> None:
    """Kills the broker and lets one bit flip before the next one starts."""
    job.flip_next = True
    kill_broker(job)


def power(job: Job) -> None:
    """Lets the broker's machine fail: of what was not synced a random part is lost."""
    broker, rng = _serving(job), job.stream("power")
    if broker is None or len(job.brokers) > 1:
        return
    job.kill_broker(broker, "fails with its machine")
    assert broker.journal is not None and broker.spool is not None
    for path in (broker.journal.path, broker.spool._path(broker.spool._number)):
        real = os.path.realpath(path)
        size = os.path.getsize(real)
        synced = job.disk.synced.get(real, 0)
        if synced < size:
            os.truncate(real, rng.randint(synced, size))


def requeue(job: Job) -> None:
    """Ends the whole job; Slurm starts it again."""
    job.note("the job is requeued")
    job.restarts += 1
    job.blame_all()
    for broker in list(job.brokers):
        job.kill_broker(broker, "ends with its job")
    for worker in list(job.workers):
        job.replace_worker(worker)
    for client in list(job.clients):
        job.replace_client(client)


def long_absence(job: Job) -> None:
    """Kills the broker; the next one comes after the grace."""
    broker = _serving(job)
    if broker is not None:
        job.blame_all()
        job.note("nobody starts a broker for a long time")
        job._starting = True
        job.kill_broker(broker, "killed")
        job.supervisor.after(50.0, job.start_broker)


def wall_clock(job: Job) -> None:
    """Lets the wall clock of the broker's machine jump."""
    job.wall_ns += job.stream("wall_clock").choice((-3600, -5, 2, 5, 20)) * S
    job.note("the wall clock jumps")


def cut_worker(job: Job) -> None:
    """Breaks the connection of a worker; both sides learn of it, each in its time."""
    worker = job.stream("cut_worker").choice(job.workers)
    if worker.alive and worker.wire is not None:
        job.blame(worker)
        job.note(f"the connection of {worker.name} breaks")
        worker.wire.cut("cut")


def cut_client(job: Job) -> None:
    """Breaks the connection of a client."""
    client = job.stream("cut_client").choice(job.clients)
    if client.wire is not None:
        job.note(f"the connection of {client.name} breaks")
        client.wire.cut("cut")


def delay(job: Job) -> None:
    """Lets one connection carry nothing for a while."""
    rng = job.stream("delay")
    if job.wires:
        rng.choice(job.wires).held_until = job.now + int(rng.choice((0.05, 1.0, 6.0)) * S)


def partition_worker(job: Job) -> None:
    """Cuts a worker off from its broker for a while."""
    worker = job.stream("partition_worker").choice(job.workers)
    for_s = job.stream("partition_worker").choice((2.0, 10.0, 28.0, 45.0))
    if for_s >= LONG_S:
        job.blame(worker)
    _partition(job, worker, for_s)


def partition_client(job: Job) -> None:
    """Cuts a client off from its broker for a while."""
    client = job.stream("partition_client").choice(job.clients)
    for_s = job.stream("partition_client").choice((2.0, 10.0, 28.0, 45.0, 70.0))
    if for_s >= LONG_S:
        client.may_lose = True
    _partition(job, client, for_s)


def _partition(job: Job, peer: object, for_s: float) -> None:
    """Holds a peer's connection; one that is held for longer than 30 s ends at the peer, and at the
    broker when the network is whole again.
    """
    until = job.now + int(for_s * S)
    peer.shut_until = until  # type: ignore[attr-defined]
    wire = peer.wire  # type: ignore[attr-defined]
    job.note(f"{peer.name} is cut off for {for_s} s")  # type: ignore[attr-defined]
    if wire is None:
        return
    wire.held_until = until
    if for_s > 30:
        def given_up() -> None:
            wire.cut("silent for 30 s")
            if wire.down.items:
                wire.down.items.clear()
                wire.down.deaf = True
                wire.down.lost("silent for 30 s")
        peer.after(30.0, given_up)  # type: ignore[attr-defined]


def pause_worker(job: Job) -> None:
    """Stops a worker for a while."""
    rng = job.stream("pause_worker")
    worker, for_s = rng.choice(job.workers), rng.choice((1.0, 10.0, 40.0))
    if for_s >= LONG_S:
        job.blame(worker)
    worker.stopped_until = job.now + int(for_s * S)
    job.note(f"{worker.name} stands still for {for_s} s")


def pause_client(job: Job) -> None:
    """Stops a client for a while."""
    rng = job.stream("pause_client")
    client, for_s = rng.choice(job.clients), rng.choice((1.0, 10.0, 40.0))
    if for_s >= LONG_S:
        client.may_lose = True
    client.stopped_until = job.now + int(for_s * S)
    job.note(f"{client.name} stands still for {for_s} s")


def kill_worker(job: Job) -> None:
    """Kills a worker; its node comes back as a new one."""
    worker = job.stream("kill_worker").choice(job.workers)
    job.note(f"{worker.name} is killed")
    job.blame(worker)
    job.replace_worker(worker)


def kill_client(job: Job) -> None:
    """Kills a client; another one comes in its place."""
    client = job.stream("kill_client").choice(job.clients)
    job.note(f"{client.name} is killed")
    job.replace_client(client)


def drain_node(job: Job) -> None:
    """Lets a worker leave in order."""
    worker = job.stream("drain_node").choice(job.workers)
    if worker.driver is not None and not worker.driver.over and worker.running():
        job.note(f"{worker.name} leaves")
        job.blame(worker)
        job.do(worker, lambda: worker.driver.leave("it left"))  # type: ignore[union-attr]


STRIKES: dict[str, Callable[[Job], None]] = {
    strike.__name__: strike for strike in (
        kill_broker, kill_at_write, supersede, supersede_at_write, pause_broker, disk_error,
        bit_flip, power, requeue, long_absence, wall_clock, cut_worker, cut_client, delay,
        partition_worker, partition_client, pause_worker, pause_client, kill_worker, kill_client,
        drain_node)}
