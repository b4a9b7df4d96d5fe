"""Plain commands: what `_fast_path.c` serves comes to the same as what Python serves, it serves
nothing else, and broken orders break nothing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.executor_rig import Rig
from helpers.ordinary_user import ordinary_user

from tangram_hpc.domain.action import Kind
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol.payload import ExecCall, FileCall
from tangram_hpc.protocol.process_frames import WorkerInbox
from tangram_hpc.resources import process_tree
from tangram_hpc.sandbox.process import fast_path

SOURCE = Path(fast_path.__file__).with_name("_fast_path.c")
HERE = Path(__file__).parent.parent
COMPILER = shutil.which("cc") or shutil.which("gcc")
BUILT = pytest.mark.skipif(not fast_path.built(),
                           reason="_fast_path.c was not built: no C compiler here")


Both = tuple[tuple[Rig, int], ...]


# but for the two that the C library keeps for itself: posix_spawn has them ignored
SIGNALS = """cat; grep -E 'Sig(Ign|Blk)' /proc/self/status | while read name mask
do printf '%s %x\\n' $name $((0x$mask & ~0x180000000)); done"""


class Served:
    """How many ends were told by the library: it writes every lease in eight bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        feed = WorkerInbox.feed

        def counted(inbox: WorkerInbox, data: bytes) -> Any:
            self.count += data.count(b"\x95\x14\xcf\0\0\0\0")
            return feed(inbox, data)

        monkeypatch.setattr(WorkerInbox, "feed", counted)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    return Served(monkeypatch)


