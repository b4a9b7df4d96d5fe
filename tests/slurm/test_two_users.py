"""Brokers of two users on the same nodes at once: they share nothing, neither user reads or steers
the other's job, and both main jobs run to their end."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers.devcluster_fixture import running_cluster
from helpers.slurm_site import DATA, REPO, Site, install_for

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

SCRATCH = ("/tmp", "/var/tmp", "/dev/shm")
RANK = "python trainer_main.py {}.go --problems {} --seed 0 --scale 0.01 --out {}.json"
SECRET = "nobody else may read this"


@dataclass
class Side:
    """One user with a job."""

    site: Site
    name: str
    job: str = ""

    @property
    def uid(self) -> int:
        return pwd.getpwnam(self.site.cluster.user).pw_uid

    @property
    def folder(self) -> Path:
        return self.site.cluster.home / ".tangram" / "jobs" / self.job

    @property
    def access(self) -> dict[str, Any]:
        return json.loads((self.folder / "access.json").read_text())

    def go(self) -> None:
        (self.site.cluster.home / f"{self.name}.go").touch()

    def submit(self, problems: int, **keys: str) -> None:
        trainer = RANK.format(self.name, problems, self.name)
        self.job = self.site.sbatch(self.name, trainer, "trainer_main.py", **keys)

    def up(self, workers: int = 4) -> bool:
        return len(self.site.info(self.job).get("nodes", [])) == workers

    def pids(self) -> list[int]:
        """All processes of the user."""
        return sorted(pid for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
                      if _owner(f"/proc/{pid}") == self.uid)

    def paths(self) -> list[Path]:
        """All that its job has in files: the run folder, scratch, shared memory."""
        there = (f"{base}/{name}" for base in SCRATCH for name in os.listdir(base))
        new = [Path(path) for path in there if _owner(path) == self.uid
               and path not in self.site.before]
        tops = [self.folder, *(p for p in new if p != self.site.cluster.prefix)]
        return [path for top in tops for path in (top, *top.rglob("*"))]


def _owner(path: str) -> int:
    try:
        return os.lstat(path).st_uid
    except OSError:
        return -1


def listening(uid: int) -> set[int]:
    """TCP ports on which processes of a user listen."""
    rows = [line.split() for table in ("tcp", "tcp6")
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    return {int(r[1].rpartition(":")[2], 16) for r in rows if r[3] == "0A" and r[7] == str(uid)}


def written(pids: list[int]) -> set[str]:
    """Regular files that these have open for writing."""
    found = set()
    for pid in pids:
        try:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                where = os.readlink(f"/proc/{pid}/fd/{fd}")
                flags = Path(f"/proc/{pid}/fdinfo/{fd}").read_text().split()[3]
                if int(flags, 8) & os.O_ACCMODE and stat.S_ISREG(os.stat(where).st_mode):
                    found.add(where)
        except OSError:
            continue  # it has gone, or what it had
    return found


@contextmanager
def keeper(side: Side) -> Iterator[None]:
    """A session of this side with a secret file and a running command; checks at the end that both
    are unchanged."""
    (side.site.cluster.home / "keeps_secret.py").write_text((DATA / "keeps_secret.py").read_text())
    run = subprocess.Popen([str(side.site.venv / "bin/python"), "keeps_secret.py", SECRET],
                           stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                           text=True, start_new_session=True,
                           **_with(side, TANGRAM_JOB=side.job))
    try:
        assert run.stdout is not None and run.stdout.readline() == "up\n"
        yield
        out, err = run.communicate("", timeout=60)
        assert (run.returncode, out) == (0, f"{SECRET}\n"), err
    finally:
        run.kill()
        run.communicate()


def _with(side: Side, **environ: str) -> dict[str, Any]:
    options = side.site.cluster.as_user()
    return {**options, "env": {**options["env"], **environ}}


def attack(attacker: Side, victim: Side, *before: str) -> dict[str, Any]:
    """What `data/other_user.py` could do, run by one user against the other."""
    script = attacker.site.cluster.home / "other_user.py"
    script.write_text((DATA / "other_user.py").read_text())
    aim = {"paths": [str(p) for p in victim.paths()], "pids": victim.pids(), "uid": victim.uid,
           "addresses": victim.access["addresses"]}
    assert len(aim["paths"]) > 10 and len(aim["pids"]) > 10
    done = attacker.site.cluster.run_as_user(
        [*before, str(attacker.site.venv / "bin/python"), str(script)], input=json.dumps(aim))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@contextmanager
def squatting(side: Side) -> Iterator[None]:
    """This user takes all names in /tmp that can be guessed for the next jobs."""
    nodes = [*side.site.cluster.cpu_nodes, *side.site.cluster.gpu_nodes]
    folders = [f"/tmp/tangram-{what}{job}{end}" for what in ("", "job", "node-job", "worker-job")
               for job in range(1, 200) for end in ("", *(f"-{node}" for node in nodes))]
    made = side.site.cluster.run_as_user(["xargs", "mkdir"], input="\n".join(folders))
    assert made.returncode == 0, made.stderr
    yield
    gone = side.site.cluster.run_as_user(["xargs", "rmdir"], input="\n".join(folders))
    assert gone.returncode == 0, gone.stderr


@contextmanager
def two_sides(site: Site, **keys: str) -> Iterator[tuple[Side, Side]]:
    """Two users with one main job each on the same nodes, which wait for GO."""
    first, second = site.cluster.users
    two = (Side(site, "first"), Side(Site(site.cluster.of(second), site.venv), "second"))
    assert first == site.cluster.user
    with squatting(two[1]):
        for side in two:
            side.submit(problems=12, **keys)
        for side in two:
            site.until(side.up, f"the workers of user {side.name}", 90,
                       lambda s=side: s.site.output(s.name, s.job))
    yield two
    for side in two:
        if side.site.state(side.job):
            side.site.cluster.run_as_user(["scancel", side.job])
            side.site.finish(side.name, side.job)
    for side in two:  # ranks that had not connected leave their shared memory to the site's epilog
        subprocess.run([REPO / "slurm/epilog.d/50-tangram"], check=True, timeout=60, env={
            "SLURM_JOB_ID": side.job, "SLURM_JOB_UID": str(side.uid),
            "TANGRAM_EPILOG_DIRS": "/dev/shm"})


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Side, Side]]:
    """The nodes share network and /tmp, so that one attacker reaches what is on any of them."""
    with running_cluster(tmp_path_factory, cpu_nodes=2, gpu_nodes=2, trainer_nodes=1, users=2,
                         cpus_per_node=16, netns=False,
                         conf_line=["SlurmdTimeout=300"]) as cluster, two_sides(
                             Site(cluster, install_for(cluster))) as two:
        yield two


@pytest.mark.attack("user", "keys", "files")
def test_two_users_on_one_cluster_share_no_keys_ports_or_files(sides: tuple[Side, Side]) -> None:
    one, two = sides
    nodes = [{n["name"] for n in side.site.info(side.job)["nodes"]} for side in sides]
    assert nodes[0] == nodes[1] and len(nodes[0]) == 4
    assert one.access["key"] != two.access["key"]
    assert not set(one.access["addresses"]) & set(two.access["addresses"])
    assert listening(one.uid) and not listening(one.uid) & listening(two.uid)
    files = [written(side.pids()) for side in sides]
    assert files[0] and files[1] and not files[0] & files[1]
    for side in sides:
        for path in side.paths():
            mode = path.lstat().st_mode
            assert stat.S_ISLNK(mode) or not mode & 0o077 or _closed_above(path), (path, oct(mode))


def _closed_above(path: Path) -> bool:
    return any(not above.stat().st_mode & 0o077 for above in path.parents)


@pytest.mark.attack("user", "files", "keys", "processes", "memory", "sessions", "network")
def test_a_hostile_user_reads_and_steers_nothing_of_another_user(sides: tuple[Side, Side]) -> None:
    """Files, processes, memory and listeners; from outside and from a job step on the shared
    nodes."""
    one, two = sides
    with keeper(one):
        told = attack(two, one)
        assert told["done"] == [] and told["tried"] > 500, told
        step = ("srun", f"--jobid={two.job}", "--het-group=0", "--overlap", "-n1", "-N1")
        told = attack(two, one, *step)
        assert told["done"] == [] and told["tried"] > 500, told


def forged(attacker: Side, victim: Side, **fields: Any) -> str:
    """An access file of the attacker's that points at the victim's broker."""
    path = attacker.site.cluster.home / "forged.json"
    path.write_text(json.dumps({**attacker.access, "job": victim.job,
                                "addresses": victim.access["addresses"][1:], **fields}))
    path.chmod(0o600)
    os.chown(path, attacker.uid, -1)
    return str(path)


TO_A_BROKER = ("info", "explain 1.1", "run -- true", "shutdown")
AT_A_PLACE = ("info", "explain 1.1", "run -- true", "shutdown", "acct")


@pytest.mark.attack("user", "broker")
def test_every_verb_on_another_users_job_is_refused_in_one_line(sides: tuple[Side, Side]) -> None:
    """The job is named by its number, its owner's folder or its access file."""
    one, two = sides
    home = {"TANGRAM_HOME": str(one.site.cluster.home / ".tangram")}
    file = {"TANGRAM_ACCESS": str(one.folder / "access.json")}
    asked = [([word, "-j", one.job, *rest], environ) for verb in AT_A_PLACE
             for word, *rest in [verb.split()] for environ in ({}, home)]
    asked += [(verb.split(), file) for verb in (*TO_A_BROKER, "worker", "gateway")]
    asked += [(["broker", "--job", one.job], home)]
    refused(two, asked)
    # a worker that is given the path as an argument starts itself again without it
    told = two.site.tangram("worker", "--access", file["TANGRAM_ACCESS"])
    assert (told.returncode, told.stdout, told.stderr.count("\n")) == (2, "", 1), told.stderr
    assert told.stderr.startswith("tangram: error: "), told.stderr
    assert one.site.tangram("run", "-j", one.job, "--", "true").returncode == 0


