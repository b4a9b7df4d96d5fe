"""Owns: the process of one copy - it reads orders and answers each, one at a time. Must not outlive
its worker, and knows of models only what an order needs.

    python -m tangram_hpc.services.torch.torch_runner SOCKET_FD WORKER_PID
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

from ...protocol import service_frames as frames

if TYPE_CHECKING:
    from .torch_model import Model

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def main(words: list[str]) -> int:
    """Serves the worker at the other end of this socket until that closes it."""
    descriptor, worker = int(words[0]), int(words[1])
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_NAME, b"tangram-model", 0, 0, 0)
    if os.getppid() != worker:
        return 1  # it ended before it could be watched
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
    from .torch_model import Model, Unservable  # seconds: only when it is wanted

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
        else:
            model.park()
        return frames.CopyMoved()
    except NoDeviceMemory as error:
        return frames.NoRoom(str(error))


def _receive(control: socket.socket, count: int) -> bytes:
    """So many bytes; none when the worker has closed its end."""
    data = bytearray()
    while len(data) < count:
        more = control.recv(min(count - len(data), 1 << 20))
        if not more:
            return b""
        data += more
    return bytes(data)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    os._exit(status)  # a second less than torch takes to undo itself; the kernel frees all alike
