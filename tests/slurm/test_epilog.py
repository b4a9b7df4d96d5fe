"""The epilog for administrators removes what a killed worker of the ending job left, and nothing
else. It is run as root, with the node's sh and with bash as sh, and by a real slurmd."""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.devcluster_fixture import running_cluster
from helpers.slurm_site import Site

REPO = Path(__file__).resolve().parents[2]
EPILOG = REPO / "slurm" / "epilog.d" / "50-tangram"
# An epilog looks at all processes of its user and at all cgroups of its job on the machine, so each
# worker of the tests has a user and jobs of its own.
_SIDE = 2 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
USER, OTHER = 64321 + _SIDE, 64322 + _SIDE  # of no account
JOB, FOREIGN = str(7712345 + _SIDE), str(7712346 + _SIDE)

MAKER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tangram_hpc.storage.rundir import make_scratch
print(make_scratch({"SLURM_JOB_ID": sys.argv[2]}, sys.argv[3], "worker"), flush=True)
time.sleep(600)
"""

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="an epilog is run by root")


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Path]:
    """A scratch folder with the mode of /tmp."""
    place = Path("/tmp") / f"epilog-test-{os.getpid()}"
    place.mkdir()
    place.chmod(0o1777)
    yield place
    shutil.rmtree(place)


class Epilog:
    """Runs the epilog as slurmd does: as root, with a small environment.

    It and all that it starts see the files of `bound` in the place of the node's own.
    """

    def __init__(self, bound: dict[str, Path]) -> None:
        self.bound = bound

    def __call__(self, *bases: Path, **environ: str) -> None:
        folders = " ".join(map(str, bases))
        mounts = "".join(f"mount --bind {ours} {theirs} && " for theirs, ours in self.bound.items())
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", f'{mounts}exec env -i "$@"', "sh",
             f"TANGRAM_EPILOG_DIRS=/nowhere {folders}",
             *(f"{name}={value}" for name, value in environ.items()), str(EPILOG)],
            capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.fixture(params=["sh", "bash"])
def epilog(request: pytest.FixtureRequest) -> Epilog:
    """Many distributions have bash as /bin/sh, others dash."""
    shell = shutil.which(request.param)
    return Epilog({"/bin/sh": Path(shell)}) if shell else pytest.skip(f"no {request.param} here")


def of_job(job: str = JOB, uid: int = USER) -> dict[str, str]:
    return {"SLURM_JOB_ID": job, "SLURM_JOB_UID": str(uid)}


def folder(base: Path, name: str, uid: int = USER) -> Path:
    """A folder with a file."""
    made = base / name
    made.mkdir(mode=0o700)
    (made / "work").mkdir()
    (made / "work" / "file").write_text("x")
    for path in (made, made / "work", made / "work" / "file"):
        os.chown(path, uid, uid)
    return made


def lent_numbers(base: Path, lines: str) -> dict[str, Path]:
    """What to bind for an epilog that reads these lines in /etc/subuid and /etc/subgid.

    The whole folder is replaced, because a mount on one of its files vanishes when another test
    adds a user to the machine: a new file is renamed over it.
    """
    etc, alternatives = base / "etc", Path("/etc/alternatives")  # awk may lie there
    etc.mkdir()
    if alternatives.is_dir():
        shutil.copytree(alternatives, etc / "alternatives", symlinks=True)
    for name in ("subuid", "subgid"):
        (etc / name).write_text(lines)
    return {"/etc": etc}


def maker(base: Path, job: str) -> tuple[subprocess.Popen[str], Path]:
    """A live process that has made its folder as workers do."""
    run = subprocess.Popen([sys.executable, "-c", MAKER, str(REPO), job, str(base)], text=True,
                           stdout=subprocess.PIPE)
    assert run.stdout is not None
    return run, Path(run.stdout.readline().strip())


@root_only
def test_the_epilog_removes_what_users_of_an_image_own(
        epilog: Epilog, base: Path) -> None:
    """These are numbers that /etc/subuid gives to the job's user; files of nobody else go."""
    gone, other = folder(base, f"tangram-worker-job{JOB}-a"), base / f"tangram-worker-job{JOB}-b"
    folder(base, other.name)
    for path, uid in ((gone, 300_105), (other, 400_105)):
        for each in (path / "work" / "file", path / "work"):
            os.chown(each, uid, uid)
        (path / "work").chmod(0o700)
    # accounts whose names are the job's user, if they are read as numbers
    epilog.bound |= lent_numbers(
        base, f"0{USER}:400000:60000\n{USER}e0:460000:60000\n{USER}:300000:65536\n")
    epilog(base, **of_job())
    assert not gone.exists() and (other / "work" / "file").exists()


