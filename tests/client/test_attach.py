"""Sessions that several processes of a job use, with real processes, a real broker and worker."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.cluster_parts import disconnected, until

import tangram_hpc
from tangram_hpc import InvalidInput, LocalCluster, SessionHandle, SessionLost
from tangram_hpc.accounting.fields import as_json
from tangram_hpc.accounting.record import fold
from tangram_hpc.broker.attached_sessions import AttachedSessions
from tangram_hpc.cli import main
from tangram_hpc.cli.helpers.shared_sessions import shared_line
from tangram_hpc.client.attachments import Attachments
from tangram_hpc.client.session_record import SessionRecord
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.decision import AnnounceSessionEnd
from tangram_hpc.domain.ids import mint, show
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.interrupts import CallersLock
from tangram_hpc.protocol import message as ms
from tangram_hpc.scheduler.state.ledger import Ledger
from tangram_hpc.storage.journal import read_journal

WAIT_S = 30
AGENT = """
    import sys, time, tangram_hpc
    client = tangram_hpc.connect(sys.argv[1], name="agent")
    session = client.session(name=sys.argv[2], shared=True, outlives=True, ttl_s=float(sys.argv[3]),
                             env={"WHO": "the agent"}, files={"test.sh": "test -s answer"})
    session.exec("printf 42 > answer; echo $WHO > who").result()
    print(session.handle(may_close=True).text, flush=True)
    session.exec("sleep 600")   # the agent is killed while this runs
    time.sleep(600)
