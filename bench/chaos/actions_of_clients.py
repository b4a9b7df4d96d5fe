"""The program of one client of `bench_restarts.py`, or of one rank of its MPI world.

Some threads share a client. Each runs actions of all kinds, one after another, until the file
`over` exists: commands, functions, commands in a session of its own, commands in a session that
another client has opened, calls of services, and grants of an endpoint. Some have a `once` name,
and some of these are submitted a second time.

Each attempt leaves a line in the file `effects`, written where it is carried out. What the client
saw of each action is a line of JSON in its own file. An action that has no end after `limit_s` is
noted as hung; the thread goes on to wait for it.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tangram_hpc

ENDPOINT, CONCURRENCY = "search", 4
KINDS = {"command": 25, "function": 25, "session": 20, "attached": 8, "call": 14, "grant": 8}
NAMED = ("command", "function", "call")  # the kinds that may have a `once` name
ONCE, AGAIN = 0.2, 0.5  # how many have a `once` name; how many of these are submitted again
OPEN_FOR = (40, 160)  # a thread opens another session after so many of its actions


@dataclass(frozen=True)
class Order:
    """What a client is to do.

    Attributes:
        name: the client's name, which begins the names of its actions.
        effects: the file of executions.
        outcomes: the file for what the client saw.
        handles: the folder of the handles of shared sessions, a file for each client.
        over: the client ends when this file exists.
        threads: how many threads run actions.
        services: the names of the services.
        limit_s: after so many seconds an action counts as hung.
        seed: decides the kinds of the actions.
    """

    name: str
    effects: str
    outcomes: str
    handles: str
    over: str
    threads: int
    services: tuple[str, ...]
    limit_s: float
    seed: int


@dataclass
class Seen:
    """What a client saw of one action.

    Attributes:
        name: the action's name, which its executions note; of a second submission, too.
        kind: an entry of `KINDS`.
        id: the action's id; empty if it was not submitted.
        state: the state that the broker told; empty if it told none; HUNG.
        error: the exception; empty for none.
        value: the answer.
        once: whether it has a `once` name.
        again: whether it is a second submission of that name.
        session: the id of its session; empty for none.
        via: the kind of channel that the client had when the action ended.
        begun, ended: when it was submitted, and when its result came (epoch s).
    """

    name: str
    kind: str
    id: str = ""
    state: str = ""
    error: str = ""
    value: str = ""
    once: bool = False
    again: bool = False
    session: str = ""
    via: str = ""
    begun: float = 0.0
    ended: float = 0.0


def note(path: str, name: str) -> None:
    """Writes what an execution leaves in the world: one line, whole."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, f"{name}\n".encode())
    finally:
        os.close(fd)


def noted(path: str, name: str) -> str:
    """The function that the clients submit. It travels by value, so it names nothing from here."""
    import os
    import time

    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, f"{name}\n".encode())
    os.close(fd)
    return f"{name} {time.time_ns()}"


