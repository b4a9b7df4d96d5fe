"""The SPANK plugin on a real Slurm, as a plain user: it gives a job step the access to a broker and
cgroups of its own, and nothing to a step that does not ask; where Slurm tracks by cgroups and where
it does not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers import devcluster_fixture
from helpers.devcluster_fixture import DEVCLUSTER, RunningCluster, reason_to_skip, running_cluster
from helpers.slurm_site import install_for

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

REPO = Path(__file__).resolve().parents[2]
SOURCE = REPO / "slurm" / "spank"
V1 = Path("/sys/fs/cgroup/cpuset/cpuset.cpus").exists()
needs_v1 = pytest.mark.skipif(not V1, reason="no cgroup version 1 cpuset here")
NO_CGROUPS = "this node has no cgroups to give"

ACCESS = {"format": "tangram-access/1", "job": "", "addresses": [], "key": "00", "store": "",
          "host": "", "pid": 0, "ended": ""}  # fmt: skip
# makes a cgroup beneath its own, binds itself to its first core there, and comes back
BINDS = """
import os, sys
line = next(l for l in open("/proc/self/cgroup") if ":cpuset:" in l)
home = "/sys/fs/cgroup/cpuset" + line.rstrip().split(":", 2)[2]
mine, first = home + "/mine", min(os.sched_getaffinity(0))
os.mkdir(mine)
def write(path, text):
    with open(path, "w") as file:
        file.write(text)
write(mine + "/cpuset.mems", open(home + "/cpuset.mems").read())
write(mine + "/cpuset.cpus", str(first))
before = len(os.sched_getaffinity(0))
write(mine + "/cgroup.procs", "0")
print("bound", before, sorted(os.sched_getaffinity(0)) == [first], os.getuid())
write(home + "/cgroup.procs", "0")
os.rmdir(mine)
for file in ("cpuset.cpus", "cpuset.mems"):
    print("limit", os.access(home + "/" + file, os.W_OK))
print("above", os.access(os.path.dirname(home) + "/cgroup.procs", os.W_OK))
"""
PROBE = """
from tangram_hpc.resources.cpu import enforce
found = enforce.probe(True)
print(found.name, *sorted(found.limits))
found.close()
"""
HOLDS = """
import sys
from tangram_hpc import LocalCluster
with LocalCluster(cpus=1, bind=sys.argv[1]) as cluster:
    print(cluster.job, flush=True)
    sys.stdin.read()
"""
MOVES = """
import json, os
from resize import through_session
from tangram_hpc import LocalCluster
with LocalCluster(cpus=2) as cluster:
    phases, pair = through_session(cluster.client, 1, 2, 0.4, trusted=True)
