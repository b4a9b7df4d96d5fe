"""`tangram rank`: the role that it gives a task, the environment that it passes on, and the program
that it becomes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tangram_hpc.app.broker_location import await_access
from tangram_hpc.app.local import LocalCluster
from tangram_hpc.app.trainer_rank import (
    TrainerTask,
    affinity_complaint,
    master_address,
    rank_of,
    trainer_environment,
)
from tangram_hpc.errors import BrokerUnreachable, WrongWorld

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
PMI = {**STEP, "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "9"}
TORCH = {"TORCHELASTIC_RUN_ID": "x", "RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "5",
         "MASTER_ADDR": "h", "MASTER_PORT": "1"}
HOW_MPI_WAITS = {"MPIR_CVAR_ENABLE_HEAVY_YIELD", "I_MPI_THREAD_YIELD"}

# ---- what was launched -------------------------------------------------------------------------


@pytest.mark.parametrize(("environ", "gateway", "mpi", "want"), [
    (PMI, "auto", True, TrainerTask(3, 4, 1, True)),
    # no mpi4py: its trainers are none of ours by MPI
    (PMI, "auto", False, TrainerTask(3, 4, 1, False)),
    (PMI, "off", True, TrainerTask(3, 4, 1, False)),
    (STEP, "auto", True, TrainerTask(3, 4, 1, False)),  # --mpi=none
    ({**PMI, "TANGRAM_WORLD_SIZE": "4"}, "on", True, TrainerTask(3, 4, 1, True)),
    ({**PMI, "PMI_SIZE": "1", "PMI_RANK": "0"}, "auto", True, TrainerTask(0, 1, 1, False)),
    ({**STEP, "PMIX_RANK": "2"}, "on", True, TrainerTask(2, 4, 1, True)),
    ({}, "auto", True, TrainerTask(0, 1, 0, False)),
    ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}, "auto", True, TrainerTask(0, 1, 0, False)),
    ({**STEP, **TORCH}, "auto", True, TrainerTask(5, 16, 5, False)),
    ({**PMI, **TORCH}, "auto", True, TrainerTask(5, 16, 5, False)),  # torchrun in an MPI step
])
def test_the_role_of_a_task_follows_from_its_environment(
        environ: dict[str, str], gateway: str, mpi: bool, want: TrainerTask) -> None:
    assert rank_of(environ, gateway, mpi) == want


@pytest.mark.parametrize(("environ", "gateway", "said"), [
    ({**PMI, "TANGRAM_WORLD_SIZE": "9"}, "auto", "--ntasks=9"),
    ({**STEP, "TANGRAM_WORLD_SIZE": "9"}, "auto", "9 ranks were meant"),
    (STEP, "on", "MPI world of 4 ranks"),
    ({}, "on", "--gateway off"),
    ({**PMI, "PMI_SIZE": "1", "PMI_RANK": "0"}, "on", "start at least 2"),
    ({**STEP, **TORCH}, "on", "--gateway off"),
    ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, "auto", "srun tangram rank"),
    ({**STEP, "RANK": "0"}, "auto", "RANK=0 is set"),
    ({**STEP, "WORLD_SIZE": "8"}, "off", "WORLD_SIZE=8 is set"),
])
def test_a_world_of_another_size_than_intended_is_refused_in_one_line(
        environ: dict[str, str], gateway: str, said: str) -> None:
    with pytest.raises(WrongWorld, match=r"\A[^\n]*\Z") as told:
        rank_of(environ, gateway, True)
    assert said in str(told.value)


@pytest.mark.parametrize(("asked", "usable", "online", "wrong"), [
    ("8", 2, 64, True), ("8", 8, 64, False), ("8", 64, 64, False), ("", 1, 64, False),
    ("8", 2, 2, False),  # the machine has no more, whatever Slurm was told
    ("8", 1, 2, True)])
def test_cpus_per_task_that_srun_ignored_is_reported(
        asked: str, usable: int, online: int, wrong: bool) -> None:
    told = affinity_complaint({"SLURM_CPUS_PER_TASK": asked}, usable, online)
    assert bool(told) == wrong and ("--cpus-per-task=8" in told) == wrong


# ---- what its program finds ----------------------------------------------------------------------


def test_the_trainer_environment_is_set_without_replacing_user_values() -> None:
    before = {"PATH": "/bin", "MASTER_PORT": "77", "TANGRAM_WORLD_SIZE": "4"}
    made = trainer_environment(before, TrainerTask(1, 4, 1, True), "7", "/a", ("host", 5))
    assert made == {"PATH": "/bin", "TANGRAM_JOB": "7", "TANGRAM_ACCESS": "/a",
                    "TANGRAM_GATEWAY": "1", "TANGRAM_WORLD_SIZE": "4", "RANK": "1",
                    "WORLD_SIZE": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "host",
                    "MASTER_PORT": "77"}
    made = trainer_environment({**before, "TANGRAM_GATEWAY": "1"}, TrainerTask(1, 4, 1, False), "7",
                               "/a", None)
    assert not {"TANGRAM_GATEWAY", "TANGRAM_WORLD_SIZE", "MASTER_ADDR"} & made.keys()
    assert made["WORLD_SIZE"] == "4"
    # the gateway
    assert "RANK" not in trainer_environment(before, TrainerTask(3, 4, 1, True), "7", "/a", None)
    for oversubscribed in (False, True):  # how MPI waits; without MPI nothing is said of it
        made = trainer_environment(before, TrainerTask(3, 4, 1, True), "7", "/a", None,
                                   oversubscribed)
        assert (made.keys() >= HOW_MPI_WAITS) == oversubscribed
    assert trainer_environment(before, TrainerTask(1, 4, 1, False), "7", "/a", None,
                               True).keys().isdisjoint(HOW_MPI_WAITS)


def test_all_ranks_meet_at_the_address_of_rank_0(tmp_path: Path) -> None:
    """The other ranks wait for rank 0's file, and ignore the file of an earlier start of the
    job."""
    (tmp_path / "rank0.7.3.0").write_text("old 1\n")
    environ = {**STEP, "SLURM_RESTART_COUNT": "2"}
    told: list[Any] = []
    waits = [threading.Thread(target=lambda n=n: told.append(
        master_address(environ, TrainerTask(n, 4, 0, True), tmp_path, "127.0.0.1"))) for n in (1,
                                                                                               2)]
    for thread in waits:
        thread.start()
    first = master_address(environ, TrainerTask(0, 4, 0, True), tmp_path, "127.0.0.1")
    for thread in waits:
        thread.join(30)
    assert told == [first, first] and first[0] == "127.0.0.1" and 0 < first[1] < 65536
    assert (tmp_path / "rank0.7.3.2").stat().st_mode & 0o777 == 0o600
    with pytest.raises(BrokerUnreachable, match="rank 0 of this step did not write it"):
        master_address(STEP | {"SLURM_STEP_ID": "4"}, TrainerTask(1, 4, 0, True), tmp_path,
                       "127.0.0.1", 0.1)


# ---- what it becomes -----------------------------------------------------------------------------

SHOW = ("import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith("
        "('TANGRAM_', 'MASTER_', 'RANK', 'WORLD_', 'LOCAL_'))}))")


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with LocalCluster(2, home=str(tmp_path_factory.mktemp("home"))) as cluster:
        yield cluster


def rank(held: Any, *words: str, before: tuple[str, ...] = (), **environ: str
         ) -> subprocess.Popen[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "TANGRAM", "PMI"))}
    env |= {"TANGRAM_ACCESS": str(held.access), **environ}
    return subprocess.Popen([*before, sys.executable, "-m", "tangram_hpc", "rank", *words],
                            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_ranks_of_a_torchrun_style_trainer_get_one_world(held: Any) -> None:
    """Each rank is started as srun does: one world, one address to meet, and the program's own
    status."""
    ranks = [rank(held, "--step-file", str(held.folder / "step"), "--", sys.executable, "-c",
                  SHOW + "; raise SystemExit(7)", **STEP | {"SLURM_PROCID": str(n),
                                                            "SLURM_STEP_NODELIST": "n[1-2]"})
             for n in range(4)]
    told = [json.loads(r.communicate(timeout=60)[0]) for r in ranks]
    assert [r.returncode for r in ranks] == [7] * 4
    assert [t["RANK"] for t in told] == list("0123") and {t["WORLD_SIZE"] for t in told} == {"4"}
    assert len({(t["MASTER_ADDR"], t["MASTER_PORT"]) for t in told}) == 1
    assert {t["TANGRAM_JOB"] for t in told} == {held.job}
    assert (held.folder / "step").read_text() == "3\n"
    assert (held.folder / "step.nodes").read_text() == "n[1-2]\n"


def test_a_home_that_nodes_do_not_share_is_named_as_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(BrokerUnreachable, match="set TANGRAM_HOME to a folder on a file system"):
        await_access(tmp_path / "access.json", 0)


def test_signals_reach_the_trainer_program_directly(held: Any) -> None:
    """`tangram rank` is replaced by the program, so that no process stands between."""
    run = rank(held, "--", "sh", "-c", "trap 'echo heard; exit 5' TERM; echo up; "
               "while :; do sleep 0.05; done")
    assert run.stdout is not None and run.stdout.readline() == "up\n"
    run.send_signal(signal.SIGTERM)
    out, err = run.communicate(timeout=60)
    assert (run.returncode, out, err) == (5, "heard\n", "")
    ignored = [sys.executable, "-c", "print(open('/proc/self/status').read().split('SigIgn:')[1]"
               ".split()[0])"]
    run = rank(held, "--", *ignored)
    plain = subprocess.run(ignored, capture_output=True, text=True, check=True).stdout
    # posix_spawn, which Python 3.13 uses here, leaves the C library's own signals ignored
    own = 1 << 32 - 1 | 1 << 33 - 1
    assert int(run.communicate(timeout=60)[0], 16) & ~own == int(plain, 16) & ~own


@pytest.mark.parametrize(("words", "said", "status"), [
    (("--",), "it needs a command, as in", 2), (("--", "/no/such/program"), "/no/such/program", 2),
    (("--gateway", "on", "--", "true"), "MPI world of 4 ranks", 2)])
def test_an_error_common_to_all_ranks_is_printed_by_rank_0_only(
        held: Any, words: tuple[str, ...], said: str, status: int) -> None:
    runs = [rank(held, *words, **STEP | {"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)})
            for n in range(1 if "/no" in words[-1] else 2)]
    told = [run.communicate(timeout=60)[1] for run in runs]
    assert [run.returncode for run in runs] == [status] * len(runs)
    assert told[0].count("\n") == 1 and said in told[0] and told[1:] == [""] * (len(runs) - 1)


def test_an_error_of_one_node_is_printed_by_its_first_rank_only(held: Any) -> None:
    """The access file there must not be trusted: rank 2 reports it for its node, and rank 3 prints
    nothing."""
    copy = held.folder / "copy.json"
    shutil.copy(held.access, copy)
    copy.chmod(0o644)
    runs = [rank(held, "--access", str(copy), "--", "true",
                 **STEP | {"SLURM_PROCID": proc, "SLURM_LOCALID": local})
            for proc, local in (("2", "0"), ("3", "1"))]
    told = [run.communicate(timeout=60)[1] for run in runs]
    assert [run.returncode for run in runs] == [2, 2]
    assert told[1] == "" and told[0].count("\n") == 1
    assert "rank 2 on " in told[0] and "mode 0644" in told[0]


@pytest.mark.skipif(not shutil.which("mpiexec", path=str(Path(sys.executable).parent)),
                    reason="MPI is not installed")
def test_tangram_rank_adds_a_gateway_to_an_mpi_world(held: Any) -> None:
    """One command line starts two trainers and the gateway; without it the same program uses the
    socket."""
    program = ("import os, tangram_hpc\n"
               "with tangram_hpc.connect() as c:\n"
               "    n = tangram_hpc.comm.size if c.via == 'mpi' else 0\n"
               "    told = os.environ['RANK'], os.environ['WORLD_SIZE'], n, c.via\n"
               "    line = *told, c.submit(pow, 2, 5).result(60)\n"
               "    os.write(1, (' '.join(map(str, line)) + '\\n').encode())")  # whole, or mixed
    mpiexec = (str(Path(sys.executable).parent / "mpiexec"), "-n", "3")
    run = rank(held, "--", sys.executable, "-c", program, before=mpiexec)
    out, err = run.communicate(timeout=90)
    assert run.returncode == 0, err
    assert sorted(out.splitlines()) == ["0 2 2 mpi 32", "1 2 2 mpi 32"]
    assert err.splitlines()[0] == ("tangram: 2 trainer ranks, and rank 2 is the gateway "
                                   "(with --gateway off, all 3 ranks are trainers)")
    run = rank(held, "--gateway", "off", "--", sys.executable, "-c", program, before=mpiexec)
    out, err = run.communicate(timeout=90)
    assert sorted(out.splitlines()) == [f"{n} 3 0 socket 32" for n in range(3)], err
