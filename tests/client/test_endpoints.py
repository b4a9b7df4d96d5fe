"""Endpoints live: a trainer's calls against a loopback server that pushes back by itself."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import forked_verb
from helpers.cluster_parts import cut_link
from helpers.fake_search import FakeSearch, Reply, Storm, get

import tangram_hpc
from tangram_hpc import ActionState, LocalCluster, Throttled, Transient, check_response
from tangram_hpc.client.endpoints.retry_decision import retry_after_s, understood
from tangram_hpc.client.request import Options, make_action
from tangram_hpc.domain.action import Kind
from tangram_hpc.errors import InvalidInput

BENCH = Path(__file__).resolve().parents[2] / "bench" / "bench_endpoint.py"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    home = tmp_path_factory.mktemp("home")
    with LocalCluster(cpus=1, mem_mib=2048, home=home, grace_s=0.5) as c:
        yield c


def endpoint_info(cluster: LocalCluster, name: str) -> dict[str, Any]:
    return next(e for e in cluster.ask("info")["endpoints"] if e["name"] == name)


def until_inside(cluster: LocalCluster, name: str, count: int) -> None:
    while endpoint_info(cluster, name)["inside"] != count:
        time.sleep(0.01)


def tangram(cluster: LocalCluster, *words: str) -> str:
    return forked_verb.tangram(*words, check=True, env={
        **os.environ, "TANGRAM_HOME": str(cluster.folder.parent.parent),
        "TANGRAM_ACCESS": str(cluster.access)}).stdout


# ---- declaring ---------------------------------------------------------------------------------


def test_an_endpoint_is_declared_again_freely_and_a_new_quota_needs_a_pause(cluster) -> None:
    one = cluster.register_endpoint("declared", concurrency=1, rate=5)
    cluster.register_endpoint("declared", concurrency=1, rate=5)
    with one.slot(), pytest.raises(tangram_hpc.InvalidInput, match="in use with concurrency 1"):
        cluster.register_endpoint("declared", concurrency=2)
    until_inside(cluster, "declared", 0)
    cluster.register_endpoint("declared", concurrency=2)
    assert endpoint_info(cluster, "declared")["concurrency"] == 2
    with pytest.raises(tangram_hpc.InvalidInput, match="endpoint declared: rate"):
        cluster.register_endpoint("declared", rate=-1)
    with pytest.raises(tangram_hpc.InfeasibleRequest, match="none is declared as 'poet'"):
        with cluster.endpoint("poet").slot():
            pass


def test_a_config_file_declares_endpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "site.toml"
    config.write_text("[endpoints.search]\nconcurrency = 3\nrate = 20\nburst = 4\n")
    monkeypatch.setenv("TANGRAM_CONFIG", str(config))
    with LocalCluster(cpus=1, home=tmp_path) as c:
        with c.endpoint("search").slot() as slot:
            assert slot.id and endpoint_info(c, "search")["inside"] == 1
        assert endpoint_info(c, "search")["rate"] == 20
    config.write_text("[endpoints.search]\nconcurrency = 0\n")
    told = forked_verb.tangram("broker", "--job", "x",
                               env={**os.environ, "TANGRAM_HOME": str(tmp_path)})
    assert told.returncode == 2 and told.stderr.count("\n") == 1
    assert "endpoint search: concurrency" in told.stderr


# ---- calls from the trainer --------------------------------------------------------------------


def test_slots_and_tokens_limit_threads_and_event_loops(cluster) -> None:
    endpoint = cluster.register_endpoint("held", concurrency=2)

    async def all_of_them() -> int:
        async with FakeSearch(rate=1e6, burst=1e6, latency_s=0.02) as server:
            async def one(n: int) -> None:
                async with endpoint.slot() as slot:
                    slot.cost = 0.25
                    assert check_response(await get(server.port, str(n))).status == 200
            await asyncio.gather(*map(one, range(12)))
            assert server.carried.total() == 12
            return server.most_inside
    assert asyncio.run(all_of_them()) == 2
    until_inside(cluster, "held", 0)
    told = endpoint_info(cluster, "held")
    assert (told["calls"], told["cost"]) == (12, 3.0)


def serve(server: FakeSearch, calls: Any) -> Any:
    """What `calls(server)` comes to, with the server up."""
    async def run() -> Any:
        async with server:
            return await calls(server)
    return asyncio.run(run())


def test_refused_requests_are_repeated_and_others_only_if_idempotent(cluster) -> None:
    endpoint = cluster.register_endpoint("repeats", rate=200)

    async def calls(server: FakeSearch) -> None:
        async def ask(n: str) -> Reply:
            return check_response(await get(server.port, n))
        # 429: not carried out, so repeated whatever it is
        reply = await endpoint.request(lambda: ask("a"))
        assert reply.text.startswith("fake") and server.stormed >= 1
        assert server.carried["a"] == 1
        # 503 after it was carried out: only what may be
        server.failing = 1.0
        with pytest.raises(Transient, match="503"):
            await endpoint.request(lambda: ask("b"))
        assert server.carried["b"] == 1
        task = asyncio.ensure_future(endpoint.request(lambda: ask("c"), idempotent=True))
        while server.carried["c"] < 3:
            await asyncio.sleep(0.01)
        server.failing = 0.0
        assert (await task).status == 200
    serve(FakeSearch(rate=1e6, burst=1e6, storms=[Storm(0.0, 0.05, "0.05")]), calls)


def test_a_request_that_never_reached_the_endpoint_is_repeated(cluster) -> None:
    endpoint, tries = cluster.register_endpoint("refusing", concurrency=4), []

    async def refused() -> str:
        tries.append(1)
        if len(tries) < 3:
            await get(1, "x")  # nobody listens there
        return "there"
    assert asyncio.run(endpoint.request(refused)) == "there" and len(tries) == 3


def test_a_request_that_times_out_ends_with_the_reason(cluster) -> None:
    endpoint, ended = cluster.register_endpoint("late", concurrency=1), []

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def full() -> None:
        raise Throttled(30.0)
    with pytest.raises(tangram_hpc.ActionFailed, match=r"TIMEOUT: .* 0.1 s$"):
        asyncio.run(endpoint.request(slow, timeout=0.1))
    assert ended == [True]
    until_inside(cluster, "late", 0)
    with pytest.raises(tangram_hpc.ActionFailed, match=r"last: too many requests \(1 attempts\)"):
        asyncio.run(endpoint.request(full, timeout=0.1))
    told = endpoint_info(cluster, "late")
    assert 0 < told["throttled_s"] <= 30 and told["concurrency_now"] == 1
    rows = json.loads(tangram(cluster, "acct", "-j", cluster.job, "--json"))["actions"]
    states = [r["state"] for r in rows if r["name"] == "late"]
    assert states == ["TIMEOUT", "TIMEOUT"]


def test_a_cancelled_request_gives_its_slot_back(cluster) -> None:
    endpoint = cluster.register_endpoint("left", concurrency=1)

    async def calls() -> None:
        holder = asyncio.ensure_future(endpoint.request(lambda: asyncio.sleep(60)))
        waiter = asyncio.ensure_future(endpoint.request(lambda: asyncio.sleep(0, "got it")))
        given_up = asyncio.ensure_future(endpoint.request(lambda: asyncio.sleep(60)))
        await asyncio.sleep(0.1)
        for task in (given_up, holder):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await waiter == "got it"
    asyncio.run(calls())
    until_inside(cluster, "left", 0)


def test_a_shared_call_ends_with_the_last_caller_that_is_cancelled(cluster) -> None:
    cluster.register_endpoint("shared-left", concurrency=1)
    endpoint = cluster.endpoint("shared-left", single_flight=True)
    ends: list[str] = []

    async def attempt() -> str:
        try:
            await asyncio.sleep(0.4 if ends else 60)
            return "got it"
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    async def calls() -> None:
        first, second = (asyncio.ensure_future(endpoint.request(attempt, key="a"))
                         for _ in range(2))
        await asyncio.sleep(0.1)
        first.cancel()
        await asyncio.sleep(0.1)
        assert not ends and not second.done()
        second.cancel()
        third, fourth = (asyncio.ensure_future(endpoint.request(attempt, key="a"))
                         for _ in range(2))
        await asyncio.sleep(0.2)
        assert ends == ["cancelled"] and first.cancelled() and second.cancelled()
        third.cancel()
        assert await asyncio.wait_for(fourth, 10) == "got it"
    asyncio.run(calls())
    until_inside(cluster, "shared-left", 0)


def test_an_error_of_the_attempt_is_raised_to_its_caller(cluster) -> None:
    endpoint = cluster.register_endpoint("wrong")

    async def wrong() -> None:
        raise ValueError("no such page")
    with pytest.raises(ValueError, match="no such page"):
        asyncio.run(endpoint.request(wrong, idempotent=True))
    with pytest.raises(ZeroDivisionError), endpoint.slot():
        raise ZeroDivisionError
    with pytest.raises(tangram_hpc.InvalidInput, match="cost: nan"), endpoint.slot() as slot:
        slot.cost = float("nan")
    with pytest.raises(TypeError):
        asyncio.run(endpoint.request(lambda: 5))  # not awaitable
    for odd in ("soon", None, 0, float("nan")):
        with pytest.raises(tangram_hpc.InvalidInput, match=r"timeout: .* is not a number"):
            asyncio.run(endpoint.request(lambda: asyncio.sleep(0), timeout=odd))  # type: ignore
    for _ in range(3):  # each gives its slot back
        with pytest.raises(tangram_hpc.InvalidInput, match="cost: None"), endpoint.slot() as slot:
            slot.cost = None  # type: ignore[assignment]
    with pytest.raises(tangram_hpc.InvalidInput, match="timeout"):
        asyncio.run(endpoint.request(wrong, timeout=0))
    until_inside(cluster, "wrong", 0)


def test_a_slot_that_is_in_use_is_refused_to_others_and_given_back_once(cluster) -> None:
    """As with a semaphore that many tasks share: each entry would hold a call, and only the last
    one would be given back."""
    endpoint = cluster.register_endpoint("shared-slot", concurrency=2)
    slot = endpoint.slot()

    async def use() -> None:
        async with slot:
            await asyncio.sleep(0.05)

    async def all_at_once() -> list[object]:
        return await asyncio.gather(use(), use(), use(), return_exceptions=True)

    first, *others = asyncio.run(all_at_once())
    assert first is None
    assert all(isinstance(one, tangram_hpc.InvalidInput) and "it is in use" in str(one)
               for one in others)
    until_inside(cluster, "shared-slot", 0)
    with slot:  # one after the other is no mistake
        assert slot.id


def test_the_text_of_an_attempts_error_cannot_harm_the_client(cluster) -> None:
    """A tool's JSON may hold half of a surrogate pair, and an exception may have no text at all."""
    endpoint = cluster.register_endpoint("odd-errors", concurrency=1)

    class NoText(Exception):
        def __str__(self) -> str:
            raise TypeError("no text")

    async def attempt(error: Exception) -> None:
        raise error

    for error in (ValueError("\ud800 is half"), NoText()):
        with pytest.raises(type(error)):
            asyncio.run(endpoint.request(lambda error=error: attempt(error)))
        with pytest.raises(type(error)), endpoint.slot():
            raise error
    with pytest.raises(tangram_hpc.ActionTimeout):
        asyncio.run(endpoint.request(lambda: attempt(Throttled(9, "\udfff")), timeout=0.1))
    until_inside(cluster, "odd-errors", 0)