print(json.dumps({"enforcement": pair.details.enforcement, "phases": phases, "uid": os.getuid()}))
"""


# Where gcc's sanitizers write what they find in the plugin; empty for a plugin without them.
REPORTS = os.environ.get("TANGRAM_TEST_SANITIZED", "")
SANITIZE = "-fsanitize=address,undefined -fno-omit-frame-pointer"


def watched(reports: str) -> dict[str, object]:
    """Options of a cluster whose plugin was compiled with sanitizers: every slurmd, and so every
    slurmstepd, loads their library before all others. srun loads it with the plugin, which it takes
    for a mistake unless it is told."""
    if not reports:
        return {}
    library = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True,
                             text=True, check=True).stdout.strip()
    options = f"log_path={reports}/report:detect_leaks=0"
    return {"slurmd_env": [f"LD_PRELOAD={os.path.realpath(library)}", f"ASAN_OPTIONS={options}"],
            "more_env": {"ASAN_OPTIONS": f"{options}:verify_asan_link_order=0"}}


@pytest.fixture(scope="module")
def plugin() -> Iterator[Path]:
    """Built as an administrator does, where every user may read it."""
    if reason := reason_to_skip():
        pytest.skip(reason)
    done = devcluster_fixture.devcluster("install", timeout=900)
    assert done.returncode == 0, done.stderr
    out = Path(f"/var/tmp/spank-test-{os.getpid()}")  # each node has a /tmp of its own
    out.mkdir(mode=0o755)
    flags = [f"CFLAGS=-O1 -g {SANITIZE}"] if REPORTS else []
    made = subprocess.run(["make", "-C", str(SOURCE), f"OUT={out}", *flags], capture_output=True,
                          text=True, check=False)
    assert made.returncode == 0, made.stderr
    yield out / "tangram.so"
    shutil.rmtree(out)


@pytest.fixture(scope="module", params=["linuxproc", "cgroup"])
def cluster(request: pytest.FixtureRequest, plugin: Path, tmp_path_factory: pytest.TempPathFactory
            ) -> Iterator[RunningCluster]:
    """A cluster that tracks by process trees, and one by cgroups, in which Slurm has its own."""
    cpus, cgroups = min(2, os.cpu_count() or 1), request.param == "cgroup"
    with running_cluster(tmp_path_factory, cpu_nodes=2, gpu_nodes=0, trainer_nodes=0, no_dbd=True,
                         cpus_per_node=cpus, threads_per_core=1 if cgroups else cpus,
                         plugin=str(plugin), cgroups=cgroups, **watched(REPORTS)) as up:
        yield up
        assert left_of(up) == []


def left_of(cluster: RunningCluster) -> list[str]:
    """The plugin's cgroups that are there, once Slurm has had the time to end its steps."""
    def there() -> list[str]:
        found: list[str] = []
        for here, folders, _ in os.walk("/sys/fs/cgroup"):
            names = [n for n in folders if n.startswith("tangram-")]
            found += [f"{here}/{n}" for n in names if os.path.exists(f"{here}/{n}")
                      and os.stat(f"{here}/{n}").st_uid == uid]
            folders[:] = [n for n in folders if n not in names]
        return found

    uid = os.stat(cluster.home).st_uid
    end = time.monotonic() + 10
    while there() and time.monotonic() < end:
        time.sleep(0.1)
    return there()


def access(cluster: RunningCluster, job: str, age_s: int = 0, **fields: object) -> Path:
    """An access file as a broker writes it; nobody listens."""
    folder = cluster.home / ".tangram" / "jobs" / job
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "access.json"
    path.write_text(json.dumps({**ACCESS, "job": job, **fields}))
    path.chmod(0o600)
    uid = os.stat(cluster.home).st_uid
    for place in (cluster.home / ".tangram", folder.parent, folder, path):
        os.chown(place, uid, uid)
    os.utime(path, (time.time() - age_s,) * 2)
    return path


@pytest.fixture
def brokers(cluster: RunningCluster) -> Iterator[dict[str, Path]]:
    """The newest broker has ended, the next one runs, and an older one runs as well."""
    yield {"new": access(cluster, "local-new"), "old": access(cluster, "local-old", 60),
           "ended": access(cluster, "local-ended", -60, ended="2020-01-01T00:00:00")}
    shutil.rmtree(cluster.home / ".tangram")


def tangram_env(cluster: RunningCluster, words: str, **environ: str) -> dict[str, str]:
    """The TANGRAM_* variables that a job step sees."""
    done = cluster.run_as_user(f"srun {words} /usr/bin/env", env=environ)
    assert done.returncode == 0, done.stderr
    pairs = (line.partition("=") for line in done.stdout.splitlines())
    return {name: value for name, _, value in pairs if name.startswith("TANGRAM_")}


def names(path: Path) -> dict[str, str]:
    return {"TANGRAM_JOB": path.parent.name, "TANGRAM_ACCESS": str(path)}


# ---- the way to a broker -----------------------------------------------------------------------


def test_tangram_auto_finds_the_newest_running_broker(
        cluster: RunningCluster, brokers: dict[str, Path]) -> None:
    for words in ("--tangram", "--tangram=auto", "--tangram --export=NONE", "--tangram -N2"):
        assert tangram_env(cluster, words) == names(brokers["new"]), words


def test_a_job_step_without_the_tangram_option_gets_nothing(
        cluster: RunningCluster, brokers: dict[str, Path]) -> None:
    assert tangram_env(cluster, "") == tangram_env(cluster, "--tangram=off") == {}


