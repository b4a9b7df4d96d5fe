"""Connections over MPI: real worlds under mpiexec, the errors of a wrong world, and the gateway's
driver alone.

No absolute times are asserted; a world that hangs fails by its timeout.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.gateway_rig import Ranks, Rig

from tangram_hpc import LocalCluster
from tangram_hpc.errors import AccessError, InvalidInput, ProtocolError, WrongWorld
from tangram_hpc.gateway import driver
from tangram_hpc.gateway.driver import KEEP_ALIVE
from tangram_hpc.gateway.watchdog import STATUS
from tangram_hpc.ports import ChannelLost
from tangram_hpc.protocol import message as ms
from tangram_hpc.protocol import relay
from tangram_hpc.protocol.frame import Outbox
from tangram_hpc.transport.mpi import mpi_world
from tangram_hpc.transport.mpi.mpi_channel import MpiChannel
from tangram_hpc.transport.mpi.mpi_launch import launch_of
from tangram_hpc.transport.mpi.mpi_oversubscription import oversubscribed, wait_environment
from tangram_hpc.transport.mpi.mpi_world import MpiWorld
from tangram_hpc.transport.mpi.rank_card import RankCard, complaint

MPIEXEC = Path(sys.executable).with_name("mpiexec")
GATEWAY = """
import os, sys
from tangram_hpc.app.gateway import serve_gateway
from tangram_hpc.config.settings import load_config
from tangram_hpc.errors import TangramError
try:
    sys.exit(serve_gateway(load_config(os.environ), os.environ))
except TangramError as error:
    print("tangram: error:", error, file=sys.stderr)
    sys.exit(error.exit_status)
"""
PARENT = "import tangram_hpc\nwith tangram_hpc.connect() as c:\n    comm = tangram_hpc.comm\n"
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_TASKS_PER_NODE": "3(x2),1", "SLURM_NODEID": "0"}
_SLEEP = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1", "I_MPI_THREAD_YIELD": "3"}
mpi = pytest.mark.mpi


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    if not MPIEXEC.exists() and not shutil.which("mpiexec"):
        pytest.skip("no mpiexec on this machine")
    with LocalCluster(cpus=2, home=tmp_path_factory.mktemp("mpi")) as running:
        yield running


def world(cluster: LocalCluster, trainer: str, ranks: int = 2, gateways: int = 1,
          **env: str) -> subprocess.CompletedProcess[str]:
    """Runs trainers with this program and gateways as one MPI world."""
    exe = str(MPIEXEC) if MPIEXEC.exists() else "mpiexec"
    words = [exe, "-n", str(ranks), sys.executable, "-c", trainer]
    if gateways:
        words += [":", "-n", str(gateways), sys.executable, "-c", GATEWAY]
    environ = {**os.environ, "TANGRAM_GATEWAY": "1", "TANGRAM_ACCESS": str(cluster.access), **env}
    environ.setdefault("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=120,
                          stdin=subprocess.DEVNULL, check=False)


def lines_of_ours(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert "Traceback" not in done.stderr, done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("tangram:")]


# ---- real worlds -------------------------------------------------------------------------------


@mpi
def test_actions_of_two_ranks_come_back_right(cluster: LocalCluster) -> None:
    done = world(cluster, PARENT + """
    def square(i):
        return i * i
    fs = [c.submit(square, i) for i in range(200)]
    ts = [c.submit(["/bin/true"]) for _ in range(200)]
    assert [f.result(60) for f in fs] == [i * i for i in range(200)]
    assert all(t.result(60).exit_code == 0 for t in ts)
    assert c.via == "mpi" and c.size == comm.size == 2 and c.rank == comm.rank
    assert comm.allreduce(comm.rank) == 1
    print("fine")
""")
    assert (done.returncode, done.stdout.count("fine")) == (0, 2), done.stderr
    assert lines_of_ours(done) == []


@mpi
@pytest.mark.parametrize("close", ["c.close()", "pass"])
def test_a_rank_that_finalises_mpi_itself_keeps_no_other_one(cluster: LocalCluster,
                                                             close: str) -> None:
    done = world(cluster, f"""
