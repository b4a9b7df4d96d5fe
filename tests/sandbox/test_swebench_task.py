"""A task in the form of SWE-bench, from its image to the verdict: a repository in /testbed, a test
that fails, a patch, and a script that runs as root, applies the test's patch, activates an
environment and runs the tests. The image is made of this node's own Debian files."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from helpers.executor_rig import until
from helpers.image_rig import MadeImage
from helpers.root_folder_rig import copy_libraries, make_image

from tangram_hpc import LocalCluster

PYTHON = "/usr/bin/python3"
pytestmark = [
    pytest.mark.skipif(not shutil.which("bwrap"), reason="bubblewrap is not installed"),
    pytest.mark.skipif(not shutil.which("git", path="/usr/bin"), reason="git is not installed"),
    pytest.mark.skipif(not os.path.exists(PYTHON) or not os.path.exists("/bin/bash"),
                       reason="the node has no Python or bash of its own"),
]
PROGRAMS = ("bash", "sh", "cat", "ls", "id", "env", "mkdir", "rm", "cp", "touch", "chmod", "git",
            "python3", "uname", "dirname", "basename", "sleep")
PURE = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")
OLD = "def mean(numbers):\n    return sum(numbers) / 2\n\n\ndef total(numbers):\n    " \
      "return sum(numbers)\n"
OLD_TEST = "from calc import total\n\n\ndef test_total():\n    assert total([1, 2, 3]) == 6\n"
NEW_TEST = OLD_TEST.replace("import total", "import mean, total") + (
    "\n\ndef test_mean():\n    assert mean([1, 2, 6]) == 3\n")
GOLD = OLD.replace("/ 2", "/ len(numbers)")
FAIL_TO_PASS, PASS_TO_PASS = "tests/test_calc.py::test_mean", "tests/test_calc.py::test_total"
SCRIPT = """#!/bin/bash
set -uxo pipefail
source /opt/env/bin/activate
cd /testbed
git config --global --add safe.directory /testbed
git status
git show --stat
git checkout {base} tests/test_calc.py
git apply -v - <<'EOF_114329324912'
{patch}EOF_114329324912
: '>>>>> Start Test Output'
pytest -rA tests/test_calc.py
: '>>>>> End Test Output'
git checkout {base} tests/test_calc.py
"""


@dataclass
class Task:
    """An image, the patch that solves its task, a patch that does not, and the script that judges
    it; also the output of the first of the last runs, and the seconds of the parts of the runs.
    """

    image: str
    gold: str
    script: str
    wrong: str = ""
    log: str = ""
    seconds: dict[str, list[float]] = field(default_factory=dict)


def git(repository: Path, *words: str) -> str:
    env = {"PATH": "/usr/bin:/bin", "GIT_CONFIG_NOSYSTEM": "1", "HOME": str(repository.parent),
           "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a",
           "GIT_COMMITTER_EMAIL": "a@b"}
    return subprocess.run(["/usr/bin/git", *words], cwd=repository, env=env, check=True,
                          capture_output=True, text=True).stdout


def patch_of(repository: Path, name: str, text: str) -> str:
    """Returns the patch that gives a file another text; the repository stays as it is."""
    (repository / name).write_text(text)
    patch = git(repository, "diff")
    git(repository, "checkout", "-q", ".")
    return patch


def make_root(folder: Path) -> Path:
    """Makes a root file system with git, Python, pytest in an environment, and an empty
    /testbed."""
    make_image(folder, PROGRAMS)
    shutil.rmtree(folder / "testbed")
    (folder / "testbed/tests").mkdir(parents=True)
    (folder / "tmp").mkdir()
    library = subprocess.run(
        [PYTHON, "-c", "import sysconfig as s; print(s.get_path('stdlib'))"], check=True,
        capture_output=True, text=True).stdout.strip()
    unneeded = shutil.ignore_patterns("__pycache__", "test", "config-3*", "idlelib", "lib2to3",
                                      "ensurepip", "pydoc_data", "*-packages", "tkinter",
                                      "distutils")
    shutil.copytree(library, folder / library.lstrip("/"), ignore=unneeded)
    copy_libraries(folder, *map(str, Path(library, "lib-dynload").glob("*.so")))
    (folder / "opt/env/bin").mkdir(parents=True)
    version = "python" + ".".join(Path(library).name.removeprefix("python").split(".")[:2])
    site = folder / "opt/env/lib" / version / "site-packages"
    ours = Path(sysconfig.get_path("purelib"))
    for path in (*(ours / name for name in PURE), *ours.glob("pluggy-*.dist-info")):
        shutil.copytree(path, site / path.name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(Path(sysconfig.get_path("purelib"), "py.py"), site)  # pytest's own
    (folder / "opt/env/pyvenv.cfg").write_text("home = /usr/bin\n")
    (folder / "opt/env/bin/python").symlink_to(PYTHON)
    (folder / "opt/env/bin/pytest").write_text(
        "#!/opt/env/bin/python\nimport sys, pytest\nsys.exit(pytest.console_main())\n")
    (folder / "opt/env/bin/pytest").chmod(0o755)
    (folder / "opt/env/bin/activate").write_text(
        "VIRTUAL_ENV=/opt/env\nPATH=/opt/env/bin:$PATH\nexport VIRTUAL_ENV PATH\n")
    return folder


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    if not all((Path(sysconfig.get_path("purelib")) / name).is_dir() for name in PURE):
        pytest.skip("pytest is not where this test looks for it")
    place = tmp_path_factory.mktemp("swebench")
    root = make_root(place / "root")
    testbed = root / "testbed"
    (testbed / "calc.py").write_text(OLD)
    (testbed / "conftest.py").write_text("")
    (testbed / "tests/test_calc.py").write_text(OLD_TEST)
    git(testbed, "init", "-q")
    git(testbed, "add", "-A")
    git(testbed, "commit", "-qm", "base")
    base = git(testbed, "rev-parse", "HEAD").strip()
    gold = patch_of(testbed, "calc.py", GOLD)
    wrong = patch_of(testbed, "calc.py", OLD.replace("/ 2", "/ 4"))
    judge = SCRIPT.format(base=base, patch=patch_of(testbed, "tests/test_calc.py", NEW_TEST))

    def as_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        return info

    with tarfile.open(place / "layer.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        tar.add(root, ".", filter=as_root)
    image = MadeImage([(place / "layer.tar").read_bytes()], ["PATH=/usr/bin:/bin"],
                      inner={"WorkingDir": "/testbed"})
    archive = image.docker_archive(place / "task.tar")
    return Task(f"docker-archive:{archive}", gold, judge, wrong)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture(scope="module")
def cluster(scratch: Path) -> Iterator[LocalCluster]:
    # without a warm pool, whose sandboxes would also have files at the end
    with LocalCluster(cpus=2, scratch=str(scratch), warm=0) as running:
        yield running


def verdict(log: str) -> bool:
    """Returns whether a log shows that the task is solved, as SWE-bench decides it."""
    tests = log.partition(">>>>> Start Test Output")[2].partition(">>>>> End Test Output")[0]
    passed = set(re.findall(r"^PASSED (\S+)", tests, re.MULTILINE))
    return {FAIL_TO_PASS, PASS_TO_PASS} <= passed


def judged(cluster: LocalCluster, task: Task, patches: list[str]) -> list[bool]:
    """Runs the task once for each patch (empty for none), all at once; returns the verdicts."""
    began = time.monotonic()
    sessions = [cluster.session(image=task.image, disk="256M", idle_s=600.0) for _ in patches]
    try:
        for session in sessions:
            session.opened.result(500)
        opened = time.monotonic()
        applied = [session.exec("git apply -v /tmp/patch.diff", files={"/tmp/patch.diff": patch})
                   for session, patch in zip(sessions, patches, strict=True) if patch]
        for one in applied:
            one.result(500).check()
        patched = time.monotonic()
        runs = [session.exec("/bin/bash /eval.sh 2>&1", files={"/eval.sh": task.script},
                             user="root") for session in sessions]
        logs = [run.result(500) for run in runs]
        done = time.monotonic()
    finally:
        for session in sessions:
            session.close()
    for session in sessions:
        session.closed.result(120)
    for name, seconds in (("open", opened - began), ("patch", patched - opened),
                          ("evaluate", done - patched), ("close", time.monotonic() - done)):
        task.seconds.setdefault(name, []).append(seconds)
    task.log = logs[0].stdout.decode(errors="replace")
    assert all(b"Start Test Output" in log.stdout for log in logs), task.log
    return [verdict(log.stdout.decode(errors="replace")) for log in logs]


def nothing_is_left(scratch: Path) -> None:
    until(lambda: not any(Path(here, "changes").exists() for here, _, _ in os.walk(scratch)),
          "the files of all sessions are removed")
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "/eval.sh" not in left


def test_a_task_from_its_image_to_the_verdict(cluster: LocalCluster, scratch: Path, task: Task
                                              ) -> None:
    verdicts = judged(cluster, task, [task.gold, "", task.wrong])
    assert verdicts == [True, False, False], task.log
    nothing_is_left(scratch)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_64_tasks_at_once_have_the_right_verdicts(
        cluster: LocalCluster, scratch: Path, task: Task, capsys: pytest.CaptureFixture[str]
        ) -> None:
    judged(cluster, task, [task.gold])  # the image is there now
    task.seconds.clear()
    patches = [(task.gold, "")[number % 2] for number in range(64)]
    began = time.monotonic()
    verdicts = judged(cluster, task, patches)
    whole = time.monotonic() - began
    assert verdicts == [bool(patch) for patch in patches]
    with capsys.disabled():
        shares = ", ".join(f"{name} {statistics.mean(seconds):.1f} s "
                           f"({100 * statistics.mean(seconds) / whole:.0f} %)"
                           for name, seconds in task.seconds.items())
        print(f"\n64 tasks on 2 CPUs took {whole:.1f} s: {shares}", file=sys.stderr)
    nothing_is_left(scratch)
