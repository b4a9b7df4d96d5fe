"""`tangram gateway`: one rank of the trainers' MPI world, which forwards their frames to the
broker.
"""

from __future__ import annotations

import argparse
import os
from typing import Any


def add(verbs: Any) -> None:
    """Adds this verb to the command line."""
    p = verbs.add_parser("gateway", help="forward the MPI ranks' messages to the broker (one rank)")
    p.add_argument("--access", metavar="FILE",
                   help="access file (default: TANGRAM_ACCESS, else the job's file)")
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Runs until every rank has ended its connection; returns the exit status."""
    from ..app.gateway import serve_gateway
    from ..config.settings import load_config

    # The broker and the first rank warn about a tangram.toml that is not read.
    return serve_gateway(load_config(os.environ, say=False), os.environ, args.access)