def test_the_tangram_option_can_name_a_job(
        cluster: RunningCluster, brokers: dict[str, Path]) -> None:
    assert tangram_env(cluster, "--tangram=local-old") == names(brokers["old"])


def test_tangram_variables_set_by_the_caller_are_kept(
        cluster: RunningCluster, brokers: dict[str, Path]) -> None:
    assert tangram_env(cluster, "--tangram", TANGRAM_ACCESS="/a/file") == {
        "TANGRAM_ACCESS": "/a/file"}
    assert tangram_env(cluster, "--tangram", TANGRAM_JOB="7") == {"TANGRAM_JOB": "7"}
    assert tangram_env(cluster, "--tangram", TANGRAM_JOB="local-old") == names(brokers["old"])
    assert tangram_env(cluster, "--tangram=local-new", TANGRAM_JOB="local-old") == names(
        brokers["new"])


@pytest.mark.parametrize("word, why", [
    ("999", "there is none"), ("local-ended", "has ended"), ("../up", "not a job id"),
    ("local-open", "only you can read"), ("local-link", "only you can read"),
    ("local-fifo", "only you can read"), ("local-root", "only you can read")])  # fmt: skip
def test_naming_a_job_without_a_usable_broker_is_one_line(
        cluster: RunningCluster, brokers: dict[str, Path], word: str, why: str) -> None:
    access(cluster, "local-open").chmod(0o644)
    link = access(cluster, "local-link")
    link.unlink()
    link.symlink_to(brokers["new"])
    fifo = access(cluster, "local-fifo")
    fifo.unlink()
    os.mkfifo(fifo, 0o600)
    os.chown(fifo, os.stat(cluster.home).st_uid, 0)
    os.chown(access(cluster, "local-root"), 0, 0)
    done = cluster.run_as_user(["srun", f"--tangram={word}", "echo", "ran"])
    mine = [line for line in done.stderr.splitlines() if line.startswith("tangram: ")]
    assert done.returncode != 0 and done.stdout == ""
    assert len(mine) == 1 and word in mine[0] and why in mine[0], done.stderr
    assert tangram_env(cluster, "--tangram") == names(brokers["new"])  # nor is it taken by itself


def test_without_a_broker_the_job_step_runs_with_one_warning(cluster: RunningCluster) -> None:
    done = cluster.run_as_user(["srun", "-n2", "-N2", "--tangram", "echo", "ran"])
    assert (done.returncode, done.stdout) == (0, "ran\nran\n")
    assert done.stderr.count("no broker of yours is running") == 1


def test_job_steps_inherit_the_tangram_option_of_their_batch_job(
        cluster: RunningCluster, brokers: dict[str, Path]) -> None:
    tell = "bash -c 'echo $TANGRAM_JOB'"
    script = (f"#!/bin/bash\n#SBATCH --tangram=local-old\n{tell}\nsrun {tell}\n"
              f"srun --tangram=local-new {tell}\n")
    done = cluster.run_as_user(["sbatch", "-W", "-o", "batch.out", "-e", "batch.err"], input=script)
    assert done.returncode == 0, done.stderr
    assert (cluster.home / "batch.out").read_text().split() == ["local-old"] * 2 + ["local-new"]
    script = (f"#!/bin/bash\n#SBATCH --tangram\n{tell.replace('$', 'x$')}\nsrun {tell}\n"
              f"export TANGRAM_JOB=$SLURM_JOB_ID\nsrun bash -c 'echo x$TANGRAM_ACCESS'\n")
    done = cluster.run_as_user(["sbatch", "-W", "-o", "batch.out", "-e", "batch.err"], input=script)
    assert done.returncode == 0, done.stderr
    # its own broker may not be there yet: no other one is put in its place
    assert (cluster.home / "batch.out").read_text().split() == ["x", "local-new", "x"]
    done = cluster.run_as_user("salloc --tangram=local-old srun bash -c 'echo $TANGRAM_JOB'")
    assert done.stdout == "local-old\n"


# ---- cgroups -----------------------------------------------------------------------------------


def python(cluster: RunningCluster, srun: str, text: str) -> subprocess.CompletedProcess[str]:
    """A program by the system's Python; standard library only."""
    (cluster.home / "program.py").write_text(text)
    return cluster.run_as_user(f"srun {srun} /usr/bin/python3 program.py")


