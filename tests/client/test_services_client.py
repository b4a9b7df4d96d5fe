"""Services as a trainer and a config file declare and call them, by a real broker and worker; what
computes nothing is called fake.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import tangram_hpc
from tangram_hpc import LocalCluster
from tangram_hpc.accounting.record import fold
from tangram_hpc.cli import main as cli
from tangram_hpc.config.services import FakeService, options_of, service_spec
from tangram_hpc.domain.action import Kind
from tangram_hpc.domain.states import ActionState
from tangram_hpc.storage.journal import read_journal

FAKE = {"backend": "fake", "wake_s": 0.01, "call_s": 0.005, "weights_mib": 10}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(cpus=1, devices="fake:2", home=tmp_path) as one:
        yield one


def test_calls_are_answered_accounted_and_run_as_one(cluster: LocalCluster) -> None:
    for name in "abc":
        cluster.register_service(name, FAKE)
    calls = [cluster.call("abc"[n % 3], "score", texts=["x"] * n) for n in range(60)]
    answers = [call.result(30) for call in calls]
    assert all(a["fake"] and a["method"] == "score" for a in answers)
    assert max(a["batch"] for a in answers) > 1
    told = cluster.ask("services")["services"]
    assert [s["name"] for s in told] == list("abc")
    assert sum(len(s["stands_on"]) for s in told) <= 2
    cluster.close()
    rows = [r for r in fold(read_journal(cluster.folder / "journal")).records.values()
            if r.action.kind is Kind.CALL]
    assert [r.state for r in rows] == [ActionState.COMPLETED] * 60
    assert max(r.outcome.batch for r in rows) == max(a["batch"] for a in answers)
    assert any(r.outcome.restore_ns for r in rows)
    assert all(r.elapsed_ns >= r.outcome.exec_ns or r.start_ns == r.submit_ns for r in rows)


def test_details_name_the_load_and_the_batch_size(tmp_path: Path) -> None:
    with LocalCluster(cpus=1, devices="fake:1", home=tmp_path) as cluster:
        for name in "ab":
            cluster.register_service(name, {**FAKE, "batch_wait_ms": 200})
        cluster.call("b", "score").result(30)  # it stands on the device
        calls = [cluster.call("a", "score") for _ in range(3)]
        for one in calls:
            one.result(30)
        told = [one.details for one in calls]
        batches = [one.told[0].outcome.batch for one in calls]
        assert [d.batch for d in told] == batches and max(batches) > 1
        brought = [d for d in told if d.restore_s]
        assert len(brought) == 1 and brought[0].restore_s >= FAKE["wake_s"]
        one = brought[0]
        rest = one.act_s - one.queue_s - one.restore_s - one.exec_s
        assert one.system_s == pytest.approx(max(0.0, rest))


def test_a_wrong_service_declaration_is_refused_in_one_line(
        cluster: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "removed")
    torch = {"backend": "torch", "model": str(tmp_path)}
    cluster.register_service("a", FAKE)
    cluster.register_service("a", FAKE)  # as every rank does
    wrong = [({"backend": "fake", "wake": 1}, "service bad: wake: is not known"),
             ({"backend": "cuda"}, "service bad: backend: 'cuda' is not one of torch"),
             ({"backend": ["fake"]}, "service bad: backend: ['fake'] is not one of torch"),
             ({"backend": "fake", 3: 4}, "service bad: 3 is no name of a field"),
             ({**FAKE, "degrees": [3]}, "service bad: degrees:"),
             ({**FAKE, "weights_mib": 10**9}, "service bad: weights_mib: too many services"),
             ({**FAKE, "weights_mib": 1 << 70}, "service bad: weights_mib: Input should be less"),
             ({**FAKE, "restore_s": 1e300}, "service bad: restore_s: Input should be less"),
             (torch, f"service bad: model: '{tmp_path}/model.safetensors' cannot be read: No such"),
             ({**torch, "model": "/" + "x" * 300}, "service bad: model: '/xxx"),
             ({**torch, "model": "/\ud800"}, "service bad: one of its texts is not UTF-8"),
             ({**FAKE, "degrees": [4]}, "service bad: degrees: no node has an aligned block of 4")]
    for fields, text in wrong:
        with pytest.raises(tangram_hpc.InvalidInput) as told:
            cluster.register_service("bad", fields)
        assert str(told.value).startswith(text) and "\n" not in str(told.value)
    with pytest.raises(tangram_hpc.InvalidInput, match="declared already with other values"):
        cluster.register_service("a", {**FAKE, "batch": 3})
    with pytest.raises(tangram_hpc.InfeasibleRequest, match="no service 'nobody' is declared"):
        cluster.call("nobody", "score").result(10)
    with pytest.raises(tangram_hpc.InvalidInput, match=r"arguments of a\.score: "):
        cluster.call("a", "score", texts=object())
    for odd in (-1, 1 << 70, 1.5):  # a number below 0 would let a batch exceed its tokens
        with pytest.raises(tangram_hpc.InvalidInput, match=r"^tokens: .* from 0 to 10995116277"):
            cluster.call("a", "score", tokens=odd)  # type: ignore[arg-type]
    for name, fields in (("b", None), (5, FAKE), ("", FAKE)):
        with pytest.raises(tangram_hpc.InvalidInput, match=r"^service (b: None is|name: )"):
            cluster.register_service(name, fields)  # type: ignore[arg-type]
    assert cluster.call("a", "score").result(10)["fake"]


def test_a_crash_loses_no_call_but_the_one_that_causes_it(cluster: LocalCluster) -> None:
    cluster.register_service("a", {**FAKE, "batch": 8})
    calls = [cluster.call("a", "crash" if n == 11 else "score", n=n) for n in range(40)]
    for n, call in enumerate(calls):
        if n == 11:
            with pytest.raises(tangram_hpc.ActionFailed, match="its service copy died"):
                call.result(30)
        else:
            assert call.result(30)["fake"]


def test_a_call_times_out_and_its_service_goes_on(cluster: LocalCluster) -> None:
    cluster.register_service("a", FAKE)
    slow, other = cluster.call("a", "hang", timeout=0.1), cluster.call("a", "score")
    with pytest.raises(tangram_hpc.ActionFailed, match="TIMEOUT"):
        slow.result(30)
    assert other.result(30)["fake"]


def test_none_is_no_trajectory(cluster: LocalCluster) -> None:
    """For a tool it means that it belongs to none; a turn has to belong to one."""
    cluster.register_service("a", FAKE)
    cluster.register_rollouts("p", {"buckets": [{"services": "a"}]})
    with pytest.raises(tangram_hpc.InvalidInput, match="trajectory: None is no name"):
        cluster.rollout("p", "go", trajectory=None, prompt=1, context=1, generated=0)
    with pytest.raises(tangram_hpc.InvalidInput, match="trajectory: None is no name"):
        cluster.trajectory_ended("p", None)
    cluster.call("a", "score", trajectory=None).result(30)
    with cluster.session(trajectory=None, trusted=True) as box:
        box.exec(["true"]).result(30)
    records = fold(read_journal(cluster.folder / "journal")).records.values()
    assert [r.action.trajectory_name for r in records] == ["", ""]


def test_a_config_file_declares_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "tangram.toml"
    config.write_text('[services.judge]\nbackend = "fake"\ndegrees = [2]\n')
    monkeypatch.setenv("TANGRAM_CONFIG", str(config))
    with LocalCluster(cpus=1, devices="fake:2", home=tmp_path) as cluster:
        call = cluster.call("judge", "generate")
        assert call.result(30)["fake"]
        lease = fold(read_journal(cluster.folder / "journal")).records
        assert [len(r.gpus) for r in lease.values()] == [2]


def test_a_service_spec_carries_the_backends_options() -> None:
    spec = service_spec("a", {**FAKE, "degrees": [1, 2], "stay_s": 1.5, "restore_s": 0.25})
    assert (spec.degrees, spec.stay_ns, spec.restore_ns) == ((1, 2), 1_500_000_000, 250_000_000)
    options = options_of(spec)
    assert isinstance(options, FakeService) and options.wake_s == 0.01
    assert spec.weights_mib == 10 and spec.shares == ""


def test_variants_that_share_their_files_share_their_weights(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
    (tmp_path / "one" / "model.safetensors").write_bytes(b"x" * (3 << 20))
    os.link(tmp_path / "one" / "model.safetensors", tmp_path / "three" / "model.safetensors")
    os.symlink(tmp_path / "one" / "model.safetensors", tmp_path / "two" / "model.safetensors")
    specs = [service_spec(name, {"backend": "torch", "model": str(tmp_path / name)})
             for name in ("one", "two")]
    assert [s.weights_mib for s in specs] == [3, 3]
    assert specs[0].shares == specs[1].shares != ""


def test_info_shows_the_devices_of_each_service(
        cluster: LocalCluster, capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.register_service("a", FAKE)
    cluster.register_service("b", FAKE)
    cluster.call("a", "score").result(30)
    monkeypatch.setenv("TANGRAM_ACCESS", str(cluster.access))
    assert cli(["info"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "SERVICE" in line]
    assert [line[:3] for line in lines] == [["SERVICE", "a", "fake"], ["SERVICE", "b", "fake"]]
    assert lines[0][3].endswith((":0", ":1")) and lines[1][3:6] == ["on", "no", "GPU"]