def test_cost_and_repeats_are_in_the_accounting(cluster) -> None:
    endpoint, tries = cluster.register_endpoint("priced", concurrency=4), []

    async def attempt() -> int:
        tries.append(1)
        if len(tries) == 1:
            raise Throttled(0.01)
        return 40
    asyncio.run(endpoint.request(attempt, cost=lambda tokens: tokens / 1000, name="ask judge"))
    until_inside(cluster, "priced", 0)
    told = tangram(cluster, "acct", "-j", cluster.job, "-P", "-n", "-o",
                   "JobName,State,Cost,Restarts,NodeList,NCPUS,TotalCPU")
    assert "ask judge|COMPLETED|0.04|1|None assigned|0|00:00:00.000" in told.splitlines()
    assert "ENDPOINT priced" in tangram(cluster, "info")


def test_cache_and_single_flight_share_answers_where_asked_to(cluster) -> None:
    cluster.register_endpoint("shared", concurrency=8)
    plain = cluster.endpoint("shared")
    sharing = cluster.endpoint("shared", cache=1, single_flight=True)
    made: list[str] = []

    async def attempt() -> int:
        made.append("call")
        await asyncio.sleep(0.02)
        return len(made)

    async def calls() -> None:
        assert sorted(await asyncio.gather(*(plain.request(attempt, key="a") for _ in range(3)))
                      ) == [3, 3, 3] and len(made) == 3
        made.clear()
        asked = [sharing.request(attempt, key="a") for _ in range(3)]
        assert await asyncio.gather(*asked) == [1] * 3
        assert await sharing.request(attempt, key="a") == 1 and len(made) == 1
        assert await sharing.request(attempt, key="b") == 2  # a place for one: "a" is forgotten
        assert await sharing.request(attempt, key="a") == 3
        assert await sharing.request(attempt) == 4
    asyncio.run(calls())


