"""`tangram shutdown`: asks a job's broker to end, and with it its workers."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from .helpers import ids


def add(verbs: Any) -> None:
    """Adds this verb to the command line."""
    p = verbs.add_parser("shutdown", help="end a job's broker and its workers in an orderly way")
    p.add_argument("-j", "--job", type=ids.job,
                   help="job id (default: TANGRAM_ACCESS, TANGRAM_JOB or the current Slurm job)")
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Asks the broker, and waits until its access file says that it has ended; returns the exit
    status.
    """
    from ..app.broker_location import find_access
    from ..app.connecting import connect
    from ..errors import AccessError, BrokerUnreachable
    from ..storage.access import read_access

    path = find_access(os.environ, args.job or "")
    client = connect(path, name="tangram shutdown")
    client.shutdown_broker("tangram shutdown")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            read_access(path)
        except AccessError:
            client.close()
            return 0
        time.sleep(0.05)
    raise BrokerUnreachable(f"access file {path}: the broker did not end within 30 s")
