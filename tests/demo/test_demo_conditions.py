"""The demo says under which conditions its ratios were measured: the default placer, FCFS beside
it, and the CPU time that other work took meanwhile."""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tangram_hpc.accounting.record import JobUsage
from tangram_hpc.demo import conditions, report, scaling
from tangram_hpc.demo.conditions import OtherLoad
from tangram_hpc.resources.cpu import affinity

STAT = """cpu  900 0 100 5000 0 0 0 40 0 0
cpu0 500 20 60 2000 10 5 15 30 0 0
cpu1 300 0 20 2000 0 0 0 10 0 0
cpu2 100 0 20 1000 0 0 0 0 0 0
intr 1 2 3
"""


def spin(cpu_s: float) -> None:
    while time.process_time() < cpu_s:
        pass


def figures(placer: str, step: float, busy: float = 0.0) -> report.PhaseMetrics:
    return report.PhaseMetrics(
        placer=placer, actions=4, act_mean=step / 10, act_p50=1, act_p95=1, act_p99=1, queue=0.5,
        exec=0.1, system=0.1, act_bare=1, step=step, latency=1, held=step, used=1,
        allocated=2 * step, passed=3, expected=3, trajectories=4, wrong=0, mixed_groups=1,
        via="mpi", job=f"job-{placer}-{step:g}", other_load=OtherLoad(busy, 0.0))


def test_the_demos_percentiles_are_by_nearest_rank() -> None:
    """As in `tangram acct --by`, each is the ACT of an action; none lies between two."""
    rows = [{"act_s": float(n), "queue_s": 0.0, "exec_s": 0.0, "opening_s": 0.0}
            for n in range(10, 0, -1)]
    rank = {"rows": rows, "step_s": 1.0, "think_s": 0.0, "rewards": [], "expected": [],
            "wrong": [], "via": "mpi"}
    found = report.metrics({"ranks": [rank], "mixed_groups": 0}, JobUsage(), 1, "fcfs:1", "job",
                           OtherLoad(0.0, 0.0))
    assert (found.act_p50, found.act_p95, found.act_p99) == (5, 10, 10)


def test_busy_time_counts_only_usable_cpus() -> None:
    """Idle and I/O wait time are not busy time; steal time is counted separately."""
    tick = 100
    read = conditions.cpu_times({0, 2}, STAT, 0.0, 0.0)
    assert (read.busy * tick, read.steal * tick) == (500 + 20 + 60 + 5 + 15 + 100 + 20, 30)
    later = replace(read, wall=10.0, busy=read.busy + 12, steal=read.steal + 2, ours=7.0)
    others = conditions.between(read, later, 2)
    assert (others.busy, others.steal) == (pytest.approx(5 / 20), pytest.approx(2 / 20))


def test_cpu_time_of_other_work_is_distinguished_from_the_demos() -> None:
    """Two programs use CPU time: one is a child of this process, the other is not."""
    cpus = affinity.usable()
    begin = conditions.now(cpus)
    mine = multiprocessing.get_context("fork").Process(target=spin, args=(1.0,))
    mine.start()
    mine.join()
    end = conditions.now(cpus)
    assert end.ours - begin.ours > 0.9
    assert end.busy - begin.busy >= end.ours - begin.ours - 0.1  # ticks of both are 10 ms

    begin = conditions.now(cpus)
    # its parent ends at once, so that nobody here ever waits for it
    started = subprocess.run(
        [sys.executable, "-c", "import os, sys, time\npid = os.fork()\n"
         "if pid: print(pid, flush=True); os._exit(0)\n"
         "os.setsid(); os.close(1)\nwhile time.process_time() < 1: pass"],
        check=True, stdout=subprocess.PIPE, text=True)
    while Path(f"/proc/{started.stdout.strip()}").exists():
        time.sleep(0.05)
    end = conditions.now(cpus)
    assert (end.busy - begin.busy) - (end.ours - begin.ours) > 0.5
    assert conditions.between(begin, end, len(cpus)).busy > 0


def test_the_demo_report_names_runs_slowed_by_other_work() -> None:
    """A run is named where other work took more than a twentieth of the CPU time; otherwise the
    report gives the upper bound."""
    quiet = [figures("elastic", 4.0, 0.01), figures("static:1", 60.0, 0.02), figures("fcfs:1", 4.5)]
    assert report.load_line(*quiet) == (
        "conditions: other work took at most 2% of the CPU time of any run")
    busy = [quiet[0], replace(quiet[1], other_load=OtherLoad(0.3, 0.1)), quiet[2]]
    line = report.load_line(*busy)
    assert "OTHER WORK TOOK CPU TIME: static:1 40% (10% by the hypervisor)" in line
    assert "elastic" not in line and "\n" not in line


def test_the_demo_table_compares_the_default_placer_with_fcfs_and_static() -> None:
    """Table and summary have a ratio for each, and several runs of one placer are averaged."""
    ours = report.mean([figures("elastic", 4.0, 0.3), figures("elastic", 5.0)])
    assert (ours.step, ours.spread, ours.runs, ours.other_load.busy) == (4.5, 1.0, 2, 0.3)
    static, plain = report.mean([figures("static:1", 45.0)]), report.mean([figures("fcfs:1", 9.0)])
    table = report.table(ours, static, plain)
    (step,) = re.findall(r"^train step +(.+)$", table, re.MULTILINE)
    assert step.split() == ["4.50", "s", "9.00", "s", "45.00", "s", "2.00x", "10.00x"]
    told = report.summary(ours, static, plain)
    assert (told["step_ratio_fcfs1"], told["step_ratio"], told["placer"]) == (2.0, 10.0, "elastic")
    assert told["other_work_share"]["elastic"] == 0.3


def test_the_table_of_actions_that_scale_compares_each_placer_with_the_default() -> None:
    runs = [scaling.ScalingRun(placer, {
        "mean_act_s": act, "p50_act_s": 1.0, "p99_act_s": 2 * act, "step_s": 10 * act,
        "actions": 7}, {"mean_act_s": act / 2}, OtherLoad(busy, 0.0)) for placer, act, busy in (
            ("elastic", 2.0, 0.01), ("fcfs:4", 3.0, 0.2), ("static:4", 5.0, 0.0))]
    table = scaling.table(runs)
    (act,) = re.findall(r"^ACT mean  +(.+)$", table, re.MULTILINE)
    assert act.split() == ["2.00", "s", "3.00", "s", "5.00", "s", "1.50x", "2.50x"]
    assert "OTHER WORK TOOK CPU TIME: fcfs:4 20%" in table and "elastic 1%" not in table
    told = scaling.summary(runs)
    assert told["act_s"] == {"elastic": 2.0, "fcfs:4": 3.0, "static:4": 5.0}
    assert told["simulated_act_s"]["static:4"] == 2.5 and told["actions"] == 7