import tangram_hpc
c = tangram_hpc.connect()
assert c.submit(abs, -1).result(60) == 1
if tangram_hpc.comm.rank == 0:
    from mpi4py import MPI
    {close}
    MPI.Finalize()
else:
    assert c.submit(abs, -2).result(60) == 2
print("fine")
""")
    assert (done.returncode, done.stdout.count("fine")) == (0, 2), done.stderr
    assert lines_of_ours(done) == []


@mpi
def test_ranks_share_an_endpoint(cluster: LocalCluster) -> None:
    done = world(cluster, PARENT + """
    import asyncio
    e = c.register_endpoint("search", concurrency=1, rate=1000, burst=1000)
    async def attempt():
        held = [x for x in c.ask("info")["endpoints"] if x["name"] == "search"][0]["inside"]
        return held
    async def calls():
        return await asyncio.gather(*(e.request(attempt) for _ in range(20)))
    assert asyncio.run(calls()) == [1] * 20 and c.via == "mpi"
    print("fine")
""")
    assert (done.returncode, done.stdout.count("fine")) == (0, 2), done.stderr


@mpi
def test_a_rank_attaches_to_the_session_of_another_rank(cluster: LocalCluster) -> None:
    done = world(cluster, PARENT + """
    import tangram_hpc
    if comm.rank == 0:
        s = c.session(shared=True, env={"WHO": "rank 0"})
        comm.bcast(s.handle(may_close=True), root=0)
        assert s.exec("echo $WHO > f").result(60).ok
        comm.barrier()
        comm.barrier()
        assert "closed by client" in s.closed.result(60)
    else:
        handle = comm.bcast(None, root=0)
        comm.barrier()
        with c.attach(handle) as s:
            assert s.read("f").result(60) == b"rank 0\\n"
            assert s.exec("echo $WHO").result(60).text == "rank 0\\n"
            s.close()
        comm.barrier()
    assert c.via == "mpi"
    print("fine")
""")
    assert (done.returncode, done.stdout.count("fine")) == (0, 2), done.stderr


@mpi
def test_large_payloads_both_ways_do_not_block(cluster: LocalCluster) -> None:
    done = world(cluster, PARENT + """
    import os
    def turn(b):
        return b[::-1]
    sent = [os.urandom(64000) for _ in range(300)]
    fs = [c.submit(turn, b) for b in sent]
    assert all(f.result(100) == b[::-1] for f, b in zip(fs, sent))
    assert c.via == "mpi"
    print("fine")
""", ranks=3)
    assert (done.returncode, done.stdout.count("fine")) == (0, 3), done.stderr


@mpi
def test_a_second_client_uses_the_socket_while_the_first_uses_mpi(cluster: LocalCluster) -> None:
    done = world(cluster, PARENT + """
    assert c.submit(["echo", "1"]).result(60).text == "1\\n"
    other = tangram_hpc.connect()  # one client owns MPI: another goes by the socket
    assert other.via == "socket" and other.submit(["true"]).result(60).exit_code == 0
    other.close()
with tangram_hpc.connect() as c:
    assert c.via == "mpi" and c.submit(["echo", "2"]).result(60).text == "2\\n"
    print("fine")
