"""How each container runtime is asked for the same sandbox. Pure, except that it looks which paths
exist.

Every sandbox sees the same. `/session` is the session's directory, for reading and writing. `/tmp`
is its `tmp`, in which listed paths of the node's own /tmp are visible read-only. `/dev/shm` and
`/proc` are the sandbox's own, and there are a few devices. Of the node only listed paths are
visible, read-only. The host name is `sandbox`. There is no network but a loopback, unless it is
asked for. Nothing is started here.

With bwrap an image is mounted at IMAGE, beside the node's programs. The pause process is a program
of the node and stays outside of the image; the sandbox's init and its commands have IMAGE as their
root. So no program of an image runs before the init has confined itself. With `root` the image is
a folder that the sandbox may write (`image_root`), and its user is 0.

bwrap and podman were run with the versions that Debian 12 has (0.8.0, 4.3.1), bwrap also with 0.4.1
and 0.6.1, which Red Hat 9 and Ubuntu 22.04 have, apptainer with 1.4.5.
enroot is written from its documentation and has not been run; the probe decides on each node.
"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..files import scratch
from .hosts import HOSTNAME
from .pause_process import CAT, IGNORING_CAT, SHELL

SESSION = "/session"
IMAGE = "/image"  # where bwrap mounts the root of an image
E2B_HOME = "/home/user"  # the home that programs for E2B's sandboxes name
UNITS = "/session.cpus"  # the file that tells a command how many CPUs it has
_PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/nix/store", "/gnu/store")  # for the pause process
TMP = "/tmp"
# hidden where an image has them
_OURS = frozenset({"proc", "dev", "sys", "tmp", "session", "session.cpus"})
# One harmless capability in the sandbox's own user namespace. Commands have none, so they may not
# trace the pause process nor open its pipe through /proc/1 to outlive their init.
_SHIELD = "CAP_WAKE_ALARM"
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")  # the devices that bwrap binds


@dataclass(frozen=True)
class ContainerSpec:
    """What a runtime shall build.

    Attributes:
        home: a scratch directory.
        image: a root directory, or what the runtime calls an image; empty for the node's own
            programs, which `read` lists.
        network: whether the sandbox shares the node's network.
        read: paths of the node that are visible read-only at the same place.
        files: pairs of a path of the node and a path inside, read-only.
        shm_bytes: size of /dev/shm.
        name: unique on this machine, for runtimes that keep a list of containers.
        pull: whether an image that is not on this machine may be fetched.
        root: a folder with the image that the sandbox may write, in whose mount namespace the
            runtime starts; empty for none.
        resolver: the file of the node that is `/etc/resolv.conf` inside; empty where the sandbox
            has no way out.
        old_bwrap: whether bwrap is older than 0.8. Such a bwrap cannot bar further user
            namespaces, nor limit a file system in memory, nor set its mode, so the init does that.
        resets_sigchld: whether bwrap gives its program the default action of SIGCHLD, as it does
            from 0.11.1 on.
    """

    home: str
    image: str = ""
    network: bool = False
    read: Sequence[str] = ()
    files: Sequence[tuple[str, str]] = ()
    shm_bytes: int = 64 << 20
    name: str = ""
    pull: bool = False
    root: str = ""
    resolver: str = ""
    old_bwrap: bool = False
    resets_sigchld: bool = False


class Runtime(Protocol):
    """A program that builds sandboxes.

    Attributes:
        name: the name of the program, which is also that of the isolation backend.
        needs_image: whether it builds no sandbox without an image.
        read_only: mount points that the program leaves writable and that the init makes read-only.
        unshielded: whether its pause process has no capability, so that commands could trace it.
            The init then moves into a user namespace of its own.
    """

    name: str
    needs_image: bool
    read_only: Sequence[str]
    unshielded: bool

    def argv(self, box: ContainerSpec) -> list[str]:
        """The command line of the pause process."""
        ...

    def env(self, base: Mapping[str, str]) -> dict[str, str]:
        """The runtime's environment, taken from the worker's."""
        ...

    def unlimited(self, box: ContainerSpec) -> dict[str, int]:
        """File systems in memory that the program makes without a limit, each with the bytes to
        which the init limits it.
        """
        ...

    def clean_up(self, name: str) -> list[str]:
        """A command line that removes what the sandbox of a killed init left; empty when nothing
        can be left.
        """
        ...


def _env(base: Mapping[str, str], *names: str) -> dict[str, str]:
    kept = {n: base[n] for n in ("HOME", "USER", "XDG_RUNTIME_DIR", *names) if n in base}
    return {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "LANG": "C.UTF-8"} | kept


class Bwrap:
    """bubblewrap, unprivileged, with the node's programs or a directory as the root."""

    name, needs_image = "bwrap", False
    read_only: Sequence[str] = ()
    unshielded = False

    def argv(self, box: ContainerSpec) -> list[str]:
        """See `Runtime`."""
        at = IMAGE if box.image else ""
        # a root that is written has been mounted in a user namespace of the sandbox's own
        bar = [] if box.old_bwrap else ["--disable-userns"]
        user = [] if box.root else ["--unshare-user", *bar]
        limit = [] if box.old_bwrap else ["--perms", "1777", "--size", str(box.shm_bytes)]
        return [
            "bwrap", *user, "--unshare-pid", "--unshare-ipc",
            "--unshare-uts", "--unshare-cgroup-try", *([] if box.network else ["--unshare-net"]),
            "--hostname", HOSTNAME, "--die-with-parent", "--as-pid-1",
            "--cap-drop", "ALL", "--cap-add", _SHIELD,
            *(_of_image(box) if box.image else _of_host(box.read)),
            "--proc", f"{at}/proc", "--dev", f"{at}/dev",
            *limit, "--tmpfs", f"{at}/dev/shm", "--remount-ro", f"{at}/dev",
            "--bind", scratch.home(box.home), f"{at}{SESSION}",
            "--bind", scratch.tmp(box.home), f"{at}{TMP}",
            *([] if box.image else [*_in_tmp(box.read), *_e2b_home(box.read)]),
            *[word for here, there in box.files for word in ("--ro-bind", here, f"{at}{there}")],
            # If root runs the worker, the sandbox's user owns the machine's settings in /proc/sys.
            "--remount-ro", f"{at}/proc", "--remount-ro", "/", "--chdir", at or SESSION, "--",
            *(IGNORING_CAT if box.resets_sigchld else CAT),
        ]

    def env(self, base: Mapping[str, str]) -> dict[str, str]:
        """See `Runtime`. The pause process inherits this environment inside the sandbox, so it
        holds only PATH.
        """
        return {"PATH": "/usr/local/bin:/usr/bin:/bin"}

    def unlimited(self, box: ContainerSpec) -> dict[str, int]:
        """See `Runtime`."""
        return {f"{IMAGE if box.image else ''}/dev/shm": box.shm_bytes} if box.old_bwrap else {}

    def clean_up(self, name: str) -> list[str]:
        """Nothing: the sandbox is nothing but namespaces."""
        return []


