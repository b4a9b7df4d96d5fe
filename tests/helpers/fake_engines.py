"""Fake engines: the HTTP protocols of vLLM, SGLang and `HttpService` on a real loopback port, with
no model behind them. What they answer is a function of the tokens, and their texts say "fake".

They keep what matters to an adapter: who sleeps, what was lost in sleep, and what ends a real one:
a request to a sleeping vLLM, an SGLang that releases twice, or while a request runs.
"""

from __future__ import annotations

import hashlib
import json
import select
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

MODEL = "fake/model"
BOS = 1
MERGES = ("th", "he", "in", "er", "an", " t")
HANG_S = 60.0  # longer than any test waits
LOST = -50.0  # what forgotten weights add to every number

Said = tuple[int, Any]


def tokens(text: str, special: bool) -> list[int]:
    """Greedy pairs, so that a token may lie across the end of a prompt."""
    ids, at = [BOS] if special else [], 0
    while at < len(text):
        pair = text[at:at + 2]
        ids.append(2000 + MERGES.index(pair) if pair in MERGES else ord(text[at]) + 2)
        at += 2 if pair in MERGES else 1
    return ids


def logprob(before: list[int], token: int) -> float:
    """In (-10, 0], of all tokens before and the token."""
    return -((sum(i * t for i, t in enumerate(before, 1)) + 31 * token) % 997) / 100


def score(ids: list[int]) -> float:
    return (sum(ids) % 1000) / 100 - 5


def continuation(ids: list[int], most: int, temperature: float, seed: int | None) -> str:
    word = hashlib.sha256(repr((ids, seed if temperature else None)).encode()).hexdigest()[:8]
    return " ".join(f"fake-{word}-{i}" for i in range(most))


class Dies(Exception):
    """The process ends here."""


class Gone(Exception):
    """The client went away: the request is aborted."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 512

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are part of the tests."""


class FakeEngine:
    """A server on a loopback port. `fail` tells it how the next requests of a path end; `seen` is
    every request, with its Authorization header; `open_now` counts its connections."""

    paths: dict[str, str] = {}  # phase (load, wake, call, park) -> the path that it needs
    open_paths: tuple[str, ...] = ()  # answered without the key

    def __init__(self, key: str = "", classes: int = 1, **flags: bool) -> None:
        self.key, self.classes, self.flags = key, classes, flags
        self.seen: list[tuple[str, str, str]] = []
        self.failures: dict[str, str] = {}
        self.retry_after = "0"  # seconds, as an answer of an overloaded server says them
        self.sockets: set[socket.socket] = set()
        self.lock = threading.RLock()
        self.running = 0
        self.port = 0
        self.start()

    def start(self) -> None:
        """As its owner starts it: awake, with its weights."""
        self.reset()
        self.arrived, self.go_on = threading.Event(), threading.Event()
        self.failures.clear()
        self.server = _Server(("127.0.0.1", self.port), self._handler())
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.alive = True
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def die(self) -> None:
        """Ends as a process ends: the port is closed and so is every connection."""
        with self.lock:
            if not self.alive:
                return
            self.alive = False
            gone = list(self.sockets)
        self.server.shutdown()
        self.server.server_close()
        self.go_on.set()
        for sock in gone:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # its client was faster

    def fail(self, phase: str, how: str) -> None:
        """The path that this phase needs: `500`, `422`, `401`, `oom`, `hang`, `drip`,
        `slow-head`, `flood`, `die`, `shape`; empty: as usual."""
        self.failures[self.paths[phase]] = how

    @property
    def open_now(self) -> int:
        with self.lock:
            return len(self.sockets)

    # ---- what an engine is -------------------------------------------------------------------

    def reset(self) -> None:
        self.asleep: set[str] = set()
        self.weights = True

    def answer(self, path: str, query: dict[str, list[str]], body: Any) -> Said:
        raise NotImplementedError

    def wrong(self, status: int, text: str) -> Said:
        return status, {"error": {"message": text, "type": "fake", "param": None, "code": status}}

    def number(self, value: float) -> float:
        return value if self.weights else value + LOST

    def failed(self, path: str, handler: BaseHTTPRequestHandler) -> Said | None:
        how = self.failures.get(path, "")
        if how == "hang":
            with self.lock:
                self.running += 1
            try:
                self.arrived.set()
                self._hang(handler.connection)
            finally:
                with self.lock:
                    self.running -= 1
        elif how == "drip":
            self._drip(handler, b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b" ", 0.02)
        elif how == "slow-head":
            self._drip(handler, b"HTTP/1.1 200 OK\r\nX-Slow: ", b"a", 0.02)
        elif how == "flood":
            self._drip(handler, b"HTTP/1.1 200 OK\r\n\r\n", b" " * (1 << 20), 0)
        elif how == "die":
            raise Dies
        elif how == "oom":
            return self.wrong(500, "CUDA error: out of memory. Tried to allocate 2.00 GiB")
        elif how == "shape":
            return 200, {"odd": [1]}
        elif how:
            return self.wrong(int(how), f"fake failure {how}\nwith a second line")
        return None

    def _drip(self, handler: BaseHTTPRequestHandler, begin: bytes, piece: bytes,
              pause_s: float) -> None:
        """Begins an answer and never ends it, though pieces of it keep coming."""
        ends = time.monotonic() + HANG_S
        try:
            handler.wfile.write(begin)
            while time.monotonic() < ends and not self.go_on.wait(pause_s):
                handler.wfile.write(piece)
        except OSError:
            pass  # the client has closed its connection
        raise Gone

    def _hang(self, sock: socket.socket) -> None:
        for _ in range(int(HANG_S / 0.02)):
            if self.go_on.wait(0.02):
                return
            if select.select([sock], [], [], 0)[0] and not sock.recv(1, socket.MSG_PEEK):
                raise Gone

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # it keeps connections, as uvicorn does

            def setup(self) -> None:
                super().setup()
                with engine.lock:
                    engine.sockets.add(self.connection)

            def finish(self) -> None:
                with engine.lock:
                    engine.sockets.discard(self.connection)
                super().finish()

            def do_GET(self) -> None:
                engine.serve(self, None)

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                engine.serve(self, json.loads(data) if data else None)

            def log_message(self, format: str, *args: Any) -> None:
                """Tests read `seen`."""

        return Handler

    def serve(self, handler: BaseHTTPRequestHandler, body: Any) -> None:
        parts = urlsplit(handler.path)
        sent = handler.headers.get("Authorization") or ""
        self.seen.append((handler.command, handler.path, sent))
        try:
            if self.key and sent != f"Bearer {self.key}" and self.guarded(parts.path):
                status, said = self.wrong(401, f"no key {self.key} in {sent!r}")
            else:
                status, said = self.failed(parts.path, handler) or self.answer(
                    parts.path, parse_qs(parts.query), body)
        except Gone:
            handler.close_connection = True
            return
        except Dies:
            handler.close_connection = True
            self.die()
            return
        data = said.encode() if isinstance(said, str) else json.dumps(said).encode()
        handler.send_response(status)
        if status in (429, 503):
            handler.send_header("Retry-After", self.retry_after)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def guarded(self, path: str) -> bool:
        return path not in self.open_paths


