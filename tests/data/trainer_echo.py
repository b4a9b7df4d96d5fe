"""A trainer for tests: ACTIONS functions over all ranks, 64 KiB each way, every answer compared."""

import sys

import numpy as np

import tangram_hpc

SIZE = 64 * 1024


def flip(data: bytes) -> bytes:
    return data[::-1]


with tangram_hpc.connect(name="echo") as client:
    comm = tangram_hpc.comm
    assert client.via == "mpi", client.via
    rng = np.random.default_rng(comm.rank)
    right = bad = 0
    mine = range(comm.rank, int(sys.argv[1]), comm.size)
    for begin in range(0, len(mine), 50):
        sent = [rng.bytes(SIZE) for _ in mine[begin : begin + 50]]
        futures = [client.submit(flip, data, name="flip") for data in sent]
        for data, future in zip(sent, futures, strict=True):
            if future.result(300) == data[::-1]:
                right += 1
            else:
                bad += 1
    right, bad = comm.allreduce(right), comm.allreduce(bad)
    if comm.rank == 0:
        print(f"echo: {right} right, {bad} wrong, {comm.size} ranks by {client.via}", flush=True)
