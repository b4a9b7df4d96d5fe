"""A secret's value is searched for in everything that a job writes, prints or keeps.

A session with the secret runs commands, a shell and a background process, is forked, frozen in a
snapshot and used by another process; an environment is prepared with it; the broker is killed. A
mark that is given openly must be found in the places that are searched, so that a search which
looks in the wrong place, or cannot read what it finds, fails.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.cluster_parts import until
from helpers.image_rig import small

import tangram_hpc
from tangram_hpc.storage.checkpoint import NAME as CHECKPOINT

JOB = "searched"
VALUE = "tok-" + os.urandom(12).hex()
MARK = "mark-" + os.urandom(8).hex()
FORMS = (VALUE.encode(), VALUE.encode().hex().encode(), VALUE[::-1].encode(),
         *(base64.b64encode(b" " * shift + VALUE.encode())[4:-4] for shift in range(3)))
PACKED = re.compile(rb"\x78[\x01\x5e\x9c\xda]")  # how data begins that zlib has compressed
BROKER = """
import sys
from tangram_hpc.cli import main
from tangram_hpc.storage import checkpoint
checkpoint.EVENTS_MIN, checkpoint.EVENTS_EACH = 100, 0
sys.exit(main(sys.argv[1:]))
"""
SCORER = """
import sys, tangram_hpc
with tangram_hpc.connect(name="scorer") as client, client.attach(sys.argv[1]) as session:
    print(session.exec('test -n "$SEARCH_KEY"').result(60).exit_code)
"""
VERBS = ("info --json", "queue --json", "explain {action} -j {job}", "acct --json -j {job}",
         "acct -l -j {job}", "logs -j {job} {action}", "export csv -j {job}",
         "export usage-record -j {job}", "report --json {job}", "journal check -j {job}", "books")


def contents(path: Path) -> Iterator[bytes]:
    """Yields the bytes of a file, and those of each compressed part in it."""
    data = path.read_bytes()
    yield data
    for found in PACKED.finditer(data):
        try:
            yield zlib.decompressobj().decompress(data[found.start():])
        except zlib.error:
            pass


def hidden_in(data: bytes) -> bool:
    return any(form in data for form in FORMS)


def files_with(test: Callable[[bytes], bool], *folders: Path) -> set[Path]:
    return {path for folder in folders for path in folder.rglob("*")
            if path.is_file() and not path.is_symlink() and any(map(test, contents(path)))}


class Job:
    """A broker that takes a checkpoint each 100 events, and a worker of it."""

    def __init__(self, place: Path, scratch: Path) -> None:
        self.home, self.scratch, self.said = place / "home", scratch, place / "said"
        self.folder = self.home / "jobs" / JOB
        self.environ = {**os.environ, "TANGRAM_HOME": str(self.home), "TANGRAM_JOB": JOB,
                        "TANGRAM_SCRATCH": str(self.scratch), "TANGRAM_LOGS_MIB": "16",
                        "TANGRAM_CPUS": "2", "TANGRAM_WARM": "1"}
        self.broker = self.start("-c", BROKER, "broker", "--job", JOB, "--nodes", "1")
        until(lambda: (self.folder / "access.json").exists(), "no access file")
        self.worker = self.start("-m", "tangram_hpc", "worker")

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        with open(self.said, "ab") as out:
            return subprocess.Popen([sys.executable, *words], env=self.environ, stdout=out,
                                    stderr=out)

    def kill_broker(self) -> None:
        self.broker.send_signal(signal.SIGKILL)
        self.broker.wait()
        self.broker = self.start("-c", BROKER, "broker", "--job", JOB, "--nodes", "1")

    def tangram(self, line: str) -> bytes:
        done = subprocess.run([sys.executable, "-m", "tangram_hpc", *line.split()],
                              env=self.environ, capture_output=True, timeout=60, check=False)
        assert done.returncode == 0, (line, done)
        return done.stdout + done.stderr

    def end(self) -> None:
        for process in (self.broker, self.worker):
            process.terminate()
        for process in (self.broker, self.worker):
            process.wait(60)


@pytest.fixture
def job(tmp_path: Path, short_folder: Path) -> Iterator[Job]:
    running = Job(tmp_path, short_folder)
    yield running
    for process in (running.broker, running.worker):
        process.kill()
        process.wait()


def used(session: tangram_hpc.Session, job: Job) -> str:
    """Does with a session what sessions can do; returns the action that printed the value."""
    text = f"test -n \"$SEARCH_KEY\" && echo {MARK} >>seen && echo {MARK}"
    for _ in range(3):  # Python serves the first, the compiled loop those that follow
        assert session.exec(text, name=MARK).result(60).ok
    with session.shell() as shell:
        assert shell.run(f"X=$SEARCH_KEY; {text}").result(60).ok
    assert session.exec("sleep 100 & true").result(60).ok  # it has the value while it lives
    failed = session.exec("test -z \"$SEARCH_KEY\"", name=MARK).result(60)
    assert failed.exit_code == 1 and not hidden_in(repr(failed).encode())
    done = subprocess.run([sys.executable, "-c", SCORER, session.handle().text],
                          env={**job.environ, "TANGRAM_ACCESS": str(job.folder / "access.json")},
                          capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "0\n", done
    printed = session.exec(f"echo {MARK}; echo $SEARCH_KEY | cat", name=MARK)
    assert printed.result(60).text == f"{MARK}\n{VALUE}\n"
    return printed.id


def branched(client: tangram_hpc.Client, session: tangram_hpc.Session, **options: object) -> None:
    """Forks and snapshots of a session, and a prepared environment that uses the secret."""
    look = f"test -n \"$SEARCH_KEY\" && read m <seen && test $m = {MARK}"
    with session.fork() as copy:
        assert copy.exec(look).result(60).ok
    name = session.snapshot().result(60)
    with client.session(snapshot=name, secrets=["SEARCH_KEY"]) as later:
        assert later.exec(look).result(60).ok
    with client.session(snapshot=name) as without:
        assert without.exec("test -z \"$SEARCH_KEY\"").result(60).ok  # it is not in the snapshot
    env = client.prepared(setup=[f"test -n \"$SEARCH_KEY\" && echo {MARK} >made"],
                          secrets=["SEARCH_KEY"], **options)
    with client.session(snapshot=env) as made:
        look = f"read m <made && test $m = {MARK} && test -z \"$SEARCH_KEY\""
        assert made.exec(look).result(60).ok


def outside_processes(job: Job) -> set[int]:
    """Returns the processes that have the value in their environment or command line and are not
    of the session's commands, which `sleep 100` is."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            data = (folder / "environ").read_bytes(), (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if any(map(hidden_in, data)) and not data[1].startswith(b"sleep\0"):
            found.add(int(folder.name))
    return found


