"""The hybrid pool with an MPI world, member processes and sockets; and its parts on their own.

No test asserts how long anything takes; what hangs is ended by a generous deadline.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import helpers.hybrid_rig as rig
import msgspec
import numpy as np
import pytest

from tangram_hpc import LocalCluster
from tangram_hpc.app.system_clock import SystemClock
from tangram_hpc.domain.hybrid import (
    ContributorId,
    GradientHeader,
    JoinOutcome,
    MemberDone,
    MemberFailed,
    PipelineSignal,
    Role,
    Signal,
    StepPlan,
)
from tangram_hpc.domain.hybrid import ReplicaState as R
from tangram_hpc.errors import AccessError, InvalidInput
from tangram_hpc.libra.hybrid.hybrid_pool import HybridPool
from tangram_hpc.libra.hybrid.hybrid_signal import PoolRules
from tangram_hpc.libra.live.coordinator import Coordinator
from tangram_hpc.libra.live.core import HybridCore
from tangram_hpc.libra.live.core_trainer import CoreTrainer
from tangram_hpc.libra.live.gradient_channel import GradientChannel
from tangram_hpc.libra.live.leased_member import add_leased_member
from tangram_hpc.libra.live.lend import lend
from tangram_hpc.libra.live.member import Member, ReplicaCallbacks, Skills
from tangram_hpc.protocol.gradient_messages import (
    HEAD,
    Alive,
    Gradient,
    GradientReceipt,
    GradientWork,
    JoinMessage,
    MemberHello,
    MemberReport,
    OrderMessage,
)
from tangram_hpc.protocol.value import decode_value
from tangram_hpc.storage.access import Access
from tangram_hpc.transport.socket.bulk_socket import BulkLink, dial_bulk

EVERY_STATE = ["REQUESTED", "FETCHING_STATE", "ZERO_SYNC", "ACTIVATING", "ACTIVE",
               "in-step ACTIVE", "LEAVING", "in-step LEAVING", "RETURNING"]


@pytest.fixture
def mpiexec() -> str:
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if not found:
        pytest.skip("no mpiexec on this machine")
    return found


# ---- real processes ------------------------------------------------------------------------------


def check_parameters(told: dict[str, Any], ranks: int, width: int = 1) -> None:
    """Checks that the parameters are those of plain accumulation and that no join is left open."""
    assert rig.worst(told, ranks, width) < 1e-6
    assert rig.worst({**told, "steps": told["steps"] - 1}, ranks, width) > 1e-6  # it can differ
    assert sum(rank["added"] for rank in told["ranks"]) > 0  # some of it came over the channels
    joins: dict[tuple[int, int], list[str]] = {}
    for replica, generation, end, _ in told["news"]:
        joins.setdefault((replica, generation), []).append(end)
    for ends in joins.values():
        assert ends in (["JOINED"], ["ROLLED_BACK"], ["LOST"], ["JOINED", "LEFT"],
                        ["JOINED", "LOST"])


@pytest.mark.mpi
def test_parameters_equal_plain_accumulation_while_replicas_join_and_leave(
    tmp_path: Path, mpiexec: str
) -> None:
    told = rig.run(tmp_path, mpiexec, 2, mode="churn", replicas=[[10], [11], [12]])
    check_parameters(told, 2)
    ends = [end for _, _, end, _ in told["news"]]
    assert ends.count("JOINED") >= 6 and ends.count("LEFT") >= 4 and told["epochs"] >= 5
    assert told["ended"] == [0, 0, 0]
    assert told["serving"] == ["serves-10", "serves-11", "serves-12"]  # rollout workers again


TWICE = """
import os
import sys
import numpy as np
from mpi4py import MPI
from tangram_hpc.errors import InvalidInput
from tangram_hpc.libra.live.core_trainer import CoreTrainer
core = CoreTrainer(MPI.COMM_WORLD, sys.argv[1], [[0], [1]], [2], [[3]])
args = (1, np.zeros(2), [1.0], lambda params, samples: params * len(samples))
core.step(5, *args)
for step in (5, 4):
    try:
        core.step(step, *args)
    except InvalidInput as error:
        os.write(1, f"{MPI.COMM_WORLD.rank} {error}\\n".encode())  # one piece: ranks share a pipe
