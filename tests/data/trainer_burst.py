"""A trainer for tests: a burst of commands, then nothing for so many seconds, or until a file
appears."""

import os
import sys
import time
from collections import Counter

import tangram_hpc

count, seconds, stop, quiet = int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
with tangram_hpc.connect(name="burst") as client:
    began = time.monotonic()
    futures = [client.submit(["sleep", seconds], name="nap", retries=3) for _ in range(count)]
    states = Counter(f.result(600).ok for f in futures)
    ended = time.monotonic()
    print(f"burst: {states[True]} of {count} ok in {ended - began:.1f} s", flush=True)
    while not os.path.exists(stop) and time.monotonic() < ended + quiet:
        time.sleep(0.2)
