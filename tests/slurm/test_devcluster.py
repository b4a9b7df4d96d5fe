"""slurm/devcluster boots a real Slurm, runs a het job by a plain user, and leaves nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import pwd
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.devcluster_fixture import (
    DEVCLUSTER,
    RunningCluster,
    devcluster,
    reason_to_skip,
    running_cluster,
)

needs_slurm = pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip()))

HET_JOB = """\
#!/bin/bash
#SBATCH -p cpu -n1 --time=5
#SBATCH hetjob
#SBATCH -p gpu -n1 --gres=gpu:2 --time=5
#SBATCH hetjob
#SBATCH -p trainer -n1 --time=5
srun --mpi=pmi2 --het-group=0,1,2 bash -c \\
    'echo "task $SLURM_PROCID $SLURMD_NODENAME $(id -un) ${CUDA_VISIBLE_DEVICES:-none} $PMI_SIZE"'
srun --het-group=1 --exact -n1 --gres=gpu:1 bash -c 'echo "step $SLURMD_NODENAME"'
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    with running_cluster(tmp_path_factory, cpu_nodes=1, gpu_nodes=1, trainer_nodes=1) as up:
        yield up


def live_processes(needle: str, uid: int) -> list[str]:
    """Command lines of live processes that name `needle` in them or in an open file, or are
    of the user `uid`; zombies that nobody has reaped yet are dead."""
    found = []
    for pid in (p for p in os.listdir("/proc") if p.isdigit() and int(p) != os.getpid()):
        try:
            proc = Path("/proc", pid)
            if (proc / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                continue
            line = (proc / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            files = [os.readlink(proc / "fd" / fd) for fd in os.listdir(proc / "fd")]
            if needle in line or any(needle in f for f in files) or proc.stat().st_uid == uid:
                found.append(f"{pid} {line}")
        except OSError:
            continue
    return found


def eventually(what, seconds: float = 20):
    """The first true answer of `what`, or its last answer when the time is over."""
    end = time.monotonic() + seconds
    while not (answer := what()) and time.monotonic() < end:
        time.sleep(0.2)
    return answer


@needs_slurm
@pytest.mark.slurm
def test_het_job_spans_three_partitions_and_is_accounted(cluster: RunningCluster) -> None:
    (cluster.home / "het.sh").write_text(HET_JOB)
    done = cluster.run_as_user("sbatch --parsable --wait -o het.out het.sh")
    out = (cluster.home / "het.out").read_text()
    assert done.returncode == 0, done.stderr + out
    name, lines = cluster.name, out.splitlines()
    assert sorted(line for line in lines if line.startswith("task")) == [
        f"task 0 {name}c1 {cluster.user} none 3",
        f"task 1 {name}g1 {cluster.user} 0,1 3",
        f"task 2 {name}t1 {cluster.user} none 3",
    ]
    assert f"step {name}g1" in lines
    job = done.stdout.strip()
    want = {f"{job}+0.0", f"{job}+1.0", f"{job}+2.0", f"{job}+1.1"}

    def completed() -> set[str]:
        rows = cluster.run_as_user(f"sacct -nP -j {job} -o jobid,state").stdout.split()
        return {r.split("|")[0] for r in rows if r.endswith("|COMPLETED")}

    eventually(lambda: want <= completed())
    assert want <= completed()


@needs_slurm
@pytest.mark.slurm
def test_the_dev_cluster_has_its_partitions_gpus_and_pmi2(cluster: RunningCluster) -> None:
    n = cluster.name
    rows = cluster.run_as_user("sinfo -h -N -o '%P %N %G'").stdout.split("\n")
    assert sorted({r.strip() for r in rows if r}) == sorted([
        f"cpu* {n}c1 (null)", f"gpu {n}g1 gpu:fake:4", f"trainer {n}t1 gpu:fake:4",
        f"scav {n}c1 (null)", f"scav {n}g1 gpu:fake:4",
    ])  # fmt: skip
    done = cluster.run_as_user("srun --mpi=list")
    assert "pmi2" in (done.stdout + done.stderr).split()
    assert "MpiDefault = none" in " ".join(
        cluster.run_as_user("scontrol show config | grep -w MpiDefault").stdout.split()
    )


@needs_slurm
@pytest.mark.slurm
def test_devcluster_exec_has_a_clean_environment_and_passes_the_exit_code(
        cluster: RunningCluster) -> None:
    at = ["--prefix", str(cluster.prefix)]
    done = devcluster("exec", *at, "--setenv", "A=1 2", "--", "bash", "-c", "env; pwd; exit 7")
    assert done.returncode == 7
    lines = set(done.stdout.splitlines())
    assert {"A=1 2", f"USER={cluster.user}", f"SLURM_CONF={cluster.conf}"} <= lines
    assert str(cluster.home) in lines
    keys = {line.partition("=")[0] for line in lines if "=" in line}
    assert keys <= {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "SLURM_CONF", "A",
                    "PWD", "SHLVL", "_"}  # fmt: skip
    assert devcluster("exec", *at, "--root", "--", "id", "-un").stdout.strip() == "root"
    assert devcluster("env", *at).stdout.strip() == f"export SLURM_CONF={cluster.conf}"
    assert devcluster("exec", *at, "--", "no-such-program").returncode == 127


@needs_slurm
@pytest.mark.slurm
def test_two_dev_clusters_run_side_by_side_and_down_leaves_nothing(
    cluster: RunningCluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # its node has the host's /dev/shm, which `down` has to clear
    small = {"cpu_nodes": 1, "gpu_nodes": 0, "trainer_nodes": 0, "no_dbd": True, "netns": False}
    with running_cluster(tmp_path_factory, **small) as other:
        uid = pwd.getpwnam(other.user).pw_uid
        for up in (cluster, other):
            done = up.run_as_user("srun -n1 -p cpu printenv SLURMD_NODENAME")
            assert done.stdout.strip() == f"{up.name}c1", done.stderr
        script = "touch /dev/shm/$USER; setsid sleep 3600 & srun --overlap sleep 3600"
        other.run_as_user(["sbatch", "-n1", "--wrap", script], check=True)
        seen = eventually(lambda: len(live_processes("sleep 3600", -1)) >= 2)
        assert seen, "the job did not start"
        os.kill(other.pid_of(f"slurmd-{other.name}c1"), 9)  # leaves its steps running
        # a kill ends it when the kernel comes to it: not while it waits for a disk, say
        found = eventually(lambda: (now := devcluster(
            "status", "--prefix", str(other.prefix))).returncode == 3 and now)
        assert found and not json.loads(found.stdout)["healthy"]
    assert live_processes(str(other.prefix), uid) == []
    assert not other.prefix.exists()
    assert not Path("/dev/shm", other.user).exists()
    with pytest.raises(KeyError):
        pwd.getpwnam(other.user)
    again = devcluster("down", "--prefix", str(other.prefix))
    assert again.returncode == 0 and "nothing to do" in again.stderr
    assert cluster.status()["healthy"]


@needs_slurm
@pytest.mark.slurm
def test_a_failing_daemon_is_named_and_the_dev_cluster_is_removed(cluster: RunningCluster) -> None:
    name = f"t{os.getpid()}z"
    done = devcluster("up", "--name", name, "--no-dbd", "--conf-line", "NoSuchKey=1")
    assert done.returncode == 1 and done.stdout == ""
    assert "error: slurmctld" in done.stderr and "NoSuchKey" in done.stderr
    assert "Traceback" not in done.stderr
    assert not Path("/tmp", f"devcluster-{name}").exists()
    with pytest.raises(KeyError):
        pwd.getpwnam(f"{name}user")


RESERVE = """\
import sys, dc_boot, dc_cli
options = dc_cli.parser().parse_args(["up", "--name", "reserved", "--netns", *sys.argv[1:]])
cluster = dc_boot.plan(options)
with dc_boot.reserve(cluster, options.base_port):
    print(cluster.base_port)
"""


def reserved(*words: str) -> subprocess.CompletedProcess[str]:
    """Prints the base port that `up --netns` would take now."""
    return subprocess.run([sys.executable, "-c", RESERVE, *words], capture_output=True, text=True,
                          check=False, env={"PYTHONPATH": str(DEVCLUSTER.parent)})  # fmt: skip


@needs_slurm
@pytest.mark.slurm
def test_a_cluster_takes_no_addresses_that_this_machine_uses() -> None:
    port = reserved().stdout.strip()
    network = f"10.{int(port) >> 8}.{int(port) & 255}"
    subprocess.run(["ip", "link", "add", "dctest", "type", "bridge"], check=True)
    try:
        subprocess.run(["ip", "addr", "add", f"{network}.77/28", "dev", "dctest"], check=True)
        subprocess.run(["ip", "link", "set", "dctest", "up"], check=True)
        assert int(reserved().stdout) > int(port)
        refused = reserved("--base-port", port)
        assert refused.returncode and "the addresses of their network" in refused.stderr
    finally:
        subprocess.run(["ip", "link", "del", "dctest"], check=True)
    assert reserved().stdout.strip() == port


@needs_slurm
@pytest.mark.slurm
def test_down_leaves_the_network_of_another_cluster_with_its_base_port(
    cluster: RunningCluster
) -> None:
    """A cluster of which only the record is left, as after a restart of the machine."""
    record = json.loads((cluster.prefix / "devcluster.json").read_text())
    dead = Path("/tmp", f"devcluster-t{os.getpid()}dead")
    dead.mkdir()
    (dead / "devcluster.json").write_text(json.dumps(
        record | {"name": "dead", "prefix": str(dead), "users": [], "daemons": []}))
    done = devcluster("down", "--prefix", str(dead))
    assert done.returncode == 0, done.stderr
    assert not dead.exists()
    assert Path("/sys/class/net", f"dcb{record['base_port']}").exists()
    assert cluster.run_as_user("srun -n1 -p cpu hostname").stdout.strip() == f"{cluster.name}c1"


@needs_slurm
@pytest.mark.slurm
def test_a_busy_port_and_a_foreign_prefix_are_refused(
    cluster: RunningCluster, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        if int(port) <= 64535:
            done = devcluster("up", "--name", "busyport", "--no-dbd", "--base-port", port)
            assert done.returncode == 1 and "in use" in done.stderr
    again = devcluster("up", "--name", cluster.name, "--prefix", str(cluster.prefix))
    assert again.returncode == 1 and "devcluster down" in again.stderr
    theirs = Path("/tmp", f"devcluster-test-{os.getpid()}")
    theirs.mkdir()
    try:
        (theirs / "file").write_text("mine")
        done = devcluster("up", "--name", "foreign", "--no-dbd", "--prefix", str(theirs))
        assert done.returncode == 1 and "not devcluster's" in done.stderr
        assert devcluster("down", "--prefix", str(theirs)).returncode == 0
        assert (theirs / "file").read_text() == "mine"
    finally:
        (theirs / "file").unlink()
        theirs.rmdir()


@pytest.mark.parametrize(
    "args",
    [
        ["status", "--name", "nosuch"],
        ["exec", "--name", "nosuch", "--", "true"],
        ["up", "--name", "Bad-Name"],
        ["down", "--prefix", "/"],
        ["up", "--cpu-nodes", "x"],
        ["up", "--plugin", "/nowhere/tangram.so default=auto"],
        ["up", "--cgroups", "--cpus-per-node", "1000"],
    ],
)
def test_wrong_devcluster_arguments_are_refused_in_one_line(args: list[str]) -> None:
    done = devcluster(*args)
    assert done.returncode == 2 and done.stdout == ""
    assert "Traceback" not in done.stderr and "error: " in done.stderr.splitlines()[-1]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("verb", ["up", "down"])
def test_devcluster_refuses_users_other_than_root(verb: str, tmp_path: Path) -> None:
    python = "/usr/bin/python3"
    if not os.access(python, os.X_OK):
        pytest.skip("no system python that another user may run")
    done = subprocess.run(
        [python, str(DEVCLUSTER), verb], capture_output=True, text=True, check=False,
        user=65534, group=65534, extra_groups=[], cwd="/",
    )  # fmt: skip
    if "can't open file" in done.stderr:
        pytest.skip("another user cannot read this checkout")
    assert done.returncode == 2 and "not root" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_policy_rc_d_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DEVCLUSTER.parent))
    spec = importlib.util.find_spec("dc_install")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("dc_base", "dc_install"):
        sys.modules.pop(name, None)

    policy = tmp_path / "policy-rc.d"
    with module.no_daemon_starts(policy):
        assert subprocess.run([policy, "munge", "start"], check=False).returncode == 101
    assert not policy.exists()
    policy.write_text("#!/bin/sh\nexit 0\n")
    policy.chmod(0o750)
    with pytest.raises(RuntimeError), module.no_daemon_starts(policy):
        assert subprocess.run([policy, "munge", "start"], check=False).returncode == 101
        raise RuntimeError
    assert policy.read_text() == "#!/bin/sh\nexit 0\n" and policy.stat().st_mode & 0o777 == 0o750
