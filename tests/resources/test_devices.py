"""Which devices are lent, under which numbers, and by what name a process gets them."""

from __future__ import annotations

from pathlib import Path

import helpers.fake_nvml as fake
import pytest
from helpers.executor_rig import Rig

from tangram_hpc import LocalCluster
from tangram_hpc.app.worker import node_spec, service_maker
from tangram_hpc.config.settings import load_config
from tangram_hpc.domain.service import ServiceSpec
from tangram_hpc.errors import InfeasibleRequest
from tangram_hpc.ports import ServiceRefused
from tangram_hpc.protocol.value import decode_value
from tangram_hpc.resources.gpu.devices import Devices, find_devices
from tangram_hpc.resources.gpu.nvml import Seen, look
from tangram_hpc.sandbox.manager.backends import Backends
from tangram_hpc.slurm.job_environment import slurm_place

A, B = "GPU-aaaa1111-0", "GPU-aabb2222-0"


def lent_by(lib: fake.FakeNvml | None = None, setting: str = "", **environ: str) -> Devices:
    """The devices that a worker with this environment lends."""
    place = slurm_place(environ)
    seen = look(lib) if lib is not None else Seen((), "no NVIDIA driver here")
    return find_devices(environ, setting, place.gpus if place else None, lambda: seen)


def told(devices: Devices) -> dict[int, str]:
    return {i: devices.mask([i]) for i in devices.indices}


def four(first: int = 0) -> fake.FakeNvml:
    return fake.FakeNvml(*(fake.FakeGpu(f"GPU-{n}{n}") for n in range(first, first + 4)))


# ---- outside Slurm -----------------------------------------------------------------------------


def test_all_gpus_are_lent_under_their_nvml_numbers() -> None:
    devices = lent_by(fake.two())
    assert told(devices) == {0: A, 1: B} and devices.kind == "cuda" and not devices.why
    assert devices.summary() == "2 x Fake H200 140 GiB (cuda)"
    assert devices.visible((0, 1)) == {"CUDA_VISIBLE_DEVICES": f"{A},{B}"}
    assert devices.visible(()) == {"CUDA_VISIBLE_DEVICES": ""}
    with pytest.raises(KeyError):
        devices.mask((2,))


@pytest.mark.parametrize(("mask", "lent", "why"), [
    ("0,1", {0: A, 1: B}, ""),
    ("1,0", {0: A, 1: B}, ""),
    (" 1 ", {1: B}, ""),
    (B, {1: B}, ""),
    ("GPU-aabb", {1: B}, ""),
    (f"{B},0", {0: A, 1: B}, ""),
    ("GPU-aa", {}, "'GPU-aa' is no device here"),
    ("1,-1,0", {1: B}, ""),
    ("-1", {}, "CUDA_VISIBLE_DEVICES is '-1'"),
    ("", {}, "CUDA_VISIBLE_DEVICES is ''"),
    ("NoDevFiles", {}, "CUDA_VISIBLE_DEVICES is 'NoDevFiles'"),
    ("1,7,0", {1: B}, "'7' is no device here"),
    ("1,1", {}, "names a device twice"),
    (f"1,{B}", {}, "names a device twice"),
    ("MIG-11", {}, "'MIG-11' is no device here"),
])
def test_a_device_mask_is_read_as_cuda_reads_it(mask: str, lent: dict[int, str], why: str) -> None:
    devices = lent_by(fake.two(), CUDA_VISIBLE_DEVICES=mask)
    assert told(devices) == lent and why in devices.why and bool(why) == bool(devices.why)
    assert devices.kind == ("cuda" if lent else "") and "\n" not in devices.summary()


@pytest.mark.parametrize(("mask", "lent"), [
    (None, ["MIG-11", "MIG-33", B]), ("0", ["MIG-11", "MIG-33"]), (A, ["MIG-11", "MIG-33"]),
    ("1", [B]), ("MIG-33", ["MIG-33"]), ("MIG-3", ["MIG-33"]), ("MIG-", []),
    (f"MIG-{A}/3/0", ["MIG-33"]), (f"MIG-{A}/2/0", []), (f"{B},MIG-11", [B, "MIG-11"]),
])
def test_mig_slices_are_separate_devices(mask: str | None, lent: list[str]) -> None:
    environ = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    devices = lent_by(fake.sliced(), **environ)
    assert sorted(told(devices).values()) == sorted(lent)
    assert [d.uuid for d in devices.devices] == lent
    if mask is None:
        assert devices.summary() == ("1 x Fake H200 MIG 1g.18gb 18 GiB, 1 x Fake H200 MIG 3g.38gb "
                                     "54 GiB, 1 x Fake H200 140 GiB (cuda)")


def test_a_node_without_a_driver_lends_no_gpu_and_says_so() -> None:
    devices = lent_by()
    assert (devices.devices, devices.kind) == ((), "")
    assert devices.summary() == "none (no NVIDIA driver here)"
    assert lent_by(CUDA_VISIBLE_DEVICES="0,1").devices == ()