core.step(6, *args)
core.close()
"""


@pytest.mark.mpi
def test_a_repeated_step_number_is_refused_in_one_line_on_each_rank(
        tmp_path: Path, mpiexec: str) -> None:
    done = subprocess.run([mpiexec, "-n", "2", sys.executable, "-c", TWICE, str(tmp_path / "a")],
                          capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [
        f"{rank} step: {step} must be above the last one (5)" for rank in (0, 1) for step in (4, 5)]


def check_killed(told: dict[str, Any], states: list[str]) -> None:
    assert told["killed"] == states
    assert told["ended"] == [-9] * len(states) + [0]  # each time it rose again
    assert [end for _, _, end, _ in told["news"]].count("LOST") == len(states)
    assert told["states"] == ["ACTIVE"]  # its last incarnation trains


@pytest.mark.mpi
def test_parameters_stay_right_when_a_replica_is_killed_joining_or_active(
    tmp_path: Path, mpiexec: str
) -> None:
    states = ["ZERO_SYNC", "in-step ACTIVE"]
    told = rig.run(tmp_path, mpiexec, 2, mode="kill", replicas=[[10]], slow_s=0.05, kill_at=states)
    check_parameters(told, 2)
    check_killed(told, states)


@pytest.mark.mpi
@pytest.mark.long
@pytest.mark.timeout(400)
def test_parameters_stay_right_when_a_replica_is_killed_in_any_state(
        tmp_path: Path, mpiexec: str) -> None:
    told = rig.run(tmp_path, mpiexec, 2, mode="kill", replicas=[[10]], slow_s=0.05,
                   kill_at=EVERY_STATE)
    check_parameters(told, 2)
    check_killed(told, EVERY_STATE)


@pytest.mark.mpi
@pytest.mark.long
@pytest.mark.timeout(400)
def test_parameters_stay_right_when_one_of_a_replicas_two_members_is_killed(
        tmp_path: Path, mpiexec: str) -> None:
    """The gradient of the surviving member arrived; it must not be added alone."""
    told = rig.run(tmp_path, mpiexec, 4, mode="kill", width=2, replicas=[[10, 11]], slow_s=0.05,
                   kill_at=EVERY_STATE)
    check_parameters(told, 4, 2)
    assert told["killed"] == EVERY_STATE and told["states"] == ["ACTIVE"]
    assert sorted(told["ended"]) == [-9] * len(EVERY_STATE) + [0, 0]


@pytest.mark.mpi
@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_member_that_hangs_is_awaited_for_one_step_and_then_killed(
        tmp_path: Path, mpiexec: str) -> None:
    told = rig.run(tmp_path, mpiexec, 2, mode="hang", replicas=[[10]], slow_s=0.1, patience_s=1.0,
                   stage_s=3.0, kill_at=["in-step ACTIVE"])
    check_parameters(told, 2)
    check_killed(told, ["in-step ACTIVE"])
    assert told["heard"] == [10]  # the pool had it killed
    assert any("its gradient did not arrive" in why for _, _, _, why in told["news"])


@pytest.mark.mpi
@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_killed_replica_on_a_leased_gpu_ends_its_action_and_gets_a_new_lease(
    tmp_path: Path, mpiexec: str
) -> None:
    """Its action ends, its GPU is free, and its next incarnation leases a GPU again."""
    with LocalCluster(2, devices="fake:2", mem_mib=2048, home=tmp_path / "home") as cluster:
        states = [state for state in EVERY_STATE if state != "REQUESTED"]  # no process is there yet
        told = rig.run(tmp_path, mpiexec, 2, mode="kill", replicas=[[10]], slow_s=0.05,
                       kill_at=states, cluster=str(cluster.access))
        check_parameters(told, 2)
        assert told["killed"] == states and told["states"] == ["ACTIVE"]
        ends = {generation: end for _, generation, end, _ in told["news"]}  # the last of each
        last = max(ends)
        assert last >= 9 and [ends[g] for g in (1, 2, last)] == ["LOST", "LOST", "JOINED"]
        # who had joined may be missed, or be on its way home, before its death is heard of
        assert {ends[g] for g in range(3, last)} <= {"LOST", "LEFT", "ROLLED_BACK"}
        assert cluster.submit(["true"], gpus=2, trusted=True).result(60).ok  # nobody holds any


# ---- a channel on its own
# ---------------------------------------------------------------------------

KEY, JOB = b"k" * 32, "hybrid-test"
PLAN = StepPlan(step=5, version=4, epoch=2,
                counting=(ContributorId(0, 3, 1), ContributorId(9, 1, 0)))
PARAMS = np.arange(6, dtype=np.float64)


class MemberEnd:
    """A member's end of a gradient channel."""

    def __init__(self, channel: GradientChannel, replica: int, generation: int) -> None:
        self.link: BulkLink = dial_bulk((channel.address,), KEY, JOB)
        self.link.most = 1 << 30
        self.link.send(JoinMessage(replica, generation))

    def work(self) -> tuple[GradientHeader, np.ndarray, list[Any]]:
        got = self.link.receive()
        assert got is not None and isinstance(got[0], GradientWork)
        header, payload = got[0].header, got[1]
        return (header, np.frombuffer(payload, header.dtype, header.size),
                decode_value(memoryview(payload)[header.size * 8 :]))

    def say(self, header: GradientHeader, payload: np.ndarray) -> str:
        self.link.send(Gradient(header), payload.data)
        while (got := self.link.receive()) is not None:
            if isinstance(got[0], GradientReceipt):
                assert got[0].header == header
                return got[0].refusal
        return "the end"


