"""Runs one copy of a service in a process of its own, its runner, and leaves nothing of it behind.

The worker and the runner exchange the frames of `protocol/service_frames.py` over a socket pair,
one order and one answer at a time. Only the runner knows what a model is (`services/torch/`).

Invariants: the runner is a child in a process session of its own, and ends with its worker: the
kernel sends it SIGKILL when the thread that started it ends, and its socket closes. The end of a
runner is seen on the socket, whose other side the runner alone holds. After the end, neither
process of its group nor file descriptor nor file remains.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, TypeVar

from ...errors import ProtocolError
from ...ports import (
    OutOfDeviceMemory,
    ServiceDied,
    ServicePlace,
    ServiceRefused,
    ServiceReply,
    ServiceRequest,
)
from ...protocol import service_frames as frames
from ...sandbox import environment
from ...start_module import module_command
from .limited_wait import within

RUNNER = "tangram_hpc.services.torch.torch_runner"
_CLOSE_S = 10.0  # seconds that the runner may take to exit after the order; then it is killed
# seconds that the runner may take to exit after it has closed its socket; then it is killed
_EXIT_S = 2.0
_REAP_S = 0.005
_TAIL = 4096  # last bytes of the runner's output, in which the last line is searched
_LOG_MAX = 1 << 20  # bytes of that output after which only the last ones are kept
_LOG_S = 1.0  # seconds after which that is looked at again while an order is carried out
_PREFIXES = ("CUDA_", "NVIDIA_", "NCCL_", "TORCH_", "PYTORCH_")
_Answer = TypeVar("_Answer", bound=frames.ServiceFrame)


class ProcessBackend:
    """One copy that runs in a process of its own (serves `ports.ServiceBackend`).

    When a caller is cancelled while it waits for an answer, the runner is ended, because its answer
    would be mistaken for the answer to the next order.

    Args:
        load: The first order to the runner.
        place: Where the copy runs; its scratch folder is made, and removed with all that is in it.
        load_s: How long loading may take, and each move to or from a GPU, seconds.

    Attributes:
        shares_gpu: See `ports.ServiceBackend`.
        loads_here: See `ports.ServiceBackend`.
    """

    shares_gpu = True
    loads_here = True

    def __init__(self, load: frames.LoadModel, place: ServicePlace, load_s: float) -> None:
        self._load, self._place, self._load_s = load, place, load_s
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._watch: asyncio.Task[None] | None = None
        self._log: IO[bytes] | None = None
        self._waiting: asyncio.Future[frames.RunnerAnswer] | None = None
        self._ending = False  # the runner has closed its socket
        self._ended = ""  # how the runner ended; once set, nothing of it is left

    @property
    def pid(self) -> int:
        """The runner's process id; 0 while there is no runner."""
        return self._process.pid if self._process is not None and not self._ended else 0

    # ---- the port ----

    async def load(self) -> int:
        """Starts the runner and loads the model; see `ports.ServiceBackend.load`.

        Raises:
            ServiceDied: The runner ended, or had not loaded the model after `load_s` seconds.
        """
        if self._ended:
            raise ServiceDied(self._ended)
        await self._start()
        try:
            done = await self._within(self._load, frames.Loaded, "loaded the model")
        except ServiceRefused:
            await self.close()
            raise
        return done.host_mib

    async def wake(self, gpus: tuple[int, ...]) -> None:
        """Moves the weights to the first GPU of the block; see `ports.ServiceBackend.wake`."""
        await self._move(frames.Wake(self._place.gpus.index(gpus[0])))

    async def call(self, requests: Sequence[ServiceRequest]) -> list[ServiceReply]:
        """Sends a batch to the runner; see `ports.ServiceBackend.call`."""
        if sum(len(r.arguments) + len(r.method) + 16 for r in requests) > frames.FRAME_MAX:
            why = f"arguments: a batch of more than {frames.FRAME_MAX} bytes; send less at once"
            return [ServiceReply(error=why) for _ in requests]
        order = frames.CallBatch(tuple((r.method, r.arguments) for r in requests))
        answer = await self._request(order, frames.Answers)
        return [ServiceReply(value, error) for value, error in answer.replies]

    async def stand_by(self) -> None:
        """Frees all of the device's memory but the weights; see `ports.ServiceBackend.stand_by`."""
        await self._move(frames.StandBy())

    async def park(self) -> None:
        """Moves the weights back to host memory; see `ports.ServiceBackend.park`."""
        await self._move(frames.Park())

    def kill(self) -> None:
        """Sends SIGKILL to the runner; `close` waits for its end. See `ports.ServiceBackend.kill`.
        """
        if self._process is None:
            self._ended = self._ended or "it was ended before its runner was started"
        elif self._process.returncode is None:
            # not reaped yet, so the process id cannot be another process's
            os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Ends the runner in order, and kills it after `_CLOSE_S`; see
        `ports.ServiceBackend.close`.
        """
        if self._watch is None or self._writer is None:
            self._ended = self._ended or "it was closed"
            return
        if not self._ending:
            self._writer.write(frames.frame(frames.ExitRunner()))
        try:
            await asyncio.wait_for(asyncio.shield(self._watch), _CLOSE_S)
        except asyncio.TimeoutError:
            self.kill()
            await asyncio.shield(self._watch)

    # ---- the process ----

    async def _start(self) -> None:
        here, there = socket.socketpair()
        try:
            os.makedirs(self._place.scratch, mode=0o700, exist_ok=True)
            self._log = tempfile.TemporaryFile(dir=self._place.scratch)  # noqa: SIM115 - nameless
            # so that the runner writes to the file's end wherever that is, see `_shorten_log`
            fcntl.fcntl(self._log, fcntl.F_SETFL, os.O_APPEND)
            self._process = subprocess.Popen(
                module_command(RUNNER, str(there.fileno()), str(os.getpid())),
                env=_environment(self._place), cwd=self._place.scratch, stdin=subprocess.DEVNULL,
                stdout=self._log, stderr=self._log, pass_fds=[there.fileno()],
                start_new_session=True)
        except OSError as error:
            here.close()
            self._ended = f"its runner did not start ({error.strerror})"
            self._remove_files()
            raise ServiceDied(self._ended) from None
        finally:
            there.close()
        reader, self._writer = await asyncio.open_connection(sock=here)
        self._watch = asyncio.get_running_loop().create_task(self._read(reader))

    async def _move(self, order: frames.ServiceFrame) -> None:
        await self._within(order, frames.CopyMoved, "moved its weights")

    async def _within(self, order: frames.ServiceFrame, kind: type[_Answer], done: str) -> _Answer:
        """Returns the answer to an order that may take `load_s` seconds."""
        try:
            return await within(self._request(order, kind), self._load_s, self.kill)
        except TimeoutError:
            raise ServiceDied(f"its runner had not {done} after {self._load_s:g} s (load_s)"
                              ) from None

    async def _request(self, order: frames.ServiceFrame, kind: type[_Answer]) -> _Answer:
        if self._ending and self._watch is not None:
            await asyncio.shield(self._watch)
        if self._ended:
            raise ServiceDied(self._ended)
        assert self._writer is not None and self._waiting is None
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(frames.frame(order))
            while not (await asyncio.wait([self._waiting], timeout=_LOG_S))[0]:
                self._shorten_log()
            answer = self._waiting.result()
        except asyncio.CancelledError:
            self.kill()
            raise
        finally:
            self._waiting = None
        self._shorten_log()
        if isinstance(answer, frames.NoRoom):
            raise OutOfDeviceMemory(answer.text)
        if isinstance(answer, frames.ModelRefused):
            raise ServiceRefused(answer.text)
        if not isinstance(answer, kind):
            self.kill()
            raise ServiceDied(f"its runner answered {type(order).__name__} with "
                              f"{type(answer).__name__}")
        return answer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hands answers over until the runner ends; then removes what is left of it."""
        try:
            while True:
                head = await reader.readexactly(frames.HEAD.size)
                answer = frames.answer(await reader.readexactly(frames.size(head)))
                if self._waiting is not None and not self._waiting.done():
                    self._waiting.set_result(answer)
        except (asyncio.IncompleteReadError, ConnectionError, ProtocolError):
            pass  # the runner has closed its socket, or sent bytes that are not in the protocol
        assert self._process is not None and self._writer is not None
        self._ending = True
        remaining_s = _EXIT_S
        while not _has_exited(self._process.pid):  # freeing a device takes some time
            await asyncio.sleep(_REAP_S)
            remaining_s -= _REAP_S
            if remaining_s < 0:
                self.kill()
        with suppress(ProcessLookupError):  # where SIGCHLD is ignored, the group may be gone
            self.kill()  # what it has started, while its process id cannot be another process's
        self._ended = self._exit_reason(self._process.wait(), killed=remaining_s < 0)
        self._writer.transport.abort()
        with suppress(ConnectionError):
            await self._writer.wait_closed()
        self._remove_files()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(ServiceDied(self._ended))

    def _exit_reason(self, status: int, killed: bool) -> str:
        """Returns how the runner ended; `killed`: by this process, as it did not exit in time."""
        if status < 0 and not killed:
            name = signal.Signals(-status).name if -status in set(signal.Signals) else "unknown"
            return f"its runner was ended by signal {-status} ({name})"
        lines = self._log_tail().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        how = (f"its runner closed its socket and did not exit within {_EXIT_S:g} s" if killed
               else f"its runner exited with status {status}")
        return how + (f": {last}" if last else "")

    def _log_tail(self) -> bytes:
        assert self._log is not None
        file = self._log.fileno()
        return os.pread(file, _TAIL, max(0, os.fstat(file).st_size - _TAIL))

    def _shorten_log(self) -> None:
        """Drops a long log but for its end. Models warn at every call, some at every token, and a
        copy may serve for weeks.
        """
        assert self._log is not None
        file = self._log.fileno()
        if os.fstat(file).st_size > _LOG_MAX:
            tail = self._log_tail()
            os.ftruncate(file, 0)
            os.write(file, tail)

    def _remove_files(self) -> None:
        if self._log is not None:
            self._log.close()
        shutil.rmtree(self._place.scratch, ignore_errors=True)


def _has_exited(child: int) -> bool:
    """Returns whether a child process has exited; it stays a zombie, which keeps its id."""
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # the kernel has reaped it, as SIGCHLD is ignored
        return True


def _environment(place: ServicePlace) -> dict[str, str]:
    """Returns a runner's environment: the variables that function runners get, the GPU variables,
    and those of the place. Caches go to the scratch folder, and the network is never used.
    """
    kept = environment.for_child_processes(os.environ)
    kept |= {n: v for n, v in os.environ.items() if n.startswith(_PREFIXES)}
    package = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))
    paths = [p for p in kept.get("PYTHONPATH", "").split(os.pathsep) if p]
    caches = ("TMPDIR", "HF_HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join([*map(os.path.abspath, paths), package]),
        **dict.fromkeys(caches, os.path.abspath(place.scratch)),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(place.threads),
        "MKL_NUM_THREADS": str(place.threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait leave their cores to other processes
        **dict(place.env),
    }
