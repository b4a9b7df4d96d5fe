"""The GPU meter: its sums over given readings, and the thread that reads."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import helpers.fake_nvml as fake
import pytest
from helpers.executor_rig import Rig

from tangram_hpc.accounting.fields import FIELDS, as_json
from tangram_hpc.accounting.record import ActionRecord
from tangram_hpc.domain.action import Action, Kind
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.resources.gpu import gpu_meter as metering
from tangram_hpc.resources.gpu.devices import Devices, find_devices
from tangram_hpc.resources.gpu.gpu_meter import GpuMeter, GpuTally, GpuUsage
from tangram_hpc.resources.gpu.nvml import Reading, look, open_nvml

S = 10**9


def lent(setting: str = "") -> Devices:
    return find_devices({}, setting, None, lambda: look(fake.two()))


def reading(joules: int, watts: int = 100, util: int = 50, mib: int = 10) -> Reading:
    return Reading(util, mib, joules * 1000, watts * 1000)


# ---- the sums ----------------------------------------------------------------------------------


def test_a_lease_alone_on_a_gpu_gets_the_energy_of_the_counter() -> None:
    tally = GpuTally("a")
    tally.renew({"a": reading(1000, watts=100)}, S)
    tally.begin(1, "a", S)
    tally.renew({"a": reading(1300, watts=300, util=80, mib=70)}, 2 * S)  # 300 J, not 100
    tally.renew({"a": reading(1600, watts=200, util=40, mib=50)}, 3 * S)
    assert tally.end(1, 3 * S + S // 2) == GpuUsage(60, 70, (300 + 300 + 100) * 1000)
    assert tally.end(1, 4 * S) == GpuUsage()


def test_concurrent_leases_share_gpu_energy_equally_without_idle_energy() -> None:
    tally = GpuTally("a")
    tally.renew({"a": reading(0)}, 0)
    tally.renew({"a": reading(1000)}, 10 * S)  # idle so far: 100 W
    tally.begin(1, "a", 10 * S)
    tally.begin(2, "a", 12 * S)
    first, second = tally.end(1, 14 * S), tally.end(2, 20 * S)
    assert (first.energy_mj, second.energy_mj) == (300_000, 700_000)
    assert (first.util_pct, first.max_mem_mib) == (-1, -1)  # nobody looked meanwhile


def test_gpu_usage_of_a_block_is_the_sum_over_its_gpus() -> None:
    tally = GpuTally("ab")
    tally.begin(1, "ab", S)
    tally.renew({"a": reading(0, util=100), "b": reading(0, watts=50, util=0)}, 2 * S)
    tally.renew({"a": reading(100, util=100), "b": reading(50, util=0, mib=30)}, 3 * S)
    assert tally.end(1, 3 * S) == GpuUsage(50, 40, 150_000)


def test_figures_that_a_gpu_does_not_report_stay_unknown() -> None:
    tally = GpuTally("a")
    tally.begin(1, "a", 0)
    tally.renew({"a": Reading(used_mib=7)}, S)
    tally.renew({"a": Reading(used_mib=5)}, 2 * S)
    assert tally.end(1, 3 * S) == GpuUsage(-1, 7, -1)
    tally.begin(2, "a", 4 * S)
    tally.renew({"a": Reading()}, 5 * S)
    assert tally.end(2, 6 * S) == GpuUsage()


@pytest.mark.parametrize("say", [
    lambda joules: Reading(energy_mj=joules * 1000), lambda joules: Reading(power_mw=100_000)])
def test_energy_is_measured_from_the_counter_or_from_power(say) -> None:
    tally = GpuTally("a")
    for second in range(5):
        tally.renew({"a": say(second * 100)}, second * S)
    tally.begin(1, "a", 4 * S)
    for second in range(5, 9):
        tally.renew({"a": say(second * 100)}, second * S)
    assert tally.end(1, 8 * S).energy_mj == 400_000


def test_the_parts_of_many_leases_add_up_to_the_counter() -> None:
    """Power varies between readings; whichever leases hold the device, no energy is lost or
    added."""
    tally, joules, parts = GpuTally("a"), 0, 0
    tally.renew({"a": reading(0, watts=100)}, 0)
    tally.begin(0, "a", 0)  # holds it all the time
    for second in range(1, 30):
        if second % 3 == 1:
            tally.begin(second, "a", (second - 1) * S)
        joules += 50 + 40 * (second % 4)
        tally.renew({"a": reading(joules, watts=50 + 13 * second)}, second * S)
        if second % 3 == 0:
            parts += tally.end(second - 2, second * S).energy_mj
    parts += sum(tally.end(token, 29 * S).energy_mj for token in list(tally.leases))
    assert abs(parts - joules * 1000) <= 20  # whole mJ each


# ---- the thread --------------------------------------------------------------------------------


def meter_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "gpu-meter"]


@pytest.mark.parametrize("devices", [
    lent("none"), lent("cpu:2"), lent("fake:2"),
    find_devices({"CUDA_VISIBLE_DEVICES": "0"}, "", (0,), lambda: look(fake.FakeNvml()))])
def test_the_gpu_meter_runs_no_thread_without_gpus(devices: Devices) -> None:
    def never(uuid: str) -> Reading:
        raise AssertionError("nothing to read")

    meter = GpuMeter(devices, never)
    token = meter.begin((0,))
    assert token == 0 and meter.end(token) == GpuUsage() and not meter_threads()
    meter.close()


def test_the_gpu_meter_thread_reads_only_while_leases_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metering, "EVERY_S", 0.01)
    monkeypatch.setattr(metering, "_LINGER_NS", 50_000_000)
    lib = fake.two()
    nvml, _ = open_nvml(lib)
    assert nvml is not None
    reads = 0

    def read(uuid: str) -> Reading:
        nonlocal reads
        reads += 1
        for gpu in lib.gpus:
            gpu.util, gpu.energy_mj = 30, time.monotonic_ns() // 10**4  # 100 W
        return nvml.read(uuid)

    meter = GpuMeter(lent(), read)
    assert reads == 0 and meter.begin((5,)) == 0
    token, after = meter.begin((1,)), reads + 60
    while reads < after:
        time.sleep(0.005)
    usage = meter.end(token)
    assert (usage.util_pct, usage.max_mem_mib) == (30, 1024) and usage.energy_mj > 0
    seen = -1
    while seen != reads:  # it soon stops by itself
        seen = reads
        time.sleep(0.2)
    again = meter.begin((0, 1))
    while reads < seen + 4:
        time.sleep(0.005)
    assert meter.end(again).max_mem_mib == 2048
    meter.close()
    assert not meter_threads() and meter.begin((0,)) == 0


def test_a_gpu_lost_during_a_lease_does_not_end_the_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metering, "EVERY_S", 0.01)
    lib = fake.two()
    nvml, _ = open_nvml(lib)
    assert nvml is not None
    lib.fails = {name: fake.NVMLError_GpuIsLost() for name in dir(lib) if "DeviceGet" in name}
    calls = len(lib.calls)
    meter = GpuMeter(lent(), nvml.read)
    token = meter.begin((0,))
    while len(lib.calls) < calls + 20:
        time.sleep(0.005)
    assert meter.end(token) == GpuUsage() and meter_threads()
    meter.close()


def test_an_action_that_holds_gpus_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                               ) -> None:
    monkeypatch.setattr(metering, "EVERY_S", 0.01)
    lib = fake.two()
    lib.gpus[0].util = lib.gpus[1].util = 40
    monkeypatch.setattr(metering, "open_nvml", lambda: open_nvml(lib))
    rig = Rig(tmp_path, devices=lent())
    try:
        both, _ = rig.shell("sleep 0.5", gpus=(0, 1))
        none, _ = rig.shell("true")
    finally:
        rig.close()
        rig.executor._gpus.close()
    assert (both.gpu_util_pct, both.gpu_max_mem_mib) == (40, 2048) and both.energy_mj >= 0
    assert (none.gpu_util_pct, none.gpu_max_mem_mib, none.energy_mj) == (-1, -1, -1)
    assert lib.open == 0


# ---- accounting --------------------------------------------------------------------------------


def columns(outcome: Outcome | None) -> tuple[list[str], list[int | None]]:
    record = ActionRecord("7", "me", Action(1, "call", Kind.CALL), 0, outcome=outcome)
    told = as_json(record)
    return ([f.text(record) for f in FIELDS if f.name in ("GPUUtil", "GPUMaxMem",
                                                          "ConsumedEnergy")],
            [told["gpu_util_pct"], told["gpu_max_mem_mib"], told["energy_estimated_mj"]])


def test_tangram_acct_gpu_columns_leave_unknowns_empty_and_mark_estimates() -> None:
    done = ActionState.COMPLETED
    for unknown in (None, Outcome(done)):
        assert columns(unknown) == (["", "", ""], [None, None, None])
    known = Outcome(done, gpu_util_pct=0, gpu_max_mem_mib=900, energy_mj=12_600)
    assert columns(known) == (["0", "900M", "~13"], [0, 900, 12_600])
    assert columns(Outcome(done, energy_mj=5_617_000))[0][2] == "~5.62K"