def devices(image: bool) -> list[str]:
    """Returns the paths at which a sandbox of bwrap has devices of the node."""
    return [f"{IMAGE if image else ''}/dev/{name}" for name in _DEVICES]


def _of_host(read: Sequence[str]) -> list[str]:
    """Mounts the node's paths, outer ones first. A link stays a link where its target is visible as
    well.
    """
    words: list[str] = []
    shown: list[str] = []
    for path in _outer_first(read):
        if any(_beneath(path, above) for above in (*shown, TMP)):
            continue
        real = os.path.realpath(path)
        if real != path and os.path.islink(path) and any(_beneath(real, p) for p in read):
            words += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            words += ["--ro-bind", path, path]
            shown.append(path)
    return words


def _outer_first(paths: Sequence[str]) -> list[str]:
    return sorted({os.path.normpath(p) for p in paths}, key=lambda p: (p.count("/"), p))


def _in_tmp(read: Sequence[str]) -> list[str]:
    """Mounts the node's paths below /tmp over the sandbox's own /tmp. A path deeper than that gets
    a read-only tmpfs as its outermost folder. So each of `tmp_names` is a mount point, which no
    program of the sandbox can remove, rename or put something else in place of.
    """
    paths = [path for path in _outer_first(read)
             if path.startswith(f"{TMP}/") and os.path.exists(path)]
    words: list[str] = []
    deep: list[str] = []
    for path in paths:
        top = f"{TMP}/{path.split('/')[2]}"
        if path != top and top not in (*paths, *deep):
            deep.append(top)
            words += ["--tmpfs", top]
        if not any(path != other and _beneath(path, other) for other in paths):
            words += ["--ro-bind", path, path]
    return words + [word for top in deep for word in ("--remount-ro", top)]


def _e2b_home(read: Sequence[str]) -> list[str]:
    """Makes E2B's home a link to the session's directory, unless paths of the node are shown there.
    """
    paths = list(map(os.path.normpath, read))
    shown = any(_beneath(E2B_HOME, path) or _beneath(path, E2B_HOME) for path in paths)
    return [] if shown else ["--symlink", SESSION, E2B_HOME]


