"""A job's summary in its Comment, and the meaning of Slurm's words. Nothing here calls Slurm."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from helpers.builders import World
from hypothesis import given
from hypothesis import strategies as st

from tangram_hpc.accounting.record import Fold, fold
from tangram_hpc.accounting.summary import TEXT_MAX, summary
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.slurm import COMMENT_MAX, JobView, with_job_comment
from tangram_hpc.domain.states import ActionState
from tangram_hpc.ports import SlurmRejected, SlurmTransient
from tangram_hpc.slurm.adapter import failure
from tangram_hpc.slurm.commands import Commands
from tangram_hpc.slurm.hostlist import expand
from tangram_hpc.slurm.job_environment import slurm_command_environment

HOUR = 3600 * 10**9


def test_a_job_summary_counts_actions_act_and_cpu_hours() -> None:
    w = World("static:2")
    w.node(cpus=4)
    one, two, waits = (w.submit(2) for _ in range(3))
    w.plan()
    w.now = HOUR
    w.happen(ev.LeaseFinished(HOUR, w.lease_of(one), Outcome(
        ActionState.COMPLETED, cpu_ns=HOUR), True))
    w.happen(ev.LeaseFinished(HOUR, w.lease_of(two), Outcome(ActionState.FAILED), True))
    w.happen(ev.ActionCancelled(HOUR, waits, "enough"))
    w.now = 2 * HOUR
    still = w.submit(2)
    assert still and summary(fold(w.events)) == (
        "actions=4 act_mean=3600.000s cpu_held=8.00h cpu_lent=50% cpu_used=12% pending=1 "
        "completed=1 failed=1 cancelled=1")


def test_the_summary_of_a_job_without_actions_is_short() -> None:
    assert summary(Fold()) == "actions=0 cpu_held=0.00h"


def test_a_job_summary_fits_into_the_comment_with_any_values() -> None:
    folded = Fold()
    w = World()
    for n, state in enumerate(ActionState):
        record = fold([ev.ActionSubmitted(0, w.scheduler.ledger.actions[w.submit()].action)]
                      ).records.popitem()[1]
        record.state, record.end_ns = state, 10**18
        folded.records[n] = record
    folded.usage.held_ns = folded.usage.lent_ns = folded.usage.burnt_ns = 10**24
    text = summary(folded)
    assert text.startswith("actions=10 act_mean=") and " cpu_used=100% " in text
    assert len(text) <= TEXT_MAX < COMMENT_MAX
    assert all("=" in word for word in text.split(" ")) and "pending=1" in text


@pytest.mark.parametrize(("old", "new"), [
    ("", "tangram: a=1"), ("grant 7", "grant 7; tangram: a=1"),
    ("tangram: a=0 b=2", "tangram: a=1"), ("grant 7; tangram: a=0", "grant 7; tangram: a=1"),
    ("grant 7;  ", "grant 7; tangram: a=1")])
def test_the_rest_of_a_job_comment_is_kept(old: str, new: str) -> None:
    assert with_job_comment(old, "a=1") == new
    assert with_job_comment(new, "a=1") == new


@pytest.mark.parametrize(("text", "names"), [
    ("", ()), ("c1", ("c1",)), ("c[1-3,7],g1", ("c1", "c2", "c3", "c7", "g1")),
    ("n[008-011]", ("n008", "n009", "n010", "n011")),
    ("r[1-2]n[1-2]x", ("r1n1x", "r1n2x", "r2n1x", "r2n2x")), ("a, b", ("a", "b"))])
def test_a_hostlist_is_expanded_into_node_names(text: str, names: tuple[str, ...]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize("text", ["c[1-", "c]1[", "c[a-b]", "c[1--2]", "c[1-99999999]",
                                  "c[1-999]d[1-999]", "c[]"])
def test_a_malformed_hostlist_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        expand(text)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=50), st.integers(1, 7))
def test_a_hostlist_of_any_numbers_is_expanded(numbers: list[int], width: int) -> None:
    inside = ",".join(str(n).zfill(width) for n in numbers)
    assert expand(f"node[{inside}]") == tuple(f"node{str(n).zfill(width)}" for n in numbers)


@pytest.mark.parametrize(("text", "kind", "unsure"), [
    ("Batch job submission failed: Invalid partition name specified", SlurmRejected, None),
    ("Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's "
     "size and/or time limits)", SlurmRejected, None),
    ("Batch job submission failed: Unable to contact slurm controller (connect failure)",
     SlurmTransient, False),
    ("Batch job submission failed: Unable to contact slurm controller (receive failure)",
     SlurmTransient, True),
    ("Batch job submission failed: Socket timed out on send/recv operation", SlurmTransient, True),
    ("slurm_load_jobs error: Rate limit exceeded, please retry momentarily", SlurmTransient, False),
    ("Batch job submission failed: Unable to create job record, try again", SlurmTransient, False),
    ("slurm_load_jobs error: Slurm backup controller in standby mode", SlurmTransient, False),
    ("Munge encode failed: Failed to access \"/run/munge/munge.socket.2\"", SlurmTransient, False),
    ("something that no release says yet", SlurmRejected, None)])
def test_slurm_error_messages_are_classified_as_rejected_transient_or_unsure(
        text: str, kind: type, unsure: bool | None) -> None:
    told = failure(text)
    assert type(told) is kind and str(told) == text
    assert getattr(told, "unsure", None) == unsure


@pytest.mark.parametrize(("state", "word"), [
    ("PENDING", "waits"), ("REQUEUE_HOLD", "waits"), ("RUNNING", "holds"), ("COMPLETING", "holds"),
    ("CONFIGURING", "holds"), ("SUSPENDED", "holds"), ("COMPLETED", "over"), ("TIMEOUT", "over"),
    ("NODE_FAIL", "over")])
def test_each_slurm_job_state_counts_as_waiting_holding_or_over(state: str, word: str) -> None:
    view = JobView(1, -1, state)
    assert [w for w in ("waits", "holds", "over") if getattr(view, w)] == [word]


def test_slurm_commands_get_no_environment_of_the_own_job() -> None:
    environ = {"PATH": "/bin", "HOME": "/h", "SLURM_CONF": "/etc/slurm.conf", "SLURM_JWT": "x",
               "SLURM_JOB_ID": "1", "SBATCH_QOS": "x", "SQUEUE_FORMAT": "x", "SACCT_FORMAT": "x",
               "SCANCEL_STATE": "x", "PMI_RANK": "0", "TANGRAM_JOB": "1", "SLURM_CLUSTERS": "x"}
    assert slurm_command_environment(environ) == {"PATH": "/bin", "HOME": "/h", "SLURM_JWT": "x",
                                                  "SLURM_CONF": "/etc/slurm.conf"}


# Commands of Slurm that know an array of three jobs, of which the last one has the array's number
# 35, and a heterogeneous job 40. They write down what they are told to change.
SQUEUE = """#!/bin/sh
[ ! -e "$HERE/over" ] || exit 0
row() {
    printf '%s\\037' "$1" "$(id -u)" "$2" "$3" RUNNING None n cpu c1 "" "" 0 "$4" "$5"
    printf '\\036'
}
case "$*" in
*"-j 35 "*) row 36 0 0 first 35_1; row 35 0 0 last 35_3 ;;
*"-j 40 "*) row 41 40 1 other 40+1; row 40 40 0 leader 40+0 ;;
esac
"""
SACCT = """#!/bin/sh
case "$*" in
*"-j 35 "*) printf '36|35_1|first\\n35|35_3|last|with a bar\\n' ;;
*"-j 40 "*) printf '40|40+0|leader\\n41|40+1|other\\n' ;;
esac
"""
CHANGE = """#!/bin/sh
echo "$*" > "$HERE/changed"
"""


@pytest.mark.parametrize(("job", "live", "over"), [
    (35, "jobid=35_3 comment=last; tangram: a=1",
     "jobid=35_3 set comment=last|with a bar; tangram: a=1"),
    (40, "jobid=40 comment=leader; tangram: a=1", "jobid=40 set comment=leader; tangram: a=1")],
    ids=["array", "het"])
def test_a_comment_is_put_on_this_job_alone(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: int, live: str, over: str) -> None:
    """The last element of an array has the array's number, and Slurm changes all elements of it."""
    for name, text in (("squeue", SQUEUE), ("sacct", SACCT), ("scontrol", CHANGE),
                       ("sacctmgr", CHANGE)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    commands = Commands({"PATH": os.environ["PATH"], "HERE": str(tmp_path)})
    asyncio.run(commands.comment(job, "a=1"))
    assert (tmp_path / "changed").read_text() == f"update {live}\n"
    (tmp_path / "over").touch()  # the controller has forgotten the job: accounting still has it
    asyncio.run(commands.comment(job, "a=1"))
    assert (tmp_path / "changed").read_text() == f"-i modify job where {over}\n"