@pytest.mark.parametrize("kind", ["no image", "an image"])
def test_a_secret_is_in_nothing_that_a_job_keeps_or_prints(job: Job, tmp_path: Path, kind: str
                                                           ) -> None:
    if kind == "an image" and not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")
    options = {} if kind == "no image" else {
        "image": f"oci:{small(WorkingDir='/testbed').layout(tmp_path / 'layout')}"}
    with tangram_hpc.connect(job.folder / "access.json") as client:
        client.keep_secrets({"SEARCH_KEY": VALUE})
        session = client.session(secrets=["SEARCH_KEY"], shared=True, name=MARK,
                                 env={"OPEN": MARK}, **options)
        printed = used(session, job)
        branched(client, session, **options)
        for _ in range(40):
            client.submit(["true"], name=MARK).result(60)
        until(lambda: (job.folder / CHECKPOINT).exists(), "no checkpoint")
        job.kill_broker()
        assert session.exec("test -n \"$SEARCH_KEY\"", name=MARK).result(60).ok
        until(lambda: MARK.encode() in job.tangram(f"logs -j {JOB} {printed}"), "no output kept")
        shown = {verb: job.tangram(verb.format(job=JOB, action=printed)) for verb in VERBS}
        assert not outside_processes(job)
        searched(job, shown)
    job.end()
    assert not files_with(hidden_in, tmp_path, job.scratch)  # the file of secrets is gone, too


def searched(job: Job, shown: dict[str, bytes]) -> None:
    """Asserts that the value is in no file but that of the secrets, and in nothing printed; and
    that the mark is where it was given."""
    assert files_with(hidden_in, job.home, job.scratch, job.said.parent) == {
        job.folder / "secrets.json"}
    marked = files_with(lambda data: MARK.encode() in data, job.home, job.scratch)
    names = {path.relative_to(job.folder).parts[0] for path in marked if job.folder in path.parents}
    assert {CHECKPOINT, "outputs"} <= names and any(n.startswith("journal") for n in names), names
    layers = [path for path in marked if job.scratch in path.parents]
    assert len({path.name for path in layers} & {"seen", "made"}) == 2, layers
    assert not [verb for verb, text in shown.items() if hidden_in(text)]
    with_mark = {verb for verb, text in shown.items() if MARK.encode() in text}
    assert {"acct --json -j {job}", "logs -j {job} {action}", "export csv -j {job}"} <= with_mark
    assert b"SEARCH_KEY" in shown["logs -j {job} {action}"]  # in the place of the value
