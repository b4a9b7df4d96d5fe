"""Runs one command after another in one open session for so many seconds; says how many ended well,
and what became of the first that did not."""

import sys
import time
from concurrent.futures import CancelledError

import tangram_hpc

begin, done = time.monotonic(), 0
with tangram_hpc.connect() as client, client.session() as session:
    try:
        while time.monotonic() - begin < float(sys.argv[1]):
            assert session.exec(["true"]).result(60).ok
            done += 1
            print("went", done, flush=True)
            time.sleep(0.5)
    except (tangram_hpc.TangramError, CancelledError, AssertionError) as error:
        print(f"stopped after {done}: {error!r}", flush=True)
    else:
        print(f"all {done} went well", flush=True)
    client.shutdown_broker("done")
