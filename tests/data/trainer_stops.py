"""A trainer for tests that stop the gateway at any moment: notes where it is, as files WHERE.RANK.
It submits ACTIONS functions that leave one line each in EFFECTS, closes its client, and computes
alone for a while before it ends.

Arguments: ACTIONS and the folder of the notes. Rank 0 comes and closes later than the others.
"""

import atexit
import os
import sys
import time
from pathlib import Path

actions, folder = int(sys.argv[1]), Path(sys.argv[2])
first = next((os.environ[n] for n in ("PMI_RANK", "SLURM_PROCID") if n in os.environ), "0") == "0"


def note(where: str) -> None:
    (folder / f"{where}.{os.getpid()}").touch()


def left(path: str, line: str) -> str:
    with open(path, "a") as file:
        file.write(line + "\n")
    time.sleep(0.02)
    return line + "!"


atexit.register(note, "gone")  # after the world was left, where the rank finalises MPI
note("begun")
time.sleep(0.5 * first)

import tangram_hpc  # noqa: E402

note("connecting")
client = tangram_hpc.connect()
rank = tangram_hpc.comm.rank
note("connected")
right = 0
for begin in range(0, actions, 5):
    lines = [f"{rank}.{n}" for n in range(begin, min(actions, begin + 5))]
    futures = [client.submit(left, str(folder / "effects"), line) for line in lines]
    right += sum(f.result(240) == line + "!" for f, line in zip(futures, lines, strict=True))
    note(f"half{begin}" if begin == actions // 2 else "working")
time.sleep(0.3 * first)
note("closing")
via = client.via
client.close()
note("closed")
time.sleep(0.7)
note("leaving")
print(f"rank {rank}: {right} of {actions} right, by {via}", flush=True)
