"""NeMo-Gym's provider: the behaviours of every adapter over stood-in types, and NeMo-Gym's own
facade over the real package in the long suite."""

from __future__ import annotations

import asyncio
import json
import subprocess
import urllib.request
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.adapter_behaviours import (
    LIMIT_S,
    AdapterBehaviours,
    adapters_cluster,
    check_restart,
    eventually,
    memory_taken,
    sessions_open,
)
from helpers.harness_stand_ins import (
    SandboxCreateError,
    SandboxResources,
    SandboxSpec,
    SandboxStatus,
    nemo_gym_stood_in,
)
from helpers.hostile_rig import reason_to_skip
from helpers.other_python import client_env, find_python, make_venv
from helpers.root_folder_rig import PROGRAMS, make_image

from tangram_hpc import LocalCluster
from tangram_hpc.errors import InvalidInput, TangramError

__all__ = ["adapters_cluster"]


@pytest.fixture(scope="module", autouse=True)
def module() -> Iterator[Any]:
    with nemo_gym_stood_in() as imported:
        yield imported


def do(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


class TestNemoGymWithItsTypesStoodIn(AdapterBehaviours):
    @pytest.fixture(autouse=True)
    def _provider(self, module: Any) -> None:
        self.provider = module.TangramProvider(shell="/bin/sh")

    def begin(self, **options: Any) -> Any:
        try:
            return do(self.provider.create(SandboxSpec(provider_options=options)))
        except SandboxCreateError as error:
            return error

    def call(self, trajectory: Any, line: str) -> str:
        if isinstance(trajectory, SandboxCreateError):
            return str(trajectory)
        told = do(self.provider.exec(trajectory, line, timeout_s=LIMIT_S))
        failed = f"{told.return_code} {told.error_type}" if told.return_code else ""
        return (told.stdout or "") + (told.stderr or "") + failed

    def tells_the_time_limit(self, answer: str) -> bool:
        return answer.endswith("124 timeout")

    def end(self, trajectory: Any) -> None:
        if not isinstance(trajectory, SandboxCreateError):
            do(self.provider.close(trajectory))

    def lose(self, trajectory: Any) -> None:
        trajectory.raw.session.close()


def test_after_the_loss_of_the_broker_calls_are_answered_and_new_sandboxes_work(
        module: Any, tmp_path: Path) -> None:
    adapter = TestNemoGymWithItsTypesStoodIn()
    adapter.provider = module.TangramProvider(shell="/bin/sh")
    check_restart(adapter, tmp_path)


def test_another_provider_uses_a_sandbox_by_its_descriptor(
        cluster: LocalCluster, module: Any, tmp_path: Path) -> None:
    async def story() -> None:
        one, other = module.TangramProvider(shell="sh"), module.TangramProvider(shell="sh")
        handle = await one.create(SandboxSpec(resources=SandboxResources(cpu=2)))
        (tmp_path / "in").write_bytes(b"\0one")
        await one.upload_file(handle, tmp_path / "in", "deep/file")
        descriptor = json.loads(json.dumps(await one.serialize_handle(handle)))
        again = await other.connect(descriptor)
        assert again.sandbox_id == handle.sandbox_id and again.raw.cpus == 2
        await other.download_file(again, "deep/file", tmp_path / "new/out")
        assert (tmp_path / "new/out").read_bytes() == b"\0one"
        await other.close(again)
        assert await one.status(handle) is SandboxStatus.STOPPED

    do(story())


def test_a_working_directory_that_cannot_be_made_leaves_no_session(
        cluster: LocalCluster, module: Any) -> None:
    assert eventually(lambda: sessions_open(cluster) == 0)
    with pytest.raises(SandboxCreateError, match="tangram"):
        do(module.TangramProvider(shell="sh").create(SandboxSpec(workdir="/dev/null/x")))
    assert eventually(lambda: sessions_open(cluster) == 0)


def test_a_process_that_may_only_operate_cannot_end_the_sandbox(
        cluster: LocalCluster, module: Any) -> None:
    async def story() -> None:
        one, other = module.TangramProvider(shell="sh"), module.TangramProvider(shell="sh")
        handle = await one.create(SandboxSpec())
        again = await other.connect(await one.serialize_handle(handle, scope="operate"))
        assert (await other.exec(again, "echo on")).stdout == "on\n"
        await other.close(again)
        await other.aclose()
        assert (await one.exec(handle, "echo still")).stdout == "still\n"
        assert await one.status(handle) is SandboxStatus.RUNNING
        await one.close(handle)

    do(story())


def test_a_provider_that_is_closed_leaves_its_own_sandboxes_open(
        cluster: LocalCluster, module: Any) -> None:
    async def story() -> None:
        provider = module.TangramProvider(shell="sh")
        handle = await provider.create(SandboxSpec(workdir="place", env={"A": "1"}))
        await provider.aclose()
        told = await provider.exec(handle, "pwd; echo $A $B", env={"B": "2"})
        assert told.stdout.endswith("/place\n1 2\n")
        await provider.close(handle)

    do(story())
    assert eventually(lambda: sessions_open(cluster) == 0)


SERVER = """
import http.server
server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
open("port", "w").write(str(server.server_port))
server.serve_forever()
"""


def test_a_server_of_a_sandbox_is_reached_by_its_endpoint(
        cluster: LocalCluster, module: Any, tmp_path: Path) -> None:
    async def story() -> None:
        provider = module.TangramProvider(shell="sh", background="share")
        handle = await provider.create(SandboxSpec(ports=(80,)))
        (tmp_path / "server").write_text(SERVER)
        await provider.upload_file(handle, tmp_path / "server", "server")
        told = await provider.exec(
            handle, "python3 server >log 2>&1 & until [ -s port ]; do sleep 0.01; done; cat port")
        endpoint = await provider.endpoint(handle, int(told.stdout))
        assert endpoint == await provider.endpoint(handle, int(told.stdout))

        def page() -> bytes:
            with urllib.request.urlopen(endpoint.endpoint + "/server") as answer:
                return bytes(answer.read())

        assert (await asyncio.to_thread(page)).decode() == SERVER
        with pytest.raises(InvalidInput, match="port"):
            await provider.endpoint(handle, 0)
        await provider.close(handle)
        with pytest.raises(OSError):
            await asyncio.to_thread(page)

    do(story())


@pytest.mark.parametrize(("spec", "word"), [
    (SandboxSpec(resources=SandboxResources(gpu=1)), "gpu"),
    (SandboxSpec(provider_options={"size": "xl"}), "size"),
    (SandboxSpec(resources=SandboxResources(memory_mib=1 << 30)), "mem"),
    (SandboxSpec(image="/no/such/image"), "/no/such/image")],
    ids=["gpu", "option", "memory", "image"])
def test_a_sandbox_that_cannot_be_had_is_refused_by_the_field(
        cluster: LocalCluster, module: Any, spec: SandboxSpec, word: str) -> None:
    with pytest.raises(SandboxCreateError, match=word):
        do(module.TangramProvider().create(spec))


def test_a_sandbox_that_waits_too_long_says_so(cluster: LocalCluster, module: Any) -> None:
    with memory_taken(cluster) as mem_mib:
        spec = SandboxSpec(resources=SandboxResources(memory_mib=mem_mib), ready_timeout_s=0.2)
        with pytest.raises(SandboxCreateError, match="tangram: not open in time"):
            do(module.TangramProvider().create(spec))
    assert eventually(lambda: sessions_open(cluster) == 0)


def test_a_wrong_key_of_the_configuration_or_descriptor_is_named(
        cluster: LocalCluster, module: Any) -> None:
    with pytest.raises(InvalidInput, match="memory: no such key"):
        module.TangramProvider(memory="1G")
    with pytest.raises(InvalidInput, match="session"):
        do(module.TangramProvider().connect({"sandbox_id": "x"}))
    with pytest.raises(TangramError, match="no shared session"):
        do(module.TangramProvider().connect(
            {"session": '{"name": "x", "token": "y", "job": ""}'}))


# runs under NeMo-Gym's own package: configuration, facade, protocols and entry points
PROGRAM = """
import asyncio, json, subprocess, sys, tempfile
from pathlib import Path
from nemo_gym.sandbox import AsyncSandbox, Sandbox, register_provider
from nemo_gym.sandbox.providers import ConnectableProvider, create_provider
from nemo_gym.sandbox.providers.base import SandboxSpec, SandboxStatus
import tangram_hpc.hooks.nemo_gym_provider as ours

config = {"tangram": {"backend": "bwrap", "default_timeout_s": 20}}
spec = SandboxSpec(image=sys.argv[1], workdir="/testbed", env={"A": "1"}, ready_timeout_s=60,
                   ttl_s=600, files={"/testbed/given.txt": "given"},
                   resources={"cpu": 2, "memory_mib": 256, "disk_gib": 1},
                   provider_options={"resource_requests": {"cpu": 0.5}})

async def main():
    provider = create_provider(config)
    assert isinstance(provider, ours.TangramProvider) and isinstance(provider, ConnectableProvider)
    box = await AsyncSandbox(config, spec).start()
    told = await box.exec("pwd; cat given.txt; echo $A; touch /opt && id -u; mkdir -p /var/x",
                          user="root")
    assert (told.stdout, told.return_code) == ("/testbed\\ngiven1\\n0\\n", 0), told
    late = await box.exec("echo begun; sleep 60", timeout_s=1)
    assert (late.stdout, late.error_type) == ("begun\\n", "timeout"), late
    assert (await box.exec("exit 7")).return_code == 7
    detached = await box.exec("(sleep 0.3; echo done >/tmp/done) >/dev/null 2>&1 &")
    assert detached.return_code == 0
    while (await box.exec("test -e /tmp/done")).return_code:
        await asyncio.sleep(0.1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x")
        path.write_bytes(bytes(range(256)))
        await box.upload(path, "/srv/deep/x")
        await box.download("/srv/deep/x", Path(folder, "y"))
        assert Path(folder, "y").read_bytes() == bytes(range(256))
    assert await box.status() is SandboxStatus.RUNNING
    descriptor = await box.serialize()
    other = subprocess.run([sys.executable, "-c", OTHER], input=json.dumps(descriptor), text=True,
                           capture_output=True)
    assert other.returncode == 0, other.stderr
    assert (await box.exec("cat from-other")).stdout == "here\\n"
    await box.stop()
    many = await asyncio.gather(*(AsyncSandbox(config, spec).start() for _ in range(8)))
    said = await asyncio.gather(*(one.exec(f"echo {i} >n; cat n") for i, one in enumerate(many)))
    assert [one.stdout for one in said] == [f"{i}\\n" for i in range(8)]
    for one in many:
        await one.stop()

OTHER = '''
import asyncio, json, sys
from nemo_gym.sandbox import AsyncSandbox, register_provider
from nemo_gym.sandbox.providers import create_provider
import tangram_hpc.hooks.nemo_gym_provider as ours
register_provider("tangram", ours.TangramProvider)
async def main():
    provider = create_provider({"tangram": {}})
    box = await AsyncSandbox.connect(json.loads(sys.stdin.read()), provider=provider)
    assert (await box.exec("echo here >from-other; pwd")).stdout == "/testbed\\\\n"
    await box.disconnect()
asyncio.run(main())
'''
register_provider("tangram", ours.TangramProvider)
asyncio.run(main())
with Sandbox(config, spec) as box:
    box.start()
    assert box.exec("cat given.txt").stdout == "given"
print("all is well")
"""


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_nemo_gyms_own_facade_runs_on_sessions(tmp_path: Path) -> None:
    if why := reason_to_skip("bwrap"):
        pytest.skip(why)
    # its wheel asks for Python 3.13.14 or later; the modules used here run with any 3.13
    programs = make_venv(tmp_path / "venv", find_python((3, 13)),
                         ["omegaconf", "pydantic", "httpx", "aiohttp"], ["nemo-gym==0.7.0"])
    image = make_image(tmp_path / "root", (*PROGRAMS, "bash"))
    with LocalCluster(cpus=2, home=tmp_path / "home") as cluster:
        done = subprocess.run([str(programs / "python"), "-c", PROGRAM, str(image)], text=True,
                              capture_output=True, timeout=600, check=False,
                              env=client_env(cluster.access))
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert eventually(lambda: sessions_open(cluster) == 0)
