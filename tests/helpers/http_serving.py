"""Runs a `tangram serve http` for one test, against the broker of a cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tangram_hpc import LocalCluster


class Serving:
    """A running server; ends with its `with` block.

    Args:
        cluster: the cluster whose broker it uses.
        options: further options of the command line.
        log: where its stderr goes; None for that of the tests.

    Attributes:
        url, key: the URL and the key that it has printed; the key is empty if the server was given
            a file of keys.
    """

    def __init__(self, cluster: LocalCluster, *options: str, log: Path | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tangram_hpc", "serve", "http", "--access", str(cluster.access),
             *options], stdout=subprocess.PIPE, stderr=log and log.open("ab"), text=True)
        assert self.process.stdout is not None
        told = json.loads(self.process.stdout.readline())
        self.url: str = told["url"]
        self.key: str = told["key"] or ""

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.terminate()
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()
