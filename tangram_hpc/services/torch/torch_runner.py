"""The process of one copy: reads the worker's orders and answers them, one at a time.

    python -m tangram_hpc.services.torch.torch_runner SOCKET_FD WORKER_PID

It never outlives its worker: the kernel sends it SIGKILL when the thread that started it ends, and
it exits when its socket closes. torch is imported only by the first order, since that takes
seconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import traceback
from typing import TYPE_CHECKING

from ...protocol import service_frames as frames

if TYPE_CHECKING:
    from .torch_model import Model

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def main(arguments: list[str]) -> int:
    """Serves the worker at the other end of the socket until the worker closes it."""
    descriptor, worker = int(arguments[0]), int(arguments[1])
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_NAME, b"tangram-model", 0, 0, 0)
    if os.getppid() != worker:
        return 1  # the worker ended before the kernel could watch it
    os.set_inheritable(descriptor, False)
    with socket.socket(fileno=descriptor) as control:
        try:
            _serve(control)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the worker is gone
    return 0


def _serve(control: socket.socket) -> None:
    model: Model | None = None
    while True:
        head = _receive(control, frames.HEAD.size)
        order = frames.order(_receive(control, frames.size(head))) if head else frames.ExitRunner()
        if isinstance(order, frames.ExitRunner):
            return
        if isinstance(order, frames.LoadModel):
            model, answer = _load(order)
        else:
            assert model is not None, "its first order was not to load"
            answer = _carry_out(model, order)
        control.sendall(frames.frame(answer))


def _load(order: frames.LoadModel) -> tuple[Model | None, frames.RunnerAnswer]:
    from .torch_model import Model, Unservable  # imported here because it takes seconds

    try:
        model = Model(order)
    except Unservable as error:
        return None, frames.ModelRefused(str(error))
    return model, frames.Loaded(model.host_mib)


def _carry_out(model: Model, order: frames.RunnerOrder) -> frames.RunnerAnswer:
    from .torch_model import NoDeviceMemory

    try:
        if isinstance(order, frames.CallBatch):
            return frames.Answers(tuple(model.call(order.requests)))
        if isinstance(order, frames.Wake):
            model.wake(order.device)
        elif isinstance(order, frames.StandBy):
            model.stand_by()
        else:
            model.park()
        return frames.CopyMoved()
    except NoDeviceMemory as error:
        return frames.NoRoom(str(error))


def _receive(control: socket.socket, count: int) -> bytes:
    """Returns `count` bytes, or none when the worker has closed its end."""
    data = bytearray()
    while len(data) < count:
        more = control.recv(min(count - len(data), 1 << 20))
        if not more:
            return b""
        data += more
    return bytes(data)


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
    except Exception:  # noqa: BLE001 - whatever the model's own code raises ends the runner
        traceback.print_exc()  # the worker quotes its last line
        status = 1
    os._exit(status)  # torch's own clean-up takes seconds, and the kernel frees everything anyway