"""


def process(text: str, *args: object) -> subprocess.Popen[str]:
    """A process of its own that runs this text with these arguments."""
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(text), *map(str, args)],
                            text=True, stdout=subprocess.PIPE, start_new_session=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(cpus=2, mem_mib=200, home=tmp_path_factory.mktemp("home"), grace_s=0.5) as c:
        yield c


@pytest.fixture
def other(cluster: LocalCluster) -> Iterator[tangram_hpc.Client]:
    with tangram_hpc.connect(cluster.access, name="other") as client:
        yield client


def shared(cluster: LocalCluster, session_id: str) -> dict:
    answer = cluster.ask("sessions")["shared_sessions"]
    return next((s for s in answer if s["id"] == session_id), {})


# ---- agent and scorer --------------------------------------------------------------------------


def test_a_scorer_attaches_by_name_after_the_agents_process_was_killed(cluster: LocalCluster
                                                                       ) -> None:
    told = killed_agent(cluster, "episode", 600)
    scorer = process("""
        import sys, tangram_hpc
        client = tangram_hpc.connect(sys.argv[1], name="scorer")
        with client.attach(name="episode", token=sys.argv[2]) as session:
            verdict = session.exec("sh test.sh && echo $(cat answer) from $(cat who)").result()
            print(session.id, session.read("answer").result(), verdict.ok, verdict.text.strip(),
                  [e.name for e in session.listing().result()], sep="|", flush=True)
        client.close()
    """, cluster.access, json.loads(told)["token"])
    said, _ = scorer.communicate(timeout=60)
    number, answer, ok, text, names = said.strip().split("|")
    assert (answer, ok, text) == ("b'42'", "True", "42 from the agent")
    assert names == "['answer', 'test.sh', 'who']"
    until(lambda: shared(cluster, number).get("owner_gone"), "the agent is forgotten")
    until(lambda: not shared(cluster, number)["attached"], "the scorer has detached")
    state = shared(cluster, number)
    assert state["owner"]["name"] == "agent"
    assert 500 < state["ttl_left_s"] <= 600 and "which is gone" in shared_line(state)
    assert "which is gone" in shared_line(cluster.ask("explain", number)["shared"])
    with tangram_hpc.connect(cluster.access) as late:
        late.attach(told).close()
    until(lambda: not shared(cluster, number), "it is closed by the holder of the close token")


def test_a_session_that_outlives_its_client_ends_with_its_time_to_live(
        cluster: LocalCluster, other: tangram_hpc.Client) -> None:
    told = killed_agent(cluster, "short", 4)
    until(lambda: not any(s["name"] == "short" for s in cluster.ask("sessions")["shared_sessions"]),
          "its time-to-live ends it")
    with pytest.raises(SessionLost, match="time-to-live of 4 s is over"):
        other.attach(told)


def killed_agent(cluster: LocalCluster, name: str, ttl_s: float) -> str:
    """The text of a handle to the session of an agent whose process was killed."""
    agent = process(AGENT, cluster.access, name, ttl_s)
    assert agent.stdout is not None
    told = agent.stdout.readline()
    os.killpg(agent.pid, signal.SIGKILL)
    agent.wait()
    return told


def test_the_accounting_says_which_client_did_what_in_which_session(
        cluster: LocalCluster, other: tangram_hpc.Client,
        capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANGRAM_HOME", str(cluster.folder.parent.parent))
    with cluster.session(shared=True, name="counted") as s, other.attach(s.handle()) as t:
        mine, theirs = s.exec(["true"], name="mine"), t.exec(["true"], name="theirs")
        mine.result()
        theirs.result()
        number = s.id
        assert main(["info"]) == 0
        shown = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("SHARED"))
        assert number in shown and "counted" in shown and "(other)" in shown
        assert main(["explain", number]) == 0
        assert "(other)" in capsys.readouterr().out
    assert main(["acct", "-j", cluster.job, "-n", "-o", "JobName,SessionName,Client%40"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[-1] for line in lines if line[:2] == ["theirs", "counted"]] == ["other"]
    records = {r.action.name: as_json(r) for r in fold(
        read_journal(cluster.folder / "journal")).records.values()
        if r.action.name in ("mine", "theirs")}
    assert {r["session"] for r in records.values()} == {number}
    assert {r["session_name"] for r in records.values()} == {"counted"}
    assert records["theirs"]["client_name"] == "other" != records["mine"]["client_name"]
    assert records["theirs"]["client"] != records["mine"]["client"]


# ---- handles and tokens ------------------------------------------------------------------------


@pytest.mark.attack("rank", "terminal")
def test_a_handle_travels_as_a_pickle_or_text_and_shows_no_token(
        cluster: LocalCluster, other: tangram_hpc.Client) -> None:
    with cluster.session(shared=True) as s:
        handle = s.handle()
        assert s.name.startswith("session-") and handle.token not in f"{handle!r} {handle}"
        for sent in (handle, pickle.loads(pickle.dumps(handle)), handle.text):
            with other.attach(sent) as t:
                assert (t.id, t.name, t.node) == (s.id, s.name, s.node)
                assert t.handle() == handle
                with pytest.raises(InvalidInput, match="may_close"):
                    t.handle(may_close=True)
        with cluster.attach(handle) as own:  # its own client may do so too, and stays its owner
            assert own.exec(["true"]).result(WAIT_S).ok and own.handle(True) == s.handle(True)
        assert s.exec(["true"]).result(WAIT_S).ok and not shared(cluster, s.id)["attached"]
        with other.attach(s.handle(may_close=True)) as t:
            assert t.handle() == handle and t.handle(True) == s.handle(True)
        with pytest.raises(InvalidInput, match=r"connect\(.*\)\.attach\(handle\).*shared=True"):
            pickle.dumps(s)
    with cluster.session() as s, pytest.raises(InvalidInput, match=r"not shared.*shared=True"):
        s.handle()
    elsewhere = SessionHandle("x", "y", job="another")
    with pytest.raises(InvalidInput, match=r"handle: its session is of job another"):
        other.attach(elsewhere)


@pytest.mark.parametrize("given", [
    {}, {"handle": "no json"}, {"handle": "[]"}, {"handle": '{"name": "x"}'}, {"handle": 5},
    {"name": "x"}, {"token": "x"}, {"name": "x", "token": "\ud800"}, {"name": "x", "token": 7},
    {"name": 5, "token": "x"}, {"handle": "{}", "name": "x"}, {"name": "x", "token": "t" * 300},
    {"name": "x" * 300, "token": "t"}, {"name": "x\ud800", "token": "t"},
    {"name": "x", "token": "t", "hold": "yes"}])
def test_a_wrong_argument_of_attach_is_refused_in_one_line(
        other: tangram_hpc.Client, given: dict) -> None:
    with pytest.raises(InvalidInput) as error:
        other.attach(**given)
    assert re.match(r"(handle|name|token|hold): ", str(error.value)), error.value
    assert "\n" not in str(error.value)


def test_a_token_that_was_chosen_beforehand_opens_once_and_attaches(
        cluster: LocalCluster, other: tangram_hpc.Client) -> None:
    token = "t" * 32
    with cluster.session(shared=True, name="agreed", token=token) as session:
        second = other.session(shared=True, name="agreed", token=token)
        with pytest.raises(InvalidInput, match="name: 'agreed' is taken by session"):
            second.opened.result(WAIT_S)
        with other.attach(name="agreed", token=token) as attached:
            assert attached.id == session.id
            attached.close()  # it is the close token
        session.closed.result(WAIT_S)
    with cluster.session(shared=True, name="agreed", token=token) as again:
        assert other.attach(name="agreed", token=token).id == again.id


@pytest.mark.parametrize("given", [{"token": "t" * 32}, {"shared": True, "token": "t" * 31},
                                   {"shared": True, "token": "t" * 201},
                                   {"shared": True, "token": "\u00e9" * 32},
                                   {"shared": True, "token": b"t" * 32}])
def test_a_wrong_token_of_a_new_session_is_refused_and_not_shown(cluster: LocalCluster, given: dict
                                                                 ) -> None:
    with pytest.raises(InvalidInput, match=r"^token: ") as error:
        cluster.session(**given)
    assert "tttt" not in str(error.value)


@pytest.mark.attack("rank", "sessions")
@pytest.mark.attack("session", "sessions")
def test_a_wrong_token_and_an_unknown_name_get_the_same_answer(
        cluster: LocalCluster, other: tangram_hpc.Client) -> None:
    with cluster.session(shared=True, name="guarded") as s, cluster.session(name="plain"):
        said = set()
        for name, token in (("guarded", "guess"), ("guarded", s.spec.attach_hash),
                            ("no such", s.handle().token), ("plain", s.handle().token)):
            with pytest.raises(InvalidInput) as error:
                other.attach(name=name, token=token)
            said.add(str(error.value))
        assert len(said) == 1 and said.pop().startswith("attach: this job has no shared session")
        with pytest.raises(tangram_hpc.InfeasibleRequest, match="name: 'guarded' is taken"):
            other.session(shared=True, name="guarded").opened.result(WAIT_S)
        with pytest.raises(InvalidInput, match="hold: this handle gives no right"):
            other.attach(s.handle(), hold=True)
    until(s.closed.done, "it closes")
    with pytest.raises(SessionLost, match="was closed by its client"):
        other.attach(s.handle())
    for wrong in ({"outlives": True, "ttl_s": 5}, {"outlives": True, "shared": True}):
        with pytest.raises(tangram_hpc.InfeasibleRequest, match="outlives: "):
            cluster.session(**wrong).opened.result(WAIT_S)
    with pytest.raises(InvalidInput, match="ttl_s"):
        cluster.session(ttl_s=-1)
    with pytest.raises(InvalidInput, match="shared: "):
        cluster.session(shared="yes")


@pytest.mark.attack("code", "keys")
def test_no_token_and_no_variable_is_in_any_file_of_the_job(
        cluster: LocalCluster, other: tangram_hpc.Client) -> None:
    with cluster.session(shared=True, env={"KEY": "value-of-a-secret"}) as s:
        use, close = s.handle(), s.handle(may_close=True)
        with other.attach(use) as t:
            assert t.exec("echo $KEY").result().text == "value-of-a-secret\n"
        other.attach(close).detach()
        with pytest.raises(InvalidInput):
            other.attach(name="no such", token=close.token)
        cluster.ask("sessions")
    until(s.closed.done, "it closes")
    root = cluster.folder.parent.parent
    texts = {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}
    assert any(s.spec.attach_hash.encode() in text for text in texts.values()), "the hash is there"
    for secret in (use.token, close.token, "value-of-a-secret"):
        found = [p for p, text in texts.items() if secret.encode() in text]
        assert not found, (found, secret)
    assert use.token not in repr(cluster.ask("info")) and close.token != use.token


# ---- using a session together ------------------------------------------------------------------


def test_all_calls_work_on_an_attached_session(
        cluster: LocalCluster, tmp_path: Path, other: tangram_hpc.Client) -> None:
    (tmp_path / "up").mkdir()
    (tmp_path / "up" / "a").write_text("uploaded")
    with cluster.session(shared=True, env={"A": "1"}, trajectory="t7") as s:
        with other.attach(s.handle()) as t:
            t.write("f", "written").result()
            t.mkdir("d").result()
            assert t.upload(tmp_path / "up", "tree") == 1 and t.renew() is None
            assert s.read("f").result() == b"written" and s.read("tree/a").result() == b"uploaded"
            assert t.download("tree", tmp_path / "down") == 1
            assert t.submit(["sh", "-c", "echo $A $B"], env={"B": "2"}).result().text == "1 2\n"
            assert (t.env, t.trajectory) == ({"A": "1"}, "t7")
            with t.fork(env={"A": "3"}) as branch:
                assert branch.exec("echo $A; cat f").result().text == "3\nwritten"
                with pytest.raises(InvalidInput, match="not shared"):
                    branch.handle()
            with t.fork(shared=True) as branch, cluster.attach(branch.handle()) as back:
                assert back.read("f").result() == b"written" and back.name != s.name
            with pytest.raises(InvalidInput, match="close: this handle does not let"):
                t.close()
            pending = t.exec("sleep 60")
        with pytest.raises(tangram_hpc.ActionFailed, match="detached"):
            pending.result(WAIT_S)
        with pytest.raises(SessionLost, match="this client detached"):
            t.exec(["true"]).result(WAIT_S)
        t.detach()  # a second time does nothing
        with pytest.raises(InvalidInput, match="detach: this client opened"):
            s.detach()
        assert s.exec(["true"]).result(WAIT_S).ok
        with pytest.raises(SessionLost, match="another client's; attach to it"):
            other.submit(["true"], session=stranger(other, s)).result(WAIT_S)


def stranger(client: tangram_hpc.Client, session: tangram_hpc.Session) -> tangram_hpc.Session:
    """A session object for this session as a client could forge it without being attached."""
    return tangram_hpc.Session(client._connection, session._record)


def test_one_process_may_attach_several_times(cluster: LocalCluster, other: tangram_hpc.Client
                                              ) -> None:
    with cluster.session(shared=True) as s:
        one, two = other.attach(s.handle()), other.attach(s.handle())
        one.detach()
        assert two.exec(["true"]).result(WAIT_S).ok
        errors: list[BaseException] = []

        def come_and_go(seed: int) -> None:
            rng = random.Random(seed)
            try:
                for _ in range(25):
                    with other.attach(s.handle()) as mine:
                        if rng.random() < 0.5:
                            assert mine.read("x").result(WAIT_S) == b"y"
            except BaseException as error:  # noqa: BLE001 - told below
                errors.append(error)

        s.write("x", "y").result()
        two.detach()
        threads = [threading.Thread(target=come_and_go, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not errors, errors
        until(lambda: not shared(cluster, s.id)["attached"], "all have detached")


def test_actions_of_twenty_clients_in_one_session_keep_each_clients_order(
        cluster: LocalCluster) -> None:
    clients = [tangram_hpc.connect(cluster.access, name=f"c{n}") for n in range(20)]
    try:
        with cluster.session(shared=True) as s:
            first = s.exec("sleep 0.5")
            attached = [client.attach(s.handle()) for client in clients]
            futures = [[t.exec(f"echo {n} {k} | tee -a log") for k in range(5)]
                       for n, t in enumerate(attached)]
            assert len(shared(cluster, s.id)["attached"]) == 20
            first.result(WAIT_S)
            texts = [[f.result(60).text for f in row] for row in futures]
            assert texts == [[f"{n} {k}\n" for k in range(5)] for n in range(20)]
            log = [tuple(map(int, line.split()))
                   for line in s.read("log").result().decode().splitlines()]
            assert len(log) == 100 and all(
                [k for m, k in log if m == n] == list(range(5)) for n in range(20))
            for turn in range(5):  # by turns: nobody waits for two actions of another
                assert {n for n, _ in log[20 * turn:20 * turn + 20]} == set(range(20))
    finally:
        for client in clients:
            client.close()


def test_a_killed_attached_process_loses_only_its_own_actions(cluster: LocalCluster) -> None:
    with cluster.session(shared=True) as s:
        victim = process("""
            import sys, time, tangram_hpc
            client = tangram_hpc.connect(sys.argv[1], name="victim")
            session = client.attach(sys.argv[2])
            session.exec("touch began; sleep 600")
            session.exec("touch never")
            session.read("began").exception()
            time.sleep(600)
        """, cluster.access, s.handle().text)
        until(lambda: "BUSY" in shared(cluster, s.id)["state"], "the victim's command runs")
        mine = s.exec("ls")
        os.killpg(victim.pid, signal.SIGKILL)
        victim.wait()
        assert mine.result(WAIT_S).text == "began\n"
        until(lambda: not shared(cluster, s.id)["attached"], "its attachment ends with its grace")


# ---- ends --------------------------------------------------------------------------------------


def test_a_session_ends_with_its_client_unless_another_client_holds_it(
        cluster: LocalCluster, other: tangram_hpc.Client) -> None:
    with tangram_hpc.connect(cluster.access) as owner:
        plain, held = owner.session(shared=True), owner.session(shared=True)
        for s in (plain, held):
            s.opened.result(WAIT_S)
        seen = other.attach(plain.handle())
        kept = other.attach(held.handle(may_close=True), hold=True)
        waits = seen.exec("sleep 60")
        other.ask("info")  # the broker has heard of it
    assert "its client went away" in seen.closed.result(WAIT_S)
    with pytest.raises(SessionLost, match="its client went away"):
        waits.result(WAIT_S)
    assert kept.exec(["true"]).result(WAIT_S).ok
    kept.detach()
    until(lambda: not shared(cluster, held.id), "the last holder has left")


def test_a_holder_of_the_close_token_closes_and_all_clients_learn_who_closed(
        cluster: LocalCluster, other: tangram_hpc.Client) -> None:
    with cluster.session(shared=True) as s:
        t = other.attach(s.handle(may_close=True))
        runs = s.exec("sleep 60")
        cluster.ask("info")  # the broker has heard of it
        t.close()
        for one in (s, t):
            assert re.fullmatch(r"closed by client \d+ \(other\)", one.closed.result(WAIT_S))
        with pytest.raises(SessionLost, match=r"closed by client \d+ \(other\)"):
            runs.result(WAIT_S)


def test_attachments_survive_a_lost_connection_and_ends_during_it_are_reported(
        tmp_path: Path) -> None:
    with LocalCluster(cpus=2, home=tmp_path, grace_s=20) as c, \
            tangram_hpc.connect(c.access) as mine:
        stays, ends = c.session(shared=True), c.session(shared=True)
        left = c.session(shared=True)
        a, b, gone = (mine.attach(s.handle()) for s in (stays, ends, left))
        for s in (a, b, gone):
            s.opened.result(WAIT_S)
        runs = a.exec("sleep 1; echo done")
        mine.ask("info")
        with disconnected(mine):
            ends.close()
            ends.closed.result(WAIT_S)
            gone.detach()
            assert [x["client"] for x in shared(c, stays.id)["attached"]]
        assert runs.result(WAIT_S).text == "done\n" and a.exec(["true"]).result(WAIT_S).ok
        assert b.closed.result(WAIT_S) == ends.closed.result(WAIT_S) == ""  # its client closed it
        journal = read_journal(c.folder / "journal")
        assert sum(isinstance(e, ev.SessionAttached) for e in journal) == 3  # not again
        until(lambda: not shared(c, left.id)["attached"], "it detached while it was away")


def test_an_attached_client_may_wait_for_a_session_that_has_no_place_yet(
        cluster: LocalCluster, other: tangram_hpc.Client) -> None:
    with cluster.session(mem=150) as large:
        waits = cluster.session(mem=150, shared=True)
        with pytest.raises(tangram_hpc.BrokerUnreachable, match="no answer within 0 s"):
            other.attach(waits.handle(), timeout_s=0)
        t = other.attach(waits.handle())
        early = t.exec("echo early")
        assert not t.opened.done() and t.node == "" and large.node
    t.opened.result(WAIT_S)
    waits.opened.result(WAIT_S)  # each client is told by a message of its own
    assert early.result(WAIT_S).text == "early\n" and t.node == waits.node
    waits.close()
    assert waits.closed.result(WAIT_S) == ""


def test_a_late_answer_does_not_detach_a_client_that_attaches_again() -> None:
    """The caller of the first request gives up, and its answer comes after the second request was
    sent: to leave the session then would undo the second attachment."""
    spec, records = SessionSpec(mint(7, 1), "shared"), dict[int, SessionRecord]()
    attachments = Attachments(CallersLock())
    attachments.ask(ms.AttachSession(1, "shared", "t"))
    assert attachments.give_up(1, records) == []
    second = attachments.ask(ms.AttachSession(2, "shared", "t"))
    assert attachments.answered(ms.Attached(1, spec), None, records) == []
    assert attachments.answered(ms.Attached(2, spec), None, records) == []
    assert second.result(0) is records[spec.id]


def test_an_attachment_whose_caller_gave_up_is_detached() -> None:
    spec, attachments = SessionSpec(mint(7, 1), "shared"), Attachments(CallersLock())
    attachments.ask(ms.AttachSession(1, "shared", "t"))
    attachments.give_up(1, {})
    assert attachments.answered(ms.Attached(1, spec), None, {}) == [ms.DetachSession(spec.id)]
    assert attachments.settle({}) == []


def test_only_the_clients_of_a_session_learn_afterwards_why_it_has_ended() -> None:
    """Whoever does not know a token learns nothing: ids of sessions are easily guessed."""
    number, told = mint(1, 1), list[tuple[int, ms.SessionDown]]()
    broker = AttachedSessions(Ledger(), lambda: 0, lambda _event: None,
                              lambda client, message: told.append((client, message)))
    broker.send_down(AnnounceSessionEnd(number, "closed by client 2 (scorer)", attached=(2,)))
    why = ms.SessionDown(number, "closed by client 2 (scorer)")
    assert told == [(1, why), (2, why)]
    for client in (1, 2, 3):
        broker.attach(client, ms.AttachSession(0, "s", "no token", session=number))
        broker.send_ended(client, number)
    assert [message == why for _, message in told[2:]] == [True] * 4 + [False] * 2
    assert told[-1] == (3, ms.SessionDown(
        number, f"session {show(number)} ended while its client was away"))


# ---- random lives ------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_clients_that_open_attach_close_and_die_at_random_leave_no_session(
        tmp_path: Path, seed: int) -> None:
    """Processes open, attach, use, detach, close and are killed at random. Whoever lives sees only
    errors that say what happened; in the end nothing is left, and the journal folds."""
    with LocalCluster(cpus=2, home=tmp_path, grace_s=0.5) as c:
        board = tmp_path / "board"
        board.mkdir()
        workers = [process("""
            import os, pathlib, random, sys, time, tangram_hpc
            access, board, seed = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
            rng, client = random.Random(seed), tangram_hpc.connect(access, name=f"w{seed}")
            own, attached, end = [], [], time.monotonic() + 12
            while time.monotonic() < end:
                try:
                    move = rng.randrange(7)
                    if move == 0 and len(own) < 4:
                        lives = rng.random() < 0.5
                        s = client.session(shared=True, outlives=lives, ttl_s=6 if lives else 0)
                        own.append(s)
                        (board / f"{seed}.{len(own)}.{rng.random()}").write_text(
                            s.handle(rng.random() < 0.5).text)
                    elif move == 1:
                        posts = sorted(board.iterdir())
                        if posts:
                            attached.append(client.attach(rng.choice(posts).read_text()))
                    elif move == 2 and attached:
                        attached.pop(rng.randrange(len(attached))).detach()
                    elif move == 3 and own:
                        own.pop(rng.randrange(len(own))).close()
                    elif move == 4 and attached:
                        rng.choice(attached).close()
                    elif own + attached:
                        s = rng.choice(own + attached)
                        assert s.exec("echo $$ >> log; cat log | wc -l").result(30).ok
                except (tangram_hpc.ActionFailed, tangram_hpc.InvalidInput) as error:
                    assert chr(10) not in str(error), error
            client.close()
            print("ended well", flush=True)
        """, c.access, board, 100 * seed + n) for n in range(5)]
        rng = random.Random(seed)
        time.sleep(2 + 4 * rng.random())
        killed = rng.sample(workers, 2)
        for each in killed:
            os.killpg(each.pid, signal.SIGKILL)
        for each in workers:
            said, _ = each.communicate(timeout=90)
            assert each in killed or said == "ended well\n", said
        until(lambda: c.ask("info")["sessions"] == 0, "no session is left")
        until(lambda: c.ask("info")["clients"] <= 1, "no client is left but the cluster's own")
        journal = list(read_journal(c.folder / "journal"))
        assert any(isinstance(e, ev.SessionAttached) for e in journal)
        fold(journal)