@root_only
def test_the_epilog_removes_folders_of_its_job_and_user_only(
        epilog: Epilog, base: Path) -> None:
    gone = [folder(base, f"tangram-worker-job{JOB}-a"), folder(base, f"tangram-broker-job{JOB}-b")]
    stay = [folder(base, f"tangram-worker-job{FOREIGN}-a"), folder(base, "tangram-worker-x"),
            folder(base, f"tangram-worker-job{JOB}-c", OTHER), folder(base, f"other-job{JOB}-a"),
            folder(base, f"tangram-worker-job{JOB}9-a")]
    link = base / f"tangram-worker-job{JOB}-link"
    link.symlink_to(stay[0])
    os.lchown(link, USER, USER)
    epilog(base, **of_job())
    assert [p for p in gone if p.exists()] == []
    assert all((p / "work" / "file").exists() for p in stay) and link.is_symlink()


@root_only
def test_the_epilog_waits_for_its_namespace_on_a_node_that_stands_still(
        base: Path, tmp_path: Path) -> None:
    """Ranks that yield can keep all else from its cores for seconds (decision 0028)."""
    real = shutil.copy(shutil.which("unshare") or "", tmp_path)
    slow = tmp_path / "slow"
    slow.write_text(f'#!/bin/sh\nsleep 6\nexec {real} "$@"\n')
    slow.chmod(0o755)
    gone = folder(base, f"tangram-worker-job{JOB}-a")
    os.chown(gone / "work", 300_105, 300_105)
    (gone / "work").chmod(0o700)
    lent = lent_numbers(base, f"{USER}:300000:65536\n")
    Epilog({"/usr/bin/unshare": slow, **lent})(base, **of_job())
    assert not gone.exists()


@root_only
def test_shared_memory_of_killed_ranks_goes_when_nobody_can_use_it(
        epilog: Epilog, base: Path) -> None:
    def segment(name: str, uid: int = USER, age_s: int = 60) -> Path:
        path = base / name
        path.write_bytes(b"x")
        os.chown(path, uid, uid)
        os.utime(path, (time.time() - age_s, time.time() - age_s))
        return path

    old = [segment("mpich_shm_2bf09362_0"), segment("vader_segment.n1.64321.a.0"),
           segment("Intel_MPI_huopij")]
    new, mapped = segment("mpich_shm_2bf09362_2", age_s=0), segment("mpich_shm_2bf09362_3")
    stay = [segment("mpich_shm_2bf09362_1", OTHER), segment("numbers.npy")]
    alive = subprocess.Popen(["sleep", "600"], user=USER)
    with mapped.open("r+b") as file, mmap.mmap(file.fileno(), 1):
        try:
            epilog(base, **of_job())
            assert not any(path.exists() for path in old)
            assert all(path.exists() for path in (new, mapped, *stay))
        finally:
            alive.kill()
            alive.wait()
    epilog(base, **of_job())
    assert not (new.exists() or mapped.exists()) and all(path.exists() for path in stay)


@root_only
def test_the_epilog_removes_nothing_for_a_malformed_job_id(
        epilog: Epilog, base: Path) -> None:
    stay = folder(base, f"tangram-worker-job{JOB}-a")
    for environ in ({}, {"SLURM_JOB_ID": JOB}, {"SLURM_JOB_UID": str(USER)}, of_job("*"),
                    {**of_job(), "SLURM_JOB_UID": f"{USER} 0"}, {**of_job(),
                     "SLURM_HET_JOB_ID": "../x"}):
        epilog(base, **environ)
    assert stay.exists()


