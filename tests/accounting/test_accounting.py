"""Accounting: the fold over events, and sacct's words and formats."""

from __future__ import annotations

import pytest
from helpers.builders import World

from tangram_hpc.accounting.fields import FIELDS, as_json, choose_fields, duration
from tangram_hpc.accounting.held_usage import held
from tangram_hpc.accounting.job_row import fold_with_job
from tangram_hpc.accounting.record import fold
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.allocation import SatelliteShape
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.service import EndpointSpec, ServiceSpec
from tangram_hpc.domain.slurm import JobSpan
from tangram_hpc.domain.states import ActionState
from tangram_hpc.errors import InvalidInput


def story() -> tuple[World, int, int, int]:
    w = World("static:2")
    w.node(cpus=4, component="cpu")
    s = w.session()
    w.plan()
    w.happen(ev.SessionReady(w.now, s))
    inside = w.submit((1, 2), session=s)
    w.now = 100
    w.plan()
    w.now = 600
    w.happen(ev.LeaseFinished(600, w.lease_of(inside), Outcome(
        ActionState.FAILED, exit_code=3, exec_ns=400, cpu_ns=350, maxrss_kib=99), True))
    repeated = w.submit(1, attempts=2)
    w.plan()
    w.happen(ev.NodeLost(700, 1, "gone"))
    w.now = 800
    w.node(cpus=1)
    w.plan()
    w.now = 900
    w.finish(repeated)
    waiting = w.submit(1)
    w.happen(ev.ActionCancelled(950, waiting, "enough"))
    return w, inside, repeated, waiting


def test_the_fold_gives_the_record_of_each_action_and_the_usage() -> None:
    w, inside, repeated, waiting = story()
    folded = fold([ev.BrokerStarted(0, "77", "static:2", "none", "me"), *w.events])
    one, two, three = (folded.records[a] for a in (inside, repeated, waiting))
    assert (one.state, one.cpus, one.elapsed_ns, one.node.name) == (
        ActionState.FAILED, 2, 499, "n1")
    assert one.cpu_held_ns == 2 * one.elapsed_ns
    assert (two.state, two.attempt, two.node.name) == (ActionState.COMPLETED, 2, "n2")
    assert (three.state, three.start_ns, three.outcome.reason) == (
        ActionState.CANCELLED, 0, "enough")
    assert folded.usage.burnt_ns == 350
    assert folded.usage.reserved_ns > 2 * 600
    shown = {f.name: f.text(one) for f in FIELDS}
    assert shown["JobID"] == "77.1.2" and shown["ExitCode"] == "3:0" and shown["NCPUS"] == "2"
    assert shown["State"] == "FAILED" and shown["Partition"] == "cpu" and shown["User"] == "me"
    assert as_json(two)["grants"][0][1] == [0]


def test_resizes_count_in_the_held_time() -> None:
    w = World()
    w.node(cpus=4)
    a = w.submit(2)
    w.now = 10
    w.plan()
    granted = w.now
    w.happen(ev.LeaseResized(granted + 100, 1, (0, 1, 2, 3)))
    w.happen(ev.LeaseFinished(granted + 200, 1, Outcome(ActionState.COMPLETED), True))
    record = fold(w.events).records[a]
    assert record.cpus == 4 and record.cpu_held_ns == 2 * 100 + 4 * 100


def test_an_action_killed_for_memory_is_OUT_OF_MEMORY_and_its_grants_add_up() -> None:
    w = World()
    w.node(cpus=4)
    a = w.submit((1, 4))
    w.now = 10
    w.plan()
    since = w.now
    w.happen(ev.LeaseResized(since + 100, 1, (0,)))
    w.happen(ev.LeaseResized(since + 150, 1, (0, 1, 2)))
    made = w.happen(ev.LeaseFinished(since + 250, 1, Outcome(
        ActionState.OUT_OF_MEMORY, signal=9), True))
    reply = made[0]
    assert reply.grants[0] == (0, 4) and reply.grants[1:] == ((100, 1), (150, 3))
    record = fold(w.events).records[a]
    shown = {f.name: f.text(record) for f in FIELDS}
    assert (shown["State"], shown["ExitCode"]) == ("OUT_OF_MEMORY", "137:9")
    told = as_json(record)
    assert [(at - record.start_ns, len(cores)) for at, cores in told["grants"]] == list(
        reply.grants)
    ends = [*(at for at, _ in reply.grants[1:]), reply.held_ns]
    held = sum(n * (end - at) for (at, n), end in zip(reply.grants, ends, strict=True))
    assert held == told["cpu_held_ns"] == 4 * 100 + 50 + 3 * 100


