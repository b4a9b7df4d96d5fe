"""A trainer for tests that must stop and go on: N steps, its place in a file, saved on SIGTERM."""

import os
import signal
import sys
import time
from pathlib import Path

import tangram_hpc

steps, pause_s, state = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
told_to_end = False


def note(*_: object) -> None:
    global told_to_end
    told_to_end = True


signal.signal(signal.SIGTERM, note)
done = int(state.read_text()) if state.exists() else 0
with tangram_hpc.connect(name="resumes") as client:
    while done < steps and not told_to_end:
        assert client.submit(pow, 2, 3, name="step").result(60) == 8
        done += 1
        state.write_text(str(done))
        time.sleep(pause_s)
print(f"start {os.environ.get('SLURM_RESTART_COUNT', '0')}: at step {done} of {steps}", flush=True)
sys.exit(0 if done == steps else 3)
