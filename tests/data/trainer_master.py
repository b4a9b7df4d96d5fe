"""A rank for tests: says where rank 0 is met, and that the broker can be reached from this node."""

import os

import tangram_hpc

with tangram_hpc.connect() as client:
    assert client.submit(["true"]).result(60).ok
print("rank", os.environ["RANK"], "meets", os.environ["MASTER_ADDR"], flush=True)
