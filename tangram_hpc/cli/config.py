"""`tangram config`: each setting in force, and where it came from.

It reads what `tangram broker` would read in the same folder and environment, and starts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any


def add(verbs: Any) -> None:
    """Adds the verb."""
    p = verbs.add_parser("config", help="the settings in force, and where each came from")
    p.add_argument("--json", action="store_true", help="one JSON object")
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Reads all sources and prints a line a setting."""
    from ..config.settings import SITE_FILE, checked, gather, load_config, user_file

    load_config(os.environ)  # says what is not read
    found = gather(os.environ)
    values = checked(found).model_dump()
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
          + (f"; not there: {', '.join(others)}" if others else ""))
    return 0
