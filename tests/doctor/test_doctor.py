"""`tangram doctor`: its page, its severities, its deadlines, and its findings on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import helpers.fake_nvml as fake
import pytest

from tangram_hpc.cli.doctor import page
from tangram_hpc.config.settings import Config
from tangram_hpc.doctor import gpu, isolation, limits, mpi, net, rehearsal, slurm, storage
from tangram_hpc.doctor.check import Check, CheckContext, CheckSpec, Finding, SlurmFacts, ok, warn
from tangram_hpc.doctor.checkup import GROUPS, run_checks
from tangram_hpc.doctor.deadline import CommandOutput, run_command, with_deadline
from tangram_hpc.doctor.severity import NEEDS, blockers
from tangram_hpc.errors import InvalidInput
from tangram_hpc.resources.gpu.nvml import look
from tangram_hpc.sandbox.isolation.container_runtimes import RUNTIMES, missing
from tangram_hpc.slurm.job_environment import slurm_place, unsized


def check(name: str, state: str, group: str = "Files", found: str = "it is", remedy: str = ""
          ) -> Check:
    return Check(group, name, state, found, remedy, 0.1)


def where(tmp_path: Path, **environ: str) -> CheckContext:
    given = {"TANGRAM_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path), **environ}
    return CheckContext(given, Config.model_validate({}), "127.0.0.1", SlurmFacts(why="none here"),
                        slurm_place(given))


# ---- the page and severity ---------------------------------------------------------------------


def test_the_doctor_page_groups_checks_and_fits_100_columns() -> None:
    checks = [check("home", "ok"), check("scratch", "warn", remedy="word " * 60),
              check("tcp", "fail", "Network", "x" * 130, "mend it"),
              check("nodes", "skip", "Network")]
    lines = page("machine", "here", checks, ["tcp: because"])
    assert lines.count("Files") == lines.count("Network") == 1
    assert all(len(line) <= 100 for line in lines if "x" * 130 not in line)
    rows = [line for line in lines if line[2:6].strip() in ("ok", "warn", "fail", "skip")]
    assert [r.index(" it is") for r in rows if r.endswith("it is")] == [22, 22, 22]
    assert sum("-> " in line for line in lines) == 2
    assert lines[-2:] == ["The main job would not run here (1 ok, 1 warn, 1 fail, 1 skip).",
                          "  tcp: because"]
    assert "\033" not in "".join(lines)
    coloured = page("machine", "here", checks, [], colour=True)
    assert "\033[31mfail\033[0m  tcp" in "".join(coloured)
    assert coloured[-1].startswith("The main job would run here")


def test_only_failed_checks_that_the_main_job_needs_are_blockers() -> None:
    broken = [check("tcp", "fail"), check("locking", "fail"), check("home", "warn")]
    assert blockers("machine", broken) == []
    assert [line.split(":")[0] for line in blockers("job", broken)] == ["tcp"]
    assert [line.split(":")[0] for line in blockers("login", [check("home", "fail")])] == ["home"]
    assert blockers("job", [check(name, "warn") for name in NEEDS]) == []


def test_every_check_named_by_the_severities_exists() -> None:
    names = [item.name for items in GROUPS.values() for item in items]
    assert len(names) == len(set(names))
    assert set(NEEDS) <= set(names)


# ---- deadlines -----------------------------------------------------------------------------------


def test_a_check_that_hangs_or_breaks_does_not_end_the_page(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def hangs(_: CheckContext) -> Finding:
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(3600)
        return ok("")

    def refuses(_: CheckContext) -> Finding:
        raise InvalidInput("config field `x`: no")

    items = {"A": (CheckSpec("hangs", hangs, 0.5, "pull the plug"),
                   CheckSpec("breaks", lambda _: ok(str({}["missing"]))),
                   CheckSpec("reads", lambda _: ok((tmp_path / "none").read_text())),
                   CheckSpec("refuses", refuses), CheckSpec("well", lambda _: ok("fine"))),
             "B": (CheckSpec("warns", lambda _: warn("half", "all")),)}
    heard: list[tuple[str, str]] = []
    found = run_checks(where(tmp_path), lambda *words: heard.append(words), items)
    assert [c.state for c in found] == ["fail", "fail", "fail", "fail", "ok", "warn"]
    assert (found[0].found, found[0].remedy) == ("no answer in 0.5 s", "pull the plug")
    assert "KeyError: 'missing'" in capfd.readouterr().err
    assert str(tmp_path / "none") in found[2].found and "`x`" in found[3].found
    assert heard == [(c.group, c.name) for c in found]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_check_with_a_large_answer_returns_it_completely() -> None:
    assert with_deadline(lambda: "x" * (1 << 20), str, 30.0) == "x" * (1 << 20)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_check_ends_with_its_parent() -> None:
    hangs = ("import os, time\n"
             "from tangram_hpc.doctor.deadline import with_deadline\n"
             "def act():\n    print(os.getpid(), flush=True)\n    time.sleep(3600)\n"
             "with_deadline(act, str, 3600)\n")
    parent = subprocess.Popen([sys.executable, "-c", hangs], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert not gone(child)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 30
    while not gone(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert gone(child)


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[Path]:
    """A file system on which every write hangs and cannot be killed, as on a dead file server."""
    lacking = [p for p in ("mkfs.ext4", "mount", "fsfreeze") if shutil.which(p) is None]
    if os.geteuid() or lacking:
        pytest.skip(f"needs root and {', '.join(lacking) or 'nothing else'}")
    image, point = tmp_path / "image", tmp_path / "point"
    point.mkdir()
    with open(image, "wb") as file:
        file.truncate(20 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    if subprocess.run(["mount", "-o", "loop", str(image), str(point)], check=False).returncode:
        pytest.skip("no loop device can be mounted here")
    try:
        subprocess.run(["fsfreeze", "-f", str(point)], check=True)
        try:
            yield point
        finally:
            subprocess.run(["fsfreeze", "-u", str(point)], check=True)
    finally:
        for _ in range(50):  # who hung on it ends now
            if subprocess.run(["umount", str(point)], check=False).returncode == 0:
                break
            time.sleep(0.1)


def test_a_check_on_a_hanging_file_system_is_abandoned(frozen: Path) -> None:
    here = where(frozen)
    items = {"Files": (CheckSpec("home", storage.folder, 1.0, "ask the site"),
                       CheckSpec("well", lambda _: ok("goes on")))}
    found = run_checks(here, groups=items)
    assert [(c.state, c.found) for c in found] == [("fail", "no answer in 1 s"), ("ok", "goes on")]
    assert blockers("machine", found)


def test_commands_have_deadlines() -> None:
    deaf = "trap '' TERM; echo begun; while :; do sleep 0.1; done"
    told = run_command(["bash", "-c", deaf], os.environ, 0.5)
    assert (told.code, told.out) == (124, "begun\n") and "0.5 s" in told.last
    assert run_command(["bash", "-c", "echo no >&2; exit 3"], os.environ, 30.0).last == "no"
    missing = run_command(["no-such-command"], os.environ, 30.0)
    assert missing.code == 127 and "no-such-command" in missing.last


# ---- single findings -----------------------------------------------------------------------------


def test_slurm_releases_and_clock_skew_are_parsed() -> None:
    assert slurm.release("slurm-wlm 22.05.8") == (22, 5) and slurm.release("none") == (0, 0)
    text = "Configuration data as of 2026-11-21T17:12:39\n"
    low, high = slurm._skew(text, 1795281159.5, 1795281159.6)  # the same second, in UTC
    assert low == pytest.approx(-0.6) and high == pytest.approx(0.5)

    def told(low: float, high: float) -> Finding:
        facts = SlurmFacts({"ClusterName": "c"}, True, skew_s=(low, high))
        return slurm.clock(CheckContext({}, Config.model_validate({}), "", facts))

    assert told(low, high).state == "ok"
    assert (told(4.0, 5.1).state, told(-601.0, -600.0).state) == ("warn", "fail")
    assert "ahead by 4.0" in told(4.0, 5.1).found and "behind by 600.0" in told(-601, -600).found


def test_a_further_job_step_does_not_inherit_the_size_of_the_first() -> None:
    given = {"SLURM_JOB_ID": "7", "SLURM_CONF": "/c", "SLURM_MEM_PER_CPU": "100", "PMI_RANK": "1",
             "SLURM_NTASKS_PER_NODE": "4", "SLURM_CPUS_PER_TASK": "2", "PATH": "/bin"}
    assert unsized(given) == {"SLURM_JOB_ID": "7", "SLURM_CONF": "/c", "PATH": "/bin"}


def test_a_shell_of_salloc_on_a_login_node_is_on_no_node_of_its_job() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "c1"}
    shell = CheckContext(environ, Config.model_validate({}), "", SlurmFacts(), slurm_place(environ))
    told = slurm.job(shell)
    assert told.state == "warn" and "0 CPUs" not in told.found
    assert told.found.startswith("job 7, on none of whose nodes") and "srun" in told.remedy
    environ |= {"SLURMD_NODENAME": "c1", "SLURM_CPUS_ON_NODE": "1"}
    inside = replace(shell, environ=environ, place=slurm_place(environ))
    assert slurm.job(inside).found.startswith("job 7 on c1: 1 CPUs")


def test_the_nodes_of_a_job_are_counted_by_component() -> None:
    groups = {f"SLURM_JOB_NUM_NODES_HET_GROUP_{n}": str(n + 1) for n in range(3)}
    for environ, nodes in (({}, (1,)), ({"SLURM_JOB_NUM_NODES": "4"}, (4,)),
                           ({"SLURM_HET_SIZE": "3", **groups}, (1, 2, 3)),
                           ({"SLURM_HET_SIZE": "3", "SLURM_JOB_NUM_NODES": "2"}, (2,))):
        place = slurm_place({"SLURM_JOB_ID": "7", **environ})
        assert place is not None and place.nodes == nodes


def test_doctor_reports_mpi_worlds_of_one_rank_as_a_failure() -> None:
    one = '{"size": 1, "seconds": 0.1, "threads": true}\n'
    assert "two worlds of one" in mpi._finding(CommandOutput(0, one * 2, "", 1.0), "srun").found
    assert mpi._finding(CommandOutput(0, one, "", 1.0), "srun").state == "fail"
    assert mpi._finding(CommandOutput(1, "", "no way", 1.0), "srun").found.endswith("no way")
    two = one.replace("1,", "2,", 1)
    assert mpi._finding(CommandOutput(0, "srun: hello\n" + two, "", 1.0), "srun").state == "ok"
    assert mpi._finding(CommandOutput(0, two.replace("true", "false"), "", 1.0),
                       "srun").state == "warn"


def test_doctor_names_a_node_that_cannot_connect_back() -> None:
    rows = [{"node": f"n{n}", "why": "", "ms": 1.0, "clock": 1000.0} for n in range(2)]

    def judged(*rows: dict[str, Any]) -> Finding:
        text = "srun: a word\n" + "".join(json.dumps(row) + "\n" for row in rows)
        return net._finding(CommandOutput(0, text, "srun: error: a node", 1.0), 2, 999.0, 1001.0)

    assert judged(*rows).state == "ok" and "n0, n1" in judged(*rows).found
    late = judged(rows[0], {**rows[1], "clock": 1005.0})
    assert late.state == "warn" and "clock of n1 differs from ours by 4.0 s" in late.found
    deaf = judged(rows[0], {**rows[1], "why": "no broker answers"})
    assert deaf.state == "fail" and "1 of 2" in deaf.found and "n1: no broker" in deaf.found
    assert "srun: error: a node" in judged(rows[0]).found


def test_doctor_reports_gpus_mig_and_slurms_grant_from_a_fake_nvml(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests the messages only; no GPU is behind them, and NVML's answers are tested elsewhere."""
    def told(place: str = "", *gpus: fake.FakeGpu, **environ: str) -> dict[str, Check]:
        monkeypatch.setattr(gpu, "look", lambda: look(fake.FakeNvml(*gpus)))
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": place} if place else {}
        checks = [CheckSpec(item.name, item.act) for item in gpu.CHECKS]
        found = run_checks(where(tmp_path, **job, **environ), groups={"GPUs": tuple(checks)})
        return {c.name: c for c in found}

    whole = told("", fake.FakeGpu("GPU-0"), fake.FakeGpu("GPU-1"))
    assert [c.state for c in whole.values()] == ["ok", "ok", "skip", "ok"]
    assert "Fake H200" in whole["NVML"].found and "2 x Fake H200" in whole["lent"].found
    cut = told("", fake.FakeGpu("GPU-0", mig=True,
                                 slices=[fake.FakeGpu("MIG-1", path=(1, 0))]))
    assert cut["MIG"].found == "on, on 1 of 1 GPUs: 1 slices; give each worker one of them"
    assert told("", fake.FakeGpu("GPU-0", mig=True, slices=[]))["MIG"].state == "warn"
    none = told("0,1")
    assert none["NVML"].state == "warn" and "Slurm gave 2" in none["NVML"].found
    assert "by Slurm's word" in none["lent"].found and none["MIG"].state == "skip"


