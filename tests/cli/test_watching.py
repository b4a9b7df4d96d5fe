"""`tangram queue`, `tangram info` and `tangram top` beside a running job, as people use them: as
tables, as JSON, again and again, and on a terminal of 80 x 24."""

from __future__ import annotations

import fcntl
import getpass
import html
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.silent_broker import IMPATIENT, silent

from tangram_hpc import LocalCluster, connect
from tangram_hpc.cli import main
from tangram_hpc.cli.views import info_verb
from tangram_hpc.client.client import Client
from tangram_hpc.errors import BrokerUnreachable

TANGRAM = [sys.executable, "-m", "tangram_hpc"]
HOSTILE = "tool\x1b[31m\n\u202e"  # a name that could change a terminal, a line, or the direction


@pytest.fixture(scope="module")
def job() -> Iterator[dict[str, Any]]:
    """A job of two CPUs: two actions run, five wait for CPUs, one waits for its session, and one
    call of an endpoint waits for another.
    """
    with LocalCluster(cpus=2) as cluster:
        cluster.register_endpoint("search", concurrency=1)
        sleep = ["sleep", "600"]
        first = cluster.submit(sleep, trusted=True, name=HOSTILE)
        session = cluster.session(trusted=True, name="box")
        second = session.exec(sleep, name="busy")
        behind = session.exec(sleep, name="behind")
        until(lambda: cluster.ask("info")["actions"].get("RUNNING") == 2)
        waiting = [cluster.submit(sleep, trusted=True, name="later") for _ in range(5)]
        until(lambda: len(cluster.ask("pending")["pending"]) == 6)
        yield {"cluster": cluster, "access": str(cluster.access), "first": first,
               "second": second, "behind": behind, "waiting": waiting}
        for future in (first, second, behind, *waiting):
            future.cancel()