@pytest.mark.attack("user", "keys")
def test_a_client_or_worker_with_a_wrong_key_is_refused(sides: tuple[Side, Side]) -> None:
    """As client and as worker, with the attacker's own key and with none."""
    one, two = sides
    before = one.site.info(one.job)
    for key in (two.access["key"], "00" * 32):
        path = forged(two, one, key=key)
        refused(two, [(verb.split(), {"TANGRAM_ACCESS": path})
                      for verb in (*TO_A_BROKER, "worker")], "key is wrong")
    after = one.site.info(one.job)
    assert [n["name"] for n in after["nodes"]] == [n["name"] for n in before["nodes"]]
    assert after["clients"] == before["clients"]


def refused(by: Side, asked: list[tuple[list[str], dict[str, str]]], *said: str) -> None:
    """Each of these command lines ends with status 2 and one line."""
    told = by.site.cluster.run_as_user(
        [str(by.site.venv / "bin/python"), "-c", (DATA / "verbs.py").read_text(),
         json.dumps(asked)])
    assert told.returncode == 0, told.stderr
    answers = json.loads(told.stdout)
    assert len(answers) == len(asked)
    for words, environ, status, out, err in answers:
        assert (status, out, err.count("\n")) == (2, "", 1), (words, environ, status, err)
        assert err.startswith("tangram: error: ") and all(s in err for s in said), (words, err)