def test_doctor_tells_file_system_types_and_shared_ones(tmp_path: Path) -> None:
    assert storage.file_system(Path("/proc/self")) == "proc"
    assert storage.is_shared("nfs4") and storage.is_shared("lustre")
    assert not storage.is_shared("ext4") and not storage.is_shared("tmpfs")
    assert storage.nearest(tmp_path / "a" / "b") == tmp_path


def test_doctor_follows_a_linked_home_whose_target_is_missing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/proc/none/home")
    told = storage.folder(where(tmp_path, TANGRAM_HOME=str(tmp_path / "link")))
    assert told.state == "fail" and "on proc" in told.found, told


def test_files_and_locks_are_really_tried(tmp_path: Path) -> None:
    here = where(tmp_path)
    for act in (storage.latency, storage.locking, storage.clock):
        assert act(here).state == "ok", act
    assert storage.scratch(here).found.startswith(f"{tmp_path} on ")
    assert os.listdir(tmp_path) == []  # the home was not made, and nothing is left
    (tmp_path / "file").write_text("")
    assert storage.scratch(where(tmp_path, TMPDIR=str(tmp_path / "file"))).state == "fail"
    assert storage.scratch(where(tmp_path, TMPDIR=str(tmp_path / "none"))).state == "fail"
    blocked = where(tmp_path, TANGRAM_HOME=str(tmp_path / "file" / "home"))
    assert storage.folder(blocked).state == "fail"
    found = run_checks(blocked, groups={"F": (CheckSpec("latency", storage.latency),)})
    assert found[0].state == "skip" and "no folder can be made" in found[0].found


