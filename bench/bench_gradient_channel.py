"""Measures a replica's part of a step on one host: parameters out, and a gradient back.

`lane_over_bare` compares the gradient channel with a bare socket between the same two processes,
which carries the same bytes in both directions. Both take turns; the figure is the median of the
rounds' ratios. The member computes nothing, so this measures transport, headers and checks only. As
loopback is not a network, only the ratio has a meaning.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

import common
import numpy as np

from tangram_hpc.domain.hybrid import ContributorId, StepPlan
from tangram_hpc.libra.live.gradient_channel import GradientChannel
from tangram_hpc.protocol.gradient_messages import PAYLOAD_MAX, Gradient, GradientWork, JoinMessage
from tangram_hpc.transport.socket.bulk_socket import dial_bulk

JOB = "bench"


def member() -> None:
    """The other process: answers work with the parameters that it was sent, and bare bytes with
    themselves."""
    key, address, port = sys.stdin.readline().split()
    link = dial_bulk((address,), bytes.fromhex(key), JOB)
    link.most = PAYLOAD_MAX
    link.send(JoinMessage(0, 1))
    with socket.create_connection(("127.0.0.1", int(port))) as bare:
        while (got := link.receive()) is not None:
            message, payload = got
            if not isinstance(message, GradientWork):
                continue
            size = message.header.size * np.dtype(message.header.dtype).itemsize
            link.send(Gradient(message.header), memoryview(payload)[:size])
            if message.header.samples:
                bare.sendall(exactly(bare, size))


def exactly(sock: socket.socket, size: int) -> bytearray:
    """Receives `size` bytes."""
    data, at = bytearray(size), 0
    while at < size:
        at += sock.recv_into(memoryview(data)[at:])
    return data


def measure(channel: GradientChannel, bare: socket.socket, step: int, elements: int, rounds: int
            ) -> dict[str, float]:
    """The measurements of one size."""
    params = np.ones(elements)
    channels, bares = [], []
    for n in range(step, step + rounds):
        began = time.perf_counter()
        channel.begin(StepPlan(n, n, 1, (ContributorId(0, 1, 0),)), params, ["a", "b"])
        taken = channel.collect(60)
        channels.append(time.perf_counter() - began)
        assert (taken[0] == params).all()
        began = time.perf_counter()
        bare.sendall(params.data)
        exactly(bare, params.nbytes)
        bares.append(time.perf_counter() - began)
    ratios = [a / b for a, b in zip(channels, bares, strict=True)]
    return {"mib": params.nbytes / 2**20, "lane_ms": statistics.median(channels) * 1e3,
            "lane_over_bare": statistics.median(ratios)}


def main() -> None:
    """Prints one JSON line."""
    tiny = common.arguments(__doc__).tiny
    sizes = {"small": 1000, "large": 1 << (17 if tiny else 23)}
    rounds = 5 if tiny else 30
    key = os.urandom(32)
    channel = GradientChannel(0, "127.0.0.1", key, JOB)
    figures: dict[str, Any] = {}
    with socket.create_server(("127.0.0.1", 0)) as server, subprocess.Popen(
            [sys.executable, __file__, "member"], stdin=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        child.stdin.write(f"{key.hex()} {channel.address} {server.getsockname()[1]}\n")
        child.stdin.flush()
        bare, _ = server.accept()
        with bare:
            step = 0
            while not channel._members:
                time.sleep(0.01)
            for name, elements in sizes.items():
                figures[name] = measure(channel, bare, step, elements, rounds)
                step += rounds
            channel.close()
    common.line("lane", {"rounds": rounds, **sizes}, figures)


if __name__ == "__main__":
    member() if sys.argv[1:] == ["member"] else main()