@pytest.fixture
def channel() -> Iterator[GradientChannel]:
    one = GradientChannel(1, "127.0.0.1", KEY, JOB)
    yield one
    one.close()


def wait_until_entered(channel: GradientChannel, *replicas: int) -> None:
    """Waits until these replicas are connected to the channel."""
    done = threading.Event()
    for _ in range(2000):
        if set(replicas) <= set(channel._members):
            return
        done.wait(0.01)
    raise AssertionError(f"{replicas} did not enter")


def test_a_channel_adds_a_matching_gradient_and_counts_the_ignored_ones(
    channel: GradientChannel) -> None:
    member = MemberEnd(channel, 0, 3)
    wait_until_entered(channel, 0)
    own, theirs = channel.begin(PLAN, PARAMS, ["a", "b", "c"])
    assert (own, theirs) == ((0, 2), {0: (2, 3)})
    header, params, samples = member.work()
    assert header == GradientHeader(0, 3, 2, 5, 4, 1, 6, "<f8") and samples == ["c"]
    assert (params == PARAMS).all()
    wrong = {"generation": 2, "step": 4, "version": 3, "epoch": 1, "samples": 2, "size": 5,
             "dtype": "<f4", "replica": 1}
    for field, value in wrong.items():
        said = member.say(msgspec.structs.replace(header, **{field: value}), PARAMS)
        told = {"generation": "seat", "replica": "seat", "dtype": "size"}  # its bytes do not fit
        assert said == told.get(field, field)
    assert member.say(header, PARAMS[:5]) == "size"
    assert member.say(header, PARAMS * 2) == ""
    assert member.say(header, PARAMS * 3) == "again"
    taken = channel.collect(60)
    assert list(taken) == [0] and (taken[0] == PARAMS * 2).all()
    assert member.say(header, PARAMS) == "step"  # too late
    assert channel.added == 1
    half = msgspec.structs.replace(header, dtype="<f4")
    channel.begin(PLAN, PARAMS, ["a", "b"])
    assert member.say(half, PARAMS.astype("<f4")) == "dtype"
    assert channel.ignored == {"seat": 2, "step": 2, "version": 1, "epoch": 1, "samples": 1,
                            "size": 3, "dtype": 1, "again": 1}