@root_only
def test_the_epilog_removes_folders_of_dead_workers_and_spares_live_ones(
        epilog: Epilog, base: Path) -> None:
    """A live worker with the same job number keeps its folder."""
    dead, left = maker(base, JOB)
    alive, kept = maker(base, JOB)
    try:
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        assert left.exists()
        epilog(base, **of_job(uid=os.getuid()))
        assert not left.exists() and kept.exists()
        # of a heterogeneous job, workers are named by the leader's number
        alive.send_signal(signal.SIGKILL)
        alive.wait()
        epilog(base, **of_job(FOREIGN, os.getuid()))
        assert kept.exists()
        epilog(base, **of_job(FOREIGN, os.getuid()), SLURM_HET_JOB_ID=JOB)
        assert not kept.exists()
    finally:
        for run in (dead, alive):
            run.kill()
            run.wait()
            assert run.stdout is not None
            run.stdout.close()


@root_only
def test_the_epilog_removes_hostile_content_without_touching_other_files(
        epilog: Epilog, base: Path) -> None:
    left = folder(base, f"tangram-worker-job{JOB}-a")
    victim = base / "victim"
    victim.mkdir()
    (victim / "precious").write_text("x")
    precious = (victim / "precious").stat()
    (left / ".alive").symlink_to(victim / "made-by-a-lock")
    (left / "out").symlink_to(victim)
    os.link(victim / "precious", left / "hard")
    (left / "-rf").touch()
    (left / "new\nline").mkdir()
    os.mkfifo(left / "fifo")
    closed = left / "closed"
    deep = closed
    for _ in range(60):
        deep = deep / ("d" * 60)  # a path of 3,700 characters
    deep.mkdir(parents=True)
    for path in (closed, left / "new\nline", *closed.rglob("*")):
        os.chown(path, USER, USER, follow_symlinks=False)
    closed.chmod(0)
    tricky = folder(base, f"tangram-worker-job{JOB}-\nvictim")
    os.mkfifo(tricky / ".alive")  # to open it would block
    epilog(base, **of_job())
    assert not left.exists() and not tricky.exists()
    assert sorted(p.name for p in victim.iterdir()) == ["precious"]
    now = (victim / "precious").stat()
    assert (now.st_uid, now.st_mode, now.st_nlink) == (precious.st_uid, precious.st_mode, 1)


@root_only
def test_the_epilog_has_one_bound_of_time_for_all_folders(epilog: Epilog, base: Path) -> None:
    """The time that one removal takes is taken from the removals after it."""
    log, slow = base / "log", base / "timeout"
    log.touch(mode=0o666)
    log.chmod(0o666)
    slow.write_text(f"#!/bin/sh\n[ -s {log} ] || sleep 1\necho \"$3\" >> {log}\n")
    slow.chmod(0o755)
    epilog.bound["/usr/bin/timeout"] = slow
    epilog(base, base, **of_job())
    first, second = map(int, log.read_text().split())
    assert 0 < second < first


