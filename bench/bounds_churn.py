"""The part `churn` of `bench_bounds.py`: everything that comes and goes in a long job.

In a round sessions open, fork, are shared, renewed and closed; actions are cancelled, have keys,
fail to be placed, read input and hold grants of an endpoint; ports are opened; clients come and go,
with and without a goodbye; and now and then a worker is lost and another one joins.
"""

from __future__ import annotations

from bounds_job import GRACE_S, PlayedClient, PlayedJob
from growth import Growth

from tangram_hpc.domain.action import Kind
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.session_token import hash_of
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol import message as ms
from tangram_hpc.protocol.input_flow import RESIZE, SIGNAL

_DONE = Outcome(ActionState.COMPLETED)


def churn(job: PlayedJob, rounds: int, growth: Growth) -> None:
    """Rounds of everything; a round has 12 actions or so."""
    client, every = job.client("churn"), max(1, rounds // 40)
    for n in range(rounds):
        if n % every == 0:
            growth.sample(n)
        if n == rounds // 2:
            growth.half()
        _sessions(job, client, n)
        _actions(job, client, n)
        _guest(job, n)
        if n % 10 == 0:
            name = f"n{n // 10 % 2}"
            job.lose_worker(name)
            job.run(0.1)
            job.join_worker(name)
            job.run(0.1)
        client.forget(f"round-{n}/")
        client.settle()
    job.run(3 * GRACE_S)
    growth.sample(rounds)


def _sessions(job: PlayedJob, client: PlayedClient, n: int) -> None:
    one = client.open_session(idle_ns=(n + 1) * 10**9, ttl_ns=(n + 1) * 10**12)
    shared = client.open_session(name=f"shared-{n}", attach_hash=hash_of(f"attach-{n}"),
                                 close_hash=hash_of(f"close-{n}"), outlives=True)
    job.run(0.01)
    fork = client.open_session(origin=one)
    client.submit("in session", session=one)
    client.submit("terminal", session=one)
    client.link.flush()
    job.run(0.0005)
    last = max(client.open)
    for kind in (SIGNAL, RESIZE):
        client.say(ms.Input(last, kind, 15, 80))
    stream = client.new_id()
    client.say(ms.OpenStream(stream, one, 80))
    client.settle()
    client.say(ms.RenewSession(one))
    if n % 2:
        client.say(ms.StreamEnded(stream))
    for session in (one, shared, fork):
        client.say(ms.ReleaseSession(session))
    job.run(0.01)


def _actions(job: PlayedJob, client: PlayedClient, n: int) -> None:
    for k in range(4):
        client.submit(f"tool {k}", trajectory=f"trajectory-{n}-{k}")
    client.submit("reward", once=f"round-{n}/reward")
    client.submit("reward", once=f"round-{n}/reward")  # waits for the first one
    cancelled = client.submit("cancelled")
    client.say(ms.Cancel((cancelled,)))
    grant = client.submit("judge", b"", kind=Kind.GRANT, key="endpoint:api")
    client.link.flush()
    job.run(0.05)
    for action, lease in client.granted:
        client.say(ms.GrantEnded(action, lease, _DONE))
    client.granted.clear()
    assert grant
    client.settle()


def _guest(job: PlayedJob, n: int) -> None:
    """A client that comes, works and goes. Every third one goes without a goodbye and leaves a
    session and an action."""
    guest = PlayedClient(job, f"guest-{n}")
    guest.open_session()
    guest.submit("tool 1")
    if n % 3:
        guest.settle()
    guest.link.flush()
    guest.leave(bye=n % 3 != 0)
    job.run(GRACE_S / 4)
