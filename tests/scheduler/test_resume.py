"""A broker that is killed at any instant and restarted: no named action is lost or done twice.

The rig drives the real broker over its real journal and spool files. Its worker and its trainer are
played by hand, so that an instant is given by the sizes of the two files.
"""

from __future__ import annotations

import os
import random
import zlib
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from helpers.broker_rig import BrokerRig

from tangram_hpc.accounting.record import fold
from tangram_hpc.broker.driver import Broker, Settings
from tangram_hpc.client.request import Options, exec_call, make_action
from tangram_hpc.domain.action import Action, Kind
from tangram_hpc.domain.allocation import AllocPolicy, SatelliteShape
from tangram_hpc.domain.ids import mint
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.service import ServiceSpec
from tangram_hpc.domain.states import ActionState
from tangram_hpc.errors import InvalidInput
from tangram_hpc.protocol import message as ms
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.scheduler import Scheduler
from tangram_hpc.storage.journal import FileJournal
from tangram_hpc.storage.journal_segments import journals, next_journal, read_journals
from tangram_hpc.storage.spool import FileSpool

JOB = "7"
Sizes = tuple[int, int]  # of spool and journal


@dataclass
class Peer:
    """A link whose other end is the test."""

    heard: list[tuple[ms.Message, bytes | None]] = field(default_factory=list)
    unsent = 0

    def send(self, message: ms.Message, payload: bytes | None = None) -> None:
        self.heard.append((message, None if payload is None else bytes(payload)))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class Rig:
    """One start of a broker in a folder, with workers and one trainer; time is a counter."""

    def __init__(self, folder: Path, start: int, seed: int = 0, limit: int = 1 << 20,
                 segment: int = 1 << 20, policy: AllocPolicy | None = None) -> None:
        self.folder, self.rng, self.now = folder, random.Random(seed), start * 10**12
        self.due: list = []
        self.runs: list[tuple[ms.StartAttempt, bytes, Peer]] = []
        self.ran: dict[str, int] = {}
        self.told: dict[str, tuple[str, str]] = {}  # name -> state, payload
        self.names: dict[int, str] = {}
        scheduler = Scheduler(make_placer("elastic"))
        for event in read_journals(folder) if journals(folder) else ():
            scheduler.handle(event)
            scheduler.ledger.check()
        self.spool = FileSpool(folder / "once", limit, segment)
        self.path = next_journal(folder)
        self.journal = FileJournal(self.path, "none", lambda call: call(), self.spool.sync)
        settings = Settings(JOB, "", 2, policy=policy)
        self.broker = Broker(scheduler, self.journal, self, self, settings, lambda: None,
                             self.spool)
        self.broker.start()
        self.workers = [self._join(n, ms.WorkerHello(ms.PROTOCOL_VERSION, JOB, NodeSpec(
            f"n{n}", "h", (0, 1), 1024, untrusted=("model",)))) for n in range(2)]
        self.trainer = Peer()
        self.peer = self.broker.accept(self.trainer)
        self.broker.receive(self.peer, ms.ClientHello(ms.PROTOCOL_VERSION, JOB, f"uid{start}"),
                            None)
        self.turn()
        welcome = next(m for m, _ in self.trainer.heard if isinstance(m, ms.Welcome))
        self.client, self.counter = welcome.client, 0

    def _join(self, number: int, hello: ms.WorkerHello) -> tuple[Peer, object]:
        peer = Peer()
        accepted = self.broker.accept(peer)
        self.broker.receive(accepted, hello, None)
        return peer, accepted

    def now_ns(self) -> int:
        self.now += 1
        return self.now

    def after(self, delay_s: float, call) -> None:
        if delay_s == 0:
            self.due.append(call)

    def turn(self) -> None:
        """Runs all timers that are due and delivers what was sent."""
        while self.due:
            self.due.pop(0)()
        for peer, _ in self.workers if hasattr(self, "workers") else ():
            for message, payload in peer.heard:
                if isinstance(message, ms.StartAttempt):
                    name = message.action.once
                    self.ran[name] = self.ran.get(name, 0) + 1
                    self.runs.append((message, payload or b"", peer))
            peer.heard.clear()
        for message, payload in self.trainer.heard if hasattr(self, "trainer") else ():
            if isinstance(message, ms.ActionResult) and message.action in self.names:
                self.told[self.names[message.action]] = (
                    message.outcome.state.value, (payload or b"").decode())

    def submit(self, name: str, once: bool = True) -> int:
        self.counter += 1
        action = Action(mint(self.client, self.counter), "x", once=name if once else "")
        self.names[action.id] = name
        self.say(ms.Submit(action), name.encode())
        return action.id

    def say(self, message: ms.Message, payload: bytes | None = None) -> None:
        self.broker.receive(self.peer, message, payload)

    def finish(self, state: ActionState = ActionState.COMPLETED) -> None:
        """One running action ends, chosen at random."""
        start, payload, peer = self.runs.pop(self.rng.randrange(len(self.runs)))
        accepted = next(t for p, t in self.workers if p is peer)
        said = payload + b"/%d" % self.ran[start.action.once]
        self.broker.receive(accepted, ms.Finished(start.lease, Outcome(state), n=1), said)

    def sizes(self) -> Sizes:
        spool = self.folder / "once" / str(self.spool._number)
        return spool.stat().st_size, self.path.stat().st_size

    def finish_all(self) -> None:
        self.turn()
        while self.runs:
            self.finish()
            self.turn()

    def close(self) -> None:
        self.broker.stop("test")
        self.spool.close(remove=False)