@needs_v1
def test_a_step_can_make_and_bind_cgroups(cluster: RunningCluster) -> None:
    cores = min(2, os.cpu_count() or 1)
    done = python(cluster, f"--tangram -n1 -c{cores}", BINDS)
    bound = f"bound {cores} True {os.stat(cluster.home).st_uid}"
    assert done.stdout.splitlines() == [bound, "limit False", "limit False", "above False"], \
        done.stderr
    assert python(cluster, "--tangram=off -n1", BINDS).returncode != 0
    assert left_of(cluster) == []


@needs_v1
def test_slurm_still_ends_a_job_step_with_all_its_processes(cluster: RunningCluster) -> None:
    def living(what: str) -> bool:
        found = subprocess.run(["pgrep", "-u", cluster.user, "-f", what], capture_output=True,
                               check=False)
        return found.returncode == 0

    done = cluster.run_as_user("srun --tangram -n2 bash -c 'setsid sleep 7651 & sleep 0.3'")
    assert done.returncode == 0, done.stderr
    assert left_of(cluster) == [] and not living("sleep 7651")
    job = cluster.run_as_user("sbatch --parsable --tangram -o /dev/null --wrap "
                              "'srun -n1 bash -c \"trap : TERM; sleep 7652; sleep 7652\"'")
    number = job.stdout.strip()
    end = time.monotonic() + 30
    while not living("^sleep 7652") and time.monotonic() < end:
        time.sleep(0.1)
    assert living("^sleep 7652"), job.stderr  # and not only srun, which names it too
    cluster.run_as_user(["scancel", number])
    while living("sleep 7652") and time.monotonic() < end + 30:
        time.sleep(0.1)
    assert not living("sleep 7652") and left_of(cluster) == []
    assert "drain" not in cluster.run_as_user("sinfo -h -o %T").stdout


CROWDED = """
for c in cpuset pids freezer; do
    d=/sys/fs/cgroup/$c$(sed -n "s/^[0-9]*:$c://p" /proc/self/cgroup)
    case $d in *tangram-job*) mkdir -p $d/a/b/c ;; *) continue ;; esac
    setsid sleep 7653 &
    echo $! > $d/a/b/cgroup.procs
    [ $c != freezer ] || echo FROZEN > $d/a/freezer.state
    echo $c
done
"""


@needs_v1
def test_cgroups_with_leftover_and_frozen_processes_are_removed(cluster: RunningCluster) -> None:
    """Slurm's own freezer cgroup is not handed over to the user."""
    (cluster.home / "crowded.sh").write_text(CROWDED)
    done = cluster.run_as_user("srun --tangram -n1 bash crowded.sh")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:2] == ["cpuset", "pids"], done.stderr
    assert left_of(cluster) == []


# ---- who does not use it -----------------------------------------------------------------------

WRAPPER = """#!/usr/bin/env python3
import os, sys
sealed = 'for m in /sys/fs/cgroup/*/; do mount -o remount,bind,ro "$m"; done; exec "$@"'
os.execvp("unshare", ["unshare", "-m", "sh", "-c", sealed, "sh", sys.executable,
                      {real!r}, *sys.argv[1:]])
"""


@needs_v1
def test_job_steps_run_normally_where_no_cgroup_can_be_made(
        plugin: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory,
        monkeypatch: pytest.MonkeyPatch) -> None:
    """slurmd sees the cgroup file system read-only."""
    wrapper = tmp_path / "sealed"
    wrapper.write_text(WRAPPER.format(real=str(DEVCLUSTER)))
    monkeypatch.setattr(devcluster_fixture, "DEVCLUSTER", wrapper)
    with running_cluster(tmp_path_factory, cpu_nodes=1, gpu_nodes=0, trainer_nodes=0, no_dbd=True,
                         plugin=f"{plugin} default=auto", **watched(REPORTS)) as up:
        plain = up.run_as_user(["srun", "-n2", "echo", "ran"])
        assert (plain.returncode, plain.stdout, plain.stderr) == (0, "ran\nran\n", "")
        asked = up.run_as_user(["srun", "-n2", "--tangram", "echo", "ran"])
        assert (asked.returncode, asked.stdout) == (0, "ran\nran\n")
        assert asked.stderr.count(NO_CGROUPS) == 1
        log = (up.prefix / "log" / f"slurmd-{up.cpu_nodes[0]}.log").read_text()
        assert "Read-only file system" in log