def test_a_trainer_that_stood_still_does_not_break_the_limit_afterwards(cluster) -> None:
    """Its loop is blocked again and again while grants come; the endpoint is not."""
    endpoint = cluster.register_endpoint("stood", rate=50, burst=20, jitter_ms=300)
    server, up, over = FakeSearch(rate=50, burst=20), threading.Event(), threading.Event()

    async def serve_aside() -> None:
        async with server:
            up.set()
            await asyncio.to_thread(over.wait)

    async def calls() -> list[str]:
        async def attempt() -> str:
            return check_response(await get(server.port, "x")).text
        async def stand_still() -> None:
            for _ in range(3):
                await asyncio.sleep(0.3)
                time.sleep(0.5)  # 25 grants come in that time
        running = [endpoint.request(attempt) for _ in range(100)]
        return (await asyncio.gather(stand_still(), *running))[1:]
    aside = threading.Thread(target=asyncio.run, args=(serve_aside(),))
    aside.start()
    up.wait()
    try:
        assert len(asyncio.run(calls())) == 100
    finally:
        over.set()
        aside.join()
    assert (server.over, server.carried["x"]) == (0, 100)


def test_a_waiting_request_is_explained(cluster) -> None:
    endpoint = cluster.register_endpoint("asked", concurrency=1)
    with endpoint.slot() as held:
        waiting = endpoint.slot()
        entered = threading.Thread(target=waiting.__enter__)
        entered.start()
        while not waiting.id:
            time.sleep(0.01)
        while (told := cluster.ask("explain", waiting.id)).get("error"):
            time.sleep(0.01)
        assert (told["reason"], told["held_by"][0]["id"]) == ("Quota", held.id)
        assert held.id in tangram(cluster, "explain", waiting.id)
        assert "asked" in tangram(cluster, "explain", held.id)
    entered.join()
    waiting.__exit__(None, None, None)
    until_inside(cluster, "asked", 0)