def pids_cgroup() -> Path | None:
    """A cgroup file system in which we may make cgroups."""
    for place in (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")):
        if (place / "cgroup.procs").exists() and os.access(place, os.W_OK):
            return place
    return None


@root_only
def test_the_epilog_removes_the_jobs_cgroups_with_their_processes(
        epilog: Epilog) -> None:
    top = pids_cgroup()
    if top is None:
        pytest.skip("no cgroup can be made here")
    slurm = top / f"slurm-epilog-test-{os.getpid()}"
    mine, foreign = (slurm / f"job_{job}" / "step_0" / "tangram-1-2-3-4" for job in (JOB, FOREIGN))
    sleepers = []
    try:
        for place in (mine, foreign):
            (place / "7").mkdir(parents=True)
            sleepers.append(subprocess.Popen(["sleep", "600"]))
            (place / "7" / "cgroup.procs").write_text(str(sleepers[-1].pid))
        epilog(Path("/nowhere"), **of_job())
        assert sleepers[0].wait(10) == -signal.SIGKILL
        epilog(Path("/nowhere"), **of_job())  # our own sleeper was a zombie in there until now
        assert not mine.exists() and mine.parent.exists()
        assert (foreign / "7").exists() and sleepers[1].poll() is None
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()
        for path in sorted([slurm, *(p for p in slurm.rglob("*") if p.is_dir())], reverse=True):
            path.rmdir()


@root_only
def test_the_epilog_removes_cgroups_that_the_plugin_made_for_the_job(
        epilog: Epilog) -> None:
    """Slurm has no cgroups of its own here, so the plugin's are beneath slurmd's."""
    top = pids_cgroup()
    if top is None:
        pytest.skip("no cgroup can be made here")
    mine, foreign = (top / f"tangram-job{job}-step0-{os.getpid()}" for job in (JOB, FOREIGN))
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        for place in (mine, foreign):
            (place / "tangram-1-2-3-4" / "7").mkdir(parents=True)
        (mine / "tangram-1-2-3-4" / "7" / "cgroup.procs").write_text(str(sleeper.pid))
        epilog(Path("/nowhere"), **of_job())
        assert sleeper.wait(10) == -signal.SIGKILL
        epilog(Path("/nowhere"), **of_job())
        assert not mine.exists() and (foreign / "tangram-1-2-3-4" / "7").exists()
    finally:
        sleeper.kill()
        sleeper.wait()
        for place in (mine, foreign):
            for path in sorted([place, *(p for p in place.rglob("*") if p.is_dir())], reverse=True):
                if path.exists():
                    path.rmdir()


@pytest.mark.slurm
def test_a_real_slurmd_runs_the_epilog(tmp_path_factory: pytest.TempPathFactory) -> None:
    """With the ids that Slurm gives, in a plain job and in both components of a heterogeneous
    job."""
    with running_cluster(tmp_path_factory, cpu_nodes=1, gpu_nodes=1, trainer_nodes=1, no_dbd=True,
                         conf_line=[f"Epilog={EPILOG}"]) as cluster:
        leave = ("d=$(mktemp -d /tmp/tangram-worker-job$SLURM_JOB_ID-XXXX)\n"
                 "mkdir -p $d/work; echo $d; exec sleep 600")
        roots = Site(cluster, Path()).roots.values()  # each node has a /tmp of its own
        for name, head in (("plain", ""), ("het", "#SBATCH -p cpu\n#SBATCH hetjob\n"
                                                  "#SBATCH -p gpu\n")):
            text = f"#!/bin/bash\n{head}srun{' --het-group=0,1' if head else ''} bash leave.sh\n"
            (cluster.home / "leave.sh").write_text(leave)
            (cluster.home / f"{name}.sh").write_text(text)
            job = cluster.run_as_user(f"sbatch --parsable -o {name}.out {name}.sh").stdout.strip()
            out, want = cluster.home / f"{name}.out", 2 if head else 1
            lines = [str(at) for line in wait_for(out, want) for root in roots
                     if (at := Path(f"{root}{line}")).is_dir()]
            assert len(lines) == want, out.read_text()
            cluster.run_as_user(["scancel", "--signal=KILL", "--full", job])
            cluster.run_as_user(["scancel", job])
            end = time.monotonic() + 60
            while any(Path(line).exists() for line in lines) and time.monotonic() < end:
                time.sleep(0.2)
            assert [line for line in lines if Path(line).exists()] == []
            assert "drain" not in cluster.run_as_user("sinfo -h -o %T").stdout


def wait_for(out: Path, count: int) -> list[str]:
    """The words of a job's output, once there are `count` of them."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if out.exists() and len(words := out.read_text().split()) >= count:
            return words
        time.sleep(0.2)
    return []
