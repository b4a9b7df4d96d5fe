"""A worker process dials again when its broker is gone. The broker here is a fake one: it speaks
over a real socket, knows no scheduling, and is given its orders by the test."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tangram_hpc.app import broker_redial
from tangram_hpc.app import worker as worker_module
from tangram_hpc.app.broker_redial import BrokerRedial
from tangram_hpc.app.worker import WAY_SHUT, WorkerPlan
from tangram_hpc.config.settings import Config
from tangram_hpc.domain.action import Action, Kind
from tangram_hpc.domain.states import ActionState
from tangram_hpc.errors import AccessError, BrokerUnreachable
from tangram_hpc.protocol import message as ms
from tangram_hpc.protocol.payload import ExecCall, decode, encode
from tangram_hpc.storage.access import Access, mark_ended, worker_file, write_access
from tangram_hpc.transport.socket.asyncsock import Listener, SocketLink, listen_unix
from tangram_hpc.transport.socket.socket_connection import SocketConnection

DEADLINE_S = 60.0


class FakeBroker:
    """Listens at a socket of its own with a key of its own, and notes what it is told."""

    def __init__(self, folder: Path, number: int, back_within_s: float = 0.0) -> None:
        self.folder = folder
        self.link: SocketLink | None = None
        self.links = 0
        self.got: list[tuple[Any, Any]] = []
        path, key = str(folder / f"{number}.sock"), os.urandom(32)
        self.listener = Listener(listen_unix(path), key, "local-fake", self._on_link)
        access = Access("local-fake", (f"unix:{path}",), key, str(folder / "store"),
                        back_within_s=back_within_s)
        for file in (worker_file(folder / "access.json"), folder / "access.json"):
            write_access(file, access)

    def _on_link(self, link: SocketLink) -> None:
        self.link, self.links = link, self.links + 1
        link.attach(lambda message, data: self.got.append((message, bytes(data or b""))),
                    lambda: None, lambda reason: None)

    def send(self, message: ms.Message, payload: bytes | None = None) -> None:
        assert self.link is not None
        self.link.send(message, payload)
        self.link.flush()

    def die(self) -> None:
        """Ends as a broker that is killed: nothing is said, and the access file stays."""
        self.listener.close()
        if self.link is not None:
            self.link.close()

    async def told(self, kind: type, count: int = 1) -> list[Any]:
        deadline = time.monotonic() + DEADLINE_S
        while len(found := [one for one, _ in self.got if isinstance(one, kind)]) < count:
            assert time.monotonic() < deadline, f"no {kind.__name__}: {self.got}"
            await asyncio.sleep(0.01)
        return found


@pytest.fixture
def lent(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts workers that look for the broker of the access file in `tmp_path`."""
    runs: list[subprocess.Popen[str]] = []

    def start(grace_s: float, lifeline: int = -1) -> subprocess.Popen[str]:
        env = {**os.environ, "TANGRAM_HOME": str(tmp_path / "t"), "TMPDIR": str(tmp_path),
               "TANGRAM_GRACE_S": str(grace_s), "TANGRAM_ISOLATION": "process",
               "TANGRAM_ACCESS": str(tmp_path / "access.json")}
        tied = ("--lifeline", str(lifeline)) if lifeline >= 0 else ()
        runs.append(subprocess.Popen(
            [sys.executable, "-m", "tangram_hpc", "worker", "--name", "n", "--cpus", "2", *tied],
            env=env, stderr=subprocess.PIPE, text=True, pass_fds=(lifeline,) if tied else ()))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()
        run.communicate()


def order(lease: int, text: str, after: int = 0) -> tuple[ms.StartAttempt, bytes]:
    action = Action(lease, "a", Kind.EXEC, trusted=True)
    return ms.StartAttempt(lease, action, (), after=after), encode(ExecCall(shell=text))


async def ended(worker: subprocess.Popen[str]) -> int:
    return await asyncio.get_running_loop().run_in_executor(None, worker.wait, DEADLINE_S)


