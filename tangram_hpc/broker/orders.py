"""Pure. The scheduler's orders to a node as messages to its worker."""

from __future__ import annotations

from ..domain import decision as de
from ..protocol import message as ms

ToWorker = (de.KillLease | de.ResizeLease | de.OpenSession | de.CloseSession | de.PackSession
            | de.PrepareService)


def message_of(order: ToWorker) -> ms.Message:
    """What the worker of `order.node` is told."""
    match order:
        case de.KillLease():
            return ms.Kill(order.lease, order.state, order.reason)
        case de.ResizeLease():
            return ms.Resize(order.lease, order.cores)
        case de.OpenSession():
            return ms.OpenSandbox(order.spec)
        case de.CloseSession():
            return ms.CloseSandbox(order.session)
        case de.PackSession():
            return ms.PackSandbox(order.session)
        case de.PrepareService():
            return ms.PrepareService(order.spec)