@pytest.mark.attack("user", "broker", "processes")
def test_slurm_refuses_commands_on_another_users_job(sides: tuple[Side, Side]) -> None:
    one, two = sides
    for command in (f"scancel {one.job}", f"scancel --signal=KILL --full {one.job}",
                    f"scontrol update jobid={one.job} timelimit=1",
                    f"scontrol requeue {one.job}", f"scontrol suspend {one.job}",
                    f"srun --jobid={one.job} --het-group=0 --overlap -n1 true"):
        told = two.site.cluster.run_as_user(command.split())
        assert told.returncode != 0, (command, told)
    assert one.site.state(one.job) == "RUNNING"


@pytest.mark.long
def test_main_jobs_of_two_users_run_to_their_end_on_the_same_nodes(
        sides: tuple[Side, Side]) -> None:
    run_to_the_end(sides)


def run_to_the_end(sides: tuple[Side, Side]) -> None:
    """Runs the main job's workload for both at once and checks the certain rewards."""
    for side in sides:
        side.go()
    for side in sides:
        said = side.site.finish(side.name, side.job)
        out = side.site.cluster.home / f"{side.name}.json"
        assert out.exists(), said
        told = json.loads(out.read_text())
        assert {tuple(r["wrong"]) for r in told["ranks"]} == {()}, said
        assert {r["via"] for r in told["ranks"]} == {"mpi"}, said
    rows = [[r for r in side.site.acct(side.job) if r["kind"] == "exec" and r["session"]]
            for side in sides]
    assert [len(r) >= 96 for r in rows] == [True, True]
    assert {r["node"] for r in rows[0]} & {r["node"] for r in rows[1]}
    for side in sides:
        side.site.until(lambda s=side: s.site.components(s.job) == ["COMPLETED|0:0"] * 3,
                        "sacct to say the end", 60)
        side.site.until(lambda s=side: not s.site.left_behind(), "nothing to be left", 30,
                        lambda s=side: str(s.site.left_behind()))


