"""Rollout pools through a real broker, worker and sandboxes. The services are fakes that compute
nothing; the tools are real commands."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.cluster_parts import kill_broker, processes_of

import tangram_hpc
from tangram_hpc import LocalCluster
from tangram_hpc.accounting.fields import as_json
from tangram_hpc.accounting.record import fold
from tangram_hpc.atomic_file import replace_file
from tangram_hpc.cli import main as cli
from tangram_hpc.config.rollouts import RolloutPoolSettings, rollouts_spec
from tangram_hpc.config.settings import load_config
from tangram_hpc.scheduler.routing.cmlfq import CausalTree
from tangram_hpc.storage import cmlfq_file
from tangram_hpc.storage.cmlfq_file import FILES_MAX, TreeFiles, load, save
from tangram_hpc.storage.journal import read_journal
from tangram_hpc.storage.journal_segments import read_journals

FAKE = {"backend": "fake", "call_s": 0.002}
POOL = {"buckets": [{"services": ["s0", "s1"], "upto": 1_000, "context_max": 8_000},
                    {"services": "big", "context_max": 30_000}], "least": 2}
SLOW = {"buckets": [{"services": "slow", "running_max": 1, "queue_max": 1, "context_max": 500}]}
PASS, FAIL = "exit 0", "echo 1 failed; exit 1"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(cpus=2, devices="fake:4", home=tmp_path_factory.mktemp("home")) as one:
        for name in ("s0", "s1", "big", "slow"):
            one.register_service(name, FAKE)
        yield one


def turn(cluster: LocalCluster, pool: str, trajectory: str, generated: int) -> str:
    """Runs one turn; returns the service to which it was routed."""
    future = cluster.rollout(pool, "sample", trajectory=trajectory, prompt="a task",
                             context=100 + generated, generated=generated)
    assert future.result(30)["fake"]
    return future.route.service


def play(cluster: LocalCluster, pool: str, trajectory: str, tests: str, told: bool) -> str:
    """Runs a turn, its tests in a sandbox, and a second turn; returns the service of the second
    one."""
    assert turn(cluster, pool, trajectory, 0) in ("s0", "s1")
    with cluster.session(trusted=True, trajectory=trajectory if told else "") as session:
        session.exec(tests, name="tests").result(30)
    return turn(cluster, pool, trajectory, 200)


@pytest.mark.parametrize("told", [True, False])
def test_tool_results_of_a_sandbox_move_a_trajectory_to_a_larger_service(
        cluster: LocalCluster, told: bool) -> None:
    pool = f"told-{told}"
    cluster.register_rollouts(pool, POOL)
    cluster.register_rollouts(pool, RolloutPoolSettings(**POOL))  # as every rank does
    for n in range(4):
        name = f"{pool}-{n}"
        play(cluster, pool, name, FAIL if n % 2 else PASS, told)
        cluster.trajectory_ended(pool, name, 9_000 if n % 2 else 300, epoch=n)
    assert play(cluster, pool, f"{pool}-fails", FAIL, told) == ("big" if told else "s0")
    assert play(cluster, pool, f"{pool}-passes", PASS, told) in ("s0", "s1")
    seen = next(p for p in cluster.ask("rollouts")["rollouts"] if p["name"] == pool)
    assert (seen["turns"], seen["ended"], seen["trajectories"]) == (12, 4, 2)
    assert seen["judged"] == 8 and 0 < seen["accuracy"] < 1


def test_functions_grants_and_reported_tools_move_a_trajectory_too(cluster: LocalCluster) -> None:
    cluster.register_rollouts("elsewhere", POOL)
    web = cluster.register_endpoint("web", concurrency=2)

    async def page() -> str:
        return "x" * 5_000
    for n in range(4):
        name, long = f"e-{n}", n % 2 == 1
        turn(cluster, "elsewhere", name, 0)
        if n < 2:
            cluster.tool_returned("elsewhere", name, "search", 5_000 if long else 10)
        elif n == 2:
            cluster.submit(lambda size: "x" * size, 10, name="search", trajectory=name).result(30)
        else:
            asyncio.run(web.request(page, name="search", trajectory=name))
        turn(cluster, "elsewhere", name, 200)
        cluster.trajectory_ended("elsewhere", name, 9_000 if long else 300)
    turn(cluster, "elsewhere", "e-new", 0)
    with web.slot("search", trajectory="e-new") as slot:
        slot.returned = 5_000
    assert turn(cluster, "elsewhere", "e-new", 200) == "big"
    cluster.trajectory_ended("elsewhere", "e-new")
    with pytest.raises(tangram_hpc.InvalidInput, match=r"returned: 5000\.0 is no whole number"):
        with web.slot("search", trajectory="e-new") as slot:
            slot.returned = 5e3
    for name in ("", "x" * 201, "\ud800"):
        with pytest.raises(tangram_hpc.InvalidInput, match=r"trajectory: .* is not a name"):
            cluster.tool_returned("elsewhere", name, "search", 1)
    with pytest.raises(tangram_hpc.InvalidInput, match=r"trajectory: .* is not a name"):
        cluster.call("s0", "sample", trajectory="x" * 201)
    with pytest.raises(tangram_hpc.InvalidInput, match="status: 'sad' is not one of success"):
        cluster.tool_returned("elsewhere", "e-new", "search", 1, "sad")
    with pytest.raises(tangram_hpc.InvalidInput, match=r"tool: .* is not UTF-8"):
        cluster.tool_returned("elsewhere", "e-new", "\ud800", 1)
    with pytest.raises(tangram_hpc.InvalidInput, match="no rollout pool 'nowhere' is declared"):
        cluster.trajectory_ended("nowhere", "e-new")


def test_turns_wait_for_a_full_pool_and_explain_says_so(
        cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    cluster.register_rollouts("slow", SLOW)
    turns = [cluster.rollout("slow", "hang", trajectory=n, prompt=n, context=10, generated=0)
             for n in range(4)]
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and "slow 2" not in {
            f"{p['name']} {p['waiting']}" for p in cluster.ask("rollouts")["rollouts"]}:
        time.sleep(0.01)  # the broker deals once a beat
    monkeypatch.setenv("TANGRAM_ACCESS", str(cluster.access))
    assert cli(["explain", turns[3].id]) == 0
    said = capsys.readouterr().out
    assert "RolloutsFull" in said and "in the queue of pool slow: slow has 2 of 2" in said
    assert cli(["info"]) == 0
    said = capsys.readouterr().out
    assert "ROLLOUTS slow" in said and "2 turns waiting" in said and "2/1+1" in said
    for future in turns:
        future.cancel()
    deadline = time.monotonic() + 30
    while any(not future.done() for future in turns) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(future.cancelled() for future in turns)
    after = cluster.rollout("slow", "sample", trajectory="after", prompt=1, context=10, generated=0)
    assert after.result(30)["fake"] and after.route.service == "slow"
    with pytest.raises(tangram_hpc.InfeasibleRequest, match="context: 501 tokens fit on no"):
        cluster.rollout("slow", "sample", trajectory="x", prompt=1, context=501, generated=0
                        ).result(30)


def test_wrong_pools_and_turns_are_refused_in_one_line(cluster: LocalCluster) -> None:
    cluster.register_rollouts("right", POOL)
    for fields, text in (({"buckets": []}, "rollouts p: buckets: Tuple should have at least 1"),
                         ({**POOL, "edges": 1}, "rollouts p: edges: is not known"),
                         ({"buckets": [{"services": "s0", "upto": 5}]}, "rollouts p: upto: every"),
                         ({"buckets": [{"services": "s9"}]}, "rollouts p: services: no service")):
        with pytest.raises(tangram_hpc.InvalidInput) as told:
            cluster.register_rollouts("p", fields)
        assert str(told.value).startswith(text) and "\n" not in str(told.value)
    with pytest.raises(tangram_hpc.InvalidInput, match="declared already with other values"):
        cluster.register_rollouts("right", {**POOL, "worth": 2})
    with pytest.raises(tangram_hpc.InvalidInput, match="generated: -1 is not a whole number"):
        cluster.rollout("right", "sample", trajectory="x", prompt=1, context=1, generated=-1)


def test_rollout_pools_are_read_from_the_settings_file(tmp_path: Path) -> None:
    (tmp_path / "tangram.toml").write_text(
        '[[rollouts.policy.buckets]]\nservices = ["s0"]\nupto = 500\n'
        '[[rollouts.policy.buckets]]\nservices = "big"\n')
    config = load_config({"TANGRAM_CONFIG": str(tmp_path / "tangram.toml")})
    spec = rollouts_spec("policy", config.rollouts["policy"])
    assert spec.edges == (500,) and [s.name for s in spec.services] == ["s0", "big"]


def test_a_pool_with_an_unusable_tree_folder_is_refused(
        cluster: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(tangram_hpc.InvalidInput, match="file/trees: Not a directory; name a fold"):
        cluster.register_rollouts("kept", {**POOL, "tree": str(tmp_path / "file" / "trees")})
    (tmp_path / "1.cmlfq.json").write_text("{}")
    for wrong, why in (("{}", "cmlfq: not a saved tree"), ("[" * 100_000, "recursion"),
                       (json.dumps(CausalTree().plain() | {"nodes": [[True, "x", [], []]]}),
                        "a node holds more than numbers")):
        (tmp_path / "1.cmlfq.json").write_text(wrong)
        with pytest.raises(tangram_hpc.InvalidInput, match=rf"1\.cmlfq\.json: .*{why}.*remove it"):
            cluster.register_rollouts("kept", {**POOL, "tree": str(tmp_path)})
    (tmp_path / "1.cmlfq.json").unlink()
    cluster.register_rollouts("kept", {**POOL, "tree": str(tmp_path)})
    with pytest.raises(tangram_hpc.InvalidInput, match="tree: pool 'kept' keeps its own in"):
        cluster.register_rollouts("too", {**POOL, "tree": str(tmp_path)})


def test_a_tree_folder_that_disappears_is_reported_without_an_error(tmp_path: Path) -> None:
    files, tree = TreeFiles("7"), CausalTree()
    folder = tmp_path / "trees"
    assert files.load(str(folder)) == (None, None)
    tree.learn(1, 0, (), (), 10)
    files.save(str(folder), tree)
    files.close()
    everything, own = files.load(str(folder))
    assert everything.plain() == own.plain() == tree.plain() and files.trouble(str(folder)) == ""
    shutil.rmtree(folder)
    folder.write_text("")
    files.save(str(folder), tree)
    files.close()
    assert "name a folder that this user may write" in files.trouble(str(folder))


def test_only_the_newest_files_of_a_folder_are_read(tmp_path: Path) -> None:
    for n in range(FILES_MAX + 3):
        tree = CausalTree()
        tree.learn(n, 0, (), (), 10)
        os.utime(save(tmp_path, n, tree), (1000 - n, 1000 - n))
    everything, own = TreeFiles("7").load(str(tmp_path))
    assert sorted(everything.prompts) == list(range(FILES_MAX)) and list(own.prompts) == [7]


def test_saving_trees_to_a_hanging_file_system_blocks_nothing_and_keeps_two_trees(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, folder, hanging = TreeFiles("7"), tmp_path / "trees", tmp_path / "hanging"
    assert files.load(str(folder)) == (None, None)
    tree = CausalTree()
    os.mkfifo(hanging)

    def replace_slowly(path: Path, content: str, mode: int, sync: bool) -> None:
        os.close(os.open(hanging, os.O_WRONLY))  # hangs until somebody reads
        replace_file(path, content, mode, sync)

    monkeypatch.setattr(cmlfq_file, "replace_file", replace_slowly)
    for n in range(5):
        tree.learn(n, 0, (), (), 10)
        files.save(str(folder), tree)
        while n == 0 and files._next:  # the writer takes the first, and hangs with it
            time.sleep(0.001)
    assert [t.name for t in threading.enumerate()].count("tangram-tree") == 1
    reader = os.open(hanging, os.O_RDONLY)  # now it goes on
    files.close()
    os.close(reader)
    assert sorted(load(folder / "7.cmlfq.json").prompts) == list(range(5))


@pytest.mark.long
def test_learned_lengths_reach_the_next_job_and_routes_reach_accounting(tmp_path: Path) -> None:
    config = {**POOL, "tree": str(tmp_path / "trees")}
    with LocalCluster(cpus=1, devices="fake:3", home=tmp_path) as first:
        for name in ("s0", "s1", "big"):
            first.register_service(name, FAKE)
        first.register_rollouts("p", config)
        for n in range(4):
            play(first, "p", f"t{n}", FAIL if n % 2 else PASS, True)
            first.trajectory_ended("p", f"t{n}", 9_000 if n % 2 else 300, epoch=n)
        first.ask("info")
    rows = [as_json(r) for r in fold(read_journal(first.folder / "journal")).records.values()]
    routes = [row["route"]["how"] for row in rows if row["route"]]
    assert routes[::2] == ["prefill"] * 4 and routes[1] == "stay"
    assert all(row["key"] == "service:" + row["route"]["service"] for row in rows if row["route"])
    assert sum(row["trajectory"] == "t0" for row in rows) == 3  # two turns and a tool
    assert [p.name for p in (tmp_path / "trees").iterdir()] == [f"{first.job}.cmlfq.json"]
    with LocalCluster(cpus=1, devices="fake:3", home=tmp_path) as second:
        for name in ("s0", "s1", "big"):
            second.register_service(name, FAKE)
        with pytest.raises(tangram_hpc.InvalidInput, match="learned with other settings"):
            second.register_rollouts("p", {**config, "depth": 3})
        second.register_rollouts("p", config)
        assert play(second, "p", "new", FAIL, True) == "big"
        second.trajectory_ended("p", "new", 9_000, epoch=0)
        second.ask("info")
    assert len(list((tmp_path / "trees").iterdir())) == 2


@pytest.mark.long
def test_a_pool_is_saved_after_its_broker_was_started_again(tmp_path: Path) -> None:
    with LocalCluster(cpus=1, devices="fake:3", home=tmp_path) as one:
        for name in ("s0", "s1", "big"):
            one.register_service(name, FAKE)
        one.register_rollouts("p", {**POOL, "tree": str(tmp_path / "trees")})
        one._children[0].kill()
        for n in range(3):
            turn(one, "p", f"t{n}", 0)
            one.trajectory_ended("p", f"t{n}", 300, epoch=0)
        one.ask("info")
    [file] = (tmp_path / "trees").iterdir()
    assert load(file).plain() != CausalTree(load(file).shape).plain()


@pytest.mark.long
def test_a_turn_with_a_name_outlives_its_broker(tmp_path: Path) -> None:
    first = LocalCluster(cpus=1, devices="fake:3", home=tmp_path)
    first.start()
    for name in ("s0", "s1", "big"):
        first.register_service(name, FAKE)
    first.register_rollouts("p", POOL)
    lost = first.rollout("p", "hang", trajectory="lost", prompt=1, context=1, generated=0)
    hang = first.rollout("p", "sample", trajectory="kept", prompt=1, context=1, generated=0,
                         once="kept", length=0)
    hang.result(30)
    waits = first.rollout("p", "hang", trajectory="waits", prompt=1, context=1, generated=0,
                          once="waits", timeout=1.0)
    while first.ask("rollouts")["rollouts"][0]["turns"] < 3:
        time.sleep(0.01)
    kill_broker(first)
    for child in processes_of(first):
        child.wait(30)
    first.close()
    for future in (lost, waits):
        assert isinstance(future.exception(0), tangram_hpc.BrokerUnreachable)
    with LocalCluster(cpus=1, devices="fake:3", home=tmp_path, job=first.job) as again:
        for name in ("s0", "s1", "big"):
            again.register_service(name, FAKE)
        again.register_rollouts("p", POOL)
        same = again.rollout("p", "hang", trajectory="waits", prompt=1, context=1, generated=0,
                             once="waits", timeout=1.0)
        with pytest.raises(tangram_hpc.ActionFailed, match="TIMEOUT"):
            same.result(60)
        assert again.rollout("p", "sample", trajectory="kept", prompt=1, context=1, generated=0,
                             once="kept").result(30)["fake"]
        assert turn(again, "p", "kept", 10) in ("s0", "s1")
        pool = again.ask("rollouts")["rollouts"][0]
        assert pool["waiting"] == 0 and all(s["load"] == 0 for s in pool["services"])
    assert len(list(read_journals(again.folder))) > 0


@pytest.mark.long
def test_a_turn_on_an_unreachable_service_is_routed_to_another(tmp_path: Path) -> None:
    with LocalCluster(cpus=1, devices="fake:2", home=tmp_path) as cluster:
        nowhere = {"backend": "http", "url": "http://127.0.0.1:9", "gpus": [1]}
        cluster.register_service("nowhere", nowhere)
        cluster.register_service("s0", FAKE)
        cluster.register_rollouts("p", {"buckets": [{"services": ["nowhere", "s0"]}]})
        turns = [cluster.rollout("p", "sample", trajectory=n, prompt=n, context=1, generated=0)
                 for n in range(4)]
        assert all(future.result(60)["fake"] for future in turns)
        assert {future.route.service for future in turns} == {"s0"}
        assert max(future.details.attempt for future in turns) == 2
        seen = cluster.ask("rollouts")["rollouts"][0]["services"]
        assert not seen[0]["stands"] and seen[0]["closed_s"] > 0 and seen[1]["stands"]


@pytest.mark.long
def test_a_wrong_pool_in_the_settings_file_ends_the_broker_cleanly(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "tangram.toml"
    config.write_text('[[rollouts.policy.buckets]]\nservices = "nobody"\n')
    monkeypatch.setenv("TANGRAM_CONFIG", str(config))
    with tempfile.TemporaryDirectory() as scratch:  # a socket's path there must be short
        cluster = LocalCluster(cpus=1, home=tmp_path / "home", scratch=scratch)
        with pytest.raises(tangram_hpc.BrokerUnreachable):
            cluster.start()
        said = (cluster.folder / "broker.log").read_text()
        assert "rollouts policy: services: no service 'nobody' is declared" in said
        assert "Traceback" not in said and os.listdir(scratch) == []
