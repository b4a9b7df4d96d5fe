"""Unreadable bytes from another process or from a file: the reader reports them and goes on; only
the connection that carried them ends."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from helpers.executor_rig import Rig
from helpers.service_rig import Rig as ServiceRig
from helpers.service_rig import play
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram_hpc import LocalCluster
from tangram_hpc.config.services import HttpService, service_spec
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action, Kind, Profile
from tangram_hpc.domain.ids import mint
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.errors import (
    ActionFailed,
    InfeasibleRequest,
    InvalidInput,
    ProtocolError,
    TangramError,
)
from tangram_hpc.ports import ChannelLost, ServicePlace, ServiceReply, ServiceRequest
from tangram_hpc.protocol import gradient_messages, process_frames
from tangram_hpc.protocol import message as ms
from tangram_hpc.protocol import service_frames as frames
from tangram_hpc.protocol.frame import FRAME_MAX, Inbox, Outbox
from tangram_hpc.protocol.payload import (
    ExecCall,
    FileCall,
    FileList,
    FunctionCall,
    ServiceCall,
    Stored,
    decode,
    encode,
)
from tangram_hpc.protocol.value import decode_value, encode_value
from tangram_hpc.services.backend_registry import make_backend
from tangram_hpc.services.http import engine_request, plain_http
from tangram_hpc.services.http.web import HttpResponse, Web
from tangram_hpc.services.torch.torch_request import InvalidRequest, Reader
from tangram_hpc.storage import record_file, spool
from tangram_hpc.storage.access import read_access
from tangram_hpc.storage.journal import FileJournal, read_journal
from tangram_hpc.storage.spool import FileSpool
from tangram_hpc.storage.store import FolderStore
from tangram_hpc.transport.socket.bulk_socket import BulkLink
from tangram_hpc.transport.socket.channel import SocketChannel
from tangram_hpc.transport.socket.dial import dial
from tangram_hpc.transport.socket.socket_connection import SocketConnection

WORD, BROKEN = b"a-word-to-break", b"\xff\xfe\x80 is not text"
# Arrays in arrays: in 8 MiB of stack Python 3.14 reads 30,000; 3.13 reads 10,000, older ones 1,000.
DEEP = b"\x91" * 200_000 + b"\x90"


def not_utf8(data: bytes) -> bytes:
    """These bytes with invalid UTF-8 in the place of `WORD`."""
    assert len(BROKEN) == len(WORD) and data.count(WORD) == 1
    return data.replace(WORD, BROKEN)


def nested(body: bytes) -> bytes:
    """A short msgpack array with one more element, which is deeply nested."""
    assert 0x90 <= body[0] < 0x9F
    return bytes((body[0] + 1,)) + body[1:] + DEEP


def framed(message: ms.Message, payload: bytes | None = None,
           harm: Callable[[bytes], bytes] = not_utf8) -> bytes:
    """A frame with one message that was made unreadable."""
    body = harm(msgspec.msgpack.encode(message))
    meta = b"\x92\x91" + body + (b"\x90" if payload is None else
                                b"\x91\xce" + len(payload).to_bytes(4, "big"))
    rest = len(meta).to_bytes(4, "little") + meta + (payload or b"")
    return len(rest).to_bytes(4, "little") + rest


def undeep(body: bytes) -> bytes:
    return nested(body.replace(WORD, b"0" * len(WORD)))


# ---- any bytes ---------------------------------------------------------------------------------

READERS: list[Callable[[bytes], object]] = [
    decode, decode_value, gradient_messages.unpack, gradient_messages.unpack_plan, frames.order,
    frames.answer, process_frames.decode_to_fork_server, process_frames.decode_from_fork_server,
    lambda body: list(process_frames.ProcessInbox().feed(len(body).to_bytes(4, "little") + body)),
    lambda body: list(process_frames.WorkerInbox().feed(len(body).to_bytes(4, "little") + body)),
    lambda body: list(Inbox().feed(
        (len(body) + 4).to_bytes(4, "little") + len(body).to_bytes(4, "little") + body)),
]
TAGS = st.integers(0, 60) | st.sampled_from(["hello", "told", "word", "enter", "heard"])
LEAVES = (st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats()
          | st.text(max_size=4) | st.binary(max_size=4) | st.just(WORD.decode())
          | st.builds(msgspec.msgpack.Ext, st.integers(-3, 5), st.binary(max_size=12)))
TREES = st.recursive(LEAVES, lambda below: st.lists(below, max_size=9) | st.tuples(TAGS).flatmap(
    lambda tag: st.lists(below, max_size=9).map(lambda rest: [*tag, *rest])) | st.dictionaries(
    st.text(max_size=3) | st.integers(0, 9), below, max_size=3), max_leaves=20)


@settings(deadline=None)
@given(st.binary(max_size=60) | TREES.map(
    lambda tree: msgspec.msgpack.encode(tree).replace(WORD, BROKEN)), st.booleans())
def test_any_bytes_decode_to_a_message_or_raise_a_decode_error(body: bytes, deep: bool) -> None:
    if deep and body and 0x90 <= body[0] < 0x9F:
        body = nested(body)
    for read in READERS:
        with suppress(ProtocolError, msgspec.DecodeError):
            read(body)


HARMS = pytest.mark.parametrize("harm", [not_utf8, undeep], ids=["text", "depth"])


# ---- broker, worker and client -----------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(cpus=2, home=tmp_path_factory.mktemp("home")) as c:
        yield c


def answers_to(cluster: LocalCluster, *data: bytes) -> list[ms.Message]:
    """What the broker answers to these bytes, until it closes the connection."""
    known = read_access(cluster.access)
    with dial(known.addresses, known.key, known.job).sock as sock:
        sock.settimeout(30)
        inbox, told = Inbox(), list[ms.Message]()
        for piece in data:
            sock.sendall(piece)
            while piece is not data[-1] and not told:
                told += [m for m, _ in inbox.feed(sock.recv(1 << 16))]
        while more := sock.recv(1 << 16):
            told += [m for m, _ in inbox.feed(more)]
        return told


def outgoing(message: ms.Message) -> bytes:
    outbox = Outbox()
    outbox.put(message)
    return b"".join(outbox.take())


@HARMS
@pytest.mark.attack("rank", "broker")
def test_an_unreadable_message_of_a_client_ends_only_its_connection(
        cluster: LocalCluster, harm: Any) -> None:
    job = read_access(cluster.access).job
    word = WORD.decode()
    hello = framed(ms.ClientHello(ms.PROTOCOL_VERSION, job, word), harm=harm)
    assert answers_to(cluster, hello) == []
    hello = outgoing(ms.ClientHello(ms.PROTOCOL_VERSION, job, "u"))
    (welcome,) = answers_to(cluster, hello, framed(
        ms.Submit(Action(mint(1, 1), word), n=1), b"x", harm))
    assert isinstance(welcome, ms.Welcome)
    assert cluster.submit(pow, 2, 2).result(30) == 4


@HARMS
@pytest.mark.attack("network", "broker")
def test_an_unreadable_hello_of_a_worker_ends_only_its_connection(
        cluster: LocalCluster, harm: Any) -> None:
    job, word = read_access(cluster.access).job, WORD.decode()
    hello = ms.WorkerHello(ms.PROTOCOL_VERSION, job, NodeSpec(word, "h", (0,), 1))
    assert answers_to(cluster, framed(hello, harm=harm)) == []
    assert cluster.submit(pow, 2, 3).result(30) == 8


@HARMS
def test_an_unreadable_broker_message_ends_the_readers_connection(harm: Any) -> None:
    """Clients and workers read with `Inbox`; a client also reads from a channel of its own."""
    data = framed(ms.PeerRefused(WORD.decode()), harm=harm)
    with pytest.raises(ProtocolError, match="not in the protocol"):
        list(Inbox().feed(data))
    here, there = socket.socketpair()
    with there:
        channel = SocketChannel(here)
        there.sendall(data)
        with pytest.raises(ChannelLost, match="not in the protocol"):
            while True:  # a message may come in parts
                assert not list(channel.wait(10, False))
        channel.close()


def fake_return() -> Callable[..., None]:
    """A function that sends this return value to its worker as if it were the runner."""
    def lie(payload: bytes, **said: int) -> None:
        import os
        import sys

        from tangram_hpc.domain.outcome import Outcome
        from tangram_hpc.domain.states import ActionState
        from tangram_hpc.protocol.process_frames import Ended, frame

        at: Any = sys._getframe()
        while "run" not in at.f_locals:
            at = at.f_back
        os.write(3, frame(Ended(
            at.f_locals["run"].lease, Outcome(ActionState.COMPLETED, **said), payload, True)))
    return lie


@pytest.mark.parametrize("payload", [
    b"\xc1", not_utf8(encode(Stored(WORD.decode(), 1))), nested(encode(ServiceCall("m", b"", 1))),
    b"\x93\x0c\xc4\x03\xa2" + BROKEN[:2] + b"\xc2",  # a ValueReturn whose value is broken
    encode(Stored("no\0path", 1)), encode(Stored("/etc/passwd", 1)),
], ids=["none", "text", "depth", "value", "digest", "path"])
def test_an_unreadable_result_fails_only_its_future(cluster: LocalCluster, payload: bytes) -> None:
    lost = cluster.submit(fake_return(), payload)
    with pytest.raises(TangramError, match=r"not in the protocol|no payload"):
        lost.result(30)
    assert cluster.submit(pow, 2, 5).result(30) == 32


@pytest.mark.parametrize("profile", [Profile(-1 << 63), Profile(1, -1), Profile(1, 1_000_001)])
def test_an_impossible_profile_is_refused(cluster: LocalCluster, profile: Profile) -> None:
    with pytest.raises(InfeasibleRequest, match="profile: work_ns must be"):
        cluster.submit(pow, 2, 2, profile=profile).result(30)
    assert cluster.submit(pow, 2, 7).result(30) == 128


@pytest.mark.parametrize("number", [(1 << 64) - 1, -(1 << 63)])
@pytest.mark.attack("code", "broker")
def test_absurd_numbers_from_a_runner_do_not_stop_the_broker(
        cluster: LocalCluster, number: int) -> None:
    lie = fake_return()
    numbers = [name for name, kind in Outcome.__annotations__.items() if kind == "int"]
    assert "restore_ns" in numbers
    for name in numbers:
        with suppress(TangramError):
            cluster.submit(partial(lie, b"", **{name: number})).result(30)
        assert cluster.submit(pow, 2, 7).result(30) == 128


def frame_sender() -> Callable[..., None]:
    """A function that makes its runner send this frame to its worker, whatever its size."""
    def tell(message: process_frames.ProcessFrame) -> None:
        import sys

        at: Any = sys._getframe()
        while "run" not in at.f_locals:
            at = at.f_back
        at.f_locals["self"]._send(
            msgspec.structs.replace(message, lease=at.f_locals["run"].lease))
    return tell


@pytest.mark.parametrize("state", list(ActionState))
@pytest.mark.attack("code", "results")
def test_an_absurd_end_state_from_a_runner_ends_its_action_once(
        cluster: LocalCluster, state: Any) -> None:
    """PREEMPTED would run the action again for ever, and NODE_FAIL as if its node were lost."""
    said = process_frames.Ended(0, Outcome(state), None, True)
    lied = cluster.submit(frame_sender(), said, trusted=True, retries=5)
    with suppress(TangramError, CancelledError):
        lied.result(30)
    assert lied.details.attempt == 1
    assert cluster.submit(pow, 2, 2).result(30) == 4


@pytest.mark.attack("code", "memory", "terminal")
def test_long_texts_from_a_runner_are_truncated_to_4096_characters(cluster: LocalCluster) -> None:
    """A text larger than a frame to the broker would end the worker."""
    long = Outcome(ActionState.FAILED, reason="r" * 10**6, isolation="i" * 10**6,
                   enforcement="e" * 10**6)
    lied = cluster.submit(frame_sender(), process_frames.Ended(0, long, None, True), trusted=True)
    with pytest.raises(ActionFailed, match=r"r{4096}$"):
        lied.result(30)
    assert lied.details.isolation == "i" * 4096 and lied.details.enforcement == "e" * 4096


@pytest.mark.attack("code", "results")
def test_output_frames_from_a_function_runner_are_ignored(cluster: LocalCluster) -> None:
    def tell(size: int) -> int:
        tell_it(process_frames.OutputChunk(0, 1, bytes(size)))
        return 7
    tell_it = frame_sender()
    assert cluster.submit(tell, FRAME_MAX + 1).result(60) == 7
    assert cluster.submit(pow, 2, 2).result(30) == 4


@pytest.mark.parametrize("options", [
    {"name": "\udcff"}, {"timeout": 1e12}, {"mem": "1" + "0" * 15 + "t"},
], ids=lambda given: next(iter(given)))
def test_an_option_that_cannot_be_encoded_raises_invalid_input(
        cluster: LocalCluster, options: Any) -> None:
    with pytest.raises(InvalidInput, match=next(iter(options))):
        cluster.submit(pow, 2, 2, **options)
    with pytest.raises(InvalidInput, match="image"):
        cluster.session(image="\udcff")
    assert cluster.submit(pow, 2, 7).result(30) == 128


@pytest.mark.parametrize(("field", "ask"), [
    ("work", lambda c: c.submit(["echo", "\udcff"])),
    ("work", lambda c: c.submit("echo \udcff")),
    ("env", lambda c: c.submit("env", env={"A": "\udcff"})),
    ("cwd", lambda c: c.submit("pwd", cwd="\udcff")),
    ("stdin", lambda c: c.submit("cat", stdin="\udcff")),
    ("files", lambda c: c.submit("cat f", files={"f": "\udcff"})),
    ("files", lambda c: c.submit("cat f", files={"\udcff": b""})),
    ("once", lambda c: c.submit("true", once="\udcff")),
    ("trajectory", lambda c: c.submit("true", trajectory="\udcff")),
])
def test_a_text_that_is_not_utf8_is_refused_naming_its_field(
        cluster: LocalCluster, field: str, ask: Any) -> None:
    with pytest.raises(InvalidInput, match=field):
        ask(cluster)


@pytest.mark.parametrize(("code", "said"), [
    ("int('x')", "ValueError: invalid literal"), ("exit(3)", "SystemExit: 3"),
    ("exec('class E(Exception):\\n def __str__(self): return 1 / 0\\nraise E')", "E$"),
], ids=["error", "exit", "text"])
@pytest.mark.attack("code", "processes")
def test_a_result_that_cannot_be_unpickled_fails_only_its_future(
        cluster: LocalCluster, code: str, said: str) -> None:
    def odd() -> object:
        class Odd:
            def __reduce__(self) -> Any:
                return eval, (code,)
        return Odd()

    with pytest.raises(ActionFailed, match=f"cannot be unpickled here: {said}"):
        cluster.submit(odd, trusted=True).result(30)
    assert cluster.submit(pow, 2, 6).result(30) == 64


# ---- sandboxes ---------------------------------------------------------------------------------


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    broken_laws = list[Any]()
    made.loop.set_exception_handler(lambda loop, context: broken_laws.append(context))
    yield made
    made.close()
    assert broken_laws == []


def given_raw(rig: Rig, payload: bytes, kind: Kind) -> Any:
    from tangram_hpc.protocol.message import StartAttempt

    rig.lease += 1
    action = Action(rig.lease, "t", kind, trusted=True)
    rig.loop.call_soon(rig.executor.start, StartAttempt(rig.lease, action, rig.cores[:1], ()),
                       memoryview(payload))
    return rig.end(rig.lease)[0]


@pytest.mark.parametrize("payload", [
    not_utf8(encode(ExecCall(shell=WORD.decode()))), nested(encode(ExecCall(shell="true"))),
    not_utf8(encode(FunctionCall(WORD.decode(), b""))), nested(encode(FunctionCall("d", b""))),
    not_utf8(encode(Stored(WORD.decode(), 1))), nested(encode(Stored("d", 1))),
    encode(Stored("no\0path", 1)), encode(FunctionCall("no\0path", b"")),
], ids=["exec text", "exec depth", "function text", "function depth", "stored text",
        "stored depth", "stored digest", "function digest"])
@pytest.mark.parametrize("kind", [Kind.EXEC, Kind.FUNCTION])
def test_an_unreadable_payload_fails_only_its_attempt(rig: Rig, payload: bytes, kind: Kind) -> None:
    outcome = given_raw(rig, payload, kind)
    assert outcome.state is ActionState.FAILED, outcome
    assert outcome.reason.startswith(("payload:", "store ")), outcome
    assert rig.shell("echo hello")[1].stdout == b"hello\n"
    assert rig.value(pow, 2, 3) == 8


@HARMS
def test_a_runner_that_sends_unreadable_frames_ends_alone(rig: Rig, harm: Any) -> None:
    def babble(data: bytes) -> None:
        import os
        os.write(3, data)

    body = harm(msgspec.msgpack.encode(process_frames.Broken(WORD.decode())))
    outcome, _, _ = rig.function(babble, len(body).to_bytes(4, "little") + body)
    assert outcome.state is ActionState.FAILED and "runner process ended" in outcome.reason
    assert rig.value(pow, 2, 3) == 8


def test_file_names_and_errors_that_are_not_utf8_are_reported(rig: Rig) -> None:
    """File names are arbitrary bytes, and so are strings that Python decodes from them."""
    def find() -> str:
        import os
        return os.fsdecode(b"a\xffb")

    def fail() -> None:
        import os
        raise ValueError("no " + os.fsdecode(b"a\xffb"))

    rig.open()
    rig.shell("sleep 60 & touch keep $(printf 'a\\377b'); mkdir -p sub/$(printf 'a\\377c')/d",
              session=1)
    listed = rig.end(rig.begin(FileCall("", op="list"), Kind.FILE, session=1, cores=()))[1]
    assert [(entry.name, entry.kind) for entry in listed.entries] == [
        (r"a\xffb", "other"), ("keep", "file"), ("sub", "dir"), (r"sub/a\xffc", "other")]
    rig.shell("ln -s $(printf '/a\\377') keep-link", session=1)
    assert rig.shell("ls keep; rm a*", session=1)[1].stdout == b"keep\n"
    listed = rig.end(rig.begin(FileCall("", op="list"), Kind.FILE, session=1, cores=()))[1]
    assert "keep" in [entry.name for entry in listed.entries]
    assert [entry.target for entry in listed.entries if entry.kind == "link"] == [""]
    pid = rig.value(os.getpid)
    assert rig.function(fail)[0].reason == r"ValueError: no a\udcffb"
    assert "str that is not UTF-8, which only a pickle" in rig.function(find)[0].reason
    assert rig.value(os.getpid) == pid


def test_a_file_listing_is_complete_or_refused(rig: Rig) -> None:
    """A directory walk keeps each directory on its path open, and descriptors are limited."""
    def listed() -> tuple[str, list[str]]:
        call = rig.begin(FileCall("", op="list"), Kind.FILE, session=1, cores=())
        outcome, told = rig.end(call)[:2]
        return outcome.reason, ([entry.name for entry in told.entries]
                                if isinstance(told, FileList) else [])

    rig.open()
    rig.shell("mkdir -p a/b; touch a/b/c", session=1)
    assert {"a", "a/b", "a/b/c"} <= set(listed()[1])
    rig.shell("set -e; for n in $(seq 600); do mkdir d; cd d; done", session=1)
    assert listed()[0].endswith("more than 512 nested directories")
    assert rig.shell("rm -r d; echo well", session=1)[1].stdout == b"well\n"
    assert "a/b/c" in listed()[1]


@HARMS
def test_an_unreadable_frame_to_a_sandbox_process_is_a_protocol_error(harm: Any) -> None:
    body = harm(msgspec.msgpack.encode(process_frames.LoadFunction(WORD.decode(), b"", "")))
    with pytest.raises(ProtocolError, match="not in the protocol"):
        list(process_frames.ProcessInbox().feed(len(body).to_bytes(4, "little") + body))


@pytest.mark.parametrize("cut", range(1, 5))
def test_a_frame_above_the_size_limit_is_refused_before_its_body(cut: int) -> None:
    """However the length arrives in pieces, nothing of the body is stored."""
    size = (process_frames.FRAME_MAX + 1).to_bytes(4, "little") + b"x"
    inbox = process_frames.WorkerInbox()
    with pytest.raises(ProtocolError, match="a frame of"):
        assert list(inbox.feed(size[:cut])) == []
        list(inbox.feed(size[cut:]))


# ---- services ----------------------------------------------------------------------------------


@pytest.mark.parametrize("payload", [
    not_utf8(encode(ServiceCall(WORD.decode(), b""))), nested(encode(ServiceCall("echo", b""))),
    encode(Stored("no\0path", 1)), encode(Stored("0" * 64, 1)),
], ids=["text", "depth", "digest", "unknown"])
def test_an_unreadable_service_call_fails_alone(payload: bytes, tmp_path: Path) -> None:
    async def scene(rig: ServiceRig) -> None:
        rig.store = rig.executor._store = FolderStore(tmp_path)  # type: ignore[assignment]
        rig.declare("a")
        rig.lease += 1
        action = Action(rig.lease, "x", Kind.CALL, (1,), "service:a")
        rig.executor.start(ms.StartAttempt(rig.lease, action, (), (0,)), memoryview(payload))
        after = rig.call("a", "well")
        await rig.all(rig.lease - 1, after)
        assert rig.ends[rig.lease - 1].state is ActionState.FAILED
        assert rig.ends[rig.lease - 1].reason.startswith(("payload:", "store "))
        assert rig.values[after] == {"fake": "well"}
    play(scene)


VALUES = pytest.mark.parametrize("value", [
    b"\xa2" + BROKEN[:2], DEEP, b"\xc7\x00\x02", b"\xc7\x00\x03", b"\xd4\x09\x00",
    b"\xc7\x02\x02\xff\xff", b"\x81\x81\x00\x00\x00",
], ids=["text", "depth", "array", "scalar", "extension", "head", "key"])


@VALUES
def test_unreadable_call_arguments_are_reported_to_the_call(value: bytes) -> None:
    request = ServiceRequest("score", value)
    with pytest.raises(msgspec.DecodeError):
        decode_value(value)
    with pytest.raises(engine_request.InvalidCall, match="arguments: not a value"):
        engine_request.read_request(request)
    with pytest.raises(InvalidRequest, match="arguments: not a value"):
        Reader(None, 1, 1).fields(value, ("texts",))
    with pytest.raises(msgspec.DecodeError):
        plain_http._body(request)


HUGE = 10 ** 5000  # Python refuses to write it


@pytest.mark.parametrize("method, arguments, field", [
    ("score", {"texts": [[HUGE]]}, "texts"), ("generate", {"prompts": [[-HUGE]]}, "prompts"),
    ("generate", {"prompts": ["a"], "max_new_tokens": HUGE}, "max_new_tokens"),
    ("generate", {"prompts": ["a"], "temperature": HUGE}, "temperature"),
    ("generate", {"prompts": ["a"], "temperature": -HUGE}, "temperature"),
    ("generate", {"prompts": ["a"], "seed": HUGE}, "seed"),
])
def test_a_call_argument_beyond_64_bits_is_refused_by_engines(
        method: str, arguments: Any, field: str) -> None:
    with pytest.raises(engine_request.InvalidCall, match=f"^{method}: {field}: must be"):
        engine_request.read_request(ServiceRequest(method, encode_value(arguments)))


@pytest.mark.parametrize("value", [HUGE, -HUGE], ids=["above", "below"])
@pytest.mark.parametrize("field", ["max_new_tokens", "temperature", "seed", "min_version"])
def test_a_call_argument_beyond_64_bits_is_refused_by_the_torch_backend(
        field: str, value: int) -> None:
    pytest.importorskip("torch")
    from tangram_hpc.services.torch.torch_methods import Sample

    engine: Any = SimpleNamespace(version=0, module=SimpleNamespace(generation_config=None),
                                  tokenizer=SimpleNamespace(eos_token_id=0))
    asks = Sample(engine, Reader(None, 9, 9))
    assert asks.read(encode_value({"prompts": [[1]], "max_new_tokens": 8}))
    with pytest.raises(InvalidRequest, match=f"^{field}: must be"):
        asks.read(encode_value({"prompts": [[1]], field: value}))


def test_an_unknown_call_field_is_named_in_40_characters() -> None:
    for key, said in ((HUGE, "a int"), ("x" * 10**6, "x" * 40)):
        body = b"\x82" + encode_value("texts") + b"\x90" + encode_value(key) + b"\xc0"
        with pytest.raises(InvalidRequest, match=f"^{said}: is not one of texts$"):
            Reader(None, 1, 1).fields(body, ("texts",))


def test_a_call_field_whose_name_is_a_number_is_refused() -> None:
    with pytest.raises(engine_request.InvalidCall, match="arguments: a int where texts belong"):
        engine_request.read_request(ServiceRequest("score", b"\x81" + encode_value(HUGE) + b"\xc0"))


@pytest.mark.parametrize("length", [HUGE, -HUGE, -1, 1 << 31, "x"], ids=range(5))
def test_the_fake_backend_refuses_a_length_beyond_its_limit(length: Any, tmp_path: Path) -> None:
    async def life() -> None:
        copy = make_backend(service_spec("it", {"backend": "fake", "token_s": 0.1}),
                            ServicePlace((0,), "cpu", str(tmp_path)))
        await copy.load()
        await copy.wake((0,))
        [reply] = await copy.call([ServiceRequest("score", encode_value({"length": length}))])
        assert reply.error == "length: must be a whole number from 0 to 2**31 - 1"
        await copy.close()
    asyncio.run(life())


def test_call_arguments_nested_deeper_than_json_allows_are_refused() -> None:
    """Both limits are Python's own, counted from different starting points."""
    for depth in range(900, 1000):
        reply = asyncio.run(_plainly(b"\x91" * depth + b"\x90"))
        assert "what JSON holds" in reply.error if reply.error else reply.value == b"sent"


