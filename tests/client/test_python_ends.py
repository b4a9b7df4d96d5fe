"""What still runs while Python finalizes, such as a `__del__` or a generator that is closed, cannot
wait for a client, whose thread stands still by then: it gets an error, and the process ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tangram_hpc.app.local import LocalCluster

LEFT_OPEN = """
from tangram_hpc import LocalCluster

def batches():
    with LocalCluster(cpus=1) as client, client.session() as session:
        yield session.exec("echo first").result().text

stream = batches()
print(next(stream), end="")
"""
KEPT = """
import tangram_hpc

client = tangram_hpc.connect()
futures = [client.submit(["sleep", f"{n * 600}"]) for n in range(3)]
ended = tangram_hpc.as_completed(futures)
print(futures.index(next(ended)))
"""
FINALIZER = """
import concurrent.futures, os, tangram_hpc

class Environment:
    def __init__(self):
        self.client = tangram_hpc.connect()
        self.session = self.client.session()
        self.running, self.held = (self.session.exec("sleep 600") for _ in range(2))
        self.tries = (
            lambda: self.client.submit(["true"]), lambda: self.client.session(),
            lambda: self.session.exec("true"), lambda: self.client.metrics(),
            lambda: self.running.result(), lambda: self.running.exception(),
            lambda: self.session.closed.result(), lambda: repr(self.held),
            lambda: concurrent.futures.wait([self.held]), lambda: self.client.close())
        self.session.opened.result()

    def __del__(self, write=os.write):
        self.session.close()
        for each in self.tries:
            try:
                told = each()
            except Exception as error:
                told = error
            write(1, type(told).__name__.encode() + b"\\n")

environment = Environment()
"""


def ended(script: str, home: Path) -> list[str]:
    """The lines that a script prints, which ends by itself."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                          timeout=60, cwd=home)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_a_cluster_of_a_generator_that_is_left_open_ends_with_python(tmp_path, monkeypatch):
    monkeypatch.setenv("TANGRAM_HOME", str(tmp_path))
    assert ended(LEFT_OPEN, tmp_path) == ["first"]


def test_a_finalizer_gets_an_error_where_its_wait_could_not_end(tmp_path):
    with LocalCluster(cpus=1, home=tmp_path):
        assert ended(FINALIZER, tmp_path) == ["ClientClosed"] * 7 + [
            "str", "DoneAndNotDoneFutures", "NoneType"]


def test_a_generator_that_is_left_open_and_waits_no_more_ends_in_silence(tmp_path):
    with LocalCluster(cpus=1, home=tmp_path):
        assert ended(KEPT, tmp_path) == ["0"]