@pytest.fixture(scope="module", params=["process", "bwrap"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
         ) -> Iterator[tuple[Rig, Rig]]:
    """Two executors: one serves by Python only."""
    if request.param == "bwrap" and shutil.which("bwrap") is None:
        pytest.skip("bwrap is not installed")
    rigs = [Rig(tmp_path_factory.mktemp(name), trusted=False, isolation=request.param,
                compiled=name == "a", again=name == "a", output_max=20_000) for name in "ab"]
    yield rigs[0], rigs[1]
    for rig in rigs:
        rig.close()


@pytest.fixture
def both(pair: tuple[Rig, Rig]) -> Iterator[tuple[tuple[Rig, int], ...]]:
    """Each with a new session."""
    number = 1 + max((n for n in pair[0].up if n < 1000), default=0)
    for rig in pair:
        rig.open(number)
    yield tuple((rig, number) for rig in pair)
    for rig in pair:
        rig.loop.call_soon(rig.executor.close_session, number)
        rig.until(lambda rig=rig: number in rig.down)


def test_the_fast_path_is_built_where_there_is_a_compiler() -> None:
    if COMPILER is None:
        pytest.skip("no C compiler here")
    assert fast_path.built(), "install again: _fast_path.c is not built, or from other code"


def test_a_changed_memory_layout_has_a_new_version() -> None:
    """What was built before may be of the same size: only its version tells them apart."""
    shape = SOURCE.read_text().partition("struct bytes {")[2].partition("enum {")[0]
    words = "".join(re.sub(r"/\*.*?\*/", "", shape, flags=re.DOTALL).split())
    assert (fast_path._VERSION, zlib.crc32(words.encode())) == (10, 0xEB11F4FB), (
        "FAST_PATH_VERSION and _VERSION: one more; then their number and the new crc32 here")


SAME: list[tuple[ExecCall, bool]] = [  # and whether its end may be told by the library
    (ExecCall(argv=("/bin/true",)), True),
    (ExecCall(argv=("/bin/false",)), True),
    (ExecCall(shell="echo out; echo err >&2; exit 3"), True),
    (ExecCall(shell="head -c 16384 /dev/zero"), True),
    (ExecCall(shell="head -c 16385 /dev/zero"), False),
    (ExecCall(shell="head -c 30000 /dev/zero; echo end >&2"), False),
    (ExecCall(shell="head -c 16384 /dev/zero; exit 1", keep="tail"), True),
    (ExecCall(shell="head -c 30000 /dev/zero; echo end", keep="both"), False),
    (ExecCall(shell="echo both", keep="both"), True),
    (ExecCall(shell="kill -SEGV $$"), False),
    (ExecCall(argv=("/bin/echo", "", "a b", "'\"$")), True),
    (ExecCall(argv=("/bin/echo", "gr\u00fc\u00df")), False),
    (ExecCall(argv=("/bin/echo", *map(str, range(256)))), False),
    (ExecCall(argv=("/bin/echo", *map(str, range(255)))), True),
    (ExecCall(argv=("/bin/echo", "x" * 70_000)), False),
    (ExecCall(argv=("true",)), False),
    (ExecCall(argv=("/no/such",)), False),
    (ExecCall(argv=("/etc/passwd",)), False),
    (ExecCall(argv=("/bin/true", "a\0b")), False),
    (ExecCall(argv=("/bin/true",), shell="true"), False),
    (ExecCall(), False),
    (ExecCall(argv=("/usr/bin/env",), env={"MINE": "1"}), False),
    (ExecCall(argv=("/usr/bin/env",), env={"MINE": "1"}, clean_env=False), False),
    (ExecCall(shell="cat; pwd", stdin=b"said"), False),
    (ExecCall(shell="pwd | sed s,.*/,,", cwd=".."), False),
    (ExecCall(shell="cat f", files={"f": b"file"}), False),
    (ExecCall(shell=SIGNALS), True),
    (ExecCall(shell="grep -v processes /proc/self/limits; cat /proc/self/oom_score_adj"), True),
    (ExecCall(shell="env | sort; umask"), True),
    (ExecCall(shell="cat $TANGRAM_CPUS_FILE; nice; ls /proc/self/fd | wc -l"), True),
]


def without_place(text: bytes, rig: Rig, session: int) -> bytes:
    """A text without the name of the session's folder, which is another for each sandbox."""
    process = rig.session(session).process
    assert process is not None
    folder = process.folder.encode()
    return text.replace(folder, b"HERE").replace(os.path.basename(folder), b"NAME")


@BUILT
@pytest.mark.parametrize(("call", "may"), SAME, ids=lambda value: repr(value)[9:48])
def test_the_fast_path_and_python_give_the_same_results(
        both: Both, served: Served, call: ExecCall, may: bool) -> None:
    """It is the second in its session, by which its kind is known, or served by Python."""
    ways = []
    for rig, session in both:
        served.count = 0
        outcome, back, clean = rig.end(rig.begin(call, Kind.EXEC, session=session))
        said = (without_place(back.stdout, rig, session), back.stderr,
                back.cut) if back else None
        ways.append((outcome.state, outcome.exit_code, outcome.signal, outcome.reason, said, clean,
                     outcome.isolation, outcome.enforcement, outcome.returned))
        assert (outcome.exec_ns > 0) == (outcome.maxrss_kib > 0), outcome
        # what takes longer than its patience on a busy machine is Python's, and as right
        assert served.count <= (may and rig is both[0][0])
    assert ways[0] == ways[1]


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed")
@pytest.mark.parametrize("compiled", [True, False])
def test_in_a_user_namespace_a_command_starts_under_its_process_limit(
        compiled: bool, tmp_path: Path) -> None:
    """Whoever serves it: what forks at once is held. In Python's way there is room for itself."""
    rig = Rig(tmp_path, isolation="bwrap", compiled=compiled, session_pids=77)
    rig.open()
    for _ in range(20):
        _, back = rig.shell("grep processes /proc/self/limits", session=1)
        assert back is not None and int(back.stdout.split()[2]) in (77, 78), back
    _, back = rig.shell("sleep 0.1; grep processes /proc/self/limits", session=1)
    assert back is not None and back.stdout.split()[2:4] == [b"77", b"77"], back
    rig.close()


FULL = """
import dataclasses, tempfile
from pathlib import Path
from helpers.executor_rig import Rig
rig = Rig(Path(tempfile.mkdtemp()), isolation="bwrap", compiled=False, session_pids=40)
rig.open()
rig.shell("for i in $(seq 30); do sleep 60 >/dev/null 2>&1 & done", session=1)
supervisor = rig.executor._supervisor
supervisor._settings = dataclasses.replace(supervisor._settings, session_pids=20)
outcome, back = rig.exec("/bin/echo", "begun", session=1)
assert back is not None and back.stdout == b"begun\\n", outcome
outcome, back = rig.shell("sleep 0.1; (true); echo forked", session=1)
assert b"forked" not in back.stdout, back
outcome, back = rig.exec("no/such/program", session=1)
assert outcome.exit_code == 127, outcome
rig.close()
"""


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed")
def test_a_command_starts_although_background_processes_exceed_the_process_limit() -> None:
    """As a user whom the limit holds. Else nothing could ever end what was left behind."""
    with ordinary_user() as user:
        done = user.run("-c", FULL)
        assert done.returncode == 0, done.stderr[-3000:]


@BUILT
@pytest.mark.parametrize("in_session", [True, False])
def test_the_fast_path_serves_plain_commands(both: Both, served: Served, in_session: bool) -> None:
    """Else the tests beside it would compare Python with itself."""
    rig, session = both[0]
    for _ in range(500):  # on a busy machine few are over within its patience
        rig.exec("/bin/true", session=session if in_session else 0)
        if served.count > 20:
            return
    raise AssertionError(f"{served.count} of 500")


@BUILT
@pytest.mark.parametrize("call", [
    ExecCall(shell="sleep 0.1"), ExecCall(shell="sleep 0.01; echo both", keep="both")])
def test_the_fast_path_serves_commands_that_take_some_time(
        both: Both, served: Served, call: ExecCall) -> None:
    rig, session = both[0]
    for _ in range(100):  # on a busy machine few are over within its patience
        outcome, _, _ = rig.end(rig.begin(call, Kind.EXEC, session=session))
        assert outcome.state is ActionState.COMPLETED
        if served.count > 2:
            return
    raise AssertionError(f"{served.count} of 100")


THERE = "pwd | sed s,.*/,,; for d in . $TMPDIR /dev/shm; do ls -A $d | grep -c left; done; ls -A"
LEAVE = ("true", "echo x >left", "mkdir -p left/e; echo y >left/e/f", "echo z >$TMPDIR/left",
         "ln -s / $TMPDIR/left", "echo s >/dev/shm/left-$TANGRAM_CPUS", "ln -s /etc left",
         "cd ..; mv home left", "cd ..; rm -rf home; ln -s /etc home", "chmod 0 .")


@BUILT
@pytest.mark.parametrize("leave", LEAVE)
def test_nothing_is_left_of_an_action_without_a_session(
        pair: tuple[Rig, Rig], leave: str) -> None:
    """What it did to its own folders is undone, or its sandbox is not used again, whether Python or
    the library serves it."""
    for rig in pair:
        _, fresh = rig.shell(THERE)
        for _ in range(3):  # the library serves the later ones
            rig.shell(f"{leave}; true")
            _, back = rig.shell(THERE)
            assert back.stdout == fresh.stdout, leave
            assert back.stdout.endswith(b"\n0\n0\n0\n"), back


LOWER = """
import resource, sys
from pathlib import Path
import pytest
from test_fast_path import Rig, Served
soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
few = 4000 if hard < 0 else min(4000, hard)
resource.setrlimit(resource.RLIMIT_NPROC, (few, few))
served = Served(pytest.MonkeyPatch())
rig = Rig(Path(sys.argv[1]), isolation="bwrap", again=True, session_pids=few + 1)
rig.open()
for _ in range(500):
    _, back = rig.shell("grep processes /proc/self/limits", session=1)
    assert back is not None and back.stdout.split()[2:4] == [b"%d" % few] * 2, back
    if served.count > 20:
        break
assert served.count > 20, served.count
rig.close()
"""


@BUILT
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed")
def test_a_lower_process_limit_of_the_site_stays_and_does_not_stop_the_fast_path(
        tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LOWER, tmp_path], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]


