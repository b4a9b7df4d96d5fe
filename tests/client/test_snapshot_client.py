"""Snapshots and prepared environments as clients use them: on real brokers and workers."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.cluster_parts import start_worker, until
from helpers.root_folder_rig import make_image

import tangram_hpc
from tangram_hpc import InfeasibleRequest, LocalCluster
from tangram_hpc.client.snapshots import prepared
from tangram_hpc.errors import InvalidInput, SetupFailed, TangramError
from tangram_hpc.protocol import message as ms

WAIT_S = 60
TRUSTED: dict[str, Any] = {"trusted": True, "backend": "process"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(cpus=2, home=tmp_path_factory.mktemp("home"), warm=0, grace_s=0.5) as c:
        yield c


def in_threads(calls: list[Any]) -> list[Any]:
    """Makes these calls at once; returns what each of them returned or raised."""
    told: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            told[number] = calls[number]()
        except TangramError as error:
            told[number] = error

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return told


def test_a_snapshot_is_taken_in_order_listed_and_removed(cluster: LocalCluster) -> None:
    client = cluster.client
    assert client is not None
    with cluster.session(**TRUSTED) as session:
        session.exec("sleep 0.3; echo before >f")
        snapshot = session.snapshot()
        session.exec("echo after >f")
        name = snapshot.result(WAIT_S)
        assert session.read("f").result(WAIT_S) == b"after\n"
        (info,) = client.snapshots()
        assert (info.name, info.session, info.sessions, info.prepared) == (
            name, session.id, 0, False)
        assert len(info.nodes) == 1 and info.mib >= 1
    with cluster.session(snapshot=name, **TRUSTED) as begun:
        assert begun.read("f").result(WAIT_S) == b"before\n"
        assert [one.sessions for one in client.snapshots()] == [1]
        assert client.remove_snapshot(name) and not client.remove_snapshot(name)
        assert client.snapshots() == []
        assert begun.read("f").result(WAIT_S) == b"before\n"  # it is in use, and stays
        with begun.fork() as fork:
            assert fork.read("f").result(WAIT_S) == b"before\n"
    with pytest.raises(InfeasibleRequest, match=f"^snapshot: there is no snapshot {name} in this"):
        cluster.session(snapshot=name).opened.result(WAIT_S)


def test_forks_of_a_session_from_a_snapshot_have_its_image(cluster: LocalCluster, tmp_path: Path
                                                           ) -> None:
    client = cluster.client
    assert client is not None
    node = client.ask("nodes")["nodes"][0]
    if "bwrap" not in node["untrusted"] or not node["image_root"]:
        pytest.skip(f"no image can be written here: {node}")
    image = str(make_image(tmp_path / "image"))
    with cluster.session(image=image) as session:
        session.exec("echo new >/testbed/new; rm /testbed/old").result(WAIT_S).check()
        name = session.snapshot().result(WAIT_S)
    with cluster.session(snapshot=name) as begun, begun.fork() as fork, fork.fork() as again:
        client.remove_snapshot(name)
        for each in (begun, fork, again):
            each.exec(f"touch /testbed/{each.id}").result(WAIT_S).check()
        for each in (begun, fork, again):
            assert each.exec("ls /testbed").result(WAIT_S).text.split() == sorted(
                [each.id, "folder", "new"])


def test_wrong_arguments_are_refused_here(cluster: LocalCluster) -> None:
    good = "snap-" + "0" * 24
    for wrong in ("x", "snap-1", f"{good}0", "../etc"):
        with pytest.raises(InvalidInput, match=r"^snapshot: "):
            cluster.session(snapshot=wrong)
    with pytest.raises(InvalidInput, match=r"^image: "):
        cluster.session(snapshot=good, image="/images/x")
    client = cluster.client
    assert client is not None
    for setup in ("make", [b"make"], [[]], [[1]], 3):
        with pytest.raises(InvalidInput, match=r"^setup: "):
            client.prepared(setup=setup)  # type: ignore[arg-type]


def content_of(path: Path) -> bytes | None:
    """The content of a regular file; None for another kind of file, such as the device by which an
    overlay marks a removed file, and for one that is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        assert error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO), error
        return None
    with open(fd, "rb") as file:
        return file.read() if stat.S_ISREG(os.fstat(fd).st_mode) else None