# ---- the same where Slurm tracks by cgroups and the plugin hands some to each step ---------------


def cgroups(pids: list[int]) -> set[str]:
    """Those that these are in, by hierarchy, but for the root's."""
    found = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        except OSError:
            continue
        found |= {line.partition(":")[2] for line in lines if not line.endswith(":/")}
    return found


@pytest.mark.long
@pytest.mark.skipif(not Path("/sys/fs/cgroup/cpuset/cpuset.cpus").exists(),
                    reason="no cgroup version 1 cpuset here")
@pytest.mark.attack("user", "cpu", "memory")
def test_no_cgroup_is_shared(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each user's worker has one of the two cores of every node."""
    built = Path(f"/tmp/two-users-{os.getpid()}")
    built.mkdir(mode=0o755)
    subprocess.run(["make", "-C", str(REPO / "slurm" / "spank"), f"OUT={built}"], check=True,
                   capture_output=True)
    try:
        with running_cluster(tmp_path_factory, cpu_nodes=2, gpu_nodes=2, trainer_nodes=2, users=2,
                             cpus_per_node=2, cgroups=True, netns=False,
                             conf_line=["SlurmdTimeout=300"],
                             plugin=f"{built}/tangram.so default=auto") as cluster:
            site = Site(cluster, install_for(cluster))
            with two_sides(site, cpus_cpu="1", cpus_gpu="1", ranks="1") as sides:
                one, two = sides
                with keeper(one), keeper(two):
                    ours = cgroups([os.getpid()])  # of what runs here as a user
                    mine, others = (cgroups(side.pids()) - ours for side in sides)
                    assert len(mine) > 20 and len(others) > 20
                    assert mine & others == set()
                    told = attack(two, one)
                    assert told["done"] == [] and told["tried"] > 500, told
                run_to_the_end(sides)
                for side in sides:
                    told = {r["enforcement"] for r in side.site.acct(side.job)
                            if r["kind"] == "exec"}
                    assert told == {"cgroup1"}
    finally:
        shutil.rmtree(built)