def test_a_replica_that_only_follows_gets_no_samples_and_adds_no_gradient(
        channel: GradientChannel) -> None:
    channel.begin(PLAN, PARAMS, ["a", "b", "c"])
    member = MemberEnd(channel, 4, 1)  # it comes in the middle of a step
    header, params, samples = member.work()
    assert (header.samples, samples) == (0, []) and (params == PARAMS).all()
    assert member.say(msgspec.structs.replace(header, samples=1), PARAMS) == "replica"
    assert channel.collect(60) == {}
    assert member.say(header, np.zeros(6)) == ""  # after the step too: it adds nothing
    assert member.say(header, np.zeros(6)) == "step" and channel.added == 0


def test_a_channel_does_not_wait_for_a_disconnected_replica(channel: GradientChannel) -> None:
    member = MemberEnd(channel, 0, 3)
    wait_until_entered(channel, 0)
    channel.begin(PLAN, PARAMS, ["a", "b"])
    member.work()
    member.link.close()
    assert channel.collect(3600) == {}
    channel.begin(PLAN, PARAMS, ["a", "b"])  # nor one who never came
    assert channel.collect(3600) == {}


def test_a_connection_of_an_older_generation_is_refused(channel: GradientChannel) -> None:
    new = MemberEnd(channel, 0, 3)
    wait_until_entered(channel, 0)
    old = MemberEnd(channel, 0, 2)
    assert old.link.receive() is None and channel.ignored == {"entrance": 1}
    channel.begin(PLAN, PARAMS, ["a", "b"])
    assert new.work()[0].samples == 1


def test_a_member_that_does_not_read_does_not_delay_a_step(channel: GradientChannel) -> None:
    """The member does not read the parameters, which are larger than any socket buffer."""
    member = MemberEnd(channel, 0, 3)
    wait_until_entered(channel, 0)
    large = np.zeros(4 << 20)
    for step in range(3):
        channel.begin(msgspec.structs.replace(PLAN, step=step), large, ["a", "b"])
        assert channel.collect(0.01) == {}
    member.link.close()


def test_a_channel_refuses_a_member_without_the_key(channel: GradientChannel) -> None:
    with pytest.raises(AccessError, match="key is wrong"):
        dial_bulk((channel.address,), b"x" * 32, JOB)
    with pytest.raises(AccessError):
        dial_bulk((channel.address,), KEY, "another-job")
    first = dial_bulk((channel.address,), KEY, JOB)
    first.send(MemberHello(1, 1))  # the key, and then not the words of a channel
    assert first.receive() is None and not channel._members


def test_an_unreadable_message_ends_the_members_connection_before_its_payload(
    channel: GradientChannel) -> None:
    one = MemberEnd(channel, 0, 3)
    wait_until_entered(channel, 0)
    channel.begin(PLAN, PARAMS, [])
    one.work()  # from here on a payload is allowed
    one.link._connection.send(HEAD.pack(2, PARAMS.nbytes) + b"\xc1\xc1")
    one.link._connection.sock.settimeout(60)  # ends a hang
    assert one.link._connection.sock.recv(1) == b""


# ---- a coordinator on its own --------------------------------------------------------------------