""")
    assert (done.returncode, done.stdout.count("fine")) == (0, 2), done.stderr


@mpi
def test_a_client_left_open_at_exit_gives_no_error(cluster: LocalCluster) -> None:
    done = world(cluster, "import sys, tangram_hpc\nc = tangram_hpc.connect()\n"
                 "assert c.submit(['true']).result(60).exit_code == 0\nsys.exit(3)\n")
    assert done.returncode == 3, done.stderr
    assert lines_of_ours(done) == []


@mpi
@pytest.mark.parametrize("first", ["", "from mpi4py import MPI\n"], ids=["ours", "mpi4pys"])
def test_processes_that_a_rank_starts_use_the_socket(cluster: LocalCluster, first: str) -> None:
    """A forked child must not touch MPI, not even at its exit, whoever finalises MPI. A program
    that a rank starts is no rank."""
    done = world(cluster, first + PARENT + """
    import os, subprocess, sys
    def own():
        with tangram_hpc.connect() as mine:
            return mine.via, mine.submit(["echo", "own"]).result(60).text
    pid = os.fork()
    if not pid:
        try:
            c.submit(["true"])
        except tangram_hpc.BrokerUnreachable as error:
            assert "was forked" in str(error)
        assert own() == ("socket", "own\\n")
        sys.exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    told = subprocess.run([sys.executable, "-c", "import tangram_hpc\\n"
        "with tangram_hpc.connect() as c: print(c.via)"], capture_output=True, text=True)
    assert told.stdout == "socket\\n", told.stderr
    assert c.via == "mpi" and c.submit(["echo", "1"]).result(60).text == "1\\n"
    assert comm.allreduce(1) == 2
    print("fine")
""")
    assert (done.returncode, done.stdout.count("fine")) == (0, 2), done.stderr
    assert lines_of_ours(done) == []


@mpi
@pytest.mark.parametrize(("ranks", "gateways", "env", "said"), [
    (2, 1, {"TANGRAM_WORLD_SIZE": "5"}, "has 3 ranks, but 5 were launched (TANGRAM_WORLD_SIZE)"),
    (2, 0, {}, "of 2 ranks has 0 gateways"),
    (1, 2, {}, "of 3 ranks has 2 gateways"),
    (2, 1, {"TANGRAM_ACCESS": "/nowhere/access.json", "TANGRAM_MPI_TIMEOUT_S": "10"},
     "the gateway: access file /nowhere/access.json"),
])
def test_a_wrong_mpi_world_is_refused_in_one_line(
        cluster: LocalCluster, ranks: int, gateways: int, env: dict[str, str], said: str) -> None:
    done = world(cluster, PARENT + "    pass\n", ranks, gateways, **env)
    told = lines_of_ours(done)
    assert done.returncode == 2 and len(told) == 1 and said in told[0], done.stderr


@mpi
@pytest.mark.parametrize("asked", ["", "0"])
def test_ranks_that_share_a_core_sleep_while_they_wait(cluster: LocalCluster, asked: str) -> None:
    """Two trainers and the gateway share one core; a setting of the user for MPI is kept. Open MPI
    cannot sleep."""
    env = dict.fromkeys(_SLEEP, asked) if asked else {}
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        done = world(cluster, f"""
import os, resource, time, tangram_hpc
with tangram_hpc.connect() as c:
    assert c.via == "mpi"
    assert [os.environ[name] for name in {list(_SLEEP)}] == {list((env or _SLEEP).values())}
    assert c.submit(pow, 2, 3).result(60) == 8
    tangram_hpc.comm.barrier()
    begin = resource.getrusage(resource.RUSAGE_THREAD)
    if tangram_hpc.comm.rank == 0:
        time.sleep(1)
    tangram_hpc.comm.barrier()  # the other waits in MPI
    end = resource.getrusage(resource.RUSAGE_THREAD)
    if tangram_hpc.comm.rank == 1:  # a yield gives the core up involuntarily, a sleep does not
        slept = end.ru_nvcsw - begin.ru_nvcsw > end.ru_nivcsw - begin.ru_nivcsw
        print("asleep" if slept else "busy", flush=True)
        from mpi4py import MPI
        print(MPI.Get_library_version().split()[0], flush=True)
