"""Writes action records as CSV and Parquet, with the columns that the books have.

Both have one row for each action, whole numbers with the unit at the end of each name, and -1 for a
figure that was not measured.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any

from ..accounting.fields import job_id
from ..accounting.flat import COLUMNS, FlatColumn, storable
from ..accounting.record import ActionRecord
from ..errors import MissingExtra, how_to_install

TABLE_COLUMNS = (
    FlatColumn("job", str, lambda r: storable(r.job)),
    FlatColumn("job_id", str, job_id),
    FlatColumn("user", str, lambda r: storable(r.user)),
    FlatColumn("attempt", int, lambda r: r.attempt),
    *COLUMNS,
)
_ROWS = 50_000  # of a row group: bounds the memory


def _rows(records: Iterable[ActionRecord]) -> Iterator[tuple[Any, ...]]:
    for r in records:
        yield tuple(column.value(r) for column in TABLE_COLUMNS)


def write_csv(records: Iterable[ActionRecord], file: IO[str]) -> int:
    """Writes a header and a line for each action; returns how many actions there were."""
    table = csv.writer(file, lineterminator="\n")
    table.writerow([column.name for column in TABLE_COLUMNS])
    count = 0
    for row in _rows(records):
        table.writerow(row)
        count += 1
    return count


def write_parquet(records: Iterable[ActionRecord], path: Path) -> int:
    """Writes a Parquet file; returns how many actions there were.

    Raises:
        MissingExtra: pyarrow is not installed.
        OSError: the file cannot be written.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra(f"export: Parquet needs the package pyarrow: {how_to_install('parquet')}"
                           ) from None
    kinds = {int: pyarrow.int64(), str: pyarrow.string()}
    schema = pyarrow.schema([(column.name, kinds[column.kind]) for column in TABLE_COLUMNS])
    count, rest = 0, _rows(records)
    # pyarrow opens paths to seek in them, and pipes cannot
    with open(path, "wb") as file, pyarrow.parquet.ParquetWriter(file, schema) as writer:
        while rows := list(islice(rest, _ROWS)):
            arrays = [pyarrow.array(values, field.type)
                      for values, field in zip(zip(*rows, strict=True), schema, strict=True)]
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))
            count += len(rows)
    return count
