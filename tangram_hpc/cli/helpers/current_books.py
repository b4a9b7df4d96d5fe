"""Opens the books of this user, after the import of everything that has changed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .printable import printable

if TYPE_CHECKING:
    from ...accounting.books.importing import ImportReport
    from ...accounting.books.schema import Books


@contextmanager
def current_books() -> Iterator[tuple[Books, ImportReport]]:
    """Yields the books and what was imported. Lines about jobs that are not whole go to stderr.

    Raises:
        TangramError: the database cannot be used.
    """
    from ...accounting.books.importing import import_jobs
    from ...accounting.books.schema import open_books
    from ...config.settings import load_config
    from ...storage.rundir import tangram_home
    from .accounted_spans import ask_spans

    home = tangram_home(os.environ)
    with open_books(load_config(os.environ).books, home) as books:
        yield books, import_jobs(books, home, time.time_ns(), lambda line: print(
            f"tangram: books: {printable(line)}", file=sys.stderr), ask_spans)
