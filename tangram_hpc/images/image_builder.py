"""Builds an image from a Dockerfile by a builder that is installed: buildah, else podman.

There is no builder of our own: what a Dockerfile's steps do is what these two well-kept programs
do, without a daemon and without root. The result is an archive of an OCI layout, which is then
imported like any other.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from ..errors import TangramError
from .image_errors import ImageRefused

BUILDERS = ("buildah", "podman")
# On a machine with cgroup v1 and v2 this file lists the controllers of v2; others do not have it.
_HYBRID = Path("/sys/fs/cgroup/unified/cgroup.controllers")
_END_S = 10.0  # for a builder to remove its container


def find_builder() -> str:
    """Returns the builder that is installed.

    Raises:
        TangramError: none is.
    """
    for name in BUILDERS:
        if shutil.which(name):
            return name
    raise TangramError("image build: neither buildah nor podman is installed here; install one of "
                       "them, or build elsewhere, and `tangram image import` the archive")


def build_image(context: str, dockerfile: str, archive: str) -> None:
    """Builds an image; the builder's own output goes to stderr.

    Args:
        context: the folder that the Dockerfile copies from.
        dockerfile: the path of the Dockerfile; empty for the one in `context`.
        archive: the archive to write, an OCI layout.

    Raises:
        TangramError: no builder is installed.
        ImageRefused: a step failed.
    """
    builder = find_builder()
    name = f"localhost/tangram-build-{secrets.token_hex(8)}"  # of the builder's own storage
    file = ["--file", dockerfile] if dockerfile else []
    try:
        _run([builder, "build", *_isolation(builder), "--tag", name, *file, context], "build")
        _run([builder, "push", "--quiet", name, f"oci-archive:{archive}"], "be written")
    finally:
        subprocess.run([builder, "rmi", "--force", name], stdin=subprocess.DEVNULL,
                       capture_output=True, check=False)


def _isolation(builder: str) -> list[str]:
    """Returns the option by which buildah runs the steps without a container runtime where none
    works, as Debian does not install one with buildah. Each `RUN` would fail without it."""
    if builder != "buildah" or "BUILDAH_ISOLATION" in os.environ or _runtime_works():
        return []
    return ["--isolation", "chroot"]


def _runtime_works() -> bool:
    """Returns whether buildah can run steps by crun or runc. It takes crun where both are
    installed, and crun refuses to run where controllers of cgroup v1 and of v2 are in use."""
    if not shutil.which("crun"):
        return shutil.which("runc") is not None
    try:
        return not _HYBRID.read_text().strip()
    except OSError:
        return True  # the usual case: all controllers are of one version


def _run(command: list[str], what: str) -> None:
    # stdout of the builder would mix with the results of the verb, which are read by programs
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2,
                          start_new_session=True) as builder:
        try:
            status = builder.wait()
        except BaseException:  # as of ^C
            _end(builder)
            raise
    if status:
        raise ImageRefused(f"image build: {command[0]} ended with {status}: the image "
                           f"cannot {what}; its own lines are above")


def _end(builder: subprocess.Popen[bytes]) -> None:
    """Ends a builder and the step that it runs. One that is killed leaves its container behind, so
    it has a while to end by itself.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        if builder.poll() is None:
            os.killpg(builder.pid, number)
            with suppress(subprocess.TimeoutExpired):
                builder.wait(_END_S)
