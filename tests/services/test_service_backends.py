"""Every adapter of `ServiceBackend` keeps the port's promises: in order, under failures, and at its
end.

One suite tests all adapters (`backend_rig.ADAPTERS`); tests of one adapter alone stand below it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.backend_rig import (
    ADAPTERS,
    NEEDS_TORCH,
    BackendCase,
    Fake,
    Torch,
    nothing_left,
    request,
    tiny,
    value,
)
from helpers.executor_rig import alive

from tangram_hpc.config.services import FakeService, service_spec
from tangram_hpc.errors import ProtocolError
from tangram_hpc.ports import (
    OutOfDeviceMemory,
    ServiceBackend,
    ServiceDied,
    ServicePlace,
    ServiceRefused,
)
from tangram_hpc.protocol import service_frames as frames
from tangram_hpc.services.backend_registry import make_backend
from tangram_hpc.services.fake import FakeBackend
from tangram_hpc.services.processes import process
from tangram_hpc.services.processes.process import ProcessBackend

EVERY = pytest.mark.parametrize("adapter", ADAPTERS)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    return tmp_path / "scratch"


def through(adapter: BackendCase, home: Path, scratch: Path,
            steps: Callable[[ServiceBackend], Awaitable[None]], tight: str = "") -> None:
    """Takes a copy through `steps` and closes it; checks that nothing of it is left."""
    async def life() -> None:
        copy = adapter.make(home, scratch, tight)
        with nothing_left(scratch):
            try:
                await steps(copy)
            finally:
                await copy.close()

    if not isinstance(adapter, Fake):
        adapter.make(home, scratch)  # its model is made, whatever that opens
    asyncio.run(life())


# what brings a copy into a state, or before an order
BEFORE: dict[str, list[str]] = {
    "load": [], "parked": ["load"], "wake": ["load"], "idle": ["load", "wake"],
    "call": ["load", "wake"], "park": ["load", "wake", "call"]}


def orders_of(copy: ServiceBackend, adapter: BackendCase
              ) -> dict[str, Callable[[], Awaitable[Any]]]:
    return {"load": copy.load, "wake": lambda: copy.wake((0,)),
            "call": lambda: copy.call(adapter.good), "park": copy.park}


# ---- in order ----------------------------------------------------------------------------------


@EVERY
def test_a_backend_loads_wakes_answers_calls_and_parks(
        adapter: BackendCase, home: Path, scratch: Path) -> None:
    async def steps(copy: ServiceBackend) -> None:
        assert await copy.load() > 0
        await copy.wake((0,))
        for one in adapter.good:
            [reply] = await copy.call([one])
            assert value(reply)
        replies = await copy.call(adapter.good * 3)
        assert [bool(value(reply)) for reply in replies] == [True] * len(adapter.good) * 3
        await copy.park()

    through(adapter, home, scratch, steps)


@EVERY
def test_answers_are_identical_after_ten_parks(
        adapter: BackendCase, home: Path, scratch: Path) -> None:
    async def steps(copy: ServiceBackend) -> None:
        await copy.load()
        answers = []
        for _ in range(10):
            await copy.wake((0,))
            answers.append([reply.value for reply in await copy.call(adapter.good)])
            await copy.park()
        assert all(answers[0]) and answers == [answers[0]] * 10  # to the last bit

    through(adapter, home, scratch, steps, "call")  # where two copies of it would not fit


@EVERY
def test_a_wrong_request_fails_alone_in_its_batch(
        adapter: BackendCase, home: Path, scratch: Path) -> None:
    async def steps(copy: ServiceBackend) -> None:
        await copy.load()
        await copy.wake((0,))
        alone = [reply.value for reply in await copy.call([adapter.good[0]])]
        for wrong in adapter.wrong:
            before, bad, after = await copy.call([adapter.good[0], wrong, adapter.good[0]])
            assert bad.error and "\n" not in bad.error and not bad.value
            assert value(before) and value(after)
        for reply in await copy.call(adapter.wrong):  # nobody is right
            assert reply.error
        assert await copy.call([]) == []
        assert [reply.value for reply in await copy.call([adapter.good[0]])] == alone

    through(adapter, home, scratch, steps)


@EVERY
def test_a_copy_that_stands_by_answers_again_and_can_be_parked(
        adapter: BackendCase, home: Path, scratch: Path) -> None:
    async def steps(copy: ServiceBackend) -> None:
        await copy.load()
        await copy.wake((0,))
        before = [reply.value for reply in await copy.call(adapter.good)]
        for _ in range(2):
            await copy.stand_by()
            assert [reply.value for reply in await copy.call(adapter.good)] == before
        await copy.stand_by()
        await copy.park()

    through(adapter, home, scratch, steps)


# ---- in trouble --------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("state", list(BEFORE))
def test_a_crash_in_any_state_raises_ServiceDied_in_one_line(
        adapter: BackendCase, home: Path, scratch: Path, state: str) -> None:
    async def steps(copy: ServiceBackend) -> None:
        orders = orders_of(copy, adapter)
        for order in BEFORE[state]:
            await orders[order]()
        with pytest.raises(ServiceDied) as told:
            if state in orders:
                await adapter.crash(copy, state, orders[state])
            else:
                await adapter.crash_idle(copy)
                await orders["wake" if state == "parked" else "call"]()
        text = str(told.value)
        assert text and "\n" not in text
        if isinstance(adapter, Torch):
            assert text == "its runner was ended by signal 9 (SIGKILL)"
        with pytest.raises(ServiceDied):  # it is dead and stays so
            await copy.wake((0,))
        copy.kill()

    through(adapter, home, scratch, steps)


@EVERY
@pytest.mark.parametrize("order", ["load", "wake", "call", "park"])
def test_killing_a_copy_ends_an_order_that_hangs(
        adapter: BackendCase, home: Path, scratch: Path, order: str) -> None:
    async def steps(copy: ServiceBackend) -> None:
        orders = orders_of(copy, adapter)
        for before in BEFORE[order]:
            await orders[before]()
        if order != "load" or isinstance(copy, FakeBackend):
            adapter.freeze(copy, order)
        task = asyncio.ensure_future(orders[order]())
        await asyncio.sleep(0.02)
        assert not task.done()
        copy.kill()
        copy.kill()
        with pytest.raises(ServiceDied):
            await task
        assert not scratch.exists()  # before anybody closes it

    through(adapter, home, scratch, steps)


@EVERY
def test_waking_without_device_memory_raises_OutOfDeviceMemory(
        adapter: BackendCase, home: Path, scratch: Path) -> None:
    async def steps(copy: ServiceBackend) -> None:
        await copy.load()
        with pytest.raises(OutOfDeviceMemory) as told:
            await copy.wake((0,))
        assert "\n" not in str(told.value)

    through(adapter, home, scratch, steps, "wake")


@EVERY
def test_a_batch_without_device_memory_leaves_the_copy_working(
        adapter: BackendCase, home: Path, scratch: Path) -> None:
    async def steps(copy: ServiceBackend) -> None:
        await copy.load()
        await copy.wake((0,))
        small = [reply.value for reply in await copy.call(adapter.good)]
        for _ in range(2):
            with pytest.raises(OutOfDeviceMemory):
                await copy.call(adapter.large)
            assert [reply.value for reply in await copy.call(adapter.good)] == small
        await copy.park()
        await copy.wake((0,))
        assert [reply.value for reply in await copy.call(adapter.good)] == small

    through(adapter, home, scratch, steps, "call")


@EVERY
@pytest.mark.parametrize("orders", [0, 1, 2])
def test_a_copy_can_be_closed_in_every_state(
        adapter: BackendCase, home: Path, scratch: Path, orders: int) -> None:
    async def steps(copy: ServiceBackend) -> None:
        for order in (copy.load, lambda: copy.wake((0,)))[:orders]:
            await order()
        await copy.close()
        await copy.close()
        copy.kill()
        with pytest.raises(ServiceDied):
            await (copy.wake((0,)) if orders else copy.load())

    through(adapter, home, scratch, steps)


# ---- the fake's own ----------------------------------------------------------------------------


def test_the_fake_backend_marks_its_answers_and_takes_the_configured_time(scratch: Path) -> None:
    async def life() -> None:
        copy = FakeBackend(FakeService(backend="fake", call_s=0.02, token_s=0.01))
        loop = asyncio.get_running_loop()
        before = loop.time()
        replies = await copy.call([request("a", length=2), request("b", length=3), request("c")])
        assert loop.time() - before >= 0.07 - 0.001
        assert [value(reply) for reply in replies] == [
            {"fake": True, "method": name, "batch": 3} for name in "abc"]
        with pytest.raises(OutOfDeviceMemory):
            await copy.call([request("a"), request("oom")])
        with pytest.raises(ServiceDied, match="fake"):
            await copy.call([request("a"), request("crash")])

    asyncio.run(life())


# ---- the registry and the frames ---------------------------------------------------------------


def test_the_torch_backend_names_its_extra_where_torch_is_missing(
        scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tangram_hpc.services.backend_registry.find_spec", lambda name: None)
    spec = service_spec("it", {"backend": "torch", "model": "/nowhere"})
    with pytest.raises(ServiceRefused, match=r"pip install '.*\[torch\]'"):
        make_backend(spec, ServicePlace((0,), "cpu", str(scratch)))


def test_options_of_another_version_are_refused(scratch: Path) -> None:
    spec = service_spec("it", {"backend": "fake"})
    broken = type(spec)("it", backend="fake", options=b'{"backend": "fake", "new": 1}')
    with pytest.raises(ServiceRefused, match="not understood"):
        make_backend(broken, ServicePlace((0,), "cpu", str(scratch)))


def test_service_process_frames_survive_encoding() -> None:
    messages = [frames.LoadModel("m", "causal", "float32", 8, "cpu", 1), frames.Wake(),
                frames.Park(), frames.CallBatch((("score", b"x"),)), frames.ExitRunner()]
    for message in messages:
        data = frames.frame(message)
        assert frames.size(data[:4]) == len(data) - 4
        assert frames.order(data[4:]) == message
        with pytest.raises(ProtocolError):
            frames.answer(data[4:])
    with pytest.raises(ProtocolError):
        frames.size(b"\xff\xff\xff\xff")


# ---- the runner's own --------------------------------------------------------------------------


def _torch(scratch: Path, **fields: Any) -> ServiceBackend:
    spec = service_spec("it", {"backend": "torch", **fields})
    return make_backend(spec, ServicePlace((0,), "cpu", str(scratch)))


async def _refused(scratch: Path, **fields: Any) -> str:
    copy = _torch(scratch, **fields)
    with nothing_left(scratch), pytest.raises(ServiceRefused) as told:
        await copy.load()
    assert "\n" not in str(told.value)
    return str(told.value)


def test_a_runner_that_exits_slowly_after_an_error_is_quoted_and_not_called_killed(
        scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker ends such a runner itself; its signal would hide why the runner failed."""
    (tmp_path / "slow_runner.py").write_text(
        "import os, sys, time\n"
        "print('Traceback\\nTypeError: a list', file=sys.stderr, flush=True)\n"
        "os.close(int(sys.argv[1]))\n"
        "time.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(process, "RUNNER", "slow_runner")
    monkeypatch.setattr(process, "_EXIT_S", 0.1)
    place = ServicePlace((0,), "cpu", str(scratch))

    async def life() -> None:
        load = frames.LoadModel("/m", "causal", "float32", 9, "cpu", 1, "")
        with nothing_left(scratch), pytest.raises(ServiceDied) as told:
            await ProcessBackend(load, place, 60.0).load()
        assert str(told.value) == (
            "its runner closed its socket and did not exit within 0.1 s: TypeError: a list")

    asyncio.run(life())


def test_what_a_runner_writes_is_bounded_and_its_end_is_quoted(
        scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models warn at every call, and a copy may serve for weeks."""
    (tmp_path / "loud_runner.py").write_text(
        "import os, socket, sys, time\n"
        "from tangram_hpc.protocol import service_frames as frames\n"
        "here = socket.socket(fileno=int(sys.argv[1]))\n"
        "def order():\n"
        "    head = here.recv(frames.HEAD.size, socket.MSG_WAITALL)\n"
        "    return here.recv(frames.size(head), socket.MSG_WAITALL)\n"
        "def answer(done):\n"
        "    os.write(2, b'Setting `pad_token_id`\\n' * 50_000)\n"
        "    here.sendall(frames.frame(done))\n"
        "order(); answer(frames.Loaded(1))\n"
        "for _ in range(8):\n"
        "    order(); answer(frames.CopyMoved())\n"
        "order(); os.write(2, b'x' * (3 << 20)); open('written', 'w')\n"
        "while not os.path.exists('go'):\n"
        "    time.sleep(0.005)\n"
        "answer(frames.CopyMoved())\n"
        "order(); os.write(2, b'TypeError: a list\\n'); os._exit(3)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(process, "RUNNER", "loud_runner")
    monkeypatch.setattr(process, "_LOG_S", 0.01)
    place = ServicePlace((0,), "cpu", str(scratch))

    async def life() -> None:
        copy = ProcessBackend(frames.LoadModel("/m", "causal", "float32", 9, "cpu", 1, ""), place,
                              60.0)
        with nothing_left(scratch):
            await copy.load()
            for _ in range(8):
                await copy.park()
                assert os.stat(f"/proc/{copy.pid}/fd/2").st_size < 2 << 20
            order = asyncio.ensure_future(copy.park())
            while not (scratch / "written").exists():
                await asyncio.sleep(0.005)
            until = time.monotonic() + 10
            while os.stat(f"/proc/{copy.pid}/fd/2").st_size > 2 << 20:  # one order writes a lot
                assert time.monotonic() < until
                await asyncio.sleep(0.005)
            (scratch / "go").touch()
            await order
            with pytest.raises(ServiceDied) as told:
                await copy.park()
        assert str(told.value) == "its runner exited with status 3: TypeError: a list"

    asyncio.run(life())


@pytest.mark.parametrize("order", ["wake", "stand_by", "park"])
def test_a_move_that_never_ends_ends_the_runner_after_load_s(
        scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    """As on a GPU or a file system that does not answer; all calls on its block would wait."""
    (tmp_path / "stuck_runner.py").write_text(
        "import socket, sys, time\n"
        "from tangram_hpc.protocol import service_frames as frames\n"
        "here = socket.socket(fileno=int(sys.argv[1]))\n"
        "here.recv(1)\n"
        "here.sendall(frames.frame(frames.Loaded(1)))\n"
        "time.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(process, "RUNNER", "stuck_runner")
    place = ServicePlace((0,), "cpu", str(scratch))

    async def life() -> None:
        load = frames.LoadModel("/m", "causal", "float32", 9, "cpu", 1, "")
        copy = ProcessBackend(load, place, 60.0)
        with nothing_left(scratch):
            await copy.load()
            copy._load_s = 0.05
            moves = {"wake": lambda: copy.wake((0,)), "stand_by": copy.stand_by, "park": copy.park}
            with pytest.raises(ServiceDied) as told:
                await asyncio.wait_for(moves[order](), 30)
        assert str(told.value) == "its runner had not moved its weights after 0.05 s (load_s)"

    asyncio.run(life())


@pytest.mark.parametrize("end", ["os._exit(3)", "os.close(int(sys.argv[1]))"])
def test_what_a_runner_has_started_ends_with_it(
        scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """A framework starts processes that compile, and they would keep the GPU's memory."""
    (tmp_path / "parent_runner.py").write_text(
        "import os, subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '600'], close_fds=True)\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        f"{end}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(process, "RUNNER", "parent_runner")
    place = ServicePlace((0,), "cpu", str(scratch))

    async def life() -> None:
        load = frames.LoadModel("/m", "causal", "float32", 9, "cpu", 1, "")
        with nothing_left(scratch), pytest.raises(ServiceDied) as told:
            await ProcessBackend(load, place, 60.0).load()
        assert "its runner exited with status" in str(told.value)
        child = int((tmp_path / "child").read_text())
        while alive(child):
            await asyncio.sleep(0.005)

    asyncio.run(life())


class TestRunner:
    pytestmark = NEEDS_TORCH

    def test_a_model_that_cannot_be_served_is_refused(
            self, home: Path, scratch: Path, tmp_path: Path) -> None:
        causal = tiny(home, "causal")
        broken = tmp_path / "broken"
        broken.mkdir()
        (broken / "config.json").write_text("{}")
        (broken / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")

        async def life() -> None:
            assert "no folder" in await _refused(scratch, model=str(tmp_path / "none"))
            assert "cannot be loaded" in await _refused(scratch, model=str(broken))
            (broken / "model.safetensors").unlink()
            assert "no *.safetensors" in await _refused(scratch, model=str(broken))
            told = await _refused(scratch, model=str(causal), task="classifier")
            assert told.startswith("task:") and "score.weight" in told

        asyncio.run(life())

    def test_loading_beyond_load_s_raises_ServiceDied(self, home: Path, scratch: Path) -> None:
        async def life() -> None:
            copy = _torch(scratch, model=str(tiny(home, "causal")), load_s=0.05)
            with nothing_left(scratch), pytest.raises(ServiceDied, match="load_s"):
                await copy.load()

        asyncio.run(life())

    def test_cancelling_an_order_ends_the_service_process(self, home: Path, scratch: Path) -> None:
        """Its late answer would be taken for the answer to the next order."""
        adapter = Torch("causal")

        async def steps(copy: ServiceBackend) -> None:
            await copy.load()
            adapter.freeze(copy, "wake")
            task = asyncio.ensure_future(copy.wake((0,)))
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(ServiceDied):
                await copy.wake((0,))

        through(adapter, home, scratch, steps)

    def test_a_service_process_ends_with_its_worker(self, home: Path, scratch: Path) -> None:
        program = (
            "import asyncio, sys, time\n"
            "from tangram_hpc.services.processes.process import ProcessBackend\n"
            "from tangram_hpc.protocol.service_frames import LoadModel\n"
            "from tangram_hpc.ports import ServicePlace\n"
            "async def life():\n"
            "    copy = ProcessBackend(LoadModel(sys.argv[1], 'causal', 'float32', 99, 'cpu', 1),\n"
            "                          ServicePlace((0,), 'cpu', sys.argv[2]), 99)\n"
            "    await copy.load()\n"
            "    print(copy.pid, flush=True)\n"
            "    time.sleep(99)\n"
            "asyncio.run(life())\n")
        worker = subprocess.Popen([sys.executable, "-c", program, str(tiny(home, "causal")),
                                   str(scratch)], stdout=subprocess.PIPE, text=True)
        assert worker.stdout is not None
        runner = int(worker.stdout.readline())
        assert alive(runner)
        worker.send_signal(signal.SIGKILL)
        worker.communicate()

        async def gone() -> None:
            while alive(runner):
                await asyncio.sleep(0.005)

        asyncio.run(gone())

    def test_parking_frees_private_memory_and_copies_share_file_pages(
            self, home: Path, scratch: Path) -> None:
        """Weights on the "device" are private memory; parked weights are the files' own pages."""
        model = tiny(home, "causal", hidden=512, layers=8)
        weights = sum(f.stat().st_size for f in model.glob("*.safetensors"))

        async def life() -> None:
            copy = _torch(scratch, model=str(model))
            assert isinstance(copy, ProcessBackend)
            assert await copy.load() >= weights >> 20
            parked = _private(copy.pid)
            for _ in range(3):
                await copy.wake((0,))
                assert _private(copy.pid) - parked > 0.9 * weights
                await copy.park()
                assert _private(copy.pid) - parked < 0.1 * weights
            own, shared = _mapped(copy.pid, model)
            assert own == 0 and shared > 0.9 * weights
            await copy.close()

        with nothing_left(scratch):
            asyncio.run(life())


    def test_weights_whose_file_is_written_over_are_not_served(
            self, home: Path, scratch: Path, tmp_path: Path) -> None:
        """The next copy loads what is there then, as a whole."""
        adapter = Torch("classifier")
        model = tmp_path / "model"
        shutil.copytree(tiny(home, "classifier"), model)

        async def answers(copy: ServiceBackend) -> list[Any]:
            await copy.wake((0,))
            return [value(reply) for reply in await copy.call(adapter.good)]

        async def life() -> None:
            parked = _torch(scratch, model=str(model), task="classifier")
            await parked.load()
            file = model / "model.safetensors"
            newer = tiny(tmp_path, "classifier", seed=9) / file.name
            with file.open("r+b") as old:
                old.write(newer.read_bytes())
            with pytest.raises(ServiceDied, match=rf"{file.name} was changed after it was loaded"):
                await parked.wake((0,))
            other = _torch(scratch, model=str(model), task="classifier")
            await other.load()
            shutil.copy(file, model / "another")
            os.replace(model / "another", file)  # what is mapped stays as it was
            assert await answers(other)
            await other.close()

        with nothing_left(scratch):
            asyncio.run(life())


def _private(pid: int) -> int:
    """Bytes of anonymous memory that a process holds."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def _mapped(pid: int, folder: Path) -> tuple[int, int]:
    """Bytes of this folder's files that a process has mapped: pages of its own, because they were
    written, and pages in the page cache."""
    own = shared = 0
    ours = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        word, *rest = line.split()
        if not word.endswith(":"):
            ours = rest[-1].startswith(str(folder))
        elif ours and word == "Anonymous:":
            own += int(rest[0]) * 1024
        elif ours and word == "Rss:":
            shared += int(rest[0]) * 1024
    return own, shared - own
