"""OpenEnv's container provider: the behaviours of every adapter over OpenEnv's messages, and the
real client and server of OpenEnv in the long suite."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers.adapter_behaviours import (
    LIMIT_S,
    AdapterBehaviours,
    adapters_cluster,
    eventually,
    sessions_open,
)
from helpers.hostile_rig import reason_to_skip
from helpers.openenv_stand_in import SERVER, StandInClient
from helpers.other_python import client_env, make_venv
from helpers.root_folder_rig import PROGRAMS, copy_libraries, make_image

from tangram_hpc import LocalCluster
from tangram_hpc.errors import InvalidInput
from tangram_hpc.hooks.openenv.container_provider import TangramProvider

__all__ = ["adapters_cluster"]

PORT = 8000


def command(port: int = PORT) -> str:
    return f"exec python3 -c {shlex.quote(SERVER)} {port} {LIMIT_S}"


class Episode:
    """An environment with its provider, or the error that its start raised."""

    def __init__(self, **options: Any) -> None:
        self.provider, self.error = TangramProvider(command(), **options), ""
        try:
            self.env = StandInClient.from_docker_image("", provider=self.provider)
        except RuntimeError as error:
            self.error = str(error)
            return
        self.env.reset()


class TestOpenEnvWithItsClientStoodIn(AdapterBehaviours):
    def begin(self, **options: Any) -> Any:
        return Episode(**options)

    def call(self, trajectory: Any, line: str) -> str:
        if trajectory.error:
            return str(trajectory.error)
        try:
            return str(trajectory.env.step({"command": line})["observation"]["text"])
        except OSError as error:
            assert eventually(lambda: trajectory.provider.failure)
            return f"{error}: {trajectory.provider.failure}"

    def end(self, trajectory: Any) -> None:
        if not trajectory.error:
            trajectory.env.close()

    def lose(self, trajectory: Any) -> None:
        trajectory.provider.session.close()


def test_a_server_that_does_not_start_is_told_with_its_log(cluster: LocalCluster) -> None:
    provider = TangramProvider("echo it breaks >&2; exit 3")
    url = provider.start_container()
    with pytest.raises(TimeoutError, match="log ends with: it breaks"):
        provider.wait_for_ready(url, timeout_s=1)
    provider.stop_container()
    with pytest.raises(RuntimeError, match="has ended"):
        provider.wait_for_ready(url, timeout_s=1)


def test_the_application_of_an_image_is_found_and_missed_by_its_name(
        cluster: LocalCluster) -> None:
    provider = TangramProvider()
    url = provider.start_container()
    with pytest.raises(TimeoutError, match="name the server's command as cmd"):
        provider.wait_for_ready(url, timeout_s=1)
    provider.stop_container()


def test_variables_and_the_local_port_are_those_of_the_call(cluster: LocalCluster) -> None:
    first = TangramProvider(command())
    free = int(first.start_container().rpartition(":")[2])
    first.stop_container()
    env = StandInClient.from_docker_image("", provider=first, port=free, env_vars={"WORD": "told"})
    assert env.step({"command": "echo $WORD"})["observation"]["text"] == "told\n"
    assert first.start_container(port=free).endswith(f":{free}")  # in place of the former one
    assert eventually(lambda: sessions_open(cluster) == 1)
    first.stop_container()


def test_a_provider_that_is_forgotten_leaves_no_session(cluster: LocalCluster) -> None:
    provider = TangramProvider(command())
    provider.start_container()
    assert sessions_open(cluster) == 1
    del provider
    assert eventually(lambda: sessions_open(cluster) == 0)


@pytest.mark.parametrize("options", [{"memory": 1}, {"network": "somewhere"}])
def test_an_option_that_is_not_known_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=min(options)):
        TangramProvider(**options)


# ---- the real client and server --------------------------------------------------------------

# what the core of OpenEnv imports
PACKAGES = ("websockets", "requests", "fastapi", "uvicorn", "pydantic", "httpx", "fastmcp")

APPLICATION = """
import subprocess

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Line(Action):
    command: str


