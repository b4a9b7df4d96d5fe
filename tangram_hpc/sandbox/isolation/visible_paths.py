"""Which paths of this machine a sandbox may see, and how a site's own additions are checked.

What is not listed is not visible. Nothing that is listed is, or contains, a home directory, /tmp,
/run, /var, /etc, /dev or a secret as a whole. Nothing is confined or changed here.

Links: a path is listed under the name by which it is known, even if that is a link (/bin), and also
under its real name unless that lies below another listed directory. So one list serves both uses.
Landlock opens a path, which follows links, and a rule holds for what was opened. bwrap is given
`--ro-bind PATH PATH` for each, which binds what a link leads to at the link's own name.
"""

from __future__ import annotations

import glob
import os
import pwd
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress

# the kernel's own: Landlock needs it in the list, bwrap mounts a new one (--proc)
PROC = "/proc"
# files made by name, for semaphores: Landlock leaves it unlisted, bwrap mounts a new one (--tmpfs)
SHARED_MEMORY = "/dev/shm"

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib*")
_PACKAGES = ("/opt", "/nix/store", "/gnu/store", "/snap")
_KERNEL = ("/sys/devices/system", "/sys/fs/cgroup", "/sys/kernel/mm/transparent_hugepage",
           "/sys/kernel/mm/hugepages")
_ETC = """
    passwd group nsswitch.conf hosts host.conf resolv.conf gai.conf networks services protocols rpc
    ethertypes hostname localtime timezone adjtime locale.conf locale.alias default/locale
    ld.so.cache ld.so.conf ld.so.conf.d ld.so.preload alternatives os-release debian_version
    redhat-release system-release lsb-release
    ssl/certs ssl/openssl.cnf ca-certificates ca-certificates.conf pki/tls/certs pki/tls/cert.pem
    pki/tls/openssl.cnf pki/ca-trust pki/java crypto-policies
    profile profile.d bash.bashrc bashrc inputrc shells zsh zshenv DIR_COLORS terminfo
    gitconfig gitattributes mime.types magic magic.mime manpath.config mailcap fonts xml sgml vim
    vimrc nanorc screenrc python python2* python3* perl java java-* maven R ImageMagick* texmf
    OpenCL vulkan glvnd groff gdb gprofng.rc apache-maven lua php* ruby emacs
"""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

_WHOLE = ("/etc", "/tmp", "/var/tmp", "/run", "/var/run", "/var/lib", "/var/log", "/var/spool",
          "/home", "/root", "/dev", "/proc", "/sys", "/boot")
_SECRETS = ("/etc/shadow", "/etc/gshadow", "/etc/munge", "/etc/slurm", "/etc/ssh",
            "/etc/ssl/private", "/etc/pki/tls/private", "/etc/sudoers", "/etc/security",
            "/etc/krb5.keytab", "/run/munge", "/var/run/munge", "/var/spool/slurmd",
            "/var/lib/munge")
_SECRETS_OF_HOMES = (".ssh", ".tangram", ".gnupg", ".aws", ".kube", ".netrc", ".docker",
                     ".git-credentials", ".config/gh", ".huggingface", ".cache/huggingface/token")


def readable(extra: Sequence[str] = ()) -> list[str]:
    """Files and directories that may be read and run: the system's, this Python's and `extra`.

    Raises:
        ValueError: a path of `extra` is not absolute, does not exist, or shows what must not be
            visible.
    """
    for path in extra:
        if why := refusal(path):
            raise ValueError(f"readable path {path!r}: {why}")
    packages = [path for path in _PACKAGES if not refusal(path)]  # a home may lie in /opt
    wanted = [*_SYSTEM, *packages, *(f"/etc/{name}" for name in _ETC.split()), *_KERNEL]
    found = [path for pattern in wanted for path in sorted(glob.glob(pattern))
             if os.path.exists(path)]  # some systems have links in /etc that lead nowhere
    return distinct([*found, *_python(), *extra])


def devices() -> list[str]:
    """Devices that may be read and written. There is no terminal."""
    return [path for path in _DEVICES if os.path.exists(path)]


def refusal(path: str) -> str:
    """Why a sandbox may not see this path, as a line with the remedy; empty when it may."""
    if not os.path.isabs(path):
        return "not absolute; give it from / on"
    if not os.path.exists(path):
        return "not there; leave it out or correct it"
    homes = _homes()
    secrets = [*_SECRETS, *(f"{home}/{name}" for home in homes for name in _SECRETS_OF_HOMES)]
    for name in {os.path.normpath(path), os.path.realpath(path)}:
        for whole in (*_WHOLE, *homes):
            if _within(whole, name):
                return f"shows all of {whole}; name a directory below it"
        for secret in secrets:
            if _within(name, secret) or _within(secret, name):
                return f"shows {secret}, which is secret; name a directory beside it"
    return ""


def distinct(paths: Iterable[str]) -> list[str]:
    """These paths and their real names, without those below another of them."""
    names: dict[str, None] = {}
    for path in paths:
        names[os.path.normpath(path)] = None
    for path in list(names):
        names[os.path.realpath(path)] = None
    return [name for name in names if not any(
        name != other and _within(name, other) for other in names)]


def _python() -> list[str]:
    """The directories of this Python; only parts of them where its prefix contains other things."""
    prefixes = (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix)
    links = [link for link in _links(sys.executable) if not refusal(link)]
    if not any(refusal(prefix) for prefix in prefixes):
        return list(dict.fromkeys([*prefixes, *links]))
    import sysconfig  # only here: from Python 3.12 on it brings `threading` into the fork server

    good = [prefix for prefix in prefixes if not refusal(prefix)]
    parts = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    library = sysconfig.get_config_var("LIBDIR")
    shared = glob.glob(f"{library}/libpython*") if library else []
    tools = [sys.executable, os.path.realpath(sys.executable)]
    return [path for path in (*good, *parts, *shared, *tools, *links)
            if path and not refusal(path)]


def _links(path: str) -> list[str]:
    """The names over which a link leads to its file. The interpreter of a virtual environment leads
    over one outside of all prefixes if it was made with a link such as ~/.local/bin/python3.12.
    """
    found: list[str] = []
    while os.path.islink(path) and path not in found:
        found.append(path)
        folder = os.path.realpath(os.path.dirname(path))  # where a relative link leads from
        path = os.path.normpath(os.path.join(folder, os.readlink(path)))
    return found


def _homes() -> list[str]:
    """This user's home directories, by the environment and by the system's account."""
    found = [os.path.expanduser("~")]
    with suppress(KeyError):  # a user without an account
        found.append(pwd.getpwuid(os.getuid()).pw_dir)
    names = {n for home in found for n in (os.path.normpath(home), os.path.realpath(home))}
    return sorted(n for n in names if os.path.isabs(n) and n != "/" and n != "/nonexistent")


def _within(path: str, folder: str) -> bool:
    """Whether `path` is `folder` or lies below it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")
