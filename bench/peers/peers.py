"""All peers, by name, in the order of the tables."""

from __future__ import annotations

from adapter import Peer
from cluster_peers import Dask, HyperQueue, Parsl, Ray
from ours import Ours, OursDirect, OursDirectTls, OursResizable, OursTls, OursTold
from pool_peers import ExecutorLib, MpiFutures, ProcessPool
from program_peers import GnuParallel, PlainChildren, Srun

PEERS: dict[str, type[Peer]] = {each.name: each for each in (
    Ours, OursTls, OursDirect, OursDirectTls, OursTold, OursResizable, ProcessPool, MpiFutures,
    ExecutorLib, Ray, Dask, Parsl, HyperQueue, GnuParallel, Srun, PlainChildren)}