class AtCoordinator:
    """A member's end of a connection to the coordinator."""

    def __init__(self, coordinator: Coordinator, member: int, incarnation: int) -> None:
        self.member, self.incarnation = member, incarnation
        self.link = dial_bulk((coordinator.address,), KEY, JOB)
        self.link.send(MemberHello(member, incarnation))

    def say(self, event: Any) -> None:
        self.link.send(MemberReport(event))

    def order(self) -> OrderMessage:
        got = self.link.receive()
        assert got is not None and isinstance(got[0], OrderMessage)
        return got[0]


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    pool = HybridPool(PoolRules(), [[0]], [1], [[6], [7]])
    one = Coordinator(pool, SystemClock(), [["tcp:nowhere:1"]], "127.0.0.1", KEY, JOB)
    yield one
    one.close()


def wait_for_role(coordinator: Coordinator, role: Role, member: int = 6) -> None:
    """Waits until a member has this role."""
    nap = threading.Event()
    for _ in range(3000):
        if coordinator.roles()[member] is role:
            return
        nap.wait(0.01)
    raise AssertionError(f"member {member} is {coordinator.roles()[member]}, not {role}")


def test_a_member_gets_orders_and_is_lost_when_its_connection_ends(
        coordinator: Coordinator) -> None:
    one = AtCoordinator(coordinator, 6, 5)
    wait_for_role(coordinator, Role.HYBRID_ROLLOUT)
    coordinator.begin(0, 0)
    coordinator.signal(PipelineSignal(1, 0, 2000, 1000))
    told = one.order()
    assert (told.order.stage, told.order.incarnation) == (R.REQUESTED, 5)
    one.say(MemberDone(6, 5, told.order.generation, R.REQUESTED))
    told = one.order()
    assert told.order.stage is R.FETCHING_STATE and told.channel == ("tcp:nowhere:1",)
    one.link.close()
    wait_for_role(coordinator, Role.LOST)
    assert (coordinator.states() == [R.LOST, R.LOST]
            and coordinator.ended_joins[-1].end is JoinOutcome.LOST)


def test_a_newer_incarnation_replaces_an_older_one_and_never_the_reverse(
    coordinator: Coordinator
) -> None:
    old = AtCoordinator(coordinator, 6, 5)
    wait_for_role(coordinator, Role.HYBRID_ROLLOUT)
    new = AtCoordinator(coordinator, 6, 9)
    assert old.link.receive() is None  # hung up
    late = AtCoordinator(coordinator, 6, 7)
    assert late.link.receive() is None
    coordinator.begin(0, 0)
    coordinator.signal(PipelineSignal(1, 0, 2000, 1000))
    assert new.order().order.incarnation == 9


def test_a_member_that_reports_for_another_is_disconnected(coordinator: Coordinator) -> None:
    one, other = AtCoordinator(coordinator, 6, 5), AtCoordinator(coordinator, 7, 5)
    wait_for_role(coordinator, Role.HYBRID_ROLLOUT)
    wait_for_role(coordinator, Role.HYBRID_ROLLOUT, 7)
    one.say(MemberFailed(7, 5, 1, "not mine to say"))
    assert one.link.receive() is None
    wait_for_role(coordinator, Role.LOST)
    assert coordinator.roles()[7] is Role.HYBRID_ROLLOUT
    other.link.close()


def test_an_unknown_member_is_disconnected(coordinator: Coordinator) -> None:
    assert AtCoordinator(coordinator, 99, 5).link.receive() is None


def test_a_member_that_is_silent_too_long_is_lost() -> None:
    pool = HybridPool(PoolRules(), [[0]], [], [[6]])
    coordinator = Coordinator(pool, SystemClock(), [["x"]], "127.0.0.1", KEY, JOB, silence_s=0.5)
    quiet = AtCoordinator(coordinator, 6, 1)
    assert quiet.link.receive() is None
    wait_for_role(coordinator, Role.LOST)
    coordinator.close()


class _Stopped(SystemClock):
    """A clock whose process is stopped now and then, so that its time jumps."""

    def __init__(self) -> None:
        super().__init__()
        self.jumped_ns = 0

    def now_ns(self) -> int:
        return super().now_ns() + self.jumped_ns


