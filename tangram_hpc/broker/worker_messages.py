"""Pure. The scheduler's decisions about a node, as messages to the worker of that node.

The most frequent decision, `StartLease`, carries a payload and is handled in the driver.
"""

from __future__ import annotations

from ..domain import decision as de
from ..protocol import message as ms

ToWorker = (de.KillLease | de.ResizeLease | de.OpenSession | de.CloseSession | de.PackSession
            | de.PrepareService)


def message_of(decision: ToWorker) -> ms.Message:
    """Returns the message that carries out a decision on its node."""
    match decision:
        case de.KillLease():
            return ms.KillAttempt(decision.lease, decision.state, decision.reason)
        case de.ResizeLease():
            return ms.Resize(decision.lease, decision.cores)
        case de.OpenSession():
            return ms.OpenSandbox(decision.spec)
        case de.CloseSession():
            return ms.CloseSandbox(decision.session)
        case de.PackSession():
            return ms.PackSandbox(decision.session)
        case de.PrepareService():
            return ms.InstallService(decision.spec)