@BUILT
def test_environment_variables_that_are_not_utf_8_reach_commands(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: Served) -> None:
    """It comes from whoever started the worker."""
    monkeypatch.setenv("LC_ODD", os.fsdecode(b"caf\xe9"))
    rig = Rig(tmp_path, trusted=False, again=True)
    rig.open()
    for _ in range(500):
        outcome, back = rig.shell('printf %s "$LC_ODD"', session=1)
        assert back is not None and back.stdout == b"caf\xe9", outcome
        if served.count > 2:  # an end of each kind
            break
    rig.close()


@BUILT
def test_python_takes_over_commands_that_take_longer_or_write_much(both: Both) -> None:
    for rig, session in both:
        slow = "echo a; sleep 0.05; echo b >&2; sleep 0.05; exit 4"
        outcome, back = rig.shell(slow, session=session)
        assert (outcome.exit_code, back.stdout, back.stderr) == (4, b"a\n", b"b\n")
        assert outcome.exec_ns > 0.1e9
        outcome, _ = rig.shell("exec sleep 60", session=session, timeout_ns=100_000_000)
        assert outcome.state is ActionState.TIMEOUT, outcome
        outcome, back = rig.shell("head -c 300000 /dev/zero", session=session)
        assert (len(back.stdout), back.cut) == (20_000, (280_000, 0)), outcome