def test_durations_and_format_columns_are_printed_as_sacct_does() -> None:
    assert duration(1_234_000_000) == "00:00:01.234"
    assert duration((26 * 3600 + 61) * 10**9) == "1-02:01:01.000"
    assert [(f.name, width) for f, width in choose_fields("jobid%-9,State")] == [("JobID", -9),
                                                                                 ("State", 14)]
    with pytest.raises(InvalidInput, match="'Colour' is not a column"):
        choose_fields("JobID,Colour")
    with pytest.raises(InvalidInput, match="width"):
        choose_fields("JobID%x")


def test_unfinished_actions_end_when_the_broker_stops_for_good() -> None:
    """Named actions are the exception: the next start of the broker continues them."""
    w = World()
    w.node(cpus=1)
    running, waiting = w.submit(1), w.submit(1)
    w.plan()
    events = [ev.BrokerStarted(0, "77", "fcfs:1", "none", "me"), *w.events]
    open_yet = fold(events).records
    assert open_yet[waiting].state is ActionState.PENDING
    ended = fold([*events, ev.BrokerStopped(900, "signal SIGTERM")]).records
    for action in (running, waiting):
        told = ended[action]
        assert (told.state, told.end_ns) == (ActionState.CANCELLED, 900)
        assert told.outcome is not None and "signal SIGTERM" in told.outcome.reason
    again = fold([*events, ev.BrokerStopped(900, "x"), ev.BrokerStarted(950, "77", "a", "b", "c")])
    assert again.records[waiting].state is ActionState.PENDING


STARTED = ("77", "elastic", "none", "me")


def begun() -> tuple[World, int]:
    """A job whose broker began at 50 and whose node, with two CPUs, joined at 100; a named action,
    submitted at 199, has one of them since 200."""
    w = World()
    w.happen(ev.BrokerStarted(50, *STARTED))
    w.happen(ev.NodeJoined(100, 1, NodeSpec("a", "h", (0, 1), 99, allocation="77")))
    w.now = 198
    named = w.submit(once="work", trusted=True)
    w.plan()  # 200
    return w, named


@pytest.mark.parametrize("stopped", [True, False])
def test_a_job_that_waits_in_the_queue_after_a_requeue_holds_no_cpus(stopped: bool) -> None:
    """The job holds two CPUs for 600 ns, waits 5000 ns in the queue, and then holds three CPUs of
    another node for 300 ns."""
    w, named = begun()
    w.happen(ev.EndpointDeclared(700, EndpointSpec("any", 1)))  # its last word
    if stopped:
        w.happen(ev.BrokerStopped(700, "signal SIGTERM"))
    w.happen(ev.BrokerStarted(5700, *STARTED))
    w.happen(ev.NodeJoined(5700, 2, NodeSpec("b", "h", (0, 1, 2), 99, allocation="77")))
    w.now = 5799
    w.plan()  # 5800
    w.happen(ev.LeaseFinished(6000, w.lease_of(named), Outcome(ActionState.COMPLETED), True))
    usage = fold(w.events).usage
    assert usage.held_ns == 2 * 600 + 3 * 300
    assert usage.lent_ns == 500 + 200
    (row,) = held(w.events)
    assert (row.held_ns, row.span_ns, row.used_ns, row.nodes) == (2100, 900, 700, ["b"])