def test_trial_folders_of_runs_that_were_killed_are_removed(tmp_path: Path) -> None:
    """As by the kernel, for memory. Those of runs that may still live stay, and so do files, and
    folders that the user has named after doctor."""
    killed, lives, file = (tmp_path / f".tangram-doctor-{n * 8}" for n in "abc")
    theirs = [tmp_path / name for name in ("tangram-doctor-reports", "tangram-doctor-20261130",
                                           "old.tangram-doctor-abcdefgh", ".tangram-doctor-logs")]
    for folder in (killed / "jobs", lives, *theirs):
        folder.mkdir(parents=True)
    file.touch()
    for old in (killed, file, *theirs):
        os.utime(old, (0, time.time() - 4000))
    with storage.trial_folder(tmp_path / "not" / "there") as trial:
        assert sorted(tmp_path.iterdir()) == sorted([lives, file, trial, *theirs])


def test_doctor_connects_to_a_broker_with_the_real_handshake(short_folder: Path) -> None:
    here = where(short_folder)
    assert "handshake" in net.tcp(here).found and net.unix(here).state == "ok"
    elsewhere = CheckContext({}, Config.model_validate({}), "203.0.113.9", SlurmFacts())
    assert net.tcp(elsewhere).state == "fail" and "cannot listen" in net.tcp(elsewhere).found
    long = short_folder / ("n" * 100)
    long.mkdir()
    assert "short path" in net.unix(where(short_folder, TMPDIR=str(long))).remedy
    assert "lo 127.0.0.1" in net.interfaces(here).found