NAMES = [f"w{n}" for n in range(9)]


Instant = tuple[Sizes, dict[str, tuple[str, str]]]  # what is written, what the trainer knows


def first_start(folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch
                ) -> tuple[list[Instant], Rig]:
    """A first start of the broker: the sizes of its files after each write, and the results that
    the trainer knew then."""
    rig, rng, write = Rig(folder, 1, seed), random.Random(seed), os.write
    seen: list[Instant] = [((0, 0), {}), (rig.sizes(), {})]

    def noted(fd: int, data: bytes) -> int:
        count = write(fd, data)
        seen.append((rig.sizes(), dict(rig.told)))
        return count

    monkeypatch.setattr(os, "write", noted)
    left = list(NAMES)
    while left or rig.runs:
        if left and (not rig.runs or rng.random() < 0.5):
            for name in left[: rng.randrange(1, 4)]:
                left.remove(name)
                rig.submit(name)
                if rng.random() < 0.3:
                    rig.submit(name + "?", once=False)
        else:
            for _ in range(rng.randrange(1, 3)):
                if rig.runs:
                    rig.finish(rng.choice([ActionState.COMPLETED] * 3 + [ActionState.FAILED]))
        rig.turn()
    monkeypatch.undo()
    return [*seen, (rig.sizes(), dict(rig.told))], rig