class FakeVllm(FakeEngine):
    """vLLM. Flags: `dev_mode`, `sleep_mode` (both on)."""

    paths = {"load": "/health", "wake": "/wake_up", "call": "/v1/completions", "park": "/sleep"}
    dev_paths = ("/sleep", "/wake_up", "/is_sleeping", "/server_info", "/collective_rpc")

    def guarded(self, path: str) -> bool:
        return path.startswith("/v1")  # all that --api-key guards there

    def answer(self, path: str, query: dict[str, list[str]], body: Any) -> Said:
        if path in self.dev_paths and self.flags.get("dev_mode", True):
            return self._dev(path, query, body)
        if path == "/health":
            return 200, ""
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
        if path == "/tokenize":
            ids = tokens(body["prompt"], body.get("add_special_tokens", True))
            return 200, {"count": len(ids), "max_model_len": 4096, "tokens": ids}
        if path in ("/v1/completions", "/classify"):
            if self.asleep:
                raise Dies  # an illegal memory access
            if body.get("model") != MODEL:
                return self.wrong(404, f"The model `{body.get('model')}` does not exist.")
            return self._complete(body) if path == "/v1/completions" else self._classify(body)
        return 404, {"detail": "Not Found"}

    def _dev(self, path: str, query: dict[str, list[str]], body: Any) -> Said:
        on = self.flags.get("sleep_mode", True)
        if path == "/server_info":
            return 200, {"vllm_config": {"model_config": {"enable_sleep_mode": on}}}
        if path == "/is_sleeping":
            return 200, {"is_sleeping": bool(self.asleep)}
        if path == "/sleep" and on:
            self.asleep = {"weights", "kv_cache"}
            self.weights = query.get("level", ["1"])[0] == "1"
        elif path == "/wake_up":
            self.asleep -= set(query.get("tags", ["weights", "kv_cache"]))
        elif path == "/collective_rpc":
            assert body == {"method": "reload_weights"} and "weights" not in self.asleep
            self.weights = True
        return 200, ""

    def _complete(self, body: dict[str, Any]) -> Said:
        choices = []
        for index, given in enumerate(body["prompt"]):
            ids = tokens(given, True) if isinstance(given, str) else given
            if not ids or max(ids) > 100_000 or len(ids) > 4096:
                return self.wrong(400, f"Token id {max(ids, default=0)} is out of vocabulary")
            choice = {"index": index, "finish_reason": "length", "text": continuation(
                ids, body["max_tokens"], body.get("temperature", 1.0), body.get("seed"))}
            if body.get("prompt_logprobs") is not None:
                choice["prompt_logprobs"] = [None] + [
                    {str(t): {"logprob": self.number(logprob(ids[:i], t)), "rank": 7,
                              "decoded_token": "fake"},
                     "100001": {"logprob": -0.5, "rank": 1, "decoded_token": "fake"}}
                    for i, t in enumerate(ids) if i]
            choices.append(choice)
        choices.reverse()  # a client goes by the index
        return 200, {"id": "cmpl-fake", "object": "text_completion", "choices": choices}

    def _classify(self, body: dict[str, Any]) -> Said:
        assert body.get("use_activation") is False
        return 200, {"object": "list", "data": [
            {"index": i, "label": "fake", "num_classes": self.classes,
             "probs": [self.number(score(_ids(given)) + c) for c in range(self.classes)]}
            for i, given in enumerate(body["input"])]}


