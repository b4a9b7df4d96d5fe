"""Engines behind HTTP as copies of a service, against fakes that speak their protocols over TCP:
every state of a copy, and every way in which an engine fails in it. What ends a real engine also
ends its fake."""

from __future__ import annotations

import asyncio
import logging

import pytest
from helpers.engine_rig import (
    FAKES,
    KINDS,
    PLACE,
    anew,
    ask,
    engine_factory,
    one_line,
    options,
    run,
    value,
)
from helpers.fake_engines import FakeEngine, score, tokens

from tangram_hpc.config.services import service_spec
from tangram_hpc.ports import OutOfDeviceMemory, ServiceDied, ServiceRefused, ServiceRequest
from tangram_hpc.services.http import engine, web
from tangram_hpc.services.http.engines import make_engine

TOKEN = "sesame-1234"

# ---- the life of a copy --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_is_parked_by_load_and_survives_many_wake_park_rounds(kind: str) -> None:
    with engine_factory(kind) as (backend, control):
        async def life() -> None:
            assert not control.asleep
            assert await backend.load() == 7
            for _ in range(3):
                assert control.asleep
                await backend.wake((0,))
                assert not control.asleep
                for _ in range(2):
                    [reply] = await backend.call([ask("score", texts=["one", "other"])])
                    assert value(reply) == [score(tokens(t, True)) for t in ("one", "other")]
                await backend.park()
            assert control.asleep
            await backend.close()

        run(life)


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_left_parked_by_a_killed_copy_is_taken_over(kind: str) -> None:
    with engine_factory(kind) as (backend, control):
        async def life() -> None:
            await backend.load()
            backend.kill()
            other = anew(kind, control)
            await other.load()
            assert control.alive and control.asleep
            await other.wake((0,))
            assert value((await other.call([ask("score", texts=["x"])]))[0]) == [
                score(tokens("x", True))]
            await other.park()
            await other.close()

        run(life)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_answered_in_order_and_a_wrong_call_fails_alone(kind: str) -> None:
    with engine_factory(kind) as (backend, _):
        async def life() -> None:
            await backend.load()
            await backend.wake((0,))
            requests = [ask("score", texts=[f"text {i}"]) for i in range(40)]
            requests[7] = ask("sing", song="a")
            requests[20] = ServiceRequest("score", b"\xc1 no value")
            replies = await backend.call(requests)
            for i, reply in enumerate(replies):
                if i in (7, 20):
                    assert one_line(reply.error) and not reply.value
                else:
                    assert value(reply) == [score(tokens(f"text {i}", True))]
            assert await backend.call([]) == []
            await backend.close()

        run(life)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["die", "500"])
@pytest.mark.parametrize("phase", ["load", "wake", "park"])
def test_an_engine_that_dies_raises_ServiceDied_in_one_line(
        kind: str, phase: str, how: str) -> None:
    with engine_factory(kind) as (backend, control):
        async def life() -> None:
            steps = {"load": backend.load, "wake": lambda: backend.wake((0,)),
                     "park": backend.park}
            for name, step in steps.items():
                if name == phase:
                    control.fail(phase, how)
                    with pytest.raises(ServiceDied) as died:
                        await step()
                    assert one_line(str(died.value)) and control.url in str(died.value)
                    break
                await step()
            await backend.close()

        run(life)


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_died_in_a_call_serves_again_after_its_restart(kind: str) -> None:
    with engine_factory(kind) as (backend, control):
        async def life() -> None:
            await backend.load()
            await backend.wake((0,))
            control.fail("call", "die")
            with pytest.raises(ServiceDied, match="gave no whole answer"):
                await backend.call([ask("generate", prompts=["x"])] * 3)
            await backend.close()
            other = anew(kind, control)
            with pytest.raises(ServiceDied, match="cannot be reached"):
                await other.load()
            control.start()
            await other.load()
            assert control.asleep
            await other.close()

        run(life)


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_call_fails_alone_while_the_health_check_answers(kind: str) -> None:
    with engine_factory(kind) as (backend, control):
        async def life() -> None:
            await backend.load()
            await backend.wake((0,))
            for how in ("500", "422", "shape"):
                control.fail("call", how)
                replies = await backend.call([ask("generate", prompts=["x"])] * 2)
                assert all(one_line(reply.error) for reply in replies)
            control.fail("call", "500")
            control.fail("load", "503")
            with pytest.raises(ServiceDied, match="/health answered 503"):
                await backend.call([ask("generate", prompts=["x"])])
            await backend.close()

        run(life)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["429", "503"])
