"""Owns: a Debian kernel under qemu whose root is this machine's, read-only beneath a tmpfs, with
cgroup v2 alone. Must not know what is run in it.

From a shell: `python tests/vm/boot.py [--user] COMMAND...`. Needs qemu and busybox (Debian:
qemu-system-x86, busybox-static), which root installs by `install()`, and a kernel package that is
downloaded and unpacked into `.vm`, never installed.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parent.parent.parent
CACHE = REPO / ".vm"
PACKAGES = ["qemu-system-x86", "busybox-static"]
META = "linux-image-amd64"
MODULES = ["virtio_pci", "9pnet_virtio", "9p", "overlay"]
USER = 1000
HELLO = b"TANGRAM-VM"
_UP_S = {"kvm": 15.0, "tcg": 120.0}  # until the guest's first word; native is one second
END = re.compile(r"^TANGRAM-VM ENDED (\d+)\r?$", re.MULTILINE)


class Unavailable(Exception):
    """This machine cannot boot one; says why."""


class Ended(NamedTuple):
    """A command's end: its exit status, -1 when the machine did not come to it, and all that was
    printed on the serial console."""

    status: int
    console: str


def _output(argv: list[str], **options: object) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise Unavailable(f"{shlex.join(argv)}: {done.stderr.strip()[-300:]}")
    return str(done.stdout)


def install() -> None:
    """Installs what is missing. Raises Unavailable when it may not."""
    if platform.machine() != "x86_64":
        raise Unavailable("needs an x86_64 machine")
    if all(map(shutil.which, ("qemu-system-x86_64", "busybox"))) and _kernel() is not None:
        return
    if not shutil.which("apt-get"):
        raise Unavailable("needs qemu-system-x86_64, busybox and a Debian kernel; no apt-get here")
    if not all(map(shutil.which, ("qemu-system-x86_64", "busybox"))):
        if os.geteuid() != 0:
            raise Unavailable(f"needs {' and '.join(PACKAGES)}; only root can install them")
        _output(["apt-get", "update", "-q"])
        _output(["apt-get", "install", "-q", "-y", "--no-install-recommends", *PACKAGES])
    if _kernel() is None:
        _download()


def _kernel() -> Path | None:
    return next(iter(CACHE.glob("vmlinuz-*")), None)


def _download() -> None:
    """Takes the kernel and the modules we load out of the package, which is not installed."""
    depends = _output(["apt-cache", "depends", META])
    found = re.search(r"Depends: (linux-image-\S+)", depends)
    if found is None:
        raise Unavailable(f"{META} is no package here")
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        _output(["apt-get", "download", found[1]], cwd=folder)
        package = next(Path(folder).glob("*.deb"))
        unpacked = Path(folder, "data.tar")
        with unpacked.open("wb") as file:
            subprocess.run(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=file, check=True)
        with tarfile.open(unpacked) as tar:
            modules = {Path(m.name).name.split(".ko")[0]: m for m in tar if ".ko" in m.name}
            todo, order = list(reversed(MODULES)), []
            while todo:
                name = todo.pop()
                if name not in modules:
                    raise Unavailable(f"{found[1]} has no module {name}")
                data = tar.extractfile(modules[name]).read()  # type: ignore[union-attr]
                needs = re.search(rb"\0depends=([^\0]*)\0", data)
                fresh = [n for n in (needs[1].decode().split(",") if needs else [])
                         if n and n not in order]
                if fresh:
                    todo += [name, *fresh]
                elif name not in order:
                    order.append(name)
                    (CACHE / f"{name}.ko").write_bytes(data)
            (CACHE / "modules").write_text("".join(f"{name}.ko\n" for name in order))
            for member in tar.getmembers():
                if "/boot/vmlinuz-" in member.name:
                    image = tar.extractfile(member).read()  # type: ignore[union-attr]
                    (CACHE / Path(member.name).name).write_bytes(image)


# ---- the machine ----


def _initramfs(folder: Path, guest: dict[str, str]) -> Path:
    root = folder / "root"
    root.mkdir()
    for name in ("proc", "sys", "dev", "lower", "over", "new", "bin", "modules"):
        (root / name).mkdir()
    busybox = shutil.which("busybox")
    assert busybox is not None
    shutil.copy(busybox, root / "bin/busybox")
    for name in (CACHE / "modules").read_text().split():
        shutil.copy(CACHE / name, root / "modules")
    shutil.copy(CACHE / "modules", root / "modules/order")
    here = Path(__file__).parent
    shutil.copy(here / "early.sh", root / "init")
    shutil.copy(here / "guest.sh", root / "guest.sh")
    (root / "init").chmod(0o755)
    (root / "settings").write_text(
        "".join(f"{key}={shlex.quote(value)}\n" for key, value in guest.items()))
    image = folder / "initramfs"
    with image.open("wb") as file:
        names = "\n".join(str(p.relative_to(root)) for p in sorted(root.rglob("*")))
        subprocess.run([busybox, "cpio", "-o", "-H", "newc"], input=names.encode(), stdout=file,
                       stderr=subprocess.DEVNULL, cwd=root, check=True)
    return image


_no_kvm: list[str] = [] if os.access("/dev/kvm", os.R_OK | os.W_OK) else ["none"]


def _boot(accelerator: str, argv: list[str], console: Path, seconds: float) -> bool:
    """Runs a machine to its end, or until it has not come up in time; returns whether it came."""
    began = time.monotonic()
    up = False
    with console.open("wb") as file:
        machine = subprocess.Popen(["qemu-system-x86_64", "-accel", accelerator, *argv],
                                   stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    try:
        while machine.poll() is None:
            spent = time.monotonic() - began
            up = up or HELLO in console.read_bytes()
            if spent > seconds or (not up and spent > _UP_S[accelerator]):
                break
            time.sleep(0.1)
    finally:
        machine.kill()
        machine.wait()
    return HELLO in console.read_bytes()


def run(command: list[str], *, user: bool = False, seconds: float = 600,
        cpus: int = 2, mem_mib: int = 3072) -> Ended:
    """Boots, runs one command in this repository, and powers off.

    Args:
        command: with absolute paths as here; it sees this machine's files, what it writes is lost.
        user: run it as another user than root, who was delegated a cgroup.

    Raises:
        Unavailable: this machine cannot boot one.
    """
    install()
    kernel = _kernel()
    assert kernel is not None
    guest = {"REPO": str(REPO), "COMMAND": shlex.join(command), "WHO": str(USER if user else 0),
             "PREFIXES": " ".join({sys.prefix, sys.base_prefix,
                                   os.path.dirname(os.path.realpath(sys.executable))})}
    with tempfile.TemporaryDirectory() as name:
        image = _initramfs(Path(name), guest)
        argv = ["-cpu", "max,-arch-capabilities", "-smp", str(cpus), "-m", str(mem_mib),
                "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
                "-serial", "stdio", "-kernel", str(kernel), "-initrd", str(image),
                "-append", "console=ttyS0 quiet loglevel=1 panic=-1 cgroup_no_v1=all",
                "-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,"
                           "multidevs=remap"]  # fmt: skip
        console = Path(name, "console")
        if _no_kvm or not _boot("kvm", argv, console, seconds):
            _no_kvm.append("does not boot")  # virtual machines within one may hang
            _boot("tcg", argv, console, seconds)
        text = console.read_text(errors="replace")
    found = END.search(text)
    return Ended(int(found[1]) if found else -1, text)


def main() -> int:
    """Runs a command from the shell."""
    argv = sys.argv[1:]
    user = argv[:1] == ["--user"]
    try:
        ended = run(argv[1:] if user else argv, user=user)
    except Unavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(ended.console)
    return ended.status


if __name__ == "__main__":
    raise SystemExit(main())
