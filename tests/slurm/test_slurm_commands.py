"""The adapter over Slurm's commands, with fake commands: what their output means. The real ones are
in test_slurm_port.py."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tangram_hpc.domain.slurm import JobOrder
from tangram_hpc.ports import SlurmRejected, SlurmTransient
from tangram_hpc.slurm.commands import Commands

YEAR_S = 365 * 86_400
SQUEUE = """#!/bin/sh
row() {{
    printf "%s\037" "$1" {uid} 0 0 RUNNING None name cpu n1 "$2" "$3" 0 "(null)" "$1"
    printf "\036\n"
}}
row 7 1970-01-01T00:01:40 1970-01-01T00:05:00
row 8 1970-01-01T00:01:40 NONE
"""
LIMIT = """#!/bin/sh
echo "sbatch: lua: looking at the job" >&2
echo "sbatch: error: project ml-17 is temporarily out of GPU hours" >&2
echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2
echo "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy" >&2
exit 1
"""
WARNED = """#!/bin/sh
echo "squeue: error: Unable to establish control machine address" >&2
echo "slurm_load_jobs error: {}" >&2
exit 1
"""
FULL = """#!/bin/sh
echo "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying" >&2
exec sleep 100
"""


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Commands({"PATH": os.environ["PATH"]}, deadline_s=60)


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def test_a_job_without_a_time_limit_ends_in_a_year(tmp_path: Path, commands: Commands) -> None:
    """As slurmctld counts it. An end that is not known would leave the node with its earlier one,
    where `scontrol update TimeLimit=UNLIMITED` lifted the limit."""
    write(tmp_path, "squeue", SQUEUE.format(uid=os.geteuid()))
    rows = asyncio.run(commands.query([7, 8], ()))
    assert [(row.job, row.end_ns // 10**9) for row in rows] == [(7, 300), (8, 100 + YEAR_S)]


def test_a_refusal_has_all_that_slurm_said_of_it(tmp_path: Path, commands: Commands) -> None:
    """The limit, or the words of a site's job_submit plugin, come before the last line. Whether the
    call may be repeated is told by the last line alone."""
    write(tmp_path, "sbatch", LIMIT)
    with pytest.raises(SlurmRejected) as told:
        asyncio.run(commands.submit(JobOrder("#!/bin/sh\n")))
    assert str(told.value) == (
        "sbatch: project ml-17 is temporarily out of GPU hours; QOSMaxSubmitJobPerUserLimit; "
        "Batch job submission failed: Job violates accounting/QOS policy")


def test_the_last_line_of_a_refusal_decides_and_is_shown(tmp_path: Path, commands: Commands
                                                        ) -> None:
    """squeue says there why it failed; the lines before may be of slurm.conf or of one address."""
    write(tmp_path, "squeue", WARNED.format("Invalid job id specified"))
    assert asyncio.run(commands.query([7], ())) == ()
    write(tmp_path, "squeue", WARNED.format("Unable to contact slurm controller (connect failure)"))
    with pytest.raises(SlurmTransient) as told:
        asyncio.run(commands.query([7], ()))
    assert not told.value.unsure and str(told.value) == (
        "squeue: Unable to establish control machine address; slurm_load_jobs error: Unable to "
        "contact slurm controller (connect failure)")


def test_a_command_may_write_much_before_it_reads(tmp_path: Path, commands: Commands) -> None:
    """As a wrapper of sbatch that a site has may do. Its end must not be waited for for ever."""
    write(tmp_path, "sbatch", "#!/bin/sh\nhead -c 1000000 /dev/zero >&2; cat >/dev/null; echo 7\n")
    assert asyncio.run(commands.submit(JobOrder("#!/bin/sh\n" + "# " * 500_000))) == 7


def test_a_late_command_tells_what_it_waits_for(tmp_path: Path, commands: Commands) -> None:
    """sbatch repeats for two minutes what slurmctld refuses because it has MaxJobCount jobs."""
    commands = Commands({"PATH": os.environ["PATH"]}, deadline_s=3)
    write(tmp_path, "sbatch", FULL)
    with pytest.raises(SlurmTransient) as told:
        asyncio.run(commands.submit(JobOrder("#!/bin/sh\n")))
    assert told.value.unsure and str(told.value) == (
        "sbatch: no answer in 3 s; Slurm temporarily unable to accept job, sleeping and retrying")
