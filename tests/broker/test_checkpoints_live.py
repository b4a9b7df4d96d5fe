"""A real broker takes checkpoints, is killed, and goes on from the last one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from helpers.cluster_parts import until

from tangram_hpc import connect
from tangram_hpc.accounting.record import fold
from tangram_hpc.storage.checkpoint import NAME
from tangram_hpc.storage.journal_format import is_compressed
from tangram_hpc.storage.journal_segments import journals, read_journals

# A broker that takes a checkpoint each 100 events, and says how many events it replays.
BROKER = """
import sys
from tangram_hpc.app.broker_process import serve_broker
from tangram_hpc.cli import main
from tangram_hpc.storage import checkpoint
checkpoint.EVENTS_MIN, checkpoint.EVENTS_EACH = 100, 0
before = serve_broker.apply_earlier
def told(*args):
    found = before(*args)
    print("replayed", found.kept, found.replayed, flush=True)
    return found
serve_broker.apply_earlier = told
sys.exit(main(sys.argv[1:]))
"""


def start(home: Path, said: Path) -> subprocess.Popen[bytes]:
    with open(said, "ab") as out:
        return subprocess.Popen(
            [sys.executable, "-c", BROKER, "broker", "--job", "cp", "--nodes", "1"],
            env={**os.environ, "TANGRAM_HOME": str(home)}, stdout=out, stderr=out)


def test_a_killed_broker_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "home" / "jobs" / "cp"
    environ = {**os.environ, "TANGRAM_HOME": str(home), "TANGRAM_JOB": "cp"}
    broker = start(home, tmp_path / "said")
    until(lambda: (folder / "access.json").exists(), "no access file")
    worker = subprocess.Popen([sys.executable, "-m", "tangram_hpc", "worker"],
                              env=environ)
    try:
        with connect(folder / "access.json") as client:
            session = client.session()
            told = [session.exec(["echo", "0"]).result(60).text]
            for turn in range(1, 4):
                told += [f.result(60).text for f in [
                    client.submit(["echo", str(n)]) for n in range(40)]]
                told.append(session.exec(["echo", str(turn)]).result(60).text)
                until(lambda: (folder / NAME).exists(), "no checkpoint")
                time.sleep(0.01 * turn)
                broker.send_signal(signal.SIGKILL)
                broker.wait()
                broker = start(home, tmp_path / "said")
            told.append(session.exec(["echo", "end"]).result(60).text)
            session.close()
            assert sorted(told) == sorted(
                [f"{n}\n" for n in [*range(40)] * 3] + [f"{n}\n" for n in range(4)] + ["end\n"])
        broker.terminate()
        assert broker.wait(60) == 0
    finally:
        worker.kill()
        broker.kill()
        worker.wait()
        broker.wait()
    starts = [list(map(int, line.split()[1:])) for line in
              (tmp_path / "said").read_text().splitlines() if line.startswith("replayed")]
    assert len(starts) == 4 and starts[0] == [0, 0]
    assert all(kept > 0 for kept, _ in starts[1:]), json.dumps(starts)
    assert sum(is_compressed(path.read_bytes()) for path in journals(folder)) >= 1
    records = fold(read_journals(folder)).records.values()
    assert len(records) == 125
    assert all(r.outcome is not None and r.outcome.state == "COMPLETED" for r in records)