# ---- losses ------------------------------------------------------------------------------------


def test_a_killed_client_gives_its_slot_back(cluster) -> None:
    endpoint = cluster.register_endpoint("killed", concurrency=1)
    holder = subprocess.Popen(
        [sys.executable, "-c", "import sys, time, tangram_hpc\n"
         "c = tangram_hpc.connect(sys.argv[1])\n"
         "with c.endpoint('killed').slot():\n    time.sleep(60)\n", str(cluster.access)])
    until_inside(cluster, "killed", 1)
    holder.kill()
    holder.wait()
    with endpoint.slot():  # after the grace
        pass


def test_a_lost_connection_loses_no_grant_and_no_answer(cluster) -> None:
    with tangram_hpc.connect(cluster.access) as client:
        endpoint = client.register_endpoint("broken", concurrency=4)

        async def attempt() -> int:
            await asyncio.sleep(0.05)
            return 7

        async def calls() -> list[int]:
            running = [asyncio.ensure_future(endpoint.request(attempt)) for _ in range(24)]
            for _ in range(3):
                await asyncio.sleep(0.06)
                cut_link(client)  # the client finds its way back
            return await asyncio.gather(*running)
        assert asyncio.run(calls()) == [7] * 24
        until_inside(cluster, "broken", 0)
        assert endpoint_info(cluster, "broken")["calls"] == 24  # each counted once


