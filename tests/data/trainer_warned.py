"""A trainer for tests: connects, and ends with status 5 when it is told to end."""

import signal
import sys
import time

import tangram_hpc


def save(*_: object) -> None:
    print("saved", flush=True)
    sys.exit(5)


signal.signal(signal.SIGTERM, save)
with tangram_hpc.connect(name="warned") as client:
    assert client.submit(pow, 2, 3).result(60) == 8
    print("up", flush=True)
    time.sleep(600)