def tmp_names(box: ContainerSpec) -> frozenset[str]:
    """The names in a sandbox's /tmp that are the node's and not its own."""
    if box.image:
        return frozenset()
    return frozenset(path.split("/")[2] for path in map(os.path.normpath, box.read)
                     if path.startswith(f"{TMP}/") and os.path.exists(path))


def _beneath(path: str, above: str) -> bool:
    return path == above or path.startswith(above.rstrip("/") + "/")


def _of_image(box: ContainerSpec) -> list[str]:
    """Mounts an image at IMAGE, and beside it what the pause process needs of the node."""
    programs = [path for path in box.read if path.startswith(_PROGRAMS)]
    words = _of_host(programs)
    if box.root:
        return [*words, "--bind", box.root, IMAGE]
    for name in sorted(set(os.listdir(box.image)) - _OURS):
        path = os.path.join(box.image, name)
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), f"{IMAGE}/{name}"]
        else:
            words += ["--ro-bind", path, f"{IMAGE}/{name}"]
    files = {"/etc/resolv.conf": box.resolver, "/etc/hosts": "/etc/hosts"} if box.resolver else {}
    for name, source in files.items():  # only files that the image has: its folders are read-only
        path = box.image + name
        if all(map(_is_real, (os.path.dirname(path), path))) and os.path.isfile(source):
            words += ["--ro-bind", source, f"{IMAGE}{name}"]
    return words


def _is_real(path: str) -> bool:
    """Whether a folder or file is there and no link, which bwrap would follow."""
    return os.path.exists(path) and not os.path.islink(path)


class Podman:
    """podman, as root or rootless, without a daemon or systemd. Images are not fetched unless the
    box allows it: to fetch one while a session opens is slow, and a site may not want it.
    """

    name, needs_image = "podman", True
    read_only: Sequence[str] = ()
    unshielded = False

    def argv(self, box: ContainerSpec) -> list[str]:
        """See `Runtime`. If root runs the worker, the container gets a user namespace in which
        only root is mapped. So it owns its own files and has no power over the machine.
        """
        root = ["--uidmap", "0:0:1", "--gidmap", "0:0:1"] if os.geteuid() == 0 else []
        image = (["--rootfs", f"{box.image}:O"] if os.path.isdir(box.image)
                 else ["--pull", "missing" if box.pull else "never", box.image])
        return [
            "podman", "--cgroup-manager=cgroupfs", "--events-backend=none", "run",
            "--rm", "--interactive", "--name", box.name, *root,
            "--cgroups=disabled", "--log-driver=none",
            # of the pause process alone (commands have their init's); podman's defaults may
            # exceed this worker's limits
            "--ulimit", _ulimit("nofile", resource.RLIMIT_NOFILE, 1024),
            "--ulimit", _ulimit("nproc", resource.RLIMIT_NPROC, 32768),
            "--pid", "private", "--ipc", "private", "--uts", "private",
            "--network", "host" if box.network else "none", "--hostname", HOSTNAME,
            "--read-only", "--read-only-tmpfs=false", "--cap-drop", "all",
            "--cap-add", _SHIELD,
            "--security-opt", "no-new-privileges", "--no-hosts", "--env-host=false",
            "--shm-size", str(box.shm_bytes), "--image-volume", "ignore",
            "--volume", f"{scratch.home(box.home)}:{SESSION}:rw",
            "--volume", f"{scratch.tmp(box.home)}:/tmp:rw",
            *[word for here, there in box.files for word in ("--volume", f"{here}:{there}:ro")],
            "--workdir", SESSION, "--entrypoint", "[]", *image, *SHELL,
        ]

    def env(self, base: Mapping[str, str]) -> dict[str, str]:
        """See `Runtime`."""
        return _env(base, "XDG_CONFIG_HOME", "XDG_DATA_HOME", "CONTAINERS_CONF",
                    "CONTAINERS_STORAGE_CONF", "TMPDIR")

    def unlimited(self, box: ContainerSpec) -> dict[str, int]:
        """See `Runtime`."""
        return {}

    def clean_up(self, name: str) -> list[str]:
        """podman keeps a list of containers on disk."""
        return ["podman", "--cgroup-manager=cgroupfs", "--events-backend=none", "rm", "--force",
                "--ignore", "--time", "0", name]


def _ulimit(name: str, limit: int, most: int) -> str:
    hard = resource.getrlimit(limit)[1]
    value = most if hard == resource.RLIM_INFINITY else min(most, hard)
    return f"{name}={value}:{value}"