# ---- actions on workers ------------------------------------------------------------------------


def test_an_endpoint_that_is_sent_to_another_process_names_the_remedy(cluster) -> None:
    cluster.register_endpoint("far", concurrency=1)
    with pytest.raises(tangram_hpc.InvalidInput, match="cannot be sent to another process"):
        pickle.dumps(cluster.endpoint("far"))


def test_an_action_of_an_endpoint_holds_a_slot_and_no_core(cluster) -> None:
    cluster.register_endpoint("worker", concurrency=2)
    hold = cluster.submit(["sleep", "60"])  # the only core
    got = [cluster.submit("echo $TANGRAM_CPUS; nproc", endpoint="worker") for _ in range(4)]
    number = cluster.submit(len, "four", endpoint="worker")
    results = [f.result(60) for f in got]
    assert all(r.state is ActionState.COMPLETED for r in results) and number.result(60) == 4
    assert {r.enforcement for r in results} == {"counted"}
    assert endpoint_info(cluster, "worker")["calls"] == 5 and not hold.done()
    hold.cancel()
    action = make_action(1, Kind.EXEC, Options(endpoint="worker"), 0, "x")
    assert action.attempts_max == 1  # a lost node may have called already
    with pytest.raises(tangram_hpc.InvalidInput, match="cpus: an action of an endpoint"):
        cluster.submit(["true"], endpoint="worker", cpus=2)


def test_a_function_on_a_worker_says_that_its_endpoint_pushed_back(cluster) -> None:
    cluster.register_endpoint("pushed", concurrency=8)

    def attempt() -> None:
        raise tangram_hpc.Throttled(20.0)
    with pytest.raises(tangram_hpc.RemoteError, match="Throttled: too many"):
        cluster.submit(attempt, endpoint="pushed").result(60)
    told = endpoint_info(cluster, "pushed")
    assert told["concurrency_now"] == 4 and 0 < told["throttled_s"] <= 20


# ---- what an answer says -----------------------------------------------------------------------


def test_responses_are_recognised_by_their_attributes() -> None:
    now = datetime(2030, 1, 1, tzinfo=timezone.utc)
    fine = SimpleNamespace(status_code=404, headers={})
    assert check_response(fine) is fine
    for shape in ({"status_code": 429}, {"status": 429}):
        with pytest.raises(Throttled) as told:
            check_response(SimpleNamespace(headers={"RETRY-after": "1.5"}, **shape))
        assert told.value.retry_after == 1.5
    with pytest.raises(Transient, match="503") as failed:
        check_response(SimpleNamespace(status=503, headers={"Retry-After": "x"}))
    assert failed.value.reached and failed.value.retry_after == 0
    assert retry_after_s("Tue, 01 Jan 2030 00:00:07 GMT", now) == 7
    assert retry_after_s("Mon, 31 Dec 2029 00:00:00 GMT", now) == 0
    assert retry_after_s("Mon, 01 Jan 99999999999999999999999 00:00:00 GMT") == 0
    assert retry_after_s("") == retry_after_s("soon") == retry_after_s("-3") == 0


def test_failures_are_recognised_by_their_type_name() -> None:
    connect_error = type("ConnectError", (Exception,), {})
    read_error = type("ReadError", (type("TransportError", (Exception,), {}),), {})
    for error, reached in ((ConnectionRefusedError(), False), (connect_error("x"), False),
                           (ConnectionResetError(), True), (read_error("x"), True)):
        failure = understood(error)
        assert isinstance(failure, Transient) and failure.reached is reached
    assert understood(ValueError("x")) is None and understood(TimeoutError()) is None