@pytest.mark.parametrize("requeued", [True, False])
def test_a_satellite_in_slurms_queue_holds_no_cpus(requeued: bool) -> None:
    """A satellite of two CPUs and a GPU lends for 400 ns. Its worker joins again 5000 ns later, on
    another node: Slurm has started the job again, whose time limit ends later. Or on the same one:
    the worker had died, and the satellite was held all the time.
    """
    w = World()
    w.happen(ev.BrokerStarted(0, *STARTED))
    first = NodeSpec("a", "a", (0, 1), 99, allocation="88", gpus=(0,), ends_at_ns=9000)
    w.happen(ev.NodeJoined(100, 1, first))
    w.happen(ev.NodeLost(500, 1, "it left: SIGTERM"))
    name, ends_at = ("b", 14000) if requeued else ("a", 9000)
    again = NodeSpec(name, name, (0, 1), 99, allocation="88", gpus=(0,), ends_at_ns=ends_at)
    w.happen(ev.NodeJoined(5500, 2, again))
    w.happen(ev.NodeLost(5800, 2, "it left: SIGTERM"))
    (row,) = held(w.events)
    assert row.held_ns == (2 * (400 + 300) if requeued else 2 * 5700)
    assert row.cpus == 2 and row.nodes == [name] and row.gpu_held_ns == row.held_ns // 2
    assert fold_with_job(w.events, True, now_ns=5900)[1].held_ns == row.held_ns


def test_a_requested_satellite_holds_its_gpus_from_slurms_grant_on() -> None:
    """Its only worker joins 30 ns after the grant, and is lost 50 ns before the end."""
    spec = NodeSpec("a", "h", (0, 1, 2, 3), 99, allocation="88", gpus=(0, 1))
    (row,) = held([
        ev.BrokerStarted(0, *STARTED),
        ev.AllocationAsked(10, 1, SatelliteShape("spare", cpus=4, gpus=2), "busy"),
        ev.AllocationQueued(20, 1, "88"), ev.AllocationHeld(40, 1, 40),
        ev.NodeJoined(70, 1, spec), ev.NodeLost(150, 1, "gone"),
        ev.AllocationEnded(200, 1, "over", 200)])
    assert (row.held_ns, row.gpu_held_ns) == (4 * 160, 2 * 160)


def test_a_start_whose_clock_is_behind_makes_no_time_negative() -> None:
    """The first start ends at 700. The second one begins at 150 by a clock that was set back: its
    times count from 700 on, so that the named action, which spans both, begins again at 800 and
    ends at 1000.
    """
    w, named = begun()
    w.happen(ev.EndpointDeclared(700, EndpointSpec("any", 1)))
    w.happen(ev.BrokerStarted(150, *STARTED))
    w.happen(ev.NodeJoined(150, 2, NodeSpec("b", "h", (0, 1, 2), 99, allocation="77")))
    w.now = 249
    w.plan()  # 250
    w.happen(ev.LeaseFinished(450, w.lease_of(named), Outcome(ActionState.COMPLETED), True))
    folded, row = fold_with_job(w.events, True, now_ns=460)
    record = folded.records[named]
    assert (record.submit_ns, record.start_ns, record.end_ns) == (199, 800, 1000)
    assert (folded.usage.held_ns, folded.usage.lent_ns) == (2 * 600 + 3 * 300, 500 + 200)
    assert (row.held_ns, row.end_ns - row.start_ns) == (2100, 950)


def test_a_call_that_is_cleaned_up_after_its_batch_has_one_record() -> None:
    """It ended while it waited behind the first call of the batch, which then ends."""
    w = World()
    node = w.node(gpus=1)
    w.happen(ev.ServiceDeclared(0, ServiceSpec("s", batch=2)))
    first, second = (w.submit(1, key="service:s") for _ in range(2))
    cancelled = Outcome(ActionState.CANCELLED, reason="by its client")
    w.happen(ev.LeaseGranted(10, 1, first, node, 1, (), (0,)))
    w.happen(ev.LeaseGranted(10, 2, second, node, 1, (), (0,), after=1))
    w.happen(ev.ActionCancelled(20, second, "by its client"))
    w.happen(ev.LeaseFinished(30, 2, cancelled, False))
    w.happen(ev.LeaseFinished(40, 1, Outcome(ActionState.COMPLETED), True))
    w.happen(ev.LeaseReleased(50, 2))
    records = fold(w.events).records
    assert records[first].state is ActionState.COMPLETED
    assert records[second].state is ActionState.CANCELLED and records[second].end_ns == 30


