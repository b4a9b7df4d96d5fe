"""The child process that calls pyslurm, with a fake pyslurm beneath it: what it answers, and what
happens when it hangs, crashes or cannot start. The real one is tested in test_slurm_port.py where
pyslurm fits the site's Slurm."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from tangram_hpc.domain.slurm import JobOrder, JobRef, JobView
from tangram_hpc.errors import MissingExtra
from tangram_hpc.ports import SlurmRejected, SlurmTransient
from tangram_hpc.slurm.binding import Pyslurm, PyslurmUnusable
from tangram_hpc.slurm.choice import Auto, make_adapter

T = TypeVar("T")
FAKE = Path(__file__).resolve().parent.parent / "data" / "fake_pyslurm"
SCRIPT = "#!/bin/sh\n"


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def environ(role: str = "") -> dict[str, str]:
    paths = os.pathsep.join([str(FAKE), os.environ.get("PYTHONPATH", "")])
    return {"PATH": os.environ["PATH"], "PYTHONPATH": paths, "FAKE_PYSLURM": role,
            "SLURM_JOB_ID": "9"}


def ask(work: Callable[[Pyslurm], Awaitable[T]], role: str = "") -> T:
    async def go() -> T:
        adapter = Pyslurm(environ(role))
        try:
            return await work(adapter)
        finally:
            await adapter.close()
            assert adapter.pid == 0
    return asyncio.run(go())


def test_the_pyslurm_child_answers_with_the_types_of_the_port(where: Path) -> None:
    async def work(adapter: Pyslurm) -> None:
        rows = await adapter.query([1, 2, 5], ["nobody"])
        assert [(r.job, r.component) for r in rows] == [(1, -1), (5, 0), (5, 1)]
        assert rows[0] == JobView(1, -1, "RUNNING", "", "j1", "cpu", ("c1", "c2"), 100 * 10**9,
                                  200 * 10**9, 0, "grant 7")
        assert [r.job for r in await adapter.query([], ["j1"])] == [1]
        pid = adapter.pid
        await adapter.comment(1, "a=1")
        assert (where / "comment").read_text() == "grant 7; tangram: a=1"
        await adapter.cancel([JobRef(1), JobRef(5, 0), JobRef(5, 7)])
        assert (where / "cancelled").read_text() == "1 5 "
        assert adapter.pid == pid and adapter.version == "0.fake"
        with pytest.raises(SlurmRejected, match="individual component"):
            await adapter.cancel([JobRef(5, 1), JobRef(1)])
        assert (where / "cancelled").read_text() == "1 5 1 "
    ask(work)


def test_the_comment_of_an_element_of_an_array_is_left_to_the_commands(where: Path) -> None:
    """pyslurm would change all elements: the last one has the number of the whole array."""
    rows = "\\037".join(["3", str(os.geteuid()), "0", "0", "RUNNING", "None", "n", "cpu", "c1", "",
                         "", "0", "last", "3_7"]) + "\\036"
    for name, text in (("squeue", f"printf '{rows}'"), ("scontrol", 'echo "$*" > changed')):
        (where / name).write_text(f"#!/bin/sh\n{text}\n")
        (where / name).chmod(0o755)

    async def go() -> None:
        adapter = Pyslurm({**environ(), "PATH": f"{where}:{os.environ['PATH']}"})
        try:
            await adapter.comment(3, "a=1")
        finally:
            await adapter.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{where}:{os.environ['PATH']}")
        asyncio.run(go())
    assert (where / "changed").read_text() == "update jobid=3_7 comment=last; tangram: a=1\n"
    assert not (where / "comment").exists()


def test_a_job_is_submitted_with_its_options(where: Path) -> None:
    script = "#!/bin/sh\n#SBATCH --partition=gpu --time=5\n#SBATCH --no-requeue\ntrue\n#SBATCH -x\n"
    order = JobOrder(script, (("partition", "cpu"), ("ntasks", "2")), (("A", "b c"),))
    assert ask(lambda adapter: adapter.submit(order)) == 41
    told = eval((where / "submitted").read_text())
    assert {k: v for k, v in told.items() if k not in ("environment", "script")} == {
        "partitions": "cpu", "ntasks": 2, "time_limit": 5, "is_requeueable": False}
    assert told["script"] == script and told["environment"]["A"] == "b c"
    assert "SLURM_JOB_ID" not in told["environment"]
    with pytest.raises(SlurmRejected, match="Invalid partition name"):
        ask(lambda adapter: adapter.submit(JobOrder(SCRIPT, (("partition", "nowhere"),))))


@pytest.mark.parametrize("order", [
    JobOrder(SCRIPT + "#SBATCH hetjob\n"), JobOrder(SCRIPT + "#SBATCH -p cpu\n"),
    JobOrder(SCRIPT, (("exclusive", ""),)), JobOrder(SCRIPT, (("gpus-per-task", "1"),))])
def test_a_job_with_options_unknown_to_pyslurm_goes_to_sbatch(where: Path, order: JobOrder) -> None:
    (where / "sbatch").write_text("#!/bin/sh\ncat > script; echo \"$@\" > words; echo '42;here'\n")
    (where / "sbatch").chmod(0o755)

    async def work() -> int:
        adapter = Pyslurm({**environ(), "PATH": f"{where}:{os.environ['PATH']}"})
        try:
            return await adapter.submit(order)
        finally:
            await adapter.close()
    assert asyncio.run(work()) == 42
    assert (where / "script").read_text() == order.script
    assert (where / "words").read_text().startswith("--parsable")


@pytest.mark.parametrize(("role", "said"), [("hang", "no answer in 0.5 s"), ("crash", "-11")])
def test_a_pyslurm_child_that_hangs_or_crashes_is_restarted(
        where: Path, role: str, said: str) -> None:
    async def work(adapter: Pyslurm) -> None:
        await adapter.cancel([JobRef(1)])
        first, adapter._child.deadline_s = adapter.pid, 0.5 if role == "hang" else 60.0
        with pytest.raises(SlurmTransient, match=said) as told:
            await adapter.query([1], [])
        assert told.value.unsure and not isinstance(told.value, PyslurmUnusable)
        assert adapter.pid == 0 and not os.path.exists(f"/proc/{first}")
        adapter._child.deadline_s = 60.0
        await adapter.cancel([JobRef(1)])
        assert adapter.pid not in (0, first)
    ask(work, role)


def test_the_event_loop_runs_on_while_the_pyslurm_child_hangs(where: Path) -> None:
    async def work(adapter: Pyslurm) -> None:
        await adapter.cancel([JobRef(1)])
        adapter._child.deadline_s = 0.5
        beats, done = 0, asyncio.ensure_future(adapter.query([1], []))
        while not done.done():
            await asyncio.sleep(0.01)
            beats += 1
        assert beats > 2 and isinstance(done.exception(), SlurmTransient)
    ask(work, "hang")


def test_an_error_reported_by_slurm_does_not_end_the_pyslurm_child(where: Path) -> None:
    async def work(adapter: Pyslurm) -> None:
        with pytest.raises(SlurmTransient, match="Unable to contact"):
            await adapter.query([1], [])
        assert adapter.pid
    ask(work, "away")


def test_auto_falls_back_to_commands_when_the_pyslurm_child_cannot_start(where: Path) -> None:
    with pytest.raises(PyslurmUnusable, match="fake: fatal: Could not establish"):
        ask(lambda adapter: adapter.query([1], []), "exit")
    (where / "squeue").write_text("#!/bin/sh\n")
    (where / "squeue").chmod(0o755)

    async def both() -> None:
        told = {**environ("exit"), "PATH": f"{where}:{os.environ['PATH']}"}
        adapter = make_adapter("cli", told)
        auto = Auto(Pyslurm(told), adapter)
        assert auto.name == "pyslurm"
        assert await auto.query([1], []) == () and auto.name == "cli"
        assert await auto.query([1], []) == ()
        await auto.close()
    asyncio.run(both())


def test_a_cancelled_query_leaves_no_pyslurm_child(where: Path) -> None:
    async def work() -> int:
        adapter = Pyslurm(environ("hang"))
        task = asyncio.ensure_future(adapter.query([1], []))
        while not adapter.version:
            await asyncio.sleep(0.01)
        pid = adapter.pid
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        return pid
    pid = asyncio.run(work())
    deadline = time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.skipif(importlib.util.find_spec("pyslurm") is not None, reason="pyslurm is there")
def test_the_pyslurm_adapter_names_its_extra_where_it_is_missing() -> None:
    with pytest.raises(MissingExtra, match=r"pip install .*\[pyslurm\]"):
        make_adapter("pyslurm", {})
    assert make_adapter("auto", {}).name == "cli"
