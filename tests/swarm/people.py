"""What happens in a job by itself: users submit and change their minds, and work ends."""

from __future__ import annotations

from swarm.client import ClientProcess
from swarm.job import Job
from swarm.laws import LawBroken
from swarm.world import S
from tangram_hpc.domain.action import Kind
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.states import ActionState
from tangram_hpc.errors import TangramError

_END_S = 600  # so long, in the world's time, everything may take to come to its end


def all_are_there(job: Job) -> None:
    """Lets the job begin."""
    for _ in range(2000):
        if all(client.works for client in job.clients) and job.serving is not None \
                and job.ledger().up_nodes():
            return
        if not job.step():
            job.pass_time()
    raise LawBroken("a job begins", "nobody is there")


def act(job: Job) -> None:
    """One thing that happens by itself."""
    rng = job.acts
    client = rng.choice(job.clients)
    if rng.random() < 0.5:
        worker = rng.choice(job.workers)
        choices = worker.executor.choices() if worker.executor is not None and worker.running() \
            else []
        if choices:
            job.do(worker, rng.choice(choices))
    elif client.works:
        job.do(client, lambda: _user_acts(job, client))
    elif client.failed:
        job.note(f"{client.name} is replaced: {client.failed[:80]}")
        job.replace_client(client)


def _user_acts(job: Job, client: ClientProcess) -> None:
    rng = job.acts
    chance = rng.random()
    waiting = client.open_ones()
    try:
        if chance < 0.5 and len(waiting) < 25:
            _submit(job, client)
        elif chance < 0.58:
            _open_session(job, client)
        elif chance < 0.64 and waiting:
            client.cancel(rng.choice(waiting))
        elif chance < 0.69 and (open_now := _open_sessions(client)):
            client.release(rng.choice(open_now))
        elif chance < 0.72:
            _forget(job, client)
        elif chance < 0.78:
            client.ask_grant(f"g{next(job.counter)}")
        elif granted := client.granted():
            client.take_grant(rng.choice(granted))
        elif calling := [one for one in client.submissions if one.calling]:
            client.end_grant(rng.choice(calling), rng.choice(
                (ActionState.COMPLETED, ActionState.COMPLETED, ActionState.FAILED)))
    except TangramError:
        if client.works:
            raise


def _submit(job: Job, client: ClientProcess) -> None:
    rng = job.acts
    token, retries = f"a{next(job.counter)}", rng.choice((0, 1, 2))
    cpus = rng.choice((1, 1, 2, 4, [1, 2, 4]))
    kind = rng.choice((Kind.EXEC, Kind.EXEC, Kind.FUNCTION, Kind.CALL))
    sessions = _open_sessions(client)
    if kind is Kind.CALL:
        service, once = rng.choice("st"), _name(job, kind) if rng.random() < 0.2 else ""
        if once:  # a name is of one service's call
            service = "st"[int(once.removeprefix(kind.value)) % 2]
        client.submit(kind, token, 1, retries, key=f"service:{service}", once=once)
    elif sessions and rng.random() < 0.5:
        client.submit(kind, token, cpus, retries, session=rng.choice(sessions))
    else:
        once = _name(job, kind) if rng.random() < 0.35 else ""
        client.submit(kind, token, cpus, retries, once=once)


def _name(job: Job, kind: Kind) -> str:
    """A name of work, which somebody may have used already for work of this kind."""
    return f"{kind.value}{job.acts.randrange(20)}"


def _open_sessions(client: ClientProcess) -> list[int]:
    return [number for number, session in client.sessions.items()
            if not session.released and not session.record.why_ended]


def _open_session(job: Job, client: ClientProcess) -> None:
    rng = job.acts
    if len(_open_sessions(client)) >= 4:
        return
    client.open_session(SessionSpec(
        0, mem_mib=rng.choice((10, 10, 500)), parallel=rng.random() < 0.3,
        idle_ns=0, movable=rng.random() < 0.3))
    number = next(reversed(client.sessions))
    session = client.sessions[number]
    job.sessions_opened[number] = session.record.spec
    job.sessions_of_users[number] = session


def _forget(job: Job, client: ClientProcess) -> None:
    names = (_name(job, job.acts.choice((Kind.EXEC, Kind.CALL))),)
    job.laws.forgotten.update(names)
    client.forget(names)


def come_to_the_end(job: Job) -> None:
    """Ends all faults, and lets everything that is open end: work, sessions, then clients."""
    job.faulty, job.disk.armed, job.flip_next = False, "", False
    if job.slurm.ends_at_ns:
        job.slurm.ends_at_ns += 10_000 * S
    for process in job.processes:
        process.stopped_until = min(process.stopped_until, job.now)
        if hasattr(process, "shut_until"):
            process.shut_until = job.now
    for wire in job.wires:
        wire.held_until = min(wire.held_until, job.now)
    for client in list(job.clients):
        if client.failed:
            job.replace_client(client)
    _until(job, lambda: job.serving is not None and all(
        client.works and not client.open_ones() for client in job.clients))
    for client in job.clients:
        for number in _open_sessions(client):
            if client.works:
                job.do(client, lambda client=client, number=number: client.release(number))
    _until(job, lambda: not any(
        not session.record.closed.done() for client in job.clients
        for session in client.sessions.values()))
    _until(job, lambda: _nothing_is_left(job))


def _nothing_is_left(job: Job) -> bool:
    """Whether the graces of those that are gone have ended, and all confirmations have arrived. A
    worker whose node was given up hears of it when it can connect again.
    """
    ledger = job.ledger()
    left = (ledger.actions, ledger.sessions, ledger.leases, ledger.disconnected, ledger.away)
    return not any(left) and not any(
        worker.driver is not None and worker.executor is not None and (
            worker.driver._kept.results or worker.executor.sandboxes) for worker in job.workers)


def _until(job: Job, met: object) -> None:
    end = job.now + _END_S * S
    while job.now < end:
        while job.step():  # the last events go to the journal
            pass
        if met():  # type: ignore[operator]
            return
        work_goes_on(job)
        if not job.step():
            job.pass_time()


def work_goes_on(job: Job) -> None:
    """Lets all that runs end, and all grants be used."""
    for worker in list(job.workers):
        if worker.executor is not None and worker.running():
            for _ in range(100):
                choices = worker.executor.choices()
                if not choices:
                    break
                job.do(worker, choices[0])
    for client in job.clients:
        if client.works:
            for one in client.granted():
                job.do(client, lambda client=client, one=one: client.take_grant(one))
            for one in [one for one in client.submissions if one.calling]:
                job.do(client, lambda client=client, one=one: client.end_grant(
                    one, ActionState.COMPLETED))
