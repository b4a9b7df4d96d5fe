"""Small images for tests, made of this machine's own programs and their libraries."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
from collections.abc import Iterable
from pathlib import Path

PROGRAMS = ("cat", "chmod", "chown", "chroot", "cp", "dd", "env", "id", "ls", "mkdir", "mknod",
            "mkfifo", "mount", "mv", "readlink", "rm", "rmdir", "sh", "sleep", "stat", "touch",
            "true", "unshare", "grep", "du")
_LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
_FOLDERS = ("etc", "root", "testbed", "usr/bin", "usr/sbin", "usr/lib", "usr/lib64", "var/lib/pg")
PASSWD = "root:x:0:0:root:/root:/bin/sh\npg:x:105:105::/var/lib/pg:/bin/sh\n"


def make_image(folder: Path, programs: Iterable[str] = PROGRAMS) -> Path:
    """Makes a root file system in a folder; returns the folder."""
    for name in _FOLDERS:
        (folder / name).mkdir(parents=True)
    for name, target in _LINKS.items():
        (folder / name).symlink_to(target)
    for name in programs:
        path = shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin")
        assert path, name
        shutil.copy(path, folder / "usr/bin" / name)
        copy_libraries(folder, path)
    (folder / "etc/passwd").write_text(PASSWD)
    (folder / "testbed/old").write_text("old\n")
    (folder / "testbed/folder").mkdir()
    (folder / "testbed/folder/in").write_text("in\n")
    return folder


def copy_libraries(folder: Path, *paths: str) -> None:
    """Copies the libraries of programs or libraries of this machine into a root file system."""
    for library in _libraries(*paths):
        target = folder / library.lstrip("/")
        if not target.exists():
            (folder / os.path.dirname(library).lstrip("/")).mkdir(parents=True, exist_ok=True)
            shutil.copy(library, target)


def _libraries(*paths: str) -> list[str]:
    told = subprocess.run(["ldd", *paths], capture_output=True, text=True, check=False).stdout
    return sorted({word for word in told.split() if word.startswith("/") and word[-1] != ":"})


def fingerprint(folder: Path) -> str:
    """A digest of everything in a folder: names, kinds, modes, links and contents."""
    digest = hashlib.sha256()
    for here, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted([*folders, *files]):
            path = Path(here, name)
            about = path.lstat()
            digest.update(f"{path.relative_to(folder)} {about.st_mode:o} {about.st_uid}".encode())
            if stat.S_ISLNK(about.st_mode):
                digest.update(os.readlink(path).encode())
            elif stat.S_ISREG(about.st_mode):
                digest.update(path.read_bytes())
    return digest.hexdigest()