async def _plainly(value: bytes) -> Any:
    class Nowhere(plain_http.PlainEngine):
        async def _batch(self, bodies: list[dict[str, Any]]) -> list[ServiceReply]:
            return [ServiceReply(b"sent") for _ in bodies]

    engine = Nowhere("it", Web("http://localhost:1", "", 1.0), 1, HttpService(
        backend="http", url="http://localhost:1"))
    [reply] = await engine._call([ServiceRequest("m", value)])
    return reply


def test_an_http_answer_with_a_lone_surrogate_counts_as_unreadable() -> None:
    assert HttpResponse(200,
                        r'{"a": "\ud83d\ude00 \\\\ud800"}').json() == {"a": "\U0001f600 \\\\ud800"}
    for text in (r'{"a": "\ud800"}', r'{"\uDfff": 1}'):
        answer = HttpResponse(500, text)
        assert answer.json() is None and answer.line() == f"500: {text}"
    with pytest.raises(TypeError, match="not UTF-8"):
        encode_value(["\ud800"])


@HARMS
def test_unreadable_service_process_frames_are_protocol_errors(harm: Any) -> None:
    word = WORD.decode()
    with pytest.raises(ProtocolError, match="an order is not in the protocol"):
        frames.order(harm(msgspec.msgpack.encode(frames.LoadModel(word, "", "", 1, "", 1))))
    with pytest.raises(ProtocolError, match="an answer is not in the protocol"):
        frames.answer(harm(msgspec.msgpack.encode(frames.NoRoom(word))))


