"""For tests: a session with a secret file and a command that runs, until stdin ends; then says
whether both are as they were."""

import sys

import tangram_hpc

with tangram_hpc.connect(name="keeper") as client, client.session(mem=20) as session:
    session.write("secret", sys.argv[1]).result(60)
    run = session.exec("sleep 600")
    print("up", flush=True)
    sys.stdin.read()
    assert not run.done(), run.result()
    run.cancel()
    print(session.read("secret").result(60).decode(), flush=True)
