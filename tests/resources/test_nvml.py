"""The NVML adapter: what it reads, and that no error of NVML becomes an exception."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import helpers.fake_nvml as fake
import pytest

from tangram_hpc.resources.gpu.mps import mps_serves
from tangram_hpc.resources.gpu.nvml import Reading, look, open_nvml


def test_two_gpus_are_seen_with_readings_and_processes() -> None:
    lib = fake.two()
    lib.gpus[1].processes = [(4711, 3 * fake.GIB), (4712, None)]
    seen = look(lib)
    assert [(g.index, g.uuid, g.name, g.mem_mib, g.used_mib, g.mig) for g in seen.gpus] == [
        (0, "GPU-aaaa1111-0", "Fake H200", 140 * 1024, 1024, False),
        (1, "GPU-aabb2222-0", "Fake H200", 140 * 1024, 1024, False)]
    assert (seen.driver, seen.cuda, seen.why, lib.open) == ("580.159.03", "13.1", "", 0)
    nvml, _ = open_nvml(lib)
    assert nvml is not None
    lib.gpus[1].util, lib.gpus[1].energy_mj, lib.gpus[1].power_mw = 70, 12345, 350_000
    assert nvml.read("GPU-aabb2222-0") == Reading(70, 1024, 12345, 350_000)
    assert nvml.processes("GPU-aabb2222-0") == ((4711, 3072), (4712, -1))
    assert nvml.read("GPU-none") == Reading() and nvml.processes("GPU-none") == ()
    nvml.close()
    assert lib.open == 0


def test_mig_slices_are_seen_with_their_own_uuids_and_memory() -> None:
    lib = fake.sliced()
    first, second = look(lib).gpus
    assert first.mig and not second.mig and second.slices == ()
    assert [(s.uuid, s.name, s.mem_mib, s.path) for s in first.slices] == [
        ("MIG-11", "Fake H200 MIG 1g.18gb", 18 * 1024, "1/0"),
        ("MIG-33", "Fake H200 MIG 3g.38gb", 54 * 1024, "3/0")]
    nvml, _ = open_nvml(lib)
    assert nvml is not None and nvml.read("MIG-11") == Reading(-1, 1024, -1, -1)


@pytest.mark.parametrize(("error", "why"), [
    (fake.NVMLError_LibraryNotFound(), "no NVIDIA driver here: libnvidia-ml.so.1 is not found"),
    (fake.NVMLError_DriverNotLoaded(), "the NVIDIA driver is not loaded"),
    (fake.NVMLError_Unknown(), "NVML does not start (Unknown Error)"),
])
def test_an_nvml_that_does_not_start_gives_the_reason(error: fake.NVMLError, why: str) -> None:
    seen = look(fake.FakeNvml(fails={"nvmlInit": error}))
    assert (seen.gpus, seen.why) == ((), why)


def test_a_driver_without_accessible_gpus_gives_the_reason() -> None:
    assert look(fake.FakeNvml()).why == "the NVIDIA driver has no GPU that this process may open"
    hidden = fake.FakeNvml(fake.FakeGpu("GPU-0", hidden=True))
    assert look(hidden).why == "the NVIDIA driver has no GPU that this process may open"


def test_gpus_hidden_by_a_cgroup_are_not_counted() -> None:
    lib = fake.FakeNvml(*(fake.FakeGpu(f"GPU-{n}", hidden=n in (0, 2)) for n in range(4)))
    seen = look(lib)
    assert [(g.index, g.uuid) for g in seen.gpus] == [(0, "GPU-1"), (1, "GPU-3")] and not seen.why


def test_a_lost_gpu_is_left_out_and_named() -> None:
    lib = fake.two()
    lib.fails = {("nvmlDeviceGetHandleByIndex", "GPU-aaaa1111-0"): fake.NVMLError_GpuIsLost()}
    seen = look(lib)
    assert [g.index for g in seen.gpus] == [1] and seen.why == "GPU 0 is left out: GPU is lost"


CALLS = sorted(name for name in dir(fake.FakeNvml) if name.startswith("nvml"))


@pytest.mark.parametrize("error", [fake.NVMLError_NotSupported, fake.NVMLError_GpuIsLost,
                                   fake.NVMLError_NoPermission, fake.NVMLError_Unknown])
@pytest.mark.parametrize("call", CALLS)
def test_an_error_in_any_nvml_call_is_no_exception(call: str, error: type[fake.NVMLError]) -> None:
    whole = look(fake.sliced())
    lib = fake.sliced()
    lib.fails = {call: error()}
    seen = look(lib)
    assert seen.gpus or seen.why
    assert len(seen.why.splitlines()) <= 1
    assert {g.uuid for g in seen.gpus} <= {g.uuid for g in whole.gpus}
    nvml, why = open_nvml(lib)
    assert (nvml is None) == bool(why) == (call == "nvmlInit")
    if nvml is not None:
        assert len(nvml.read("GPU-aabb2222-0")) == 4
        nvml.processes("GPU-aabb2222-0")
        nvml.close()


def test_the_fake_nvml_matches_the_real_module() -> None:
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py (extra `gpu`) is not installed")
    for call in CALLS:
        assert callable(getattr(pynvml, call)), call
    for name in dir(fake):
        if name.startswith("NVMLError_"):
            assert issubclass(getattr(pynvml, name), pynvml.NVMLError), name
            text = str(getattr(pynvml, name)())
            assert text == str(getattr(fake, name)()), name


def test_a_missing_nvml_library_is_reported_without_importing_pynvml() -> None:
    """In a separate process, on any machine; with a driver there is no reason to report."""
    text = ("import sys; from tangram_hpc.resources.gpu.nvml import look; seen = look()\n"
            "assert seen.gpus or seen.why\n"
            "print('pynvml' in sys.modules, seen.why)")
    told = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    if "libnvidia-ml.so.1" in told.stdout:
        assert told.stdout.startswith("False ")


# ---- MPS ---------------------------------------------------------------------------------------


def test_mps_is_detected_when_its_daemon_answers(tmp_path: Path) -> None:
    environ = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    assert not mps_serves(environ)
    path = tmp_path / "control"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as daemon:
        daemon.bind(str(path))
        assert not mps_serves(environ)  # nobody listens
        daemon.listen()
        assert mps_serves(environ)
    assert not mps_serves(environ)  # it died and left its socket
    path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as daemon:
        daemon.bind(str(path))
        daemon.listen()
        assert mps_serves(environ)
    path.unlink()
    path.write_text("")
    assert not mps_serves(environ)


def test_mps_is_detected_behind_a_named_pipe(tmp_path: Path) -> None:
    environ = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    os.mkfifo(tmp_path / "control")
    assert not mps_serves(environ)
    reader = os.open(tmp_path / "control", os.O_RDONLY | os.O_NONBLOCK)
    assert mps_serves(environ)
    os.close(reader)
    assert not mps_serves(environ)