def test_settings_that_a_worker_refuses_fail_in_doctor(tmp_path: Path) -> None:
    here = where(tmp_path)
    refused = {"enforcement": "cgroup2", "read_paths": ("/proc",)}
    wrong = CheckContext(here.environ, Config.model_validate(refused), "", SlurmFacts())
    assert isolation.sandboxes(wrong).state == "fail"
    best = isolation.cgroups(here)
    assert best.state in ("ok", "warn") and not (best.state == "warn" and not best.remedy)
    many = CheckContext(here.environ, Config.model_validate({"cpus": 4096}), "", SlurmFacts())
    assert limits.cores(many).state == "warn" and "counted" in limits.cores(many).found


def test_memory_that_only_doctor_uses_in_a_small_job_step_is_no_warning(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = where(tmp_path)
    monkeypatch.setattr(limits.memory, "total_mib", lambda: 1000)
    monkeypatch.setattr(limits.memory, "left_mib", lambda: 991)
    assert limits.session_memory(here) == ok("1000 MiB would be lent; 991 of 1000 MiB are free")
    monkeypatch.setattr(limits.memory, "left_mib", lambda: 10)
    assert "something else" in limits.session_memory(here).remedy


def test_doctor_tells_whether_the_compiled_loop_serves_plain_commands(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = where(tmp_path)
    monkeypatch.setattr(isolation.fast_path, "_library", object())
    assert isolation.plain_commands(here) == ok("the compiled loop")
    off = replace(here, config=here.config.model_copy(update={"compiled": False}))
    assert isolation.plain_commands(off).found.startswith("Python")
    monkeypatch.setattr(isolation.fast_path, "_library", None)
    assert isolation.plain_commands(off).state == "ok", "it was asked for"
    told = isolation.plain_commands(here)
    assert (told.state, "compiler" in told.remedy) == ("warn", True), told


# ---- this machine --------------------------------------------------------------------------------


def doctor(tmp_path: Path, *words: str, **environ: str) -> tuple[int, dict[str, Any]]:
    """What `tangram doctor --json` says with a home and a scratch of its own."""
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir(exist_ok=True)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "TANGRAM"))}
    env = {**kept, "TANGRAM_HOME": str(tmp_path / "home/t"), "TMPDIR": str(tmp_path / "tmp"),
           **environ}
    done = subprocess.run([sys.executable, "-m", "tangram_hpc", "doctor", "--json", *words],
                          env=env, capture_output=True, text=True, timeout=170)
    told = json.loads(done.stdout)
    for c in told["checks"]:
        assert bool(c["remedy"]) == (c["state"] in ("warn", "fail")), c
    return done.returncode, told