def until(done: Any) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def current(job: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANGRAM_ACCESS", job["access"])
    monkeypatch.setenv("COLUMNS", "80")


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[list[str], str]:
    assert main(words) == 0
    out, err = capsys.readouterr()
    return out.splitlines(), err


def test_queue_is_squeue_for_actions(job: dict[str, Any], capsys: Any) -> None:
    lines, err = printed(capsys, "queue")
    assert lines[0].split() == ["ACTIONID", "NAME", "CLIENT", "ST", "TIME", "CPUS", "GPUS",
                                "NODELIST(REASON)"]
    assert len(lines) == 9 and err == "" and all(line.isprintable() for line in lines)
    assert job["first"].id in lines[1] and " R " in lines[1]
    assert [line.split()[-1] for line in lines[3:]] == ["(SessionBusy)"] + ["(Resources)"] * 5
    rows, err = printed(capsys, "queue", "-h", "-t", "pd", "-n", "later", "--limit", "2",
                        "-o", "ActionID%-9,State,ReqCPUS,Reason")
    assert rows == [f"{f.id:<9} PENDING           1 Resources" for f in job["waiting"][:2]]
    assert "... and 3 more" in err
    assert printed(capsys, "queue", "-t", "CD")[0] == lines[:1]
    long, _ = printed(capsys, "queue", "-l", "-t", "all")
    assert "UNLIMITED" in long[1] and "RUNNING" in long[1]


def test_queue_takes_ids_as_squeue_does(job: dict[str, Any], capsys: Any) -> None:
    name, one = job["cluster"].job, job["behind"].id
    row, _ = printed(capsys, "queue", f"{name}.{one}", "-h", "-o", "JobID%40,SessionName")
    assert [line.split() for line in row] == [[f"{name}.{one}", "box"]]
    assert len(printed(capsys, "queue", name, "-h")[0]) == 8
    both = f"{name}.{one},{name}.{job['first'].id}"
    assert len(printed(capsys, "queue", "-j", both, "-h")[0]) == 2
    assert main(["queue", "-j", "4711,4712"]) == 2
    assert "several jobs" in capsys.readouterr().err
    assert main(["queue", "-o", "Colour"]) == 2
    assert "is not a column; choose from ActionID" in capsys.readouterr().err
    assert "Reason" in "\n".join(printed(capsys, "queue", "--helpformat")[0])


def test_queue_takes_the_options_that_people_type_for_squeue(job: dict[str, Any], capsys: Any
                                                             ) -> None:
    me, node = getpass.getuser(), job["cluster"].ask("nodes")["nodes"][0]["name"]
    for words in (["--me"], ["-u", me], ["-u", f"nobody,{os.getuid()}"], ["-a"], ["-r"]):
        assert len(printed(capsys, "queue", "-h", *words)[0]) == 8, words
    assert printed(capsys, "queue", "-h", "-u", "nobody") == ([], "")
    assert len(printed(capsys, "queue", "-h", "-w", node)[0]) == 2
    for words in (["-w", "other[1-2]"], ["-p", "gpu"]):
        assert printed(capsys, "queue", "-h", *words) == ([], ""), words
    lines, _ = printed(capsys, "queue", "-o", "%.18i %.9P %8j %.8u %.2t %.10M %.6D %R", "-t", "PD")
    assert lines[0] == ("             JOBID PARTITION NAME         USER ST       TIME NNODES "
                        "NODELIST(REASON)")
    name = f"{job['cluster'].job}.{job['waiting'][0].id}"
    shown = name if len(name) <= 18 else name[:17] + "+"
    assert lines[2] == f"{shown:>18}           later    {me:>8.8} PD   00:00:00      1 (Resources)"
    rows, _ = printed(capsys, "queue", "-h", "-O", "ActionID:6,State:-8", "-n", "behind")
    assert [row.split() for row in rows] == [[job["behind"].id, "PENDING"]]
    assert [row.split("|") for row in
            printed(capsys, "queue", "-h", "-o", "%i|%t|", "-n", "behind")[0]] == [
                [f"{job['cluster'].job}.{job['behind'].id}", "PD", ""]]
    assert main(["queue", "-o", "%-8i %t"]) == 2
    assert "--format: '%-8i' cannot be read" in capsys.readouterr().err
    assert main(["queue", "-w", "cpu[1-1000]"]) == 2
    assert "--nodelist, --name, --partition and --jobs: together" in capsys.readouterr().err
    assert main(["queue", "-o", "%i %Q"]) == 2
    assert "--format: %Q is none of the letters" in capsys.readouterr().err


def test_info_takes_the_options_that_people_type_for_sinfo(job: dict[str, Any], capsys: Any
                                                           ) -> None:
    node = job["cluster"].ask("nodes")["nodes"][0]["name"]
    for words, there in (
            (["-n", node], True), (["-n", "other[1-9]"], False), (["-p", "x"], False),
            (["-t", "alloc"], True), (["-t", "idle,drain,mix"], False), (["-R"], False)):
        assert bool(printed(capsys, "info", "--noheader", *words)[0]) is there, words
        told = json.loads(printed(capsys, "info", "--json", *words)[0][0])
        assert bool(told["nodes"]) is there, words
    assert printed(capsys, "info", "-N", "-o", "%8n %.5t %C", "--noheader")[0] == [
        f"{node[:7] + '+' if len(node) > 8 else node:<8}    UP 2/0/2"]
    assert main(["info", "-t", "broken"]) == 2
    assert "--states: 'broken' is not the state of a node" in capsys.readouterr().err


def test_a_name_that_is_no_text_is_the_name_of_no_action(capsys: Any) -> None:
    lines, _ = printed(capsys, "queue", "-h", "-n", "\udcff")  # the byte 0xff of a command line
    assert lines == []


def test_json_has_the_same_rows(job: dict[str, Any], capsys: Any) -> None:
    told = json.loads("\n".join(printed(capsys, "queue", "--json", "--limit", "3")[0]))
    assert (told["job"], told["more"]) == (job["cluster"].job, 5)
    first = told["queue"][0]
    assert (first["name"], first["state"], first["ncpus"]) == (HOSTILE, "RUNNING", 1)
    assert first["elapsed_ns"] > 0 and first["start_ns"] >= first["submit_ns"]
    whole = json.loads("\n".join(printed(capsys, "info", "--json")[0]))
    assert len(whole["pending"]) == 6 and "pending_more" not in whole


def test_info_prints_nodes_as_sinfo_does(job: dict[str, Any], capsys: Any) -> None:
    lines, _ = printed(capsys, "info", "-N")
    assert lines[0].split()[:4] == ["NODE", "STATE", "PARTITION", "CPUS(A/I/T)"]
    assert "2/0/2" in lines[1] and len(lines) == 2
    state, _ = printed(capsys, "info", "-o", "State,CPUS,Reason", "--noheader")
    assert state[0].split() == ["UP", "2", "none"]
    assert main(["info", "-o", "Colour"]) == 2


def test_a_long_name_is_apart_from_the_figure_behind_it(job: dict[str, Any], capsys: Any) -> None:
    name = "openai-chat-gpt-4"
    job["cluster"].register_endpoint(name, concurrency=16)
    node = {"networks": (), "image_root": "", "untrusted": (), "gpus": 1, "devices": "2 of 8",
            "name": "ip-172-31-20-102", "state": "UP", "component": "", "cpus": 2, "cpus_free": 2,
            "sessions": 0, "enforcement": "cgroup", "why_not_open": ""}
    lines, _ = printed(capsys, "info")
    assert [line.split()[1:3] for line in lines if name in line] == [[name, "0/16"]]
    ask = job["cluster"].ask
    info_verb._print_job({**ask("info"), **ask("nodes"), "nodes": [node]})
    found = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["ip-172-31-20-102", "UP"] in [words[:2] for words in found]
    assert ["DEVICES", "ip-172-31-20-102", "2", "of", "8"] in found


def test_what_nodes_can_do_is_told_of_those_there(job: dict[str, Any], capsys: Any) -> None:
    """A worker that was started again is a new node of the same name, and the old one is DOWN."""
    node = {"networks": ("off",), "image_root": "", "untrusted": (), "gpus": 1, "devices": "1 GPU",
            "name": "n1", "state": "UP", "component": "", "cpus": 2, "cpus_free": 2,
            "sessions": 0, "enforcement": "cgroup", "why_not_open": "no tun"}
    ask = job["cluster"].ask
    nodes = [{**node, "state": "DOWN"}, node, {**node, "name": "n2", "state": "DOWN"}]
    info_verb._print_job({**ask("info"), **ask("nodes"), "nodes": nodes})
    told = [line for line in capsys.readouterr().out.splitlines()
            if line.startswith(("NETWORKS", "DEVICES"))]
    assert told == ["NETWORKS off", 'NETWORKS no "open" on n1: no tun',
                    "DEVICES  n1              1 GPU"]


def test_a_view_does_not_count_itself_among_the_clients(job: dict[str, Any], capsys: Any) -> None:
    assert "clients 1 " in printed(capsys, "info")[0][0]
    assert json.loads(printed(capsys, "info", "--json")[0][0])["clients"] == 1


def test_a_view_does_not_count_itself_among_the_clients_of_its_tenant(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (config := tmp_path / "tangram.toml").write_text("[tenants.alpha]\n[tenants.default]\n")
    monkeypatch.setenv("TANGRAM_CONFIG", str(config))
    with LocalCluster(cpus=1, warm=0) as one, connect(one.access, tenant="alpha"):
        monkeypatch.setenv("TANGRAM_ACCESS", str(one.access))
        for own in ("", "default", "alpha"):
            monkeypatch.setenv("TANGRAM_TENANT", own)
            told = json.loads(printed(capsys, "info", "--json")[0][0])
            assert {each["name"]: each["clients"] for each in told["tenants"]} == {
                "alpha": 1, "default": 1}
            assert told["clients"] == 2


def test_the_job_at_a_glance_has_no_actions_that_have_ended(job: dict[str, Any], capsys: Any
                                                            ) -> None:
    """The broker knows those until their clients have the results, so their number is no total."""
    answer = {**job["cluster"].ask("info"), **job["cluster"].ask("nodes")}
    for actions, line in (({"COMPLETED": 3, "RUNNING": 2}, "actions  RUNNING 2"),
                          ({"CANCELLED": 1}, "actions  none")):
        info_verb._print_job({**answer, "actions": actions})
        assert line in capsys.readouterr().out.splitlines()


def test_a_view_is_printed_again_until_it_is_interrupted(job: dict[str, Any]) -> None:
    shown = subprocess.Popen([*TANGRAM, "queue", "-i", "0.2"], stdout=subprocess.PIPE, text=True,
                             env=dict(os.environ, PYTHONUNBUFFERED="1"))
    assert shown.stdout is not None
    headings = 0
    while headings < 3:
        headings += "ACTIONID" in shown.stdout.readline()
    shown.send_signal(signal.SIGINT)
    shown.communicate(timeout=30)
    assert shown.returncode == 128 + signal.SIGINT


@pytest.mark.parametrize("words, heading", [
    ("queue -i 0.1", "ACTIONID"), ("info -i 0.1", "ENFORCEMENT"), ("top -b -d 0.1", "tangram top")])
def test_a_view_outlives_the_silence_of_a_broker(job: dict[str, Any], words: str, heading: str
                                                 ) -> None:
    shown = subprocess.Popen([*IMPATIENT, *words.split()], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True)
    assert shown.stdout is not None and shown.stderr is not None

    def shows_again(times: int) -> None:
        for _ in range(times):
            while heading not in (line := shown.stdout.readline()):
                assert line, "it has ended"

    try:
        shows_again(1)
        with silent(job["cluster"]):
            said = shown.stderr.readline()
        shows_again(20)  # more than there was time for before
    finally:
        shown.terminate()
        shown.communicate(timeout=30)
    assert said == f"tangram: job {job['cluster'].job}: no answer within 1 s; asking again\n"


def test_the_live_view_says_that_its_broker_is_silent(job: dict[str, Any]) -> None:
    with terminal([*IMPATIENT, "top", "-d", "0.1"]) as (ours, ran):
        read_until(ours, b"tangram top - job")
        with silent(job["cluster"]):
            _, word, frame = read_until(ours, b"asking again").partition(b"asking again")
            assert word, "it ended"
            read_until(ours, b"6 wait: Resources 5", seen=frame)  # the rest of the last frame stays
        read_until(ours, b"tangram top - job")
        os.write(ours, b"q")
        read_until(ours, b"\x1b[?1049l")
        assert ran.wait(30) == 0


def test_a_view_that_is_shown_once_needs_its_answer(job: dict[str, Any], capsys: Any,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(self: Client, what: str, argument: str = "") -> None:
        raise BrokerUnreachable("no answer")

    monkeypatch.setattr(Client, "ask", ask)
    for words in (["queue"], ["info"], ["top", "-b", "-n", "1"]):
        assert main(words) == BrokerUnreachable.exit_status
        assert capsys.readouterr().err == "tangram: error: no answer\n"


def test_top_prints_plain_frames_into_a_pipe(job: dict[str, Any], capsys: Any) -> None:
    lines, _ = printed(capsys, "top", "-b", "-n", "2", "-d", "0.1")
    text = "\n".join(lines)
    assert text.count("tangram top - job") == 2 and all(line.isprintable() for line in lines)
    assert re.search(r"^CPUs \[\|{30}\] 100%  2/2 lent$", text, re.M)
    assert "2 actions run" in text and "6 wait: Resources 5  SessionBusy 1" in text
    assert re.search(r"^endpoint search +0/1 in flight", text, re.M)
    assert max(map(len, lines)) <= 80


def test_top_shows_what_ended(job: dict[str, Any]) -> None:
    cluster = job["cluster"]
    with cluster.session(trusted=True) as session:
        session.write("x", b"y").result(60)
    until(lambda: cluster.ask("top")["recent"][1]["ended"] > 0)
    minute = cluster.ask("top")["recent"][1]
    assert minute["act_s"] == pytest.approx(minute["wait_s"] + minute["held_s"])


@contextmanager
def terminal(command: list[str], term: str = "xterm-256color"
             ) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """A command on a terminal of 80 x 24, whose other end this is."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    ran = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs,
                           env=env | {"TERM": term}, start_new_session=True)
    os.close(theirs)
    try:
        yield ours, ran
    finally:
        ran.kill()
        ran.wait(30)
        os.close(ours)


def read_until(ours: int, word: bytes, times: int = 1, seen: bytes = b"") -> bytes:
    """What a terminal shows until it has shown a word so often; `seen` is what it has shown, as one
    frame may come in several parts."""
    deadline = time.monotonic() + 60
    while seen.count(word) < times:
        assert time.monotonic() < deadline, seen
        if select.select([ours], [], [], 0.5)[0]:
            try:
                seen += os.read(ours, 1 << 16)
            except OSError:
                break
    return seen


def test_top_fits_a_terminal_and_q_ends_it(job: dict[str, Any]) -> None:
    with terminal([*TANGRAM, "top", "-d", "0.2"]) as (ours, ran):
        seen = read_until(ours, b"tangram top - job", 3)
        os.write(ours, b"q")
        seen += read_until(ours, b"\x1b[?1049l")
        assert ran.wait(30) == 0
    assert b"\x1b[?1049h" in seen, "it draws on the terminal's other screen, and leaves it again"
    frame = seen.split(b"\x1b[H")[2].decode()
    plain = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in frame.split("\n")]
    assert len(plain) <= 24 and max(len(line.rstrip("\r")) for line in plain) <= 80
    assert any("6 wait: Resources 5" in line for line in plain)
    assert "tool\\x1b[31m" in "\n".join(plain) and b"\x1b[31m\n" not in seen


def test_top_prints_plain_frames_on_a_terminal_without_a_cursor(job: dict[str, Any]) -> None:
    with terminal([*TANGRAM, "top", "-d", "0.2", "-n", "2"], "dumb") as (ours, ran):
        seen = read_until(ours, b"tangram top - job", 2)
        assert ran.wait(30) == 0
    assert seen.count(b"tangram top - job") == 2 and b"\x1b" not in seen


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_top_that_is_killed_gives_the_terminal_back(job: dict[str, Any], number: int) -> None:
    """As by `timeout 60 tangram top`: the screen of before, the cursor and the echo come back."""
    with terminal([*TANGRAM, "top", "-d", "0.2"]) as (ours, ran):
        before = termios.tcgetattr(ours)
        read_until(ours, b"tangram top - job", 2)
        assert termios.tcgetattr(ours) != before
        ran.send_signal(number)
        read_until(ours, b"\x1b[?25h")
        assert ran.wait(30) == 128 + number
        assert termios.tcgetattr(ours) == before


def test_top_without_rich_says_what_to_install(job: dict[str, Any]) -> None:
    code = ("import sys; sys.modules['rich'] = None; from tangram_hpc.cli import main; "
            "sys.exit(main(['top']))")
    with terminal([sys.executable, "-c", code]) as (ours, ran):
        seen = read_until(ours, b"top -b`")
        assert ran.wait(30) == 2
    assert b"pip install" in seen and b"[top]" in seen and b"Traceback" not in seen


def test_views_refuse_what_makes_no_sense(tmp_path: Path, capsys: Any) -> None:
    for words in (["queue", "-i", "0"], ["top", "-d", "x"], ["queue", "-t"]):
        with pytest.raises(SystemExit):
            main(words)
    for words in (["queue", "-t", "DONE"], ["queue", "--limit", "-1"], ["top", "-n", "-1"]):
        assert main(words) == 2
    capsys.readouterr()


def test_the_pictures_in_the_documents_have_todays_headings(job: dict[str, Any], capsys: Any
                                                            ) -> None:
    pictures = Path(__file__).resolve().parents[2] / "docs" / "pictures"
    frame, _ = printed(capsys, "top", "-b", "-n", "1")
    headings = {"top": [line for line in frame if line.split()[0].isupper()],
                "queue": printed(capsys, "queue")[0][:1]}
    for name, lines in headings.items():
        shown = html.unescape((pictures / f"{name}.svg").read_text()).replace("\xa0", " ")
        for line in lines:
            assert line.strip() in shown, "run: python docs/pictures/screens.py"


def test_a_wrong_column_is_told_with_the_place_that_it_was_written_in(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TANGRAM_ACCT_FORMAT", "JobID,Colour")
    assert main(["acct"]) == 2
    assert "TANGRAM_ACCT_FORMAT: 'Colour' is not a column" in capsys.readouterr().err
    assert main(["acct", "-o", "Colour"]) == 2
    assert "--format: 'Colour' is not a column" in capsys.readouterr().err