def test_slurms_times_of_a_job_win_over_the_brokers() -> None:
    """A requeued het job: its components are held since the grant, and until the ends that Slurm's
    accounting has; a broker that starts again within one grant ends no holding."""
    second = 10**9
    w, told = World(), ("77", "elastic", "none", "me", "", 8, 0)
    first, again = 100 * second, 900 * second
    for at, granted in ((first, 95 * second), (first + 50 * second, 95 * second),
                        (again, 898 * second)):
        w.happen(ev.BrokerStarted(at, *told, granted))
        for number, component in enumerate("01"):
            w.happen(ev.NodeJoined(at + 3, 2 * at // second + number, NodeSpec(
                f"n{component}", "h", (0, 1), 99, allocation=f"77+{component}")))
    w.happen(ev.BrokerStopped(again + 60 * second, "done"))
    alone = held(w.events)
    assert [(r.job, r.span_ns // second) for r in alone] == [
        ("77+0", 55 + 62), ("77+1", 55 + 62)]
    spans = [JobSpan(f"77+{n}", 1, start * second, end * second)
             for n, start, end in ((0, 95, 170), (1, 95, 169), (0, 898, 963), (1, 897, 962))]
    asked = held(w.events, spans)
    assert [(r.job, r.span_ns / second, r.held_ns / second) for r in asked] == [
        ("77+0", 75 + 65, 2 * 140), ("77+1", 74 + 65, 2 * 139)]
    _, row = fold_with_job(w.events, False, 0, spans)
    assert (row.start_ns, row.end_ns) == (95 * second, 963 * second)
    assert row.held_ns == 2 * (140 + 139) * second


def test_cores_that_were_lent_in_the_last_second_of_a_job_were_held() -> None:
    """Slurm cuts a job's end to whole seconds."""
    w = World()
    w.happen(ev.BrokerStarted(2 * 10**9, "77", "elastic", "none", "me", "", 8, 0, 10**9))
    w.happen(ev.NodeJoined(2 * 10**9, 1, NodeSpec("a", "h", (0,), 99, allocation="77")))
    w.now = 3 * 10**9
    w.submit(1, trusted=True)
    w.plan()
    w.happen(ev.NodeLost(5_700_000_000, 1, "gone"))
    (row,) = held(w.events, [JobSpan("77", 1, 10**9, 5 * 10**9)])
    assert row.used_ns <= row.held_ns == 4_700_000_000


def test_two_starts_that_accounting_has_as_one_are_not_counted_twice() -> None:
    """As Slurm 22.05 has them if the job lost a node, or was made smaller, before its requeue."""
    second = 10**9
    w, told = World(), ("77", "elastic", "none", "me", "", 8, 0)
    for number, granted in enumerate((100, 300), 1):
        w.happen(ev.BrokerStarted((granted + 1) * second, *told, granted * second))
        w.happen(ev.NodeJoined((granted + 2) * second, number, NodeSpec(
            "a", "h", (0,), 99, allocation="77")))
        w.happen(ev.BrokerStopped((granted + 50) * second, "done"))
    (row,) = held(w.events, [JobSpan("77", 1, 100 * second, 355 * second)])
    assert (row.span_ns // second, row.held_ns // second) == (50 + 55, 50 + 55)
    assert (row.since // second, row.until // second) == (300, 355)


def test_each_run_of_a_job_has_its_own_times_when_it_starts_again_within_a_second() -> None:
    """By Slurm's whole seconds the second run begins when the first one ends."""
    second = 10**9
    w, told = World(), ("77", "elastic", "none", "me", "", 8, 0)
    for number, (at, granted) in enumerate(((101, 100), (151, 150)), 1):
        w.happen(ev.BrokerStarted(at * second, *told, granted * second))
        w.happen(ev.NodeJoined(at * second, number, NodeSpec("a", "h", (0,), 99, allocation="77")))
        w.happen(ev.NodeLost((granted + 50) * second, number, "gone"))
    w.happen(ev.NodeJoined(201 * second, 3, NodeSpec("a", "h", (0,), 99, allocation="77")))
    w.happen(ev.BrokerStopped(399 * second, "done"))
    runs = [JobSpan("77", 1, 100 * second, 150 * second), JobSpan("77", 2, 150 * second,
                                                                  400 * second)]
    for spans in (runs, runs[::-1]):
        (row,) = held(w.events, spans)
        assert (row.span_ns // second, row.since // second, row.until // second) == (300, 150, 400)
