"""`tangram shutdown`: asks a job's broker to end in order, and its workers with it."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from .helpers import ids


def add(verbs: Any) -> None:
    """Adds the verb."""
    p = verbs.add_parser("shutdown", help="end a job's broker and workers in order")
    p.add_argument("-j", "--job", type=ids.job, default="", help="job id (default: as for `run`)")
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Asks, and waits until the broker has left its tombstone."""
    from ..app.connecting import connect, find_access
    from ..errors import AccessError, BrokerUnreachable
    from ..storage.access import read_access

    path = find_access(os.environ, args.job)
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