# ---- a worker ----------------------------------------------------------------------------------


@needs_v1
def test_a_worker_can_enforce_by_cgroups(cluster: RunningCluster) -> None:
    """The enforcement that a worker of a plain user finds, with and without the plugin."""
    copy = cluster.home / "lib"
    shutil.copytree(REPO / "tangram_hpc", copy / "tangram_hpc", dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns("__pycache__"))
    cores = min(2, os.cpu_count() or 1)
    text = f"import sys\nsys.path.insert(0, {str(copy)!r})\n{PROBE}"
    for word, found in (("--tangram", "cgroup1 cores memory pids quota"),
                        ("--tangram=off", "affinity")):
        done = python(cluster, f"{word} -n1 -c{cores}", text)
        assert (done.returncode, done.stdout.strip()) == (0, found), done.stderr
        assert left_of(cluster) == []


# ---- the whole ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def venv(cluster: RunningCluster) -> Path:
    """This package, for the cluster's user."""
    return install_for(cluster)


@contextmanager
def local_cluster(cluster: RunningCluster, venv: Path, bind: str) -> Iterator[str]:
    """A `LocalCluster` of the cluster's user on this host; its name."""
    (cluster.home / "holds.py").write_text(HOLDS)
    broker = subprocess.Popen([str(venv / "bin/python"), "holds.py", bind], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True, **cluster.as_user())
    assert broker.stdin is not None and broker.stdout is not None
    try:
        yield broker.stdout.readline().strip()
    finally:
        broker.stdin.close()
        broker.wait(60)
        broker.stdout.close()


@pytest.mark.parametrize("cluster", ["cgroup"], indirect=True)
def test_a_job_step_reaches_the_running_broker(cluster: RunningCluster, venv: Path) -> None:
    """With a real broker: the step's programs find it without options, and learn when it has
    ended."""
    with local_cluster(cluster, venv, "0.0.0.0") as job:
        found = tangram_env(cluster, "--tangram=auto")
        path = cluster.home / ".tangram" / "jobs" / job / "access.json"
        assert found == names(path)
        done = cluster.run_as_user(f"srun --tangram {venv}/bin/tangram run -- echo ran")
        assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    done = cluster.run_as_user(["srun", f"--tangram={job}", "true"])
    assert done.returncode != 0 and "its broker has ended" in done.stderr


@pytest.mark.parametrize("cluster", ["cgroup"], indirect=True)
def test_a_job_step_that_cannot_see_the_brokers_socket_is_told_at_once_what_to_set(
        cluster: RunningCluster, venv: Path) -> None:
    """The broker listens on a Unix socket in the login node's /tmp, and the step is on a node."""
    with local_cluster(cluster, venv, "none"):
        done = cluster.run_as_user(f"srun --tangram {venv}/bin/tangram run -- true", timeout=25)
    said = [line for line in done.stderr.splitlines() if "tangram" in line]
    assert done.returncode == 2 and len(said) == 1, done.stderr
    assert os.uname().nodename in said[0] and 'LocalCluster(bind="0.0.0.0")' in said[0], said


@needs_v1
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core only: nothing can be moved")
@pytest.mark.parametrize("cluster", ["cgroup"], indirect=True)
def test_a_resize_in_a_job_step_changes_the_bound_cores(
        cluster: RunningCluster, venv: Path) -> None:
    """Broker, worker and session of a plain user in one job step, with one core and then two."""
    shutil.copy(REPO / "bench" / "resize.py", cluster.home / "resize.py")
    (cluster.home / "moves.py").write_text(MOVES)
    done = cluster.run_as_user(f"srun --tangram -n1 -c2 --mem=2000 {venv}/bin/python moves.py",
                               timeout=120)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["enforcement"] == "cgroup1" and said["uid"] == os.stat(cluster.home).st_uid
    assert [phase["units"] for phase in said["phases"]] == [1, 2]
    for phase in said["phases"]:
        allowed = {tuple(cores) for cores in phase["cores"]}
        assert len(allowed) == 1 and len(allowed.pop()) == phase["units"], phase
    assert left_of(cluster) == []


