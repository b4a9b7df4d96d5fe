"""A trainer for tests: its ranks submit ACTIONS commands, use a session each, reduce over MPI."""

import os
import sys

import numpy as np

import tangram_hpc

actions = int(sys.argv[1])
with tangram_hpc.connect(name="test trainer") as client:
    comm = tangram_hpc.comm
    assert client.via == "mpi", client.via
    mine = range(comm.rank, actions, comm.size)
    with client.session(name=f"rank{comm.rank}") as session:
        session.write("seen", "").result()
        futures = [client.submit(["/bin/true"], name="true") for _ in mine]
        kept = [session.exec(f"echo {n} >> seen; wc -l < seen").result().text for n in range(5)]
        assert kept == [f"{n + 1}\n" for n in range(5)], kept
        where = session.exec("echo $TANGRAM_CPUS ${SLURM_JOB_ID:-none}").result().text
        assert where == "1 none\n", where
    done = np.array([sum(f.result(300).ok for f in futures)], dtype=np.int64)
    total = comm.allreduce(int(done[0]))
    if comm.rank == 0:
        print(f"job {os.environ['SLURM_JOB_ID']}: {total} of {actions} ok "
              f"on {comm.size} ranks by {client.via}", flush=True)
    assert total == actions
