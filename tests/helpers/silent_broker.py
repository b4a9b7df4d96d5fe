"""A broker that answers nothing for a while, and `tangram` with little patience: its queries wait
1 s for an answer instead of 10 s.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tangram_hpc import LocalCluster

IMPATIENT = [sys.executable, "-uc", """
import sys
from tangram_hpc.cli import main
from tangram_hpc.client.client import Client
ask = Client.ask
Client.ask = lambda self, what, argument="": ask(self, what, argument, 1.0)
sys.argv[0] = "tangram"
sys.exit(main())
"""]


@contextmanager
def silent(cluster: LocalCluster) -> Iterator[None]:
    """Stops the cluster's broker until the block has ended. Its connections stay."""
    broker = cluster._children[0].pid
    os.kill(broker, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(broker, signal.SIGCONT)
