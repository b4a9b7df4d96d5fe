"""`tangram gateway`: one rank of the trainers' MPI world, carries their frames to the broker."""

from __future__ import annotations

import argparse
import os
from typing import Any


def add(verbs: Any) -> None:
    """Adds the verb."""
    p = verbs.add_parser("gateway", help="carry MPI ranks' traffic to the broker (one rank)")
    p.add_argument("--access", help="access file (default: TANGRAM_ACCESS, or the job's)")
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Runs until every rank has said goodbye."""

    from ..app.gateway import serve_gateway
    from ..config.settings import load_config

    # the broker and the first rank have told what is not read
    return serve_gateway(load_config(os.environ, say=False), os.environ, args.access)