@BUILT
def test_file_calls_and_kills_are_served_while_a_command_runs(both: Both) -> None:
    for rig, session in both:
        # The file exists before it has content, so the command waits for its size.
        lease = rig.begin(ExecCall(shell="while [ ! -s go ]; do sleep 0.01; done; cat go"),
                          Kind.EXEC, session=session)
        rig.end(rig.begin(FileCall("go", b"now"), Kind.FILE, session=session, cores=()))
        assert rig.end(lease)[1].stdout == b"now"
        lease = rig.begin(ExecCall(shell="exec sleep 60"), Kind.EXEC, session=session)
        rig.until(lambda rig=rig, lease=lease: ("started", lease) in rig.events)
        rig.executor.kill(lease, ActionState.CANCELLED, "enough")
        outcome, _, clean = rig.end(lease)
        assert (outcome.state, outcome.reason, clean) == (ActionState.CANCELLED, "enough", True)
        rig.file("go", b"", session=session)


@BUILT
def test_each_command_sees_the_number_of_cores_of_its_own_grant(both: Both) -> None:
    for rig, session in both:
        if len(rig.cores) < 2:
            pytest.skip("needs two cores")
        for cores in (rig.cores, rig.cores[:1], rig.cores[:1], rig.cores, rig.cores):
            _, back = rig.shell("echo $TANGRAM_CPUS; cat $TANGRAM_CPUS_FILE", session=session,
                                cores=cores)
            assert back.stdout == b"%d\n%d\n" % (len(cores), len(cores))


@BUILT
@pytest.mark.parametrize("first", ["true", "sleep 0.02"])
def test_a_background_process_is_found_by_the_next_command(both: Both, first: str) -> None:
    """A plain command may start what stays; the next one finds it."""
    for rig, session in both:
        rig.exec("/bin/true", session=session)
        outcome, _ = rig.shell(f"{first}; setsid sleep 300 >/dev/null 2>&1 & echo $!",
                               session=session)
        assert outcome.state is ActionState.COMPLETED
        _, back = rig.shell("ps ax -o args | grep -c '^sleep 300'", session=session)
        assert int(back.stdout) >= 1, back


@BUILT
def test_background_end_kills_what_each_command_left(both: Both) -> None:
    for rig, session in both:
        other = session + 1000
        rig.open(other, background="end")
        for seconds in (401, 402):
            rig.shell(f"setsid sleep {seconds} >/dev/null 2>&1 &", session=other)
        _, back = rig.shell("ps ax -o args | grep '^sleep 40[12]' || true", session=other)
        assert back.stdout == b"", back
        rig.loop.call_soon(rig.executor.close_session, other)
        rig.until(lambda rig=rig, other=other: other in rig.down)


def test_the_disk_limit_is_checked_again_after_files_were_removed(tmp_path: Path) -> None:
    """More files than may be, then fewer: a plain command does not forget what was looked at."""
    rig = Rig(tmp_path, disk_mib=4, again=True)
    rig.open()
    outcome, _ = rig.shell("head -c 3000000 /dev/zero >a; head -c 3000000 /dev/zero >b; sleep 3",
                           session=1)
    assert outcome.state is ActionState.FAILED and outcome.reason.startswith("disk:"), outcome
    for _ in range(3):  # what lies there is not this one's doing
        assert rig.shell("true", session=1)[0].state is ActionState.COMPLETED
    assert rig.shell("rm a b", session=1)[0].state is ActionState.COMPLETED
    rig.close()


@BUILT
@pytest.mark.parametrize(("backend", "victim"), [
    ("process", "init"), ("bwrap", "init"), ("bwrap", "pause process")])
def test_a_session_goes_on_after_its_init_ended_inside_the_library(
        backend: str, victim: str, tmp_path: Path) -> None:
    """SIGTERM, or its sandbox's end, reaches it there; its session goes on with another."""
    if backend == "bwrap" and shutil.which("bwrap") is None:
        pytest.skip("bwrap is not installed")
    rig = Rig(tmp_path, trusted=False, isolation=backend, again=True)
    rig.open()
    session = rig.session(1)
    pids = set[int]()
    for _ in range(2):
        assert rig.exec("/bin/true", session=1)[0].state is ActionState.COMPLETED
        assert session.process is not None and session.process.pid not in pids
        pids.add(session.process.pid)
        if victim == "init":
            os.kill(session.process.pid, signal.SIGTERM)
        else:
            os.kill(process_tree.children(session.process.pid)[0], signal.SIGKILL)
        rig.until(lambda: session.up and session.process is not None
                  and session.process.pid not in pids)
    assert rig.exec("/bin/true", session=1)[0].state is ActionState.COMPLETED
    rig.close()


# ---- the library alone ----


