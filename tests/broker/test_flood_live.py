"""A client in another process that floods the broker does not delay this client."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tangram_hpc import LocalCluster
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.ids import client_of
from tangram_hpc.storage.journal_segments import read_journals

FLOOD = """
import sys
from tangram_hpc.app.connecting import connect
def noop(): pass
client = connect(sys.argv[1])
futures = [client.submit(noop) for _ in range(int(sys.argv[2]))]
print("sent", flush=True)
for future in futures:
    future.result()
client.close()
"""
COUNT = 3000


@pytest.mark.attack("rank", "cpu", "sessions")
def test_a_flood_of_another_client_process_does_not_delay_this_client(tmp_path: Path) -> None:
    with LocalCluster(cpus=2, home=tmp_path) as cluster:
        cluster.submit(abs, -1).result()
        flood = subprocess.Popen([sys.executable, "-c", FLOOD, str(cluster.access), str(COUNT)],
                                 stdout=subprocess.PIPE)
        assert flood.stdout is not None
        mine: list[int] = []
        while flood.poll() is None:
            future = cluster.submit(abs, -1)
            future.result()
            mine.append(future.action)
        flood.stdout.close()
        assert flood.returncode == 0
        folder = cluster.folder
    overtaken = grants_while_waiting(folder, mine)
    assert len(mine) > 5 and max(overtaken) <= 64, (len(mine), max(overtaken))


def grants_while_waiting(folder: Path, mine: list[int]) -> list[int]:
    """For each action, how many leases others were granted while it waited for its own."""
    me, waits, since = client_of(mine[0]), set(mine), dict[int, int]()
    found, others = [], 0
    for event in read_journals(folder):
        if isinstance(event, ev.ActionSubmitted) and event.action.id in waits:
            since[event.action.id] = others
        elif isinstance(event, ev.LeaseGranted):
            if event.action in since:
                found.append(others - since.pop(event.action))
            others += client_of(event.action) != me
    return found
