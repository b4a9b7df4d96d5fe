"""What every adapter of the Slurm port must do, on a real Slurm, as an ordinary user.

Run by `pytest slurm_contract.py` where Slurm's commands work: CONTRACT_ADAPTER is `cli` or
`pyslurm`, CONTRACT_FOREIGN a running job of another user (empty: not tried), CONTRACT_ACCOUNTING 1
where slurmdbd runs. Partitions `cpu` (two nodes or more) and `gpu`.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import pytest

from tangram_hpc.domain.slurm import JobOrder, JobRef, JobView
from tangram_hpc.ports import SlurmRejected, SlurmTransient
from tangram_hpc.slurm.adapter import SlurmAdapter
from tangram_hpc.slurm.choice import make_adapter

T = TypeVar("T")
ADAPTER = os.environ["CONTRACT_ADAPTER"]
FOREIGN = int(os.environ.get("CONTRACT_FOREIGN") or 0)
SLEEP = "#!/bin/sh\nexec sleep 600\n"
HET = ("#!/bin/sh\n#SBATCH --partition=cpu --nodes=1 --ntasks=1\n#SBATCH hetjob\n"
       "#SBATCH --partition=gpu --nodes=1 --ntasks=1\nexec sleep 600\n")
SMALL = (("ntasks", "1"), ("mem", "50"), ("time", "5"))


def with_adapter(work: Callable[[SlurmAdapter], Awaitable[T]], deadline_s: float = 60.0,
                 environ: Mapping[str, str] = os.environ) -> T:
    """What `work` returns, with an adapter of its own."""
    async def go() -> T:
        adapter = make_adapter(ADAPTER, environ, deadline_s)
        assert adapter.name == ADAPTER
        try:
            return await work(adapter)
        finally:
            await adapter.close()
    return asyncio.run(go())


def submit(name: str, script: str = SLEEP, *more: tuple[str, str],
           environ: tuple[tuple[str, str], ...] = ()) -> int:
    order = JobOrder(script, (("job-name", name), ("output", f"{name}.out"), *SMALL, *more),
                     environ)
    return with_adapter(lambda adapter: adapter.submit(order))


def query(*jobs: int, names: tuple[str, ...] = ()) -> tuple[JobView, ...]:
    return with_adapter(lambda adapter: adapter.query(jobs, names))


def cancel(*jobs: JobRef) -> None:
    with_adapter(lambda adapter: adapter.cancel(jobs))


def until(true: Callable[[], T], what: str, seconds: float = 60) -> T:
    deadline = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.2)
    return value


def running(job: int) -> tuple[JobView, ...]:
    return until(lambda: [r for r in [query(job)] if r and all(v.state == "RUNNING" for v in r)],
                 f"{job} to run")[0]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    subprocess.run(["scancel", "-u", str(os.geteuid())], check=True)


def test_a_job_from_submission_to_its_end() -> None:
    began = time.time_ns()
    job = submit("life", SLEEP, ("partition", "cpu"), ("comment", "as submitted"))
    (view,) = running(job)
    assert (view.job, view.component, view.name, view.partition) == (job, -1, "life", "cpu")
    assert len(view.nodes) == 1 and re.fullmatch(r"\w*c\d+", view.nodes[0])
    assert view.holds and not view.waits and not view.over and view.comment == "as submitted"
    assert abs(view.start_ns - began) < 120e9 and view.end_ns == view.start_ns + 300 * 10**9
    assert (view.restarts, view.reason) == (0, "")
    cancel(JobRef(job))
    over = until(lambda: [v for v in query(job) if v.over], f"{job} to end")[0]
    assert over.state == "CANCELLED" and 0 <= over.end_ns - over.start_ns < 120e9
    assert over.nodes == view.nodes


def test_what_waits_says_why() -> None:
    job = submit("held", SLEEP, ("partition", "cpu"), ("hold", ""))
    (view,) = query(job)
    assert view.waits and view.reason == "JobHeldUser" and view.nodes == ()
    assert (view.start_ns, view.end_ns) == (0, 0)
    cancel(JobRef(job))
    assert all(v.over for v in query(job))


def test_a_jobs_environment_is_told_and_not_inherited(tmp_path: Path) -> None:
    """A broker's own job must not shine through: its sizes would be taken for the new job's."""
    inside = {**os.environ, "SLURM_JOB_ID": "1", "SLURM_NTASKS": "7", "SBATCH_PARTITION": "gpu",
              "SLURM_HET_SIZE": "3", "SQUEUE_FORMAT": "%i", "SQUEUE_STATES": "FAILED",
              "SLURM_CLUSTERS": "elsewhere", "PMI_RANK": "0", "TANGRAM_JOB": "1", "OWN": "kept"}
    out = Path("environ.out").absolute()
    out.unlink(missing_ok=True)
    order = JobOrder("#!/bin/sh\nenv; echo end\n", (
        ("job-name", "environ"), ("output", str(out)), ("partition", "cpu"), *SMALL),
        (("TOLD", "two words"),))
    job = with_adapter(lambda adapter: adapter.submit(order), environ=inside)
    said = until(lambda: out.exists() and (text := out.read_text()).endswith("end\n") and text,
                 "the job's output").splitlines()
    assert {"OWN=kept", "TOLD=two words", f"SLURM_JOB_ID={job}", "SLURM_JOB_PARTITION=cpu"} <= {
        *said}
    assert not [line for line in said if line.startswith(("PMI_", "TANGRAM_", "SLURM_HET"))]
    found = with_adapter(lambda adapter: adapter.query([job], ()), environ=inside)
    assert [v.job for v in found] == [job]


def test_the_scripts_own_lines_count_and_options_win() -> None:
    script = "#!/bin/sh\n#SBATCH --partition=gpu --comment=script\n#SBATCH --hold\n" + SLEEP[10:]
    one, two = submit("own", script), submit("won", script, ("comment", "option"))
    told = {v.name: v for v in query(one, two)}
    assert {v.partition for v in told.values()} == {"gpu"} and all(v.waits for v in told.values())
    assert (told["own"].comment, told["won"].comment) == ("script", "option")


def test_many_jobs_are_one_question() -> None:
    run = f"many-{time.time_ns()}-"  # Slurm remembers those of an earlier run
    jobs = [submit(f"{run}{n}", SLEEP, ("partition", "cpu"), ("hold", "")) for n in range(4)]
    assert [v.job for v in query(*jobs[:3])] == jobs[:3]
    assert [v.job for v in query(jobs[0], names=(f"{run}2", "nobody"))] == [jobs[0], jobs[2]]
    assert [v.job for v in query(names=(f"{run}3",))] == [jobs[3]]
    assert [v.job for v in query(jobs[1], 99_999_999)] == [jobs[1]]
    assert query(99_999_999) == () and query(names=("nobody",)) == ()
    cancel(*map(JobRef, jobs))
    assert all(v.over for v in query(*jobs))


def test_components_of_a_het_job() -> None:
    job = submit("het", HET)
    rows = running(job)
    assert [(v.job, v.component, v.partition) for v in rows] == [(job, 0, "cpu"), (job, 1, "gpu")]
    assert len({n for v in rows for n in v.nodes}) == 2
    cancel(JobRef(job, 1))
    rows = until(lambda: [r for r in [query(job)] if r[1].over], "component 1 to end")[0]
    assert rows[0].state == "RUNNING" and rows[1].state == "CANCELLED"
    cancel(JobRef(job, 1), JobRef(job, 5))  # over, and never there
    cancel(JobRef(job))
    until(lambda: all(v.over for v in query(job)), "the het job to end")


def test_one_component_of_a_waiting_het_job_cannot_be_ended() -> None:
    script = HET.replace("--partition=cpu", "--partition=cpu --hold").replace(
        "--partition=gpu", "--partition=gpu --hold")
    job = submit("hetheld", script)
    assert [v.component for v in query(job)] == [0, 1] and all(v.waits for v in query(job))
    with pytest.raises(SlurmRejected):
        cancel(JobRef(job, 1))
    cancel(JobRef(job, 0))
    until(lambda: all(v.over for v in query(job)), "all of it to end")


def test_a_requeued_job_is_counted() -> None:
    job = submit("again", SLEEP, ("partition", "cpu"), ("requeue", ""))
    running(job)
    subprocess.run(["scontrol", "requeue", str(job)], check=True)
    view = until(lambda: [v for v in query(job) if v.restarts and v.waits], "it to be requeued")[0]
    assert view.restarts == 1


@pytest.mark.parametrize(("option", "said"), [
    (("partition", "nowhere"), "partition"), (("qos", "royal"), "qos"),
    (("account", "theirs"), "account"), (("time", "soon"), "time"),
    (("gres", "dragon:1"), "gres|gpu|generic"), (("mem", "999999999"), "memory|node config")])
def test_a_refusal_is_for_good(option: tuple[str, str], said: str) -> None:
    more = [o for o in SMALL if o[0] != option[0]] + [option]
    order = JobOrder(SLEEP, (("job-name", "refused"), ("partition", "cpu"), *more))
    if option[0] in ("qos", "account") and not os.environ.get("CONTRACT_ACCOUNTING"):
        pytest.skip("without accounting Slurm takes any")
    with pytest.raises(SlurmRejected) as refused:
        with_adapter(lambda adapter: adapter.submit(order))
    assert re.search(said, str(refused.value), re.IGNORECASE), str(refused.value)
    assert "\n" not in str(refused.value)
    assert all(v.over for v in query(names=("refused",)))  # Slurm may keep a record of it


def test_what_is_over_or_unknown_counts_as_ended() -> None:
    job = submit("short", "#!/bin/sh\nexit 3\n", ("partition", "cpu"))
    view = until(lambda: [v for v in query(job) if v.over], "it to end")[0]
    assert (view.state, view.reason) == ("FAILED", "NonZeroExitCode")
    cancel(JobRef(job), JobRef(99_999_999))
    cancel()


@pytest.mark.skipif(not FOREIGN, reason="no job of another user")
def test_a_job_of_another_user_is_not_ours() -> None:
    assert query(FOREIGN) == ()
    with pytest.raises(SlurmRejected):
        cancel(JobRef(FOREIGN))
    with pytest.raises(SlurmRejected):
        with_adapter(lambda adapter: adapter.comment(FOREIGN, "mine"))


HARD = "a=1, b='two' \"c\" d|e f=50% \\ ; $HOME"


def test_a_comment() -> None:
    """Others' words stay in front; ours are replaced."""
    job, plain = (submit("remark", SLEEP, ("partition", "cpu"), *more)
                  for more in ([("comment", "grant 7; x|y")], []))
    running(job)
    running(plain)
    for text in (HARD, "x" * 250):
        for each, others in ((job, "grant 7; x|y; "), (plain, "")):
            with_adapter(lambda f, each=each, text=text: f.comment(each, text))
            assert query(each)[0].comment == f"{others}tangram: {text}"
    for bad in ("two\nlines", "x" * 251):
        with pytest.raises(SlurmRejected):
            with_adapter(lambda f, bad=bad: f.comment(plain, bad))
    assert query(plain)[0].comment == "tangram: " + "x" * 250


