"""A torchrun-style trainer for tests: no MPI; its world is RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT, as torch.distributed reads them. Each rank's sum meets at rank 0."""

import os
import socket
import sys
import time

import tangram_hpc

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
with tangram_hpc.connect(name="torch-style") as client:
    mine = range(rank, 100, size)
    total = sum(client.map(pow, mine, [2] * len(mine)))
    if rank == 0:
        with socket.create_server(master) as server:
            server.settimeout(60)
            for _ in range(size - 1):
                peer, _ = server.accept()
                with peer, peer.makefile() as lines:
                    total += int(lines.readline())
        print(f"{size} ranks by {client.via}: {total}", flush=True)
    else:
        deadline = time.monotonic() + 60
        while True:
            try:
                with socket.create_connection(master) as peer:
                    peer.sendall(f"{total}\n".encode())
                break
            except ConnectionRefusedError:
                assert time.monotonic() < deadline, "rank 0 does not listen"
                time.sleep(0.1)
sys.exit(int(os.environ.get("TRAINER_STATUS", "0")))
