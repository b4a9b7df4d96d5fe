"""For a client that does not read, the broker holds a bounded amount of memory and delays nobody
else; the client has lost nothing when it reads again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.broker_rig import BrokerRig, FakePeer, action_of
from helpers.cluster_parts import broker_of
from helpers.folder_size import bytes_in

from tangram_hpc import LocalCluster
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol import message as ms

RESULTS, SIZE = 3000, 60_000
READER = """
import os, sys, time, tangram_hpc
number, size, go = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def wait():
    while not os.path.exists(go):
        time.sleep(0.01)

def fill(n):
    return n.to_bytes(4, "little") * (size // 4)

with tangram_hpc.connect() as client:
    first = client.submit(wait)
    futures = [client.submit(fill, n) for n in range(number)]
    for n, future in enumerate(futures):
        assert future.result(120) == n.to_bytes(4, "little") * (size // 4), n
    print("all", flush=True)
"""


def resident_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


def until(true: Callable[[], object], what: str, patience_s: float = 100) -> None:
    deadline = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.1)


@pytest.mark.timeout(200)
@pytest.mark.attack("rank", "memory")
def test_a_client_that_does_not_read_takes_bounded_broker_memory(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with LocalCluster(cpus=1, home=tmp_path / "home") as c:
        broker = broker_of(c).pid
        reader = subprocess.Popen(
            [sys.executable, "-c", READER, str(RESULTS), str(SIZE), str(go)],
            env={**os.environ, "TANGRAM_ACCESS": str(c.access)}, stdout=subprocess.PIPE, text=True)
        try:
            until(lambda: sum(c.ask("info")["actions"].values()) == RESULTS + 1, "all to be known")
            before = resident_mib(broker)
            reader.send_signal(signal.SIGSTOP)
            go.touch()
            until(lambda: c.ask("info")["actions"].get("COMPLETED") == RESULTS + 1, "all to end")
            grown = resident_mib(broker) - before
            assert c.submit(["echo", "served"]).result(60).text == "served\n"
            reader.send_signal(signal.SIGCONT)
            said, _ = reader.communicate(timeout=120)
            assert said == "all\n" and reader.returncode == 0
            until(lambda: not c.ask("info")["actions"].get("COMPLETED"), "all to be acknowledged")
        finally:
            reader.kill()
            reader.wait()
        print(f"{RESULTS * SIZE >> 20} MiB of results: the broker grew by {grown:.0f} MiB")
        assert grown < 80  # of 171 MiB; half a result each is what the ledger keeps
        assert bytes_in(c.folder / "overflow") == 0


class SlowPeer(FakePeer):
    """A client whose connection accepts nothing until the client reads."""

    def __init__(self, rig: BrokerRig) -> None:
        self.unsent, self.reads = 0, True  # type: ignore[misc]
        super().__init__(rig)

    def flush(self) -> None:
        if self.reads:
            return super().flush()
        self.unsent = 1 << 30  # type: ignore[misc]

    def read(self) -> None:
        self.reads, self.unsent = True, 0  # type: ignore[misc]
        self.flush()
        self.rig.broker.room(self.peer)


class MemorySpill:
    """A spill in memory that counts what it holds."""

    def __init__(self) -> None:
        self.data: dict[int, bytearray] = {}
        self.needed = 0

    def put(self, client: int, data: bytes) -> int:
        self.needed += 1
        held = self.data.setdefault(client, bytearray())
        held += data
        return len(held) - len(data)

    def get(self, client: int, offset: int, size: int) -> bytes:
        return bytes(self.data[client][offset : offset + size])

    def free(self, client: int) -> None:
        self.needed -= 1

    def drop(self, client: int) -> None:
        self.data.pop(client, None)


@pytest.mark.parametrize("comes_back", [False, True], ids=["reads again", "comes by another way"])
def test_a_slow_client_gets_every_message_once_and_in_order(comes_back: bool) -> None:
    spill = MemorySpill()
    rig = BrokerRig(spill=spill)
    worker = rig.worker(8)
    slow = SlowPeer(rig)
    slow.say(ms.ClientHello(ms.PROTOCOL_VERSION, "j", "slow"))
    slow.reads = False
    for number in range(1, 601):
        slow.say(ms.Submit(action_of(slow, number)), b"call")
        lease = worker.last(ms.StartAttempt).lease
        worker.say(ms.Output(lease, 1), b"%d" % number * 20_000)
        worker.say(ms.Finished(lease, Outcome(ActionState.COMPLETED), n=1),
                   b"%d" % number * 20_000)
    assert spill.needed > 0
    if comes_back:
        slow.leave()
        slow = SlowPeer(rig)
        slow.say(ms.ClientHello(ms.PROTOCOL_VERSION, "j", "slow"))
    else:
        slow.read()
    results = [(m, p) for m, p in slow.heard if isinstance(m, ms.ActionResult)]
    numbers = [m.action & 0xFFFFFFFF for m, _ in results]
    assert numbers == list(range(1, 601))
    assert all(payload == b"%d" % n * 20_000 for n, (_, payload) in zip(numbers, results,
                                                                        strict=True))
    if not comes_back:  # output that was on its way is lost with the way, as ever
        outputs = [p for m, p in slow.heard if isinstance(m, ms.Output)]
        assert outputs == [b"%d" % n * 20_000 for n in range(1, 601)]
    slow.say(ms.Ack(tuple(m.action for m, _ in results)))
    assert spill.needed == 0
    assert not rig.broker._outbox.of(slow.last(ms.Welcome).client)
