"""A trainer for tests: actions that each take all CPUs that a node lends, for some seconds."""

import sys

import tangram_hpc

with tangram_hpc.connect(name="test trainer") as client:
    futures = [client.submit(["sleep", sys.argv[2]], cpus=4) for _ in range(int(sys.argv[1]))]
    print(sum(future.result(90).ok for future in futures), "ended well", flush=True)
