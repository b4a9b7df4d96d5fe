"""A real job of a few seconds with something of every kind: trajectories in sessions that run real
commands, calls of two services that share fake devices, and an endpoint with a quota.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tangram_hpc import LocalCluster

JOB = "mixed"
_COMPUTE = "import sys\nfor _ in range(int(sys.argv[1])): sum(range(20000))"


def run_mixed_job(home: Path, trajectories: int = 6, turns: int = 3, hostile: str = "") -> None:
    """Runs the job on this machine.

    Args:
        home: The TANGRAM_HOME.
        trajectories: How many run at a time.
        turns: How many turns each has.
        hostile: Part of the names of an action, a session and of an error, which a model could have
            chosen.
    """
    with LocalCluster(8, mem_mib=4000, home=home, job=JOB, devices="fake:4") as client:
        for name, call_s in (("judge", 0.08), ("teacher", 0.15)):
            client.register_service(name, {"backend": "fake", "wake_s": 0.1, "call_s": call_s})
        search = client.register_endpoint("search", concurrency=2, rate=20)

        def play(number: int) -> None:
            name = f"trajectory-{number}{hostile}"
            session = client.session(mem=100, name=name, trusted=True)
            for turn in range(turns):
                time.sleep(0.05 + 0.02 * (number % 3))
                session.exec([sys.executable, "-c", _COMPUTE, "60"], cpus=[1, 2, 4],
                             name="build").result(60)
                with search.slot(trajectory=name):
                    time.sleep(0.03)
                client.call("judge", "score", texts=["a"], trajectory=name).result(60)
                if turn == 1:
                    client.call("teacher", "score", texts=["b"], trajectory=name).result(60)
                session.exec(["sleep", "0.1"], cpus=1, name=f"shell{hostile}").result(60)
            session.close()

        with ThreadPoolExecutor(trajectories) as pool:
            for done in [pool.submit(play, n) for n in range(trajectories)]:
                done.result(120)
        client.submit(["sh", "-c", "exit 3"], name=f"fails{hostile}", trusted=True).result(60)