def test_secrets_are_no_part_of_a_snapshot(cluster: LocalCluster) -> None:
    client = cluster.client
    assert client is not None
    client.keep_secrets({"TOOL_KEY": "s3cr3t-of-a-tool"})
    with cluster.session(secrets=["TOOL_KEY"], **TRUSTED) as session:
        assert session.exec("echo $TOOL_KEY").result(WAIT_S).text == "s3cr3t-of-a-tool\n"
        folder = session.exec("pwd").result(WAIT_S).text.strip()
        name = session.snapshot().result(WAIT_S)
        held = []
        for here, _, files in os.walk(Path(folder).parents[1]):  # with what ends meanwhile
            held += [data for file in files if (data := content_of(Path(here, file))) is not None]
        assert held and not any(b"s3cr3t" in data for data in held)
    with cluster.session(snapshot=name, **TRUSTED) as begun:
        assert begun.exec("echo $TOOL_KEY").result(WAIT_S).text == "\n"
    client.remove_snapshot(name)


def test_a_group_costs_one_setup_also_of_several_clients(cluster: LocalCluster, tmp_path: Path
                                                        ) -> None:
    log = tmp_path / "log"
    asked: dict[str, Any] = {"setup": [f"echo set up >>{log}; cat in >out; sleep 0.3", ["true"]],
                             "files": {"in": "content"}, **TRUSTED}
    with tangram_hpc.connect(str(cluster.access)) as second:
        clients = [cluster.client, second]
        names = in_threads([lambda c=c: c.prepared(**asked) for c in clients * 8])
        assert len(set(names)) == 1 and isinstance(names[0], str), names
        assert log.read_text() == "set up\n"
        assert second.prepared(**asked) == names[0]
        assert [one.prepared for one in second.snapshots() if one.name == names[0]] == [True]
        group = [cluster.session(snapshot=names[0], **TRUSTED) for _ in range(16)]
        assert {s.read("out").result(WAIT_S) for s in group} == {b"content"}
        for session in group:
            session.close()
        for session in group:
            session.closed.result(WAIT_S)
        other = second.prepared(**{**asked, "files": {"in": "other"}})
        assert other != names[0] and log.read_text() == "set up\n" * 2
        assert second.remove_snapshot(names[0])
        assert second.prepared(**asked) not in (names[0], other)
        for one in second.snapshots():
            second.remove_snapshot(one.name)


def test_a_failed_step_is_one_error_for_all_and_the_next_asker_tries_again(cluster: LocalCluster,
                                                                          tmp_path: Path) -> None:
    flag, log = tmp_path / "flag", tmp_path / "log"
    setup = ["true", f"echo try >>{log}; sleep 0.5; echo why not >&2; test -e {flag}"]
    with tangram_hpc.connect(str(cluster.access)) as second:
        told = in_threads([lambda c=c: c.prepared(setup=setup, **TRUSTED)
                           for c in [cluster.client, second] * 3])
        assert {type(one) for one in told} == {SetupFailed}
        assert len({str(one) for one in told}) == 1
        text = str(told[0])
        assert text.startswith("setup: step 2, ") and "exit code 1" in text
        assert text.endswith("its output ends: 'why not'") and "\n" not in text
        assert log.read_text() == "try\n"
        flag.touch()
        name = second.prepared(setup=setup, **TRUSTED)
        assert log.read_text() == "try\n" * 2
        assert second.remove_snapshot(name)


def test_when_the_builder_goes_away_the_next_one_builds(cluster: LocalCluster, tmp_path: Path
                                                       ) -> None:
    flag, log = tmp_path / "flag", tmp_path / "log"
    setup = [f"echo try >>{log}; until test -e {flag}; do sleep 0.05; done"]
    builder = tangram_hpc.connect(str(cluster.access))
    first = threading.Thread(target=in_threads, args=(
        [lambda: builder.prepared(setup=setup, **TRUSTED)],))
    first.start()
    while not log.exists():
        first.join(0.02)
    names: list[Any] = []
    client = cluster.client
    assert client is not None
    waits = threading.Thread(target=lambda: names.append(client.prepared(setup=setup, **TRUSTED)))
    waits.start()
    builder.close()
    first.join(WAIT_S)
    while log.read_text() == "try\n":
        waits.join(0.02)
    flag.touch()
    waits.join(WAIT_S)
    assert names and client.remove_snapshot(names[0])


