"""A trainer of a job that is suspended: a session, a command that runs, work that waits for CPUs,
a call of a service and named work, all until a file appears."""

import os
import sys
import time

import tangram_hpc

with tangram_hpc.connect(name="suspended") as client, client.session(mem="50M") as session:
    client.register_service("judge", {"backend": "fake", "wake_s": 0.01, "call_s": 5.0,
                                      "weights_mib": 10})
    session.write("state", "kept").result(60)
    running = client.submit(["sh", "-c", "sleep 4; echo whole"])
    in_session = session.exec("sleep 4; cat state")
    call = client.call("judge", "score", texts=["x"])
    waiting = [client.submit(["sh", "-c", f"sleep 1; echo {n}"], cpus=8) for n in range(8)]
    named = client.submit(["echo", "named"], once=f"named by {os.getpid()}")
    print("a trainer is ready", flush=True)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.05)
    assert in_session.result(60).text == "kept" and named.result(60).text == "named\n"
    assert call.result(60)["fake"]
    assert [w.result(120).text for w in waiting] == [f"{n}\n" for n in range(8)]
    kept = session.exec("cat state").result(60).text
    told = running.result(60).text.strip()
    attempts = {f.details.attempt for f in (running, in_session, call, named, *waiting)}
    print(f"{kept} and {told}, attempt {attempts}, by {client.via}", flush=True)