def test_a_coordinator_does_not_count_the_time_in_which_it_was_stopped() -> None:
    clock, pool = _Stopped(), HybridPool(PoolRules(), [[0]], [1], [[6], [7]])
    coordinator = Coordinator(pool, clock, [["x"]], "127.0.0.1", KEY, JOB, silence_s=3.0)
    one, nap = AtCoordinator(coordinator, 6, 5), threading.Event()
    wait_for_role(coordinator, Role.HYBRID_ROLLOUT)
    coordinator.begin(0, 0)
    coordinator.signal(PipelineSignal(1, 0, 2000, 1000))
    told = one.order()
    for _ in range(2):  # longer than anybody may be silent, and than any stage may take
        clock.jumped_ns += 3600 * 10**9
        nap.wait(1.2)
        assert coordinator.roles()[6] is Role.HYBRID_JOINING
        assert coordinator.states()[0] is R.REQUESTED
    one.say(MemberDone(6, 5, told.order.generation, R.REQUESTED))
    assert one.order().order.stage is R.FETCHING_STATE
    wait_for_role(coordinator, Role.LOST)  # a member that is really silent is still lost
    coordinator.close()


class _Elsewhere:
    """A port without a connection: nothing is received from it."""

    def tell(self, order: Any, channel: tuple[str, ...]) -> None:
        pass

    def attach(self, link: BulkLink) -> bool:
        return False

    def detached(self) -> None:
        pass

    def end(self) -> None:
        pass


def test_an_older_incarnations_silence_does_not_end_a_newer_one(coordinator: Coordinator) -> None:
    old = AtCoordinator(coordinator, 6, 1)
    wait_for_role(coordinator, Role.HYBRID_ROLLOUT)
    coordinator.adopt(6, 2, _Elsewhere())
    far = time.monotonic_ns() + 3600 * 10**9
    assert coordinator._liveness.silent(far) == []
    old.link.send(Alive())
    assert old.link.receive() is None  # hung up
    assert coordinator._liveness.silent(far) == [] and coordinator.roles()[6] is Role.HYBRID_ROLLOUT


# ---- leased members on their own: what the broker might say
# -----------------------------------------------


def join_with_lease(coordinator: Coordinator, start: Any) -> None:
    """Registers member 6 as a leased member and asks it to join."""
    add_leased_member(coordinator, 6, 0, start)
    coordinator.begin(0, 0)
    coordinator.signal(PipelineSignal(1, 0, 2000, 1000))


def wait_for_join_end(coordinator: Coordinator, end: JoinOutcome) -> str:
    """Waits until the first join has ended in this way; returns the reason."""
    nap = threading.Event()
    for _ in range(3000):
        if coordinator.ended_joins:
            assert coordinator.ended_joins[0].end is end
            return coordinator.ended_joins[0].reason
        nap.wait(0.01)
    raise AssertionError(coordinator.states())


def test_a_lease_that_is_refused_does_not_stop_the_trainer(coordinator: Coordinator) -> None:
    def refuse(number: int, incarnation: int) -> Future[Any]:
        raise InvalidInput("gpus: no")

    join_with_lease(coordinator, refuse)
    assert wait_for_join_end(coordinator, JoinOutcome.ROLLED_BACK) == "member 6: gpus: no"
    assert coordinator.states()[0] is R.ROLLOUT