def test_a_worker_goes_on_without_its_broker_and_tells_the_next_one_its_results(
        lent: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    async def main() -> None:
        worker, go = lent(60), tmp_path / "go"
        first = FakeBroker(tmp_path, 1)
        (hello,) = await first.told(ms.WorkerHello)
        first.send(ms.WorkerWelcome(7, str(tmp_path / "store")))
        first.send(*order(1, "echo one"))
        await first.told(ms.Finished)
        first.send(*order(2, f"until [ -e {go} ]; do sleep 0.05; done; echo two"))
        first.send(*order(3, f"echo three; touch {tmp_path}/done", after=2))
        first.die()  # at once, because a lease that waits behind a long one is soon given back
        go.touch()
        while not (tmp_path / "done").exists():  # a prefetched lease begins without a broker
            await asyncio.sleep(0.01)
        second = FakeBroker(tmp_path, 2)
        (again,) = await second.told(ms.WorkerHello)
        assert (again.uid, again.node) == (hello.uid, 7) and len(hello.uid) == 32
        assert set(again.leases) == {1, 2, 3} and hello.leases == ()
        second.send(ms.WorkerWelcome(7, str(tmp_path / "store")))
        await second.told(ms.Finished, 3)
        ends = [(one, decode(payload).stdout) for one, payload in second.got
                if isinstance(one, ms.Finished)]
        assert [(one.lease, one.outcome.state, text) for one, text in ends] == [
            (lease, ActionState.COMPLETED, text)
            for lease, text in ((1, b"one\n"), (2, b"two\n"), (3, b"three\n"))]
        second.send(ms.Confirmed((1, 2, 3)))
        second.send(ms.Shutdown("done"))
        assert await ended(worker) == 0
        second.die()

    asyncio.run(main())


def test_a_worker_that_is_fenced_joins_as_a_new_node(
        lent: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    async def main() -> None:
        worker = lent(60)
        first = FakeBroker(tmp_path, 1)
        (hello,) = await first.told(ms.WorkerHello)
        first.send(ms.WorkerWelcome(1, str(tmp_path / "store")))
        pid = tmp_path / "pid"
        first.send(*order(1, f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 1000"))
        await first.told(ms.AttemptsStarted)
        while not pid.exists():  # the attempt has started, and its shell may still wait for a core
            await asyncio.sleep(0.01)
        first.die()
        second = FakeBroker(tmp_path, 2)
        await second.told(ms.WorkerHello)
        second.send(ms.PeerRefused("no such node"))
        _, new = await second.told(ms.WorkerHello, 2)
        assert (new.node, new.leases) == (0, ()) and new.uid != hello.uid
        assert not Path(f"/proc/{pid.read_text().strip()}").exists()
        second.send(ms.WorkerWelcome(2, str(tmp_path / "store")))
        second.send(ms.Shutdown("done"))
        assert await ended(worker) == 0
        second.die()

    asyncio.run(main())


def test_a_worker_whose_broker_does_not_come_back_ends_after_its_grace(
        lent: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    async def main() -> None:
        worker = lent(1)
        broker = FakeBroker(tmp_path, 1)
        await broker.told(ms.WorkerHello)
        broker.send(ms.WorkerWelcome(1, str(tmp_path / "store")))
        await asyncio.sleep(0.1)
        broker.die()
        assert await ended(worker) == 1
        assert worker.stderr is not None and "the broker is gone" in worker.stderr.read()

    asyncio.run(main())


@pytest.mark.parametrize("how", ["ended", "lifeline", "signal"])
def test_a_worker_without_a_broker_does_not_wait_once_it_is_told_to_end(
        lent: Callable[..., subprocess.Popen[str]], tmp_path: Path, how: str) -> None:
    async def main() -> None:
        reading, writing = os.pipe()
        worker = lent(86400, reading)
        os.close(reading)
        broker = FakeBroker(tmp_path, 1)
        await broker.told(ms.WorkerHello)
        broker.send(ms.WorkerWelcome(1, str(tmp_path / "store")))
        await asyncio.sleep(0.1)
        broker.die()
        await asyncio.sleep(0.3)
        assert worker.poll() is None
        if how == "ended":
            mark_ended(tmp_path / "access.json", "local-fake", "noon")
        elif how == "signal":
            worker.send_signal(signal.SIGTERM)
        else:
            os.close(writing)
        assert await ended(worker) == {"ended": 1, "lifeline": 0, "signal": 128 + 15}[how]

    asyncio.run(main())


class FakeDriver:
    """A worker that a test connects and welcomes."""

    def __init__(self) -> None:
        self.connected = self.joined = True
        self.over = False
        self.ends: list[str] = []

    def connection_lost(self, reason: str) -> None:
        self.connected = self.joined = False

    def lost(self, reason: str) -> None:
        self.ends.append(reason)
        self.over = True


class Dialling:
    """A `BrokerRedial` whose attempts have the outcomes that a test lists; the last one repeats."""

    def __init__(self, patch: pytest.MonkeyPatch, tmp_path: Path, grace_s: float,
                 *outcomes: Exception | None) -> None:
        self.outcomes, self.dials = list(outcomes), 0
        self.driver = FakeDriver()
        write_access(tmp_path / "access.json", Access("j", ("unix:/x",), b"k" * 32, "s"))
        patch.setattr(broker_redial, "dial", self._dial)
        self.redial = BrokerRedial(tmp_path / "access.json", grace_s, self.driver,  # type: ignore[arg-type]
                                   self._attach)

    def _dial(self, *_: Any) -> SocketConnection:
        self.dials += 1
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if outcome is not None:
            raise outcome
        return SocketConnection(socket.socket())

    def _attach(self, connection: SocketConnection) -> None:
        connection.close()
        self.driver.connected = True

    async def until_over(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not self.driver.over:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)


def refused() -> BrokerUnreachable:
    error = BrokerUnreachable("nobody listens")
    error.refused = True
    return error


@pytest.mark.parametrize(("outcome", "shut"), [
    (BrokerUnreachable("no answer"), True), (refused(), False), (AccessError("wrong key"), False),
    (None, False)])
def test_the_last_attempt_tells_whether_the_host_of_the_broker_is_out_of_reach(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcome: Exception | None,
        shut: bool) -> None:
    async def main() -> None:
        one = Dialling(monkeypatch, tmp_path, 0.3, BrokerUnreachable("no answer"), outcome)
        one.redial.connection_lost("it died")
        await one.until_over()
        assert one.redial.given_up and one.redial.shut == shut and one.driver.ends == ["it died"]
        assert one.dials == 2 if outcome is None else one.dials > 2, "a link lasts"

    asyncio.run(main())


def test_a_welcome_renews_the_patience_and_a_mere_connection_does_not(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def main() -> None:
        one = Dialling(monkeypatch, tmp_path, 0.4, None)
        one.redial.connection_lost("it died")
        for _ in range(3):
            while not one.driver.connected:
                await asyncio.sleep(0.01)
            one.driver.joined = True
            await asyncio.sleep(0.3)
            assert not one.driver.over
            one.redial.connection_lost("and again")
        began = time.monotonic()
        while not one.driver.over:
            if one.driver.connected:
                one.redial.connection_lost("without a welcome")
            assert len(asyncio.all_tasks()) <= 2, "one task dials"
            await asyncio.sleep(0.01)
        assert time.monotonic() - began < 5 and one.driver.ends == ["without a welcome"]

    asyncio.run(main())


@pytest.mark.parametrize(("way", "status"), [("shut", WAY_SHUT), ("", 1)])
def test_a_worker_that_has_waited_for_its_broker_does_not_wait_again(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: str, status: int) -> None:
    async def serve(*_: Any) -> int:
        raise worker_module._JoinedAndLost("it is gone", way)

    monkeypatch.setattr(worker_module, "serve_worker", serve)
    monkeypatch.setattr(worker_module, "probe_broker", lambda *_: pytest.fail("it waits again"))
    with pytest.raises(BrokerUnreachable) as told:
        worker_module.lend(WorkerPlan(tmp_path / "access.json", Config()), {})
    assert told.value.exit_status == status


def test_a_worker_that_starts_while_its_broker_is_away_waits_for_it(
        lent: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    async def main() -> None:
        FakeBroker(tmp_path, 1, back_within_s=DEADLINE_S).die()
        worker = lent(0)
        await scratch_of(tmp_path)
        second = FakeBroker(tmp_path, 2)
        await second.told(ms.WorkerHello)
        assert worker.poll() is None

    asyncio.run(main())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_that_is_told_to_end_before_it_has_a_broker_leaves_nothing(
        lent: Callable[..., subprocess.Popen[str]], tmp_path: Path, number: signal.Signals) -> None:
    async def main() -> None:
        FakeBroker(tmp_path, 1, back_within_s=DEADLINE_S).die()
        worker = lent(0)
        scratch = await scratch_of(tmp_path)
        worker.send_signal(number)
        assert await ended(worker) == 128 + number
        assert not scratch.exists()

    asyncio.run(main())


async def scratch_of(folder: Path) -> Path:
    """Waits until a worker has made its scratch folder; returns it."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := [*folder.glob("tangram-worker-*")]):
        assert time.monotonic() < deadline, [*folder.iterdir()]
        await asyncio.sleep(0.01)
    return found[0]