class Apptainer:
    """apptainer with user namespaces: its set-user-ID mode makes namespaces that their user may not
    join. A SIF file is mounted by squashfuse, which needs a /dev/fuse that users may open.
    """

    name, needs_image = "apptainer", True
    read_only: Sequence[str] = ("/dev", "/etc/passwd", "/etc/group", "/etc/hosts", "/etc/hostname",
                                "/etc/resolv.conf")
    unshielded = True

    def argv(self, box: ContainerSpec) -> list[str]:
        """See `Runtime`. Mounting /session needs underlay or overlay enabled in apptainer.conf."""
        net = [] if box.network else ["--net", "--network", "none"]
        binds = [f"{scratch.home(box.home)}:{SESSION}", f"{scratch.tmp(box.home)}:/tmp"]
        binds += [f"{here}:{there}:ro" for here, there in box.files]
        return [
            "apptainer", "--quiet", "exec", "--userns", "--containall", "--cleanenv", "--no-home",
            "--pid", "--ipc", "--uts", "--hostname", HOSTNAME, *net, "--no-init", "--no-privs",
            "--no-eval", "--no-mount", "sys,tmp,bind-paths",
            *[word for bind in binds for word in ("--bind", bind)],
            "--pwd", SESSION, box.image, *SHELL,
        ]

    def env(self, base: Mapping[str, str]) -> dict[str, str]:
        """See `Runtime`."""
        return _env(base, "APPTAINER_CACHEDIR", "APPTAINER_TMPDIR")

    def unlimited(self, box: ContainerSpec) -> dict[str, int]:
        """See `Runtime`."""
        return {"/dev/shm": box.shm_bytes}

    def clean_up(self, name: str) -> list[str]:
        """Nothing: apptainer keeps no list of what `exec` started."""
        return []


class Enroot:
    """enroot. It has no pid, ipc or network namespace of its own, so util-linux' `unshare` makes
    them around it. It has not been run: this is written from its documentation. Its standard mounts
    show the node's /sys read-only; a site that does not want that removes it from enroot's
    mounts.d.
    """

    name, needs_image = "enroot", True
    read_only: Sequence[str] = ()
    unshielded = False

    def argv(self, box: ContainerSpec) -> list[str]:
        """See `Runtime`."""
        net = [] if box.network else ["--net"]
        mounts = [f"{scratch.home(box.home)}:{SESSION}:none:x-create=dir,bind,rw,nosuid,nodev",
                  f"{scratch.tmp(box.home)}:/tmp:none:x-create=dir,bind,rw,nosuid,nodev",
                  f"tmpfs:/dev/shm:tmpfs:x-create=dir,rw,nosuid,nodev,mode=1777,"
                  f"size={box.shm_bytes}"]
        mounts += [f"{here}:{there}:none:x-create=file,bind,ro" for here, there in box.files]
        return [
            "unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child",
            "--mount-proc", "--ipc", "--uts", *net,
            "/bin/sh", "-c", f'hostname {HOSTNAME}; exec "$@"', "sh",
            "enroot", "start", *[word for m in mounts for word in ("--mount", m)],
            "--rc", "/dev/null", box.image, *SHELL,
        ]

    def env(self, base: Mapping[str, str]) -> dict[str, str]:
        """See `Runtime`."""
        fixed = {"ENROOT_RESTRICT_DEV": "yes", "ENROOT_MOUNT_HOME": "no",
                 "ENROOT_ROOTFS_WRITABLE": "no", "ENROOT_REMAP_ROOT": "no"}
        return _env(base, "ENROOT_DATA_PATH", "ENROOT_CACHE_PATH", "ENROOT_RUNTIME_PATH") | fixed

    def unlimited(self, box: ContainerSpec) -> dict[str, int]:
        """See `Runtime`."""
        return {}

    def clean_up(self, name: str) -> list[str]:
        """Nothing: a container that is started is not changed, and its mounts go with its
        namespaces.
        """
        return []


RUNTIMES: Mapping[str, Runtime] = {r.name: r for r in (Bwrap(), Apptainer(), Podman(), Enroot())}


def container_name(home: str) -> str:
    """The name of the container of a scratch directory, for runtimes that keep a list."""
    folder, number = os.path.split(home)
    return f"tangram-{os.path.basename(folder)}-{number}"


def missing(runtime: Runtime) -> str:
    """Empty when the runtime's program is in the PATH, else one line that says why not."""
    return "" if shutil.which(runtime.name) else f"{runtime.name} is not installed"
