"""A trainer of a job that is suspended: a session and an action of it, until a file appears."""

import os
import sys
import time

import tangram_hpc

with tangram_hpc.connect(name="suspended") as client, client.session(mem="50M") as session:
    session.write("state", "kept").result(60)
    running = client.submit(["sh", "-c", "sleep 4; echo whole"])
    print("a trainer is ready", flush=True)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.05)
    kept = session.exec("cat state").result(60).text
    told = running.result(60).text.strip()
    print(f"{kept} and {told}, attempt {running.details.attempt}, by {client.via}", flush=True)