def test_no_answer_in_time_is_one_failure_in_every_library() -> None:
    """With httpx such a call was repeated; with requests and aiohttp it failed."""
    def named(name: str, *bases: type[Exception]) -> type[Exception]:
        return type(name, bases or (Exception,), {})

    urllib3 = named("ReadTimeoutError", named("TimeoutError"))
    aiohttp = named("SocketTimeoutError", named("ServerTimeoutError", TimeoutError))
    httpx = named("ReadTimeout", named("TimeoutException", named("TransportError")))
    for error in (httpx("x"), aiohttp("x"), urllib3("x"), named("ReadTimeout", OSError)("x"),
                  named("ConnectionError", OSError)(urllib3("x"))):
        failure = understood(error)
        assert isinstance(failure, Transient) and failure.reached
    connect = named("ConnectionTimeoutError", named("ServerTimeoutError", TimeoutError))
    failure = understood(connect("x"))
    assert isinstance(failure, Transient) and not failure.reached


def test_failures_that_a_library_wraps_are_recognised() -> None:
    """urllib, urllib3 and requests say in an exception within theirs how the connection failed."""
    from urllib.error import HTTPError, URLError

    def named(name: str, *bases: type[Exception]) -> type[Exception]:
        return type(name, bases or (Exception,), {})

    refused, reset = named("NewConnectionError")("refused"), ConnectionResetError("reset")
    retries = named("MaxRetryError")("no more retries")
    retries.reason = refused  # type: ignore[attr-defined]
    of_requests = named("ConnectionError", OSError)
    broken = of_requests(named("ProtocolError")("Connection aborted.", reset))
    for error, reached in ((URLError(ConnectionRefusedError()), False), (retries, False),
                           (of_requests(retries), False), (broken, True)):
        failure = understood(error)
        assert isinstance(failure, Transient) and failure.reached is reached
    for own in (URLError("unknown url type"), HTTPError("http://x", 404, "no", None, None),
                ValueError(reset), URLError(TimeoutError())):
        assert understood(own) is None


# ---- the figure --------------------------------------------------------------------------------


def test_an_endpoints_rate_is_used_up_and_never_exceeded() -> None:
    """The bench, tiny: `make bench` has the figure over minutes."""
    told = subprocess.run([sys.executable, str(BENCH), "--tiny"], capture_output=True, text=True,
                          timeout=120, check=False, stdin=subprocess.DEVNULL)
    assert told.returncode == 0, told.stderr
    figures = json.loads(told.stdout)["figures"]
    assert figures["over_the_limit"] == 0
    assert figures["most_in_1_s"] <= figures["limit_of_1_s"]
    assert figures["lost"] == figures["repeated"] == figures["said_failed_but_not"] == 0
    assert figures["answers_429"] > 0 and figures["answers_503"] > 0
    assert figures["share_while_open"] > 0.8  # of one run, on a machine that may be busy


@pytest.mark.parametrize("make, text, wait_s", [
    (lambda: Throttled(), "too many requests", 0.0), (lambda: Throttled(3, "wait"), "wait", 3.0),
    (lambda: Throttled("slow down"), "slow down", 0.0), (lambda: Throttled("5"), "too many", 5.0),
    (lambda: Throttled(None), "too many requests", 0.0),
    (lambda: Transient("gone", retry_after="2"), "gone", 2.0)])  # fmt: skip
def test_a_failure_of_an_endpoint_is_made_and_copied_as_people_write_it(
        make: Any, text: str, wait_s: float) -> None:
    for failure in (make(), pickle.loads(pickle.dumps(make())), copy.copy(make())):
        assert text in str(failure) and failure.retry_after == wait_s
    with pytest.raises(InvalidInput, match="'soon' is no number of seconds; leave it out"):
        Transient(retry_after="soon")