class ClientThread:
    """One thread: it runs actions one after another.

    Attributes:
        pending: the action that it waits for; None between two actions.
    """

    def __init__(self, client: tangram_hpc.Client, order: Order, number: int,
                 tell: Callable[[Seen], None]) -> None:
        self._client, self._order, self._tell = client, order, tell
        self._name, self._rng = f"{order.name}.{number}", random.Random(f"{order.seed}.{number}")
        self._count, self._left = 0, 0
        self._session: tangram_hpc.Session | None = None
        self._endpoint = client.endpoint(ENDPOINT)
        # the first thread's sessions are shared
        self._handle = Path(order.handles, order.name) if number == 0 else None
        self.pending: Seen | None = None

    def first(self) -> None:
        """Calls a service once: the client then knows which services there are."""
        self._one("call")

    def run(self) -> None:
        """Runs actions until the load is over."""
        while not os.path.exists(self._order.over):
            (kind,) = self._rng.choices(list(KINDS), list(KINDS.values()))
            if kind == "attached":
                self._attached()
            elif kind == "grant":
                self._granted()
            else:
                self._one(kind)
        self._close()

    def _begin(self, kind: str, **more: Any) -> Seen:
        self._count += 1
        self.pending = Seen(f"{self._name}.{self._count}", kind, begun=time.time(), **more)
        return self.pending

    def _end(self, seen: Seen, ended: float = 0.0) -> None:
        seen.ended, seen.via = ended or time.time(), self._client.via
        self._tell(seen)
        self.pending = None

    def _one(self, kind: str) -> None:
        seen = self._begin(kind)
        seen.once = kind in NAMED and self._rng.random() < ONCE
        session = self._own_session() if kind == "session" else None
        self._wait(seen, lambda: self._submit(seen, session))
        if session is not None and seen.error:
            self._session = None
        if seen.once and self._rng.random() < AGAIN:
            again = Seen(seen.name, kind, begun=time.time(), once=True, again=True)
            self.pending = again
            self._wait(again, lambda: self._submit(again, None))

    def _submit(self, seen: Seen, session: tangram_hpc.Session | None) -> Any:
        once, effects = seen.name if seen.once else "", self._order.effects
        if seen.kind == "function":
            return self._client.submit(noted, effects, seen.name, once=once)
        if seen.kind == "call":
            # a name that is submitted again must be the same work
            services = self._order.services
            service = services[zlib.crc32(seen.name.encode()) % len(services)]
            return self._client.call(service, "note", once=once, effect=seen.name)
        line = f"echo {seen.name} >> {effects}; echo {seen.name} $$"
        if session is not None:
            seen.session = session.id
            return session.exec(line)
        return self._client.submit(line, trusted=True, once=once)

    def _wait(self, seen: Seen, submit: Callable[[], Any]) -> None:
        future = None
        try:
            future = submit()
            seen.id = future.id
            value = future.result()
            seen.value = value if isinstance(value, str) else value.text.strip()
        except tangram_hpc.TangramError as error:
            seen.error = f"{type(error).__name__}: {error}"
        if future is not None and future.details is not None:
            seen.state = future.details.state.value
        self._end(seen)

    def _own_session(self) -> tangram_hpc.Session:
        if self._left <= 0:
            self._close()
        if self._session is None:
            self._left = self._rng.randint(*OPEN_FOR)
            self._session = self._client.session(trusted=True, shared=self._handle is not None)
            if self._handle is not None:
                text = json.dumps([self._session.id, self._session.handle().text])
                self._handle.with_suffix(".new").write_text(text)
                self._handle.with_suffix(".new").replace(self._handle)
        self._left -= 1
        return self._session

    def _close(self) -> None:
        if self._handle is not None:
            self._handle.unlink(missing_ok=True)
        if self._session is not None:
            self._session.close()
            self._session = None

    def _attached(self) -> None:
        """Attaches to a session of another client, runs some commands in it, and detaches."""
        others = [path for path in Path(self._order.handles).iterdir()
                  if path.name != self._order.name and path.suffix != ".new"]
        if not others:
            return
        try:
            session_id, handle = json.loads(self._rng.choice(others).read_text())
        except FileNotFoundError:
            return  # its owner has closed it
        seen = self._begin("attach", session=session_id)
        try:
            session = self._client.attach(handle, timeout_s=self._order.limit_s)
        except tangram_hpc.TangramError as error:
            seen.error = f"{type(error).__name__}: {error}"
            self._end(seen)
            return
        self._end(seen)
        for _ in range(self._rng.randint(1, 4)):
            seen = self._begin("attached")
            self._wait(seen, functools.partial(self._submit, seen, session))
            if seen.error:
                break
        session.detach()

    def _granted(self) -> None:
        """Makes a call of the endpoint, which is a short wait."""
        seen, ended = self._begin("grant"), 0.0
        try:
            with self._endpoint.slot() as slot:
                seen.id, seen.begun = slot.id, time.time()
                note(self._order.effects, seen.name)
                time.sleep(self._rng.uniform(0.0, 0.02))
                ended = time.time()
            seen.value, seen.state = seen.name, "COMPLETED"
        except tangram_hpc.TangramError as error:
            seen.error = f"{type(error).__name__}: {error}"
        self._end(seen, ended)


def drive(order: Order) -> None:
    """Runs a client until the load is over. Does not return if an action has no end."""
    lock = threading.Lock()
    noted.__module__ = "__main__"  # so that it travels by value
    with open(order.outcomes, "a", buffering=1) as out:
        def tell(seen: Seen) -> None:
            with lock:
                out.write(json.dumps(asdict(seen)) + "\n")

        client = tangram_hpc.connect(name=order.name)
        threads = [ClientThread(client, order, n, tell) for n in range(order.threads)]
        threads[0].first()
        running = [threading.Thread(target=each.run, daemon=True) for each in threads]
        for each in running:
            each.start()
        Path(f"{order.outcomes}.ready").touch()
        hung: set[int] = set()  # threads
        while any(each.is_alive() for n, each in enumerate(running) if n not in hung):
            time.sleep(0.2)
            for n, thread in enumerate(threads):
                seen = thread.pending
                if seen is not None and n not in hung and time.time() - seen.begun > order.limit_s:
                    hung.add(n)
                    tell(Seen(seen.name, seen.kind, seen.id, "HUNG", begun=seen.begun))
        if hung:
            out.flush()
            os._exit(3)  # a thread that waits for ever would not let this process end
        client.close()


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    if "RANK" in os.environ:  # a rank of an MPI world
        told["name"] += f"r{os.environ['RANK']}"
        told["outcomes"] += os.environ["RANK"]
    told["services"] = tuple(told["services"])
    drive(Order(**told))
