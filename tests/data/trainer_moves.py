"""A trainer for tests: commands that take a while on all that is held; where and how they ended."""

import sys
from collections import Counter

import tangram_hpc

actions, seconds = int(sys.argv[1]), sys.argv[2]
with tangram_hpc.connect(name="moves") as client:
    mine = range(tangram_hpc.comm.rank, actions, tangram_hpc.comm.size)
    futures = [client.submit(["sleep", seconds], name="stays", retries=2) for _ in mine]
    ended = [(f.result(300).ok, f.details.attempt) for f in futures]
    everyone = tangram_hpc.comm.gather(ended)
    if tangram_hpc.comm.rank == 0:
        attempts = Counter(attempt for rank in everyone for ok, attempt in rank if ok)
        print(f"ok by attempts {sorted(attempts.items())}", flush=True)