def test_another_node_begins_from_a_snapshot_and_loses_it_with_its_last_holder(tmp_path: Path
                                                                              ) -> None:
    with LocalCluster(cpus=1, mem_mib=1024, home=tmp_path, warm=0) as cluster:
        client = cluster.client
        assert client is not None
        with cluster.session(mem=600, **TRUSTED) as first:
            first.exec("echo mine >f; ln -s f link").result(WAIT_S).check()
            name = first.snapshot().result(WAIT_S)
            worker = start_worker(cluster, "second")
            with cluster.session(snapshot=name, mem=600, **TRUSTED) as away:
                assert away.read("link").result(WAIT_S) == b"mine\n"
                assert away.node == "second" != first.node
            (info,) = client.snapshots()
            assert info.nodes == tuple(sorted((first.node, "second")))
            with cluster.session(mem=600, **TRUSTED) as there:
                there.write("g", "theirs").result(WAIT_S)
                lost = there.snapshot().result(WAIT_S)
                assert there.node == "second"
                worker.kill()
                there.closed.result(WAIT_S)
            assert [(one.name, one.nodes) for one in client.snapshots()] == [(name, (first.node,))]
            with pytest.raises(InfeasibleRequest, match=f"there is no snapshot {lost}"):
                cluster.session(snapshot=lost, **TRUSTED).opened.result(WAIT_S)


def test_sessions_of_a_group_open_where_their_snapshot_is(tmp_path: Path) -> None:
    with LocalCluster(cpus=2, home=tmp_path, warm=0) as cluster:
        with cluster.session(**TRUSTED) as first:
            first.exec("echo mine >f").result(WAIT_S).check()
            name, home = first.snapshot().result(WAIT_S), first.node
        first.closed.result(WAIT_S)
        start_worker(cluster, "second")
        until(lambda: len(cluster.ask("nodes")["nodes"]) == 2, "the second node joined")
        group = [cluster.session(snapshot=name, **TRUSTED) for _ in range(3)]
        assert [one.read("f").result(WAIT_S) for one in group] == [b"mine\n"] * 3
        assert [one.node for one in group] == [home, home, "second"]


def test_a_client_that_is_interrupted_while_it_waits_tells_the_broker() -> None:
    told = []

    class Interrupted:
        """A connection whose caller presses Ctrl-C before the answer is here."""

        def request(self, question: Any, timeout_s: float) -> Any:
            told.append(question(1))
            raise KeyboardInterrupt

        def begin(self, question: Any) -> None:
            told.append(question(2))

    environments = prepared.PreparedEnvironments(
        Interrupted(), None)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        environments.prepared(["true"], None, 1.0, {})
    assert [(one.request, one.op) for one in told] == [(1, "prepare"), (2, "failed")]
    assert isinstance(told[1], ms.ManageSnapshot) and told[1].name == told[0].name
    assert "was ended (KeyboardInterrupt)" in told[1].text


def test_an_environment_with_a_set_of_hosts_is_the_same_in_all_processes() -> None:
    """The order of a set differs between processes."""
    one, other = ({"network": hosts} for hosts in (
        {f"h{n}.org" for n in range(20)}, {f"h{n}.org" for n in reversed(range(20))}))
    here = prepared._fingerprint([], {}, one)
    assert here == prepared._fingerprint([], {}, other)
    there = subprocess.run(
        [sys.executable, "-c", "from tangram_hpc.client.snapshots.prepared import _fingerprint\n"
         "print(_fingerprint([], {}, {'network': {f'h{n}.org' for n in range(20)}}))"],
        env={**os.environ, "PYTHONHASHSEED": "1"}, text=True, capture_output=True, check=True)
    assert there.stdout.strip() == here
