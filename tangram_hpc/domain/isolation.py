"""Pure. Which isolation backend a node has for a session.

Law: a name is no promise; what a node's worker found to work is in its `NodeSpec`, and the order
there is the order of preference.
"""

from __future__ import annotations

from .node import NodeSpec
from .session import SessionSpec

BACKENDS = ("process", "bwrap", "podman", "apptainer", "enroot")


def takes_image(backend: str, image: str) -> bool:
    """Whether this backend can make a sandbox of this image: `process` of none, `bwrap` of a
    folder that holds a root file system."""
    return backend != "process" and (backend != "bwrap" or image.startswith("/"))


def offered(node: NodeSpec, trusted: bool) -> tuple[str, ...]:
    """The backends that this node has for such code, best first."""
    return node.backends if trusted else node.untrusted


def backend_for(node: NodeSpec, spec: SessionSpec) -> str:
    """The backend that a session gets on this node; empty for none."""
    return choose(offered(node, spec.trusted), spec)


def choose(offers: tuple[str, ...], spec: SessionSpec) -> str:
    """The first of these backends that will do for a session; empty for none."""
    for name in offers:
        if spec.backend in ("", name) and (not spec.image or takes_image(name, spec.image)):
            return name
    return ""


def preferred(backends: tuple[str, ...], first: str) -> tuple[str, ...]:
    """The backends in order, with a site's choice first where it is among them."""
    return (first, *(b for b in backends if b != first)) if first in backends else backends
