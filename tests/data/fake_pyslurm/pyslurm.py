"""A FAKE of pyslurm, to test the program that speaks for it where no real one fits: it knows four
jobs, and does what FAKE_PYSLURM says (`exit`: as without a configuration; `hang`: as with a silent
controller; `crash`: as what segfaults). What it cannot show is whether pyslurm is as it says."""

import os
import sys
import time

__version__ = "0.fake"
ROLE = os.environ.get("FAKE_PYSLURM", "")

if ROLE == "exit":
    print("fake: fatal: Could not establish a configuration source", file=sys.stderr)
    sys.stderr.flush()
    os._exit(1)
if ROLE == "silent":
    time.sleep(600)


class PyslurmError(Exception):
    pass


class RPCError(PyslurmError):
    def __init__(self, errno, msg):
        super().__init__(msg)
        self.errno, self.msg = errno, msg


class JobSubmitDescription:
    def __init__(self, **fields):
        self.fields = fields

    def submit(self):
        print("the library's own words", flush=True)
        if self.fields.get("partitions") == "nowhere":
            raise RPCError(2000, "Invalid partition name specified")
        if not isinstance(self.fields["environment"], dict):
            raise RPCError(2019, "I/O error writing script/environment")
        with open("submitted", "w") as out:
            out.write(repr(dict(sorted(self.fields.items()))))
        return 41


class Job:
    def __init__(self, id, **fields):
        self.id, self.user_id, self.state, self.state_reason = id, os.geteuid(), "RUNNING", "None"
        self.name, self.partition, self.allocated_nodes = f"j{id}", "cpu", "c[1-2]"
        self.start_time, self.end_time, self.requeue_count = 100, 200, None
        self.comment = self.heterogeneous_id = self.heterogeneous_offset = None
        self.array_id = None
        self.__dict__.update(fields)

    def cancel(self):
        if self.id == 6:
            raise RPCError(2108, "Operation not permitted on individual component")
        with open("cancelled", "a") as out:
            out.write(f"{self.id} ")

    def modify(self, changes):
        with open("comment", "w") as out:
            out.write(changes.fields["comment"])


class Jobs(dict):
    @staticmethod
    def load():
        if ROLE == "hang":
            time.sleep(600)
        if ROLE == "crash":
            os.kill(os.getpid(), 11)
        if ROLE == "away":
            raise RPCError(1800, "Unable to contact slurm controller (connect failure)")
        het = {"heterogeneous_id": 5, "name": "het"}
        return Jobs({1: Job(1, comment="grant 7"), 2: Job(2, user_id=os.geteuid() + 1),
                     3: Job(3, array_id=3, comment="last"), 5: Job(5, **het),
                     6: Job(6, heterogeneous_offset=1, **het)})
