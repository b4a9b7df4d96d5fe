"""Two tenants on one real broker: shares, limits, names, what is printed, and the accounting."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from helpers.forked_verb import tangram

import tangram_hpc
from tangram_hpc import LocalCluster
from tangram_hpc.client.client import Client
from tangram_hpc.domain import event as ev
from tangram_hpc.errors import InfeasibleRequest, InvalidInput
from tangram_hpc.simulator.tenant_usage import TenantUsage
from tangram_hpc.storage.journal_segments import read_journals

SETTINGS = """
[tenants.math]
shares = 3
[tenants.code]
grp_tres = "cpu=3,mem=4G"
[tenants.tiny]
grp_tres = "cpu=1"
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    home = tmp_path_factory.mktemp("home")
    (home / "tenants.toml").write_text(SETTINGS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANGRAM_CONFIG", str(home / "tenants.toml"))
        with LocalCluster(cpus=4, home=home) as cluster:
            yield cluster


def connect(cluster: LocalCluster, tenant: str) -> Client:
    return tangram_hpc.connect(cluster.access, tenant=tenant)


def printed(cluster: LocalCluster, verb: str, *options: str) -> str:
    env = {**os.environ, "TANGRAM_HOME": str(cluster.folder.parent.parent)}
    return tangram(verb, "-j", cluster.job, *options, env=env, check=True).stdout


def held(cluster: LocalCluster, since: int, seconds: int) -> tuple[dict[str, int], int]:
    """The core-ns that each tenant held in these seconds from `since` (epoch ns) on, and how many
    actions ended, by the journal.
    """
    usage, ended = TenantUsage(), 0
    for event in read_journals(cluster.folder):
        at = max(0, event.at - since)
        usage.add(msgspec.structs.replace(event, at=at))
        ended += isinstance(event, ev.LeaseFinished) and 0 < at < seconds * 10**9
    return usage.between(0, seconds), ended


def rows_of_tenants(client: Client) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in client.ask("tenants")["tenants"]}


def test_three_shares_hold_three_times_the_cores_of_one(cluster: LocalCluster) -> None:
    """Both tenants have more actions waiting than can run while it is measured: a tenant of which
    none waits leaves its share to the other. It is measured from the first unit of the tenant that
    came last, and until it has held four core-seconds: on a busy machine, what runs may hold its
    units for some tenths of a second more than it needs, and is made up for only after that.
    """
    with connect(cluster, "math") as math, connect(cluster, "code") as code:
        futures = [client.submit(["sleep", ".03"]) for client, count in ((math, 900), (code, 300))
                   for _ in range(count)]
        end = time.monotonic() + 90
        rows = rows_of_tenants(math)
        while not (rows["math"]["waiting"] and rows["code"]["waiting"] and rows["code"]["cpus"]):
            assert time.monotonic() < end, rows
            time.sleep(.01)
            rows = rows_of_tenants(math)
        since, seconds, used, count = time.time_ns(), 0, {"code": 0}, 0
        while used.get("code", 0) < 4_000_000_000 or count < 160:
            assert time.monotonic() < end, (used, count)
            time.sleep(.3)
            seconds = (time.time_ns() - since) // 10**9
            used, count = held(cluster, since, seconds)
        still = rows_of_tenants(math)
        for future in futures:
            future.cancel()
    assert all(still[name]["waiting"] for name in ("math", "code"))
    assert rows["math"]["shares"] == 3 and rows["math"]["norm_shares"] == 3 / 5
    assert rows["code"]["grp_tres"]
    assert used["math"] / used["code"] == pytest.approx(3, rel=.15)


def test_a_limit_is_kept_and_what_is_beyond_it_refused(cluster: LocalCluster) -> None:
    with connect(cluster, "tiny") as tiny, pytest.raises(
            InfeasibleRequest, match=r"cpus: 2 asked for, but tenant 'tiny' may hold 1 CPUs"):
        tiny.submit(["true"], cpus=2).result()
    with connect(cluster, "tiny") as tiny:
        running = [tiny.submit(["sleep", "1"]) for _ in range(2)]
        end = time.monotonic() + 30
        while not rows_of_tenants(tiny)["tiny"]["cpus"]:
            assert time.monotonic() < end, "nothing of the tenant has begun within 30 s"
            time.sleep(.01)
        mine = {future.id for future in running}
        waits = [row for row in tiny.ask("pending")["pending"] if row["id"] in mine]
        assert [row["reason"] for row in waits] == ["AssocGrpCpuLimit"]
        for future in running:
            future.cancel()


def test_only_declared_names_may_join(cluster: LocalCluster) -> None:
    with pytest.raises(InvalidInput, match=r"tenant 'maht' is not declared; choose one of math, "
                                           r"code, tiny \(TANGRAM_TENANT\), or add \[tenants.maht"):
        connect(cluster, "maht")
    with pytest.raises(InvalidInput, match=r"tenant='a b'.*must be 1 to 64 letters"):
        connect(cluster, "a b")


def test_info_has_a_line_for_each_tenant(cluster: LocalCluster) -> None:
    lines = [line for line in printed(cluster, "info").splitlines() if line.startswith("TENANT")]
    assert len(lines) >= 3 and any("shares 3 (" in line for line in lines)
    assert any("GrpTRES cpu=3,mem=4096" in line for line in lines)


def test_the_environment_names_a_clients_tenant(cluster: LocalCluster,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANGRAM_TENANT", "code")
    with tangram_hpc.connect(cluster.access) as client:
        with pytest.raises(InvalidInput, match=r"connect\('[^']+', tenant='code'\) there"):
            pickle.dumps(client)
        mine = client.submit(["true"], name="by-environment")
        mine.result()
    rows = printed(cluster, "acct", "-n", "-P", "-o", "JobName,Tenant").splitlines()
    assert "by-environment|code" in rows
