"""Builds a release: one source distribution, and one wheel for each libc; and checks them.

Run by `make dist`. Everything is built from the files that git tracks, and the wheels are built
from the source distribution, so that nothing gets into a release that its source has not. The
compiler is zig's: it links against an old glibc, or against musl, on any machine.

Two builds of one commit give the same bytes: times are those of the commit (SOURCE_DATE_EPOCH),
modes and owners are fixed, and the tools have the versions of requirements.txt. A check that fails
ends the build with one line, and leaves nothing in the target folder.
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
ZIG_CACHE = Path(sys.prefix) / "zig"  # what zig builds of each libc, once
LIBRARY = "tangram_hpc/sandbox/process/_fast_path.so"
# platform tag of a wheel -> the target by which zig knows it
LIBCS = {"manylinux_2_17_x86_64": "x86_64-linux-gnu.2.17",
         "musllinux_1_2_x86_64": "x86_64-linux-musl"}


def _do(argv: list[str], cwd: Path, **env: str) -> str:
    done = subprocess.run(argv, cwd=cwd, env=os.environ | env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"dist: {' '.join(argv[:6])}: {(done.stdout + done.stderr).strip()[-1500:]}")
    return done.stdout


def _stage(folder: Path) -> list[str]:
    """Copies the tracked files of the work tree; returns their paths."""
    tracked = _do(["git", "ls-files", "-z"], REPO).split("\0")[:-1]
    for name in tracked:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, target)
    return tracked


def _normalised(archive: Path, epoch: int) -> bytes:
    """Returns a source distribution with sorted members, fixed times, owners and modes."""
    packed = io.BytesIO()
    with tarfile.open(archive) as old, gzip.GzipFile(
            fileobj=packed, mode="wb", filename="", mtime=epoch) as zipped, tarfile.open(
            fileobj=zipped, mode="w", format=tarfile.GNU_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda each: each.name):
            member.mtime, member.uid, member.gid = epoch, 0, 0
            member.uname = member.gname = ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    return packed.getvalue()


def _sdist(work: Path, epoch: int) -> Path:
    """Builds the source distribution, and checks that no tracked file is missing in it."""
    staged = work / "staged"
    tracked = _stage(staged)
    _do([sys.executable, "-m", "build", "--sdist", "--no-isolation", "-o", str(work), "."], staged)
    archive, = work.glob("*.tar.gz")
    archive.write_bytes(_normalised(archive, epoch))
    with tarfile.open(archive) as tar:
        held = {name.partition("/")[2] for name in tar.getnames()}
    if missing := sorted(set(tracked) - held):
        sys.exit(f"dist: {archive.name} lacks {', '.join(missing[:5])} ({len(missing)} files); "
                 "MANIFEST.in says what it holds")
    return archive


def _wheel(sdist: Path, tag: str, work: Path) -> Path:
    """Builds the wheel of one libc from the source distribution, and checks what is in it."""
    place = work / tag
    with tarfile.open(sdist) as tar:
        tar.extractall(place, filter="data")
    source, = place.iterdir()
    zig = f"{sys.executable} -m ziglang cc -target {LIBCS[tag]} -g0"
    # zig would name musl `libc.so`, and Alpine names it after the processor: so it is not named,
    # and the library finds the functions in the libc that Python has loaded
    link = f"{zig} -shared -s" + (" -nostdlib" if "musl" in tag else "")
    _do([sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(place),
         f"-C--build-option=--plat-name={tag}", "."], source, CC=zig, LDSHARED=link,
        CFLAGS="-fPIC", LDFLAGS="", ZIG_GLOBAL_CACHE_DIR=str(ZIG_CACHE))
    wheel, = place.glob("*.whl")
    with zipfile.ZipFile(wheel) as held:
        names = held.namelist()
    if LIBRARY not in names:
        sys.exit(f"dist: {wheel.name} has no {LIBRARY}: its compiler failed")
    # this machine may have no musl: auditwheel looks at the libraries that zig linked against
    linked = ":".join(str(path.parent) for path in sorted(ZIG_CACHE.glob("o/*/libc.so*")))
    said = _do([sys.executable, "-m", "auditwheel", "show", "--ldpaths", linked, str(wheel)], work)
    if f'"{tag}"' not in " ".join(said.split()):
        sys.exit(f"dist: auditwheel finds that {wheel.name} is not {tag}: {said}")
    return wheel


def build(out: Path) -> list[Path]:
    """Builds all files of a release into a folder, and returns them."""
    os.umask(0o022)
    epoch = os.environ.setdefault("SOURCE_DATE_EPOCH",
                                  _do(["git", "log", "-1", "--format=%ct"], REPO).strip())
    with tempfile.TemporaryDirectory(prefix="tangram-dist-") as folder:
        work = Path(folder)
        sdist = _sdist(work, int(epoch))
        made = [sdist, *(_wheel(sdist, tag, work) for tag in LIBCS)]
        _do([sys.executable, "-m", "twine", "check", "--strict", *map(str, made)], work)
        out.mkdir(parents=True, exist_ok=True)
        return [Path(shutil.copy(path, out)) for path in made]


def main() -> None:
    """Reads the options, builds, and prints the path, size and digest of each file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=REPO / "dist", help="folder for the files")
    args = parser.parse_args()
    if changed := _do(["git", "status", "--porcelain"], REPO):
        print(f"dist: {len(changed.splitlines())} files differ from the commit: this is no release",
              file=sys.stderr)
    for path in build(args.out.resolve()):
        digest = _do(["sha256sum", path.name], path.parent).split()[0]
        print(f"{path}  {path.stat().st_size >> 10} KiB  sha256:{digest}")


if __name__ == "__main__":
    main()
