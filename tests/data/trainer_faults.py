"""A trainer for tests of faults: a session a rank, N steps in it, each leaving one line.

Says which way it ended by; a rank that lost its gateway must find every line once, in order.
"""

import os
import sys
import time

import tangram_hpc

steps, go = int(sys.argv[1]), sys.argv[2]
client = tangram_hpc.connect(name="faults")
rank = int(os.environ["RANK"])
session = client.session(name=f"rank{rank}", mem=10)
session.opened.result(60)
with open(f"faults.{os.environ['SLURM_JOB_ID']}.{rank}.pid", "w") as file:
    file.write(str(os.getpid()))
for n in range(steps):
    assert session.exec(f"echo {n} >> log").result(120).ok
    time.sleep(0.02)
lines = session.read("log").result(60).decode().split()
assert lines == [str(n) for n in range(steps)], lines
print(f"rank {rank}: {len(lines)} lines once and in order, by {client.via}", flush=True)
while not os.path.exists(go):
    time.sleep(0.1)
session.close()
client.close()
