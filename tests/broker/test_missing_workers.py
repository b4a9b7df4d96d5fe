"""A broker without workers says so, and one that holds nodes of Slurm for nothing ends."""

from __future__ import annotations

from tangram_hpc.app.broker_process.missing_workers import SAID_AFTER_S, MissingWorkers
from tangram_hpc.domain.slurm import JobView


def lines(watch: MissingWorkers, first: int, last: int, workers: int = 0, needed: bool = True
          ) -> list[str]:
    """What is said when somebody looks every two seconds."""
    said = [watch.look(float(now), workers, needed) for now in range(first, last, 2)]
    return [line for line in said if line]


def test_a_broker_without_workers_says_so_once_and_what_to_do() -> None:
    watch = MissingWorkers("local-7", 0.0, in_slurm=False)
    assert lines(watch, 0, int(SAID_AFTER_S)) == []
    [line] = lines(watch, int(SAID_AFTER_S), 4000)
    assert line == ("job local-7: no worker has joined within 60 s; start one with "
                    "`TANGRAM_JOB=local-7 tangram worker`")
    assert not watch.gave_up
    assert lines(watch, 4000, 4010, 1) == ["job local-7: a worker has joined after 3998 s"]
    [line] = lines(watch, 4010, 4100)
    assert "no worker has been there for 60 s" in line


def test_in_slurm_the_line_tells_of_steps_and_the_broker_ends_at_the_limit() -> None:
    watch = MissingWorkers("4711", 900.0, in_slurm=True)
    [line] = lines(watch, 0, 898)
    assert "squeue --steps -j 4711" in line and "ends after 900 s (setting no_worker_s)" in line
    assert "srun waits for CPUs or memory that another step holds, or has ended" in line
    assert not watch.gave_up
    assert lines(watch, 898, 901) == []
    assert watch.gave_up.startswith("no worker has joined within 900 s; satellites join when ")
    assert "(`squeue --me`)" in watch.gave_up


def test_workers_that_come_begin_the_time_anew() -> None:
    watch = MissingWorkers("4711", 900.0, in_slurm=True)
    lines(watch, 0, 890)
    lines(watch, 890, 892, workers=2)
    lines(watch, 892, 1780)
    assert not watch.gave_up
    lines(watch, 1780, 1791)
    assert watch.gave_up.startswith("no worker has been there for 900 s")
    # their step had begun, so it waits for nothing: somebody has cancelled it
    assert "they have ended, as after `scancel` of their step" in watch.gave_up
    assert "srun waits" not in watch.gave_up


def test_a_broker_that_was_stopped_or_needs_no_worker_gives_nothing_up() -> None:
    stopped = MissingWorkers("4711", 900.0, in_slurm=True)
    lines(stopped, 0, 50)
    assert stopped.look(5000.0, 0, True) == "" and not stopped.gave_up
    elastic = MissingWorkers("4711", 900.0, in_slurm=True)
    assert lines(elastic, 0, 5000, needed=False) == [] and not elastic.gave_up


def test_slurm_is_asked_seldom_and_only_while_a_job_of_it_has_no_worker() -> None:
    watch = MissingWorkers("4711", 0.0, in_slurm=True)
    asked = []
    for now in range(0, 600, 2):
        watch.look(float(now), 1 if 300 <= now < 320 else 0, True)
        if watch.take_question():
            asked.append(now)
    assert asked == [10, 130, 250, 328, 448, 568]
    other = MissingWorkers("local-7", 0.0, in_slurm=False)
    lines(other, 0, 600)
    assert not other.take_question()


def test_a_broker_that_needs_no_worker_asks_whether_its_job_runs() -> None:
    watch = MissingWorkers("4711", 900.0, in_slurm=True)
    assert lines(watch, 0, 2000, needed=False) == [] and not watch.gave_up
    assert watch.take_question()


def test_the_job_has_ended_when_slurm_has_shown_it_or_says_so() -> None:
    ended = JobView(4711, -1, "CANCELLED")
    assert MissingWorkers("4711", 900.0, True).has_ended([ended])
    watch = MissingWorkers("4711", 900.0, True)
    assert not watch.has_ended([])  # perhaps Slurm does not show it to us
    assert not watch.has_ended([JobView(4711, 0, "RUNNING"), JobView(4711, 1, "COMPLETED")])
    assert watch.has_ended([])


def test_a_suspended_job_is_not_given_up() -> None:
    watch = MissingWorkers("4711", 300.0, in_slurm=True)
    for now in range(0, 3000, 2):
        watch.look(float(now), 0, True)
        if watch.take_question():
            assert not watch.has_ended([JobView(4711, -1, "SUSPENDED")])
    assert not watch.gave_up