def test_a_leased_member_whose_action_ended_is_lost_and_leased_again(
    coordinator: Coordinator
) -> None:
    lives: list[tuple[int, Future[Any]]] = []

    def start(number: int, incarnation: int) -> Future[Any]:
        lives.append((incarnation, Future()))
        return lives[-1][1]

    join_with_lease(coordinator, start)
    lives[0][1].set_exception(InvalidInput("its node is gone"))
    assert "its node is gone" in wait_for_join_end(coordinator, JoinOutcome.LOST)
    wait_for_role(coordinator, Role.HYBRID_ROLLOUT)
    for step in range(1, 8):  # asked again after `retry_steps`
        coordinator.begin(step, step)
    assert [incarnation for incarnation, _ in lives] == [0, 1]
    stranger = AtCoordinator(coordinator, 6, 0)  # a process of the incarnation before
    assert stranger.link.receive() is None
    process = AtCoordinator(coordinator, 6, 1)
    assert process.order().order.stage is R.REQUESTED
    process.say(MemberDone(6, 1, 2, R.REQUESTED))
    assert process.order().order.stage is R.FETCHING_STATE
    coordinator.signal(PipelineSignal(2, 7, 500, 1000))
    assert process.link.receive() is None and coordinator.states()[0] is R.RETURNING
    lives[1][1].set_result(None)
    wait_for_role(coordinator, Role.HYBRID_ROLLOUT)


def test_a_lease_that_has_not_begun_is_cancelled_when_rollout_needs_the_gpu(
        coordinator: Coordinator) -> None:
    waiting: Future[Any] = Future()
    join_with_lease(coordinator, lambda number, incarnation: waiting)
    coordinator.signal(PipelineSignal(2, 0, 500, 1000, 900))
    wait_for_join_end(coordinator, JoinOutcome.ROLLED_BACK)
    assert waiting.cancelled()


def test_old_names_of_the_hybrid_api_work_for_one_release() -> None:
    access = Access("job", ("tcp:nowhere:1",), KEY, "", "here", 1)
    callbacks = rig.RigCallbacks.__new__(rig.RigCallbacks)
    old = Member(access, 6, life=3, skills=callbacks)
    new = Member(access, 6, incarnation=3, callbacks=callbacks)
    assert vars(old) == vars(new) and Skills is ReplicaCallbacks
    assert HybridCore is CoreTrainer and Signal is PipelineSignal
    assert inspect.signature(lend).bind(desk=1, number=2, life=3, start=4)
    with pytest.raises(TypeError, match="`callbacks`"):
        Member(access, 6, 3)


def test_a_core_that_does_not_match_the_communicator_is_refused(tmp_path: Path) -> None:
    class World:
        size, rank = 3, 0

    text = "2 cores of 1 GPUs do not match the communicator's 3 ranks"
    with pytest.raises(InvalidInput, match=text):
        CoreTrainer(World(), tmp_path / "a", [[0], [1]], [], [])


_STOPPED = '''
import numpy as np
from test_hybrid_live import JOB, KEY, PLAN, GradientChannel, wait_until_entered
channel = GradientChannel(1, "127.0.0.1", KEY, JOB)
print(channel.address, flush=True)
wait_until_entered(channel, 0)
channel.begin(PLAN, np.zeros(1 << 20), ["a", "b"])
print("begun", flush=True)
print(sorted(channel.collect(3)), flush=True)
channel.close()
'''


_HERE = [str(folder) for folder in Path(__file__).parents[:2]]  # this module, and its helpers


def test_a_core_that_was_stopped_adds_the_gradients_that_arrived_meanwhile() -> None:
    """The core is stopped for longer than its timeout; the gradient is in its socket when it
    continues."""
    core = subprocess.Popen([sys.executable, "-c", _STOPPED], stdout=subprocess.PIPE, text=True,
                            env={**os.environ, "PYTHONPATH": os.pathsep.join(_HERE)})
    try:
        assert core.stdout is not None
        address = core.stdout.readline().strip()
        member = MemberEnd(SimpleNamespace(address=address), 0, 3)
        assert core.stdout.readline() == "begun\n"
        header, _, _ = member.work()
        time.sleep(0.5)  # it is in `collect`
        core.send_signal(signal.SIGSTOP)
        sender = threading.Thread(target=member.link.send,
                                  args=(Gradient(header), np.zeros(header.size).data))
        sender.start()
        time.sleep(4)
        core.send_signal(signal.SIGCONT)
        assert core.stdout.readline() == "[0]\n"
        sender.join(60)
        member.link.close()
    finally:
        core.kill()
        core.wait()
