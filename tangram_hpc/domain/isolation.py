"""Chooses the isolation backend that a node uses for a session. Pure.

That a backend is installed does not mean that it works. So a worker tries the backends when it
starts, and its `NodeSpec` lists only the backends that worked, in the order of preference.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from .node import NodeSpec
from .session import OPEN, SessionSpec, needs_namespace

BACKENDS = ("process", "bwrap", "podman", "apptainer", "enroot")
HAVE_NETWORKS = BACKENDS[1:]  # the backends whose sandboxes have network namespaces of their own
HAVE_OPEN = ("bwrap",)  # the backends whose network namespaces can be given a way out

NEED_IMAGES = ("podman", "apptainer", "enroot")  # the backends that build nothing without an image
_FILES = ("/", "oci:", "oci-archive:", "docker-archive:", "docker://")


def takes_images(backend: str) -> bool:
    """Whether this backend can make a sandbox from an image. `process` takes none; the others take
    what the worker makes a folder of, and what they know themselves.
    """
    return backend != "process"


def is_runtimes_own(backend: str, image: str) -> bool:
    """Whether a session's image is a name that its container runtime understands by itself, so
    that the worker does not make a folder of it.

    Args:
        backend: the backend that the session asked for; empty if the node chose one.
        image: the image that it asked for.
    """
    if backend == "podman":  # a name without more is an image of podman's own storage
        return not image.startswith(_FILES)
    return backend in NEED_IMAGES


def offered(node: NodeSpec, trusted: bool) -> tuple[str, ...]:
    """Returns the backends of this node for trusted or untrusted code, best first."""
    return node.backends if trusted else node.untrusted


def backend_for(node: NodeSpec, spec: SessionSpec) -> str:
    """Returns the backend that a session gets on this node; an empty string if the node has none.
    """
    if spec.network == OPEN and not node.open_network:
        return ""
    return choose_isolation(offered(node, spec.trusted), spec)


@cache
def guards_without_image(untrusted: tuple[str, ...]) -> bool:
    """Whether a node with these backends for untrusted code isolates a command without a session,
    which has no image.
    """
    return any(name not in NEED_IMAGES for name in untrusted)


def choose_isolation(offers: tuple[str, ...], spec: SessionSpec) -> str:
    """Returns the first of these backends that serves a session; an empty string if none does."""
    for name in offers:
        if needs_namespace(spec.network) and name not in HAVE_NETWORKS:
            continue
        if spec.network == OPEN and name not in HAVE_OPEN:
            continue
        if not spec.image and name in NEED_IMAGES:
            continue
        if spec.backend in ("", name) and (not spec.image or takes_images(name)):
            return name
    return ""


def lacks_image(offers: Sequence[str], spec: SessionSpec) -> str:
    """Returns why these backends build no sandbox for a session without an image; an empty string
    if one of them does, or if the session has an image.
    """
    able = [name for name in offers if spec.backend in ("", name)]
    if spec.image or not able or any(name not in NEED_IMAGES for name in able):
        return ""
    return (f"image: {' or '.join(able)} builds its sandboxes from an image; name one"
            + ("" if spec.backend else ", or install bubblewrap on the nodes"))


def networks(offers: tuple[str, ...], open_network: str = "") -> tuple[str, ...]:
    """Returns the words of the networks that sessions can have with these backends.

    Args:
        offers: the backends.
        open_network: the program that opens a network on the node; empty for none.
    """
    if not offers:
        return ()
    own = any(name in HAVE_NETWORKS for name in offers)
    opens = open_network and any(name in HAVE_OPEN for name in offers)
    return ("off", *(("loopback", "filtered") if own else ()), *((OPEN,) if opens else ()), "host")


def preferred(backends: tuple[str, ...], first: str) -> tuple[str, ...]:
    """Returns the backends with a site's choice first, if that choice is among them."""
    return (first, *(b for b in backends if b != first)) if first in backends else backends
