"""Direct calls: results and errors as through the broker, one action that accounts for all of them,
units that come back, and nothing that runs twice or is lost without an error."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from helpers.cluster_parts import broker_of, environ_of, until, workers_of

import tangram_hpc
from tangram_hpc import (
    ActionFailed,
    ActionTimeout,
    ClientClosed,
    InfeasibleRequest,
    InvalidInput,
    LocalCluster,
    RemoteError,
    UntrustedResult,
)
from tangram_hpc.client.direct.direct_calls import DirectCalls
from tangram_hpc.client.request import Options
from tangram_hpc.errors import ProtocolError
from tangram_hpc.ports import DirectListener, DirectTransport
from tangram_hpc.protocol import payload as pl
from tangram_hpc.transport.socket.socket_connection import SocketConnection

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(cpus=2, home=tmp_path_factory.mktemp("home")) as c:
        yield c


def rows(cluster: LocalCluster) -> list[dict[str, Any]]:
    """The accounting of all actions that have ended."""
    told = subprocess.run(
        [sys.executable, "-m", "tangram_hpc", "acct", "-j", cluster.job, "--json"], text=True,
        env={**os.environ, **environ_of(cluster)}, capture_output=True, check=True, timeout=60)
    found: list[dict[str, Any]] = json.loads(told.stdout)["actions"]
    return found


def free(cluster: LocalCluster) -> int:
    number: int = cluster.ask("info")["cpus_free"]
    return number


def _functions() -> tuple[Callable[..., int], Callable[[], int], Callable[[], None]]:
    """Functions that are pickled by value: a runner cannot import this file."""
    def add(x: int, y: int = 1) -> int:
        return x + y

    def pid() -> int:
        return os.getpid()

    def boom() -> None:
        print("what it printed")
        raise ValueError("no")
    return add, pid, boom


add, pid, boom = _functions()


def long_call(direct: DirectCalls, told: list[BaseException]) -> threading.Thread:
    """Begins a call of a minute in another thread, which notes what it raises."""
    def call() -> None:
        try:
            direct.call(time.sleep, 60)
        except BaseException as error:  # noqa: BLE001 - the test judges it
            told.append(error)
    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.2)
    return thread


# ---- results and errors ------------------------------------------------------------------------


def test_values_come_back_as_they_do_through_the_broker(cluster: LocalCluster) -> None:
    async def later(x: int) -> int:
        return x * 2

    with cluster.direct() as direct:
        assert direct.call(add, 2) == 3 and direct.call(add, 2, y=5) == 7
        assert direct.call(later, 4) == 8
        assert direct.via == "node" and direct.reason == ""
        for value in (None, "x", b"y", [1, {"a": 2.5}]):
            assert direct.call(lambda v: v, value) == value
        array = np.arange(3_000_000)  # more bytes than one read takes
        assert (direct.call(lambda a: a + 1, array) == array + 1).all()


@pytest.mark.parametrize("function", [boom, lambda: sys.exit(3), lambda: {}["absent"]],
                         ids=["error", "exit", "key"])
def test_what_a_function_raises_is_told_as_through_the_broker(
        cluster: LocalCluster, function: Callable[[], None]) -> None:
    with pytest.raises(RemoteError) as by_broker:
        cluster.submit(function).result(DEADLINE_S)
    with cluster.direct() as direct:
        with pytest.raises(RemoteError) as told:
            direct.call(function)
        assert direct.call(add, 1) == 2, "the stream goes on"

    def said(error: RemoteError) -> str:
        return str(error).partition(": ")[2]
    assert said(told.value) == said(by_broker.value)
    assert told.value.result == by_broker.value.result


def test_a_result_that_needs_a_pickle_is_opened_only_if_it_is_trusted(cluster: LocalCluster
                                                                     ) -> None:
    with cluster.direct() as direct, pytest.raises(UntrustedResult, match="trusted=True"):
        direct.call(lambda: Path("/x"))
    with cluster.direct(trusted=True) as direct:
        assert direct.call(lambda: Path("/x")) == Path("/x")


def test_more_functions_than_a_connection_remembers(cluster: LocalCluster) -> None:
    with cluster.direct() as direct:
        functions = [lambda x, n=n: x + n for n in range(1100)]
        for _ in range(2):
            assert [f for f in range(1100) if direct.call(functions[f], 1) != 1 + f] == []


def test_calls_are_told_apart_by_function_and_not_by_its_address(cluster: LocalCluster) -> None:
    with cluster.direct() as direct:
        assert [direct.call(eval(f"lambda: {n}")) for n in range(50)] == list(range(50))


@pytest.mark.parametrize(("given", "named"), [
    ({"cpus": 0}, "cpus"), ({"mem": "x"}, "mem"), ({"idle_s": 0}, "idle_s"),
    ({"term_s": -1}, "term_s"), ({"term_s": True}, "term_s"), ({"timeout": 0}, "timeout"),
    ({"retries": -1}, "retries"), ({"retries": 1.5}, "retries")])
def test_a_wrong_argument_is_named(cluster: LocalCluster, given: dict[str, Any], named: str
                                   ) -> None:
    with pytest.raises(InvalidInput, match=f"^{named}: "), cluster.direct(**given) as direct:
        direct.call(add, 1)


def test_what_cannot_be_called_or_pickled_is_named_and_harms_nothing(cluster: LocalCluster
                                                                    ) -> None:
    with cluster.direct() as direct:
        lock = threading.Lock()
        for call, named in ((lambda: direct.call("no"), "function"),  # type: ignore[arg-type]
                            (lambda: direct.call(add, lock), "arguments"),
                            (lambda: direct.call(lambda: lock), "function")):
            with pytest.raises(InvalidInput, match=f"^{named}: "):
                call()
            assert direct.call(add, 1) == 2


def test_a_function_that_cannot_be_loaded_there_fails_each_time_as_itself(cluster: LocalCluster
                                                                         ) -> None:
    class Unloadable:
        def __reduce__(self) -> Any:
            return eval, ("1 / 0",)

        def __call__(self) -> None: ...
    with cluster.direct() as direct:
        bad = Unloadable()
        for _ in range(3):
            with pytest.raises(RemoteError, match="ZeroDivisionError"):
                direct.call(bad)
            assert direct.call(add, 1) == 2


def test_a_function_may_take_long_to_pickle(cluster: LocalCluster) -> None:
    class Slow:
        def __reduce__(self) -> Any:
            time.sleep(0.5)
            return eval, ("lambda: 7",)

        def __call__(self) -> int:
            return 7
    with cluster.direct(idle_s=0.05) as direct:
        assert direct.call(Slow()) == 7


def test_functions_and_arguments_that_are_too_large_together_are_refused(cluster: LocalCluster
                                                                        ) -> None:
    with cluster.direct() as direct:
        large = bytes(260 << 20)
        with pytest.raises(InvalidInput, match=r"^function, arguments: "):
            direct.call(lambda x: len(x) + len(large), large)
        assert direct.call(add, 1) == 2


def test_large_functions_do_not_fill_the_process(cluster: LocalCluster) -> None:
    def peak_mib() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) >> 10
    with cluster.direct() as direct:
        before = direct.call(peak_mib)
        for n in range(200):
            large = bytes([n]) * (1 << 20)
            assert direct.call(lambda large=large: large[0]) == n
        assert direct.call(peak_mib) - before < 150


def test_a_child_of_a_function_answers_nothing(cluster: LocalCluster) -> None:
    def forks() -> int:
        return 0 if os.fork() else 1

    def child_exits() -> int:
        if not os.fork():
            sys.exit(0)
        return 5
    with cluster.direct() as direct:
        assert direct.call(forks) == 0
        assert [direct.call(add, n) for n in (1, 10, 100)] == [2, 11, 101]
        assert direct.call(child_exits) == 5
        assert [direct.call(add, n) for n in (1, 10, 100)] == [2, 11, 101]


def test_a_function_may_close_what_it_likes(cluster: LocalCluster) -> None:
    with cluster.direct() as direct:
        for fd in (0, 1, 2):
            direct.call(os.close, fd)
        with pytest.raises(RemoteError, match="KeyError: 'absent'"):
            direct.call(lambda: {}["absent"])
        assert direct.call(add, 1) == 2


@pytest.mark.attack("user", "results")
def test_what_a_hostile_function_sends_is_an_error_of_its_own_call(cluster: LocalCluster) -> None:
    """A function can write to every descriptor of its process, that of the connection too."""
    def forge(sent: bytes) -> None:
        for fd in range(64):
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    os.write(fd, sent)
    frames = [msgspec.msgpack.encode(("x",)), msgspec.msgpack.encode((7, b"", 0, False)),
              msgspec.msgpack.encode((1, b"garbage", -(1 << 62), False)),
              msgspec.msgpack.encode((1, pl.encode(pl.ValueReturn(b"\xc1")), 0, False))]
    for body in [*(len(f).to_bytes(4, "little") + f for f in frames), b"\xff\xff\xff\xff"]:
        with cluster.direct() as direct:
            with pytest.raises((ProtocolError, ActionFailed)):
                direct.call(forge, body)
            assert [direct.call(add, n) for n in (1, 10)] == [2, 11]
    assert cluster.metrics()["tangram/tools/run_s"] >= 0


def test_what_can_never_run_is_said_at_the_first_call(cluster: LocalCluster) -> None:
    with cluster.direct(cpus=99) as direct, pytest.raises(InfeasibleRequest, match="99"):
        direct.call(add, 1)


# ---- what is held, and accounted for -----------------------------------------------------------


def test_one_action_accounts_for_all_calls_of_a_stream(tmp_path: Path) -> None:
    with LocalCluster(cpus=2, home=tmp_path) as c:
        with c.direct(name="steps") as direct:
            begun = time.monotonic()
            for number in range(200):
                assert direct.call(add, number) == number + 1
            direct.call(time.sleep, 0.05)
            with pytest.raises(RemoteError):
                direct.call(boom)
            took_ns = (time.monotonic() - begun) * 1e9
            assert free(c) == 1
        until(lambda: free(c) == 2, "the CPU is back")
        (row,) = until(lambda: rows(c), "the row")
        assert (row["name"], row["state"], row["ncpus"]) == ("steps", "COMPLETED", 1)
        assert row["direct_calls"] == 202
        assert 50e6 <= row["direct_ns"] <= row["exec_ns"] <= row["cpu_held_ns"]
        assert row["direct_ns"] <= took_ns
        assert c.metrics()["tangram/tools/count"] == 202


def test_metrics_count_calls_and_what_their_action_held(tmp_path: Path) -> None:
    with LocalCluster(cpus=1, home=tmp_path) as c:
        with c.direct() as direct:
            for _ in range(3):
                direct.call(time.sleep, 0.02)
            with pytest.raises(RemoteError):
                direct.call(boom)
            time.sleep(0.2)
        until(lambda: free(c) == 1, "the CPU is back")
        told = {name.rpartition("/")[2]: value for name, value in c.metrics().items()
                if "/tools/" in name}
        assert (told["count"], told["failed"]) == (4, 1)
        assert 0.015 <= told["run_s"] <= told["act_s"] and told["act_max_s"] < 60
        assert told["held_core_s"] >= 0.26, "the time between calls is held too"
        parts = [told[name] for name in ("queue_s", "run_s", "system_s")]
        assert sum(parts) == pytest.approx(told["act_s"])


def test_units_come_back_when_no_call_has_come_for_a_while(cluster: LocalCluster) -> None:
    with cluster.direct(idle_s=0.2) as direct:
        assert direct.call(add, 1) == 2
        assert free(cluster) == 1
        until(lambda: free(cluster) == 2, "the CPU is back")
        assert direct.call(add, 2) == 3 and direct.via == "node", "the next call takes them again"


def test_the_term_ends_while_the_stream_rests_too(cluster: LocalCluster) -> None:
    with cluster.direct(idle_s=600, term_s=0.3) as direct:
        assert direct.call(add, 1) == 2
        until(lambda: free(cluster) == 2, "the CPU is back")
        assert direct.call(add, 2) == 3


def test_metrics_count_a_call_that_was_ended_once(tmp_path: Path) -> None:
    with LocalCluster(cpus=1, home=tmp_path) as c:
        with c.direct(timeout=0.2) as direct:
            for _ in range(4):
                direct.call(time.sleep, 0.05)
            with pytest.raises(ActionTimeout):
                direct.call(time.sleep, 60)
        until(lambda: free(c) == 1, "the CPU is back")
        told = {name.rpartition("/")[2]: value for name, value in c.metrics().items()
                if "/tools/" in name}
        assert (told["count"], told["failed"]) == (5, 1)
        assert 0.19 <= told["run_s"] * 5 < told["held_core_s"] * 1.5


def test_others_get_their_turn_when_the_term_is_over(tmp_path: Path) -> None:
    with LocalCluster(cpus=1, home=tmp_path) as c:
        other, over, calls = tangram_hpc.connect(c.access), threading.Event(), [0]

        def stream() -> None:
            with c.direct(term_s=0.5) as direct:
                while not over.is_set():
                    assert direct.call(add, calls[0]) == calls[0] + 1
                    calls[0] += 1
        thread = threading.Thread(target=stream)
        thread.start()
        try:
            until(lambda: calls[0], "the stream holds the only CPU")
            for _ in range(3):
                assert other.submit(add, 1).result(DEADLINE_S) == 2
            before = calls[0]
            until(lambda: calls[0] > before, "and the stream goes on after each")
        finally:
            over.set()
            thread.join(DEADLINE_S)
            other.close()
        until(lambda: free(c) == 1, "the CPU is back")
        served = [row for row in rows(c) if row["direct_calls"]]
        assert sum(row["direct_calls"] for row in served) == calls[0] and len(served) >= 2


def test_a_first_call_waits_for_its_turn(cluster: LocalCluster) -> None:
    until(lambda: free(cluster) == 2, "what earlier tests held is back")
    with cluster.direct() as direct:
        busy = cluster.submit("sleep 1; date +%s%N", cpus=2)
        until(lambda: not free(cluster), "it holds both CPUs")
        assert direct.call(time.time_ns) > int(busy.result(DEADLINE_S).text)


# ---- ends --------------------------------------------------------------------------------------


def test_a_call_that_is_too_long_ends_with_its_process(cluster: LocalCluster) -> None:
    with cluster.direct(timeout=0.3) as direct:
        first = direct.call(pid)
        with pytest.raises(ActionTimeout, match=r"longer than its limit of 0\.3 s") as told:
            direct.call(time.sleep, 60)
        assert (told.value.name, told.value.limit_s) == ("direct", 0.3)
        until(lambda: not Path(f"/proc/{first}").exists(), "its process has ended")
        assert direct.call(pid) != first


def test_a_limit_counts_run_time_and_not_the_way(cluster: LocalCluster,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """Sending takes longer than the limit here, and so does receiving; the call itself does not."""
    def slow(name: str) -> Callable[..., Any]:
        true = getattr(SocketConnection, name)

        def after_a_while(stream: object, data: object) -> Any:
            time.sleep(2.5)
            return true(stream, data)
        return after_a_while

    with cluster.direct(timeout=2) as direct:
        assert direct.call(add, 1) == 2
        with monkeypatch.context() as patched:
            for name in ("send", "receive_into"):
                patched.setattr(SocketConnection, name, slow(name))
            assert direct.call(add, 2) == 3


def test_a_direct_call_takes_and_returns_much_data(cluster: LocalCluster) -> None:
    with cluster.direct(timeout=60) as direct:
        assert direct.call(len, bytes(100 << 20)) == 100 << 20
        assert len(direct.call(bytes, 100 << 20)) == 100 << 20


def test_the_kernels_timeout_is_a_loss_and_no_limit(cluster: LocalCluster,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """As TCP tells it of a host that is gone: ETIMEDOUT is a TimeoutError of Python."""
    def gone(stream: object, view: memoryview) -> int:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")
    with cluster.direct(timeout=5) as direct:
        assert direct.call(add, 1) == 2
        with monkeypatch.context() as patched:
            patched.setattr(SocketConnection, "receive_into", gone)
            with pytest.raises(ActionFailed, match="broke before its result") as told:
                direct.call(add, 1)
        assert not isinstance(told.value, ActionTimeout)
        assert direct.call(add, 2) == 3


def test_a_process_that_dies_fails_its_call_and_no_other(cluster: LocalCluster) -> None:
    with cluster.direct() as direct:
        assert direct.call(add, 1) == 2
        with pytest.raises(ActionFailed, match="SIGKILL"):
            direct.call(lambda: os.kill(os.getpid(), signal.SIGKILL))
        assert direct.call(add, 2) == 3


@pytest.mark.parametrize("retries", [0, 1])
def test_a_call_is_sent_again_after_a_failure_of_its_node_as_often_as_it_may(
        tmp_path: Path, retries: int) -> None:
    begun = tmp_path / "begun"

    def slow(path: str) -> str:
        with open(path, "a") as file:
            file.write("x")
        time.sleep(60 if os.path.getsize(path) < 2 else 0)
        return "done"

    with LocalCluster(cpus=1, home=tmp_path / "home") as c, c.direct(retries=retries) as direct:
        told: list[Any] = []

        def call() -> None:
            try:
                told.append(direct.call(slow, str(begun)))
            except ActionFailed as error:
                told.append(str(error))
        thread = threading.Thread(target=call)
        thread.start()
        until(lambda: begun.exists() and begun.stat().st_size, "the call runs")
        for worker in workers_of(c):
            worker.kill()
        thread.join(DEADLINE_S)
        assert told and (told[0] == "done" if retries else "NODE_FAIL" in told[0]), told
        assert begun.stat().st_size == 1 + retries


def test_a_node_that_fails_while_the_stream_opens_is_tried_again(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    with LocalCluster(cpus=1, home=tmp_path) as c:
        client = tangram_hpc.connect(c.access)
        transport = client._direct
        assert transport is not None

        def slow_server() -> Callable[..., object]:
            def serve(*args: Any) -> object:
                import time as clock

                from tangram_hpc.app.direct_server import serve_direct_calls
                if not os.path.exists(marker):
                    open(marker, "w").close()
                    clock.sleep(60)
                return serve_direct_calls(*args)
            return serve
        marker = str(tmp_path / "begun")
        client._direct = DirectTransport(transport.listen, slow_server)

        def kill() -> None:
            until(lambda: os.path.exists(marker), "the first attempt runs")
            for worker in workers_of(c):
                killed.append(worker.pid)
                worker.kill()
        thread = threading.Thread(target=kill)
        thread.start()
        with client.direct() as direct:
            assert direct.call(add, 1) == 2 and direct.via == "node"
        thread.join(DEADLINE_S)
        assert killed
        client.close()


def test_an_action_that_was_cancelled_between_calls_harms_none(cluster: LocalCluster) -> None:
    with cluster.direct(retries=0, idle_s=600) as direct:
        process = direct.call(pid)
        assert direct._lease is not None and direct._lease.future.cancel()
        until(lambda: not Path(f"/proc/{process}").exists(), "its process has ended")
        assert direct.call(add, 1) == 2


def test_calls_go_on_while_the_broker_is_started_again(tmp_path: Path) -> None:
    with LocalCluster(cpus=1, home=tmp_path, grace_s=20) as c, c.direct(idle_s=5) as direct:
        process = direct.call(pid)
        broker = broker_of(c)
        broker.kill()
        while broker_of(c) is broker:
            assert direct.call(pid) == process
        assert c.submit(add, 1, cpus=1).done() is False
        assert direct.call(pid) == process
        direct.close()
        until(lambda: free(c) == 1, "the CPU is back")
        assert {row["state"] for row in rows(c)} == {"COMPLETED"}


def test_closing_ends_a_call_of_another_thread(cluster: LocalCluster) -> None:
    direct, told = cluster.direct(), list[BaseException]()
    direct.call(add, 1)

    thread = long_call(direct, told)
    direct.close()
    thread.join(DEADLINE_S)
    assert isinstance(told[0], ClientClosed)
    until(lambda: free(cluster) == 2, "the CPU is back")
    direct.close()
    with pytest.raises(ClientClosed, match=r"Client\.direct"):
        direct.call(add, 1)


def test_closing_in_a_signal_handler_ends_the_call_beneath_it(cluster: LocalCluster) -> None:
    direct = cluster.direct()
    before = signal.signal(signal.SIGALRM, lambda number, frame: direct.close())
    try:
        assert direct.call(add, 1) == 2
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(ClientClosed):
            direct.call(time.sleep, 60)
    finally:
        signal.signal(signal.SIGALRM, before)
    until(lambda: free(cluster) == 2, "the CPU is back")


def test_closing_waits_for_no_broker(tmp_path: Path) -> None:
    with LocalCluster(cpus=1, home=tmp_path) as c:
        direct, told = c.direct(), list[BaseException]()
        process = direct.call(pid)

        thread = long_call(direct, told)
        broker_of(c).send_signal(signal.SIGSTOP)
        try:
            os.kill(process, signal.SIGKILL)
            time.sleep(0.2)
            direct.close()
            thread.join(DEADLINE_S)
            assert isinstance(told[0], ClientClosed)
        finally:
            broker_of(c).send_signal(signal.SIGCONT)


def test_closing_ends_a_call_that_waits_for_its_turn(cluster: LocalCluster) -> None:
    busy, direct, told = cluster.submit(["sleep", "60"], cpus=2), cluster.direct(), []

    def call() -> None:
        try:
            direct.call(add, 1)
        except ClientClosed as error:
            told.append(error)
    thread = threading.Thread(target=call)
    thread.start()
    until(lambda: cluster.ask("info")["actions"].get("PENDING"), "it waits")
    direct.close()
    thread.join(DEADLINE_S)
    assert told
    until(lambda: not cluster.ask("info")["actions"].get("PENDING"), "its action is gone")
    busy.cancel()
    until(lambda: free(cluster) == 2, "the CPUs are back")


def test_a_call_that_was_interrupted_is_not_answered_by_the_next_one(cluster: LocalCluster
                                                                    ) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    def slow_pid() -> int:
        time.sleep(0.5)
        return os.getpid()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with cluster.direct() as direct:
            process = direct.call(pid)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                direct.call(slow_pid)
            assert direct.call(add, 1) == 2
            until(lambda: not Path(f"/proc/{process}").exists(), "the call was ended")
    finally:
        signal.signal(signal.SIGALRM, before)
    until(lambda: free(cluster) == 2, "the CPUs are back")


def test_a_stream_that_is_dropped_gives_its_units_back(cluster: LocalCluster) -> None:
    direct = cluster.direct(idle_s=600)
    assert direct.call(add, 1) == 2
    assert free(cluster) == 1
    del direct
    until(lambda: free(cluster) == 2, "the CPU is back")


def test_a_client_that_ends_gives_its_units_back(cluster: LocalCluster) -> None:
    other = tangram_hpc.connect(cluster.access)
    direct = other.direct(idle_s=600)
    assert direct.call(add, 1) == 2
    other.close()
    with pytest.raises(ClientClosed):
        direct.call(add, 1)
    until(lambda: free(cluster) == 2, "the CPU is back")


def test_a_fork_may_not_use_the_stream_and_does_not_end_it(cluster: LocalCluster) -> None:
    with cluster.direct(idle_s=600) as direct:
        process = direct.call(pid)
        heard, told = os.pipe()
        child = os.fork()
        if not child:
            try:
                direct.call(pid)
            except ClientClosed as error:
                direct.close()
                os.write(told, str(error).encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert b"DirectCalls belongs to process" in os.read(heard, 4096)
        assert direct.call(pid) == process
    until(lambda: free(cluster) == 2, "the CPU is back")


# ---- where the node cannot connect -------------------------------------------------------------


class _Elsewhere:
    """A listener whose addresses lead nowhere, as behind a firewall."""

    def __init__(self, listener: DirectListener, addresses: tuple[str, ...]) -> None:
        self.addresses, self.key, self.accepted = addresses, listener.key, listener.accepted
        self.close, self.abandon = listener.close, listener.abandon


@pytest.mark.parametrize("addresses", [(), ("unix:/nowhere/direct", "tcp:127.0.0.1:1")],
                         ids=["cannot listen", "cannot be reached"])
def test_where_the_node_cannot_connect_calls_go_through_the_broker(
        tmp_path: Path, addresses: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    with LocalCluster(cpus=1, home=tmp_path) as c:
        client = tangram_hpc.connect(c.access)
        ways = client._direct
        assert ways is not None
        client._direct = DirectTransport(lambda: _Elsewhere(ways.listen(), addresses), ways.server)
        with client.direct(name="steps", timeout=1) as direct:
            assert [direct.call(add, n, y=2) for n in range(3)] == [2, 3, 4]
            with pytest.raises(RemoteError, match="ValueError: no"):
                direct.call(boom)
            with pytest.raises(ActionTimeout):
                direct.call(time.sleep, 60)
            assert direct.via == "broker" and direct.reason
        said = [r.message for r in caplog.records if "through the broker" in r.message]
        assert len(said) == 1 and direct.reason in said[0]
        if addresses:  # the broker is not to blame, and answers
            assert "the node cannot connect to the client's process (unix:" in said[0], said
        client.close()
        names = [row["name"] for row in rows(c)]
        assert names == ["steps"] * (5 + bool(addresses)), "one more that could not connect"


def test_a_client_without_a_way_to_listen_goes_through_the_broker(cluster: LocalCluster) -> None:
    client = cluster.client
    assert client is not None
    direct = DirectCalls(client._connection, None, Options(), None, 0, 0.5, 10)
    assert direct.call(add, 1) == 2 and direct.via == "broker"
    direct.close()


def test_many_streams_at_once(cluster: LocalCluster) -> None:
    def stream(number: int, told: list[int]) -> None:
        with cluster.direct(term_s=0.1) as direct:
            for n in range(100):
                told.append(direct.call(add, number, y=n))
    told: list[list[int]] = [[] for _ in range(6)]
    threads = [threading.Thread(target=stream, args=(n, told[n])) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert told == [[n + k for k in range(100)] for n in range(6)]
    until(lambda: free(cluster) == 2, "the CPUs are back")


def test_threads_that_share_a_stream_take_turns(cluster: LocalCluster) -> None:
    with cluster.direct() as direct:
        told: list[int] = []
        threads = [threading.Thread(target=lambda n=n: told.extend(
            direct.call(add, n, y=0) for _ in range(50))) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert sorted(told) == sorted(n for n in range(4) for _ in range(50))
