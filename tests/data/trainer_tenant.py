"""A training run that uses the broker of another Slurm job: commands of a second, two at a time,
in a session and outside of one, beside a long one, until the file `NAME.stop` is there.

    python trainer_tenant.py NAME
"""

import sys
from pathlib import Path

import tangram_hpc

name = sys.argv[1]
with tangram_hpc.connect() as client:
    session = client.session(name=name)
    long = client.submit(["sleep", "4325"], name=f"{name}-long")
    ended = 0
    while not Path(f"{name}.stop").exists():
        single = client.submit(["sleep", "1"], name=f"{name}-single")
        session.submit(["sleep", "1"], name=f"{name}-inside").result().check()
        single.result().check()
        ended += 1
        print(f"{name}: {ended}", flush=True)
    long.cancel()
print(f"{name}: over", flush=True)
