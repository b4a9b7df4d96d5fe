"""`tangram config`: prints each setting in force and its source.

It reads the same files and variables as `tangram broker` would in this directory and environment,
and starts nothing. It refuses what a broker would refuse. Of `bind` it only warns: the broker may
run on another host, which has other interfaces.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any


def add(verbs: Any) -> None:
    """Adds this verb to the command line."""
    p = verbs.add_parser("config", help="print each setting in force and its source")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Reads all sources and prints one line per setting; returns the exit status."""
    from ..config.setting_tables import check_tables
    from ..config.settings import SITE_FILE, checked, gather, load_config, user_file

    # called for its warning about a tangram.toml of this directory that is not read
    load_config(os.environ)
    found = gather(os.environ)
    config = checked(found)
    check_tables(config)
    _warn_of_bind(config.bind)
    values = config.model_dump()
    if args.json:
        print(json.dumps({name: {"value": value, "from": found.origin.get(name, "default")}
                          for name, value in values.items()}))
        return 0
    for name, value in values.items():
        text = json.dumps(value)
        print(f"{name:<16} {text:<24} {found.origin.get(name, 'default')}")
    read = [str(path) for path in found.files]
    others = [str(p) for p in (SITE_FILE, user_file(os.environ)) if str(p) not in read]
    print(f"files read: {', '.join(read) or 'none'}"
          + (f"; do not exist: {', '.join(others)}" if others else ""))
    return 0


def _warn_of_bind(bind: str) -> None:
    """Says on stderr if a broker could not listen on this host as the setting says."""
    from ..errors import InvalidInput
    from ..transport.socket.address import addresses

    if bind and bind != "none":
        try:
            addresses(bind)
        except InvalidInput as error:
            print(f"tangram: warning: {error}; a broker on this host would not start",
                  file=sys.stderr)