def instants_of(seen: list[Instant], rng: random.Random) -> list[Instant]:
    """Every instant between two writes, and some instants within each write."""
    found = []
    for ((s0, j0), known), ((s1, j1), _) in pairwise(seen):
        assert s0 == s1 or j0 == j1 or (s0, j0) == (0, 0)
        within = [((s0 + s1) // 2, (j0 + j1) // 2), (rng.randint(s0, s1), rng.randint(j0, j1)),
                  (max(s0, s1 - 1), max(j0, j1 - 1))]
        found += [(sizes, known) for sizes in dict.fromkeys([(s0, j0), *within])]
    return [*found, seen[-1]]


@pytest.mark.parametrize("seed", range(3))
def test_a_broker_killed_at_any_instant_loses_and_repeats_no_named_action(
        tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tmp_path / "first"
    first.mkdir()
    seen, rig = first_start(first, seed, monkeypatch)
    spool = (first / "once" / "0").read_bytes()
    journal = (first / "journal").read_bytes()
    rig.close()
    for number, ((s, j), known) in enumerate(instants_of(seen, random.Random(seed))):
        folder = tmp_path / str(number)
        (folder / "once").mkdir(parents=True)
        (folder / "once" / "0").write_bytes(spool[:s])
        (folder / "journal").write_bytes(journal[:j])
        submitted = {r.action.once for r in fold(read_journals(folder)).records.values()}
        again = Rig(folder, 2, seed)
        again.finish_all()  # the queue goes on before anybody asks
        resumed = dict(again.ran)
        assert all(again.spool.has_result(name) for name in submitted - {""})
        for name in NAMES:
            again.submit(name)
        again.finish_all()
        assert set(again.told) == set(NAMES), (number, s, j)
        for name in NAMES:
            assert again.ran.get(name, 0) <= 1, f"{name} ran twice after cut {number}"
            if name in known:
                assert again.told[name] == known[name] and name not in again.ran
            elif name in resumed:
                assert again.told[name][1] == f"{name}/1"
        assert not any(name.endswith("?") for name in again.ran)  # nobody would take its result
        again.close()
        rows = fold(read_journals(folder)).records.values()
        ends = [r.action.once for r in rows if r.action.once
                and r.state in (ActionState.COMPLETED, ActionState.FAILED)]
        assert sorted(ends) == sorted(NAMES), f"accounting after cut {number}: {ends}"
        assert all(r.end_ns for r in rows)


def test_named_results_survive_many_broker_restarts_in_a_row(tmp_path: Path) -> None:
    """The broker is killed again and again, and some actions finish each time."""
    rng, told = random.Random(5), dict[str, tuple[str, str]]()
    for start in range(1, 30):
        rig = Rig(tmp_path, start, start, segment=200)
        for name in NAMES:
            rig.submit(name)
        rig.turn()
        for _ in range(rng.randrange(0, 3)):
            if rig.runs:
                rig.finish()
        rig.turn()
        for name, said in told.items():
            assert rig.told[name] == said and name not in rig.ran
        told.update(rig.told)
        if len(told) == len(NAMES):
            break
        # not closed: killed
    assert len(told) == len(NAMES) and start > 3
    assert len(list(tmp_path.glob("journal*"))) == start


def test_all_submitters_of_one_idempotency_key_get_its_result(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 1)
    first, second = rig.submit("a"), rig.submit("a")
    rig.turn()
    assert len(rig.runs) == 1
    rig.say(ms.Submit(Action(second, "x", once="a")), b"a")  # said again after a lost way
    other = mint(rig.client, 99)
    rig.say(ms.Submit(Action(other, "y", once="a")), b"a")
    rig.finish_all()
    said = {m.action: p for m, p in rig.trainer.heard if isinstance(m, ms.ActionResult)}
    assert said == {first: b"a/1", second: b"a/1"}
    refused = [m for m, _ in rig.trainer.heard if isinstance(m, ms.Rejected)]
    assert [m.id for m in refused] == [other] and "is the name of exec x" in refused[0].text
    rig.close()


def command(rig: Rig, line: str, once: str, **options) -> Action:
    """The action for a shell line, as the client makes it."""
    rig.counter += 1
    _, what = exec_call(line)
    return make_action(mint(rig.client, rig.counter), Kind.EXEC, Options(once=once, **options), 0,
                       what)


def test_a_named_command_is_the_same_work_although_an_older_release_guessed_its_class(
        tmp_path: Path) -> None:
    rig = Rig(tmp_path, 1)
    older = msgspec.structs.replace(command(rig, "cd x && make -j", "a"), name="cd")
    fields = msgspec.to_builtins(older)[:-1]  # that release knew no `guessed`
    rig.say(ms.Submit(msgspec.convert(fields, Action)), b"a")
    rig.turn()
    # not closed: killed
    again = Rig(tmp_path, 2)
    action = command(again, "cd x && make -j", "a")
    assert action.name == "make"
    again.say(ms.Submit(action), b"a")
    again.finish_all()
    said = {m.action: p for m, p in again.trainer.heard if isinstance(m, ms.ActionResult)}
    assert said == {action.id: b"a/1"}
    assert not [m for m, _ in again.trainer.heard if isinstance(m, ms.Rejected)]
    again.close()
    rig.close()


@pytest.mark.parametrize(("first", "second", "same"), [
    ({}, {}, False), ({"name": "build"}, {"name": "build"}, True), ({"name": "build"}, {}, False),
    ({"name": "build"}, {"name": "test"}, False)])
def test_submissions_with_one_idempotency_key_and_different_classes_are_refused(
        tmp_path: Path, first: dict, second: dict, same: bool) -> None:
    rig = Rig(tmp_path, 1)
    actions = [command(rig, "make", "a", **first), command(rig, "ninja", "a", **second)]
    for action in actions:
        rig.say(ms.Submit(action), b"a")
    function = Action(mint(rig.client, 99), "make", Kind.FUNCTION, once="a")
    rig.say(ms.Submit(function), b"a")
    rig.finish_all()
    refused = [m.id for m, _ in rig.trainer.heard if isinstance(m, ms.Rejected)]
    assert refused == [*(() if same else (actions[1].id,)), function.id]
    rig.close()


def test_the_kept_result_of_another_services_call_is_refused(tmp_path: Path) -> None:
    """Also while it runs, and by the next broker."""
    spool = FileSpool(tmp_path, 1 << 20)
    rig = BrokerRig(spool=spool)
    client, worker = rig.client(), rig.worker(gpus=(0, 1))

    def submit(number: int, service: str) -> int:
        client.say(ms.DeclareService(number, ServiceSpec(service, backend="fake")))
        call = Action(mint(client.last(ms.Welcome).client, number), "score", Kind.CALL,
                      key=f"service:{service}", once="a")
        client.say(ms.Submit(call), b"call")
        return call.id

    submit(1, "judge")
    second = submit(2, "reward")  # the same class of action
    assert client.last(ms.Rejected).id == second
    worker.say(ms.Finished(worker.last(ms.StartAttempt).lease, Outcome(ActionState.COMPLETED), n=1),
               b"of judge")
    rig.run(0.1)
    spool.commit()
    rig = BrokerRig(spool=FileSpool(tmp_path, 1 << 20))
    client, worker = rig.client(), rig.worker(gpus=(0, 1))
    third = submit(3, "reward")
    assert client.last(ms.Rejected).id == third
    assert "service:judge, not of service:reward score" in client.last(ms.Rejected).text
    fourth = submit(4, "judge")
    assert client.last(ms.ActionResult).action == fourth
    assert not worker.all(ms.StartAttempt)
    spool.close(remove=False)


def test_a_cancelled_named_action_can_be_submitted_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 1)
    first = rig.submit("a")
    follower = rig.submit("a")
    rig.turn()
    rig.say(ms.Cancel((follower,)))  # the name's work, whoever says it
    rig.finish(ActionState.CANCELLED)
    rig.turn()
    assert {m.action for m, _ in rig.trainer.heard if isinstance(m, ms.ActionResult)} == {first,
                                                                                          follower}
    rig.submit("a")
    rig.finish_all()
    assert rig.ran == {"a": 2} and rig.told["a"] == ("COMPLETED", "a/2")
    rig.close()


def test_forgetting_named_results_frees_room_in_the_spool(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 1, limit=2000, segment=300)
    n = 0
    while not (refused := [m for m, _ in rig.trainer.heard if isinstance(m, ms.Rejected)]):
        rig.submit(f"step1/{n}")
        rig.finish_all()
        n += 1
    assert "forget what your checkpoint holds" in refused[0].text and n > 3
    rig.say(ms.Forget(500, ("step1/0",), ""))
    rig.say(ms.Forget(501, (), "step1/"))
    rig.turn()
    answers = [p for m, p in rig.trainer.heard if isinstance(m, ms.QueryReply)]
    assert answers == [b'{"forgotten": 1}', b'{"forgotten": %d}' % (n - 2)]
    assert len(list((tmp_path / "once").iterdir())) == 1
    rig.submit("step1/0")
    rig.finish_all()
    assert rig.ran["step1/0"] == 2  # forgotten: it runs again
    again = Rig(tmp_path, 2, limit=2000)
    again.submit("step1/0")
    again.submit("step1/1")
    again.finish_all()
    assert again.ran == {"step1/1": 1} and again.told["step1/0"] == ("COMPLETED", "step1/0/2")
    again.broker.stop("test")
    again.spool.close(remove=True)
    assert not (tmp_path / "once").exists()


def test_a_spool_of_another_release_is_refused_and_foreign_files_are_kept(tmp_path: Path) -> None:
    spool = FileSpool(tmp_path, 1 << 20)
    (tmp_path / "notes").write_text("a user's")
    spool.close(remove=True)
    assert [p.name for p in tmp_path.iterdir()] == ["notes"]
    body = msgspec.msgpack.encode(["a kind that nobody knows", "x"])
    (tmp_path / "0").write_bytes(len(body).to_bytes(4, "little")
                                 + zlib.crc32(body).to_bytes(4, "little") + body)
    with pytest.raises(InvalidInput, match="this release cannot read it"):
        FileSpool(tmp_path, 1 << 20)


@pytest.mark.parametrize("drained", [False, True])
def test_a_broker_that_is_drained_asks_for_no_more_nodes(tmp_path: Path, drained: bool) -> None:
    """A drained broker lends nothing, so all waiting work would look like demand."""
    rig = Rig(tmp_path, 1, policy=AllocPolicy(
        max_nodes=4, max_core_ns=10**18, shapes=(SatelliteShape("spare", cpus=4),)))
    for n in range(1000):
        rig.submit(f"work{n}")
    rig.turn()
    if drained:
        rig.broker.drain("the job is about to end")
    for _ in range(30):
        rig.now += 10**9
        rig.say(ms.Ping(1))
        rig.turn()
    assert bool(rig.broker.scheduler.ledger.allocs.asks) is not drained
    rig.close()
