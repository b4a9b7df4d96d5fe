"""A user whose number has no entry in the password database, as in a container under a foreign user
id or on a node whose directory service does not answer, runs a broker and finds its own actions."""

from __future__ import annotations

import os
import pwd

import pytest
from helpers.ordinary_user import ordinary_user

NUMBER = 54321
RUNS = """
from tangram_hpc import LocalCluster
with LocalCluster(cpus=1, mem_mib=256, job="nameless") as cluster:
    print(cluster.submit(["id", "-u"], trusted=True).result(60).text.strip())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without a name")
def test_a_user_without_a_name_is_accounted_by_number() -> None:
    with pytest.raises(KeyError):
        pwd.getpwuid(NUMBER)
    with ordinary_user(NUMBER) as user:
        ran = user.run("-c", RUNS)
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"{NUMBER}\n", "")
        for words in (("-j", "nameless"), ("--books",), ("--books", "-u", str(NUMBER))):
            told = user.run("-m", "tangram_hpc", "acct", *words, "-n", "-P", "-o", "User,State")
            assert told.returncode == 0, told.stderr
            assert told.stdout.splitlines() == [f"{NUMBER}|COMPLETED"], (words, told)