class Text(Observation):
    text: str = ""


class Shell(Environment):
    def reset(self, seed=None, episode_id=None, **options):
        return Text()

    def step(self, action, timeout_s=None, **options):
        told = subprocess.run(["sh", "-c", action.command], capture_output=True, text=True)
        return Text(text=told.stdout, reward=float(told.returncode == 0), done=False)

    @property
    def state(self):
        return State()


app = create_fastapi_app(Shell, Line, Text)
"""

CLIENT_PROGRAM = """
import asyncio, json, sys
from openenv.core import GenericEnvClient
from tangram_hpc.hooks.openenv.container_provider import TangramProvider


async def main():
    provider = TangramProvider()
    env = await GenericEnvClient.from_docker_image(
        sys.argv[1], provider=provider, env_vars={"PYTHONPATH": "/app/packages"})
    told = []
    async with env:
        await env.reset()
        for line in ("echo kept > /app/file", "cat /app/file", "exit 3"):
            result = await env.step({"command": line})
            told.append([result.observation["text"], result.reward])
        session = provider.session
    session.closed.result(60)
    print(json.dumps(told))


asyncio.run(main())
"""


def openenv_image(folder: Path, python: str, packages: Path) -> Path:
    """Makes the file system of an image as OpenEnv's own have it: an interpreter named `python`,
    the environment in /app/env, and the packages that it needs."""
    paths = json.loads(subprocess.run(
        [python, "-c", "import json, sys, sysconfig; print(json.dumps([sys.executable, "
                       "sysconfig.get_path('stdlib')]))"],
        capture_output=True, text=True, check=True).stdout)
    interpreter, library = (Path(path).resolve() for path in paths)
    make_image(folder, (*PROGRAMS, "dirname", "head", "sed", "tail"))
    shutil.copy(interpreter, folder / "usr/bin/python")
    shutil.copytree(library, folder / library.relative_to("/"), ignore=shutil.ignore_patterns(
        "test", "idlelib", "__pycache__", "site-packages", "dist-packages", "config-*"))
    copy_libraries(folder, str(interpreter), *map(str, library.glob("lib-dynload/*.so")))
    shutil.copytree(packages, folder / "app/packages",
                    ignore=shutil.ignore_patterns("__pycache__", "pip", "setuptools"))
    server = folder / "app/env/server"
    server.mkdir(parents=True)
    (server / "__init__.py").touch()
    (server / "app.py").write_text(APPLICATION)
    (folder / "app/env/openenv.yaml").write_text(
        'spec_version: 1\nname: shell\ntype: space\nruntime: fastapi\napp: "server.app:app"  # it\n'
        "port: 8000\n")
    return folder


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_real_client_plays_an_episode_with_the_server_of_an_image(
        cluster: LocalCluster, tmp_path: Path) -> None:
    if why := reason_to_skip("bwrap"):
        pytest.skip(why)
    python = "/usr/bin/python3"  # its standard library is no link to another folder
    if subprocess.run([python, "-c", "import ensurepip"], check=False).returncode:
        pytest.skip(f"{python} has no ensurepip")
    programs = make_venv(tmp_path / "venv", python, PACKAGES, ("openenv-core==0.3.0",))
    packages = next((tmp_path / "venv/lib").glob("python3*/site-packages"))
    image = openenv_image(tmp_path / "image", python, packages)
    told = subprocess.run(
        [str(programs / "python"), "-c", CLIENT_PROGRAM, str(image)], capture_output=True,
        text=True, check=False, timeout=600, env=client_env(cluster.access))
    assert told.returncode == 0, told.stderr[-3000:]
    assert json.loads(told.stdout.splitlines()[-1]) == [["", 1.0], ["kept\n", 1.0], ["", 0.0]]
    assert eventually(lambda: sessions_open(cluster) == 0)
