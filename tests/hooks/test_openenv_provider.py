"""OpenEnv's container provider: the behaviours of every adapter over OpenEnv's messages."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from helpers.adapter_behaviours import (
    LIMIT_S,
    AdapterBehaviours,
    adapters_cluster,
    eventually,
    memory_taken,
    sessions_open,
)
from helpers.openenv_stand_in import SERVER, StandInClient

from tangram_hpc import LocalCluster
from tangram_hpc.errors import InvalidInput
from tangram_hpc.hooks.openenv.container_provider import SessionContainerProvider

__all__ = ["adapters_cluster"]

PORT = 8000


def command(port: int = PORT) -> str:
    return f"exec python3 -c {shlex.quote(SERVER)} {port} {LIMIT_S}"


class Episode:
    """An environment with its provider, or the error that its start raised."""

    def __init__(self, **options: Any) -> None:
        self.provider, self.error = SessionContainerProvider(command(), **options), ""
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
    provider = SessionContainerProvider("echo it breaks >&2; exit 3")
    url = provider.start_container()
    with pytest.raises(TimeoutError, match="log ends with: it breaks"):
        provider.wait_for_ready(url, timeout_s=1)
    provider.stop_container()
    with pytest.raises(RuntimeError, match="has ended"):
        provider.wait_for_ready(url, timeout_s=1)


def test_the_application_of_an_image_is_found_and_missed_by_its_name(
        cluster: LocalCluster) -> None:
    provider = SessionContainerProvider()
    url = provider.start_container()
    with pytest.raises(TimeoutError, match="name the server's command as cmd"):
        provider.wait_for_ready(url, timeout_s=1)
    provider.stop_container()


def test_variables_and_the_local_port_are_those_of_the_call(cluster: LocalCluster) -> None:
    first = SessionContainerProvider(command())
    free = int(first.start_container().rpartition(":")[2])
    first.stop_container()
    env = StandInClient.from_docker_image("", provider=first, port=free, env_vars={"WORD": "told"})
    assert env.step({"command": "echo $WORD"})["observation"]["text"] == "told\n"
    assert first.start_container(port=free).endswith(f":{free}")  # in place of the former one
    assert eventually(lambda: sessions_open(cluster) == 1)
    first.stop_container()


def test_a_provider_that_is_forgotten_leaves_no_session(cluster: LocalCluster) -> None:
    assert eventually(lambda: sessions_open(cluster) == 0)
    provider = SessionContainerProvider(command())
    provider.start_container()
    assert sessions_open(cluster) == 1
    del provider
    assert eventually(lambda: sessions_open(cluster) == 0)


def test_a_provider_is_closed_by_its_method_and_by_its_with_block(cluster: LocalCluster) -> None:
    """OpenEnv 0.10 has both in its `ContainerProvider`, for callers that know no more of it."""
    with SessionContainerProvider(command()) as provider:
        provider.wait_for_ready(provider.start_container(), LIMIT_S)
        assert sessions_open(cluster) == 1
    assert provider.session is None and eventually(lambda: sessions_open(cluster) == 0)
    provider.start_container()
    provider.close()
    provider.close()
    assert provider.session is None and eventually(lambda: sessions_open(cluster) == 0)


def test_files_and_variables_of_a_session_are_those_of_the_server(cluster: LocalCluster) -> None:
    provider = SessionContainerProvider(f"exec python3 server.py {PORT} {LIMIT_S}",
                                        files={"server.py": SERVER},
                                        env={"WORD": "told", "OTHER": "kept"})
    env = StandInClient.from_docker_image("", provider=provider, env_vars={"WORD": "newer"})
    assert env.step({"command": "echo $WORD $OTHER"})["observation"]["text"] == "newer kept\n"
    env.close()
    with pytest.raises(RuntimeError, match="no such file: /proc/nothing/here"):
        provider.start_container(files={"/proc/nothing/here": ""})
    assert eventually(lambda: sessions_open(cluster) == 0)


def test_a_container_that_waits_too_long_says_so(cluster: LocalCluster) -> None:
    with memory_taken(cluster) as mem_mib:
        provider = SessionContainerProvider(command(), mem=mem_mib, open_timeout_s=0.2)
        with pytest.raises(RuntimeError, match="tangram: the session was not opened in time"):
            provider.start_container()
    assert eventually(lambda: sessions_open(cluster) == 0)


@pytest.mark.parametrize("options", [{"memory": 1}, {"network": "somewhere"}])
def test_an_option_that_is_not_known_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=min(options)):
        SessionContainerProvider(**options)
