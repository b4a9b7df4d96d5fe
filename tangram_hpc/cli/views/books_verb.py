"""`tangram books`: imports the journals of all jobs into the books, and says what these hold.

The books keep the accounting of jobs whose folders have gone. `tangram acct --books` imports too;
this verb is for a crontab, and for a look at the database.
"""

from __future__ import annotations

import argparse
import json
from typing import Any


def add(verbs: Any) -> None:
    """Adds this verb to the command line."""
    p = verbs.add_parser(
        "books", help="import the journals of all jobs into one database",
        description="Imports the journals that have changed into the books, which `tangram acct "
                    "--books` reads, and says what the books hold. The setting `books` names "
                    "another database than a file in TANGRAM_HOME.")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Imports, and prints what there is; returns 1 if a job could not be read."""
    from ...accounting.books.query import books_size
    from ..helpers.current_books import current_books

    with current_books() as (books, done):
        with books.reading() as connection:
            jobs, actions, attempts = books_size(connection)
    if args.json:
        print(json.dumps({"books": books.name, "jobs": jobs, "actions": actions,
                          "attempts": attempts, "import": done.to_json()}))
    else:
        print(f"{books.name}: jobs {jobs}, actions {actions}, attempts {attempts}")
        print(f"imported now: jobs {done.read}, attempts {done.rows}; unchanged: jobs "
              f"{done.unchanged}; not readable: jobs {done.failed}")
    return 1 if done.failed else 0
