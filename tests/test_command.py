"""What is kept from one action to the next is nobody else's to change: environments by grant, the
signals that a program expects, a buffer through which many hosts speak.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys

from tangram_hpc.backends.sandbox.environ import Grants, for_commands
from tangram_hpc.backends.sandbox.hostwire import Gone, Piece, WorkerInbox, frame
from tangram_hpc.backends.transport.asyncsock import CHUNK, next_chunk

_LIBRARY = 3 << 31  # the C library's own signals 32 and 33, which its spawn ignores

# what it inherits itself, then what a command of it inherits
_SPAWN = """
import os
from tangram_hpc.backends.sandbox.command import _spawn
ignored = [l for l in open('/proc/self/status') if l.startswith('SigIgn')]
print(ignored[0].split()[1], flush=True)
os.waitpid(_spawn('/bin/grep', ['grep', 'SigIgn', '/proc/self/status'], {}, (0, 1, 2)), 0)
"""


def test_a_command_hears_what_whoever_started_us_ignores() -> None:
    told = subprocess.run(["/bin/sh", "-c", "trap '' HUP INT USR1; exec \"$0\" -c \"$1\"",
                           sys.executable, _SPAWN], capture_output=True, text=True, timeout=60,
                          check=True).stdout.split()
    ours, its = int(told[0], 16), int(told[2], 16)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGPIPE, signal.SIGXFSZ):
        assert ours >> number - 1 & 1, number
    assert its & ~_LIBRARY == 0


def test_an_environment_is_made_once_for_a_grant_and_own_names_stay_with_their_command() -> None:
    grants = Grants(for_commands({"PATH": "/bin", "SLURM_JOB_ID": "7"}, "/h", "/t"), "/cpus")
    plain = grants.plain(1, 2, "")
    assert plain is grants.plain(1, 2, "") and plain is not grants.plain(2, 2, "")
    before = dict(plain)
    assert before == {"PATH": "/bin", "LANG": "C.UTF-8", "SHELL": "/bin/sh", "HOME": "/h",
                      "TMPDIR": "/t", "TANGRAM_CPUS": "1", "TANGRAM_CPUS_MAX": "2",
                      "OMP_NUM_THREADS": "2", "MAKEFLAGS": "-j2",
                      "PYTEST_XDIST_AUTO_NUM_WORKERS": "2", "TANGRAM_CPUS_FILE": "/cpus",
                      "CUDA_VISIBLE_DEVICES": ""}
    own = {"MINE": "1", "MAKEFLAGS": "-k", "TANGRAM_CPUS": "64", "CUDA_VISIBLE_DEVICES": "0"}
    assert grants.adding(own, 1, 2, "") == {**before, "MINE": "1", "MAKEFLAGS": "-k"}
    assert grants.only({"A": "b", "TANGRAM_CPUS_FILE": "/etc"}, 3, 3, "1,2") == {
        "A": "b", "TANGRAM_CPUS": "3", "TANGRAM_CPUS_MAX": "3", "TANGRAM_CPUS_FILE": "/cpus",
        "CUDA_VISIBLE_DEVICES": "1,2"}
    assert grants.plain(1, 2, "") == before
    for units in range(1, 1000):  # a session that lives long and is resized often
        assert grants.plain(units, units, "")["TANGRAM_CPUS"] == str(units)
    assert len(grants._made) < 100


def test_hosts_speak_in_turn_through_one_buffer() -> None:
    """Frames cut anywhere, each piece gone from the buffer when the next host speaks."""
    rng = random.Random(3)
    said = [[Gone(n) if rng.random() < .5 else Piece(n, 1, rng.randbytes(rng.choice((0, 9, 5000))))
             for n in range(40)] for _ in range(3)]
    left = [b"".join(map(frame, messages)) for messages in said]
    inboxes, heard = [WorkerInbox() for _ in said], [[] for _ in said]  # type: ignore[var-annotated]
    buffer = bytearray(4096)
    while any(left):
        host = rng.choice([n for n, data in enumerate(left) if data])
        size = min(len(left[host]), rng.choice((1, 3, 700, 4096)))
        buffer[:] = b"\xc1" * len(buffer)
        buffer[:size], left[host] = left[host][:size], left[host][size:]
        heard[host] += inboxes[host].feed(memoryview(buffer)[:size])
    assert heard == said


def test_much_is_asked_for_only_where_much_comes() -> None:
    assert next_chunk(CHUNK, CHUNK - 1) == next_chunk(CHUNK, 0) == CHUNK
    more = next_chunk(CHUNK, CHUNK)
    assert more > CHUNK and next_chunk(more, more) == more and next_chunk(more, CHUNK) == CHUNK