# ---- a plugin that does not load ---------------------------------------------------------------

OF_ANOTHER_SLURM = """
#include <stdint.h>
#include <slurm/spank.h>
#undef SLURM_VERSION_NUMBER
#define SLURM_VERSION_NUMBER 0x130500  /* a Slurm of 2019 */
SPANK_PLUGIN(tangram, 1)
"""


@pytest.mark.parametrize("fault", ["missing", "of another Slurm", "no library"])
def test_an_optional_plugin_that_does_not_load_disturbs_nobody(
        fault: str, plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """With `optional` in plugstack.conf jobs and steps run as without the line; the plugin's option
    is then unknown, and srun says so."""
    broken = plugin.with_name(f"broken-{len(fault)}.so")
    broken.write_bytes(b"this was cut off while it was copied")
    if fault == "of another Slurm":
        subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-o", broken, "-"], check=True,
                       input=OF_ANOTHER_SLURM, text=True)
    with running_cluster(tmp_path_factory, cpu_nodes=1, gpu_nodes=0, trainer_nodes=0, no_dbd=True,
                         plugin=str(broken), **watched(REPORTS)) as up:
        if fault == "missing":
            broken.unlink()
        told = up.run_as_user(["srun", "echo", "runs"])
        assert (told.returncode, told.stdout) == (0, "runs\n"), told.stderr
        told = up.run_as_user(["sbatch", "--wait", "-o", "out", "--wrap", "srun echo runs too"])
        assert told.returncode == 0, told.stderr
        assert (up.home / "out").read_text().splitlines()[-1] == "runs too"  # Slurm complains
        told = up.run_as_user(["srun", "--tangram", "true"])
        assert told.returncode != 0 and "unrecognized option" in told.stderr, told.stderr


# ---- the plugin under sanitizers ---------------------------------------------------------------

BEYOND = """
#include <stdlib.h>
#include <string.h>
#include <slurm/spank.h>
SPANK_PLUGIN(tangram, 1)
int slurm_spank_task_init_privileged(spank_t sp, int ac, char **av)
{
	char *word = malloc(4);
	(void)sp, (void)av;
	memset(word, 0, 5 + (size_t)ac);
	free(word);
	return 0;
}
"""


@pytest.fixture
def reports() -> Iterator[Path]:
    """Where the sanitizers of every node and user write."""
    folder = Path(f"/var/tmp/spank-reports-{os.getpid()}")
    folder.mkdir()
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.long
def test_the_sanitizers_see_what_a_plugin_does_in_slurmstepd(
        reports: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Else the test below would show nothing."""
    if reason := reason_to_skip():
        pytest.skip(reason)
    wrong = reports / "wrong.so"
    subprocess.run(["gcc", *SANITIZE.split(), "-shared", "-fPIC", "-x", "c", "-o", wrong, "-"],
                   check=True, input=BEYOND, text=True)
    with running_cluster(tmp_path_factory, cpu_nodes=1, gpu_nodes=0, trainer_nodes=0, no_dbd=True,
                         plugin=str(wrong), **watched(str(reports))) as up:
        up.run_as_user(["srun", "true"])
    found = "".join(path.read_text() for path in reports.glob("report.*"))
    assert "heap-buffer-overflow" in found and "slurm_spank_task_init_privileged" in found


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_sanitizers_find_nothing_in_the_plugin(reports: Path) -> None:
    """All tests of this file that are not long, with a plugin that ASan and UBSan watch."""
    if reason := reason_to_skip():
        pytest.skip(reason)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-m", "slurm and not long", __file__],
        cwd=REPO, env=os.environ | {"TANGRAM_TEST_SANITIZED": str(reports)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    print(done.stdout)
    assert done.returncode == 0 and " passed" in done.stdout
    assert [path.read_text() for path in reports.iterdir()] == []
