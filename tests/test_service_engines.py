"""Engines behind HTTP as copies of a service, against fakes that speak their protocols over TCP:
what is right is counted from the fakes' own tokens, what ends a real engine ends the fake."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fake_engines import (
    BOS,
    MODEL,
    FakeEngine,
    FakePlain,
    FakeSglang,
    FakeVllm,
    continuation,
    logprob,
    score,
    tokens,
)

from tangram_hpc.backends.services.engines import make_engine
from tangram_hpc.backends.services.sglang import MARK
from tangram_hpc.errors import InvalidInput
from tangram_hpc.ports import (
    OutOfDeviceMemory,
    ServiceBackend,
    ServiceDied,
    ServicePlace,
    ServiceRefused,
    ServiceReply,
    ServiceRequest,
)
from tangram_hpc.services import service_spec
from tangram_hpc.wire.value import decode_value, encode_value

PLACE = ServicePlace((0,), "cuda", "")
FAKES: dict[str, type[FakeEngine]] = {"vllm": FakeVllm, "sglang": FakeSglang, "http": FakePlain}
MODELS = ("vllm", "sglang")
KINDS = (*MODELS, "http")
TOKEN = "sesame-1234"


def options(kind: str, fake: FakeEngine, **more: Any) -> dict[str, Any]:
    own = {"wake_path": "/wake", "park_path": "/park"} if kind == "http" else {"model": MODEL}
    return {"backend": kind, "url": fake.url, "timeout_s": 10, "weights_mib": 7, **own, **more}


@contextmanager
def engine_factory(
    kind: str, fake_options: dict[str, Any] | None = None, **more: Any
) -> Iterator[tuple[ServiceBackend, FakeEngine]]:
    """A backend that was not loaded yet, and the fake engine that it will talk to: `control.fail`
    (phase, how), `die`, `start`, `asleep`, `arrived`, `open_now`."""
    control = FAKES[kind](**(fake_options or {}))
    try:
        yield make_engine(service_spec("judge", options(kind, control, **more)), PLACE), control
    finally:
        control.die()


def run(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(work(), 30)

    return asyncio.run(bounded())


def ask(method: str, **arguments: Any) -> ServiceRequest:
    return ServiceRequest(method, encode_value(arguments))


def value(reply: ServiceReply) -> Any:
    assert reply.error == ""
    return decode_value(reply.value)


def following(prompt: str | list[int], completion: str | list[int]) -> list[float]:
    before = tokens(prompt, True) if isinstance(prompt, str) else prompt
    after = tokens(completion, False) if isinstance(completion, str) else completion
    return [pytest.approx(logprob(before + after[:i], t)) for i, t in enumerate(after)]


def one_line(text: str) -> bool:
    return bool(text) and "\n" not in text and "Traceback" not in text


# ---- the life of a copy --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_parked_by_load_and_lives_through_many_rounds(kind: str) -> None:
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
def test_an_engine_that_was_left_parked_is_taken_over(kind: str) -> None:
    with engine_factory(kind) as (backend, control):
        async def life() -> None:
            await backend.load()
            backend.kill()
            other = make_engine(service_spec("judge", options(kind, control)), PLACE)
            await other.load()
            assert control.alive and control.asleep
            await other.wake((0,))
            assert value((await other.call([ask("score", texts=["x"])]))[0]) == [
                score(tokens("x", True))]
            await other.park()
            await other.close()

        run(life)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_answered_in_its_order_and_a_wrong_call_is_wrong_alone(kind: str) -> None:
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
def test_an_engine_that_dies_says_so_in_one_line(kind: str, phase: str, how: str) -> None:
    with engine_factory(kind) as (backend, control):
        async def life() -> None:
            steps = {"load": backend.load, "wake": lambda: backend.wake((0,)), "park": backend.park}
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
def test_a_death_in_a_call_a_dead_port_and_a_new_life(kind: str) -> None:
    with engine_factory(kind) as (backend, control):
        async def life() -> None:
            await backend.load()
            await backend.wake((0,))
            control.fail("call", "die")
            with pytest.raises(ServiceDied, match="cannot be reached"):
                await backend.call([ask("generate", prompts=["x"])] * 3)
            await backend.close()
            other = make_engine(service_spec("judge", options(kind, control)), PLACE)
            with pytest.raises(ServiceDied, match="cannot be reached"):
                await other.load()
            control.start()
            await other.load()
            assert control.asleep
            await other.close()

        run(life)


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_call_is_its_own_while_the_health_check_answers(kind: str) -> None:
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
def test_out_of_memory_leaves_it_as_it_was(kind: str) -> None:
    with engine_factory(kind) as (backend, control):
        async def life() -> None:
            await backend.load()
            control.fail("wake", "oom")
            with pytest.raises(OutOfDeviceMemory, match="out of memory"):
                await backend.wake((0,))
            assert control.asleep
            control.fail("wake", "")
            other = make_engine(service_spec("judge", options(kind, control)), PLACE)
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
def test_a_text_that_speaks_of_memory_is_not_out_of_memory(kind: str) -> None:
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
def test_kill_ends_what_is_awaited_and_the_engine_serves_on(kind: str, phase: str) -> None:
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
                other = make_engine(service_spec("judge", options(kind, control)), PLACE)
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
def test_nothing_is_left_open_and_a_cancelled_caller_stays_cancelled(kind: str) -> None:
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
def test_an_engine_that_does_not_answer_in_time_is_dead(kind: str) -> None:
    with engine_factory(kind, timeout_s=0.3) as (backend, control):
        async def life() -> None:
            control.fail("load", "hang")
            with pytest.raises(ServiceDied, match=r"/health did not answer within 0\.3 s"):
                await backend.load()
            await backend.close()

        run(life)


# ---- the token -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_token_is_sent_and_never_told(
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
    with pytest.raises(ServiceRefused, match="judge: token_env: JUDGE_KEY holds what no"):
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


# ---- what is asked of models ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_logprobs_are_those_of_the_completions_own_tokens(kind: str) -> None:
    pairs: list[tuple[Any, Any]] = [
        ("the ca", "t in"), ("bat", "her"), ("", "an"), ("x", ""), ([BOS, 9], [5, 6, 7])]
    assert tokens("bather", True) != tokens("bat", True) + tokens("her", False)
    with engine_factory(kind) as (backend, _):
        async def life() -> None:
            await backend.load()
            await backend.wake((0,))
            replies = await backend.call([
                ask("logprobs", prompts=[p], completions=[c]) for p, c in pairs]
                + [ask("logprobs", prompts=[p for p, _ in pairs[:4]],
                       completions=[c for _, c in pairs[:4]]),
                   ask("logprobs", prompts=[[]], completions=[[5, 6]]),
                   ask("logprobs", prompts=["a"], completions=[[999_999]]),
                   ask("logprobs", prompts=[], completions=[])])
            for (p, c), reply in zip(pairs, replies, strict=False):
                assert value(reply) == [following(p, c)]
            assert value(replies[5]) == [following(p, c) for p, c in pairs[:4]]
            assert value(replies[6]) == [[None, pytest.approx(logprob([5], 6))]]
            assert "400" in replies[7].error and "vocabulary" in replies[7].error
            assert value(replies[8]) == []
            await backend.close()

        run(life)


@pytest.mark.parametrize("kind", MODELS)
def test_generate_and_its_seed(kind: str) -> None:
    with engine_factory(kind, {"deterministic": True}) as (backend, _):
        async def life() -> None:
            await backend.load()
            await backend.wake((0,))
            prompts = ["one", "other"]
            greedy, first, again, third = await backend.call([
                ask("generate", prompts=prompts, max_new_tokens=2),
                *(ask("generate", prompts=prompts, max_new_tokens=2, temperature=1.0, seed=s)
                  for s in (5, 5, 6))])
            assert value(greedy) == [continuation(tokens(p, True), 2, 0, None) for p in prompts]
            assert value(first) == value(again) == [
                continuation(tokens(p, True), 2, 1.0, 5) for p in prompts]
            assert value(third) != value(first)
            await backend.close()

        run(life)


@pytest.mark.parametrize("kind", MODELS)
def test_calls_that_are_alike_are_one_request(kind: str) -> None:
    with engine_factory(kind) as (backend, control):
        async def life() -> None:
            await backend.load()
            await backend.wake((0,))
            before = len(control.seen)
            replies = await backend.call([
                ask("score", texts=["a", "b"]), ask("generate", prompts=["a"], max_new_tokens=1),
                ask("score", texts=[]), ask("score", texts=["c"]), ask("score", texts=[[4, 5]]),
                ask("generate", prompts=["b", "c"], max_new_tokens=1),
                ask("generate", prompts=["a"], max_new_tokens=2)])
            assert [value(reply) for reply in replies] == [
                [score(tokens("a", True)), score(tokens("b", True))],
                [continuation(tokens("a", True), 1, 0, None)], [], [score(tokens("c", True))],
                [score([4, 5])], [continuation(tokens(p, True), 1, 0, None) for p in "bc"],
                [continuation(tokens("a", True), 2, 0, None)]]
            assert len(control.seen) - before == 4  # text, ids; one token, two
            await backend.close()

        run(life)


def test_a_seed_that_sglang_would_not_heed_is_told() -> None:
    with engine_factory("sglang") as (backend, _):
        async def life() -> None:
            await backend.load()
            await backend.wake((0,))
            warm, cold = await backend.call([
                ask("generate", prompts=["x"], temperature=t, seed=1) for t in (1.0, 0.0)])
            assert "seed" in warm.error and "--enable-deterministic-inference" in warm.error
            assert value(cold)
            await backend.close()

        run(life)


@pytest.mark.parametrize("kind", MODELS)
def test_more_classes_are_a_list_for_each_text(kind: str) -> None:
    with engine_factory(kind, {"classes": 3}) as (backend, _):
        async def life() -> None:
            await backend.load()
            await backend.wake((0,))
            [reply, ids] = await backend.call([ask("score", texts=["x"]),
                                               ask("score", texts=[[4, 5]])])
            first = score(tokens("x", True))
            assert value(reply) == [[first, first + 1, first + 2]]
            assert value(ids)[0][0] == score([4, 5])
            await backend.close()

        run(life)


@pytest.mark.parametrize("method, arguments, told", [
    ("score", {"texts": "one"}, "score: texts: must be a list"),
    ("score", {"texts": ["a", [1]]}, "score: texts: must be a list"),
    ("score", {"texts": [[True]]}, "score: texts: must be a list"),
    ("score", {"text": ["one"]}, "score: arguments: text where texts belong"),
    ("score", {}, "score: arguments: none where texts belong"),
    ("score", [1], "score: arguments: must be a dict"),
    ("logprobs", {"prompts": ["a"], "completions": []}, "logprobs: completions: 0 of them for 1"),
    ("generate", {"prompts": ["a"], "max_new_tokens": 0}, "generate: max_new_tokens"),
    ("generate", {"prompts": ["a"], "temperature": float("nan")}, "generate: temperature"),
    ("generate", {"prompts": ["a"], "seed": -1}, "generate: seed"),
    ("embed", {}, "method: 'embed' is not one of score, logprobs, generate"),
])
def test_what_is_wrong_with_a_call_is_named(method: str, arguments: Any, told: str) -> None:
    with engine_factory("vllm") as (backend, control):
        async def life() -> None:
            await backend.load()
            await backend.wake((0,))
            before = len(control.seen)
            [reply] = await backend.call([ServiceRequest(method, encode_value(arguments))])
            assert told in reply.error and len(control.seen) == before
            await backend.close()

        run(life)


# ---- each engine's own ---------------------------------------------------------------------------


def test_a_sleep_of_level_two_reads_the_weights_again() -> None:
    with engine_factory("vllm", sleep_level=2) as (backend, control):
        async def life() -> None:
            assert await backend.load() == 0
            assert not control.weights
            await backend.wake((0,))
            [reply] = await backend.call([ask("logprobs", prompts=["a"], completions=["bc"])])
            assert value(reply) == [following("a", "bc")]
            await backend.close()

        run(life)
        orders = [path for verb, path, _ in control.seen if verb == "POST" and "/v1/" not in path]
        assert orders[:4] == ["/sleep?level=2", "/wake_up?tags=weights", "/collective_rpc",
                              "/wake_up?tags=kv_cache"]


@pytest.mark.parametrize("kind, flags, told", [
    ("vllm", {"dev_mode": False}, "VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"),
    ("vllm", {"sleep_mode": False}, "--enable-sleep-mode"),
    ("sglang", {"memory_saver": False}, "with --enable-memory-saver$"),
    ("sglang", {"backup": False}, "with --enable-weights-cpu-backup$"),
    ("http", {"parks": False}, "park_path: .*404"),
])
def test_an_engine_that_cannot_be_parked_is_refused(
        kind: str, flags: dict[str, bool], told: str) -> None:
    with engine_factory(kind, flags) as (backend, control):
        async def life() -> None:
            with pytest.raises(ServiceRefused, match=f"service judge: .*{told}") as refused:
                await backend.load()
            assert one_line(str(refused.value))
            assert not any("sleep?" in path or "release" in path for _, path, _ in control.seen)
            await backend.close()

        run(life)


@pytest.mark.parametrize("kind", MODELS)
def test_another_model_is_refused(kind: str) -> None:
    with engine_factory(kind, model="other") as (backend, control):
        async def life() -> None:
            with pytest.raises(ServiceRefused, match=f"model: .* serves {MODEL}, not other"):
                await backend.load()
            await backend.close()

        run(life)
        assert not control.asleep


def test_older_paths_of_sglang_are_found_and_its_version_comes_back() -> None:
    with engine_factory("sglang", {"old": True}) as (backend, control):
        async def life() -> None:
            control.version = "step-7"
            await backend.load()
            assert control.version == MARK + "step-7"
            await backend.wake((0,))
            assert control.version == "step-7"
            control.version = "step-8"  # a trainer's new weights
            await backend.park()
            await backend.wake((0,))
            assert control.version == "step-8"
            await backend.close()

        run(life)


def test_plain_http_carries_what_json_holds() -> None:
    numpy = pytest.importorskip("numpy")
    with engine_factory("http") as (backend, _):
        async def life() -> None:
            await backend.load()
            await backend.wake((0,))
            replies = await backend.call([
                ask("score", texts=["x"]), ask("score", texts=numpy.zeros(2)),
                ask("score", texts=[b"x"]), ask("score", texts=[float("inf")]),
                ask("refused"), ask("score", texts=["y"])])
            assert [bool(reply.error) for reply in replies] == [False, *[True] * 4, False]
            assert all("what JSON holds" in reply.error for reply in replies[1:4])
            assert "422: a method that spoils its batch" in replies[4].error
            await backend.close()

        run(life)


def test_a_host_that_is_none_is_dead() -> None:
    spec = service_spec("judge", {"backend": "http", "url": "http://☃..x:1"})
    backend = make_engine(spec, PLACE)

    async def life() -> None:
        with pytest.raises(ServiceDied, match="cannot be reached") as died:
            await backend.load()
        assert one_line(str(died.value))
        await backend.close()

    run(life)


def test_plain_http_without_paths_stays_where_it_is() -> None:
    with engine_factory("http", wake_path="", park_path="", health_path="") as (backend, control):
        async def life() -> None:
            await backend.load()
            await backend.wake((0,))
            await backend.call([ask("score", texts=["x"])])
            await backend.park()
            await backend.close()

        run(life)
        assert [path for _, path, _ in control.seen] == ["/call"]


# ---- what a person writes ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("url", [
    "localhost:8000", "ftp://host", "http://two hosts:1", "http://", "http://host:99999", "http://u:secret@host:1",
    "http://host:1/?key=secret"])
def test_a_wrong_url_is_named_without_its_secret(kind: str, url: str) -> None:
    own = {} if kind == "http" else {"model": MODEL}
    with pytest.raises(InvalidInput, match="judge: url: must") as wrong:
        service_spec("judge", {"backend": kind, "url": url, **own})
    assert "secret" not in str(wrong.value)


def test_a_url_may_name_the_blocks_first_gpu() -> None:
    fake = FakePlain()
    url = fake.url[:-1] + "{gpu}"
    spec = service_spec("judge", {**options("http", fake), "url": url})
    backend = make_engine(spec, ServicePlace((int(fake.url[-1]), 9), "cuda", ""))

    async def life() -> None:
        await backend.load()
        await backend.close()

    run(life)
    assert fake.asleep
    fake.die()


def test_a_missing_httpx_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ServiceRefused, match=r"pip install 'tangram-hpc\[engines\]'"):
        with engine_factory("http"):
            pass


def test_other_backends_are_not_ours() -> None:
    with pytest.raises(ServiceRefused, match="backend: 'fake' is no engine"):
        make_engine(service_spec("judge", {"backend": "fake"}), PLACE)