def test_an_overloaded_engine_is_asked_again(
        kind: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "PAUSE_S", 0.01)
    with engine_factory(kind) as (backend, control):
        async def life() -> None:
            await backend.load()
            await backend.wake((0,))
            control.fail("call", how)
            before = len(control.seen)
            calls = asyncio.ensure_future(backend.call([ask("generate", prompts=["x"])] * 2))
            while len(control.seen) < before + 6:
                await asyncio.sleep(0.01)
            control.fail("call", "")
            assert all(value(reply)[0].startswith("fake") for reply in await calls)
            await backend.close()

        run(life)


@pytest.mark.parametrize("said, answer_s, pauses", [
    ("7", 0, [7, 7, 7]), ("999", 0, [10, 10]), ("soon", 0, [1] * 25), ("soon", 5, [1] * 4)])
def test_the_pauses_for_an_overloaded_engine_are_its_own_and_bounded(
        said: str, answer_s: int, pauses: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "BUSY_S", 25.0)
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    with engine_factory("vllm") as (backend, control):
        async def life() -> None:
            await backend.load()
            await backend.wake((0,))
            control.fail("call", "429")
            control.retry_after = said
            with monkeypatch.context() as patch:
                patch.setattr(engine.asyncio, "sleep", sleep)
                patch.setattr(engine, "monotonic",
                              lambda: sum(slept) + answer_s * len(control.seen))
                [reply] = await backend.call([ask("generate", prompts=["x"])])
            assert "/v1/completions answered 429" in reply.error and slept == pauses
            await backend.close()

        run(life)


@pytest.mark.parametrize("kind", KINDS)
def test_running_out_of_memory_leaves_the_engine_in_its_state(kind: str) -> None:
    with engine_factory(kind) as (backend, control):
        async def life() -> None:
            await backend.load()
            control.fail("wake", "oom")
            with pytest.raises(OutOfDeviceMemory, match="out of memory"):
                await backend.wake((0,))
            assert control.asleep
            control.fail("wake", "")
            other = anew(kind, control)
            await other.load()  # whoever comes finds it parked
            await other.close()
            assert control.alive and control.asleep
            await backend.wake((0,))
            for how in ("oom", "507"):
                control.fail("call", how)
                with pytest.raises(OutOfDeviceMemory):
                    await backend.call([ask("generate", prompts=["x"])] * 2)
            control.fail("call", "")
            [reply] = await backend.call([ask("generate", prompts=["x"], max_new_tokens=1)])
            assert value(reply)[0].startswith("fake")
            await backend.park()
            assert control.asleep
            await backend.close()

        run(life)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["oom", "507"])
@pytest.mark.parametrize("phase", ["load", "park"])
def test_an_engine_without_memory_to_be_parked_is_dead(kind: str, phase: str, how: str) -> None:
    """Neither may raise OutOfDeviceMemory: a load would end the worker, and a park the calls of
    others.
    """
    with engine_factory(kind) as (backend, control):
        async def life() -> None:
            if phase == "park":
                await backend.load()
                await backend.wake((0,))
            control.fail("park", how)
            with pytest.raises(ServiceDied, match=how if how == "507" else "out of memory"):
                await (backend.load() if phase == "load" else backend.park())
            await backend.close()

        run(life)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_that_quotes_out_of_memory_is_not_taken_for_it(kind: str) -> None:
    with engine_factory(kind) as (backend, control):
        async def life() -> None:
            await backend.load()
            await backend.wake((0,))
            control.wrong = lambda status, text: (status, {"error": "in 'CUDA out of memory'"})
            control.fail("call", "422")
            [reply] = await backend.call([ask("generate", prompts=["CUDA out of memory"])])
            assert "422" in reply.error
            await backend.close()

        run(life)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phase", ["load", "wake", "call", "park"])
def test_killing_a_copy_ends_the_awaited_request_and_the_engine_serves_on(
        kind: str, phase: str) -> None:
    with engine_factory(kind) as (backend, control):
        async def life() -> None:
            if phase != "load":
                await backend.load()
            if phase in ("call", "park"):
                await backend.wake((0,))
            control.fail(phase, "hang")
            call = {"load": backend.load, "wake": lambda: backend.wake((0,)), "park": backend.park,
                    "call": lambda: backend.call([ask("generate", prompts=["x"])])}[phase]
            awaited = asyncio.ensure_future(call())
            assert await asyncio.to_thread(control.arrived.wait, 10)
            backend.kill()
            backend.kill()
            with pytest.raises(ServiceDied, match="given up"):
                await awaited
            with pytest.raises(ServiceDied):
                await backend.load()
            await backend.close()
            control.fail(phase, "")
            if phase == "call":  # at once, while the engine may not have noticed yet
                other = anew(kind, control)
                await other.load()
                assert control.asleep
                await other.close()
            await drained(control)
            assert control.alive

        run(life)


