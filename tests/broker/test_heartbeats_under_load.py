"""A machine with 50 busy programs for its few cores: heartbeats arrive late, and still nobody is
declared lost, no connection is given up, and no work runs twice."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from helpers.cluster_parts import broker_of

from tangram_hpc import LocalCluster
from tangram_hpc.accounting.record import fold
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.states import ActionState
from tangram_hpc.storage.journal_segments import read_journals

BUSY, WORKERS, CLIENTS, SECONDS = 50, 3, 6, 60
CLIENT = """
import sys, time, tangram_hpc
until, done = time.monotonic() + float(sys.argv[2]), 0
with tangram_hpc.connect(sys.argv[1]) as client, client.session(mem=10) as session:
    session.write("n", "kept").result(300)
    while time.monotonic() < until:
        assert client.submit(["echo", "x"]).result(300).ok
        assert session.exec("cat n").result(300).text == "kept"
        done += 2
        time.sleep(1)
    print(done)
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_nobody_is_declared_lost_under_load_50(tmp_path: Path) -> None:
    with LocalCluster(cpus=2, workers=WORKERS, home=tmp_path) as cluster:
        busy = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
                for _ in range(BUSY)]
        try:
            clients = [subprocess.Popen([sys.executable, "-c", CLIENT, str(cluster.access),
                                         str(SECONDS)], stdout=subprocess.PIPE, text=True)
                       for _ in range(CLIENTS)]
            time.sleep(SECONDS)
            print(f"load {os.getloadavg()[0]:.0f}")
            said = [client.communicate(timeout=400)[0] for client in clients]
        finally:
            for process in busy:
                process.kill()
            for process in busy:
                process.wait()
        assert broker_of(cluster).poll() is None
        nodes = cluster.ask("nodes")["nodes"]
        folder = cluster.folder
    done = [int(text) for text in said]
    print(f"actions by client: {done}")
    assert [node["state"] for node in nodes] == ["UP"] * WORKERS
    events = list(read_journals(folder))
    assert not [e for e in events if isinstance(e, ev.NodeLost)]
    assert not [e for e in events if isinstance(e, ev.ClientLeft) and not e.bye]
    joined = Counter(e.uid for e in events if isinstance(e, ev.ClientJoined))
    assert set(joined.values()) == {1}, joined
    rows = list(fold(events).records.values())
    assert len(rows) == sum(done) + CLIENTS  # and one file is written by each
    assert {(row.state, row.attempt) for row in rows} == {(ActionState.COMPLETED, 1)}