def bench(script: str, library: Path, folder: Path, *numbers: int, timeout_s: int = 150,
          **environ: str) -> dict[str, Any]:
    (folder / "cpus").write_text("1\n")
    done = subprocess.run([sys.executable, HERE / script, library, *map(str, numbers)],
                          cwd=folder, capture_output=True, text=True, timeout=timeout_s,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environ})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def compiled(folder: Path, *options: str, source: Path = SOURCE) -> Path:
    if COMPILER is None:
        pytest.skip("no C compiler here")
    library = folder / "plain.so"
    done = subprocess.run([COMPILER, "-std=gnu11", "-Wall", "-Wextra", "-Wconversion", "-Werror",
                           "-shared", "-fPIC", *options, "-o", str(library), str(source)],
                          capture_output=True, text=True)
    if "cannot find" in done.stderr and "san" in done.stderr:
        pytest.skip("this compiler has no sanitizers")
    assert done.returncode == 0, done.stderr
    return library


def test_a_library_that_was_built_from_other_code_is_not_used(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = SOURCE.read_text()
    others = [None, re.sub(r"(?<=FAST_PATH_VERSION )\d+", "99", ours, count=1),
              ours.replace("uint8_t data[BYTES];", "uint8_t data[BYTES + 8];"),
              "int nothing;\n", ours]
    for number, text in enumerate(others):
        (folder := tmp_path / str(number)).mkdir()  # a path once loaded stays so
        monkeypatch.setattr(fast_path, "__file__", str(folder / "plain.py"))
        assert fast_path._load() is None
        library = folder / "_fast_path.so"
        if text is None:
            library.write_text("for another machine")
        else:
            (source := folder / "other.c").write_text(text)
            os.replace(compiled(folder, source=source), library)
        assert (fast_path._load() is not None) == (text is ours), text


@pytest.mark.long  # the short suite has the same orders under sanitizers
def test_malformed_orders_are_sent_back_and_valid_ones_served(tmp_path: Path) -> None:
    seen = bench("helpers/fast_path_fuzz.py", compiled(tmp_path, "-O2"), tmp_path, 1, 600, 30)
    assert seen["served"] > 60 and seen["sent back"] > 200, seen


def fuzzed_under_sanitizers(folder: Path, count: int, percent: int, timeout_s: int = 150
                            ) -> dict[str, Any]:
    """What became of so many orders, of which so many are whole, under ASan and UBSan."""
    library = compiled(folder, "-g", "-O1", "-fsanitize=address,undefined",
                       "-fno-sanitize-recover=all")
    assert COMPILER is not None
    preload = subprocess.run([COMPILER, "-print-file-name=libasan.so"], capture_output=True,
                             text=True, check=True).stdout.strip()
    if not os.path.isabs(preload):
        pytest.skip("this compiler has another library for its sanitizers")
    return bench("helpers/fast_path_fuzz.py", library, folder, 2, count, percent,
                 timeout_s=timeout_s, ASAN_OPTIONS="detect_leaks=0",
                 LD_PRELOAD=os.path.realpath(preload))


def test_malformed_orders_break_nothing_under_sanitizers(tmp_path: Path) -> None:
    seen = fuzzed_under_sanitizers(tmp_path, 400, 30)
    assert seen["sent back"] > 100, seen


@pytest.mark.long  # a million, nearly all of them broken: some minutes
@pytest.mark.timeout(7200)
def test_a_million_malformed_orders_break_nothing_under_sanitizers(tmp_path: Path) -> None:
    seen = fuzzed_under_sanitizers(tmp_path, 1_000_000, 2, 7000)
    print(seen)
    assert seen["served"] > 10_000 and seen["sent back"] > 800_000, seen


def test_packets_in_pieces_and_floods_of_output_go_back_to_python(tmp_path: Path) -> None:
    seen = bench("helpers/fast_path_alone.py", compiled(tmp_path, "-O2"), tmp_path)
    assert seen["packets"] == ["READ", 1, "one two three"], seen
    assert seen["left"] == ["READ", "FRESHEN", "FRESHEN", "READ", "FRESHEN", "READ", "READ",
                            "FRESHEN"], "what is left without a session is Python's to remove"
    assert seen["flood"] == ["RUNNING", 0, None], "its deadline and limits are Python's to watch"
    assert seen["longer"] == {
        "silent": ["READ", 1, True], "talks": ["READ", 1, True], "is heard": ["RUNNING", 0, False],
        "floods": ["RUNNING", 0, False],
        "order": ["RUNNING", 0, False], "signal": ["RUNNING", 0, False],
        "patience": ["RUNNING", 0, False]}, "whether it waits, and whether it knows the memory"
