"""A rank that loses its broker prints one line, and hides nothing that is the trainer's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cluster_parts import kill_broker

from tangram_hpc import LocalCluster
from tangram_hpc.app.access_dial import AccessFileDialer
from tangram_hpc.app.connecting import socket_dial
from tangram_hpc.client.client import Client
from tangram_hpc.errors import BrokerUnreachable
from tangram_hpc.ports import Channel
from tangram_hpc.storage.access import mark_ended
from tangram_hpc.storage.store import FolderStore

BEGIN = """
import sys
from tangram_hpc.app.lost_broker import report_loss_in_one_line
from tangram_hpc.errors import BrokerUnreachable
"""
HOOKED = "report_loss_in_one_line({'RANK': '2'})\n"
LOST = "BrokerUnreachable('job 7: it is gone')"


def told(program: str) -> str:
    """What a program says that ends with an uncaught error."""
    done = subprocess.run([sys.executable, "-c", BEGIN + program], capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.returncode == 1
    return done.stderr


def test_errors_of_the_network_beneath_a_loss_are_not_shown() -> None:
    said = told(f"{HOOKED}try:\n    raise OSError()\nexcept OSError:\n    raise {LOST}")
    assert said == "tangram: error: rank 2: job 7: it is gone\n"


@pytest.mark.parametrize("then", ["finally", "except KeyError"])
def test_an_error_of_the_trainer_that_was_being_handled_keeps_its_traceback(then: str) -> None:
    said = told(f"{HOOKED}try:\n    {{}}['wrong']\n{then}:\n    raise {LOST}")
    assert "KeyError: 'wrong'" in said and said.count("Traceback") == 2


def test_a_hook_that_was_there_before_is_called() -> None:
    said = told("sys.excepthook = lambda kind, error, trace: print('REPORTED', error, trace, "
                f"file=sys.stderr)\n{HOOKED}raise {LOST}")
    assert said == ("tangram: error: rank 2: job 7: it is gone\n"
                    "REPORTED job 7: it is gone None\n")


def test_a_rank_without_a_number_is_named_by_its_launcher() -> None:
    said = told(f"report_loss_in_one_line({{'PMI_RANK': '5'}})\nraise {LOST}")
    assert said.startswith("tangram: error: rank 5: ")


def test_a_client_that_only_ever_used_a_gateway_is_told_that_its_broker_is_lost(tmp_path: Path
                                                                                ) -> None:
    with LocalCluster(cpus=1, home=tmp_path, grace_s=1) as c:
        by_socket, used = socket_dial(AccessFileDialer(c.access), c.job), []

        def by_gateway() -> Channel:
            if used:
                raise BrokerUnreachable("the gateway is gone")
            used.append(True)
            return socket_dial(AccessFileDialer(c.access), c.job)()

        with Client([by_gateway, by_socket], c.job, FolderStore) as client:
            client.submit("true").result(60)
            future = client.submit("sleep 60")
            kill_broker(c)
            mark_ended(c.access, c.job, "2026-01-01T00:00:00")
            with pytest.raises(BrokerUnreachable, match="has ended at 2026"):
                future.result(60)