# ---- in a Slurm step ---------------------------------------------------------------------------


def test_lent_gpu_numbers_stay_slurms_when_cgroups_renumber_devices() -> None:
    """With ConstrainDevices, CUDA and NVML count the job step's own GPUs from 0."""
    devices = lent_by(four(4), SLURM_JOB_ID="7", SLURM_STEP_GPUS="4,5,6,7",
                    CUDA_VISIBLE_DEVICES="0,1,2,3")
    assert told(devices) == {4: "GPU-44", 5: "GPU-55", 6: "GPU-66", 7: "GPU-77"}
    assert devices.mask((6, 7)) == "GPU-66,GPU-77"


def test_a_mask_without_cgroups_has_slurms_gpu_numbers() -> None:
    devices = lent_by(four(), SLURM_JOB_ID="7", SLURM_STEP_GPUS="2,3", CUDA_VISIBLE_DEVICES="2,3")
    assert told(devices) == {2: "GPU-22", 3: "GPU-33"}
    swapped = lent_by(four(), SLURM_JOB_ID="7", SLURM_STEP_GPUS="2,3", CUDA_VISIBLE_DEVICES="3,2")
    assert told(swapped) == {2: "GPU-22", 3: "GPU-33"}


def test_a_mask_of_uuids_keeps_slurms_gpu_numbers() -> None:
    devices = lent_by(four(), SLURM_JOB_ID="7", SLURM_STEP_GPUS="2-3",
                    CUDA_VISIBLE_DEVICES="GPU-22,GPU-33")
    assert told(devices) == {2: "GPU-22", 3: "GPU-33"}
    sliced = lent_by(fake.sliced(), SLURM_JOB_ID="7", SLURM_STEP_GPUS="4,6",
                   CUDA_VISIBLE_DEVICES=f"MIG-{A}/1/0,MIG-33")
    assert told(sliced) == {4: "MIG-11", 6: "MIG-33"}


def test_gpus_granted_by_slurm_without_a_mask_are_lent() -> None:
    other = lent_by(four(), SLURM_JOB_ID="7", SLURM_JOB_GPUS="1,3")
    assert told(other) == {1: "GPU-11", 3: "GPU-33"}
    hidden = lent_by(four(4), SLURM_JOB_ID="7", SLURM_JOB_GPUS="4-7")
    assert told(hidden) == {4: "GPU-44", 5: "GPU-55", 6: "GPU-66", 7: "GPU-77"}


@pytest.mark.parametrize("environ", [
    {}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"},
    {"CUDA_VISIBLE_DEVICES": "", "SLURM_JOB_GPUS": "0,1"},
    {"SLURM_STEP_ID": "2", "SLURM_JOB_GPUS": "0,1"}])
def test_gpus_that_slurm_did_not_grant_are_not_lent(environ: dict[str, str]) -> None:
    devices = lent_by(fake.two(), SLURM_JOB_ID="7", **environ)
    assert devices.devices == () and "--gres=gpu:N" in devices.why


def test_the_mask_of_a_job_step_overrides_the_jobs_gpu_list() -> None:
    devices = lent_by(four(), SLURM_JOB_ID="7", SLURM_JOB_GPUS="0,1,2,3", CUDA_VISIBLE_DEVICES="3")
    assert told(devices) == {3: "GPU-33"}


@pytest.mark.parametrize(("environ", "seen"), [
    ({"ROCR_VISIBLE_DEVICES": "0,1"}, Seen((), "no NVIDIA driver here")),
    ({"ROCR_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0,1"},
     Seen((), "no NVIDIA driver here", amd=True)),
])
def test_amd_gpus_are_refused_in_one_line(environ: dict[str, str], seen: Seen) -> None:
    devices = find_devices(environ, "", (0, 1), lambda: seen)
    assert devices.indices == () and devices.summary().startswith("none (AMD GPUs are not lent yet")


def test_gpus_granted_by_slurm_are_lent_without_nvml() -> None:
    devices = lent_by(SLURM_JOB_ID="7", SLURM_STEP_GPUS="2,3", CUDA_VISIBLE_DEVICES="0,1")
    assert told(devices) == {2: "0", 3: "1"}
    assert devices.summary() == ("2 x GPU (cuda); known by Slurm's word only: no NVIDIA driver "
                                 "here")
    swapped = lent_by(SLURM_JOB_ID="7", SLURM_STEP_GPUS="2,3", CUDA_VISIBLE_DEVICES="3,2")
    assert told(swapped) == {2: "2", 3: "3"}
    named = lent_by(SLURM_JOB_ID="7", SLURM_STEP_GPUS="2", CUDA_VISIBLE_DEVICES="GPU-22")
    assert [(d.index, d.uuid, d.selector) for d in named.devices] == [(2, "GPU-22", "GPU-22")]