class FakeSglang(FakeEngine):
    """SGLang. Flags: `memory_saver`, `backup` (on), `deterministic`, `old` paths (off)."""

    paths = {"load": "/health", "wake": "/resume_memory_occupation", "call": "/generate",
             "park": "/release_memory_occupation"}
    open_paths = ("/health",)

    def reset(self) -> None:
        super().reset()
        self.version = "default"

    def answer(self, path: str, query: dict[str, list[str]], body: Any) -> Said:
        prefix = "/get_" if self.flags.get("old") else "/"
        if path == "/health":
            return 200, ""
        if path == prefix + "server_info":
            return 200, {"served_model_name": MODEL, "version": "fake",
                         "enable_memory_saver": self.flags.get("memory_saver", True),
                         "enable_weights_cpu_backup": self.flags.get("backup", True),
                         "enable_deterministic_inference": self.flags.get("deterministic", False)}
        if path == prefix + "model_info":
            return 200, {"model_path": MODEL, "weight_version": self.version}
        if path == "/update_weight_version":
            assert body["abort_all_requests"] is False
            self.version = body["new_version"]
            return 200, {"success": True, "new_version": self.version}
        if path == "/flush_cache":
            return (400 if self.running else 200), "Cache flushed."
        if path == "/release_memory_occupation":
            if self.running or self.asleep:
                raise Dies  # its scheduler asserts that it is idle, and cannot pause twice
            self.asleep = {"weights", "kv_cache", "cuda_graph"}
            return 200, None
        if path == "/resume_memory_occupation":
            if not self.asleep:
                raise Dies  # a KeyError in its scheduler
            self.asleep = set()
            return 200, None
        if path == "/tokenize":
            ids = tokens(body["prompt"], body.get("add_special_tokens", True))
            return 200, {"tokens": ids, "count": len(ids), "max_model_len": 4096}
        if path in ("/generate", "/classify"):
            if self.asleep:
                raise Dies
            return self._generate(body) if path == "/generate" else self._classify(body)
        return 404, {"detail": "Not Found"}

    def wrong(self, status: int, text: str) -> Said:
        return status, {"error": {"message": text}}

    def _generate(self, body: dict[str, Any]) -> Said:
        rows, how = [], body["sampling_params"]
        starts = body.get("logprob_start_len")
        for at, given in enumerate(body.get("text") or body["input_ids"]):
            ids = _ids(given)
            if not ids or max(ids) > 100_000:
                return self.wrong(400, "The input_ids contain values out of the vocabulary")
            info: dict[str, Any] = {"prompt_tokens": len(ids)}
            if body.get("return_logprob"):
                start = starts[at]
                info["input_token_logprobs"] = [
                    [None if i == start else self.number(logprob(ids[:i], ids[i])), ids[i], None]
                    for i in range(start, len(ids))]
            text = continuation(ids, how["max_new_tokens"], how["temperature"],
                                how.get("sampling_seed"))
            rows.append({"text": text, "meta_info": info})
        return 200, rows

    def _classify(self, body: dict[str, Any]) -> Said:
        return 200, [{"embedding": [self.number(score(_ids(given)) + c)
                                    for c in range(self.classes)], "meta_info": {}}
                     for given in body.get("text") or body["input_ids"]]


class FakePlain(FakeEngine):
    """`HttpService`'s protocol, with methods that mirror the others'."""

    paths = {"load": "/health", "wake": "/wake", "call": "/call", "park": "/park"}

    def answer(self, path: str, query: dict[str, list[str]], body: Any) -> Said:
        if path == "/health":
            return 200, ""
        if path == "/park" and self.flags.get("parks", True):
            self.asleep = {"all"}
            return 200, ""
        if path == "/wake":
            self.asleep = set()
            return 200, ""
        if path == "/call":
            if self.asleep:
                return self.wrong(503, "parked")
            if any(call["method"] == "refused" for call in body["requests"]):
                return self.wrong(422, "a method that spoils its batch")
            return 200, {"replies": [self._one(**call) for call in body["requests"]]}
        return 404, {"error": "no such path"}

    def _one(self, method: str, arguments: Any) -> dict[str, Any]:
        if method == "score":
            return {"value": [score(_ids(given)) for given in arguments["texts"]]}
        if method == "generate":
            most = arguments.get("max_new_tokens", 256)
            return {"value": [continuation(_ids(given), most, 0, None)
                              for given in arguments["prompts"]]}
        return {"error": f"no method\n{method}" if method != "blank" else " \n"}


def _ids(given: str | list[int]) -> list[int]:
    return tokens(given, True) if isinstance(given, str) else given