@pytest.mark.skipif(not os.environ.get("CONTRACT_ACCOUNTING"), reason="no slurmdbd")
def test_a_comment_of_a_job_that_is_over() -> None:
    def in_accounting() -> str:
        argv = ["sacct", "-n", "-X", "-P", "-j", str(job), "-o", "State,UID,Comment"]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()

    job = submit("late", "#!/bin/sh\nexit 0\n", ("partition", "cpu"), ("comment", "grant 7"))
    known = f"COMPLETED|{os.geteuid()}|"  # its owner comes a moment after its end
    until(lambda: in_accounting().startswith(known), "accounting to have its end")
    with_adapter(lambda adapter: adapter.comment(job, "actions=1 act_mean=2.5s"))
    until(lambda: in_accounting() == f"{known}grant 7; tangram: actions=1 act_mean=2.5s", "it")
    with pytest.raises(SlurmRejected):
        with_adapter(lambda adapter: adapter.comment(99_999_999, "nobody's"))


def other_controller(tmp_path: Path, port: int) -> dict[str, str]:
    """An environment whose Slurm listens at another port."""
    conf = Path(os.environ["SLURM_CONF"]).read_text()
    conf = re.sub(r"(?m)^SlurmctldPort=.*$", f"SlurmctldPort={port}", conf)
    path = tmp_path / "slurm.conf"
    path.write_text(re.sub(r"(?m)^MessageTimeout=.*$", "MessageTimeout=1", conf))
    return {**os.environ, "SLURM_CONF": str(path)}


