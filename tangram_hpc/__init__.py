"""tangram_hpc: a Slurm job-step broker that packs agentic-RL actions into held allocations.

    import tangram_hpc

    with tangram_hpc.connect() as client:                 # or LocalCluster(cpus=8) on a laptop
        print(client.submit(["pytest", "-q"], cpus=(1, 8), timeout=60).result().text)

Everything public is here; importing this package starts nothing (no MPI, no thread).
"""

from __future__ import annotations

import importlib
from typing import Any

from .version import VERSION as __version__

_LAZY_IMPORTS = {
    "connect": "app.connecting",
    "find_access": "app.broker_location",
    "LocalCluster": "app.local",
    "Client": "client.client",
    "Session": "client.session",
    "SessionHandle": "client.session_handle",
    "DirectCalls": "client.direct.direct_calls",
    "SnapshotInfo": "client.snapshots.listing",
    "Future": "client.future",
    "ExecResult": "client.future",
    "Details": "client.future",
    "as_completed": "client.future",
    "as_completed_async": "client.future",
    "Endpoint": "client.endpoints.endpoint",
    "check_response": "client.endpoints.retry_decision",
    "Profile": "domain.action",
    "Routed": "domain.rollouts",
    "ActionState": "domain.states",
    "TangramError": "errors",
    "InvalidInput": "errors",
    "AccessError": "errors",
    "InfeasibleRequest": "errors",
    "BrokerUnreachable": "errors",
    "ClientClosed": "errors",
    "ActionFailed": "errors",
    "ActionTimeout": "errors",
    "ActionOutOfMemory": "errors",
    "FileFailed": "errors",
    "FileMissing": "errors",
    "FileIsFolder": "errors",
    "FileIsNoFolder": "errors",
    "FileInTheWay": "errors",
    "FileDenied": "errors",
    "StoreFailed": "errors",
    "PortFailed": "errors",
    "RemoteError": "errors",
    "UntrustedResult": "errors",
    "SessionLost": "errors",
    "ShellEnded": "errors",
    "SetupFailed": "errors",
    "Throttled": "errors",
    "Transient": "errors",
    "WrongWorld": "errors",
    "WouldDeadlock": "errors",
}

__all__ = ["__version__", *_LAZY_IMPORTS]


def __getattr__(name: str) -> Any:
    if name == "comm":  # the trainers' own communicator, once `connect` has met a gateway
        return importlib.import_module(".transport.mpi.mpi", __name__).trainers()
    if name in _LAZY_IMPORTS:
        return getattr(importlib.import_module(f".{_LAZY_IMPORTS[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
