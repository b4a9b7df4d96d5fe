"""A trainer for tests whose work outlives its job's limit: COUNT named actions of SECONDS, on 8
CPUs each, each leaving one line in a file when it ends; told to end, it does at once, unsaved.
"""

import os
import signal
import sys
import time

import tangram_hpc

count, seconds, effects = int(sys.argv[1]), float(sys.argv[2]), os.path.abspath(sys.argv[3])
start = os.environ.get("SLURM_RESTART_COUNT", "0")
signal.signal(signal.SIGTERM, lambda *_: os._exit(3))


def noted(path: str, name: str, seconds: float) -> str:
    time.sleep(seconds)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, f"{name}\n".encode())
    return f"{name} in one go"


with tangram_hpc.connect(name="once") as client:
    before = client.ask("info")["actions"]
    print(f"start {start}: found {before}", flush=True)
    futures = []
    for n in range(count):
        name = f"w{n}"
        if n % 2:
            futures.append(client.submit(noted, effects, name, seconds, once=name, cpus=8))
        else:
            command = f"sleep {seconds}; echo {name} >> {effects}; echo {name} in one go"
            futures.append(client.submit(command, once=name, name="sh", cpus=8, trusted=True))
    for n, future in enumerate(futures):
        told = future.result()
        told = told if isinstance(told, str) else told.text.strip()
        assert told == f"w{n} in one go", told
print(f"start {start}: all {count} are here", flush=True)