def calls() -> list[Callable[[SlurmAdapter], Awaitable[object]]]:
    order = JobOrder(SLEEP, (("job-name", "never"), ("partition", "cpu"), *SMALL))
    return [lambda f: f.query([1], ()), lambda f: f.submit(order),
            lambda f: f.cancel([JobRef(1)]), lambda f: f.comment(1, "x")]


def test_a_controller_that_is_away_means_not_now(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("", 0))
        environ = other_controller(tmp_path, closed.getsockname()[1])
        for call in (asked := calls()):
            with pytest.raises(SlurmTransient) as told:
                with_adapter(call, 60.0, environ)
            assert "\n" not in str(told.value)
            assert call is not asked[1] or not told.value.unsure, str(told.value)


def test_a_controller_that_is_silent_means_not_now_and_leaves_nothing(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("", 0))  # slurm.conf may have another address than the loopback
        silent.listen(64)
        environ = other_controller(tmp_path, silent.getsockname()[1])
        for call in calls():
            with pytest.raises(SlurmTransient) as told:
                with_adapter(call, 0.5, environ)
            assert told.value.unsure and "no answer in 0.5 s" in str(told.value), str(told.value)
    left = subprocess.run(["pgrep", "-f", f"{tmp_path}|{environ['SLURM_CONF']}|pyslurm_child"],
                          capture_output=True, text=True, check=False).stdout
    assert left == ""


def test_a_configuration_that_is_gone_is_told_at_once(tmp_path: Path) -> None:
    environ = {**os.environ, "SLURM_CONF": str(tmp_path / "gone.conf")}
    for call in calls():
        with pytest.raises(SlurmTransient, match=r"gone\.conf"):
            with_adapter(call, 20.0, environ)
