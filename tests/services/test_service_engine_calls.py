"""The requests that vLLM, SGLang and plain HTTP get, and what is special to each. The right answers
are computed from the fakes' own tokens."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import site_authority
from helpers.engine_rig import KINDS, MODELS, ask, engine_factory, one_line, run, value
from helpers.fake_engines import BOS, MODEL, continuation, logprob, score, tokens

from tangram_hpc.config.services import service_spec
from tangram_hpc.errors import InvalidInput
from tangram_hpc.ports import ServiceDied, ServicePlace, ServiceRefused, ServiceRequest
from tangram_hpc.protocol.value import encode_value
from tangram_hpc.services.http.engines import make_engine
from tangram_hpc.services.http.sglang import MARK
from tangram_hpc.services.http.web import Web

HUGE = 10**400  # no float holds it
DEEP: Any = []
for _ in range(900):
    DEEP = [DEEP]


def following(prompt: str | list[int], completion: str | list[int]) -> list[float]:
    before = tokens(prompt, True) if isinstance(prompt, str) else prompt
    after = tokens(completion, False) if isinstance(completion, str) else completion
    return [pytest.approx(logprob(before + after[:i], t)) for i, t in enumerate(after)]


# ---- what is asked of models ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_logprobs_cover_exactly_the_tokens_of_the_completion(kind: str) -> None:
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
def test_generation_is_reproducible_by_seed(kind: str) -> None:
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
def test_equal_kinds_of_calls_are_sent_as_one_request(kind: str) -> None:
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


def test_a_seed_that_sglang_would_ignore_is_refused() -> None:
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
def test_scores_of_several_classes_are_a_list_per_text(kind: str) -> None:
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
    ("logprobs", {"prompts": ["a"], "completions": []}, "logprobs: completions: there are 0 for 1"),
    ("generate", {"prompts": ["a"], "max_new_tokens": 0}, "generate: max_new_tokens"),
    ("generate", {"prompts": ["a"], "temperature": float("nan")}, "generate: temperature"),
    ("generate", {"prompts": ["a"], "seed": -1}, "generate: seed"),
    ("embed", {}, "method: 'embed' is not one of score, logprobs, generate"),
])
def test_a_wrong_engine_call_names_the_argument(method: str, arguments: Any, told: str) -> None:
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


def test_waking_from_sleep_level_2_reloads_the_weights() -> None:
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
def test_an_engine_that_serves_another_model_is_refused(kind: str) -> None:
    with engine_factory(kind, model="other") as (backend, control):
        async def life() -> None:
            with pytest.raises(ServiceRefused, match=f"model: .* serves {MODEL}, not other"):
                await backend.load()
            await backend.close()

        run(life)
        assert not control.asleep


@pytest.mark.parametrize("models", [None, 5, ["fake/model"], [None]])
def test_a_server_without_a_list_of_models_is_refused(models: Any) -> None:
    """As one that has none and answers null. Any other exception would end the worker."""
    with engine_factory("vllm") as (backend, control):
        control.answer = lambda path, query, body: (200, {"data": models})

        async def life() -> None:
            with pytest.raises(ServiceRefused, match=f"model: .* serves none, not {MODEL}"):
                await backend.load()
            await backend.close()

        run(life)


@pytest.mark.parametrize(("kind", "method", "said"), [
    ("vllm", "score", {"data": [{"index": 0, "probs": [DEEP]}]}), ("sglang", "score", [
        {"embedding": [DEEP]}]),
    ("vllm", "logprobs", {"choices": [{"index": 0, "prompt_logprobs": [
        None, {"7": {"logprob": HUGE}}]}]}),
    ("sglang", "logprobs", [{"meta_info": {"input_token_logprobs": [[HUGE, 7, ""]]}}])])
def test_an_answer_that_is_no_number_fails_its_call_alone(kind: str, method: str, said: Any
                                                          ) -> None:
    """Any other exception would end the worker."""
    asked = {"texts": ["a"]} if method == "score" else {"prompts": [[5]], "completions": [[7]]}
    with engine_factory(kind) as (backend, control):
        async def life() -> None:
            await backend.load()
            await backend.wake((0,))
            control.answer = lambda path, query, body: (200, said)
            [reply] = await backend.call([ask(method, **asked)])
            assert "its answer has no fitting" in reply.error

        run(life)


@pytest.mark.parametrize("charset", ["utf-16", "idna", "base64"])
def test_the_charset_that_a_server_names_breaks_nothing(charset: str) -> None:
    async def life() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: "
                         b"application/json; charset=%s\r\n\r\n{}" % charset.encode())
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1") as server:
            web = Web(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "", 10.0)
            assert (await web.get("/health")).json() == {}
            await web.close()

    run(life)


def test_older_sglang_paths_work_and_the_weight_version_is_restored() -> None:
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


def test_plain_http_refuses_values_that_json_cannot_hold() -> None:
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


def test_a_blank_error_of_plain_http_is_still_an_error() -> None:
    with engine_factory("http") as (backend, _):
        async def life() -> None:
            await backend.load()
            await backend.wake((0,))
            [reply] = await backend.call([ask("blank")])
            assert "a reply must be {'value': ...} or {'error': text}" in reply.error
            await backend.close()

        run(life)


@pytest.mark.parametrize(("head", "body", "told"), [
    ("200 OK", b'{"error": "no model\\nloaded"}',
     "answered 200: no model loaded; an answer must have 'replies', a list of 1"),
    ("200 OK", b"<html>Sign in</html>", "answered 200: <html>Sign in</html>; an answer must"),
    ("200 OK\r\nContent-Encoding: gzip", b"no gzip", "its answer cannot be unpacked: "),
    ("307 Temporary Redirect\r\nLocation: https://me:secret@other:1/call", b"",
     "answered 307: redirected to https://other:1/call; redirects are not followed")])
def test_an_answer_of_plain_http_that_is_no_list_of_replies_is_told(
        head: str, body: bytes, told: str) -> None:
    """None of them is the death of the server: the call fails, with what the server said."""
    async def life() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(f"HTTP/1.1 {head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
            await reader.read()  # until the client has read it all
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1") as server:
            port = server.sockets[0].getsockname()[1]
            backend = make_engine(service_spec("judge", {
                "backend": "http", "url": f"http://127.0.0.1:{port}", "health_path": "",
                "wake_path": "", "park_path": ""}), ServicePlace((0,), "cuda", ""))
            await backend.load()
            await backend.wake((0,))
            for reply in await backend.call([ask("score", texts=["x"])]):
                assert one_line(reply.error) and "secret" not in reply.error
                assert told in reply.error
            await backend.close()

    run(life)


def test_an_invalid_engine_host_raises_ServiceDied() -> None:
    spec = service_spec("judge", {"backend": "http", "url": "http://☃..x:1"})
    backend = make_engine(spec, ServicePlace((0,), "cuda", ""))

    async def life() -> None:
        with pytest.raises(ServiceDied, match="cannot be reached") as died:
            await backend.load()
        assert one_line(str(died.value))
        await backend.close()

    run(life)


@pytest.mark.parametrize(("answer", "why"), [
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{\"rep\r\n", "incomplete chunked"),
    (b"\0\0\x12\4\0\0\0\0\0", "illegal"),  # HTTP/2 alone
    (b"", "disconnected")])
def test_a_server_that_breaks_off_is_not_called_out_of_reach(answer: bytes, why: str) -> None:
    """Who reads of a server that cannot be reached searches its network."""
    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def life() -> None:
        async with await asyncio.start_server(break_off, "127.0.0.1") as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            web = Web(url, "", 10)
            with pytest.raises(ServiceDied, match=f"^{url}/call gave no whole answer: .*{why}"):
                await web.post("/call")
            await web.close()

    run(life)


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed")
def test_a_certificate_that_the_site_has_signed_is_named_by_SSL_CERT_FILE(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = site_authority.make(tmp_path)
    tls = made.server_context()
    site_authority.strict(monkeypatch)

    async def well(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
        await writer.drain()
        writer.close()

    async def life() -> None:
        async with await asyncio.start_server(well, "127.0.0.1", ssl=tls) as server:
            url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            monkeypatch.delenv("SSL_CERT_FILE", raising=False)
            unknown = Web(url, "", 10)
            with pytest.raises(ServiceDied, match="CERTIFICATE_VERIFY_FAILED"):
                await unknown.get("/health")
            await unknown.close()
            monkeypatch.setenv("SSL_CERT_FILE", str(made.authority))
            web = Web(url, "", 10)
            assert (await web.get("/health")).text == "ok"
            await web.close()
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none"))
            with pytest.raises(ServiceRefused, match="SSL_CERT_FILE"):
                Web(url, "", 10)
            await Web("http://127.0.0.1:1", "", 10).close()  # which looks at no certificate

    run(life)


def test_plain_http_without_wake_and_park_paths_sends_only_calls() -> None:
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
    "localhost:8000", "ftp://host", "http://two hosts:1", "http://host:80{gpu}",
    "http://", "http://host:99999", "http://u:secret@host:1",
    "http://host:1/?key=secret"])
def test_a_wrong_engine_url_is_refused_without_printing_its_secret(kind: str, url: str) -> None:
    own = {} if kind == "http" else {"model": MODEL}
    with pytest.raises(InvalidInput, match="judge: url: must") as wrong:
        service_spec("judge", {"backend": kind, "url": url, **own})
    assert "secret" not in str(wrong.value)


def test_a_missing_httpx_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ServiceRefused, match=r"pip install '.*\[engines\]'"):
        with engine_factory("http"):
            pass


def test_a_backend_that_is_no_engine_is_refused() -> None:
    with pytest.raises(ServiceRefused, match="backend: 'fake' is no engine"):
        make_engine(service_spec("judge", {"backend": "fake"}), ServicePlace((), "cpu", ""))