async def drained(control: FakeEngine) -> None:
    """Returns when the server has seen the end of every connection."""
    for _ in range(500):
        if not control.open_now:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{control.open_now} connections are left")


@pytest.mark.parametrize("kind", KINDS)
def test_a_cancelled_call_stays_cancelled_and_no_connection_is_left(kind: str) -> None:
    with engine_factory(kind, timeout_s=600) as (backend, control):
        async def life() -> None:
            others = asyncio.all_tasks()
            await backend.load()
            await backend.wake((0,))
            await backend.call([ask("score", texts=["x"])] * 30)
            await drained(control)
            control.fail("call", "hang")
            awaited = asyncio.ensure_future(backend.call([ask("generate", prompts=["x"])] * 3))
            assert await asyncio.to_thread(control.arrived.wait, 10)
            awaited.cancel()
            with pytest.raises(asyncio.CancelledError):
                await awaited
            await drained(control)
            control.fail("call", "")
            assert (await backend.call([ask("score", texts=["x"])]))[0].error == ""
            await backend.close()
            assert asyncio.all_tasks() == others

        run(life)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["hang", "drip", "slow-head"])
def test_an_engine_that_does_not_answer_in_time_is_dead(kind: str, how: str) -> None:
    with engine_factory(kind, timeout_s=0.3) as (backend, control):
        async def life() -> None:
            control.fail("load", how)
            with pytest.raises(ServiceDied, match=r"/health did not answer within 0\.3 s"):
                await backend.load()
            await backend.close()

        run(life)


@pytest.mark.parametrize("kind", KINDS)
def test_a_health_check_does_not_take_as_long_as_an_answer_may(
        kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "HEALTH_S", 0.3)
    with engine_factory(kind, timeout_s=600) as (backend, control):
        async def life() -> None:
            control.fail("load", "hang")
            with pytest.raises(ServiceDied, match=r"/health did not answer within 0\.3 s"):
                await backend.load()
            await backend.close()

        run(life)


@pytest.mark.parametrize("kind", KINDS)
def test_an_endless_answer_fails_its_call_and_fills_no_memory(
        kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "BODY_MAX", 8 << 20)
    with engine_factory(kind) as (backend, control):
        async def life() -> None:
            await backend.load()
            await backend.wake((0,))
            control.fail("call", "flood")
            for reply in await backend.call([ask("generate", prompts=["x"])] * 2):
                assert one_line(reply.error)
                assert "its answer has more than 8388608 bytes" in reply.error
            control.fail("park", "flood")
            with pytest.raises(ServiceDied, match="its answer has more than"):
                await backend.park()
            await backend.close()
            await drained(control)

        run(life)


# ---- the token -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_token_is_sent_and_never_printed(
        kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("JUDGE_KEY", TOKEN)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")  # an engine is talked to directly
    with engine_factory(kind, {"key": TOKEN}, token_env="JUDGE_KEY") as (backend, control):
        async def life() -> None:
            await backend.load()
            await backend.wake((0,))
            control.key = "another"
            control.wrong = lambda status, text: (status, {"error": f"{text} {TOKEN}"})
            replies = await backend.call([ask("generate", prompts=["x"])])
            control.fail("park", "500")
            with pytest.raises(ServiceDied) as died:
                await backend.park()
            for text in (replies[0].error, str(died.value), repr(backend)):
                assert TOKEN not in text
            await backend.close()

        run(life)
        assert {sent for _, _, sent in control.seen} == {f"Bearer {TOKEN}"}
        assert TOKEN not in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_or_a_wrong_token_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FAKES[kind](key=TOKEN)
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    spec = service_spec("judge", options(kind, fake, token_env="JUDGE_KEY"))
    with pytest.raises(ServiceRefused, match="judge: token_env: JUDGE_KEY is not set"):
        make_engine(spec, PLACE)
    monkeypatch.setenv("JUDGE_KEY", "wrong\nkey")
    with pytest.raises(ServiceRefused, match="judge: token_env: JUDGE_KEY has characters"):
        make_engine(spec, PLACE)
    monkeypatch.setenv("JUDGE_KEY", "wrong")
    backend = make_engine(spec, PLACE)

    async def life() -> None:
        with pytest.raises(ServiceRefused, match=r"judge: token_env: .*401") as refused:
            await backend.load()
        assert "wrong" not in str(refused.value)
        await backend.close()

    run(life)
    fake.die()