# ---- gradient channels -------------------------------------------------------------------------


@HARMS
def test_an_unreadable_gradient_message_is_a_protocol_error(harm: Any) -> None:
    body = harm(msgspec.msgpack.encode(gradient_messages.GradientReceipt(_header(), WORD.decode())))
    here, there = socket.socketpair()
    with here, there:
        there.sendall(gradient_messages.HEAD.pack(len(body), 0) + body)
        with pytest.raises(ProtocolError, match="not in the protocol"):
            BulkLink(SocketConnection(here)).receive()


def _header() -> Any:
    from tangram_hpc.domain.hybrid import GradientHeader
    fields = {"int": 1, "str": "", "tuple[int, ...]": ()}
    types = GradientHeader.__annotations__
    return GradientHeader(**{n: fields.get(str(t), 0) for n, t in types.items()})


# ---- files -------------------------------------------------------------------------------------


@HARMS
def test_an_unreadable_journal_record_is_an_error_in_one_line(tmp_path: Path, harm: Any) -> None:
    path = tmp_path / "journal"
    FileJournal(path, "none", lambda call: call()).close()
    body = harm(msgspec.msgpack.encode(ev.ActionSubmitted(1, Action(1, WORD.decode()))))
    path.write_bytes(path.read_bytes() + record_file.framed(b"\x91" + body))
    with pytest.raises(InvalidInput, match="this release cannot read it"):
        list(read_journal(path))


@HARMS
def test_an_unreadable_spool_record_is_an_error_in_one_line(tmp_path: Path, harm: Any) -> None:
    body = harm(msgspec.msgpack.encode((1, WORD.decode(), None, None)))
    (tmp_path / "0").write_bytes(spool.MAGIC + record_file.framed(body))
    with pytest.raises(InvalidInput, match="move the folder away"):
        FileSpool(tmp_path, 1 << 20)