# ---- stand-ins ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("setting", "lent", "summary"), [
    ("none", (), 'none (the setting `devices` is "none")'),
    ("cpu:1", (0,), "1 slot of CPU (cpu)"), ("cpu:3", (0, 1, 2), "3 slots of CPU (cpu)"),
    ("fake:4", (0, 1, 2, 3), "4 fake GPUs (fake)")])
def test_fake_and_cpu_devices_are_marked_and_show_no_gpu(
        setting: str, lent: tuple[int, ...], summary: str) -> None:
    devices = lent_by(fake.two(), setting)
    assert (devices.indices, devices.summary()) == (lent, summary)
    assert devices.visible(lent) == {"CUDA_VISIBLE_DEVICES": ""}
    assert {d.kind for d in devices.devices} <= {setting.partition(":")[0]}


def test_fake_and_cpu_devices_can_follow_slurms_grant() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_STEP_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "2,3"}
    assert lent_by(None, "fake", **environ).indices == (2, 3)
    assert lent_by(None, "cpu", **environ).summary() == "2 slots of CPU (cpu)"
    for nothing in (lent_by(None, "fake"), lent_by(None, "cpu", SLURM_JOB_ID="7")):
        assert nothing.devices == () and "Slurm gave, and it gave none" in nothing.why


def test_services_that_cannot_run_on_fake_or_mig_devices_are_refused(tmp_path: Path) -> None:
    assert "say devices = \"cpu:N\"" in lent_by(None, "fake:2").refusal("torch")
    assert "one MIG slice" in lent_by(fake.sliced()).refusal("torch")
    for fine in (lent_by(fake.two()), lent_by(None, "cpu:2"), lent_by(None, "none"),
                 lent_by(fake.sliced(), CUDA_VISIBLE_DEVICES="MIG-11")):
        assert fine.refusal("torch") == ""
    for backend in ("fake", "http", "vllm", "sglang"):
        assert lent_by(None, "fake:2").refusal(backend) == ""
    spec = node_spec(load_config({}, {"devices": "fake:2"}), {}, Backends((), ()))
    make = service_maker(spec, lent_by(None, "fake:2"), tmp_path)
    with pytest.raises(ServiceRefused, match="service judge: backend: torch does not run on fake"):
        make(ServiceSpec("judge", backend="torch"), 1)


def test_a_node_spec_lists_its_devices() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_STEP_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "0,1"}
    spec = node_spec(load_config({}, {"devices": "fake"}), environ, Backends((), ()))
    assert (spec.gpus, spec.devices) == ((2, 3), "2 fake GPUs (fake)")
    spec = node_spec(load_config({}), environ, Backends((), ()), devices=lent_by(fake.two()))
    assert (spec.gpus, spec.devices) == ((0, 1), "2 x Fake H200 140 GiB (cuda)")


def test_actions_get_gpu_uuids_and_not_numbers(tmp_path: Path) -> None:
    """Behind a mask or a cgroup, a lent number is some other GPU to the process, or none."""
    devices = lent_by(four(4), SLURM_JOB_ID="7", SLURM_STEP_GPUS="4,5,6,7",
                    CUDA_VISIBLE_DEVICES="0,1,2,3")
    rig = Rig(tmp_path, devices=devices)
    try:
        _, back = rig.shell("echo $CUDA_VISIBLE_DEVICES", gpus=(5, 7))
        assert back.stdout == b"GPU-55,GPU-77\n"
        _, back = rig.shell("echo [$CUDA_VISIBLE_DEVICES]", env={"CUDA_VISIBLE_DEVICES": "0"})
        assert back.stdout == b"[]\n"
        rig.open(1)
        _, back = rig.shell("echo $CUDA_VISIBLE_DEVICES", session=1, gpus=(4,))
        assert back.stdout == b"GPU-44\n"
        for gpus, mask in (((6,), "GPU-66"), ((), ""), ((4, 5), "GPU-44,GPU-55")):
            outcome, back, _ = rig.function(
                lambda: __import__("os").environ["CUDA_VISIBLE_DEVICES"], gpus=gpus)
            assert decode_value(back.data) == mask, outcome
    finally:
        rig.close()


def test_tangram_info_describes_the_devices(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tangram_hpc.cli import main

    with LocalCluster(cpus=1, home=tmp_path, devices="fake:2") as cluster:
        words = ["sh", "-c", "echo [$CUDA_VISIBLE_DEVICES]"]
        told = cluster.submit(words, gpus=2, trusted=True).result()
        with pytest.raises(InfeasibleRequest, match=(
                "no isolation backend gives a GPU to untrusted code")):
            cluster.submit(words, gpus=2).result()
        assert told.text == "[]\n"
        assert main(["info"]) == 0
    said = capsys.readouterr().out
    assert "gpus 0/2" in said and "2 fake GPUs (fake)" in said
