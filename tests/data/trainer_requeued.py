"""A trainer of a job that is requeued. In the first start it opens a session, leaves work of each
kind that runs and work of each kind that waits, says that it is ready, and stays. In the next start
it waits until all named work has ended without it, and then asks for its results.

Arguments: EFFECTS, a file in which named work leaves a line when it begins and when it has ended.
"""

import os
import sys
import time

import tangram_hpc

effects = os.path.abspath(sys.argv[1])
start = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
NAMES = ("done", "runs", "waits")


def named(client, name: str, seconds: float):
    return client.submit(f"echo {name}.begun >> {effects}; sleep {seconds}; "
                         f"echo {name}.ended >> {effects}; echo {name}", once=name, trusted=True,
                         cpus=1, name=f"once {name}")


def said(line: str) -> bool:
    return line in open(effects).read().split()


with tangram_hpc.connect(name="requeued") as client:
    if start == 0:
        session = client.session(mem=10)
        session.write("state", "kept").result(60)
        assert named(client, "done", 0.0).result(60).text == "done\n"
        held = [named(client, "runs", 30.0), session.exec("sleep 300", name="session runs"),
                session.exec("true", name="session waits"),
                client.submit(["sleep", "300"], cpus=1, name="plain runs")]
        while client.ask("info")["actions"].get("RUNNING", 0) < 3 or not said("runs.begun"):
            time.sleep(0.05)
        held += [client.submit(["sleep", "300"], cpus=1, name="fills") for _ in range(64)]
        held += [named(client, "waits", 1.0),
                 client.submit(["true"], cpus=1, name="plain waits")]
        while client.ask("info")["actions"].get("PENDING", 0) < 4:
            time.sleep(0.05)
        print("start 0: ready", flush=True)
        time.sleep(600)
    print(f"start {start}: {client.ask('info')['sessions']} sessions", flush=True)
    while not all(said(f"{name}.ended") for name in NAMES):
        time.sleep(0.1)
    told = [named(client, name, 0.0).result(60).text.strip() for name in NAMES]
    print(f"start {start}: {told}", flush=True)
