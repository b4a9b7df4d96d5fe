"""A trainer for tests: connects, says so, and stays until a file appears."""

import os
import sys
import time

import tangram_hpc

with tangram_hpc.connect(name="hold") as client:
    print("connected", flush=True)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.2)
        assert client.submit(pow, 2, 3).result(60) == 8
print("held to the end", flush=True)