""", **env)
    finally:
        os.sched_setaffinity(0, before)
    assert done.returncode == 0 and lines_of_ours(done) == [], done.stderr
    how, library = done.stdout.split()
    assert how == ("busy" if asked or library == "Open" else "asleep")


@mpi
def test_a_rank_that_never_connects_is_reported_in_one_line(cluster: LocalCluster) -> None:
    trainer = ("import os, time\n"
               "if '1' in map(os.environ.get, ('PMI_RANK', 'PMIX_RANK')): time.sleep(60)\n"
               "import tangram_hpc; tangram_hpc.connect()\n")
    done = world(cluster, trainer, TANGRAM_MPI_TIMEOUT_S="2")
    told = lines_of_ours(done)
    assert done.returncode != 0 and any("did not come up within 2 s" in line for line in told)
    assert all("set TANGRAM_MPI_TIMEOUT_S to" in line for line in told), told


def test_a_gateway_world_without_a_launcher_is_refused_in_one_line() -> None:
    alone = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "SLURM", "OMPI"))}
    done = subprocess.run([sys.executable, "-c", PARENT + "    pass\n"], capture_output=True,
                          text=True, env={**alone, "TANGRAM_GATEWAY": "1"}, timeout=60, check=False)
    assert done.returncode == 2
    assert len(lines_of_ours(done)) == 1 and "no launcher" in done.stderr


# ---- what the environment and the ranks say ----------------------------------------------------


def test_the_world_size_is_read_from_the_launchers_environment() -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "9", "SLURM_PROCID": "4"}
    with pytest.raises(WrongWorld, match="srun started 9 tasks with --mpi=none"):
        launch_of(slurm)
    assert launch_of({**slurm, "PMIX_RANK": "3"}).size == 9
    under_hydra = launch_of({**slurm, "PMI_SIZE": "3", "PMI_RANK": "1"})
    assert (under_hydra.size, under_hydra.source, under_hydra.rank) == (3, "PMI_SIZE", 1)
    assert launch_of({"TANGRAM_WORLD_SIZE": "4", "PMI_SIZE": "1"}).size == 4
    with pytest.raises(InvalidInput, match="TANGRAM_WORLD_SIZE: 'two'"):
        launch_of({"TANGRAM_WORLD_SIZE": "two", "PMI_SIZE": "1"})


@pytest.mark.parametrize(("environ", "usable", "is_shared"), [
    ({}, 1, False),  # nobody says how many we are
    ({"MPI_LOCALNRANKS": "4"}, 4, False), ({"MPI_LOCALNRANKS": "5"}, 4, True),
    ({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 2, True),
    ({**STEP, "SLURM_NODEID": "1"}, 8, False), ({**STEP, "SLURM_NODEID": "1"}, 2, True),
    ({**STEP, "SLURM_NODEID": "2"}, 1, False), ({**STEP, "SLURM_NODEID": "3"}, 1, False),
    ({**STEP, "SLURM_CPU_BIND_TYPE": "mask_cpu:"}, 1, False),  # each task has a CPU of its own
    ({**STEP, "SLURM_CPU_BIND_TYPE": "none"}, 1, True),
    ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "9", "SLURM_CPU_BIND_TYPE": "mask_cpu:"}, 1, True),
    ({**STEP, "SLURM_NODEID": "0", "MPI_LOCALNRANKS": "1"}, 1, False)])  # mpiexec in the step
def test_ranks_yield_while_waiting_on_an_oversubscribed_node(
        environ: dict[str, str], usable: int, is_shared: bool) -> None:
    assert oversubscribed(environ, usable, 8) is is_shared
    assert wait_environment(environ, is_shared) == (_SLEEP if is_shared else {})
    assert wait_environment(dict.fromkeys(_SLEEP, "0"), True) == {}


def test_inconsistent_rank_cards_give_the_right_error() -> None:
    trainer, gateway = RankCard("trainer", "1"), RankCard("gateway", "1")
    assert complaint([trainer, trainer, gateway]) is None
    assert isinstance(complaint([trainer, gateway, gateway]), WrongWorld)
    assert isinstance(complaint([RankCard("trainer", "1", size=3, source="PMI_SIZE")]), WrongWorld)
    assert isinstance(complaint([RankCard("trainer", "2"), gateway]), ProtocolError)
    assert isinstance(complaint([trainer, RankCard("gateway", "1", problem="no")]), AccessError)


# ---- the driver and the channel alone ----------------------------------------------------------


def test_the_gateway_relays_bytes_unread_both_ways() -> None:
    rig = Rig()
    rig.hear(0, relay.OPEN, b"\1\0\0\0")
    rig.hear(0, relay.DATA, b"abc")
    rig.pipes.come = [(0, b"xyz", "")]
    rig.gateway.turn()
    assert ("open", 0) in rig.pipes.calls and ("write", 0, b"abc") in rig.pipes.calls
    assert rig.ranks.said == [(0, relay.OPEN, b"\1\0\0\0"), (0, relay.DATA, b"xyz")]


def test_a_closed_broker_connection_is_reported_only_to_its_rank() -> None:
    rig = Rig()
    for rank in (0, 1):
        rig.hear(rank, relay.OPEN, b"\1\0\0\0")
    rig.pipes.come = [(0, b"", "closed")]
    rig.gateway.turn()
    assert rig.ranks.said[-1] == (0, relay.BROKER_CLOSED, b"closed")
    assert relay.BROKER_CLOSED not in rig.to(1)


def test_a_silent_rank_is_disconnected_and_told_so_when_it_returns() -> None:
    rig = Rig()
    rig.hear(0, relay.OPEN, b"\1\0\0\0")
    rig.later(relay.RANK_SILENCE_S + 1)
    assert ("close", 0) in rig.pipes.calls
    said = len(rig.ranks.said)
    rig.pipes.come = [(0, b"late", "")]
    rig.later(3)
    assert len(rig.ranks.said) == said
    rig.hear(0, relay.DATA, b"?")
    assert rig.ranks.said[-1][1] == relay.BROKER_CLOSED


def test_a_gateway_that_was_stopped_disconnects_no_rank() -> None:
    rig = Rig()
    rig.hear(0, relay.OPEN, b"\1\0\0\0")
    rig.ns += int(100e9)
    rig.gateway.turn()
    assert ("close", 0) not in rig.pipes.calls[2:]


def test_the_gateway_stops_reading_for_a_rank_that_does_not_receive() -> None:
    rig = Rig()
    rig.hear(0, relay.OPEN, b"\1\0\0\0")
    rig.ranks.stuck[0] = driver._HOLD
    rig.pipes.come = [(0, b"more", "")]
    rig.gateway.turn()
    assert rig.pipes.calls[-1] == ("hold", 0, True)
    rig.ranks.stuck[0] = 0
    rig.gateway.turn()
    assert rig.pipes.calls[-1] == ("hold", 0, False)


@pytest.mark.parametrize(("word", "orderly", "last"), [(b"", True, relay.PART),
                                                        (b"!", False, relay.END)])
def test_the_gateway_ends_when_all_ranks_have_left(word: bytes, orderly: bool, last: int) -> None:
    rig = Rig()
    rig.ranks.come += [(0, relay.LEAVE, bytearray()), (1, relay.LEAVE, bytearray(word))]
    assert rig.gateway.run() is orderly
    assert rig.to(0)[-1] == last


def test_the_gateway_ends_after_its_broker_is_gone() -> None:
    rig = Rig()
    rig.pipes.come = [(KEEP_ALIVE, b"", "the broker closed the connection")]
    assert rig.gateway.run() is False
    assert rig.gateway.orphaned and rig.to(0)[-1] == relay.END
    assert rig.pipes.waited_s > 30  # its ranks had time to see it for themselves


def test_the_gateway_goes_on_when_its_broker_is_started_again() -> None:
    """It looks for the broker about once a second, one attempt at a time, and its ranks' pipes are
    dialled again whenever they ask."""
    rig, looked = Rig(), ("open", KEEP_ALIVE)
    rig.hear(0, relay.OPEN, b"\1\0\0\0")
    rig.pipes.come = [(KEEP_ALIVE, b"", "the broker closed the connection"), (0, b"", "closed")]
    rig.gateway.turn()
    assert rig.gateway.orphaned and rig.to(0)[-1] == relay.BROKER_CLOSED
    for attempts in range(1, 6):
        rig.later(5)
        assert rig.pipes.calls.count(looked) == attempts  # the one before has not failed yet
        rig.pipes.come = [(KEEP_ALIVE, b"", "no broker answers")]
        rig.gateway.turn()
    rig.pipes.up = {KEEP_ALIVE}
    rig.later(1)
    assert not rig.gateway.orphaned
    rig.hear(0, relay.OPEN, b"\2\0\0\0")
    assert rig.pipes.calls[-1] == ("open", 0) and rig.to(0)[-1] == relay.OPEN
    rig.pipes.up = set()
    rig.later(100)
    assert not rig.gateway._over()  # the time without a broker was forgotten
    rig.pipes.come = [(KEEP_ALIVE, b"", "the broker closed the connection")]
    rig.gateway.turn()
    rig.pipes.come = [(KEEP_ALIVE, b"", "no broker answers")]
    rig.gateway.turn()
    rig.later(50)
    assert rig.gateway.orphaned and not rig.gateway._over()
    rig.later(11)
    assert rig.gateway._over()


def test_an_mpi_channel_drops_messages_of_an_older_connection() -> None:
    ranks, box = Ranks(), Outbox()
    box.put(ms.Pong(7))
    frame = b"".join(box.take())
    channel = MpiChannel(ranks, 2, 5, 0, lambda why: None)
    ranks.come += [(2, relay.DATA, bytearray(b"old rubbish")),
                   (2, relay.BROKER_CLOSED, bytearray(b"old")),
                   (2, relay.OPEN, bytearray(b"\5\0\0\0")),
                   (2, relay.DATA, bytearray(frame[:5])), (2, relay.DATA, bytearray(frame[5:]))]
    assert [m for m, _ in channel.wait(1.0, True)] == [ms.Pong(7)]
    ranks.come.append((2, relay.BROKER_CLOSED, bytearray(b"why")))
    with pytest.raises(ChannelLost, match="why"):
        list(channel.wait(1.0, True))


def test_an_mpi_channel_treats_silence_as_lost_and_stops_sending(
        monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, dead = Ranks(), []
    monkeypatch.setattr(relay, "GATEWAY_SILENCE_S", 0.05)
    channel = MpiChannel(ranks, 2, 1, 0, dead.append)
    with pytest.raises(ChannelLost, match="silent"):
        list(channel.wait(10.0, True))
    said = len(ranks.said)
    channel.close()
    assert dead and len(ranks.said) == said


def test_waking_an_mpi_channel_ends_its_wait() -> None:
    channel = MpiChannel(Ranks(), 2, 1, 0, lambda why: None)
    threading.Timer(0.05, channel.wake).start()
    assert list(channel.wait(4.0, False)) == []


def test_a_rank_whose_gateway_is_gone_does_not_finalise_when_it_is_asked_again(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end without MPI_Finalize runs all exit handlers, so that of the world a second time."""
    world: Any = MpiWorld.__new__(MpiWorld)
    vars(world).update(
        _owner=os.getpid(), _own_finalize=False, _ending=False, _parted=None, _clients=[],
        dead="it is silent", shares_fate=False, _presence=SimpleNamespace(stop=lambda: None),
        _mpi=SimpleNamespace(Is_finalized=lambda: False),
        _finalize=lambda: pytest.fail("MPI_Finalize would wait for the gateway"))
    ended: list[int] = []
    monkeypatch.setattr(mpi_world.atexit, "_run_exitfuncs", world.leave)
    monkeypatch.setattr(mpi_world.os, "_exit", ended.append)
    world.leave()
    assert ended == [0]


def test_a_gateway_that_hangs_is_ended_by_its_watchdog() -> None:
    text = ("import time; from tangram_hpc.gateway.watchdog import watch\n"
            "watch(lambda: 1, 0.2); time.sleep(30)")
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.returncode == STATUS and len(lines_of_ours(done)) == 1