def by_name(told: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {c["name"]: c for c in told["checks"]}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("root", [False, True])
def test_doctor_warns_where_bwrap_runs_untrusted_code_without_a_filter(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: bool) -> None:
    monkeypatch.setattr(isolation.seccomp, "available", lambda: False)
    monkeypatch.setattr(isolation, "is_root", lambda: root)
    told = isolation.kernel_isolation(where(tmp_path))
    assert told.state == "warn" and "bwrap or a container may make any system call" in told.found


def test_doctor_finds_that_this_machine_runs_the_main_job(short_folder: Path) -> None:
    status, told = doctor(short_folder)
    if told["place"] != "machine":
        pytest.skip("this machine has a Slurm of its own")
    found = by_name(told)
    assert (status, told["runs"], told["why_not"]) == (0, True, []), told["why_not"]
    assert found["embedded run"]["state"] in ("ok", "warn")
    assert found["cores"]["found"].startswith(f"{len(os.sched_getaffinity(0))} of ")
    assert found["library"]["state"] == "ok" and "two ranks met" in found["hello"]["found"]
    assert found["job"]["state"] == found["nodes"]["state"] == "skip"
    assert str(short_folder / "tmp") in found["scratch"]["found"]
    assert os.listdir(short_folder / "home") == os.listdir(short_folder / "tmp") == []


@pytest.mark.timeout(300)
def test_doctor_names_the_reasons_why_a_machine_cannot_run_the_main_job(tmp_path: Path) -> None:
    status, told = doctor(tmp_path, TANGRAM_CPUS="many", TMPDIR=str(tmp_path / "none"))
    found = by_name(told)
    assert status == 1 and not told["runs"]
    named = {line.split(":")[0] for line in told["why_not"]}
    assert {"settings", "scratch", "embedded run"} <= named
    assert "`cpus` (TANGRAM_CPUS)" in found["settings"]["found"]
    assert "a worker did not start" in found["embedded run"]["found"] or (
        "broker" in found["embedded run"]["found"])


def test_a_failed_rehearsal_of_doctor_leaves_nothing(short_folder: Path) -> None:
    """The worker's settings forbid it to start: the finding is one line, and nothing is left."""
    if not missing(RUNTIMES["enroot"]):
        pytest.skip("enroot is here, so that it may be asked for")
    given = {**os.environ, "TANGRAM_HOME": str(short_folder / "home"),
             "TANGRAM_ISOLATION": "enroot", "TMPDIR": str(short_folder)}
    found = rehearsal.run(CheckContext(given, Config.model_validate({}), "", SlurmFacts()))
    assert found.state == "fail" and "a worker did not start" in found.found
    assert os.listdir(short_folder) == []
