"""The shell of a step of workers: which ends of a worker it answers with another start, without
Slurm. `tangram` is a program that does what the test says."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "sbatch_templates" / "_worker.sh"
# the n-th start of a worker runs the n-th line; the last line is for all that follow
TANGRAM = """#!/bin/bash
echo >> "$STARTS"
n=$(wc -l < "$STARTS")
eval "$(sed -n "$((n < LINES_N ? n : LINES_N))p" "$PLAY")"
"""
KILLED = "kill -KILL $$"


def play(folder: Path, *lines: str) -> tuple[int, int, str]:
    """Returns the shell's status, how many workers began, and what was printed."""
    (folder / "bin").mkdir()
    tool, starts, plays = folder / "bin" / "tangram", folder / "starts", folder / "plays"
    tool.write_text(TANGRAM)
    tool.chmod(0o755)
    sleep = folder / "bin" / "sleep"  # the second before a start is for a whole step's end
    sleep.write_text("#!/bin/bash\nexec /bin/sleep 0.01\n")
    sleep.chmod(0o755)
    plays.write_text("\n".join(lines) + "\n")
    (folder / "access.json").write_text(json.dumps({"ended": ""}))
    script = SCRIPT.read_text().replace("<SCRATCH>", str(folder))
    env = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0",
           "SLURMD_NODENAME": "n1", "TANGRAM_JOB": "7", "folder": str(folder), "HOME": str(folder),
           "STARTS": str(starts), "PLAY": str(plays), "LINES_N": str(len(lines))}
    done = subprocess.run(["bash", "-c", f'{script}\nexec bash -c "$worker" worker cpu'], env=env,
                          capture_output=True, text=True, check=False, timeout=60)
    began = len(starts.read_text().splitlines()) if starts.exists() else 0
    return done.returncode, began, done.stdout + done.stderr


@pytest.mark.parametrize(("end", "status"), [
    ("exit 0", 0), ("exit 2", 2), ("exit 143", 143),
    ("kill -TERM $PPID; exit 70", 70), ("kill -TERM $PPID; " + KILLED, 137),
    ('sed -i s/\\"\\"/\\"done\\"/ "$(dirname "$STARTS")/access.json"; exit 70', 70)],
    ids=["well", "refused", "told", "told and failed", "step killed", "job ended"])
def test_a_worker_that_is_told_to_leave_or_refuses_to_start_is_not_started_again(
        tmp_path: Path, end: str, status: int) -> None:
    ended, began, said = play(tmp_path, end)
    assert (ended, began) == (status, 1), said
    assert "again" not in said


@pytest.mark.parametrize("end", ["exit 0", "kill -TERM $PPID; exit 143"], ids=["well", "told"])
def test_nothing_is_left_of_a_worker_that_ends_although_no_epilog_runs(
        tmp_path: Path, end: str) -> None:
    """Slurm kills the task epilog with the step when it takes the node from the job."""
    play(tmp_path, f'[ -d "$TANGRAM_SCRATCH" ] && echo there; {end}')
    assert list(tmp_path.glob("tangram-node-*")) == []


@pytest.mark.parametrize(("end", "code"), [
    (KILLED, 137), ("exit 70", 70), ("kill -USR1 $PPID $$", 138), ("kill -USR2 $PPID $$", 140),
    ("kill -HUP $PPID $$", 129), ("kill -INT $PPID; exit 130", 130)],
    ids=["killed", "failed", "USR1 to the step", "USR2 to the step", "HUP to the step",
         "INT to the step"])
def test_a_worker_that_dies_is_started_again(tmp_path: Path, end: str, code: int) -> None:
    status, began, said = play(tmp_path, end, end, "exit 0")
    assert (status, began) == (0, 3), said
    for start in (1, 2):
        assert f"on n1 ended with status {code} and is started again ({start} of 5 times)" in said


def test_a_folder_that_was_removed_under_a_worker_is_made_again_for_the_next(
        tmp_path: Path) -> None:
    """Also where somebody else has put something there: then no worker begins in it."""
    gone = 'rm -r "$TANGRAM_SCRATCH"; exit 70'
    status, began, said = play(tmp_path, gone, '[ -d "$TANGRAM_SCRATCH" ] && exit 0')
    assert (status, began) == (0, 2), said
    (tmp_path / "2").mkdir()
    link = 'rm -r "$TANGRAM_SCRATCH"; ln -s /tmp "$TANGRAM_SCRATCH"; exit 70'
    status, began, said = play(tmp_path / "2", link)
    assert (status, began) == (1, 1) and "File exists" in said


def test_a_worker_that_dies_at_each_start_is_given_up_in_words(tmp_path: Path) -> None:
    status, began, said = play(tmp_path, "exit 70")
    assert (status, began) == (70, 6), said
    assert said.splitlines()[-1] == (
        "tangram: the worker on n1 ended with status 70 and is not started again, as each of 5 "
        "more starts lasted less than 10 minutes")
